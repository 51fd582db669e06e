"""Linear layers that read one input: on several streams, as one product over weights that lie side by side, or both.

Importing this package registers `torch.ops.dsv4.grouped_linear`, `mixed_linear`, `parallel_linear` and `packed_linear`.
"""

from dsv4_compile.kernels.linear.operators import grouped_linear, mixed_linear, packed_linear, parallel_linear
from dsv4_compile.kernels.linear.tuning import choices, warmup

__all__ = ["choices", "grouped_linear", "mixed_linear", "packed_linear", "parallel_linear", "warmup"]
