"""CUDA C++ kernels, compiled at run time by NVRTC and launched through the driver.

Triton covers every GPU; a kernel in CUDA C++ stands beside its Triton twin where that one cannot be
fast. It is one `.cu` file beside the Python that launches it, specialised by macros. NVRTC and the
driver come through `cuda-bindings`, which CUDA builds of torch install; nothing is built before.

`Kernel.run` has the signature of a Triton kernel's, so that launches are recorded and warmed up in
the same way. Binaries are kept in Triton's cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flash_qsa.targets import Target

OPTIONS = ("--std=c++17", "-default-device")


@functools.cache
def obstacle(arch: str) -> str | None:
    """Why kernels cannot be compiled for `arch` ("sm_90") here, or None where they can."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return "cuda-bindings is not installed"
    try:
        supported = _check(nvrtc.nvrtcGetSupportedArchs())
    except (RuntimeError, OSError) as error:
        return f"NVRTC cannot be loaded: {error}"
    if int(arch.removeprefix("sm_")) not in supported:
        return f"this NVRTC does not know {arch}"
    return None


def _check(returned: tuple) -> Any:
    """What a binding returned behind its status, which must be success."""
    status, *values = returned
    if status.value:
        raise RuntimeError(f"{type(status).__name__}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def compile_source(source: bytes, name: str, arch: str, macros: dict[str, Any]) -> bytes:
    """The cubin of a source text for one architecture, from the disk cache where it is there.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    options = [f"--gpu-architecture={arch}", *OPTIONS]
    options += [f"-D{macro}={value}" for macro, value in macros.items()]
    version = _check(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((source, options, version)).encode()).hexdigest()
    cache = get_cache_manager(key)
    if (path := cache.get_file("kernel.cubin")) is not None:
        return Path(path).read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, None, None))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status.value:
            log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            messages = log.rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"{name} {' '.join(options)}: {status.name}\n{messages}")
        cubin = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    cache.put(bytes(cubin), "kernel.cubin")
    return bytes(cubin)


class Kernel:
    """One `extern "C"` kernel that takes a struct by value.

    Args:
        path: the source. name: of the kernel in it.
        layout: the struct's fields in `struct`'s letters, aligned as C does.
    """

    def __init__(self, path: Path, name: str, module: str, layout: str) -> None:
        self.path, self.__name__, self.module, self.layout = path, name, module, layout
        self._loaded: dict[tuple, _Loaded] = {}

    @functools.cached_property
    def source(self) -> bytes:
        return self.path.read_bytes()

    def run(
        self,
        *args: int,
        grid: tuple[int],
        warmup: bool,
        threads: int,
        shared: int,
        pdl: bool,
        **macros: Any,
    ) -> None:
        """Launches on torch's current device and stream; only compiles and loads if `warmup`.

        Args:
            args: the struct's fields; tensors as addresses.
            threads: of a block. shared: bytes of dynamic shared memory.
            pdl: start before the preceding kernel has ended (programmatic dependent launch).
            macros: what the source is specialised on; of the launch, `THREADS` and `SHARED`.
        """
        import torch

        device = torch.cuda.current_device()
        key = (device, shared, *macros.values())
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._loaded[key] = self._load(device, threads, shared, macros)
        if not warmup:
            stream = torch._C._cuda_getCurrentRawStream(device)
            loaded.launch(struct.pack(self.layout, *args), grid[0], stream, pdl)

    def specialise(self, target: Target, kwargs: dict[str, Any]) -> Specialisation:
        """What `run` with these keyword arguments compiles for `target`."""
        macros = {name: value for name, value in kwargs.items() if name.isupper()}
        return Specialisation(self, target.name, kwargs["threads"], kwargs["shared"], macros)

    def _load(self, device: int, threads: int, shared: int, macros: dict[str, Any]) -> _Loaded:
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        cubin = compile_source(self.source, self.path.name, f"sm_{major}{minor}", macros)
        return _Loaded(cubin, self.__name__, struct.calcsize(self.layout), threads, shared)


@dataclass(frozen=True)
class Specialisation:
    """A compilable kernel: one source, architecture and set of macros."""

    kernel: Kernel
    arch: str
    threads: int
    shared: int
    macros: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for two launches that one binary serves."""
        return f"{self.kernel.__name__} {self.arch} {self.macros}"

    def compile(self) -> Any:
        """Compiles into the disk cache; the answer has the fields of Triton's that tests read."""
        cubin = compile_source(self.kernel.source, self.kernel.path.name, self.arch, self.macros)
        metadata = SimpleNamespace(shared=self.shared, num_warps=self.threads // 32)
        return SimpleNamespace(asm={"cubin": cubin, "ptx": ""}, metadata=metadata)


class _Loaded:
    """A kernel in the current context. Launching reuses its buffers, one set a thread."""

    def __init__(self, cubin: bytes, name: str, size: int, threads: int, shared: int) -> None:
        from cuda.bindings import driver

        # loading may allocate; a stream that some thread captures must not notice
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = _check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            self._module = _check(driver.cuModuleLoadData(cubin))
            self.function = _check(driver.cuModuleGetFunction(self._module, name.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(self.function, attribute, shared))
        finally:
            _check(driver.cuThreadExchangeStreamCaptureMode(before))
        self.size, self.threads, self.shared = size, threads, shared
        self._launch, self._stream = driver.cuLaunchKernelEx, driver.CUstream
        self._local = threading.local()

    def launch(self, arguments: bytes, blocks: int, stream: int, pdl: bool) -> None:
        buffers = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = _Buffers(self.size, self.threads, self.shared)
        config = buffers.configs[pdl]
        config.gridDimX = blocks
        config.hStream = self._stream(stream)
        ctypes.memmove(buffers.address, arguments, self.size)
        (status,) = self._launch(config, self.function, buffers.parameters_at, 0)
        if status.value:
            raise RuntimeError(f"cuLaunchKernelEx: {status.name}")


class _Buffers:
    """What cuLaunchKernelEx reads: one struct of arguments and both launch configurations."""

    def __init__(self, size: int, threads: int, shared: int) -> None:
        self._arguments = (ctypes.c_longlong * -(-size // 8))()
        self.address = ctypes.addressof(self._arguments)
        self._parameters = (ctypes.c_void_p * 1)(self.address)
        self.parameters_at = ctypes.addressof(self._parameters)
        self.configs = [self._config(threads, shared, pdl) for pdl in (False, True)]

    @staticmethod
    def _config(threads: int, shared: int, pdl: bool) -> Any:
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        if pdl:
            attribute = driver.CUlaunchAttribute()
            ids = driver.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        return config
