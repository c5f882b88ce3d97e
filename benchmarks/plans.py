"""The plans that are tested and timed on GPUs: at most 30 for each op and number of ranks.

Prints them: `PYTHONPATH=src python benchmarks/plans.py`.
"""

from counterpoint.plan.variants import variants
from counterpoint.problem import OPS

PLANS = {(op, ranks): variants(op, ranks) for op in OPS for ranks in (2, 4, 8)}

if __name__ == "__main__":
    for (op, ranks), specs in PLANS.items():
        print(f"{op} on {ranks} ranks:", *specs, sep="\n    ")
