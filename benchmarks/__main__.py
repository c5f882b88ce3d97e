"""`python -m benchmarks bench ...`, and evaluate: a wrong option is said before torch is loaded."""

import os
import sys
from importlib import import_module

from benchmarks import options
from counterpoint.cli.shared.loading import loading
from counterpoint.errors import CounterpointError, InputError

HOMES = {"bench": "benchmarks.runner", "evaluate": "benchmarks.evaluate"}


def main(command: str, given: list[str]) -> int:
    """Run one of HOMES; its exit code, 2 for wrong input, 130 for Ctrl-C."""
    try:
        if "-h" not in given and "--help" not in given:  # its help is the home's own
            getattr(options, command)(given)
        with loading():
            home = import_module(HOMES[command])
        return home.main(given)
    except CounterpointError as error:
        text = str(error)
        print(text if text.startswith(f"{command}: ") else f"{command}: {text}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `counterpoint evaluate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
