"""Wrong command lines: what each says, in our words, and that all of them end with 2."""

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import benchmarks_here, invoke
from processes import python
from typer.testing import CliRunner

from counterpoint.cli import main
from counterpoint.errors import CounterpointError
from counterpoint.machine_of import SHIPPED

# of what is refused by name, all names are listed: here "..."
A = "plan all_gather_matmul --shape 8192,7168,8192"
BAGS = "plan embedding_bag_all_to_all --shape"
GEMM = "occupancy --threads 128 --registers 64 --shared"
TUNE = "tune --op all_gather_matmul --shape"
MACHINE = "plan: --machine must be a file of a machine, got"
WRITTEN = "text must be JSON written by Machine.to_json, got"
ROWS = "evaluate: --rows must be a file of rows that `counterpoint evaluate` wrote, got"
FORM = re.compile(r"(counterpoint|[a-z]+): .+ must be .+, got .+\n")
FOREIGN = ("Errno", "Traceback", "Input should", "Invalid", "No such option", "Usage", "usage:")

FILES: list[tuple[str, str]] = [
    (f"{A} --machine none.json", f"{MACHINE} none.json: no such file"),
    (f"{A} --machine ./folder", f"{MACHINE} folder: a folder"),
    (f"{A} --machine empty.json", f"{MACHINE} empty.json: an empty file"),
    (f"{A} --machine cut.json", f"{MACHINE} cut.json: {WRITTEN} no JSON"),
    (f"{A} --machine list.json", f"{MACHINE} list.json: {WRITTEN} a machine that is no object"),
    (f"{A} --machine bytes.json", f"{MACHINE} bytes.json: no text"),
    (f"{A} --machine zero.json",
     f"{MACHINE} zero.json: ...num_devices must be a whole number from 1 to 2**16, got 0"),
    (f"{A} --machine /proc/self/mem", f"{MACHINE} /proc/self/mem: input/output error"),
    (f"{A} --machine empty.json/x", f"{MACHINE} empty.json/x: a path through a file"),
    (f"{A} --out plan.txt",
     "plan: --out must be a file name that ends in .png, .svg, .pdf, .json, got plan.txt"),
    (f"{A} --out new/plan.png", "plan: --out must be in a folder that is there, got new: no such "
     "folder; `mkdir -p new` makes it"),
    (f"{A} --out empty.json/p.png",
     "plan: --out must be in a folder that is there, got empty.json: a file"),
    (f"{A} --out folder.svg", "plan: --out must be a file, got folder.svg: a folder"),
    ("demo --out empty.json", "demo: --out must be a folder, got empty.json: a file"),
    ("demo --out new/pictures", "demo: --out must be in a folder that is there, got new: no such "
     "folder; `mkdir -p new` makes it"),
    (f"{TUNE} 8,8,8 --out rows.txt",
     "tune: --out must be a file name that ends in .jsonl, got rows.txt"),
    ("tune --out new/rows.jsonl", "tune: --out must be in a folder that is there, got new: ..."),
    ("characterize --out folder.json", "characterize: --out must be a file, got folder.json: ..."),
    ("characterize --rows new/r.jsonl",
     "characterize: --rows must be in a folder that is there, got new: ..."),
    ("evaluate --rows none.jsonl", f"{ROWS} none.jsonl: no such file"),
    ("evaluate --rows folder", f"{ROWS} folder: a folder"),
    ("evaluate --rows empty.json", f"{ROWS} empty.json: an empty file"),
    ("evaluate --rows cut.json", f"{ROWS} cut.json: line 1: '{{'"),
    ("evaluate --rows other.jsonl", f"{ROWS} other.jsonl: rows of something else"),
    ("evaluate --picture p.txt",
     "evaluate: --picture must be a file name that ends in .png, .svg, .pdf, got p.txt"),
    ("bench --out new/", "bench: --out must be a folder that is there, or a file that ends in "
     ".jsonl, got new"),
]  # fmt: skip

WORDS: list[tuple[str, str]] = [
    ("advise", "advise: TRACES must be given, or --model instead, got neither"),
    ("advise absent.json --model llama3-8b",
     "advise: TRACES must be given, or --model instead, got both"),
    ("advise absent.json", "advise: trace must be a trace of torch.profiler: JSON, or that with "
     "gzip, got absent.json: no such file or directory"),
    ("advise absent.json --html page.htm",
     "advise: --html must be a file name that ends in .html, got page.htm"),
    ("advise --model llama3-8b --gpus 16", "advise: --gpus must be from 2 to the 8 of --machine, "
     "got 16; `counterpoint scale` predicts several nodes"),
    ("advise --model dlrm-dcnv2", "advise: --model must be a transformer, got dlrm-dcnv2; "
     "`counterpoint scale` predicts recommenders"),
    ("scale lama3-8b --gpus 8",
     "scale: MODEL must be one of ..., got 'lama3-8b'; did you mean 'llama3-8b'?"),
    ("scale llama3-8b", "scale: --gpus must be given, got none"),
    ("scale llama3-8b --check", "scale: MODEL must be left out with --check, got 'llama3-8b'"),
    ("scale --check --what-if", "scale: --what-if must be left out with --check, got 'given'"),
    ("scale llama3-8b --serve --what-if",
     "scale: --what-if must be left out with --serve, got 'given'"),
    ("scale llama3-8b --gpus 8 --what-if --overlap ours",
     "scale: --overlap must be left out with --what-if, got 'ours'"),
    ("scale llama3-8b --what-if", "scale: --gpus must be given, got none"),
    ("scale llama3-8b --gpus 8 --map map.svg",
     "scale: --map must be left out: it is of a DLRM, got llama3-8b"),
    ("scale dlrm-dcnv2 --gpus 8 --map map.gif",
     "scale: --map must be a file name that ends in .png, .svg, .pdf, got map.gif"),
    ("scale dlrm-dcnv2 --gpus 64 --tp 8",
     "scale: --tp must be left out: of dlrm-dcnv2 every rank has tables and own samples (dp), "
     "got 8"),
    ("scale llama3-8b --gpus 8 --overlap all",
     "scale: --overlap must be of none, ours, ideal, with commas, got 'all'"),
    ("scale llama3-8b --gpus 8 --nic 50",
     "scale: --nic must be Gbit/s of one GPU, such as 400G, at least 8G, got '50'"),
    ("scale llama3-8b --gpus 8 --torus 8,8",
     "scale: --torus must be sizes such as 8x8, got '8,8'"),
    ("scale llama3-8b --gpus 512 --torus 8x4",
     "scale: --torus must be such that it multiplies to the 64 islands of 8 GPUs (h100-8), got "
     "8x4; the nearest that fits: 8x8"),
    ("scale llama3-8b --gpus 8 --pods 3072",
     "scale: --pods must be GPUs and a factor of at least 1, such as 3072:7, with commas, got "
     "'3072'"),
    ("plam", "counterpoint: COMMAND must be one of demo, ..., doctor, got 'plam'; did you mean "
     "'plan'?"),
    ("--verbose", "counterpoint: options must be of --version, got '--verbose'; did you mean "
     "'--version'?"),
    ("plan", "plan: OP must be given, got none; see `counterpoint plan --help`"),
    ("plan all_gather_matmul",
     "plan: --shape must be given, got none; see `counterpoint plan --help`"),
    ("plan all_gather_matmul --shape",
     "plan: --shape must be given with a value, got none; see `counterpoint plan --help`"),
    (f"{A} more words",
     "plan: words must be those that its help shows, got 'more words'; see ..."),
    (f"{A} --rank 4", "plan: options must be of --shape, ..., --activation, got '--rank'; "
     "did you mean '--ranks'?"),
    (f"{A} --json=1", "plan: --json must be given without a value, got '1'; see ..."),
    ("plan all_gather_matmull --shape 8,8,8", "plan: OP must be one of all_gather_attention, ..., "
     "got 'all_gather_matmull'; did you mean 'all_gather_matmul'?"),
    (f"{A} --dtype bfloat17", "plan: --dtype must be one of bfloat16, float16, float32, got "
     "'bfloat17'; did you mean 'bfloat16'?"),
    (f"{A} --by luck", "plan: --by must be one of model, rule, got 'luck'"),
    (f"{A} --machine h20-8", "plan: --machine must be one of a100, ..., or a file, got 'h20-8'; "
     "did you mean 'h200-8'?"),
    (f"{A} --machine h200-9", "plan: --machine must be one of ... 1 to 8 GPUs ..., such as h200-8, "
     "or a file, got 'h200-9'; did you mean ..."),
    (f"{A} --plan gradd", "plan: --plan must be auto or one of serial, ..., got 'gradd'; did you "
     "mean 'graded'?"),
    (f"{A} --plan 'graded 1/2'",
     "plan: --plan must be a spec whose sizes add up to 8; '1/2' do not, got 'graded 1/2'"),
    ("occupancy --threads 128", "occupancy: --registers must be given, got none; see ..."),
    (f"{GEMM} 1 --machine h20", "occupancy: --machine must be all, or of a100, ..., got 'h20'; did "
     "you mean 'h200'?"),
    (f"{GEMM} 1 --beside rccl", "occupancy: --beside must be nccl, or threads (above 0), registers "
     "and shared bytes as T,R,S, got 'rccl'"),
    ("tune", "tune: GPUs of this machine must be 2 or more, got none (`counterpoint doctor` says "
     "why); `counterpoint tune ... --ranks 2` tries the command on CPU ranks"),
    ("tune --op all_reduce", "tune: --op must be one of all_gather_attention, ..., got "
     "'all_reduce'; did you mean 'all_reduce_norm'?"),
    ("tune --shape 8,8,8", "tune: --op must be one of ... with --shape, got none"),
    (f"{TUNE} 8,8,8 --layer 70B", "tune: --layer must be left out where --shape is given, got "
     "'70B'"),
    ("tune --layer 9B", "tune: --layer must be a part of one of 70B qkv; ..., got '9B'"),
    ("tune --ranks 2", "tune: --shape must be given for CPU ranks, to which published shapes are "
     "too large, got none; try `counterpoint tune ... --ranks 2`"),
    (f"{TUNE} 64,32,48 --ranks 2 --specs fast", "tune: plan must be auto or one of ..., got "
     "'fast'"),
    ("characterize", "characterize: GPUs of this machine must be 2 or more, got none ..."),
    ("characterize --full=yes", "characterize: --full must be given without a value, got 'yes'; "
     "..."),
    ("warmup", "warmup: --layers must be given, got none; see `counterpoint warmup --help`"),
    ("warmup --layers 64,64 --op gemm", "warmup: --op must be one of matmul_all_reduce, ..., got "
     "'gemm'"),
    ("doctor --group", "doctor: --group must be given under torchrun, got no ranks; run "
     "`torchrun --nproc-per-node=2 -m counterpoint doctor --group`"),
    ("doctor --group --kernels", "doctor: --group must be given without --kernels, got both"),
    ("doctor --shape 8,8,8", "doctor: --shape must be given together with --kernels, got '8,8,8'"),
    ("doctor --jsn", "doctor: options must be of --json, ..., got '--jsn'; did you mean '--json'?"),
    ("bench decoding", "bench: NAME must be one of overlap, ..., got 'decoding'; did you mean "
     "'decode'?"),
    ("bench --shorts", "bench: options must be of ..., got '--shorts'; did you mean '--short'?"),
    ("bench --short=2", "bench: --short must be given without a value, got '2'"),
    ("bench --rounds", "bench: --rounds must be given with a value, got none"),
    ("evaluate --rows rows.jsonl --part 1/2", "evaluate: --part must be left out with --rows, got "
     "1/2"),
]  # fmt: skip

NUMBERS: list[tuple[str, str]] = [
    ("scale llama3-8b --gpus 1000000000",
     "scale: --gpus must be a whole number from 0 to 16777216, got '1000000000'"),
    ("scale llama3-8b --gpus 60 --tp 8",
     "scale: --tp * cp * pp * dp must be such that they multiply to the 60 GPUs, got tp 8 x cp 1 "
     "x pp 1; take this many GPUs: 56 or 64"),
    ("scale deepseek-v3 --gpus 2048 --ep 48",
     "scale: --ep must be a divisor of the 256 experts of deepseek-v3, got 48; the nearest that "
     "fits: 64"),
    (f"{A} --ranks -1", "plan: --ranks must be a whole number of 0 or more, got '-1'"),
    (f"{A} --ranks four", "plan: --ranks must be a whole number of 0 or more, got 'four'"),
    (f"{A} --ranks 1e309", "plan: --ranks must be a whole number of 0 or more, got '1e309'"),
    (f"{A} --ranks 16", "plan: --ranks must be at most the 8 GPUs of h200-8, got 16; take --ranks "
     "8"),
    ("plan all_gather_matmul --shape 8190,64,64 --ranks 6 --machine h200-4",
     "plan: --ranks must be at most the 4 GPUs of h200-4, got 6; take --machine h200-6"),
    (f"{A} --ranks 3", "plan: --shape must be of an M that 3 ranks share evenly, got "
     "'8192,7168,8192'; take --shape 8190,7168,8192 or --shape 8193,7168,8192"),
    (f"{A} --experts 4", "plan: --experts must be 0: the op has none, got 4"),
    ("plan all_gather_matmul --shape 8192,7168",
     "plan: --shape must be M,N,K of numbers from 1 to 2**40, got '8192,7168'"),
    ("plan all_gather_matmul --shape 8192,0,8192",
     "plan: --shape must be M,N,K of numbers from 1 to 2**40, got '8192,0,8192'"),
    ("plan all_gather_matmul --shape 1e309,8,8",
     "plan: --shape must be M,N,K of numbers from 1 to 2**40, got '1e309,8,8'"),
    (f"plan all_gather_matmul --shape {'9' * 5000},8,8",
     "plan: --shape must be M,N,K of numbers from 1 to 2**40, got '999..."),
    ("plan all_to_all_matmul --shape 8192,4096,7168",
     "plan: --experts must be 1 or more, got 0"),
    ("plan all_to_all_matmul --shape 8192,4096,7168 --experts 3", "plan: --shape must be of an M "
     "that 3 experts on each of 8 ranks share evenly, got '8192,4096,7168'; take --shape "
     "8184,4096,7168 or --shape 8208,4096,7168"),
    (f"{BAGS} 8,128,5", "plan: --shape must be TABLES,D,POOLING,BATCH of numbers from 1 to 2**40, "
     "got '8,128,5'"),
    (f"{BAGS} 8,128,5,65537", "plan: --shape must be of a BATCH that 8 ranks share evenly, got "
     "'8,128,5,65537'; take --shape 8,128,5,65536 or --shape 8,128,5,65544"),
    (f"{BAGS} 9999999999,128,5,65536",
     "plan: --shape must be of at most 4096 tables a GPU, got '9999999999,128,5,65536'"),
    ("demo --ranks 9", "demo: --ranks must be a whole number from 0 to 8, got '9'"),
    ("demo --seed 1e309", "demo: --seed must be a whole number from 0 to 2147483648, got '1e309'"),
    (f"{GEMM} -1", "occupancy: --shared must be a whole number of 0 or more, got '-1'"),
    (f"{GEMM} 9999999", "occupancy: block must be of 0 to ... bytes of shared memory on ..., got "
     "9999999"),
    ("occupancy --threads 1025 --registers 8 --shared 0",
     "occupancy: block.threads must be 1 to 1024, got 1025"),
    ("tune --rounds 1", "tune: --rounds must be a whole number of 2 or more, got '1'"),
    (f"{TUNE} 64,32,48 --ranks 3", "tune: --shape must be of an M that 3 ranks share evenly, got "
     "'64,32,48'; take --shape 63,32,48 or --shape 66,32,48"),
    ("characterize --ranks -2", "characterize: --ranks must be a whole number of 0 or more, got "
     "'-2'"),
    ("warmup --layers 64", "warmup: --layers must be N,K of each layer with colons between, "
     "numbers from 1 to 2**40, got '64'"),
    ("warmup --layers 64,64 --rows 0", "warmup: --rows must be numbers with commas from 1 to "
     "2**40, got '0'"),
    ("bench --rounds 1e309", "bench: --rounds must be a whole number of 0 or more, got '1e309'"),
    ("doctor --kernels --shape 64,x,64",
     "doctor: --shape must be M,N,K of numbers from 1 to 2**40, got '64,x,64'"),
]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Be in a folder of files that are wrong; it stays as it is."""
    monkeypatch.chdir(tmp_path)
    shipped = (SHIPPED / "nvidia-h200-4.json").read_text()
    for name in ("folder", "folder.json", "folder.svg"):
        Path(name).mkdir()
    Path("empty.json").touch()
    Path("cut.json").write_text(shipped[:100])
    Path("list.json").write_text("[1]")
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")
    Path("zero.json").write_text(shipped.replace('"num_devices": 4', '"num_devices": 0'))
    Path("other.jsonl").write_text('{"table": "decode"}\n')
    Path("rows.jsonl").write_text(json.dumps({"table": "evaluate"}))
    before = sorted(tmp_path.iterdir())
    yield tmp_path
    assert sorted(tmp_path.iterdir()) == before, "something was made"


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """None here, whatever this machine has."""
    benchmarks_here(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("files", "no_gpus")
@pytest.mark.parametrize(("line", "text"), [*FILES, *WORDS, *NUMBERS], ids=lambda words: words[:60])
def test_wrong_command_lines(line: str, text: str):
    environment = {"COLUMNS": "80", "LOCAL_RANK": None}
    result = CliRunner().invoke(main.app, shlex.split(line), env=environment)
    assert (result.exit_code, result.stdout) == (2, "")
    assert FORM.fullmatch(result.stderr), result.stderr
    pattern = re.escape(text).replace(re.escape("..."), ".*")
    assert re.fullmatch(f"{pattern}\n", result.stderr), result.stderr
    assert not any(word in result.stderr for word in FOREIGN)


def test_the_table_has_every_command_and_says_enough():
    lines = [line for line, _ in (*FILES, *WORDS, *NUMBERS)]
    assert len(lines) >= 60
    assert {command.__name__ for command in main.COMMANDS} <= {line.split()[0] for line in lines}


@pytest.mark.usefixtures("files")
def test_files_are_looked_at_before_torch_is_loaded():
    code = (
        "import shlex, sys\n"
        "sys.modules['torch'] = None\n"
        "from benchmarks import options\n"
        "from counterpoint.cli.main import app\n"
        "from counterpoint.errors import InputError\n"
        "for line in sys.argv[1:]:\n"
        "    name, *words = shlex.split(line)\n"
        "    try:\n"
        "        getattr(options, name)(words) if hasattr(options, name) else app([name, *words])\n"
        "        print('not refused', line)\n"
        "    except InputError: pass\n"
        "    except SystemExit as end: print(line if end.code != 2 else '', end='')\n"
    )
    assert python("-c", code, *(line for line, _ in FILES)) == ""


def test_advice_works_when_followed_literally():
    followed = 0
    for line, text in NUMBERS:
        advised = re.findall(r"--(?:shape|ranks|machine) [\w,-]+", text.partition("take")[2])
        for advice in advised if line.startswith("plan") else ():
            invoke(*shlex.split(f"{line} {advice}"))  # of an option given twice the last counts
            followed += 1
    assert followed >= 8


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("line", "denied", "text"),
    [
        (f"{A} --out plan.png", os.W_OK, "where this user may write, got plan.png: no permission"),
        ("demo --out pictures", os.W_OK, "where this user may write, got pictures: no permission"),
        ("demo --out folder", os.W_OK, "where this user may write, got folder: no permission"),
        ("demo --out folder", os.R_OK, "a path that this user may read, got 'folder'"),
    ],
)
def test_what_this_user_may_not_do(
    line: str, denied: int, text: str, monkeypatch: pytest.MonkeyPatch
):
    def access(path: object, mode: int) -> bool:
        return mode != denied

    monkeypatch.setattr(os, "access", access)  # root may everything
    result = invoke(*shlex.split(line), code=2)
    assert result.stderr == f"{line.split()[0]}: --out must be {text}\n"


def test_ctrl_c_says_stopped(monkeypatch: pytest.MonkeyPatch):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("counterpoint.cli.plan.choose", stop)
    result = invoke(*shlex.split(A), code=130)
    assert (result.stdout, result.stderr) == ("", "\nstopped\n")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OSError(28, "No space left on device", "plan.png"), 2,
         "plan: files must be free to be read and written, got plan.png: no space left on device"),
        (CounterpointError("rank 1 died"), 1, "plan: rank 1 died"),
    ],
)  # fmt: skip
def test_what_fails_later_is_one_line(
    error: Exception, code: int, text: str, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("counterpoint.cli.plan.choose", fail)
    assert invoke(*shlex.split(A), code=code).stderr == f"{text}\n"
