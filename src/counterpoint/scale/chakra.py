"""Chakra execution traces of a predicted step, for simulators that read them, such as ASTRA-sim.

A file for the first rank of each pipeline stage: GlobalMetadata, then its nodes, each behind its
length. Of each event of the stage it has what is received, one node of computation, one of each
kind of collective and group (all layers of the event together), and what is sent. Collectives and
sends have their bytes; durations are what was predicted to be exposed. `data_deps` are what a node
comes after: its input, and the order of the stage, as Chakra's own converter writes both.

Source: schema/protobuf/et_def.proto of mlcommons/chakra, commit 21585d8, and the attributes that
its src/feeder reads. In a collective `comm_size` is what ASTRA-sim takes it for: of an all-gather a
rank's own bytes, of all others those of the full tensor.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from counterpoint.errors import InputError
from counterpoint.scale.layout import Layout
from counterpoint.scale.network.fabric import Group
from counterpoint.scale.parts import Collective, Parts, Sent
from counterpoint.scale.pipeline import Event
from counterpoint.scale.step import Stages

VERSION = "0.0.4"  # of the schema, as its own generators state it
MAX_NODES = 2**20  # 10 s, 100 MB
MAX_GROUP_RANKS = 2**22
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7  # NodeType
COMM_TYPES: dict[Collective, int] = {
    "all_reduce": 0, "all_gather": 2, "all_to_all": 6, "reduce_scatter": 7,
}  # fmt: skip
# fields of AttributeProto
INT32, INT64, BOOL, STRING = 7, 9, 27, 29


def save(folder: Path, stages: Stages, layout: Layout, title: str) -> list[Path]:
    """Write step.<rank>.et for the first rank of each stage, and the ranks of its groups.

    Args:
        folder: is made if it is missing.
        stages: what they do.
        layout: of the ranks.
        title: goes into the metadata.

    Returns:
        The traces, by stages. Beside them lies comm_groups.json, the ranks of each `pg_name`.

    Raises:
        InputError: there are more nodes, or ranks of groups, than can be written in seconds.
    """
    ranks = [_Rank(stage, stages, layout) for stage in range(layout.pp)]
    num_nodes = sum(each.most_nodes for each in ranks)
    if num_nodes > MAX_NODES:
        want = f"such that there are at most {MAX_NODES} nodes"
        raise InputError("save_chakra", "num_micro_batches", want=want, got=f"about {num_nodes}")
    num_ranks = sum(group.size for each in ranks for group in each.groups)
    if num_ranks > MAX_GROUP_RANKS:
        want = f"such that there are at most {MAX_GROUP_RANKS} ranks of groups"
        raise InputError("save_chakra", "dp", want=want, got=num_ranks)
    folder.mkdir(parents=True, exist_ok=True)
    start = _text(1, VERSION) + _bytes(2, _attribute("description", STRING, title))
    found: list[Path] = []
    for each in ranks:
        path = folder / f"step.{each.first}.et"
        path.write_bytes(_varint(len(start)) + start + b"".join(each.nodes()))
        found.append(path)
    groups = {name: list(ranks) for each in ranks for name, ranks in each.members()}
    (folder / "comm_groups.json").write_text(json.dumps(groups))
    return found


class _Rank:
    """The first rank of a stage, and its nodes."""

    def __init__(self, stage: int, stages: Stages, layout: Layout) -> None:
        self.stage, self.stages, self.layout = stage, stages, layout
        self.first = stage * self.stride
        self.num_nodes = 0
        self.previous = 0  # the node that the next one comes after; a send is waited for by none
        # attributes of nodes that differ by no more than their order
        self.kept: dict[object, bytes] = {}

    @property
    def stride(self) -> int:
        """Ranks of one stage."""
        return self.layout.num_gpus // self.layout.pp

    @cached_property
    def groups(self) -> dict[Group, str]:
        """Names of the groups that this rank communicates in: numbers, unique over all stages."""
        kinds = [parts.sent for both in self.stages.chunks[self.stage]
                 for parts in (both.forward, both.backward)]  # fmt: skip
        kinds += [self.stages.replicas[self.stage], self.stages.hop.gathered]
        found = dict.fromkeys(each.group for sent in kinds for each in sent)
        wide = [group for group in found if group.size > 1]
        return {group: str(len(wide) * self.stage + i) for i, group in enumerate(wide, 1)}

    def members(self) -> Iterator[tuple[str, range]]:
        """Names and ranks of the groups."""
        for group, name in self.groups.items():
            yield name, range(self.first, self.first + group.size * group.stride, group.stride)

    @property
    def most_nodes(self) -> int:
        """At most so many."""
        events = len(self.stages.pipeline.starts_s[self.stage]) + 2
        kinds = [parts.sent for both in self.stages.chunks[self.stage]
                 for parts in (both.forward, both.backward)]  # fmt: skip
        return events * (4 + max(map(len, kinds)))

    def nodes(self) -> Iterator[bytes]:
        """All, in the order of the stage."""
        for event, start_s, end_s in self.stages.events(self.stage):
            if event.kind == "data parallel":
                # parameters are gathered when the optimizer has run, in the seconds of both
                replicas = self.stages.replicas[self.stage]
                first = {key: n for key, n in replicas.items() if key.kind != "all_gather"}
                yield from self._collectives(first, start_s, end_s, "gradients")
            elif event.kind == "optimizer":
                yield self._node("optimizer", COMPUTE, start_s, end_s)
                self.previous = self.num_nodes
                replicas = self.stages.replicas[self.stage]
                last = {key: n for key, n in replicas.items() if key.kind == "all_gather"}
                yield from self._collectives(last, end_s, end_s, "parameters")
            else:
                yield from self._event(event, start_s, end_s)

    def _event(self, event: Event, start_s: float, end_s: float) -> Iterator[bytes]:
        """A forward, a backward, or gradients of weights."""
        name = f"{event.kind} {event.batch}" + f" of part {event.part}" * (
            self.layout.virtual_stages > 1
        )
        before, behind = self._neighbours(event)
        chunk = event.part * self.layout.pp + self.stage
        if before is not None:
            sender = chunk - 1 if event.kind == "forward" else chunk + 1
            tag = self._tag(event, sender)
            yield self._hop(f"{name}: receive", RECEIVE, before, tag, start_s, start_s)
            self.previous = self.num_nodes
            yield from self._collectives(self.stages.hop.gathered, start_s, start_s, name)
        parts = self._parts(event)
        exposed_s = sum(parts.get(part, 0.0) for part in {key.part for key in parts.sent})
        blocking_s = 0.0 if behind is None or self.layout.asynchronous else self.stages.hop.seconds
        ran_s = max(end_s - blocking_s - exposed_s, start_s)
        yield self._node(name, COMPUTE, start_s, ran_s)
        self.previous = self.num_nodes
        yield from self._collectives(parts.sent, ran_s, end_s - blocking_s, name, parts)
        if behind is not None:
            sent_s = end_s - blocking_s + self.stages.hop.seconds
            tag = self._tag(event, chunk)
            yield self._hop(f"{name}: send", SEND, behind, tag, end_s - blocking_s, sent_s)

    def _parts(self, event: Event) -> Parts:
        """Seconds and bytes of an event."""
        both = self.stages.chunks[self.stage][event.part]
        if event.kind == "forward":
            return both.forward
        if event.kind == "weight gradients":
            return both.weights
        if not self.stages.pipeline.stages[self.stage].weights_s:
            return both.backward
        own = both.backward + both.weights * -1
        return Parts(own, {key: n for key, n in own.sent.items() if n > 0.5})

    def _neighbours(self, event: Event) -> tuple[int | None, int | None]:
        """Stages that an event has its input from, and its result goes to."""
        count = self.layout.pp
        if count == 1 or event.kind == "weight gradients":
            return None, None
        chunk, last = event.part * count + self.stage, count * self.layout.virtual_stages - 1
        below = (self.stage - 1) % count if chunk > 0 else None
        above = (self.stage + 1) % count if chunk < last else None
        return (below, above) if event.kind == "forward" else (above, below)

    def _tag(self, event: Event, sender: int) -> int:
        """Of a message from a chunk of the model: alike where it is sent and where it arrives."""
        chunks = self.layout.pp * self.layout.virtual_stages
        return (event.batch * chunks + sender) * 2 + (event.kind == "backward")

    def _collectives(
        self, sent: Mapping[Sent, float], start_s: float, end_s: float, name: str,
        parts: Mapping[str, float] | None = None,
    ) -> Iterator[bytes]:  # fmt: skip
        """One after another, each as long as its share of the seconds of its part."""
        total = dict.fromkeys((key.part for key in sent), 0.0)
        seconds = parts or dict.fromkeys(total, end_s - start_s)
        for key, num_bytes in sent.items():
            total[key.part] += num_bytes
        for key, num_bytes in sent.items():
            if key.group.size == 1:
                continue
            part_s = seconds[key.part]
            took_s = max(part_s, 0.0) * num_bytes / total[key.part]
            yield self._node(
                f"{name}: {key.part}, {key.kind}", COLLECTIVE, start_s, start_s + took_s,
                self._kept(key, num_bytes),
            )  # fmt: skip
            start_s += took_s
            self.previous = self.num_nodes

    def _kept(self, key: Sent, num_bytes: float) -> bytes:
        """Attributes of a collective."""
        if (key, num_bytes) not in self.kept:
            size = num_bytes / key.group.size if key.kind == "all_gather" else num_bytes
            self.kept[key, num_bytes] = b"".join((
                _bytes(10, _attribute("is_cpu_op", BOOL, False)),
                _bytes(10, _attribute("comm_type", INT64, COMM_TYPES[key.kind])),
                _bytes(10, _attribute("comm_size", INT64, round(size))),
                _bytes(10, _attribute("pg_name", STRING, self.groups[key.group])),
            ))  # fmt: skip
        return self.kept[key, num_bytes]

    def _hop(
        self, name: str, kind: int, other: int, tag: int, start_s: float, end_s: float
    ) -> bytes:
        """A message to or from the rank of another stage."""
        src, dst = self.first, other * self.stride
        if kind == RECEIVE:
            src, dst = dst, src
        if other not in self.kept:
            self.kept[other] = b"".join((
                _bytes(10, _attribute("is_cpu_op", BOOL, False)),
                _bytes(10, _attribute("comm_size", INT64, round(self.stages.hop.num_bytes))),
            ))  # fmt: skip
        attributes = b"".join((
            self.kept[other],
            _bytes(10, _attribute("comm_src", INT32, src)),
            _bytes(10, _attribute("comm_dst", INT32, dst)),
            _bytes(10, _attribute("comm_tag", INT32, tag)),
        ))  # fmt: skip
        return self._node(name, kind, start_s, end_s, attributes)

    def _node(
        self, name: str, kind: int, start_s: float, end_s: float, attributes: bytes = b""
    ) -> bytes:
        """One node behind its length, that comes after the previous one."""
        after = (self.previous,) if self.previous else ()
        self.num_nodes += 1
        start, end = round(start_s * 1e6), round(end_s * 1e6)
        body = b"".join((
            _number(1, self.num_nodes), _text(2, name), _number(3, kind),
            _packed(5, after), _number(6, start), _number(7, end - start),
            attributes or _bytes(10, _attribute("is_cpu_op", BOOL, False)),
        ))  # fmt: skip
        return _varint(len(body)) + body


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _number(field: int, value: int, *, always: bool = False) -> bytes:
    """A whole number; 0 is left out, but in a oneof."""
    return _varint(field << 3) + _varint(value) if value or always else b""


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _packed(field: int, values: Iterable[int]) -> bytes:
    found = b"".join(map(_varint, values))
    return _bytes(field, found) if found else b""


def _attribute(name: str, field: int, value: int | str) -> bytes:
    """An AttributeProto."""
    if isinstance(value, str):
        return _text(1, name) + _text(field, value)
    return _text(1, name) + _number(field, value, always=True)
