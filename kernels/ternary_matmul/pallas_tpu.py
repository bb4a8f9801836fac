"""`ternary_matmul` as a Pallas kernel for TPUs: that of `fp4_matmul` with another layout and without blocks' scales."""

import functools

from jaxlab.kernels.fp4_matmul.pallas_tpu import packed_matmul
from jaxlab.kernels.lowbit.matmul_common import integers_by_kernel

matmul = functools.partial(integers_by_kernel, packed_matmul)
