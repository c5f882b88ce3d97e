"""Options of `counterpoint bench` and `counterpoint evaluate`, read before torch is loaded."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.rows import rows_of
from counterpoint.cli.shared.files import check_written, text_of
from counterpoint.cli.shared.usage import meant
from counterpoint.errors import InputError

NAMES = (
    "overlap", "few_rows", "decode", "experts", "embedding", "embedding_gradient",
    "attention", "steps", "training", "resources", "copies", "transports", "losses", "ficco",
    "evaluate", "compile", "soak", "norms", "fp8", "attention_replay", "epilogue", "expert_layer",
    "invariant", "overlap_replay", "two_islands", "prefill", "decode_experts", "fsdp",
    "fsdp_models", "expert_calls", "transformers_experts", "advise",
    "host_calls", "served", "tp_training",
)  # fmt: skip
# with --paper: a paper's own experiments, at its sizes
PAPER = {name: f"paper_{name}"
         for name in ("resources", "thread_blocks", "co_residency", "fused")}  # fmt: skip
LIMIT_S = 560  # of one benchmark
PICTURES = (".png", ".svg", ".pdf")


class Options(argparse.ArgumentParser):
    """Says what is wrong in the words of our errors."""

    def error(self, message: str) -> NoReturn:
        """Raise an InputError that says what argparse does."""
        command = self.prog.split()[-1]
        what, _, wrong = message.removeprefix("argument ").partition(": ")
        known = [option for action in self._actions for option in action.option_strings]
        if what == "unrecognized arguments":
            word = wrong.split()[0]
            want, fix = f"of {', '.join(known)}", meant(word, known)
            raise InputError(command, "options", want=want, got=repr(word), fix=fix)
        if wrong.startswith("ignored explicit argument "):
            got = wrong.removeprefix("ignored explicit argument ")
            raise InputError(command, what, want="given without a value", got=got)
        if wrong.startswith("expected"):
            raise InputError(command, what, want="given with a value", got="none")
        want, _, got = wrong.rpartition(", got ")
        raise InputError(command, what, want=want, got=got)


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"a whole number of 0 or more, got {text!r}")
    return int(text)


def _options(command: str, description: str) -> Options:
    return Options(prog=f"counterpoint {command}", description=description, allow_abbrev=False,
                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip


def bench(given: Sequence[str], description: str = "") -> argparse.Namespace:
    """What `counterpoint bench` is asked for.

    Raises:
        InputError: there is no such benchmark or option, or a file cannot be written.
    """
    parser = _options("bench", description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--short", action="store_true", help="few cases, few rounds")
    parser.add_argument("--paper", action="store_true",
                        help=f"a paper's experiment, at its sizes: {', '.join(PAPER)}")  # fmt: skip
    parser.add_argument("--cases", default="", help="those whose name has this in it")
    parser.add_argument("--shapes", default="", help="M,N,K of your own, with colons between")
    parser.add_argument("--part", default="1/1", help='"1/4": every fourth case, from the first on')
    parser.add_argument("--rounds", type=_whole, default=0, help="how often each arm is timed")
    parser.add_argument("--ranks", type=_whole, default=0, help="GPUs; 0: all")
    parser.add_argument("--shards", type=_whole, default=0, metavar="N",
                        help="layers as one of N GPUs holds them; 0: of these")  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSONL file that rows are added to, or a folder")
    parser.add_argument("--limit", type=_whole, default=LIMIT_S, help="most seconds of a benchmark")
    parser.add_argument("--done", type=Path, help="file that names are added to when they are done")
    parser.add_argument("--list", action="store_true", help="names of the cases, and no more")
    args = parser.parse_args(given)
    known = (*PAPER,) if args.paper else NAMES
    for name in args.names:
        if name not in known:
            want, fix = f"one of {', '.join(known)}", meant(name, known)
            if name in PAPER:
                fix = "add --paper"
            raise InputError("bench", "NAME", want=want, got=repr(name), fix=fix)
    if args.paper:
        args.names = [PAPER[name] for name in args.names or PAPER]
    if args.out is not None and not args.out.is_dir():
        check_written("bench", "--out", args.out, (".jsonl",), "a folder that is there, or a file")
    return args


def evaluate(given: Sequence[str], description: str = "") -> argparse.Namespace:
    """What `counterpoint evaluate` is asked for.

    Raises:
        InputError: there is no such option, or a file is not there, not of rows, or not to be
            written.
    """
    parser = _options("evaluate", description)
    parser.add_argument("--rows", type=Path, nargs="+", action="extend", help="score files of rows")
    parser.add_argument("--out", type=Path, default=Path("evaluate.jsonl"),
                        help="JSONL file that what is measured is added to")  # fmt: skip
    parser.add_argument("--picture", type=Path, help="draw the speedup of each scenario")
    parser.add_argument("--errors", type=Path, help="draw predicted against measured times")
    parser.add_argument(
        "--part", default="1/1", help='"1/4": every fourth scenario, from the first on'
    )
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    args = parser.parse_args(given)
    if args.rows and args.part != "1/1":
        raise InputError("evaluate", "--part", want="left out with --rows", got=args.part)
    want = "a file of rows that `counterpoint evaluate` wrote"
    for path in args.rows or ():
        text_of("evaluate", "--rows", path, want)
        try:
            rows = rows_of(path)
        except InputError as error:
            got = f"{path}: {str(error).rpartition(', got ')[2]}"
            raise InputError("evaluate", "--rows", want=want, got=got) from error
        if not any({"table", "arm", "op", "m", "n", "k", "ranks", "gpu"} <= set(r) for r in rows):
            raise InputError("evaluate", "--rows", want=want, got=f"{path}: rows of something else")
    if not args.rows:
        check_written("evaluate", "--out", args.out, (".jsonl",))
    check_written("evaluate", "--picture", args.picture, PICTURES)
    check_written("evaluate", "--errors", args.errors, PICTURES)
    return args
