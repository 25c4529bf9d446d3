"""Writes a small Qwen4-Exp checkpoint that vLLM's CPU engine loads, and asks transformers for its
greedy tokens: `checkpoint.py FOLDER`.

The folder gets the checkpoint and REQUESTS.json: for each of serve.py's memory settings, prompts
with transformers' own continuations. A random model is often undecided between two tokens; a
prompt is kept only if at every step the best logit leads by a part of the logits' spread that BF16
does not move them by.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from flash_qsa.testing.tiny_models import tiny_text_model

OVERRIDES = {
    # vLLM's CPU kernel for gated delta nets has these head sizes alone; one head keeps the state,
    # and with it vLLM's page, small
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "num_hidden_layers": 2,
    # every token takes every expert: a router's near tie would decide more than rounding
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "ple_layer_ids": [],
    # vLLM's fused preparation has these sizes alone; without it vLLM needs FlashInfer
    "head_dim": 128,
    "indexer_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
NEW_TOKENS = 6
PAGE = 80
"""Tokens of a page under serve.py's "little": no fewer than vLLM asks for, a multiple of 16 whose
keys and values (1,024 bytes a token) are no smaller than the gated delta net's state: 80 on a CPU
with AVX-512's BF16 products, where vLLM keeps that state in FP32, 48 on others."""
LENGTHS = {
    "enough": (135, 67, 23, 5, 31),
    # serve.py counts their blocks: the first four fill one page and need a second while decoding
    "little": (PAGE - 1, PAGE - 2, PAGE - 3, PAGE - 4, 23),
}
LEAD = 0.15
TRIES = 200


def decisive_request(model, length: int, generator: torch.Generator) -> dict:
    """A random prompt of `length` tokens whose continuation is not a matter of rounding."""
    for _ in range(TRIES):
        prompt = torch.randint(3, 250, (1, length), generator=generator)
        ids = prompt
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
            best = logits.topk(2)
            if float(best.values[0] - best.values[1]) < LEAD * float(logits.std()):
                break
            ids = torch.cat((ids, best.indices[:1][None]), 1)
        else:
            return {"prompt": prompt[0].tolist(), "tokens": ids[0, length:].tolist()}
    raise RuntimeError(f"no decisive prompt of {length} tokens in {TRIES} tries")


@torch.no_grad()
def main(folder: Path) -> None:
    model = tiny_text_model(**OVERRIDES).to(torch.bfloat16)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    requests = {
        memory: [decisive_request(model, length, generator) for length in lengths]
        for memory, lengths in LENGTHS.items()
    }
    (folder / "REQUESTS.json").write_text(json.dumps(requests))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
