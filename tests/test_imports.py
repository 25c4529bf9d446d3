"""Who may import whom, and what the package needs in order to be imported.

Claims:
* the arrows of DESIGN.md hold for every module, imports inside functions included;
* references never import triton, kernels never a reference or another op's kernel, frameworks are
  imported by their own integration alone;
* in a process where triton, transformers, vllm and matplotlib cannot be imported every module that
  does not need them imports, and every op's reference runs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flash_qsa

PACKAGE = Path(flash_qsa.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
FRAMEWORKS = ("transformers", "vllm")

# Lower layers first. A module may import its own layer and those before it.
LAYERS = (
    ("config", "checks"),
    ("plan", "targets"),
    ("dispatch",),
    ("ops", "library", "launches", "warmup"),
    ("cache",),
    ("layers",),
    ("integrations", "testing"),
    ("hf",),
    ("cli",),
)
# Imports that run upwards, each with its reason.
EXCEPTIONS = {
    ("dispatch", "library"): "a traced program is handed operators; imported when tracing",
}


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def typing_only(path: Path) -> set[str]:
    """Imports under `if TYPE_CHECKING`, which never run."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for inner in node.body:
                if isinstance(inner, ast.ImportFrom):
                    found |= {f"{inner.module}.{alias.name}" for alias in inner.names}
    return found


def layer_of(name: str) -> int | None:
    parts = name.split(".")
    if parts[0] != "flash_qsa" or len(parts) < 2:
        return None
    for level, members in enumerate(LAYERS):
        if parts[1] in members:
            return level
    return None


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_arrows(path: Path) -> None:
    name = dotted(path)
    level = layer_of(name)
    if name == "flash_qsa":
        return  # the package itself resolves its names lazily
    assert level is not None, f"{name}: not in the tree of DESIGN.md"
    for target in imports(path) - typing_only(path):
        other = layer_of(target)
        pair = (name.split(".")[1], target.split(".")[1] if other is not None else "")
        assert other is None or other <= level or pair in EXCEPTIONS, f"{name} imports {target}"
        assert target.split(".")[0] != "tests", f"{name} imports {target}"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_frameworks_stay_where_they_belong(path: Path) -> None:
    parts = dotted(path).split(".")
    for target in imports(path):
        top = target.split(".")[0]
        home = ("testing", "cli") if top == "transformers" else ()
        if top in FRAMEWORKS:
            inside = parts[1:3] == ["integrations", top] or parts[1] in home
            assert inside, f"{dotted(path)} imports {target}"
        if top == "triton":
            assert parts[-1] != "reference", f"{dotted(path)} imports {target}"


@pytest.mark.parametrize("path", [p for p in MODULES if p.stem.startswith("kernel")], ids=dotted)
def test_kernels_know_neither_references_nor_each_other(path: Path) -> None:
    op = path.parent.name
    for target in imports(path):
        parts = target.split(".")
        assert "reference" not in parts, f"{dotted(path)} imports {target}"
        if any(part.startswith("kernel") for part in parts) and parts[0] == "flash_qsa":
            assert parts[2] == op, f"{dotted(path)} imports {target}"


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "reference.py"], ids=dotted)
def test_references_use_no_kernel(path: Path) -> None:
    for target in imports(path):
        assert not any(part.startswith("kernel") for part in target.split(".")), target


# Files of an op that run without its kernels; the others may need triton.
HOST_SIDE = ("api", "reference", "backward", "ring_rows", "tiles")

WITHOUT = """
import importlib, pkgutil, sys

class Hide:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
import torch
import flash_qsa
"""

IMPORT_EVERYTHING = """
refused = []
for found in pkgutil.walk_packages(flash_qsa.__path__, "flash_qsa.", onerror=lambda name: None):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] in {blocked!r}, error
        refused.append(found.name)
print(*refused)
"""

RUN_REFERENCES = """
from flash_qsa import QSAConfig, dispatch
from flash_qsa.config import RopeConfig
from flash_qsa.layers import QSAAttention
from flash_qsa.ops.prepare.api import Caches
from flash_qsa.cache import CacheSpec, build_plan

config = QSAConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, index_heads=2,
                   index_head_dim=16, token_budget=8, rope=RopeConfig(rotary_dim=8))
layer = QSAAttention(config, fused_preparation=False).requires_grad_(False)
fused = QSAAttention(config).requires_grad_(False)
spec = CacheSpec.from_config(config, num_layers=1, num_pages=8, page_size=8, num_ring_slots=1,
                             dtype=torch.float32)
(caches,) = spec.allocate("cpu")
plan = build_plan([40], [40], [[3, 1, 4, 0, 5]], [0], compress_ratio=4, page_size=8,
                  ring_capacity=spec.ring_capacity)
with dispatch.trace() as ran:
    for module in (layer, fused):
        out = module(torch.randn(40, 32), torch.arange(40), plan=plan, caches=caches)
        assert out.isfinite().all()
    module.indexer.packed(module.indexer.rows(40, None).zero_(), plan.positions)
    dispatch.implementation("batch_plan", "auto", torch.device("cpu"))
assert {op for op, _ in ran} == set(dispatch.OPS), ran
assert {backend for _, backend in ran} == {"reference"}
try:
    dispatch.choose("triton", torch.device("cpu"))
except NotImplementedError as error:
    assert "triton is not installed" in str(error), error
else:
    raise AssertionError("an explicit backend fell back")
"""


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_imports_and_references_without_triton_and_frameworks() -> None:
    blocked = ("triton", "transformers", "vllm", "matplotlib")
    code = WITHOUT + IMPORT_EVERYTHING
    refused = run_python(code.format(blocked=blocked) + RUN_REFERENCES).split()
    for name in refused:
        parts = name.split(".")
        kernels = parts[1] == "ops" and (parts[-1] == "device" or len(parts) == 4)
        kernels &= parts[-1] not in HOST_SIDE
        assert kernels or parts[1] in ("integrations", "hf"), f"{name} needs one of {blocked}"


def test_importing_the_package_brings_in_no_framework() -> None:
    run_python(
        "import sys, flash_qsa.ops, flash_qsa.layers, flash_qsa.cache, flash_qsa.testing.inputs\n"
        "assert not {'transformers', 'vllm', 'matplotlib'} & set(sys.modules)\n"
        "assert not [m for m in sys.modules if '.kernel' in m and m.startswith('flash_qsa')]\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )
