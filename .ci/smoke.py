"""What must work where counterpoint is installed, and there is no checkout.

python -I smoke.py [torch] [pictures]: what of it is installed; of the rest, errors say how to.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

start_s = time.perf_counter()
import counterpoint as cp  # noqa: E402  (its time is told)

IMPORT_S = time.perf_counter() - start_s
HEAVY = {"torch", "triton", "numpy"} & set(sys.modules)

from counterpoint.lazy import INSTALLED_BY  # noqa: E402

HAS_TORCH, DRAWS = "torch" in sys.argv, "pictures" in sys.argv
if HAS_TORCH:
    import torch
    import torch.distributed as dist

COMMAND = Path(sys.executable).with_name("counterpoint")


def command(*arguments: str, code: int = 0) -> str:
    """What `counterpoint ...` says."""
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def lacks(package: str, call: Callable[[], object]) -> None:
    """It needs a package that is not installed, and says how to install it."""
    said = ""
    try:
        call()
    except cp.UnsupportedError as error:
        said = str(error)
    assert f": {package} must be installed, got none; {INSTALLED_BY[package]}" in said, said
    print(f"  {said}")


def layers(rank: int, ranks: int) -> list[float]:
    """How far operators, a gradient too, are from torch's; alike on all ranks."""
    torch.manual_seed(rank)
    x, rows = torch.randn(64, 48, requires_grad=True), torch.randn(64 * ranks, 48)
    w = torch.randn(48, 40)
    found: list[float] = []
    everyone = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(everyone, x.detach())
    for plan in ("auto", "graded", "direct"):
        y = cp.all_gather_matmul(x, w, plan=plan)
        found.append(float((y - torch.cat(everyone) @ w).detach().abs().max()))
    sums = rows @ w
    dist.all_reduce(sums)
    own = sums.chunk(ranks)[rank]
    found.append(float((cp.matmul_reduce_scatter(rows, w, plan="shard_p2p") - own).abs().max()))
    found.append(float((cp.matmul_all_reduce(rows[:4], w) - sums[:4]).abs().max()))
    compiled = torch.compile(lambda x: cp.all_gather_matmul(x, w), backend="aot_eager")
    compiled(x).sum().backward()
    assert x.grad is not None
    columns = w.sum(1)
    dist.all_reduce(columns)
    found.append(float((x.grad - columns).abs().max()))
    return found


def on_ranks() -> None:
    """Operators agree with torch."""
    from counterpoint.group.ranks import spawn

    errors = spawn(layers, 2, timeout_s=120)
    worst = max(max(each) for each in errors)
    print(f"  2 CPU ranks: {len(errors[0])} checks against torch, off by {worst:.1e} at most")
    assert worst < 1e-3


def main() -> None:
    """Raises at the first thing that does not work."""
    assert Path(cp.__file__).is_relative_to(sys.prefix), f"imported from {cp.__file__}"
    print(f"  import counterpoint: {IMPORT_S * 1e3:.0f} ms, with {sorted(HEAVY) or 'no torch'}")
    assert not HEAVY

    assert command("--version").strip() == cp.__version__
    facts = json.loads(command("doctor", "--json"))
    versions = ("python", "torch", "triton", "numpy", "cuda-bindings", "CUDA")
    told = ", ".join(f"{name} {facts['versions'][name] or '-'}" for name in versions)
    print(f"  doctor: {told}; {facts['untried'] or 'tried before'}")
    lacking = {"torch": not HAS_TORCH, "pictures": not DRAWS}
    assert {name for name in lacking if lacking[name]} == {*facts["missing"]} & {*lacking}

    said = command("plan", "all_gather_matmul", "--shape", "8192,1280,8192", "--machine", "h200-4")
    print(f"  plan: {next(line for line in said.splitlines() if 'chosen' in line).strip()}")
    problem = cp.Problem("all_gather_matmul", m=8192, n=1280, k=8192, ranks=4)
    choice = cp.choose(problem, "h200-4")
    assert choice.machine.measured, "the measured rates of 4 H200 come with the library"
    step = ("llama3-8b", "--gpus", "8", "--tp", "8")
    assert "ours" in command("scale", *step)
    assert "Largest loss" in command("advise", "--model", *step, "--tokens", "4096")
    if DRAWS:
        assert choice.timeline.save("timeline.svg").stat().st_size > 10_000
    else:
        lacks("matplotlib", lambda: choice.timeline.save("timeline.svg"))
    if HAS_TORCH:
        on_ranks()
    else:
        lacks("torch", lambda: cp.all_gather_matmul)
        assert INSTALLED_BY["torch"] in command("demo", code=2)

    for name in ("bench", "evaluate"):
        assert "must be a checkout of counterpoint" in command(name, "overlap", code=2)
    print("  bench and evaluate: say that they need a checkout")


if __name__ == "__main__":
    main()
