"""Linear layers that read one input: on several streams, as one product over weights that lie side by side, or both.

Importing this package registers `torch.ops.dsv4.grouped_linear`, `mixed_linear`, `parallel_linear`,
`packed_linear` and `accompanied_linear`.
"""

from dsv4_compile.kernels.linear.accompanied import accompanied_linear
from dsv4_compile.kernels.linear.operators import grouped_linear, mixed_linear, packed_linear, parallel_linear
from dsv4_compile.kernels.linear.tuning import choices, warmup

__all__ = [
    "accompanied_linear",
    "choices",
    "grouped_linear",
    "mixed_linear",
    "packed_linear",
    "parallel_linear",
    "warmup",
]
