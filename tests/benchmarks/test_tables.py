"""The one writer: sections of pages, columns, and what committed rows say."""

import json
from importlib import invalidate_caches
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from benchmarks import (
    copies,
    decode,
    decode_experts,
    embedding,
    epilogue,
    experts,
    fp8,
    front,
    invariant,
    islands,
    islands_predicted,
    losses,
    norms,
    overlap,
    peers,
    prefill,
    resources,
    scale_steps,
    steps,
    support,
    training,
)
from benchmarks.declare import Benchmark, Section
from benchmarks.options import NAMES
from benchmarks.readme import commands, replace, variables, write
from benchmarks.rows import (
    Row,
    by_cut,
    gpus_of,
    held,
    kind_of,
    one_form,
    results,
    rows_of,
    taken,
)
from benchmarks.runner import chosen, declared
from benchmarks.tables import (
    MARK,
    ROOT,
    arm,
    both_modes,
    by_machine,
    grid,
    measured,
    of_most,
    sizes,
    source,
    table,
    torch_note,
)
from counterpoint.errors import InputError
from counterpoint.machine_of import shipped

HEAD: Row = {"ranks": 2, "gpu": "H200", "driver": "1", "torch": "2", "triton": "3", "nccl": "4",
             "multicast": False, "date": "2026-11-22", "commit": "abc"}  # fmt: skip
ROWS: list[Row] = [
    HEAD | {"m": m, "arm": name, "mode": "graph", "median_s": seconds}
    for m, times in ((64, {"serial": 2e-6, "ours": 1e-6}), (8, {"serial": 4e-6}))
    for name, seconds in times.items()
]
# quick to write: no predictions
QUICK = (decode.DECODE, training.TRAINING, embedding.EMBEDDING, steps.STEPS, resources.RESOURCES,
         copies.COPIES, copies.TRANSPORT, losses.LOSSES)  # fmt: skip


def test_columns_are_of_arms_and_facts():
    columns = [sizes("m", head="M"), arm("serial"), arm("ours", bold=True)]
    assert table(columns, taken(ROWS, "m")).splitlines()[:-2] == [
        "| M | serial | **ours** |", "| --- | --- | --- |", "| 64 | 2.0 | **1.0** |",
        "| 8 | 4.0 | **-** |",
    ]  # fmt: skip
    assert table(columns, []) == ""


def test_a_case_measured_again_counts_as_it_was_last():
    again = [row | {"median_s": 2 * row["median_s"]} for row in ROWS[:2]]
    first, other = taken([*ROWS, *again], "m")
    assert (first.s("ours"), other.s("serial")) == (2e-6, 4e-6)
    assert first.fastest(("serial", "ours", "none")) == "ours" and "none" not in first


def test_a_peer_is_compared_in_its_better_mode_within_one_rotation():
    head = HEAD | {"m": 1}
    times = {"graph": {"torch": 6.0, "auto": 3.0}, "eager": {"torch": 4.0, "auto": 2.5}}
    rows = [head | {"mode": mode, "arm": name, "median_s": t * 1e-6}
            for mode, arms in times.items() for name, t in arms.items()]  # fmt: skip
    (both,), (graph,) = taken(rows, "m"), taken(rows[:2], "m")
    assert both.fair("torch", "auto") == pytest.approx(1.6)
    assert graph.fair("torch", "auto") == pytest.approx(2.0)
    columns = [both_modes("torch"), both_modes("auto", bold=True)]
    text = table(columns, [both, graph])
    assert "| 6.0, 4.0 | **3.0**, 2.5 |" in text and "| 6.0 | **3.0** |" in text
    assert "in a graph only" in torch_note([graph], "torch")
    assert "(1 of 2 cases)" in torch_note([both, graph], "torch")
    assert "cases" not in torch_note([both], "torch")


def test_fp8_is_compared_with_serial_torch_and_bf16_in_the_mode_that_is_said():
    times = {"graph": {"cast": 0.1, "compute": 1.0, "serial": 3.0, fp8.PEER: 2.6, "bf16": 2.8,
                       "fp8": 2.0},
             "eager": {"serial": 9.0, fp8.PEER: 2.4, "bf16": 9.0, "fp8": 2.0}}  # fmt: skip
    rows = [HEAD | dict(case.facts) | {"arm": arm, "mode": mode, "median_s": t * 1e-3}
            for case in overlap.published(8)
            for mode, arms in times.items() for arm, t in arms.items()]  # fmt: skip
    text = fp8.fp8_table(rows)
    assert text.splitlines()[2].endswith(
        "| 0.100 | 1.000 | 3.000 | 2.600, 2.400 | 2.800 | **2.000**, 2.000 | **1.50** | **1.20** | "
        "**1.40** |"
    )
    assert ("Geometric means of 10 shapes: serial / fp8 1.50 (least 1.50), torch / fp8 1.20 (least "
            "1.20), bf16 / fp8 1.40 (least 1.40).") in text  # fmt: skip
    assert "measured beside *fp8* in one rotation" in text


def test_norms_are_compared_with_the_best_of_the_others_that_are_there():
    times = {"serial": 40.0, "torch one_shot": 30.0, "kraken": 25.0, "norm": 4.0, "direct": 21.0,
             "fused": 20.0, "auto": 20.0, "auto invariant": 22.0}  # fmt: skip
    rows = [HEAD | {"m": m, "n": 8192, "arm": arm, "mode": "graph", "median_s": t * 1e-6}
            for m in (1, 512) for arm, t in times.items()
            if arm != "kraken" or m == 1]  # fmt: skip
    text = norms.norms_table(rows)
    lines = text.splitlines()
    assert lines[2].endswith("| 30.0 | 25.0 | 21.0 | 20.0 | **20.0** | **2.00** | **1.25** |")
    assert lines[3].endswith("| 30.0 | - | 21.0 | 20.0 | **20.0** | **2.00** | **1.50** |")
    assert "its plan" not in lines[0], "a column without a number"
    assert "NCCL / auto 2.00 (least 2.00), best other / auto 1.37 (least 1.25)" in text
    assert "Batch-invariant auto takes 1.10x the time of auto" in text
    alone = [row for row in rows if row["m"] == 1 or row["arm"] not in norms.OTHERS]
    text = norms.norms_table(alone)
    assert text.splitlines()[3].endswith("| - | - | 21.0 | 20.0 | **20.0** | **2.00** | - |")
    assert "best other / auto 1.25 (least 1.25)" in text
    without = norms.norms_table([row for row in alone if row["m"] == 512])
    assert "NCCL / auto 2.00 (least 2.00). Batch" in without


def test_code_of_others_is_from_a_folder_that_may_not_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.path", [])
    assert peers.peer("deep", "deep.sea") == "there is no checkout of deep in .peers/"
    (tmp_path / "deep" / "deep").mkdir(parents=True)
    assert str(peers.peer("deep", "deep.sea")).startswith("deep.sea cannot be imported: No module")
    (tmp_path / "deep" / "deep" / "sea.py").write_text("depth = 11")
    invalidate_caches()
    found: Any = peers.peer("deep", "deep.sea")
    assert found.depth == 11


def test_prefill_is_24_shapes_whose_means_are_by_width():
    found = prefill.cases(2)
    assert len({case.name for case in found}) == len(found) == 24
    assert [case["width"] for case in found[:8]] == ["TP8"] * 4 + ["TP2"] * 4
    assert {case["m"] for case in found[:8]} == {2048}
    times = {"matmul": 1.0, "serial": 3.0, "torch one_shot": 4.0, "torch two_shot": 2.2,
             "auto": 2.0, "direct": 2.1, "shard_p2p ring": 1.9,
             f"serial, {prefill.BOTH}": 6.0, f"auto, {prefill.BOTH}": 5.0}  # fmt: skip
    rows = [HEAD | dict(case.facts) | {"arm": arm, "mode": "graph", "median_s": t * 1e-3 * slow}
            for slow, case in ((1, found[0]), (2, found[4]))
            for arm, t in times.items()]  # fmt: skip
    for row in rows:
        if row["arm"] == "auto":
            row["pick"] = "direct"
        if row["arm"] == "serial" and row["width"] == "TP2":
            row["median_s"] = 5e-3
    text = prefill.prefill_table(rows)
    line = text.splitlines()[2]
    assert line.endswith("| **2.000** | direct | 1.900 shard_p2p ring | **1.50** | **1.10** | "
                         "**1.20** |")  # fmt: skip
    assert "TP8, geometric means of 1 shapes: serial / auto 1.50 (least 1.50)" in text
    assert "TP2, geometric means of 1 shapes: serial / auto 1.25 (least 1.25)" in text


def test_auto_of_experts_is_timed_by_its_own_plan_not_by_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
):
    case = experts.case_of("all_to_all_matmul", experts.MODELS[0], 4096, "uniform")
    times = {"matmul grouped": 6, "communication": 3, "pair grouped": 9, "in place grouped": 10,
             "one kernel": 12, "plan grouped": 8, "plan grouped 8/8/8/8": 5}  # fmt: skip
    head = HEAD | dict(case.facts) | {"gpu": "NVIDIA H200", "rows": 32768, "table": "experts"}
    rows = [head | {"arm": arm, "mode": "graph", "median_s": float(t)} for arm, t in times.items()]
    for spec, seconds, mean in (
        ("grouped ring", 8, "1.12"), ("serial", 10, "0.90"), ("fused", 12, "0.75"),
    ):  # fmt: skip
        choose = MagicMock(return_value=SimpleNamespace(spec=spec))
        monkeypatch.setattr(experts, "cp", SimpleNamespace(choose=choose))
        some = experts.said(rows)
        assert some[0].auto[1] == seconds
        text = experts.auto_means(some)
        assert "0.75 with counts on the device" in text and "0.75, slower in 1)" in text
        assert f"{mean} with equal counts that the host knows (1 cases" in text


def test_experts_by_routes_are_held_against_the_grouped_matmul():
    found: list[Row] = []
    for op, one in (("all_to_all_matmul", "one kernel"), ("matmul_all_to_all", "one kernel, sum")):
        case = experts.case_of(op, experts.MODELS[0], 4096, "uniform")
        times = {"matmul grouped": 100, "communication": 50, "pair grouped": 150, one: 120,
                 "by routes": 105, "by routes, host": 110, "one kernel": 120}  # fmt: skip
        head = HEAD | dict(case.facts) | {"table": "experts"}
        found += [head | {"arm": arm, "median_s": t * 1e-6,
                          "mode": "eager" if arm in experts.LAID_OUT else "graph"}
                  for arm, t in times.items()]  # fmt: skip
    lines = experts.routed_section({2: found}).splitlines()
    cells = "DeepSeek-V3, 4096 | 100 | 120 | 105 | 110 | 1.05 |"
    assert lines[2] == f"| 2 H200s, to the experts, {cells}"
    assert lines[3] == f"| 2 H200s, back, {cells}"
    without = [row for row in found if "routes" not in row["arm"]]
    assert experts.routed_section({2: without}) == ""


def test_few_tokens_are_held_against_the_faster_of_torchs_and_against_reading_weights():
    (case, *_) = decode_experts.cases(2)
    h200, h100 = shipped("NVIDIA H200", 2), shipped("NVIDIA H100 80GB HBM3", 2)
    assert h200 is not None and h100 is not None
    times = {"torch, counts": 900, "torch, gathered": 700, "default": 500, "max_rows": 450}
    head = HEAD | dict(case.facts) | {"gpu": "NVIDIA H200"}
    head["weight_bytes"] = 400e-6 * h200.costs.hbm_bytes_per_s
    rows = [head | {"arm": arm, "mode": "graph", "median_s": t * 1e-6} for arm, t in times.items()]
    text = decode_experts.table(rows)
    assert (
        "| DeepSeek-V3, 1 | 700.0 torch, gathered | **500.0** | **450.0** | 400.0 | 1.40x | 1.25 |"
        in text
    )
    assert "1.40x in the mean" in text and "the rate of this GPU, 4.2 TB/s" in text
    ratio = h100.costs.hbm_bytes_per_s / h200.costs.hbm_bytes_per_s
    text = decode_experts.table([row | {"gpu": "NVIDIA H100 80GB HBM3"} for row in rows])
    assert f"| {400 / ratio:.1f} | 1.40x | {1.25 * ratio:.2f} |" in text
    assert "the rate of this GPU, 3.0 TB/s" in text
    with pytest.raises(InputError, match="whose memory's rate is known, got 'other'"):
        decode_experts.table([row | {"gpu": "other"} for row in rows])


def test_steps_are_held_against_torchs_layer_and_the_fastest_unfused_way_in_each_mode():
    head = HEAD | {"model": "Qwen3-235B", "size": 256, "case": "one"}
    times = {"torch": 6.0, "torchtitan": 5.0, "torch, counts": 4.0, "default": 2.0, "fused": 1.0}
    rows = [
        head | {"mode": mode, "arm": f"{what}, by {way}", "median_s": ms * 1e-3}
        for mode in ("graph", "eager")
        for what, of in (("forward", times), ("matmuls", {"forward": 1.5}),
                         ("exchanges", {"forward": 0.5}))
        for way, ms in of.items()
        if mode == "eager" or way not in ("torch", "torchtitan")
    ]  # fmt: skip
    graph, eager = steps.steps_of(rows)
    assert [(s.mode, s.torch, s.fastest, s.ours) for s in (graph, eager)] == [
        ("graph", "", "torch, counts", "default"),
        ("eager", "torchtitan", "torch, counts", "default"),
    ]
    lines = [steps.step_table([s]).splitlines()[2] for s in (graph, eager)]
    assert lines[0].endswith(
        "forward | 4.000 torch, counts | **2.000** | **1.000** | 2.00x | 400% |"
    )
    assert lines[1].endswith(
        "| 5.000 | 4.000 torch, counts | **2.000** | **1.000** | 2.50x | 2.00x | 400% |"
    )


def test_a_dlrm_measured_again_replaces_its_rows_of_before_its_indices_had_names():
    head = HEAD | {"model": "DLRM-DCNv2", "size": 16384, "mode": "eager"}
    arms = {"pooling, by fused": 3.0, "exchange": 1.0, "forward, by torch": 6.0,
            "forward, by fused": 2.0}  # fmt: skip
    named = {"": {}, "new": {"named": "uniform"}, "Zipf": {"named": "zipf"}}
    rows = [head | facts | {"case": f"DLRM{', Zipf' * (name == 'Zipf')}", "arm": arm,
                            "median_s": s * (2 if not name else 1)}
            for name, facts in named.items() for arm, s in arms.items()]  # fmt: skip
    found = steps.steps_of(rows)
    assert [s.label for s in found] == ["DLRM-DCNv2, 16384, forward",
                                        "DLRM-DCNv2, 16384, Zipf, forward"]  # fmt: skip
    assert [s.seconds["fused"] for s in found] == [2.0, 2.0]


@pytest.mark.parametrize("without", [256, 4096])
def test_a_way_that_one_size_lacks_has_a_column_and_a_speedup_says_whose_it_is(without: int):
    """A graph may be refused at the first size of a table, or at a later one."""
    times = {"torch, counts": 4.0, "default": 2.0, "fused": 1.0}
    arms = {f"forward, by {way}": ms for way, ms in times.items()}
    arms |= {"matmuls, by forward": 1.5, "exchanges, by forward": 0.5}
    rows = [HEAD | {"model": "Qwen3-235B", "size": size, "case": f"{size}", "mode": "graph",
                    "arm": arm, "median_s": ms * 1e-3}
            for size in (256, 4096) for arm, ms in arms.items()
            if size != without or "default" not in arm]  # fmt: skip
    text = steps.section({2: rows})
    has, lacks = (line for line in text.splitlines() if "| 4.000" in line)
    if without == 256:
        has, lacks = lacks, has
    assert has.endswith("| **2.000** | **1.000** | 2.00x | 400% |")
    assert lacks.endswith("| - | **1.000** | 4.00x fused | 600% |")
    assert "default over the fastest unfused 2.00x (least 2.00x)" in text
    assert "over torch" not in text


def test_sections_are_filled_and_those_without_rows_stay(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- a:start -->\nold\n<!-- a:end -->\n<!-- b:start -->\nold\n<!-- b:end -->\n"
    )
    wrote = Section("page.md", "a", of_most(lambda rows: f"{len(rows)} rows"))
    silent = Section("page.md", "b", by_machine(lambda _: ""))
    write([wrote, silent], {4: ROWS, 2: []}, tmp_path)
    assert page.read_text() == (
        "<!-- a:start -->\n3 rows\n<!-- a:end -->\n<!-- b:start -->\nold\n<!-- b:end -->\n"
    )
    write([wrote], {}, tmp_path)
    assert "3 rows" in page.read_text()
    with pytest.raises(ValueError, match="no markers c:start and c:end"):
        replace(page, "c", "")


def test_what_stands_under_a_table():
    text = "2x H200, bf16, driver 1, torch 2, Triton 3, NCCL 4, NVLink multicast off,"
    assert source([HEAD], "More.") == f"{text} commit abc (2026-11-22). More."
    assert grid(["a"], [["1"]]) == "| a |\n| --- |\n| 1 |"
    before = HEAD | {"date": "2026-11-20", "commit": "def"}
    assert source([HEAD, before, HEAD]) == (f"{text} commits def (2026-11-20), abc (2026-11-22).")
    other = before | {"torch": "1"}
    assert source([HEAD, other]) == (
        f"{text.replace('torch 2', 'torch 1')} commit def (2026-11-20); {text} commit abc "
        "(2026-11-22)."
    )


def test_lines_of_older_code_are_marked():
    """The newest code is that of the last line of the file on the last day, wherever it stands."""
    rows = one_form([
        HEAD | {"commit": "old", "m": 1}, HEAD | {"commit": "old", "m": 2},
        HEAD | {"commit": "new", "m": 1},
    ])  # fmt: skip
    some = [(["1"], rows[2:]), (["2"], rows[1:2]), (["both"], rows)]
    *lines, _, said = measured(["M"], some, "Us.").splitlines()
    assert lines[2:] == ["| 1 |", "| 2 † |", "| both † |"]
    assert said.endswith(
        "commits old (2026-11-22), new (2026-11-22). Us. † By older code than commit new."
    )
    *lines, _, said = measured(["M"], some[1:2]).splitlines()
    assert lines[2:] == ["| 2 |"] and said.endswith("commit old (2026-11-22).")
    assert "| 2 † |" in measured(["M"], some[1:2], also=rows)


def test_older_rows_are_put_into_one_form(tmp_path: Path):
    key = {"m": 1, "n": 2, "k": 3, "table": "decode"}
    rows = one_form([
        key | {"arm": "auto", "mode": "graph", "median_s": 1.0, "host_s": 3.0,
               "serial_over_arm": [2.0, 1.0, 3.0]},
        key | {"arm": "auto", "mode": "plain eager", "median_s": 5.0},
        {"table": "losses", "chunks": 4, "seconds": 2.0},
    ])  # fmt: skip
    assert rows[0]["baseline_over_arm"] == [2.0, 1.0, 3.0]
    assert (rows[1]["mode"], rows[1]["plain_eager_s"], rows[1]["host_s"]) == ("eager", 5.0, 3.0)
    assert (rows[2]["chunks"], rows[2]["median_s"]) == (4, 2.0)
    for name in ("decode-2x-h200", "decode-8x-h200", "transports-2x-h200", "copies-4x-h200"):
        (tmp_path / f"{name}.jsonl").write_text('{"arm": "a", "ranks": 1}\n')
    assert list(results("decode", tmp_path)) == [8, 2]
    assert list(results("transports", tmp_path)) == [4, 2]


def test_of_each_number_of_gpus_the_rows_of_the_kind_that_was_measured_last(tmp_path: Path):
    files = {"8x-h200": "2026-11-02", "2x-h200": "2026-11-01", "4x-h100": "2026-11-01",
             "2x-h100": "2026-11-03"}  # fmt: skip
    for name, date in files.items():
        row = {"arm": "a", "gpu": f"NVIDIA {name[3:].upper()}", "ranks": int(name[0]), "date": date}
        (tmp_path / f"decode-{name}.jsonl").write_text(json.dumps(row) + "\n")
    found = results("decode", tmp_path)
    gpus = [(ranks, rows[0]["gpu"]) for ranks, rows in found.items()]
    assert gpus == [(8, "NVIDIA H200"), (4, "NVIDIA H100"), (2, "NVIDIA H100")]
    assert list(results("decode", tmp_path, "h100")) == [4, 2]


@pytest.mark.parametrize(("gpu", "kind"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100"), ("NVIDIA H200", "h200"),
    ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA B200", "b200"),
    ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"), ("AMD Instinct MI300X", "amd-instinct-mi300x"),
])  # fmt: skip
def test_files_of_rows_are_found_by_what_they_call_a_gpu(tmp_path: Path, gpu: str, kind: str):
    assert kind_of(gpu) == kind
    (tmp_path / f"decode-4x-{kind}.jsonl").write_text(json.dumps(HEAD | {"gpu": gpu}) + "\n")
    assert list(results("decode", tmp_path, kind)) == [4]


def test_headings_name_the_gpus_that_rows_are_of():
    """Of a page some tables may be of another kind of GPU than others."""
    h200, h100 = HEAD | {"gpu": "NVIDIA H200", "ranks": 4}, HEAD | {"gpu": "NVIDIA H100 80GB HBM3"}
    text = by_machine(lambda rows: f"{len(rows)}")({4: [h200], 2: [h100, h100]})
    assert text == "**4 H200s**\n\n1\n\n**2 H100s**\n\n2"
    assert gpus_of([h200 | {"ranks": 1}]) == "1 H200"
    assert gpus_of([HEAD | {"gpu": "NVIDIA GeForce RTX 4090"}]) == "2 GeForce RTX 4090s"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_left_out_on_one_gpu_is_said_of_one_alone(ranks: int):
    head = HEAD | {"ranks": ranks, "layer": "70B", "case": "64,16,32", "m": 64, "mode": "graph"}
    rows = [
        head | {"arm": name, "median_s": 1e-6}
        for name in ("compute", "auto", "invariant", "apart", "serial", "serial compiled")
    ]
    for text in (epilogue.epilogue_table(rows), invariant.invariant_table(rows)):
        assert text and ("on one GPU" in text) is (ranks == 1)


def test_a_file_has_rows_of_one_kind_of_gpu(tmp_path: Path):
    lines = [json.dumps(HEAD | {"gpu": f"NVIDIA H100 {of}"}) for of in ("NVL", "PCIe")]
    (tmp_path / "decode-4x-h100.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match="rows of one GPU, got NVIDIA H100 NVL, NVIDIA H100 PCIe"):
        results("decode", tmp_path, "h100")


def test_every_marker_is_one_of_a_page_and_has_one_writer():
    sections = [(s.page, s.marker) for name in NAMES for s in declared(name).sections]
    assert len(set(sections)) == len(sections)
    for page, marker in sections:
        text = (ROOT / page).read_text()
        assert text.count(f"<!-- {marker}:start -->") == text.count(f"<!-- {marker}:end -->") == 1
    own = {("docs/results/choosing.md", "constants"), ("docs/results/sharing.md", "controls"),
           ("docs/results/choosing.md", "rule"),
           ("README.md", "bullets"), ("README.md", "front")}  # fmt: skip
    own |= {("docs/api/cli.md", "commands"), ("docs/api/cli.md", "variables")}
    own |= {("docs/scale.md", marker) for marker in (*scale_steps.sections(), "scale-ahead")}
    between = islands.sections() | islands_predicted.sections()
    own |= {("docs/results/papers.md", "papers"), ("docs/compile.md", "models")}
    own |= {("docs/islands.md", marker) for marker in between}
    own |= {("docs/support.md", marker) for marker in support.sections(support.committed())}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    marked = {
        (str(page.relative_to(ROOT)), line.split()[1].removesuffix(":start"))
        for page in pages for line in page.read_text().splitlines() if ":start -->" in line
    }  # fmt: skip
    assert marked == own.union(sections)


def test_what_is_predicted_between_nodes_has_a_band_and_says_that_it_is_predicted():
    rows = rows_of(islands_predicted.FILE)
    places = [(op, nodes) for op in islands_predicted.OPERATORS for nodes in (2, 128)]
    for row in (r for r in rows if (r["op"], r["nodes"]) in places):
        assert row["low"] <= row["speedup"] <= row["high"]
        places.remove((row["op"], row["nodes"]))
    assert not places
    problem = islands_predicted.OPERATORS["all_gather_matmul"](2)
    (committed,) = (r for r in rows if (r["op"], r["nodes"]) == ("all_gather_matmul", 2))
    found = islands_predicted.gain(problem)
    assert found["spec"] == committed["spec"]
    assert found["speedup"] == pytest.approx(committed["speedup"], rel=0.05)
    (text,) = islands_predicted.sections().values()
    assert "Predicted" in text


def test_of_experts_that_the_device_knows_alone_there_are_bytes_and_no_times():
    """And nothing of gloo, which has no such way."""
    about = {"table": "islands", "islands": 2, "size": 2, "rate": "1gbit", "date": "d",
             "commit": "c"}  # fmt: skip
    rows: list[Row] = [about | {"op": "experts, max_rows", "arm": "flat", "sent": 80.0},
                       about | {"op": "experts, max_rows", "arm": "ours", "sent": 40.0},
                       about | {"table": "islands faults", "slowest_s": 1.0, "left": 2, "ended": 2,
                                "named": 2}]  # fmt: skip
    assert "| 2 x 2, 1 Gbit/s | `experts, max_rows` | - | - | 2.00 | - |" in islands.table(rows)
    assert {islands.part_of(row) for row in rows} == {"experts", "faults"}


def test_the_page_of_the_command_line_says_what_its_help_says():
    page = (ROOT / "docs" / "api" / "cli.md").read_text()
    assert all(f"start -->\n{text}\n<!--" in page for text in (commands(), variables())), (
        "run `make readme`"
    )


def test_the_readme_says_what_the_committed_rows_say():
    """Without its marks: a change of the library may bring them, and turns nothing red."""

    def plain(text: str) -> str:
        return text.replace(f" {front.OTHER}", "").replace(f" {MARK}", "")

    page = plain((ROOT / "README.md").read_text())
    for marker, text in (("bullets", front.bullets()), ("front", front.table())):
        assert f"<!-- {marker}:start -->\n{plain(text)}\n<!-- {marker}:end -->" in page, (
            "run `make readme`"
        )
    lines = [*front.programs(), *front.operators()]
    assert len(lines) <= 8
    for line in lines:
        gain = line.theirs_s / line.ours_s
        assert line.least <= gain and held(line.rows) == ""
        assert f"**{gain:.2f}x** ({line.least:.2f}x)" in page


def test_layers_are_cut_for_the_gpus_that_ran():
    rows: list[Row] = [HEAD | {"shards": shards, "ranks": ranks} for ranks, shards in
                       ((4, 8), (2, 8), (2, 2))]  # fmt: skip
    found = by_cut({4: rows[:1], 2: rows[1:]})
    assert found == [[rows[2]], [rows[0]], [rows[1]]], "those that hold their own part come first"
    assert [held(each) for each in found] == ["", *[", what one of 8 GPUs holds"] * 2]
    assert "8 GPUs" not in held([HEAD]), "of no model's part"
    for benchmark in (overlap.OVERLAP, overlap.FEW_ROWS, decode.DECODE, experts.EXPERTS, fp8.FP8):
        own, of_8 = (chosen(benchmark, 2, shards=shards) for shards in (0, 8))
        assert {case["shards"] for case in own} == {2} and len(own) <= len(of_8)
        small = {case["layer"] if "layer" in case.facts else case.name: case for case in of_8}
        for case in own:
            other = small[case["layer"] if "layer" in case.facts else case.name]
            part = "n" if case.facts.get("op") == "all_gather_matmul" else "k"
            part = "experts" if "experts" in case.facts else part
            assert case[part] == 4 * other[part]
    with pytest.raises(InputError, match="--shards"):
        chosen(training.TRAINING, 2, shards=8)


@pytest.mark.parametrize("benchmark", QUICK, ids=lambda benchmark: benchmark.name)
def test_pages_say_what_the_committed_rows_say(benchmark: Benchmark):
    found = results(benchmark.name)
    assert found
    for section in benchmark.sections:
        text = section.write(found)
        assert (
            text
            and f"<!-- {section.marker}:start -->\n{text}\n" in (ROOT / section.page).read_text()
        ), f"run `make readme`: {section.page}, {section.marker}"
