"""What carries a collective: the library's kernels on SMs, or copy engines, which take no SM.

An all-gather and an all-to-all are copies and nothing else. An all-reduce is a reduce-scatter,
which has to add and stays with the library, and an all-gather, which does not.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from counterpoint.errors import InputError
from counterpoint.gpu.driver import Copy, copy_async
from counterpoint.group.library import Library, library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.symmetric import SymmetricMemory
from counterpoint.plan.bind import Arrival
from counterpoint.resources.controls import Transport
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.stages import Collective
from counterpoint.run.lanes_cuda import lanes_of
from counterpoint.run.launch_cuda import signal

Carry = Callable[[], object]  # puts a collective on the current stream
COPYABLE = ("all_gather", "all_to_all", "all_reduce")


def refusal(pipeline: Pipeline, transport: Transport) -> str:
    """Why no collective of `pipeline` can go by `transport`; "" if one can."""
    if transport == "sm":
        return ""
    if pipeline.device.type != "cuda":
        return "CPU ranks have no copy engines"
    if transport == "zero_cta":
        if any(_goes_by_library(pipeline, c) for c in pipeline.collectives):
            return ""
        return "no all-gather or all-to-all is of memory from Pipeline.empty(memory='library')"
    able = [c for c in pipeline.collectives if c.op in COPYABLE]
    if not able:
        return "copies cannot add: there is no all-gather, all-to-all or all-reduce"
    if any(pipeline.memory_of(c.target) is None for c in able):
        return "peers cannot write to the targets; allocate them with Pipeline.empty"
    return ""


def carriers(
    pipeline: Pipeline, transport: Transport, group: dist.ProcessGroup | None = None
) -> list[Carry]:
    """For each collective, what puts it on the current stream, by `transport` where it can.

    Collective and synchronous at its first call for a transport.

    Args:
        pipeline: on a GPU, or on CPU ranks with "sm".
        transport: of its collectives; a reduce-scatter stays with the library.
        group: for the library's part; None: the pipeline's own.

    Raises:
        InputError: no collective can go by it; the message says why.
    """
    why = refusal(pipeline, transport)
    if why:
        want = "one that can carry a collective of the pipeline"
        raise InputError("transport", "transport", want=want, got=f"{transport}: {why}")
    group = group or pipeline.group
    if transport == "copy_engine":
        lane = pipeline.kept.get("copy lane")
        if lane is None:
            lane = pipeline.kept["copy lane"] = CopyLane(pipeline)
        memories = [
            pipeline.memory_of(c.target) if c.op in COPYABLE else None for c in pipeline.collectives
        ]
        return [
            lane.carrier(c, memory, group) if memory else _by_library(pipeline, c, group)
            for c, memory in zip(pipeline.collectives, memories, strict=True)
        ]
    zero = pipeline.zero_cta.group if transport == "zero_cta" and pipeline.zero_cta else group
    return [
        _by_library(pipeline, c, zero if _goes_by_library(pipeline, c) else group)
        for c in pipeline.collectives
    ]


def _goes_by_library(pipeline: Pipeline, collective: Collective) -> bool:
    """Whether NCCL can carry it without a kernel."""
    own = pipeline.zero_cta
    tensors = (collective.target, collective.source)
    is_copy = collective.op in ("all_gather", "all_to_all")
    return own is not None and is_copy and all(own.holds(t) for t in tensors)


def library_writes_to_peers_memory(pipeline: Pipeline, transport: Transport) -> bool:
    """Whether collectives of the library touch memory that is open to peers.

    NCCL 2.28 registers the buffers of captured collectives with its peers; with torch's symmetric
    memory among them the replayed graph does not end (2xH200, 2026-11).
    """
    by_library = [
        c
        for c in pipeline.collectives
        if transport != "copy_engine" or c.op in ("all_reduce", "reduce_scatter")
    ]
    tensors = [t for c in by_library for t in (c.target, c.source)]
    return any(pipeline.memory_of(t) is not None for t in tensors)


def _by_library(pipeline: Pipeline, collective: Collective, group: dist.ProcessGroup) -> Carry:
    """The library's collective on the current stream, in stream order."""
    name = collective.name
    awaited = Awaited("pipeline", f"take part in {name!r}", name)
    calls = library_of(pipeline.workspace, awaited, group)
    target, source = collective.target, collective.source
    flat_target, flat_source = target.view(-1), source.view(-1)
    average = collective.reduction == "avg"
    if collective.op == "all_reduce":
        return lambda: calls.all_reduce(target, average=average)
    if collective.op == "reduce_scatter":
        return lambda: calls.reduce_scatter(flat_target, flat_source, average=average)
    call = calls.all_gather if collective.op == "all_gather" else calls.all_to_all
    return lambda: call(flat_target, flat_source)


class CopyLane:
    """Pushes to all peers by copy engines, between a meeting of all ranks and their arrival.

    The meeting says that every rank's target may be written; each push is followed by a copy of the
    epoch word, and a kernel of one warp waits for those of all peers. Peers in ring order: no two
    ranks push to the same one.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.workspace = pipeline.workspace
        self.workspace.open_pads()
        self.lanes = lanes_of(self.workspace)
        self.own, self.edge = torch.cuda.Stream(pipeline.device), torch.cuda.Event()
        rank, ranks = self.workspace.rank, dist.get_world_size(pipeline.group)
        self.peers = [(rank + d) % ranks for d in range(1, ranks)]
        self.meets = [Arrival(rank, peer) for peer in self.peers]
        self.met = [Arrival(peer, peer) for peer in self.peers]
        self.arrivals = [Arrival(ranks + peer, peer) for peer in self.peers]
        # those of all carriers: a graph outlives the one that it has captured
        self.tables = [
            *map(self.lanes.posted_words, ([], self.meets)),
            *map(self.lanes.awaited_words, (self.met, self.arrivals)),
        ]

    def carrier(
        self, collective: Collective, memory: SymmetricMemory, group: dist.ProcessGroup
    ) -> Carry:
        """Puts an all-gather, all-to-all or all-reduce on the current stream.

        Its target lies in `memory`; the library's part of an all-reduce is by `group`.
        """
        rank, ranks, peers = self.workspace.rank, memory.world_size, self.peers
        base = memory.buffer_ptrs[rank]
        offset = collective.target.data_ptr() - base
        total_bytes = collective.source.numel() * collective.source.element_size()
        gathers = collective.op == "all_gather"
        part = total_bytes if gathers else total_bytes // ranks
        reduces = collective.op == "all_reduce"
        if reduces and collective.source.numel() % ranks:
            want = f"of a number of elements that {ranks} ranks divide"
            raise InputError("transport", "all_reduce", want=want, got=collective.source.numel())

        def push(to: int) -> Copy:
            if reduces:  # the part that this rank has summed
                source = collective.target.data_ptr() + rank * part
            else:
                source = collective.source.data_ptr() + (0 if gathers else to * part)
            target = memory.buffer_ptrs[to] + offset + rank * part
            return Copy(target, part, source, part, part, 1)

        name = collective.name
        awaited = (f"meeting before {name!r}", tuple(peers)), (f"arrival of {name!r}", tuple(peers))
        tag = self.lanes.register("pipeline", "copy_engine", awaited)
        posts = [self.lanes.post_copies([Arrival(ranks + rank, peer)])[0] for peer in peers]
        open_ = signal(self.lanes, self.meets, self.met, tag, opens=True)
        close = signal(self.lanes, (), self.arrivals, tag + 1, opens=False)
        awaited_sum = Awaited("pipeline", f"take part in {name!r}", name)
        calls = library_of(self.workspace, awaited_sum, group)
        sum_parts = _sum_parts(collective, calls, rank, ranks) if reduces else None

        def carry() -> None:
            stream = torch.cuda.current_stream(self.workspace.device)
            if sum_parts is not None:
                sum_parts()
            else:  # the own part, beside all else
                self.edge.record(stream)
                self.own.wait_event(self.edge)
                copy_async(push(rank), self.own.cuda_stream)
            open_(stream.cuda_stream)
            for peer, post in zip(peers, posts, strict=True):
                copy_async(push(peer), stream.cuda_stream)
                copy_async(post, stream.cuda_stream)
            close(stream.cuda_stream)
            if sum_parts is None:
                self.edge.record(self.own)
                stream.wait_event(self.edge)

        return carry


def _sum_parts(collective: Collective, calls: Library, rank: int, ranks: int) -> Callable[[], None]:
    """The reduce-scatter of an all-reduce, in place: each rank sums its own part."""
    flat = collective.target.view(-1)
    part = flat.numel() // ranks
    mine = flat[rank * part : (rank + 1) * part]
    average = collective.reduction == "avg"
    return lambda: calls.reduce_scatter(mine, flat, average=average)
