"""`counterpoint`, and `python -m counterpoint`: the command line."""

from counterpoint.cli.loading import loading


def main() -> None:
    """Run the command."""
    with loading():
        from counterpoint.cli.main import app
    app(prog_name="counterpoint")


if __name__ == "__main__":  # spawned ranks import this module once more
    main()
