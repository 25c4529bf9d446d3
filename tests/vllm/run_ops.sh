#!/usr/bin/env bash
# Compares this tree with vLLM 0.33.0's own QSA layer, metadata and kernels, in Triton's interpreter.
#   usage: run_ops.sh [pytest arguments]
# The environment is created on first use in .venv-vllm-ops (VLLM_OPS_VENV names another place).
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${VLLM_OPS_VENV:-$root/.venv-vllm-ops}
bash "$here/environments/make_env.sh" ops "$venv"

export VLLM_TARGET_DEVICE=cpu CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 FLASH_QSA_TIER=ops
export PYTHONPATH=$here/environments/site OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$root"
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/vllm/ops "$@"
