"""Test a kernel that talks to its peers, on a machine without a GPU.

- `counterpoint.testing.ranks`: run it on CPU processes that share memory, by Triton's interpreter.
- `counterpoint.testing.interleave`: run all programs of all ranks in one process, in seeded orders.
  Finds deadlocks, missing releases, and protocols that depend on an order.
- `counterpoint.testing.ptx`: compile it for GPUs that are not here, and check the order of stores,
  barriers, releases and acquires, its registers and its spills.

Interleaving needs greenlet: `pip install greenlet`.
"""

from counterpoint.lazy import need

need("triton", "counterpoint.testing")
