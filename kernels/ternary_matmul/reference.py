"""The definition of `ternary_matmul`, in XLA operations."""

from jaxlab.kernels.lowbit.matmul_common import integer_reference as matmul

__all__ = ["matmul"]
