"""One QSA layer with the real head shapes against transformers' stock layer, on the CPU.

    python benchmarks/cpu_layer.py [--tokens 4096] [--hidden 2560] [--repeats 3] [--out FILE]

Both layers have the same weights and the same input, and their outputs must agree before any time
is printed. Each side runs as its users run it: stock through its own forward, ours under the name
"qsa". Besides the layer, the part that differs is timed alone: everything but the projections,
which are the same matrix products on both sides.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch


def build(tokens: int, hidden: int, implementation: str):
    """A bare model of one QSA layer with Qwen3.8-Flash-Next's heads; weights do not depend on
    the implementation."""
    import flash_qsa.hf  # noqa: F401 - registers "qsa"
    from flash_qsa.testing.tiny_models import tiny_text_model

    return tiny_text_model(
        attn_implementation=implementation,
        hidden_size=hidden,
        num_hidden_layers=1,
        full_attention_interval=1,
        num_attention_heads=24,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=max(tokens, 4096),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
        indexer_n_heads=4,
        indexer_head_dim=128,
        indexer_budget=2048,
        ple_layer_ids=[],
    )


def captured_call(model, ids: torch.Tensor) -> tuple[torch.nn.Module, tuple, dict]:
    """The attention module of the model's only layer and the arguments that it is called with."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextAttention

    attention = next(m for m in model.modules() if isinstance(m, Qwen4ExpTextAttention))
    seen: list[tuple[tuple, dict]] = []

    class Reached(Exception):
        pass

    def keep(module, args, kwargs):
        seen.append((args, kwargs))
        raise Reached

    hook = attention.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model(input_ids=ids, use_cache=False)
    except Reached:
        pass
    finally:
        hook.remove()
    return attention, *seen[0]


def measured(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each run."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append the JSON line here as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    ids = torch.randint(3, 259, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    calls, outputs = {}, {}
    for name, implementation in (("flash-qsa", "qsa"), ("stock", "sdpa")):
        module, args, kwargs = captured_call(
            build(options.tokens, options.hidden, implementation), ids
        )
        calls[name] = lambda module=module, args=args, kwargs=kwargs: module(*args, **kwargs)[0]
        outputs[name] = calls[name]()
        hidden = args[0] if args else kwargs["hidden_states"]
    difference = (outputs["flash-qsa"] - outputs["stock"]).abs().amax(-1)[0]
    wrong = difference > 1e-5 * outputs["stock"].abs().max()
    # One block in 2^4 scores zero on all four heads, and zeros tie. They reach the cut only while
    # nearly everything visible is selected: there, and nowhere else, stock may choose otherwise.
    visible = (torch.arange(options.tokens) + 1) // 4
    tied = (visible > 512) & (visible < 600)
    differing = int(wrong.sum())
    if (wrong & ~tied).any():
        raise SystemExit(f"outputs differ in {int((wrong & ~tied).sum())} rows: not timed")

    projections = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    inputs = [
        hidden
        if m.in_features == options.hidden
        else hidden.new_ones(1, options.tokens, m.in_features)
        for m in projections
    ]
    shared = median(measured(lambda: [m(x) for m, x in zip(projections, inputs)], options.repeats))
    runs = {name: measured(call, options.repeats) for name, call in calls.items()}
    ours, stock = median(runs["flash-qsa"]), median(runs["stock"])
    rest = [max(value - shared, 1e-9) for value in (stock, ours)]
    print(f"{options.tokens} tokens, hidden {options.hidden}, {options.threads} threads, FP32")
    print(f"rows that differ beyond 1e-5 (exact ties at the cut): {differing}")
    print(f"layer: stock {stock:.2f} s, flash-qsa {ours:.2f} s: {stock / ours:.1f}x")
    print(f"projections alone, the same on both sides: {shared:.2f} s")
    print(f"everything else: {rest[0] / rest[1]:.1f}x")
    if options.out:
        record(options, runs)


def record(options: argparse.Namespace, runs: dict[str, list[float]]) -> None:
    """Appends one JSON line a side, with the fields of `flash-qsa bench`."""
    from flash_qsa.cli.bench import machine_facts
    from flash_qsa.testing.measure.timing import Times

    machine = machine_facts(torch.device("cpu"))
    impls = {"flash-qsa": "flash-qsa reference", "stock": "transformers stock"}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        for name, seconds in runs.items():
            row = {
                "op": "layer",
                "workload": f"cpu-layer-{options.tokens}-hidden-{options.hidden}",
                "impl": impls[name],
                **vars(Times.of([value * 1e6 for value in seconds])),
                "floor_us": None,
                "rows": options.tokens,
                "context": options.tokens,
                "batch": 1,
                "overlap": None,
                **machine,
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
