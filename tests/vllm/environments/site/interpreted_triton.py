"""Corrections that vLLM's own BF16 and FP8 kernels need in Triton's interpreter.

The interpreter holds BF16 as the bits of a uint16 and computes on those. Here every operation on
BF16 goes through FP32 and is rounded to nearest even. Nor does it round to e4m3 as GPUs do.

flash-qsa's own tests do not use this: they keep to FP32 and FP16.
"""

from __future__ import annotations

from types import SimpleNamespace


def repair(interpreter) -> None:
    """Patches `InterpreterBuilder` of the Triton that has just been imported."""
    import numpy as np
    import torch
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def is_bf16(tensor) -> bool:
        return tensor.dtype.scalar == tl.bfloat16

    def widen(tensor):
        if not is_bf16(tensor):
            return tensor.data
        return (np.asarray(tensor.data).astype(np.uint32) << 16).view(np.float32)

    def narrow(values):
        bits = np.asarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)

    def wrap(result, dtype):
        if dtype != tl.bfloat16 or result.dtype == bool:
            return handle(result, dtype)
        return handle(narrow(result), dtype)

    binary, unary, cast, convert, dot = (
        builder.binary_op,
        builder.unary_op,
        builder.cast_impl,
        builder.create_fp_to_fp,
        builder.create_dot,
    )

    def binary_op(self, lhs, rhs, op):
        if not (is_bf16(lhs) and is_bf16(rhs)):
            return binary(self, lhs, rhs, op)
        return wrap(op(widen(lhs), widen(rhs)), tl.bfloat16)

    def unary_op(self, arg, op):
        if not is_bf16(arg):
            return unary(self, arg, op)
        return wrap(op(widen(arg)), tl.bfloat16)

    def cast_impl(self, src, dst_type):
        target = dst_type.scalar
        if target == tl.bfloat16:
            return handle(narrow(widen(src).astype(np.float32)), target)
        if is_bf16(src):
            return handle(widen(src).astype(interpreter._get_np_dtype(dst_type)), target)
        return cast(self, src, dst_type)

    def e4m3(values):
        """To the nearest, ties to even, saturated at 448: what NVIDIA's conversion does."""
        rounded = torch.from_numpy(np.array(values, dtype=np.float32)).clamp(-448.0, 448.0)
        return rounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if dst_type.scalar == tl.float8e4nv:
            wide = widen(src) if is_bf16(src) else src.data
            return handle(e4m3(wide), tl.float8e4nv)
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar in (tl.float32, tl.float16):
            return handle(narrow(src.data.astype(np.float32)), tl.bfloat16)
        if is_bf16(src):
            wide = handle(widen(src), tl.float32)
            if dst_type.scalar == tl.float32:
                return wide
            return convert(self, wide, dst_type, rounding_mode)
        return convert(self, src, dst_type, rounding_mode)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if is_bf16(a):
            a = handle(widen(a), tl.float32)
        if is_bf16(b):
            b = handle(widen(b), tl.float32)
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    for name, function in {
        "binary_op": binary_op,
        "unary_op": unary_op,
        "cast_impl": cast_impl,
        "create_fp_to_fp": create_fp_to_fp,
        "create_dot": create_dot,
    }.items():
        setattr(builder, name, function)


def offer_cpu_backend(triton) -> None:
    """vLLM's CPU build keeps Triton only where a backend named "cpu" exists; the interpreter needs
    none."""
    from triton.backends import backends

    backends.setdefault("cpu", SimpleNamespace(driver=None, compiler=None))
