"""GPTQ: rounding a matrix column by column, each column's error paid back by the columns behind it.

With the upper Cholesky factor C of H^-1 (C' C = H^-1), column j is rounded to q_j, and

    w_k <- w_k - (w_j - q_j) C_jk / C_jj      for all k > j

is the change of the later columns that keeps ||(W - Q) X|| smallest. Block formats take the scale of a block when its
first column is reached, from the values that it has then. With H = I nothing is paid back: rounding to nearest.

Source: GPTQ (arXiv 2210.17323), section 3.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxlab.kernels.lowbit import exact, numerics, packing
from jaxlab.quant.calibrate import check_hessian
from jaxlab.quant.formats import resolve
from jaxlab.quant.qtensor import QTensor, dequantize, quantize

ROUNDINGS = ("nearest", "gptq")
BLOCKS = {"nvfp4": numerics.NVFP4_BLOCK, "mxfp4": numerics.MXFP4_BLOCK}


def _columns(
    block: Float[Array, "m B"], c: Float[Array, "B B"], scale: Float[Array, "m 1"]
) -> tuple[Int32[Array, "m B"], Float[Array, "m B"]]:
    """Rounds the columns of one block; returns codes and the errors (w_j - q_j) / C_jj."""
    width = block.shape[1]

    def body(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        x, codes, errors = carry
        column = x[:, j, None]
        code = numerics.e2m1_encode(column, scale)
        error = (column - numerics.e2m1_decode(code) * scale) / c[j, j]
        later = jnp.where(jnp.arange(width) > j, c[j], 0.0)
        return x - error * later, codes.at[:, j].set(code[:, 0]), errors.at[:, j].set(error[:, 0])

    start = (block, jnp.zeros(block.shape, jnp.int32), jnp.zeros_like(block))
    return jax.lax.fori_loop(0, width, body, start)[1:]


@functools.partial(jax.jit, static_argnames=("format", "rule"))
def _round(
    w: Float[Array, "m n"], c: Float[Array, "n n"], format: str, rule: str
) -> tuple[Int32[Array, "m n"], Int32[Array, "m b"], Float[Array, ""]]:
    size = BLOCKS[format]
    m, n = w.shape
    tensor_scale = numerics.nvfp4_tensor_scale(exact.peak(w, (0, 1)))[0, 0] if format == "nvfp4" else jnp.float32(1)

    def body(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        w, codes, bytes_ = carry
        start = b * size
        block = jax.lax.dynamic_slice_in_dim(w, start, size, 1)
        if format == "nvfp4":
            _, byte = numerics.nvfp4_encode(block, tensor_scale)
            scale = numerics.e4m3_decode(byte) * tensor_scale
        else:
            _, byte = numerics.mxfp4_encode(block, rule)
            scale = numerics.e8m0_decode(jnp.where(byte == 0, 127, byte))
        rows = jax.lax.dynamic_slice_in_dim(c, start, size, 0)
        found, errors = _columns(block, jax.lax.dynamic_slice_in_dim(rows, start, size, 1), scale)
        # C is upper triangular: nothing reaches back, and what lies in the block is not read again.
        w = w - errors @ rows
        codes = jax.lax.dynamic_update_slice_in_dim(codes, found, start, 1)
        return w, codes, jax.lax.dynamic_update_slice_in_dim(bytes_, byte, b, 1)

    start = (w, jnp.zeros((m, n), jnp.int32), jnp.zeros((m, n // size), jnp.int32))
    _, codes, bytes_ = jax.lax.fori_loop(0, n // size, body, start)
    return codes, bytes_, tensor_scale


def round_columns(
    w: Float[np.ndarray, "m n"] | Float[Array, "m n"],
    h: Float[np.ndarray, "*h"] | None,
    format: str = "nvfp4",
    *,
    scale_rule: str = "floor",
) -> tuple[Int32[Array, "m n"], Int32[Array, "m b"], Float[Array, ""], Float[Array, "m n"]]:
    """GPTQ of a matrix in a block format of 4 bits.

    Args:
      w: weights `[out, in]`; `in` a multiple of the format's block.
      h: H `[in, in]`, its diagonal, or None for the identity. A diagonal pays nothing back.
      format: "nvfp4" or "mxfp4".
      scale_rule: of MXFP4.

    Returns:
      (codes, scale bytes, tensor scale, the decoded weights).

    Raises:
      ValueError: for another format, a width that is no multiple of the block, or an H that does not fit.

    >>> w = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    >>> codes, *_ = round_columns(w, None)
    >>> codes.shape
    (4, 32)
    """
    if format not in BLOCKS:
        raise ValueError(f"format must be one of {tuple(BLOCKS)}, got {format!r}")
    n = w.shape[1]
    if n % BLOCKS[format]:
        raise ValueError(f"w must have a multiple of {BLOCKS[format]} columns for {format}, got {n}")
    check_hessian(h, n)
    if h is None or np.ndim(h) == 1:
        c = np.eye(n, dtype=np.float32)
    else:
        # In float64: the inverse of a matrix with a condition number of 1e6 has no digits left in float32.
        inverse = np.linalg.inv(np.asarray(h, np.float64))
        c = np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)
    codes, byte, tensor_scale = _round(jnp.asarray(w, jnp.float32), jnp.asarray(c), format, scale_rule)
    blocks = codes.reshape(*byte.shape, BLOCKS[format])
    if format == "nvfp4":
        decoded = numerics.nvfp4_decode(blocks, byte[..., None], tensor_scale)
    else:
        decoded = numerics.mxfp4_decode(blocks, byte[..., None])
    return codes, byte, tensor_scale, decoded.reshape(w.shape)


def quantizer(
    format: str, h: Float[np.ndarray, "*h"] | None = None, *, rounding: str = "nearest", scale_rule: str = "floor"
) -> Callable[[Float[np.ndarray, "m n"]], tuple[QTensor, Float[np.ndarray, "m n"]]]:
    """The base of a correction: weights `[out, in]` -> (what is stored, what it decodes to).

    Args:
      format: "nvfp4" or "mxfp4"; blocks lie along the inputs.
      h: H of the inputs, for GPTQ.
      rounding: "nearest" or "gptq".
      scale_rule: of MXFP4.

    Raises:
      ValueError: for another format or rounding.

    >>> stored, decoded = quantizer("nvfp4")(np.ones((4, 32), np.float32))
    >>> stored.nbytes, decoded.shape
    (76, (4, 32))
    """
    if format not in BLOCKS:
        raise ValueError(f"format must be one of {tuple(BLOCKS)}, got {format!r}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, got {rounding!r}")
    rule = scale_rule if format == "mxfp4" else None
    fmt = resolve(format, scale_rule=rule)

    def nearest(w: Float[np.ndarray, "m n"]) -> tuple[QTensor, Float[np.ndarray, "m n"]]:
        q = quantize(w, fmt)
        return q, np.asarray(dequantize(q))

    def columns(w: Float[np.ndarray, "m n"]) -> tuple[QTensor, Float[np.ndarray, "m n"]]:
        codes, byte, tensor_scale, decoded = round_columns(w, h, format, scale_rule=scale_rule)
        stored = packing.pack(codes, 4), byte.astype(jnp.uint8), tensor_scale if format == "nvfp4" else None
        return QTensor(*stored, fmt, w.shape, np.dtype(np.float32), -1), np.asarray(decoded)

    return nearest if rounding == "nearest" else columns
