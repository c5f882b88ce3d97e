"""Operators that torch knows before their code is loaded: saved graphs name them."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import counterpoint
from counterpoint.operators import FAMILIES, IMPLEMENTED, MODULES, WITHOUT_GRADIENT, implementation

LOADED = {"operators", "errors", "lazy", "ops", "ops.declare"}


def python(code: str, *words: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code, *words]
    path = {"PYTHONPATH": str(Path(counterpoint.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=path).stdout


@pytest.mark.drawn(1)
@pytest.mark.parametrize("order", ["counterpoint, torch", "torch, counterpoint"])
def test_they_exist_whichever_is_imported_first(order: str):
    """And importing torch as others look for it, without loading it, loses nothing."""
    code = f"""
import importlib.util, sys
import {order.partition(",")[0]}
importlib.util.find_spec("torch")
import {order}
print(*(name for name in sys.modules if name.startswith("counterpoint.")))
for op in {sorted(MODULES)}:
    getattr(torch.ops.counterpoint, op).default
"""
    loaded = {name.removeprefix("counterpoint.") for name in python(code).split()}
    assert loaded <= LOADED


@pytest.mark.drawn(1)
@pytest.mark.parametrize("module", ["group.ranks", "ops.register", "nn.replicated", "device"])
def test_any_module_of_ours_may_be_what_imports_torch(module: str):
    python(f"import counterpoint.{module}, torch; torch.ops.counterpoint.add_norm.default")


def test_without_torch_nothing_is_imported():
    assert python("import sys, counterpoint; print('torch' in sys.modules)") == "False\n"


@pytest.mark.apart("make test-all")
def test_a_saved_graph_loads_in_a_new_process(tmp_path: Path):
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.ops.counterpoint.add_norm(x, None, w, None, None, "rms", 1e-5, False)[0]

    x, w = torch.randn(3, 8), torch.randn(8)
    program = torch.export.export(Model(), (x, w))
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, w, Model()(x, w)), tmp_path / "values.pt")
    code = """
import sys, counterpoint, torch
folder = sys.argv[1]
x, w, want = torch.load(f"{folder}/values.pt")
torch.testing.assert_close(torch.export.load(f"{folder}/model.pt2").module()(x, w), want)
"""
    python(code, str(tmp_path))


def test_every_operator_has_its_code_where_it_is_declared():
    for package in ("ops", "nn", *sorted(set(FAMILIES.values()))):
        folder = importlib.import_module(f"counterpoint.{package}").__path__
        for module in pkgutil.walk_packages(folder, f"counterpoint.{package}."):
            importlib.import_module(module.name)
    assert set(IMPLEMENTED) == set(MODULES)
    for op, module in MODULES.items():
        found = implementation(op)
        assert found.fake.__module__ == f"counterpoint.{module}"
        assert (found.backward is None) == (op in WITHOUT_GRADIENT)
