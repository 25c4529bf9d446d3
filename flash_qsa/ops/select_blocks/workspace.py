"""What a selection holds while it scores: gathered keys, scores, group maxima and lists."""

from __future__ import annotations

import torch

from flash_qsa.ops.select_blocks import tiles
from flash_qsa.ops.select_blocks.kernel_dense import gather_kernel
from flash_qsa.plan import BatchPlan

ALIGNMENT = 128
MAX_WORDS = 2**31 - 1
"""Words that the prefill scorer addresses inside a workspace."""


class Workspace:
    """Scores, group maxima and lists of as many rows as fit, behind `keys_size` bytes of keys.

    One spare row of scores and maxima takes what the prefill scorer writes for rows that need none.
    """

    def __init__(
        self,
        given: int | torch.Tensor,
        width: int,
        select: tiles.SelectTiles | tiles.CudaSelectTiles,
        rows: int,
        top_k: int,
        device: torch.device,
        keys_size: int = 0,
    ) -> None:
        pair = 2 * tiles.BLOCK_N
        self.widths = (
            -(-width // pair) * pair,
            -(-max(select.units, pair // select.group) // 16) * 16 if select.group > 1 else 0,
            select.scratch(top_k),
        )
        row_bytes = 4 * sum(self.widths)
        buffer = given if isinstance(given, torch.Tensor) else None
        skip = 0 if buffer is None else -buffer.data_ptr() % ALIGNMENT
        room = (given if buffer is None else buffer.numel()) - skip - keys_size
        fit = min(room // row_bytes, MAX_WORDS // max(self.widths)) - 1
        self.rows = min(rows, fit)
        if self.rows < 1:
            raise ValueError(
                f"workspace: rows of {width} blocks need {2 * row_bytes + ALIGNMENT} bytes, "
                f"got {room + skip}"
            )
        if self.rows < rows and self.rows > 64:
            self.rows -= self.rows % 64
        size = keys_size + (self.rows + 1) * row_bytes
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.keys = buffer[skip : skip + keys_size]
        words = buffer[skip + keys_size : skip + size].view(torch.int32)
        parts = words.split([(self.rows + 1) * columns for columns in self.widths])
        self.scores, self.maxima, self.scratch = parts


class GatheredKeys:
    """Contiguous compressed keys of the requests that prefill: [requests, width, DIM_PAD]."""

    def __init__(
        self,
        cache: torch.Tensor,
        page_table: torch.Tensor,
        width: int,
        page: int,
        phase: tiles.Phase,
        dense: tiles.DenseTiles,
        product: torch.dtype,
        plan: BatchPlan | None,
    ) -> None:
        self.cache, self.page_table, self.width, self.page = cache, page_table, width, page
        requests = page_table.shape[0]
        # Requests whose rows lie before this phase need no keys here. A phase from the first row
        # on may be of decodes: their query length can be too long for the decode schedule.
        self.begin = min(plan.num_decodes, requests) if phase.begin else 0
        self.count = requests - self.begin
        pair = 2 * tiles.BLOCK_N
        self.padded = -(-width // pair) * pair
        self.stride = self.padded * dense.dim_pad
        self.dim_pad = dense.dim_pad
        self.dtype = product
        self.size = self.count * self.stride * product.itemsize
        self.lengths = None if plan is None else plan.seq_lens.contiguous()
        self.ratio = 1 if plan is None else plan.compress_ratio

    def fill(self, space: Workspace, e4m3: int) -> None:
        """Copies them into the workspace; e4m3 as `kernel_score.operand` takes it."""
        self.tensor = space.keys.view(self.dtype)
        cache, table = self.cache, self.page_table
        blocks = self.padded // tiles.BLOCK_N
        gather_kernel[(blocks * self.count,)](
            cache,
            table,
            table if self.lengths is None else self.lengths,
            self.tensor,
            cache.stride(0),
            cache.stride(1),
            table.stride(0),
            self.stride,
            self.begin,
            self.width,
            cache.shape[0],
            table.shape[1],
            blocks,
            cache.shape[1],
            RATIO=self.ratio,
            HAS_LENGTHS=self.lengths is not None,
            HEAD_DIM=cache.shape[3],
            DIM_PAD=self.dim_pad,
            PAGE_BLOCKS=self.page,
            BLOCK_N=tiles.BLOCK_N,
            E4M3=e4m3,
            num_warps=4,
        )
