"""Cross-compilation checks: compile what an op would launch, for a GPU that is not there.

::

    with record("sm_86") as launches:                     # flash_qsa.launches
        ops.store_rows(cache, slots, rows, backend="triton")     # meta tensors are enough
    for launch in launches:
        built = compile_launch(launch, "sm_86")
        assert built.fits and built.spilled_bytes == 0

Runs in a process without TRITON_INTERPRET; a kernel takes 0.1 to 2 seconds, then comes from
Triton's disk cache.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from flash_qsa.launches import Launch, record
from flash_qsa.targets import TARGETS, Target

SHARED_MEMORY_MARGIN = 2 << 10
"""Bytes of a device's shared memory that a kernel leaves free."""

_MATRIX = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma|wmma\.mma|v_s?mfma)")
_GLOBAL_ACCESS = re.compile(
    r"\b(?P<kind>ld|st)\.global[.\w:]*?(?:\.v(?P<count>\d))?\.[bufs](?P<bits>\d+)\b"
)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one launch.

    Attributes:
        shared_bytes: shared memory of a program. fits: within the target's limit less 2 KiB.
        matrix_instructions: e.g. {"mma.sync"}; empty where no matrix unit is used.
        registers: per thread, None where the binary does not say. spilled_bytes: stack or scratch
            per thread.
        widest_load, widest_store: bytes of the widest global access of a thread (CUDA only).
        asm: PTX or AMDGCN text.
    """

    name: str
    target: str
    shared_bytes: int
    fits: bool
    matrix_instructions: frozenset[str]
    registers: int | None
    spilled_bytes: int | None
    widest_load: int
    widest_store: int
    num_warps: int
    num_stages: int
    asm: str = field(repr=False)


def compile_launch(launch: Launch, target: Target | str) -> Compiled:
    """Compiles a recorded launch for `target` with the JIT's own specialisation.

    Raises whatever the compiler raises.
    """
    target = TARGETS[target] if isinstance(target, str) else target
    built = launch.specialise(target).compile()
    text = built.asm["amdgcn" if target.backend == "hip" else "ptx"]
    if target.backend == "hip":
        registers, spilled = _amd_resources(text)
    else:
        registers, spilled = _cubin_resources(built.asm["cubin"])
    return Compiled(
        name=launch.name,
        target=target.name,
        shared_bytes=built.metadata.shared,
        fits=built.metadata.shared <= target.shared_memory - SHARED_MEMORY_MARGIN,
        matrix_instructions=frozenset(_MATRIX.findall(text)),
        registers=registers,
        spilled_bytes=spilled,
        widest_load=_widest(text, "ld"),
        widest_store=_widest(text, "st"),
        num_warps=built.metadata.num_warps,
        num_stages=getattr(built.metadata, "num_stages", 0),
        asm=text,
    )


def compile_call(target: str, call) -> list[Compiled]:
    """Records `call()` (an op on meta or CPU tensors) and compiles each distinct launch."""
    with record(target) as launches:
        call()
    if not launches:
        raise AssertionError("the call launched no kernel: was it made with backend='triton'?")
    distinct = {launch.specialise(TARGETS[target]).key: launch for launch in launches}
    return [compile_launch(launch, target) for launch in distinct.values()]


def _widest(ptx: str, kind: str) -> int:
    widths = [
        int(match["bits"]) // 8 * int(match["count"] or 1)
        for match in _GLOBAL_ACCESS.finditer(ptx)
        if match["kind"] == kind
    ]
    return max(widths, default=0)


_REGCOUNT, _FRAME_SIZE, _SIZED_VALUE = 0x2F, 0x11, 0x04


def _cubin_resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers and stack bytes per thread, from the `.nv.info` section of an ELF image."""
    registers = frame = None
    for name, section in _elf_sections(cubin):
        if name != ".nv.info":
            continue
        at = 0
        while at + 4 <= len(section):
            form, attribute, size = struct.unpack_from("<BBH", section, at)
            at += 4
            if form != _SIZED_VALUE:
                continue
            if attribute == _REGCOUNT:
                registers = struct.unpack_from("<II", section, at)[1]
            elif attribute == _FRAME_SIZE:
                frame = struct.unpack_from("<II", section, at)[1]
            at += size
    return registers, frame


def _elf_sections(image: bytes) -> list[tuple[str, bytes]]:
    table, entry_size, count, names_at = struct.unpack_from("<Q10xHHH", image, 0x28)
    headers = [
        struct.unpack_from("<IIQQQQ", image, table + index * entry_size) for index in range(count)
    ]
    names = headers[names_at]
    sections = []
    for name, _, _, _, offset, size in headers:
        start = names[4] + name
        label = image[start : image.index(b"\0", start)].decode()
        sections.append((label, image[offset : offset + size]))
    return sections


def _amd_resources(text: str) -> tuple[int | None, int | None]:
    def read(field: str) -> int | None:
        found = re.search(rf"\.{field}:\s+(\d+)", text)
        return int(found[1]) if found else None

    return read("vgpr_count"), read("private_segment_fixed_size")
