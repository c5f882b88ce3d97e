"""`python -m counterpoint`: the same as the command `counterpoint`."""

from counterpoint.cli.main import app

if __name__ == "__main__":  # spawned ranks import this module once more
    app(prog_name="counterpoint")
