"""What kernels of a DLRM's step read and write, counted where they are written: benchmarks/dlrm.py.

A number of an activation has 2 bytes.
"""

from counterpoint.scale.constants import Constant

RELU = Constant(4, "bytes a number of a hidden layer, forward", "counted", "read 2, write 2")
RELU_BACKWARD = Constant(6, "bytes a number, backward", "counted", "read dy and y, write dx")
BIAS = Constant(2, "bytes a number of dy of a layer", "counted", "read once for its sum over rows")
CROSS = Constant(
    6, "bytes a number and kernel of the cross network", "counted",
    "x0 * up + x: a product and a sum, forward; backward two products and two sums of gradients "
    "a layer: read 2 + 2, write 2 each",
)  # fmt: skip
CONCAT = Constant(4, "bytes a number of pooled rows", "counted", "read 2, write 2; backward twice")
CAST = Constant(
    6,
    "bytes a dense parameter, each way",
    "counted",
    "autocast: read fp32, write bf16; and back; weights and biases apart",
)
BUCKET = Constant(
    16, "bytes a dense parameter", "counted",
    "DistributedDataParallel copies fp32 gradients into buckets, and back",
)  # fmt: skip
LOSS = Constant(
    12, "bytes a sample and kernel", "counted", "of logits in fp32: read 4 + 4, write 4"
)
NUM_LOSS = 7  # kernels of binary_cross_entropy_with_logits, each way
LAST_BUCKET = Constant(
    25 * 2**20,
    "bytes",
    "counted",
    "DistributedDataParallel's bucket: the last one has no dense layer beside it",
)
ENTRY = Constant(
    539,
    "bytes a named row, once for each time",
    "counted",
    "which bag and table it is in (32 + 16), its row (16 + 24), radix sort of pairs of int64 in 8 "
    "passes (272), where rows begin (131), bags in that order (48)",
)
NUM_SORTING = 36  # kernels of ENTRY
UPDATE = Constant(
    12,
    "bytes a number of each row that is named",
    "counted",
    "row-wise: weights (read 2, write 2) and Adagrad's sum in fp32 (read 4, write 4)",
)
ADAGRAD = Constant(20, "bytes a dense parameter", "counted", "gradient (4), weights (8), sum (8)")
COUNTS = {
    name.lower(): each for name, each in list(globals().items()) if isinstance(each, Constant)
}
