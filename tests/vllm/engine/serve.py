"""Generates with vLLM's engine: `serve.py FOLDER REQUESTS.json ANSWERS.json`.

FLASH_QSA_VLLM=0 in the environment leaves vLLM's own QSA in place. Engine arguments come from the
request file's neighbour, ENGINE.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path, requests_file: Path, answers_file: Path) -> None:
    from vllm import LLM, SamplingParams

    requests = json.loads(requests_file.read_text())
    arguments = json.loads((requests_file.parent / "ENGINE.json").read_text())
    engine = LLM(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", **arguments)
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=request["new_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=2,
        )
        for request in requests
    ]
    answers = []
    for _ in range(2):  # the second pass finds its prompts in the prefix cache
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        answers.append(
            [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "top": [
                        [[token, entry.logprob] for token, entry in step.items()]
                        for step in output.outputs[0].logprobs
                    ],
                    "cached": output.num_cached_tokens,
                }
                for output in outputs
            ]
        )
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    answers_file.write_text(json.dumps({"passes": answers, "metrics": metrics}))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
