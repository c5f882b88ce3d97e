"""The gains that `advise` knows are those of committed rows."""

import json

from benchmarks.gains import ARMS, PATH, gains_of
from benchmarks.rows import results


def test_the_file_is_what_the_rows_say():
    """`make readme` writes it."""
    found = json.loads(PATH.read_text())
    assert found == {name: gains_of(name, *arms) for name, arms in ARMS.items()}
    assert all(0 <= each["share"] <= 1 < each["gpus"] for of in found.values() for each in of)


def test_a_share_by_hand():
    """(as is - ours) / (as is - computation alone), of one committed rotation."""
    rows = {
        row["arm"]: row["median_s"] for row in results("fsdp")[2] if row["case"] == "eager 8192"
    }
    share = (rows["as is"] - rows["ours"]) / (rows["as is"] - rows["compute"])
    (found,) = [
        each for each in gains_of("overlap", *ARMS["overlap"])
        if (each["case"], each["gpus"]) == ("eager 8192", 2)
    ]  # fmt: skip
    assert abs(found["share"] - share) < 5e-4
