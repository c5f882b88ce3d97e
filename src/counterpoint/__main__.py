"""`counterpoint`, and `python -m counterpoint`: the command line."""

import os
import sys
from io import TextIOWrapper

from counterpoint.cli.shared.loading import loading


def main() -> None:
    """Run the command."""
    # a terminal that has not all characters shows "?" instead, of ranks that are started here too
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:replace"
    with loading():
        from counterpoint.cli.main import app
    app(prog_name="counterpoint")


if __name__ == "__main__":  # spawned ranks import this module once more
    main()
