"""Triton device functions that several kernels share unchanged."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_to_fp16(code):
    """Exact FP16 values of FP8 e4m3 bytes (uint8), for devices without the type.

    The seven low bits are an FP16 number 2^8 times too small, subnormals included; the code with
    all of them set is NaN. Every finite e4m3 number is an FP16 number.
    """
    bits = code.to(tl.uint16)
    magnitude = ((bits & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where(bits >= 0x80, -magnitude, magnitude).to(tl.float16)
