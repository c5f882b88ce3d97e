"""The examples of fused kernels of one's own: on CPU ranks, in every order, compiled for GPUs."""

import re
from typing import Any

import pytest
import torch
from on_ranks import on_ranks, script
from peer_examples import FOLDER, MATMUL, SUM, example, gathered, whole
from planted import post_relaxed
from rankpool import RankPool

from counterpoint.testing.ptx import ACQUIRE, CAPABILITIES, RELEASE, compiled, wrong_order

SAID = {
    SUM: "five calls on 2 ranks agree with all-reduce and addition",
    MATMUL: "five calls on 2 ranks agree with matmul and reduce-scatter",
}
CALLS = 6


@pytest.mark.parametrize("name", SAID)
def test_it_runs_as_a_script(pool: RankPool, name: str):
    assert SAID[name] in pool.run(script, 2, str(FOLDER / f"{name}.py"))[0]


@pytest.mark.parametrize("numel", [1, 97])
@on_ranks(2, 4)
def test_a_sum_has_the_bits_of_its_order(rank: int, ranks: int, numel: int):
    """In fp32: the residual first, then the ranks in order; on all ranks alike."""
    fused = example(SUM).AllReduceAdd(numel, torch.float32, torch.device("cpu"), block=64)
    torch.manual_seed(rank)
    wrong: list[str] = []
    for call in range(CALLS):
        x, residual = torch.randn(2, numel)
        want = residual.clone()
        for each in gathered(x):
            want += each
        if not torch.equal(fused(x, residual), want):
            wrong.append(f"call {call}")
    return wrong


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 65, 33)])
@on_ranks(2, 4)
def test_a_scattered_product_is_as_good_as_torchs(rank: int, ranks: int, m: int, n: int, k: int):
    """Whole numbers to the bit; others against fp64, and the partial sums of torch in fp32."""
    fused = example(MATMUL).MatmulReduceScatter(m, n, torch.float32, torch.device("cpu"))
    torch.manual_seed(rank)
    wrong: list[str] = []
    for call in range(CALLS):
        exact = call % 2
        x, w = (whole(s, torch.float32) if exact else torch.randn(*s)
                for s in ((ranks * m, k), (k, n)))  # fmt: skip
        got = fused(x, w)
        want, baseline = (
            gathered(a @ b).sum(0).view(ranks, m, n)[rank]
            for a, b in ((x.double(), w.double()), (x, w))
        )
        error, allowed = ((each - want).norm() for each in (got, baseline))
        if not (torch.equal(got.double(), want) if exact else error <= 2 * allowed + 1e-30):
            wrong.append(f"call {call}: error {error:.1e}, torch has {allowed:.1e}")
    return wrong


def off(rank: int, world: int, name: str, ranks: int, seeds: range, fault: bool) -> list[int]:
    """For each seed, how many of three calls by two programs on each rank are off."""
    from counterpoint.testing.interleave import Interleaved, local_peers

    module, found = example(name), list[int]()
    if fault:
        module.post = post_relaxed
    m, n, k = 5, 65, 33
    for seed in seeds:
        torch.manual_seed(seed)
        if name == SUM:
            kernel, numbers = module.all_reduce_add_kernel, {"numel": m * n, "BLOCK": 64}
            xs, others = whole((3, ranks, m, n), torch.float32), torch.randn(3, ranks, m, n)
            wants = others.clone()
            for source in range(ranks):
                wants += xs[:, source, None]
            names = ("x_ptr", "residual_ptr", "out_ptr")
        else:
            kernel = module.matmul_reduce_scatter_kernel
            numbers = {"M": m, "N": n, "K": k, **module.BLOCKS}
            xs, others = (whole((3, ranks, *s), torch.float32) for s in ((ranks * m, k), (k, n)))
            wants = (xs @ others).sum(1).view(3, ranks, m, n)
            names = ("x_ptr", "w_ptr", "y_ptr")
        ys = torch.full((3, ranks, m, n), torch.nan)
        peers = local_peers(kernel, ranks, payload_bytes=4 * ranks * m * n, num_flags=6 * ranks)

        def run(r: int, kernel: Any = kernel, numbers: Any = numbers, names: Any = names,
                each: Any = (xs, others, ys), peers: Any = peers):  # fmt: skip
            for tensors in zip(*each, strict=True):
                given = dict(zip(names, (tensor[r] for tensor in tensors), strict=True))
                kernel[(2,)](**given, **numbers, **peers[r])

        Interleaved(seed).run([lambda r=r: run(r) for r in range(ranks)])
        found.append(int((ys != wants).flatten(1).any(1).sum()))
        assert all(each["fault_ptr"] == 0 and each["state_ptr"][0] == 3 for each in peers)
    return found


@pytest.mark.parametrize(("name", "ranks", "seeds"), [
    (SUM, 2, range(4)), (SUM, 4, range(1)), (MATMUL, 2, range(2)), (MATMUL, 4, range(1)),
])  # fmt: skip
def test_every_order_gives_the_result(pool: RankPool, name: str, ranks: int, seeds: range):
    assert pool.run(off, 1, name, ranks, seeds, False, group=False) == [[0] * len(seeds)]


@pytest.mark.parametrize("name", SAID)
def test_a_missing_release_shows(pool: RankPool, name: str):
    (found,) = pool.run(off, 1, name, 2, range(1), True, group=False)
    assert any(found)


def stuck(rank: int, world: int) -> str:
    """What is said of a rank whose peer never launches."""
    from counterpoint.testing.interleave import DeadlockError, Interleaved, local_peers

    kernel, x = example(SUM).all_reduce_add_kernel, torch.ones(8)
    peers = local_peers(kernel, 2, payload_bytes=64, num_flags=2)

    def run() -> None:
        kernel[(1,)](x_ptr=x, residual_ptr=x, out_ptr=x, numel=8, BLOCK=8, **peers[0])

    with pytest.raises(DeadlockError) as info:
        Interleaved(0).run([run])
    return str(info.value)


def test_a_deadlock_says_where_programs_stand(pool: RankPool):
    (said,) = pool.run(stuck, 1, group=False)
    at = next(i for i, line in enumerate((FOLDER / f"{SUM}.py").read_text().splitlines(), 1)
              if "late |= wait(" in line)  # fmt: skip
    places = rf"  rank 0, program \(0, 0, 0\): wait:\d+ < all_reduce_add_kernel:{at}"
    assert re.fullmatch(rf"nobody can go on:\n  rank 0: run:\d+\n{places}", said), said


CONSTANTS = {SUM: {"BLOCK": 1024}, MATMUL: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}}
OWN = {"bases_ptr": "*i64", "state_ptr": "*i32", "fault_ptr": "*i64", "half_bytes": "i32",
       "flags_at": "i32", "rank": "i32", "tag": "i32", "timeout_ns": "i64"}  # fmt: skip


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", SAID)
def test_it_compiles_for_gpus(monkeypatch: pytest.MonkeyPatch, name: str, capability: int):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # else it would be interpreted
    module = example(name)
    kernel = module.all_reduce_add_kernel if name == SUM else module.matmul_reduce_scatter_kernel
    constants = CONSTANTS[name] | {"WORLD": 4}
    types = {each: OWN.get(each, "*bf16" if each.endswith("_ptr") else "i32")
             for each in kernel.arg_names if each not in constants}  # fmt: skip
    aligned = tuple(each for each in types if each not in ("rank", "tag", "timeout_ns"))
    found = compiled(kernel, capability, types, constants, num_warps=4, aligned=aligned)
    ptx = found.ptx
    assert not wrong_order(ptx) and not found.spills and found.registers <= 255
    assert len(re.findall(RELEASE, ptx)) == len(re.findall(ACQUIRE, ptx)) == 1
    # the check can fail: barriers taken out, orders made weaker
    assert "an acquire without a barrier behind it" in wrong_order(
        re.sub(r".*\bbar\.sync.*\n", "", ptx)
    )
    for order, pattern in (("release", RELEASE), ("acquire", ACQUIRE)):
        assert f"no {order} of system scope" in wrong_order(re.sub(pattern, "relaxed", ptx))


STORED, BARRIER, POSTED = "st.global.v4.b32;", "bar.sync 0;", "atom.global.sys.release.exch.b32;"
WAITED, LOADED = "ld.global.sys.acquire.b32;", "ld.global.cg.b32;"
LABEL, BACK, PAST = "$L__BB0_1:", "@%p1 bra $L__BB0_1;", "bra.uni $L__BB0_1;"
POST, WAIT = (BARRIER, POSTED), (WAITED, BARRIER)


@pytest.mark.parametrize(
    ("ptx", "wrong"),
    [
        ((STORED, *POST, *WAIT, LOADED), []),
        # payload and loads in loops of their own, two posts in a row
        ((LABEL, STORED, BACK, *POST, *POST, *WAIT), []),
        ((STORED, *POST, *WAIT, LABEL, LOADED, BACK), []),
        ((STORED, *POST, LABEL, *WAIT, LOADED, STORED, BACK), []),
        ((STORED, POSTED, *WAIT), ["a release"]),
        ((BARRIER, STORED, POSTED, *WAIT), ["a release"]),
        ((STORED, *POST, STORED, POSTED, *WAIT), ["a release"]),
        # the second time around
        ((LABEL, POSTED, BARRIER, STORED, BACK, *WAIT), ["a release"]),
        # around the barrier
        ((STORED, PAST, BARRIER, LABEL, POSTED, *WAIT), ["a release"]),
        ((STORED, *POST, WAITED, LOADED), ["an acquire", "loads"]),
        ((STORED, *POST, WAITED, LOADED, BARRIER), ["loads"]),
        ((STORED, *POST, WAITED, PAST, BARRIER, LABEL), ["an acquire"]),
        ((*POST, *WAIT), ["no store"]),
    ],
)  # fmt: skip
def test_what_a_wrong_order_is(ptx: tuple[str, ...], wrong: list[str]):
    found = wrong_order("\n".join([*ptx, "ret;"]))
    assert len(found) == len(wrong), found
    assert all(said.startswith(text) for said, text in zip(found, wrong, strict=True)), found
