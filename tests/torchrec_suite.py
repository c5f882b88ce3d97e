"""TorchRec's own tests with `overlap` over each model that they shard: a plugin of pytest.

    git clone https://github.com/meta-pytorch/torchrec .peers/torchrec
    out/torchrec/bin/python tests/torchrec_suite.py [--theirs] [arguments of pytest]

Tests for GPUs run on CPU ranks, by gloo: some fail there without `overlap`, too, which --theirs
tells. What each test had taken and left is in out/torchrec_suite/told.jsonl.
"""

import functools
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

CLONE, OUT = Path(".peers/torchrec"), Path("out/torchrec_suite")
TOLD = OUT / "told.jsonl"
SECONDS = 20  # until a rank gives up on one that failed
FILES = [f"{folder}/test_{name}.py" for folder, names in {
    "tests": "model_parallel_gloo model_parallel_hierarchical fp_embeddingbag mc_embeddingbag "
             "qcomms_embedding_modules apply_optim_per_param emb_anomaly dynamic_sharding",
    "composable/tests": "embeddingbag ddp",
}.items() for name in names.split()]  # fmt: skip


def main(theirs: bool, arguments: list[str]) -> int:
    """Lay TorchRec's tests over a copy of the installed package, and run them."""
    spec = find_spec("torchrec")
    assert spec is not None and spec.origin is not None, "torchrec is not installed"
    over = OUT / "torchrec"
    shutil.rmtree(over, ignore_errors=True)
    shutil.copytree(Path(spec.origin).parent, over)
    for tests in (CLONE / "torchrec").rglob("tests"):
        there = over / tests.relative_to(CLONE / "torchrec")
        shutil.copytree(tests, there)
        (there / "__init__.py").touch()  # ranks import them by their names
    TOLD.write_text("")
    paths = [str(OUT.absolute()), "src", "tests", os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["COUNTERPOINT_SUITE"] = "theirs" if theirs else "overlapped"
    options = ["-p", "torchrec_suite", "-c", "/dev/null", "--rootdir", str(over), "-rfEs",
               "-p", "no:cacheprovider", "--hypothesis-seed=0"]  # fmt: skip
    named = any(a.endswith(".py") or ".py::" in a for a in arguments)
    every = [] if named else [str(over / "distributed" / file) for file in FILES]
    command = [sys.executable, "-m", "pytest", *options, *every, *arguments]
    os.execv(sys.executable, command)


def overlapped(body: Callable[..., Any], test: str, **given: Any) -> Any:
    """In a rank: the body of a test, whose models are overlapped as soon as they are sharded."""
    with quiet():
        seam = import_module("counterpoint.adapters.torchrec")
    on_gloo()
    said, calls = list[str](), [0]
    if os.environ["COUNTERPOINT_SUITE"] == "overlapped":
        called = seam.called

        def counted(*given: Any) -> Any:
            calls[0] += 1
            return called(*given)

        seam.called = counted
        each_model(lambda model: said.append(seam.overlap(model).explain()))
    try:
        return body(**given)
    finally:
        with TOLD.open("a") as file:
            told = {"test": test, "rank": given.get("rank"), "told": said, "calls": calls[0]}
            file.write(json.dumps(told) + "\n")


def each_model(then: Callable[[Any], None]) -> None:
    """Have `then` see each outermost module that TorchRec shards."""
    parallel = import_module("torchrec.distributed.model_parallel").DistributedModelParallel
    sharder = import_module("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder
    inside = [0]

    def seen(owner: Any, name: str) -> None:
        build = getattr(owner, name)

        @functools.wraps(build)
        def built(self: Any, *args: Any, **how: Any) -> Any:
            inside[0] += 1
            try:
                made = build(self, *args, **how)
            finally:
                inside[0] -= 1
            if not inside[0]:
                then(self if name == "__init__" else made)
            return made

        setattr(owner, name, built)

    seen(parallel, "__init__")
    seen(sharder, "shard")


def on_gloo() -> None:
    """Groups of nccl are of gloo; ranks give up on each other soon."""
    dist: Any = import_module("torch.distributed")
    for name in ("init_process_group", "new_group"):
        make = getattr(dist, name)

        def made(*args: Any, _make: Any = make, **how: Any) -> Any:
            args = tuple("gloo" if each == "nccl" else each for each in args)
            how = {key: "gloo" if each == "nccl" else each for key, each in how.items()}
            return _make(*args, **how | {"timeout": timedelta(seconds=SECONDS)})

        setattr(dist, name, functools.wraps(make)(made))

    def gathered(x: Any, world_size: int, pg: Any = None) -> list[Any]:
        found: list[Any] = [None] * world_size
        dist.all_gather_object(found, x.detach(), group=pg)
        return found

    # gloo gathers tensors of one size only
    sharding = import_module("torchrec.distributed.test_utils.test_sharding")
    sharding._gather_all_tensors = gathered


def plain(how: dict[str, Any]) -> None:
    """In full precision, by kernels of CPUs, of sizes that gloo can have, where a test draws."""
    if "qcomms_config" in how:
        how["qcomms_config"] = None
    for sharder in how.get("sharders", ()):
        sharder._qcomm_codecs_registry = None
        if getattr(sharder, "_kernel_type", "").startswith("fused_uvm"):
            sharder._kernel_type = "fused"
        if "row_wise" in getattr(sharder, "_sharding_type", ""):
            how["variable_batch_size"] = False  # gloo reduces and gathers tensors of one size


class quiet(warnings.catch_warnings):
    """Without what the import of TorchRec warns of."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported: as many GPUs as they ask for, and none for their tensors."""
    settings.register_profile("first", phases=(Phase.generate,), report_multiple_bugs=False)
    settings.load_profile("first")
    torch: Any = import_module("torch")
    torch.cuda.device_count = lambda: 8
    with quiet():
        many = import_module("torchrec.distributed.test_utils.multi_process")
        shared = import_module("torchrec.distributed.test_utils.test_model_parallel")
    mp = import_module("multiprocessing")
    mp.set_forkserver_preload(["torchrec_suite", shared.__name__])
    base, run = many.MultiProcessTestBase, many.MultiProcessTestBase._run_multi_process_test
    per_rank = base._run_multi_process_test_per_rank
    setup = shared.ModelParallelTestShared.setUp

    def bound(body: Any) -> Any:
        return functools.partial(overlapped, body, os.environ["PYTEST_CURRENT_TEST"])

    def run_all(self: Any, *, callable: Any, **how: Any) -> None:
        if "qcomms" not in self.id():
            plain(how)
        run(self, callable=bound(callable), **how)

    def run_each(self: Any, *, callable: Any, **how: Any) -> None:
        per_rank(self, callable=bound(callable), **how)

    base._run_multi_process_test, base._run_multi_process_test_per_rank = run_all, run_each

    def set_up(self: Any, **_: Any) -> None:
        setup(self, backend="gloo")
        self.backend = "nccl"  # by name only: these tests skip what gloo once had not

    shared.ModelParallelTestShared.setUp = set_up
    on_gloo()


if __name__ == "__main__":
    rest = sys.argv[1:]
    sys.exit(main("--theirs" in rest, [each for each in rest if each != "--theirs"]))
