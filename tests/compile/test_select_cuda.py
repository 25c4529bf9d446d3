"""select.cu without a GPU: compiled by NVRTC for every target, and run on the CPU.

Claims:
    every specialisation that a step can launch compiles for every NVIDIA target from sm_80 on, fits
    it and spills nothing;
    its threads, run as fibers in a random order, give the specification's ids for hostile rows:
    ties, NaN, equal scores, clusters, short rows, candidates that do not fit, every K;
    words outside of a row's candidates are never read into a result, and nothing but the row's
    output is written.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from flash_qsa import ops
from flash_qsa.launches import record
from flash_qsa.ops import nvrtc
from flash_qsa.ops.select_blocks import selector, tiles
from flash_qsa.ops.select_blocks.reference import select_from_scores
from flash_qsa.targets import TARGETS
from flash_qsa.testing.compiling import compile_launch

NEWER = [name for name, target in TARGETS.items() if target.capability >= (8, 0)]
needs_nvrtc = pytest.mark.skipif(
    nvrtc.obstacle("sm_90") is not None, reason=str(nvrtc.obstacle("sm_90"))
)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

ROW = tiles.CudaSelectTiles(1, 1024, 64, 0, 128, 1)
WIDE_ROW = tiles.CudaSelectTiles(1, 2048, 64, 0, 256, 1)
FOUR = tiles.CudaSelectTiles(4, 1024, 8, 128, 128, 1)
SIXTEEN = tiles.CudaSelectTiles(16, 512, 16, 64, 64, 1)
COARSE = tiles.CudaSelectTiles(64, 512, 8, 512, 128, 1)
GARBAGE, NAN_WORD, HIDDEN = 0x7FFFFFFF, -7, -(2**31)


@functools.cache
def on_cpu(select: tiles.CudaSelectTiles, top_k: int, has_first: bool, folder: Path):
    """run(arguments, rows, seed) of select.cu, specialised and compiled by g++."""
    constants = selector.macros(select, top_k, has_first)
    program = f"""
        #include "{Path(__file__).with_name("cuda_on_cpu.h")}"
        #include "{selector.select_cuda.path}"
        static Arguments arguments;
        extern "C" void run(const Arguments *given, int rows, unsigned seed) {{
          std::mt19937 random(seed);
          arguments = *given;
          for (int row = 0; row < rows; row++) {{
            fibers::run_block([] {{ select_blocks_cuda(arguments); }}, row, random);
          }}
        }}"""
    name = folder / ("_".join(map(str, constants.values())) + ".so")
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    options += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-shared", "-fPIC"]
    options += [f"-D{macro}={value}" for macro, value in constants.items()]
    done = subprocess.run(
        ["g++", *options, "-x", "c++", "-", "-o", str(name)],
        input=program,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(name)).run


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("select_cuda")


def words_of(scores: torch.Tensor) -> torch.Tensor:
    """What the scorer writes; NaN as some negative word."""
    return torch.where(scores.isnan(), NAN_WORD, (scores + 0.0).view(torch.int32))


def grouped(words, visible, first, group):
    """Maxima of groups of candidates, garbage for groups without one."""
    rows, width = words.shape
    ids = torch.arange(width)
    candidate = (ids >= first[:, None]) & (ids < visible[:, None])
    count = -(-width // group)
    padded = torch.full((rows, count * group), HIDDEN, dtype=torch.int32)
    padded[:, :width] = torch.where(candidate, words, HIDDEN)
    maxima = padded.view(rows, count, group).amax(-1)
    return torch.where(maxima == HIDDEN, GARBAGE, maxima)


def check(folder, select, top_k, scores, visible, first=None, requests=None, seed=1):
    """Runs select.cu over the rows and compares with the specification."""
    rows, width = scores.shape
    visible = torch.tensor(visible, dtype=torch.int32)
    start = torch.zeros_like(visible) if first is None else torch.tensor(first).int()
    requests = torch.zeros_like(visible) if requests is None else torch.tensor(requests).int()
    ids = torch.arange(width)
    bottom, words = start.clamp(min=0), words_of(scores)
    candidate = (ids >= bottom[:, None]) & (ids < visible[:, None])
    columns = -(-width // 128) * 128
    held = torch.full((rows, columns), GARBAGE, dtype=torch.int32)
    held[:, :width] = torch.where(candidate, words, GARBAGE)
    maxima = grouped(words, visible, bottom, select.group)
    units = torch.full((rows, -(-maxima.shape[1] // 16) * 16), GARBAGE, dtype=torch.int32)
    units[:, : maxima.shape[1]] = maxima
    out = torch.full((rows, top_k + 2), GARBAGE, dtype=torch.int32)
    tensors = (held, units, requests, visible, start, out)
    arguments = struct.pack(
        selector.select_cuda.layout,
        *(tensor.data_ptr() for tensor in tensors),
        held.stride(0),
        units.stride(0),
        out.stride(0),
        0,
        width,
        1,
        seed % 2,
    )
    on_cpu(select, top_k, first is not None, folder)(arguments, rows, seed)
    known = torch.where((requests >= 0) & (requests < 1), visible, 0)
    want = torch.full((rows, top_k), -1, dtype=torch.int32)
    for row in range(rows):
        seen, begin = int(known[row]), int(bottom[row])
        if min(seen, width) - begin <= top_k:
            run = torch.arange(begin, max(seen, begin))[:top_k]
            want[row, : len(run)] = run
        else:
            one = slice(row, row + 1)
            want[one] = select_from_scores(scores[one], visible[one], top_k, bottom[one])
    wrong = (out[:, :top_k] != want).any(1).nonzero().flatten().tolist()
    assert not wrong, f"row {wrong[0]}: {out[wrong[0]].tolist()}, want {want[wrong[0]].tolist()}"
    assert (out[:, top_k:] == GARBAGE).all()


def hostile(width: int) -> torch.Tensor:
    """Rows of scores: one distribution each."""
    generator = torch.Generator().manual_seed(3)

    def uniform():
        return torch.rand(width, generator=generator)

    normal = torch.randn(4, width, generator=generator).relu().sum(0)
    ramp = torch.arange(width).float()
    nan = float("nan")
    return torch.stack(
        [
            normal,
            torch.zeros(width),
            torch.full((width,), 1.5),
            torch.full((width,), nan),
            torch.where(uniform() < 0.7, nan, normal),
            torch.where(uniform() < 0.95, 0.0, normal),
            torch.where(uniform() < 0.5, 2.0, 1.0),
            (uniform() * 4).floor(),
            1 + uniform() * 2**-16,
            torch.exp2(uniform() * 250 - 125),
            torch.where(ramp == width // 2, float("inf"), normal * 1e-30),
            ramp,
            ramp.flip(0),
            torch.where(ramp < width // 3, 3.0, normal * 1e-3),
            torch.where(ramp % 97 == 5, float("inf"), nan),
            (ramp // 64 % 8) + (ramp % 64 < 2) * 1e-6,
            torch.where(uniform() < 0.3, 1e-42, 0.0),
        ]
    )


@needs_compiler
@pytest.mark.parametrize(
    "select, top_k, width",
    (
        (ROW, 48, 1024),
        (ROW, 500, 1001),
        (WIDE_ROW, 1, 1537),
        (FOUR, 48, 2500),
        (FOUR, 300, 4096),
        (SIXTEEN, 48, 5003),
        (SIXTEEN, 1, 8192),
        (COARSE, 64, 30_000),
    ),
    ids=lambda value: f"group{value.group}" if hasattr(value, "group") else str(value),
)
@pytest.mark.bug("O-01", "O-02", "O-04", "O-05")
def test_hostile_rows_select_as_specified(folder, select, top_k, width):
    scores = hostile(width)
    rows = scores.shape[0]
    check(folder, select, top_k, scores, [width] * rows)
    generator = torch.Generator().manual_seed(4)
    visible = torch.randint(top_k + 1, width + 1, (rows,), generator=generator).tolist()
    first = torch.randint(-3, width // 4, (rows,), generator=generator).tolist()
    check(folder, select, top_k, scores, visible, first, seed=2)


@needs_compiler
@pytest.mark.parametrize("select", (ROW, FOUR, SIXTEEN), ids=("row", "four", "sixteen"))
@pytest.mark.bug("O-01")
def test_every_length_and_unknown_requests(folder, select):
    scores = hostile(1000)[[0, 6, 8] * 5]
    visible = [-1, 0, 1, 47, 48, 49, 50, 63, 64, 65, 500, 999, 1000, 1200, 700]
    check(folder, select, 48, scores, visible, requests=[0] * 13 + [0, 1])
    first = [-1, 3, 0, 5, 1, 1, 1, 20, 15, 18, 450, 951, 951, 960, 0]
    check(folder, select, 48, scores, visible, first, requests=[0] * 14 + [-1])


@needs_compiler
@pytest.mark.parametrize("rows", (1, 8192))
@pytest.mark.parametrize("top_k, width", ((512, 8192), (512, 32768), (2048, 9001)))
def test_the_tiles_that_serving_uses(folder, rows, top_k, width):
    select = tiles.choose_cuda_select(rows, width, top_k, TARGETS["sm_90"])
    check(folder, select, top_k, hostile(width)[[0, 2, 8]], [width, width - 3, width])


def reachable_launches(target: str, counts: tuple[int, ...]):
    """Launches of steps over every kind of row: short, long, few, many, with and without first."""

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    with record(target) as launches:
        for rows in (1, 4096):
            for blocks in (2048, 8192, 32_768, 262_144, 1 << 20):
                for top_k in counts:
                    first = empty(rows) if blocks == 32_768 else None
                    ops.select_blocks(
                        empty(rows, 4, 128, dtype=torch.bfloat16),
                        empty(blocks // 16, 16, 1, 128, dtype=torch.bfloat16),
                        empty(1, blocks // 16),
                        empty(rows),
                        empty(rows),
                        top_k,
                        first_block=first,
                        backend="triton",
                    )
    return {
        launch.specialise(TARGETS[target]).key: launch
        for launch in launches
        if launch.kernel is selector.select_cuda
    }.values()


@needs_nvrtc
@pytest.mark.parametrize("target", NEWER)
def test_every_specialisation_compiles_and_fits(target):
    counts = (1, 512, 2048) if target == "sm_90" else (512,)
    built = [compile_launch(launch, target) for launch in reachable_launches(target, counts)]
    assert len(built) >= 8 * len(counts)
    for kernel in built:
        assert kernel.fits and kernel.spilled_bytes == 0, (kernel.name, kernel.spilled_bytes)
        assert kernel.registers * 32 * kernel.num_warps <= 65536


@needs_nvrtc
def test_an_error_in_the_source_is_told():
    with pytest.raises(RuntimeError, match="broken.cu.*sm_90(.|\n)*identifier"):
        nvrtc.compile_source(b"int f() { return missing; }", "broken.cu", "sm_90", {})
