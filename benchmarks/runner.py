"""The one runner: checks every arm of a declared benchmark against fp64, then times all of them.

    python -m benchmarks.runner overlap --out rows.jsonl      # or: counterpoint bench overlap
    python -m benchmarks.runner decode experts --short --out folder

Inputs are random and differ by rank; weights take turns, so that none is in the L2. An arm is a
CUDA graph of several calls; all arms of a case share one randomised rotation at settled clocks.
Single calls stand beside: behind a backlog, where only the GPU counts, and plain, where the host
does too."""

import faulthandler
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

import counterpoint as cp
from benchmarks import options, sources
from benchmarks.choice import forget_tuned
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, WrongResultError
from benchmarks.rows import Row, kind_of
from counterpoint.cli.shared.launch import nccl_group, too_few_gpus, torchrun, under_torchrun
from counterpoint.errors import CounterpointError, InputError
from counterpoint.measure import record
from counterpoint.measure.timing import Arm, Times, captured, host_s, rotate
from counterpoint.run.replay import SEEN_BEFORE

SHORT_ROUNDS = 5


def _nan_behind(device: torch.device, num_bytes: int) -> None:
    """Have what is allocated next hold NaN, so that an arm that writes nothing is seen; on GPUs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.full((num_bytes // 2,), torch.nan, dtype=torch.bfloat16, device=device)


def declared(name: str) -> Benchmark:
    """A benchmark by its name; it is in a file of its own, or of the one whose arms it has."""
    module = importlib.import_module(f"benchmarks.{HOMES.get(name, name)}")
    return next(b for b in vars(module).values() if isinstance(b, Benchmark) and b.name == name)


HOMES = {"few_rows": "overlap", "transports": "copies", "ficco": "ficco_scores"}


def measured(benchmark: Benchmark, case: Case, bench: Bench) -> list[Row]:
    """Check and time one case; all ranks call this, and all get its rows.

    Raises:
        WrongResultError: an arm computed something else than fp64 says. It was not timed; the
            others were, unless it is one that they are held against.
    """
    bench.seeded(sum(case.name.encode()))
    if benchmark.rows is not None:
        rows = benchmark.rows(case, bench)
        facts: Mapping[str, Any] = {}
    else:
        assert benchmark.arms is not None, f"{benchmark.name} has neither arms nor rows"
        arms = benchmark.arms(case, bench)
        calls, rows = _had(arms, bench)
        errors, wrong = checked(f"{benchmark.name} {case.name}", arms, calls, bench)
        calls = {name: call for name, call in calls.items() if name not in wrong}
        rows += [{"arm": name, "refused": text, "wrong": True} for name, text in wrong.items()]
        rows += _timed(benchmark, arms, calls, errors, bench)
        bench.meet()
        arms.close()
        facts = {"bytes": benchmark.moved(case, bench.ranks)} | dict(arms.facts)
    facts = {"table": benchmark.name, "case": case.name, "ranks": bench.ranks} | dict(facts)
    facts |= record.environment() | {"source": sources.digest_of(sources.imported())}
    rows = [{**row, **case.facts, **facts} for row in rows]
    if wrong := [f"{row['arm']}: {row['refused']}" for row in rows if row.get("wrong")]:
        raise WrongResultError(f"{benchmark.name} {case.name}, {'; '.join(wrong)}", rows)
    return rows


def _had(arms: Arms, bench: Bench) -> tuple[dict[str, Call], list[Row]]:
    """The arms that all ranks have; and rows of the others, with the reason of some rank."""
    here = {name: call if isinstance(call, str) else "" for name, call in arms.calls.items()}
    why: dict[str, str] = {}
    for reasons in bench.gathered(here):
        why |= {name: reason for name, reason in reasons.items() if reason}
    for name, reason in why.items():
        bench.say(f"without {name}: {reason}")
    calls = {n: c for n, c in arms.calls.items() if n not in why and not isinstance(c, str)}
    return calls, [{"arm": name, "refused": reason} for name, reason in why.items()]


def checked(
    what: str, arms: Arms, calls: Mapping[str, Call], bench: Bench
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Errors of all arms with a result, of the worst rank; memory is full of NaN before each.

    Returns:
        The errors, and which arms are off by more than twice what they are held against.

    Raises:
        WrongResultError: the baseline is off by more than rounding, or another arm that others are
            held against.
    """
    bases = {arms.baseline, *arms.against.values()}
    names = sorted((n for n in calls if n not in arms.parts), key=lambda n: n not in bases)
    found: dict[str, list[float]] = {}
    wrong: dict[str, str] = {}
    for name in names:
        for output in arms.outputs:
            output.fill_(torch.nan)
        _nan_behind(bench.device, arms.nan_bytes)
        bench.meet()
        errors = found[name] = bench.most(arms.check(name, calls[name](0)))
        limits = [arms.limit] * len(errors)
        if name not in bases:
            base = found[arms.against.get(name, arms.baseline)]
            limits = [max(2 * error, arms.floor) for error in base]
        if any(not error <= limit for error, limit in zip(errors, limits, strict=True)):
            told = [", ".join(f"{e:.1e}" for e in each) for each in (errors, limits)]
            wrong[name] = f"off by {told[0]} against fp64, at most {told[1]}"
            bench.say(f"without {name}: {wrong[name]}")
            if name in bases:
                arms.close()
                raise WrongResultError(f"{what}, {name}: {wrong[name]}", [])
    return found, wrong


def _timed(
    benchmark: Benchmark, arms: Arms, calls: Mapping[str, Call], errors: dict[str, list[float]],
    bench: Bench,
) -> list[Row]:  # fmt: skip
    """Rows of graphs, then of single calls; none where nobody has an arm."""
    if not calls:
        return []
    more: dict[str, Any] = {
        "group": bench.group,
        "device": bench.device,
        "rounds": _rounds(benchmark, bench),
    }
    soak_s = 0.05 if bench.short else benchmark.soak_s
    row = partial(_row, arms, errors)
    rows: list[Row] = []
    if benchmark.calls and bench.on_gpu:
        per = max(benchmark.calls, arms.sets)
        bench.say("capturing")
        graphs, refused = _captured(calls, per, arms, bench)
        bench.say(f"timing {len(graphs)} graphs")
        times = rotate(graphs, soak_s=soak_s, **more)
        rows += [*refused, *(row(name, "graph", times, per) for name in times)]
        del graphs
    every = benchmark.every_eager or not bench.on_gpu
    single = {n: _turning(c) for n, c in calls.items() if every or n in benchmark.eager}
    if not single:
        return rows
    bench.say(f"timing {len(single)} single calls")
    some = {name: arm for name, arm in single.items() if name in benchmark.eager}
    for arm in some.values():
        # as in a loop over layers that has run for some steps: a call that repeats is one graph
        for _ in range((SEEN_BEFORE + 1) * arms.sets):
            arm()
    behind = rotate(single, soak_s=soak_s, backlog_cycles=benchmark.backlog_cycles, **more)
    plain = rotate(some, soak_s=0.05, backlog_cycles=1, **more) if some else {}
    for name, arm in single.items():
        beside: Row = {}
        if name in some:
            beside["plain_eager_s"] = plain[name].median_s
            if benchmark.host and bench.on_gpu:
                beside["host_s"] = host_s(arm, group=bench.group)
        rows.append(row(name, "eager", behind) | beside)
    return rows


def _row(
    arms: Arms, errors: Mapping[str, list[float]], name: str, mode: str,
    times: Mapping[str, Times], per: int = 1,
) -> Row:  # fmt: skip
    """An arm's times, for one of the `per` calls that were timed together.

    Ranks end those calls `skew_s` apart. That is no sum over calls: it is not divided by them.
    """
    t = times[name]
    found: Row = {
        "arm": name, "mode": mode, "median_s": t.median_s / per, "p20_s": t.quantile_s(2) / per,
        "p80_s": t.quantile_s(8) / per, "skew_s": t.skew_s, "rounds": len(t.rounds_s),
        "calls_per_graph": per if mode == "graph" else 0, "sm_clock_mhz": t.clock_mhz,
    }  # fmt: skip
    if arms.baseline in times:
        found["baseline_over_arm"] = t.ratio_of(times[arms.baseline])
    if name in errors:
        found["error"] = max(errors[name])
    return found | dict(arms.about.get(name, {}))


def _captured(
    calls: Mapping[str, Call], per: int, arms: Arms, bench: Bench
) -> tuple[dict[str, Arm], list[Row]]:
    """Replays of all arms that all ranks can capture; and rows of those that some rank cannot."""
    found: dict[str, Arm | str] = {}
    # behind a capture that has failed torch may take no other one: those that may fail come last
    for name, call in sorted(calls.items(), key=lambda each: each[0] in arms.peers):
        if name in arms.waits:
            found[name] = "its host takes part in each call"
            continue
        try:
            found[name] = captured(call, per, arms.pool)[0]
        except (RuntimeError, CounterpointError) as error:
            if name not in arms.peers:
                raise
            found[name] = f"it cannot be captured: {str(error).splitlines()[0]}"
    here = {name: replay if isinstance(replay, str) else "" for name, replay in found.items()}
    why = {n: text for texts in bench.gathered(here) for n, text in texts.items() if text}
    for name, reason in why.items():
        bench.say(f"{name}: {reason}")
    replays = {n: r for n, r in found.items() if n not in why and not isinstance(r, str)}
    return replays, [{"arm": n, "mode": "graph", "refused": text} for n, text in why.items()]


def _rounds(benchmark: Benchmark, bench: Bench) -> int:
    return bench.rounds or (
        min(SHORT_ROUNDS, benchmark.rounds) if bench.short else benchmark.rounds
    )


def _turning(call: Call) -> Arm:
    """Each call has the next operands; on all ranks alike, since all call as often."""
    numbers = count()
    return lambda: call(next(numbers))


def said(benchmark: Benchmark, case: Case, rows: Sequence[Row]) -> str:
    """One line: what each arm took."""
    scale = {"us": 1e6, "ms": 1e3}[benchmark.unit]
    parts: dict[str, list[str]] = {}
    for row in rows:
        if "median_s" in row:
            text = f"{row['arm']} {row['median_s'] * scale:.{1 if scale > 1e3 else 3}f}"
            parts.setdefault(row.get("mode", ""), []).append(text)
    text = "; ".join(f"{mode}: {', '.join(each)}" for mode, each in parts.items())
    return f"{case.name}: {text or rows} [{benchmark.unit}]"


def run(
    benchmark: Benchmark, cases: Sequence[Case], bench: Bench, out: Path | None,
    say: Callable[[str], None],
) -> list[Row]:  # fmt: skip
    """Measure the cases one after another; rank 0 writes the rows of each as soon as it has them.

    Raises:
        WrongResultError: arms were wrong; all else was measured and written before.
    """
    found: list[Row] = []
    wrong: list[str] = []
    for i, case in enumerate(cases, 1):
        try:
            rows = measured(benchmark, case, bench)
        except WrongResultError as error:
            rows = error.rows
            wrong.append(str(error))
        bench.meet()  # no rank frees what another one still writes to
        if bench.rank == 0 and out is not None:
            record.append(out, rows)
            sources.keep(out.parent)
        say(f"{i}/{len(cases)}  {said(benchmark, case, rows)}")
        found += rows
        gc.collect()  # graphs, and what they point into
        if bench.on_gpu:
            torch.cuda.empty_cache()
    if wrong:
        bench.meet()  # the first rank that ends so ends the others: all is written
        raise WrongResultError("; ".join(wrong), found)
    return found


def chosen(
    benchmark: Benchmark, ranks: int, *, short: bool = False, only: str = "", shapes: str = "",
    part: str = "1/1", shards: int = 0,
) -> list[Case]:  # fmt: skip
    """The cases that the command line asks for.

    Raises:
        InputError: there are none, the benchmark has no sizes of one's own or none that are cut, or
            `part` is not "I/N".
    """
    if shards and not benchmark.cut:
        raise InputError("bench", "--shards", want=f"left out with {benchmark.name}", got=shards)
    if shapes and benchmark.own is None:
        raise InputError("bench", "--shapes", want=f"left out with {benchmark.name}", got=shapes)
    if shapes and benchmark.own is not None:
        try:
            sizes = [tuple(map(int, text.split(","))) for text in shapes.split(":")]
            cases = [case for each in sizes for case in benchmark.own(each, ranks)]
        except ValueError as error:
            want = "numbers such as 2048,7168,8192:512,7168,8192"
            raise InputError("bench", "--shapes", want=want, got=repr(shapes)) from error
    else:
        cases = list(benchmark.cases(shards or ranks))
    if benchmark.apart and not only.startswith(benchmark.apart):
        cases = [case for case in cases if not case.name.startswith(benchmark.apart)]
    found = [
        c for c in cases if only.lower() in c.name.lower() and (benchmark.short(c) or not short)
    ]
    if not found:
        names = ", ".join(case.name for case in cases)
        raise InputError("bench", "--cases", want=f"part of one of: {names}", got=repr(only))
    number, _, of = part.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise InputError("bench", "--part", want='such as "1/4"', got=repr(part))
    return found[int(number) - 1 :: int(of)]


def file_of(name: str, out: Path | None, ranks: int) -> Path | None:
    """Where rows go: a file of its own for each benchmark, if `out` is a folder."""
    if out is None or out.suffix == ".jsonl":
        return out
    gpu = kind_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
    return out / f"{name.replace('_', '-')}-{ranks}x-{gpu}.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks on the GPUs here.

    Raises:
        InputError: there are too few, or no such cases.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = options.bench(given, __doc__ or "")
    names = args.names or ["overlap"]

    def pick(name: str, ranks: int) -> list[Case]:
        return chosen(declared(name), ranks, short=args.short, only=args.cases, shapes=args.shapes,
                      part=args.part, shards=args.shards)  # fmt: skip

    takes = max(declared(name).ranks or torch.cuda.device_count() for name in names)
    gpus = args.ranks or takes
    if args.list:
        print("\n".join(case.name for name in names for case in pick(name, max(gpus, 2))))
        return 0
    if (
        gpus < min(declared(name).ranks or declared(name).least for name in names)
        or not torch.cuda.is_available()
    ):
        raise too_few_gpus("bench", "`counterpoint demo` runs on CPU ranks")
    # captured collectives of NCCL hang on memory that is open to peers where they register it
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if not under_torchrun():
        for name in names:
            pick(name, gpus)  # a wrong option is said before ranks start
        return torchrun(gpus, given, module="benchmarks.runner")
    start_s = time.monotonic()
    with nccl_group() as (group, device):

        def say(text: str) -> None:
            if group.rank() == 0:
                print(f"{time.monotonic() - start_s:4.0f} s  {text}", flush=True)

        bench = Bench(group, device, short=args.short, rounds=args.rounds, say=say)
        forget_tuned(bench)
        for name in names:
            say(f"{name}, at most {args.limit} s")
            # a hang shows the stacks of all ranks
            faulthandler.dump_traceback_later(args.limit, exit=True)
            out = file_of(name, args.out, bench.ranks)
            run(declared(name), pick(name, bench.ranks), bench, out, say)
            cp.release(group)  # the next one begins as if it were alone
            if bench.rank == 0 and args.done is not None:
                with args.done.open("a") as file:
                    file.write(f"{name}\n")
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CounterpointError as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
