"""Generates with vLLM's engine: `serve.py FOLDER MEMORY ANSWERS.json`, on checkpoint.py's requests.

FLASH_QSA_VLLM=0 in the environment leaves vLLM's own QSA in place. The engine is small on purpose:
four of five requests run at a time. With "enough" memory prompts are prefilled in chunks and a
second pass finds some in the prefix cache. With "little", requests must be preempted:

* a request holds a block for each page of its tokens, one for its raw-key ring and one for its
  gated delta net's state; block 0 is nobody's, which leaves 13 of 14
* the first step prefills four prompts of almost a page: 4 · (1 + 1 + 1) = 12 blocks
* each of the four crosses into its second page before its last token: 4 · (2 + 1 + 1) = 16 blocks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from checkpoint import PAGE

ENGINE = {
    "max_model_len": 192,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
}
MEMORY = {
    "enough": {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 96},
    "little": {
        "num_gpu_blocks_override": 14,
        "block_size": PAGE,  # no less than vLLM asks for on any CPU: 48 or 80
        "max_num_batched_tokens": 4 * PAGE,
    },
}


def main(folder: Path, memory: str, answers_file: Path) -> None:
    from vllm import LLM, SamplingParams

    requests = json.loads((folder / "REQUESTS.json").read_text())[memory]
    engine = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", **ENGINE, **MEMORY[memory]
    )
    page = engine.llm_engine.vllm_config.cache_config.block_size
    if memory == "little" and page != PAGE:
        raise RuntimeError(f"pages of {page} tokens, the requests are made for pages of {PAGE}")
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
