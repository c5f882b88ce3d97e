"""How a test says that this machine cannot run it: conftest.py repeats it at the end of a run."""

NOT_TESTED = "not tested here: "  # begins the reason of the skip
