"""Operators between two islands on one host: how much of the shorter of compute and exchange hides.

The ranks are processes of their own, and NCCL is told that they are on two hosts. It then sends
between the islands over sockets, about as fast as a slow NIC does. Where there is one GPU, two
ranks share it and take turns: rows say so ("shared"), and their times are no times of two GPUs.

    compute    the matmul alone, or the lookups alone, which pool all bags for all ranks
    exchange   NCCL's all-gather or reduce-scatter alone, or its all-to-all and a concat
    wire       the same bytes by NCCL's send and receive, as our plans exchange them
    serial     compute and exchange, one after the other
    chunks=N   our plan "islands"; with "S SMs left" its matmuls leave so many to exchanges
    auto       the plan that is chosen once the NIC has been measured

Each case begins with a measurement of both parts. It then takes the matmul, or the bags, that last
about as long as the exchange; rows have the sizes. Hidden is (compute + exchange - ours) over the
shorter of compute and exchange. NCCL cuts what it sends to another host into chunks of 128 KiB, and
what it gathers into larger ones: half of the cases send larger ones (NCCL_P2P_NET_CHUNKSIZE)."""

import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp
from benchmarks import embedding, runner
from benchmarks.choice import forget_tuned
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section, all_gather
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, measured, ms, of_most
from counterpoint.group.ranks import spawn
from counterpoint.group.store import gather_by_store
from counterpoint.group.workspace import Workspace, release_all, workspace_of
from counterpoint.measure.exchanges import exchange, exchanges, slowest_s
from counterpoint.measure.timing import relative_error, soak
from counterpoint.model.calibrate_cpu import nic_of
from counterpoint.ops.auto import choose_spec, knowledge_of
from counterpoint.plan.names import COMPUTE
from counterpoint.problem import ITEM_BYTES

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
BAGS = "embedding_bag_all_to_all"
ISLANDS = 2
CHUNKS = (1, 2, 4, 8)
LEFT = (4, 12)  # of 132 SMs: green contexts have a multiple of 8
LEFT_CHUNKS = 4
LARGER_KIB = 512  # chunks as large as those of NCCL's collectives
LIMIT_S = 90.0  # of the ranks of a case, their start included
ROUNDS = 3  # of the measurements that find a size
SIZES = 16  # sizes that are tried are multiples of 1 / SIZES of the first, up to SIZES times it
SOAK_S = 0.3


def matmul_case(op: str, rows: int, cols: int, first: int, chunk_kib: int = 0) -> Case:
    """A block of [rows, cols] of each rank is exchanged; `first` is the size tried first, of the
    other side of the matmul. NCCL sends chunks of `chunk_kib`; 0: as large as it likes."""
    return _of(op, chunk_kib, {"rows": rows, "cols": cols, "first": first})


def bags_case(tables: int, d: int, batch: int, first: int, chunk_kib: int = 0) -> Case:
    """As many tables on each rank; `first` is the number of indices of a bag tried first."""
    return _of(BAGS, chunk_kib, {"each": tables, "d": d, "batch": batch, "first": first})


def _of(op: str, chunk_kib: int, sizes: Mapping[str, Any]) -> Case:
    name = f"{op}, chunks of {chunk_kib} KiB" if chunk_kib else op
    return Case(name, {"op": op, **sizes, "chunk_kib": chunk_kib, "dtype": "bfloat16"})


def cases(ranks: int) -> list[Case]:
    """Of each rank 64 MiB are exchanged."""
    found: list[Case] = []
    for chunk_kib in (0, LARGER_KIB):
        found += [matmul_case(op, 4096, 8192, 16384, chunk_kib) for op in (GATHER, SCATTER)]
        found.append(bags_case(8, 128, 32768 * max(ranks, ISLANDS), 64, chunk_kib))
    return found


def rows(case: Case, bench: Bench) -> list[Row]:
    """The rows of a case, by ranks that the first rank starts; the others wait without a GPU."""
    gather = gather_by_store(bench.group, f"{TWO_ISLANDS.name} {case.name}", LIMIT_S + 10)
    found: list[Row] = []
    if bench.rank == 0:
        ranks = max(ISLANDS, bench.ranks // ISLANDS * ISLANDS)
        how = (bench.ranks if bench.on_gpu else 0, bench.short, bench.rounds)
        with tempfile.TemporaryDirectory(prefix="counterpoint-islands-") as folder:
            place = f"{folder}/store"
            found = spawn(of_island, ranks, case, place, *how, timeout_s=LIMIT_S)[0]
    return gather(found)[0]


def environment(rank: int, ranks: int, gpus: int, chunk_kib: int = 0) -> dict[str, str]:
    """What makes this rank one of an island, for NCCL and for us.

    Args:
        gpus: that all ranks have; 0: they are CPU ranks.
        chunk_kib: see `matmul_case`.
    """
    island = f"island{rank // (ranks // ISLANDS)}"
    found = {"COUNTERPOINT_ISLAND": island}
    if gpus:
        found |= {"NCCL_HOSTID": island, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    if gpus and chunk_kib:
        found |= {"NCCL_P2P_NET_CHUNKSIZE": str(chunk_kib << 10)}
    if gpus and gpus < ranks:  # who waits for a peer takes its time from it
        found |= {"COUNTERPOINT_TIMEOUT_S": "40", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    return found


def of_island(
    rank: int, ranks: int, case: Case, place: str, gpus: int, short: bool, rounds: int
) -> list[Row]:
    """Be a rank of an island, and measure a case; see `rows`.

    Args:
        place: a file that does not exist yet, where NCCL's ranks meet.
        gpus: as of `environment`.
    """
    os.environ |= environment(rank, ranks, gpus, case["chunk_kib"])
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
        dist.destroy_process_group()  # gloo's; what goes between islands is of the default backend
        dist.init_process_group("nccl", init_method=f"file://{place}", rank=rank,
                                world_size=ranks, device_id=device)  # fmt: skip
    try:
        assert dist.group.WORLD is not None
        bench = Bench(dist.group.WORLD, device, short=short, rounds=rounds)
        return inside(case, bench)
    except Exception:
        traceback.print_exc()  # peers that wait in NCCL would keep this rank from ending
        os._exit(1)


def inside(case: Case, bench: Bench) -> list[Row]:
    """The rows of a case, of ranks that are on their islands."""
    forget_tuned(bench)  # these ranks are new processes
    found = runner.measured(replace(TWO_ISLANDS, arms=arms, rows=None), case, bench)
    release_all()
    return found


def arms(case: Case, bench: Bench) -> Arms:
    """All arms of a case, at a size by which compute takes about as long as the exchange."""
    workspace = workspace_of(bench.group, bench.device)
    nic, known = nic_of(workspace.gather(exchanges(workspace, ROUNDS))[0]), knowledge_of(workspace)
    if known.machine is not None:  # as `counterpoint characterize` leaves it
        workspace.knowledge = replace(known, machine=replace(known.machine, nic=nic))
    made = bags if case["op"] == BAGS else matmul

    def parts(size: int) -> Parts:
        return made(case, bench, size)

    size = balanced(case["first"], parts, workspace)
    found = parts(size)
    calls = {f"chunks={n}": found.ours(f"islands chunks={n}") for n in CHUNKS}
    problem = replace(found.problem, islands=workspace.islands.number)
    alone = {"compute": found.compute, "exchange": found.exchange}
    if case["op"] != BAGS:
        send = exchange(workspace, case["rows"] * case["cols"] * ITEM_BYTES[case["dtype"]])
        alone["wire"] = lambda _: send()
    if case["op"] != BAGS and bench.on_gpu:
        sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
        for left in LEFT:
            calls[left_name(left)] = found.ours(leaving(problem, sms - left))
    pick = choose_spec(problem, workspace, found.operands).spec
    facts = {"islands": workspace.islands.number, "of_ranks": bench.ranks, **found.facts,
             "shared": bench.on_gpu and len({*bench.gathered(bench.device.index)}) < bench.ranks,
             "nic_bytes_per_s": nic.bytes_per_s if nic else None}  # fmt: skip
    return Arms(
        {**alone, "serial": found.serial, "auto": found.ours("auto"), **calls},
        found.check, parts=tuple(alone), floor=embedding.ROUNDING, facts=facts,
        nan_bytes=max(2 * problem.m * problem.n, 1 << 20),
        about={"auto": {"pick": pick}},
    )  # fmt: skip


def left_name(left: int) -> str:
    """The arm whose matmuls leave so many SMs."""
    return f"chunks={LEFT_CHUNKS}, {left} SMs left"


def leaving(problem: cp.Problem, num_sms: int) -> cp.Plan:
    """Our plan, whose matmuls run on so many SMs."""
    plan = cp.build(problem, f"islands chunks={LEFT_CHUNKS}")
    lanes = (replace(each, num_sms=num_sms) if each == COMPUTE else each for each in plan.lanes)
    return replace(plan, lanes=tuple(lanes))


class Parts(NamedTuple):
    """One size of a case: what is timed, and how a result is checked."""

    compute: Call
    exchange: Call
    serial: Call
    ours: Callable[[str | cp.Plan], Call]
    check: Callable[[str, Any], list[float]]
    problem: cp.Problem
    operands: Sequence[Tensor]
    facts: Mapping[str, Any]


def balanced(first: int, parts: Callable[[int], Parts], workspace: Workspace) -> int:
    """The size by which compute takes about as long as the exchange; compute grows with it."""
    if workspace.device.type == "cuda":
        soak(SOAK_S, workspace.device)
    tried = parts(first)
    tried.serial(0)  # matmuls of zeros take less power, and so less time
    compute_s, exchange_s = (
        slowest_s(lambda call=call: call(0), workspace, ROUNDS)
        for call in (tried.compute, tried.exchange)
    )
    size = round(SIZES * exchange_s / compute_s)
    return max(1, min(size, SIZES**2)) * first // SIZES


def matmul(case: Case, bench: Bench, size: int) -> Parts:
    """A gather and its matmul, of `size` columns, or a matmul along `size` and its scatter."""
    gathers, block, cols = case["op"] == GATHER, case["rows"], case["cols"]
    m = block * bench.ranks
    n, k = (size, cols) if gathers else (cols, size)
    x, w = bench.normal(block if gathers else m, k), bench.normal(n, k).t()
    full, y = bench.empty(m, cols), bench.empty(m if gathers else block, n)

    def exchange(_: int) -> None:
        if gathers:
            all_gather(full, x, group=bench.group)
        else:
            bench.reduce_scatter(y, full)

    def compute(_: int) -> None:
        left, product = (full, y) if gathers else (x, full)
        torch.mm(left, w, out=product)

    def serial(_: int) -> Tensor:
        for part in (exchange, compute) if gathers else (compute, exchange):
            part(0)
        return y

    def ours(plan: str | cp.Plan) -> Call:
        op: Callable[..., Tensor] = getattr(cp, case["op"])
        return lambda _: op(x, w, group=bench.group, plan=plan)

    def check(_: str, got: Tensor) -> list[float]:
        some, across = bench.sample(m), bench.sample(n)
        left = bench.whole(x)[some] if gathers else x[some]
        want, first = left.double() @ w[:, across].double(), 0
        if not gathers:
            bench.summed(want)
            first = bench.rank * block
            mine = some // block == bench.rank
            some, want = some[mine], want[mine]
        return [relative_error(got[some - first][:, across], want) if len(want) else 0.0]

    problem = cp.Problem(case["op"], m, n, k, bench.ranks, "bfloat16")
    return Parts(compute, exchange, serial, ours, check, problem, (x, w),
                 {"m": m, "n": n, "k": k})  # fmt: skip


def bags(case: Case, bench: Bench, size: int) -> Parts:
    """Bags of `size` indices each; lookups alone are a call of a group that has one rank."""
    b = embedding.made(embedding.case_of(case["each"], case["d"], size, case["batch"]), bench)
    columns, own = sum(b.dims[bench.rank]), b.batch // bench.ranks
    alone: Any = dist.new_group([dist.get_global_rank(bench.group, bench.rank)],
                                use_local_synchronization=True)  # fmt: skip
    sent, got = (bench.empty(b.batch, columns) for _ in range(2))

    def called(
        group: dist.ProcessGroup, plan: str | cp.Plan, batch: list[int], dims: list[Any]
    ) -> Call:
        return lambda i: cp.embedding_bag_all_to_all(
            b.tables, b.sets[i % len(b.sets)], b.offsets, group=group, plan=plan,
            include_last_offset=True, batch=batch, dims=dims,
        )  # fmt: skip

    def ours(plan: str | cp.Plan) -> Call:
        return called(bench.group, plan, [own] * bench.ranks, b.dims)

    def exchange(_: int) -> Tensor:
        dist.all_to_all_single(got, sent, group=bench.group)
        return torch.cat(got.view(bench.ranks, own, columns).unbind(), 1)

    def check(_: str, y: Tensor) -> list[float]:
        some, want = embedding.wanted(b, bench)
        first = own * bench.rank
        return [relative_error(y[some - first], want) if len(want) else 0.0]

    rows = (own,) * bench.ranks
    problem = cp.Problem(
        BAGS, b.batch, ranks=bench.ranks, dtype="bfloat16", rows=rows, tables=tuple(b.dims),
        indices=(b.sets[0].numel(),) * bench.ranks,
    )  # fmt: skip
    compute = called(alone, "serial", [b.batch], [b.dims[bench.rank]])
    return Parts(compute, exchange, ours("serial"), ours, check, problem, (), {"pooling": size})


# ---- what is said of the rows


def hidden(case: Timed, arm: str) -> float:
    """The share of the shorter part that an arm hides."""
    parts = case.s("compute"), case.s("exchange")
    return (sum(parts) - case.s(arm)) / min(parts)


def best(case: Timed) -> str:
    """The number of chunks that took least, as an arm."""
    return case.fastest(arm for arm in case.main if arm.startswith("chunks="))


def _size(case: Timed) -> str:
    head = case.head
    if head["op"] == BAGS:
        return f"{head['batch']} bags, {head['each']} tables, {head['pooling']} indices"
    return ", ".join(str(head[name]) for name in "mnk")


def _speedups(case: Timed) -> str:
    arms = [f"chunks={n}" for n in CHUNKS] + [left_name(left) for left in LEFT]
    found = [f"{case.s('serial') / case.s(arm):.2f}x" for arm in arms if arm in case]
    return ", ".join(found)


def _parts(case: Timed) -> str:
    wire = f" ({ms(case.s('wire'))})" if "wire" in case else ""
    return f"{ms(case.s('compute'))} + {ms(case.s('exchange'))}{wire} ms"


def _operator(case: Timed) -> str:
    op = case.head["op"]
    return case.head["case"].replace(op, f"`{op}`")


def _auto(case: Timed) -> str:
    speedup = case.s("serial") / case.s("auto")
    return f"{speedup:.2f}x, {hidden(case, 'auto'):.0%} hidden, {case.main['auto']['pick']}"


COLUMNS = (
    Column("operator", _operator),
    Column("M, N, K or bags", _size),
    Column("compute + exchange (by send and receive)", _parts),
    Column(f"speedup, {', '.join(map(str, CHUNKS))} chunks; {LEFT_CHUNKS} with "
           f"{' and '.join(map(str, LEFT))} SMs left", _speedups),
    Column("auto", _auto),
    Column("hidden", lambda c: f"{hidden(c, best(c)):.0%}, {best(c)}"),
)  # fmt: skip


def speedups(found: list[Row]) -> str:
    """Every case."""
    every = taken(found, "case")
    lines = [([column.cell(case) for column in COLUMNS], case.rows) for case in every]
    shared = any(case.head["shared"] for case in every)
    note = (
        "Two islands of one host, which NCCL joins by sockets over the loopback. A speedup is over "
        "the matmul and NCCL's collective, or over lookups, NCCL's all-to-all and a concat. Hidden "
        "is the share of the shorter of compute and exchange, by the best number of chunks. "
        f"Chunks of {LARGER_KIB} KiB: with `NCCL_P2P_NET_CHUNKSIZE={LARGER_KIB << 10}`."
    )
    note += " Two ranks share the GPU: these are no times of two GPUs." if shared else ""
    return measured([column.head for column in COLUMNS], lines, note)


TWO_ISLANDS = Benchmark(
    "two_islands", cases, rows=rows, unit="ms", least=1, calls=0, every_eager=True, host=False,
    eager=("auto", *(f"chunks={n}" for n in CHUNKS), *map(left_name, LEFT)),
    short=lambda case: case.name == GATHER,
    sections=(Section("docs/islands.md", "two-islands", of_most(speedups)),),
)  # fmt: skip
