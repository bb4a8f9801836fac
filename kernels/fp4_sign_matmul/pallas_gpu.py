"""`fp4_sign_matmul` as two Pallas kernels for GPUs: (x * b) V with packed V, then x Q' + t U' with both packed."""

import functools

from jaxlab.kernels.fp4_matmul.pallas_gpu import packed_matmul
from jaxlab.kernels.lowbit.matmul_common import fp4_sign_by_kernel

matmul = functools.partial(fp4_sign_by_kernel, packed_matmul)
