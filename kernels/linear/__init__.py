"""Linear layers that read one input: on several streams, or as one product over weights that lie side by side.

Importing this package registers `torch.ops.dsv4.parallel_linear` and `torch.ops.dsv4.packed_linear`.
"""

from dsv4_compile.kernels.linear.operators import packed_linear, parallel_linear

__all__ = ["packed_linear", "parallel_linear"]
