"""Generates with vLLM's engine: `serve.py FOLDER MEMORY ANSWERS.json`, on checkpoint.py's requests.

FLASH_QSA_VLLM=0 in the environment leaves vLLM's own QSA in place. The engine is small on purpose:
prompts are prefilled in chunks and four of five requests run at a time. With "enough" memory a
second pass finds prompts in the prefix cache; with "little", requests are preempted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ENGINE = {
    "max_model_len": 192,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
}
MEMORY = {
    "enough": {"num_gpu_blocks_override": 16},
    "little": {"num_gpu_blocks_override": 15, "block_size": 32},  # pages of half the size
}


def main(folder: Path, memory: str, answers_file: Path) -> None:
    from vllm import LLM, SamplingParams

    requests = json.loads((folder / "REQUESTS.json").read_text())
    engine = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", **ENGINE, **MEMORY[memory]
    )
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    sampling = [
        SamplingParams(
            temperature=0.0, max_tokens=len(request["tokens"]), ignore_eos=True, detokenize=False
        )
        for request in requests
    ]
    passes = []
    for _ in range(2):
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        passes.append([list(output.outputs[0].token_ids) for output in outputs])
    counters = {
        metric.name: metric.value
        for metric in engine.get_metrics()
        if metric.name in ("vllm:num_preemptions", "vllm:prefix_cache_hits")
    }
    answers_file.write_text(json.dumps({"passes": passes, "counters": counters}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
