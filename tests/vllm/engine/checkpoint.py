"""Writes a small Qwen4-Exp checkpoint that vLLM's CPU engine loads, and asks transformers for its
greedy tokens: `checkpoint.py FOLDER REQUESTS.json TOKENS.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from flash_qsa.testing.tiny_models import tiny_text_model

OVERRIDES = {
    # vLLM's CPU kernel for gated delta nets has these head sizes alone
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 2,
    "ple_layer_ids": [],
    # vLLM's fused preparation has these sizes alone; without it vLLM needs FlashInfer
    "head_dim": 128,
    "indexer_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}


def main(folder: Path, requests: Path, tokens: Path) -> None:
    model = tiny_text_model(**OVERRIDES).to(torch.bfloat16)
    model.save_pretrained(folder)
    answers = []
    for request in json.loads(requests.read_text()):
        ids = torch.tensor([request["prompt"]])
        out = model.generate(
            ids, max_new_tokens=request["new_tokens"], do_sample=False, eos_token_id=None
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    tokens.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
