"""One QSA layer with the real head shapes against transformers' stock layer.

    python benchmarks/layer.py [--device cuda] [--tokens 4096] [--repeats 3] [--out FILE]

Both layers have the same weights and the same input. Before any time is printed, every row must
select the tokens that stock selects, unless two scores at its cut are equal up to rounding; sampled
rows of our attention must keep the bound of float64 attention over the same tokens, and stock's are
compared with it as well; in FP32 all outputs must agree. Each side runs as its users run it: stock
through its own forward, ours under the name "qsa"; FP32 on a CPU, BF16 on a GPU. A run ends when
the device is done. Besides the layer, the part that differs is timed alone: everything but the
projections, which are the same matrix products on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from flash_qsa.testing.compare import attention_truth, unit_roundoff, within_bound

TOLERANCE = 1e-5
"""How far a row's FP32 outputs may lie apart, as a share of its largest."""

SAMPLED = 64
"""Rows compared with float64."""

NEAR = 5e-5
"""Scores that differ by less, as a share of the row's best, are equal up to FP32 rounding: two sums
of 132 products each, whose terms' magnitudes add up to three times the best score."""

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def build(tokens: int, hidden: int, budget: int, implementation: str):
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
        indexer_budget=budget,
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


@contextlib.contextmanager
def watched_cuts() -> Iterator[list[torch.Tensor]]:
    """Inside, stock prefers the lower of equally scored blocks, as our ops do, and the list gets a
    row's answer to "do the scores on both sides of the cut differ by rounding alone?".

    Rows without a complete block score nothing and leave no answer.
    """
    original = torch.Tensor.topk
    near: list[torch.Tensor] = []

    def topk(scores, k, dim=-1, **options):
        if not scores.is_floating_point():
            return original(scores, k, dim, **options)
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        cut = values[k - 1 : k + 1]
        near.append(((cut[0] - cut[-1]).abs() < NEAR * values[0]) & (cut[0] != cut[-1]))
        return torch.return_types.topk((values[:k], indices[:k]))

    torch.Tensor.topk = topk
    try:
        yield near
    finally:
        torch.Tensor.topk = original


@dataclass
class Pass:
    """What one side computed: output [T, hidden], the gated attention [T, Hq, D] before the last
    projection, and which tokens each row selected, bool [T, T]."""

    output: torch.Tensor
    attention: torch.Tensor
    selected: torch.Tensor


def stock_pass(module: torch.nn.Module, call: Callable[[], torch.Tensor]) -> Pass:
    masks: list[torch.Tensor] = []
    hook = module.indexer.register_forward_hook(lambda m, args, out: masks.append(out))
    output, attention = with_attention(module, call)
    hook.remove()
    return Pass(output, attention, masks[0][0, 0])


def our_pass(module: torch.nn.Module, call: Callable[[], torch.Tensor]) -> tuple[Pass, dict]:
    """Our side, and the arguments that it calls `sparse_attention` with, by name."""
    from flash_qsa.integrations.transformers import attention as integration

    seen: list[inspect.BoundArguments] = []
    genuine = integration.sparse_attention

    def sparse_attention(*args, **kwargs):
        seen.append(inspect.signature(genuine).bind(*args, **kwargs))
        return genuine(*args, **kwargs)

    with mock.patch.object(integration, "sparse_attention", sparse_attention):
        output, attention = with_attention(module, call)
    given = seen[0].arguments
    ids, position, ratio = given["block_ids"].long(), given["positions"], given["compress_ratio"]
    rows = ids.shape[0]
    blocks = torch.zeros(rows, rows // ratio + 1, dtype=torch.bool, device=ids.device)
    blocks.scatter_(1, ids.where(ids >= 0, rows // ratio), True)
    blocks[:, -1] = False  # where absent ids went
    token = torch.arange(rows, device=ids.device)
    tail = (position + 1) // ratio * ratio
    opened = (token >= tail[:, None]) & (token <= position[:, None])
    return Pass(output, attention, blocks[:, token // ratio] | opened), given


def with_attention(
    module: torch.nn.Module, call: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a call, and what its last projection was given, by head."""
    seen: list[torch.Tensor] = []
    hook = module.o_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    output = call()[0]
    hook.remove()
    return output, seen[0][0].unflatten(-1, (-1, module.head_dim))


def differing_rows(ours: torch.Tensor, stock: torch.Tensor, near: torch.Tensor) -> int:
    """Rows that select otherwise for a near-tie; exits if a row does for anything else."""
    other = (ours != stock).any(1)
    if (other & ~near).any():
        raise SystemExit(f"{int((other & ~near).sum())} rows select otherwise: not timed")
    return int(other.sum())


def bound_shares(
    module: torch.nn.Module, hidden: torch.Tensor, given: dict, sides: Sequence[Pass]
) -> list[float]:
    """The worst error of each side on sampled rows, as a share of the bound of float64 attention
    over the tokens that our rows select.

    Both sides round attention, sigmoid and product to the dtype: three roundoffs beside the bound.
    """
    query, (keys, values) = given["query"], given["kv_cache"]
    rows = torch.linspace(0, query.shape[0] - 1, SAMPLED).long().unique().to(query.device)
    rows = rows[(sides[0].selected[rows] == sides[1].selected[rows]).all(1)]
    tokens = [sides[0].selected[row].nonzero().flatten() for row in rows]
    cells = [torch.stack((torch.zeros_like(token), token), -1) for token in tokens]
    truth = attention_truth(query[rows], keys, values, tokens, cells, given["scale"])
    heads = module.q_proj(hidden)[0].unflatten(-1, (query.shape[1], -1))
    factor = torch.sigmoid(heads.chunk(2, -1)[1][rows].double())
    out, u = truth.out * factor, unit_roundoff(query.dtype)
    bound = truth.bound * factor * (1 + 3 * u) + 3 * u * out.abs()
    return [within_bound(side.attention[rows], out, bound).worst_ratio for side in sides]


def compared_outputs(ours: torch.Tensor, stock: torch.Tensor, differing: int) -> None:
    """Exits if more FP32 outputs [T, hidden] disagree than rows select otherwise."""
    apart = (ours - stock).abs().amax(-1)
    # negated, so that NaN differs
    wrong = int((~(apart <= TOLERANCE * stock.abs().amax(-1))).sum())
    if wrong > differing:
        raise SystemExit(f"outputs differ in {wrong} rows: not timed")


def measured(
    call: Callable[[], object], repeats: int, device: torch.device
) -> tuple[list[float], object]:
    """Seconds of each run, and the last result."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times, result = [], None
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        result = call()
        wait()
        times.append(time.perf_counter() - began)
    return times, result


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--budget", type=int, default=2048, help="tokens that a row selects")
    parser.add_argument("--repeats", type=int, default=3, help="of stock; on a GPU ours ten times")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--out", type=Path, help="append a JSON line a side here as well")
    options = parser.parse_args(arguments)
    device, dtype = torch.device(options.device), DTYPES[options.device]
    if device.type == "cpu":
        torch.set_num_threads(options.threads)

    ids = torch.randint(3, 259, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    calls, modules = {}, {}
    for name, implementation in (("flash-qsa", "qsa"), ("stock", "sdpa")):
        model = build(options.tokens, options.hidden, options.budget, implementation)
        module, args, kwargs = captured_call(model.to(device, dtype), ids.to(device))
        calls[name] = lambda module=module, args=args, kwargs=kwargs: module(*args, **kwargs)[0]
        hidden = args[0] if args else kwargs["hidden_states"]
        modules[name] = module
    with watched_cuts() as answers:
        stock = stock_pass(modules["stock"], calls["stock"])
    ours, given = our_pass(modules["flash-qsa"], calls["flash-qsa"])
    near = torch.zeros(options.tokens, dtype=torch.bool, device=device)
    near[options.tokens - len(answers) :] = torch.stack(answers)
    differing = differing_rows(ours.selected, stock.selected, near)
    shares = bound_shares(module, hidden, given, (ours, stock))
    print(f"error as a share of float64's bound: flash-qsa {shares[0]:.2f}, stock {shares[1]:.2f}")
    if shares[0] > 1:
        raise SystemExit(f"our attention is off by {shares[0]:.1f} times its bound: not timed")
    if dtype == torch.float32:
        compared_outputs(ours.output, stock.output, differing)

    projections = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    inputs = [
        hidden
        if m.in_features == options.hidden
        else hidden.new_ones(1, options.tokens, m.in_features)
        for m in projections
    ]
    often = options.repeats * (10 if device.type == "cuda" else 1)
    both, _ = measured(lambda: [m(x) for m, x in zip(projections, inputs)], often, device)
    runs = {
        "flash-qsa": measured(calls["flash-qsa"], often, device)[0],
        "stock": measured(calls["stock"], options.repeats, device)[0],
    }
    shared, mine, theirs = median(both), median(runs["flash-qsa"]), median(runs["stock"])
    rest = [max(value - shared, 1e-9) for value in (theirs, mine)]
    print(f"{options.tokens} tokens, hidden {options.hidden}, {device.type}, {str(dtype)[6:]}")
    print(f"rows that select otherwise for a near-tie: {differing} of {int(near.sum())}")
    print(f"layer: stock {theirs:.3f} s, flash-qsa {mine:.4f} s: {theirs / mine:.1f}x")
    print(f"projections alone, the same on both sides: {shared:.4f} s")
    print(f"everything else: {rest[0] / rest[1]:.1f}x")
    if options.out:
        record(options, runs)


def record(options: argparse.Namespace, runs: dict[str, list[float]]) -> None:
    """Appends one JSON line a side, with the fields of `flash-qsa bench`."""
    from flash_qsa.cli.bench import machine_facts
    from flash_qsa.testing.measure.timing import Times

    machine = machine_facts(torch.device(options.device))
    impls = {"flash-qsa": "flash-qsa", "stock": "transformers stock"}
    tokens = f"{options.tokens // 1024}k" if options.tokens % 1024 == 0 else options.tokens
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        for name, seconds in runs.items():
            row = {
                "op": "layer",
                "workload": f"transformers-layer-{tokens}",
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
