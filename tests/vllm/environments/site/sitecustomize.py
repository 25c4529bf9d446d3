"""Lets vLLM run where there is no GPU; first on PYTHONPATH of the vLLM test tiers.

Every process of an engine imports this before anything else, so it stays cheap: what needs torch
or Triton is done when that module is first imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported (not when it is merely looked for)."""

    def __init__(self, name: str, then) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def _define_torchvision_ops(module) -> None:
    """torchvision's import asks torch about two operators that its CUDA build would bring."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys._torchvision_library = library


def _after(name: str, then) -> None:
    sys.meta_path.insert(0, _AfterImport(name, then))


_after("torch", _define_torchvision_ops)
if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreted_triton
    import stock_on_cpu

    _after("triton.runtime.interpreter", interpreted_triton.repair)
    _patches = dict(stock_on_cpu.AFTER_IMPORT)
    if os.environ.get("FLASH_QSA_TIER") == "engine":
        _patches["triton"] = interpreted_triton.offer_cpu_backend
    else:
        _patches |= stock_on_cpu.IN_THE_CUDA_WHEEL
    for _name, _then in _patches.items():
        _after(_name, _then)
