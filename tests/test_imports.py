"""Who imports whom, and what `import counterpoint` costs and shows."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import counterpoint

PACKAGE = Path(counterpoint.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
HEAVY = ("torch", "triton", "cuda")

ABOVE_PLANS = ("choose", "scale", "resources", "measure", "runtime", "ops", "kernels", "nn", "cli")
ABOVE_FACTS = ("plan", "model", *ABOVE_PLANS)

# what a place (a file, or a directory with /) must not import, at any depth of its functions
FORBIDDEN: dict[str, tuple[str, ...]] = {
    place: (*HEAVY, *(f"counterpoint.{part}" for part in above))
    for place, above in {
        "errors.py": ("costs", "problem", "machine", "presets", "timeline", *ABOVE_FACTS),
        "ranges.py": ("costs", "problem", "machine", "presets", "timeline", *ABOVE_FACTS),
        "costs.py": ("problem", "machine", "presets", "timeline", *ABOVE_FACTS),
        "problem.py": ("costs", "machine", "presets", "timeline", *ABOVE_FACTS),
        "machine.py": ("problem", "presets", "timeline", *ABOVE_FACTS),
        "presets.py": ("problem", "timeline", *ABOVE_FACTS),
        "machine_of.py": ("problem", "timeline", *ABOVE_FACTS),
        # of those above it, measure draws a timeline; nobody else is asked
        "spans.py": ("problem", "timeline", *ABOVE_FACTS),
        "timeline.py": ("problem", *(part for part in ABOVE_FACTS if part != "measure")),
        "plan/": ("model", *ABOVE_PLANS),
        "model/": ABOVE_PLANS,
        "choose/": ("scale", "resources", "measure", "runtime", "ops", "kernels", "nn", "cli"),
        # measure draws a prediction, too
        "scale/": ("resources", "runtime", "ops", "kernels", "nn", "cli"),
    }.items()
}
# these are arithmetic and descriptions: they run on a laptop
FORBIDDEN |= {
    f"runtime/{file}.py": (*HEAVY, *(f"counterpoint.{p}" for p in ABOVE_FACTS if p != "runtime"))
    for file in ("limits", "occupancy")
}  # fmt: skip
FORBIDDEN |= {
    f"resources/{file}.py": (*HEAVY, *(f"counterpoint.{p}" for p in ABOVE_FACTS
                                       if p not in ("plan", "resources")))
    for file in ("controls", "rewrites", "search")
}  # fmt: skip
FORBIDDEN |= {
    "kernels/": ("torch.distributed", *(f"counterpoint.{p}" for p in
                 ("plan", "model", "choose", "resources", "measure", "runtime", "ops", "nn",
                  "cli"))),
    "runtime/": tuple(f"counterpoint.{p}" for p in ("model", "choose", "resources", "measure",
                                                     "ops", "nn", "cli")),
    "resources/": tuple(f"counterpoint.{p}" for p in ("choose", "measure", "ops", "nn", "cli")),
    "ops/": ("counterpoint.resources", "counterpoint.nn", "counterpoint.cli"),
    "nn/": ("counterpoint.cli",),
    # what users build on and test with stands on kernels and runtime alone
    **dict.fromkeys(("device.py", "testing/"), tuple(
        f"counterpoint.{p}" for p in ("model", "choose", "resources", "measure", "ops", "nn", "cli")
    )),
}  # fmt: skip


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports at run time, wherever it does."""
    tree = ast.parse(path.read_text())
    checking = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in checking:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("place", FORBIDDEN)
def test_import_directions(place: str):
    files = [f for f in FILES if f == place or (place.endswith("/") and f.startswith(place))]
    assert files or place == "nn/", f"no file {place}"
    for file in files:
        for name in imported(FILES[file]):
            wrong = [package for package in FORBIDDEN[place] if within(name, package)]
            assert not wrong, f"{file} imports {name}"


def test_nobody_imports_what_is_for_users():
    for file, path in FILES.items():
        for name in imported(path):
            assert not within(name, "counterpoint.device"), file
            assert file.startswith("testing/") or not within(name, "counterpoint.testing"), file


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """The files that `start` imports, and those that they import."""
    found, ahead = set[str](), list(graph[start])
    while ahead:
        file = ahead.pop()
        if file not in found:
            found.add(file)
            ahead += graph[file]
    return found


def test_no_file_imports_one_that_imports_it():
    """Through any number of files, and from within functions as well."""
    modules = {f"counterpoint.{file[:-3].replace('/', '.')}": file for file in FILES}
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}
    graph: dict[str, set[str]] = {}
    for file, path in FILES.items():
        named = {name if name in modules else name.rpartition(".")[0] for name in imported(path)}
        graph[file] = {modules[name] for name in named if name in modules} - {file}
    ahead = {file: reached(graph, file) for file in FILES}
    circles = {
        frozenset(other for other in ahead[file] if file in ahead[other])
        for file in FILES if file in ahead[file]
    }  # fmt: skip
    assert not circles


@pytest.mark.parametrize(
    ("name", "home"),
    [
        (r"cuda\.bindings", "gpu/driver.py"),
        (r"torch\.distributed\._symmetric_memory|_SymmetricMemory", "group/symmetric_cuda.py"),
    ],
)
def test_a_private_interface_has_one_home(name: str, home: str):
    mentions = [file for file, path in FILES.items() if re.search(name, path.read_text())]
    assert mentions == [home]


def fresh(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    env = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_the_pure_half_is_used_without_torch():
    loaded = fresh(
        "import sys\n"
        "import counterpoint as cp\n"
        "first = sorted(m for m in sys.modules if m.startswith('counterpoint'))\n"
        "problem = cp.Problem('all_gather_matmul', 8, 4, 4, 2)\n"
        "cp.validate(cp.build(problem, 'graded', cp.preset('h200-2')))\n"
        "import counterpoint.timeline, counterpoint.plan.serialize, counterpoint.model.calibrate\n"
        "from counterpoint.choose.choose import choose\n"
        "for by in ('model', 'rule'):\n"
        "    choose(problem, 'h200-2', by=by).explain()\n"
        "import counterpoint.gpu.occupancy, counterpoint.resources.search\n"
        "import counterpoint.resources.rewrites\n"
        "cp.resources.Controls\n"
        "cp.scale.predict('llama3-8b', cp.scale.Layout(tp=8)).explain()\n"
        "heavy = [m for m in ('torch', 'triton', 'numpy', 'cuda') if m in sys.modules]\n"
        "print(first, heavy)"
    )
    first = [f"counterpoint{each}" for each in ("", ".errors", ".lazy", ".operators")]
    assert loaded.strip() == f"{first} []"


def test_all_is_sorted_and_is_what_dir_shows():
    assert list(counterpoint.__all__) == sorted(set(counterpoint.__all__))
    assert dir(counterpoint) == sorted([*counterpoint.__all__, "__version__"])


def test_names_for_type_checkers_are_those_at_run_time():
    tree = ast.parse(FILES["__init__.py"].read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(shown) == list(counterpoint.__all__)
    homes = {name: f"counterpoint.{home}" for name, home in counterpoint._HOME.items()}
    assert homes | dict.fromkeys(counterpoint._PACKAGES, "counterpoint") == shown


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'counterpoint' has no attribute 'all_reduce'"):
        _ = counterpoint.all_reduce  # type: ignore[attr-defined]


def test_public_names_resolve_and_say_what_they_take_and_raise():
    """In a process of its own: this one stays without torch."""
    text = fresh(
        "import inspect, counterpoint as cp\n"
        "for name in cp.__all__:\n"
        "    value = getattr(cp, name)\n"
        "    assert inspect.getdoc(value), name\n"
        "    if inspect.isfunction(value) and inspect.signature(value).parameters:\n"
        "        for section in ('Args:', 'Raises:'):\n"
        "            if section not in inspect.getdoc(value):\n"
        "                print(name, 'has no', section)\n"
    )
    assert text == ""


def test_device_functions_have_one_home_and_say_what_they_take():
    text = fresh(
        "import inspect, counterpoint.device as device\n"
        "print(device.__all__ == sorted(set(device.__all__)))\n"
        "for name in device.__all__:\n"
        "    value = getattr(device, name)\n"
        "    doc = inspect.getdoc(value) or ''\n"
        "    if name != 'EMPTY' and not doc.partition('\\n')[0].endswith(('.', ':')):\n"
        "        print(name, doc)\n"
        "    if len(getattr(value, 'arg_names', ())) > 1 and 'Args:' not in doc:\n"
        "        print(name, 'has no Args')\n"
        "    if hasattr(value, 'fn') and value.fn.__module__ != 'counterpoint.kernels.peer':\n"
        "        print(name, value.fn.__module__)\n"
    )
    assert text == "True\n"


def test_the_test_kit_is_loaded_by_parts():
    said = fresh(
        "import sys, counterpoint.testing as kit\n"
        "print(kit.__doc__.count('counterpoint.testing.'), 'torch' in sys.modules)"
    )
    assert said == "3 False\n"


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("op", "needed"),
    [
        ("all_gather_matmul", "matmul_reduce_scatter all_gather_matmul_backward"),
        ("matmul_reduce_scatter", "all_gather_matmul all_gather_matmul_wgrad"),
        ("all_to_all_matmul", "matmul_all_to_all experts_weight_gradient"),
        ("matmul_all_to_all", "all_to_all_matmul matmul_all_to_all_sum token_sum_gradient"),
        ("embedding_bag_all_to_all", "embedding_bag_gradients embedding_bag_update"),
    ],
)
def test_an_operator_comes_with_those_of_its_backward(op: str, needed: str):
    found = fresh(
        f"import counterpoint as cp; cp.{op}; import torch\n"
        f"print(all(hasattr(torch.ops.counterpoint, name) for name in '{op} {needed}'.split()))"
    )
    assert found.strip() == "True"


def test_a_program_that_compiles_nothing_loads_no_compiler():
    """Its import would take two seconds of each start of each rank."""
    loaded = fresh(
        "import sys, torch, counterpoint as cp, torch.distributed as dist\n"
        "from counterpoint import nn\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)\n"
        "layer = nn.ExpertParallelMLP(8, 16, 2, dtype=torch.float32)\n"
        "for y in (cp.all_gather_matmul(x, w), layer(x, logits=x[:, :2], top_k=1)):\n"
        "    y.sum().backward()\n"
        "each = torch.arange(4)\n"
        "cp.embedding_bag_all_to_all([w], each, each, mode='sum').sum().backward()\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    assert loaded == "False\n"


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.startswith(("plan/", "model/", "choose/", "scale/"))]
)
def test_modules_have_docstrings_and_no_second_idea(file: str):
    source = FILES[file].read_text()
    assert inspect.cleandoc(ast.get_docstring(ast.parse(source)) or ""), f"{file}: no docstring"
    assert len(source.splitlines()) <= 320, f"{file} is long: it has two ideas"
