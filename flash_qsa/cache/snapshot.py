"""RequestSnapshot: everything that the caches hold of one request, in one object or one file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from flash_qsa.cache.ledger import RequestState
from flash_qsa.cache.spec import CacheSpec
from flash_qsa.ops.fp8 import as_bytes
from flash_qsa.ops.prepare.api import Caches

PARTS = ("main", "compressed", "ring")


@dataclass(frozen=True)
class RequestSnapshot:
    """All state of one request, in rows: independent of pages, slots and capacities.

    Attributes:
        length: n, tokens of the request, which is also the next write position.
        raw_from: first position whose raw key the ring still held.
        geometry: what a cache must share to take the snapshot.
        tensors: "layers.<i>.main" [n, Hkv, 2·D], "layers.<i>.compressed" [n // C, Di] and
            "layers.<i>.ring" [n - raw_from, width] of every layer, and "positions", int64
            [n - raw_from], the logical positions of the ring rows. Rotary positions, where the
            model has them, are packed in the ring rows.
    """

    length: int
    raw_from: int
    geometry: Mapping[str, int | str | bool]
    tensors: Mapping[str, torch.Tensor]

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file (needs the safetensors package)."""
        from safetensors.torch import save_file

        header = {
            "length": self.length,
            "raw_from": self.raw_from,
            "geometry": dict(self.geometry),
        }
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, str(path), metadata={"flash_qsa": json.dumps(header)})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> RequestSnapshot:
        """Reads what `save` wrote.

        Raises:
            ValueError: a file that is not a snapshot.
        """
        from safetensors import safe_open

        with safe_open(str(path), framework="pt", device=str(device)) as file:
            header = (file.metadata() or {}).get("flash_qsa")
            if header is None:
                raise ValueError(f"{path}: not a flash-qsa snapshot, it has no header")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        fields = json.loads(header)
        return cls(fields["length"], fields["raw_from"], fields["geometry"], tensors)


def geometry_of(spec: CacheSpec) -> dict[str, int | str | bool]:
    """What two caches must share to exchange requests; page sizes and pools may differ."""
    return {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "index_head_dim": spec.index_head_dim,
        "compress_ratio": spec.compress_ratio,
        "stores_positions": spec.stores_positions,
        "dtype": str(spec.dtype),
        "main_dtypes": ",".join(str(dtype) for dtype in spec.main_dtypes),
        "compressed_dtype": str(spec.compressed_dtype),
    }


def require_complete(snapshot: RequestSnapshot, spec: CacheSpec) -> None:
    """Refuses a snapshot that lacks any part, or that another geometry wrote.

    Raises:
        ValueError: naming what is missing or differs.
    """
    expected = geometry_of(spec)
    for name, value in expected.items():
        if snapshot.geometry.get(name) != value:
            raise ValueError(
                f"snapshot: {name} is {snapshot.geometry.get(name)!r}, the cache has {value!r}"
            )
    length, raw_from, ratio = snapshot.length, snapshot.raw_from, spec.compress_ratio
    if not 0 <= raw_from <= length:
        raise ValueError(f"snapshot: raw_from {raw_from} is outside 0 … {length}, its length")
    if length % ratio and raw_from > length // ratio * ratio:
        raise ValueError(
            f"snapshot: the open group begins at {length // ratio * ratio}, raw keys are held from "
            f"{raw_from} on"
        )
    rows = length - raw_from
    shapes = {"positions": ((rows,), torch.int64)}
    for layer, main_dtype in enumerate(spec.main_dtypes):
        shapes |= {
            f"layers.{layer}.main": (
                (length, spec.num_kv_heads, 2 * spec.head_dim),
                main_dtype,
            ),
            f"layers.{layer}.compressed": (
                (length // ratio, spec.index_head_dim),
                spec.compressed_dtype,
            ),
            f"layers.{layer}.ring": ((rows, spec.ring_width), spec.dtype),
        }
    missing = sorted(set(shapes) - set(snapshot.tensors))
    if missing:
        raise ValueError(
            f"snapshot: partial, {missing} are missing; keys and values without the indexer's "
            "state (compressed keys, raw-key ring, positions) cannot be continued"
        )
    for name, (shape, dtype) in shapes.items():
        tensor = snapshot.tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"snapshot: {name} should be {dtype} {list(shape)}, is {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    positions = snapshot.tensors["positions"].tolist()
    if positions != list(range(raw_from, length)):
        raise ValueError(
            f"snapshot: ring rows of positions {raw_from} … {length - 1} expected, got {positions}"
        )


def read(
    spec: CacheSpec,
    layers: Sequence[Caches],
    state: RequestState,
    device: torch.device | str | None = None,
) -> RequestSnapshot:
    """Copies a request's state out of the caches, to `device` (the caches' own by default)."""
    cells = _Cells.of(spec, state, state.raw_from, layers[0].main.device)
    tensors = {"positions": cells.raw}
    for index, layer in enumerate(layers):
        main, compressed = as_bytes(layer.main), as_bytes(layer.compressed)
        parts = (
            main[cells.token_page, :, cells.token_offset].view(layer.main.dtype),
            compressed[cells.block_page, cells.block_offset, 0].view(layer.compressed.dtype),
            layer.ring[state.ring_slot, cells.raw % spec.ring_capacity, 0],
        )
        tensors |= {f"layers.{index}.{part}": rows for part, rows in zip(PARTS, parts)}
    if device is not None:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return RequestSnapshot(state.length, state.raw_from, geometry_of(spec), tensors)


def write(
    saved: RequestSnapshot, spec: CacheSpec, layers: Sequence[Caches], state: RequestState
) -> int:
    """Writes a complete snapshot to the pages and slot of `state`; returns the first raw key kept.

    A narrower ring keeps the newest rows, which include the open group.
    """
    device = layers[0].main.device
    raw_from = max(saved.raw_from, saved.length - spec.ring_capacity)
    cells = _Cells.of(spec, state, raw_from, device)
    for index, layer in enumerate(layers):
        main, compressed, ring = (
            as_bytes(saved.tensors[f"layers.{index}.{part}"]).to(device) for part in PARTS
        )
        as_bytes(layer.main)[cells.token_page, :, cells.token_offset] = main
        as_bytes(layer.compressed)[cells.block_page, cells.block_offset, 0] = compressed
        kept = ring[raw_from - saved.raw_from :]
        layer.ring[state.ring_slot, cells.raw % spec.ring_capacity, 0] = kept
    return raw_from


class _Cells(NamedTuple):
    """Where a request's rows are: int64 index tensors, and the positions of its ring rows."""

    token_page: torch.Tensor
    token_offset: torch.Tensor
    block_page: torch.Tensor
    block_offset: torch.Tensor
    raw: torch.Tensor

    @classmethod
    def of(
        cls, spec: CacheSpec, state: RequestState, raw_from: int, device: torch.device
    ) -> _Cells:
        table = torch.tensor(state.pages, dtype=torch.int64, device=device)
        token = torch.arange(state.length, device=device)
        block = torch.arange(state.length // spec.compress_ratio, device=device)
        return cls(
            table[token // spec.page_size],
            token % spec.page_size,
            table[block // spec.blocks_per_page],
            block % spec.blocks_per_page,
            torch.arange(raw_from, state.length, device=device),
        )
