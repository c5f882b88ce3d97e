"""Steps that are torch calls, the same on CPU ranks and on GPUs: matmul, move, collective.

Each function turns one part of a bound step into an action on the operands of a call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.experts import steps_counted, steps_routed
from counterpoint.gpu import cublaslt
from counterpoint.group.library import Library, library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.wire import wire_of
from counterpoint.group.workspace import Action, Operands, Place, Places
from counterpoint.plan.bind import BoundStep, Box, Part
from counterpoint.plan.launches import Run, runs
from counterpoint.problem import Problem
from counterpoint.run import activated, invariant_matmul, scaled

Calls = Mapping[str, Callable[[], object]]  # what opaque steps do, by their names


def matmul(bound: BoundStep, part: Part, places: Places) -> Action:
    """y = x w, or x^T w (+ a sum, to accumulate) (+ bias); y may have any strides."""
    if bound.step.arg("scales"):
        return scaled.matmul(bound, part, places)
    if bound.step.arg("activation"):
        return activated.matmul(bound, part, places)
    if places.plan.problem.invariant:
        return invariant_matmul.action(part, places)
    if plain := _plain_matmul(bound, part, places):
        return plain
    x, w, *rest = (places.of(box) for box in part.reads)
    if bound.step.arg("contract"):
        x = _transposed(x)
    y = places.of(part.write)
    if bound.step.arg("bias"):
        bias = rest[-1]
        return lambda o: _into(torch.addmm, bias(o), x(o), w(o), out=y(o))
    total = rest[-1] if rest else y
    target = places.plan.buffer(part.write.buffer)
    if target.dtype == places.plan.problem.dtype:
        if places.plan.problem.experts and not bound.step.accumulates:
            return _with_added(lambda o: _into(torch.mm, x(o), w(o), out=y(o)), y, part)
        if bound.step.accumulates and part.reads[-1] != part.write:
            return lambda o: cublaslt.add(total(o), x(o), w(o), y(o))
        if bound.step.accumulates:
            return lambda o: _into(torch.addmm, y(o), x(o), w(o), out=y(o))
        return lambda o: _into(torch.mm, x(o), w(o), out=y(o))
    if places.workspace.device.type == "cuda":
        wide = torch.float32
        if bound.step.accumulates:
            return lambda o: _into(torch.addmm, total(o), x(o), w(o), wide, out=y(o))
        return lambda o: _into(torch.mm, x(o), w(o), wide, out=y(o))
    if bound.step.accumulates:
        return lambda o: _into(torch.addmm, total(o), x(o).float(), w(o).float(), out=y(o))
    return lambda o: _into(torch.mm, x(o).float(), w(o).float(), out=y(o))


def _plain_matmul(bound: BoundStep, part: Part, places: Places) -> Action | None:
    """y = x w of boxes that the operands have by name: as fast for the host as the library's."""
    target = places.plan.buffer(part.write.buffer)
    if bound.step.args or bound.step.accumulates or target.dtype != places.plan.problem.dtype:
        return None
    x, w, y = (places.name(box) for box in (*part.reads, part.write))
    if x is None or w is None or y is None:
        return None
    return lambda o: torch.mm(o[x], o[w], out=o[y])


def matmuls(bounds: Sequence[BoundStep], places: Places) -> list[Action]:
    """One step, or several of one launch: y_e = x_e w_e of boxes of one size, see `launches`.

    Rows of all experts are equal, so the library's batched matmul does it, and writes where the
    plan wants it; its grouped one makes a result of its own.
    """
    bound, *others = bounds
    if bound.step.counted:
        return [steps_counted.matmuls(bounds, places)]
    if not others:
        return [_of_run(bound, run, places) for run in runs(bound, places.plan)]
    (part,) = bound.parts
    x, w, y = (places.several(box, len(bounds)) for box in (*part.reads, part.write))
    whole = part._replace(write=part.write._replace(r1=bounds[-1].parts[0].write.r1))
    return [_with_added(lambda o: _into(torch.bmm, x(o), w(o), out=y(o)), y, whole)]


def _of_run(bound: BoundStep, run: Run, places: Places) -> Action:
    """Matmuls of boxes equally far apart, by one weight, as a batched one that writes in place."""
    part, times, *steps = run
    if times == 1:
        return matmul(bound, part, places)
    x, y = (places.apart(box, times, step)
            for box, step in zip((part.reads[0], part.write), steps, strict=True))  # fmt: skip
    w = places.of(part.reads[1])
    return lambda o: _into(torch.bmm, x(o), w(o).expand(times, -1, -1), out=y(o))


def _with_added(multiply: Action, y: Place, part: Part) -> Action:
    """Experts' products, and what a call adds to them, which lies as y of the whole weight."""
    rows, cols = slice(part.write.r0, part.write.r1), slice(part.reads[1].c0, part.reads[1].c1)

    def run(operands: Operands) -> None:
        multiply(operands)
        if "add" in operands:
            product = y(operands)
            product += operands["add"][rows, cols].view(product.shape)

    return run


def move(bound: BoundStep, part: Part, places: Places) -> Action:
    """y = x (+ bias), in the dtype of y; or the activation of that."""
    source, target = places.of(part.reads[0]), places.of(part.write)
    if name := str(bound.step.arg("activation", "")):
        plain = replace(bound, step=replace(bound.step, args=(("bias", bound.step.arg("bias")),)))
        moved = move(plain, part, places)

        def run(o: Operands) -> None:
            moved(o)
            activated.into(name, target(o), None, target(o))

        return run
    if bound.step.arg("bias"):
        bias = places.of(part.reads[1])
        return lambda o: _into(torch.add, source(o), bias(o), out=target(o))
    return lambda o: _into(target(o).copy_, source(o))


def exchange(bound: BoundStep, places: Places) -> Action:
    """One block to another island, and one from another; both without gaps.

    Of what is empty a word is sent in its place: all ranks of an exchange meet.
    """
    (part,), step, plan = bound.parts, bound.step, places.plan
    wire, rank = wire_of(places.workspace), places.workspace.rank
    to, source = plan.met(step, rank)

    def place(box: Box) -> Place:
        word = torch.zeros(1, device=places.workspace.device)
        return (lambda _: word) if box.empty else places.of(box)

    sent, kept = place(part.reads[0]), place(part.write)
    deed = f"take part in exchange {step.name!r} of plan {plan.spec} with rank {rank}"
    awaited = Awaited(plan.problem.op, deed, step.name)
    return lambda o: wire.exchange([(sent(o).contiguous(), to)], [(kept(o), source)], awaited)


def reduce(bound: BoundStep, part: Part, places: Places) -> Action:
    """y = the sum of reads (+ bias) in fp32, in the order listed, rounded once."""
    sources = [places.of(box) for box in part.reads]
    target = places.of(part.write)

    def run(operands: Operands) -> None:
        total = target(operands).new_zeros(part.write.shape, dtype=torch.float32)
        for source in sources:
            total += source(operands)
        target(operands).copy_(total)

    return run


def collective(bound: BoundStep, part: Part, places: Places) -> Action:
    """The library's all-gather or reduce-scatter; unequal shards go one rank at a time.

    Or its all-reduce, or its all-to-all with the pass that puts rows in order.
    """
    source, target = places.of(part.reads[0]), places.of(part.write)
    spec, op = places.plan.spec, places.plan.problem.op
    deed = f"take part in step {bound.step.name!r} of plan {spec}"
    calls = library_of(places.workspace, Awaited(op, deed, bound.step.name))
    if bound.step.routed:
        return steps_routed.all_to_all(bound, places, calls)
    if bound.step.counted:
        return steps_counted.all_to_all(bound, places, calls)
    if places.plan.problem.tables:
        return _exchange_columns(part, places, calls)
    if bound.step.arg("collective") == "all_to_all":
        return _all_to_all(bound, source, target, places, calls)
    if bound.step.arg("collective") == "all_reduce":
        return _all_reduce(source, target, calls, in_place=part.reads[0] == part.write)
    problem, starts = places.plan.problem, places.plan.problem.row_starts
    gathers = bound.step.arg("collective") == "all_gather"
    if len(set(problem.rows)) > 1:
        by_rows = calls.gather_rows if gathers else calls.scatter_rows
        return lambda o: by_rows(target(o), source(o), starts)
    call = calls.all_gather if gathers else calls.reduce_scatter
    to, start = places.name(part.write), places.name(part.reads[0])
    if to is not None and start is not None:
        return lambda o: call(o[to], o[start])
    return lambda o: call(target(o), source(o))


def _all_reduce(source: Place, target: Place, calls: Library, *, in_place: bool) -> Action:
    def run(operands: Operands) -> None:
        total = target(operands)
        if not in_place:
            total.copy_(source(operands))
        calls.all_reduce(total)

    return run


def _all_to_all(
    bound: BoundStep, source: Place, target: Place, places: Places, calls: Library
) -> Action:
    p = places.plan.problem
    by_expert = [places.plan.buffer(r.buffer).chunks > 1
                 for r in (bound.step.reads[0], bound.step.writes[0])]  # fmt: skip

    def turned(rows: torch.Tensor, first: int, second: int) -> torch.Tensor:
        return rows.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)

    def run(operands: Operands) -> None:
        sent, got = source(operands), target(operands)
        if by_expert[0]:
            sent = turned(sent, p.experts, p.ranks)
        come = torch.empty_like(sent) if by_expert[1] else got
        calls.all_to_all(come, sent)
        if by_expert[1]:
            got.copy_(turned(come, p.ranks, p.experts))

    return run


def _exchange_columns(part: Part, places: Places, calls: Library) -> Action:
    """The library's all-to-all of pooled rows, as wide as each rank's tables.

    Into memory that peers may write to, a call promises more: when it has ended, in stream order,
    every rank has begun it, and so has read what an earlier one had left.
    """
    source, target = places.fixed(part.reads[0]), part.write.buffer
    p, workspace = places.plan.problem, places.workspace
    exchange = side_by_side(p, workspace.rank, calls)
    assert source is not None, "a lookup writes to scratch"
    if not p.out or (all(p.rows) and all(p.tables)):
        return lambda operands: exchange(source, operands[target])
    # of ranks that get nothing from one another, the library's all-to-all hears nothing
    word = torch.zeros(1, dtype=torch.int32, device=workspace.device)

    def run(operands: Operands) -> None:
        calls.all_reduce(word)
        exchange(source, operands[target])

    return run


def side_by_side(p: Problem, rank: int, calls: Library) -> Callable[[Tensor, Tensor], object]:
    """Puts own bags' rows of all tables side by side.

    It takes what this rank sends, [bags of all ranks, columns of own tables], and where the others'
    go, [own bags, columns of all tables].
    """
    columns, own = [sum(each) for each in p.tables], p.rows[rank]
    sizes, shapes = [own * c for c in columns], [(own, c) for c in columns]
    splits, total = [bags * columns[rank] for bags in p.rows], own * p.n

    def run(sent: Tensor, y: Tensor) -> None:
        got = sent.new_empty(total)
        calls.all_to_all(got, sent.view(-1), sizes, splits)
        torch.cat(list(map(Tensor.view, got.split(sizes), shapes)), 1, out=y)

    return run


def opaque(bound: BoundStep, calls: Calls) -> Action:
    """The call of an opaque step."""
    call = calls[bound.step.name]
    return lambda _: call()


def _transposed(x: Place) -> Place:
    return lambda operands: x(operands).t()


def _into(call: Callable[..., object], *args: object, **kwargs: object) -> None:
    call(*args, **kwargs)


# torch 2.13 renames both and warns at the old names; drop when torch >= 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
