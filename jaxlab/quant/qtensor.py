"""Arrays stored in few bits: the pytree `QTensor`, `quantize`, `dequantize`, and `fake_quant` for training.

The quantised axis is moved last; codes are `uint8 [*lead, bytes a row]`, where `lead` are the other axes in their
order. A kernel of shape (in, out) that is quantised along its contraction axis, -2, is thus stored as [out, in].

`fake_quant(x)` is `dequantize(quantize(x))` bit for bit, inside and outside of `jit`: they call the same functions.
Each compiles its arithmetic by itself, so that large arrays outside of `jit` do not take many times their memory.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxlab.kernels.lowbit import packing
from jaxlab.quant.formats import Encoded, Format, resolve

DTYPES = ("float32", "bfloat16", "float16", "float64")
STE = ("clip", "identity")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "tensor_scale"],
    meta_fields=["format", "shape", "dtype", "axis"],
)
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantised array; a pytree of its stored arrays, the rest is static.

    `vmap` and `scan` put further axes in front of the arrays; `shape` stays that of one array.

    Attributes:
      codes: `uint8 [*lead, bytes a row]`.
      scale: uint8 bytes (E4M3, E8M0) or float32: `[*lead, blocks]`, `[*lead, 1]` for one a row, `[]` for one a tensor.
      tensor_scale: `float32 []`; None for formats without.
      format: how it is stored.
      shape: of the array it stands for.
      dtype: of the array it stands for.
      axis: along which its rows lie, counted from the last: -1, -2, ...
    """

    codes: Any  # not annotated as arrays: tree functions put structs, shardings and placeholders here
    scale: Any
    tensor_scale: Any
    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int

    @property
    def size(self) -> int:
        """Number of elements it stands for."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.shape[self.axis]

    @property
    def lead(self) -> tuple[int, ...]:
        """The other axes."""
        return _lead(self.shape, self.axis)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays, those that `vmap` made included."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def checkpoint_meta(self) -> str:
        """What a checkpoint must agree in, beside the arrays."""
        return f"{self.format} of {self.dtype}{list(self.shape)} along axis {self.axis}"

    def __repr__(self) -> str:
        return f"QTensor({self.checkpoint_meta})"


def is_quantized(x: Any) -> bool:
    """Whether x is a `QTensor`; the `is_leaf` for tree functions that shall see whole arrays."""
    return isinstance(x, QTensor)


def _lead(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape) if i != len(shape) + axis)


def check_array(x: Shaped[Array | np.ndarray, "..."], axis: int, name: str = "w") -> int:
    """Raises what `quantize` says about an array; returns the axis counted from the last."""
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{name} must be one of {DTYPES}, got {x.dtype.name}")
    if x.ndim == 0:
        raise ValueError(f"{name} must have at least one axis, got a scalar")
    if isinstance(axis, bool) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be from {-x.ndim} to {x.ndim - 1} for {name} of shape {list(x.shape)}, got {axis}")
    return axis - x.ndim if axis >= 0 else axis


@jax.jit
def _count_bad(x: Float[Array, "..."]) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    return jnp.sum(jnp.isnan(x), dtype=jnp.int32), jnp.sum(jnp.isinf(x), dtype=jnp.int32)


def check_finite(x: Shaped[Array, "..."], name: str = "w") -> None:
    """Raises `ValueError` when an array holds NaN or an infinity; a traced array cannot be looked at, and passes."""
    if isinstance(x, jax.core.Tracer) or x.size == 0:
        return
    nan, inf = (int(n) for n in _count_bad(x))
    if nan or inf:
        found = f"{nan} NaN and {inf} infinite elements"
        raise ValueError(f"{name} of shape {list(x.shape)} must be finite in float32, got {found}")


def as_array(x: Shaped[Array | np.ndarray, "..."]) -> Float[Array, "..."]:
    """x as a JAX array; float64 as float32, in which everything is computed."""
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes an infinity, of which `check_finite` speaks
        return jnp.asarray(x, jnp.float32) if x.dtype == np.float64 else jnp.asarray(x)


def _rows(x: Shaped[Array, "..."], axis: int) -> Float32[Array, "..."]:
    return jnp.moveaxis(x, axis, -1).astype(jnp.float32)


def _cast(x: Float32[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """x in another float type; saturates in float16, whose range is smaller."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize < 4:
        info = jnp.finfo(dtype)
        if dtype == jnp.float16:
            # A NaN passes.
            x = jnp.clip(x, float(info.min), float(info.max))
        # XLA drops a cast to a short type and back inside one program; of a number that is rounded already, it may.
        x = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    return x.astype(dtype)


def _restore(rows: Float32[Array, "..."], n: int, axis: int, dtype: Any) -> Float[Array, "..."]:
    return jnp.moveaxis(_cast(rows[..., :n], dtype), -1, axis)


def quantize(
    w: Shaped[Array | np.ndarray, "..."],
    format: str | Format,
    *,
    axis: int = -1,
    scale_rule: str | None = None,
    block_size: int | None = None,
    per: str | None = None,
) -> QTensor:
    """Stores an array in few bits.

    Works under `jit` (with `format` and the options static), `vmap` and `scan`.

    Args:
      w: float32, bfloat16, float16 or float64, of at least one axis; computed in float32.
      format: "nvfp4", "mxfp4", "int8", "int4", "ternary", "sign", or an instance of a class of `formats`.
      axis: along which blocks and rows lie; for a product x @ w of w (in, out), the contraction axis is 0 or -2.
      scale_rule, block_size, per: options of the format, see `formats.resolve`.

    Returns:
      A `QTensor` of the shape and dtype of w.

    Raises:
      TypeError: when w has another dtype.
      ValueError: when w is a scalar or holds NaN or infinities, for an axis it does not have, and for a format or an
        option that does not exist. Inside `jit` values cannot be checked: there NaN and infinities make the scale of
        their block (row, tensor; in NVFP4 always of the tensor) NaN, which dequantises to NaN.

    >>> q = quantize(jnp.linspace(-1, 1, 64).reshape(2, 32), "nvfp4")
    >>> q.codes.shape, q.scale.shape, q.nbytes, q.checkpoint_meta
    ((2, 16), (2, 2), 40, 'nvfp4 of float32[2, 32] along axis -1')
    """
    fmt = resolve(format, scale_rule=scale_rule, block_size=block_size, per=per)
    axis = check_array(w, axis)
    shape, dtype = tuple(w.shape), np.dtype(jax.dtypes.canonicalize_dtype(w.dtype))
    x = as_array(w)
    check_finite(x)
    return QTensor(*_stored(x, fmt, axis), fmt, shape, dtype, axis)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _stored(x: Float[Array, "..."], fmt: Format, axis: int) -> tuple[Any, Any, Any]:
    encoded = fmt.encode(_rows(x, axis))
    return packing.pack(encoded.codes, fmt.bits), encoded.scale, encoded.tensor_scale


def unpacked(q: QTensor) -> Encoded:
    """The codes, unpacked to int32 and with the padding, and the scales.

    Raises:
      ValueError: when the arrays do not have the shapes that `q.shape` and `q.format` say.
      TypeError: when their dtypes are others.

    >>> unpacked(quantize(jnp.array([1.0, -6.0, 0.0]), "mxfp4")).codes[:4].tolist()
    [2, 15, 0, 0]
    """
    _check_stored(q)
    return _encoded(q)


def _encoded(q: QTensor) -> Encoded:
    return Encoded(packing.unpack(q.codes, q.format.bits), q.scale, q.tensor_scale)


def _check_stored(q: QTensor) -> None:
    fmt = q.format
    expected = {
        "codes": ((*q.lead, fmt.padded(q.row) * fmt.bits // 8), np.dtype(np.uint8)),
        "scale": (fmt.scale_shape(q.lead, q.row), fmt.scale_dtype),
    }
    if fmt.tensor_scaled:
        expected["tensor_scale"] = ((), np.dtype(np.float32))
    for name, (shape, dtype) in expected.items():
        x = getattr(q, name)
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{name} of {q.checkpoint_meta} must have the shape {list(shape)}, got {list(x.shape)}; map over "
                "further axes with jax.vmap"
            )
        if x.dtype != dtype:
            raise TypeError(f"{name} of {q.checkpoint_meta} must be {dtype}, got {x.dtype}")


def dequantize(q: QTensor, dtype: Any = None) -> Float[Array, "..."]:
    """The array that a `QTensor` stands for.

    Args:
      q: as `quantize` gave it; inside `vmap` or `scan` where it was made there.
      dtype: float32, bfloat16, float16 or float64; None for that of the array that was quantised.

    Returns:
      An array of `q.shape`.

    Raises:
      TypeError: for another dtype, or arrays of q with dtypes that its format does not have.
      ValueError: when the arrays of q do not have the shapes that `q.shape` and `q.format` say.

    >>> dequantize(quantize(jnp.array([0.7, -3.1, 2.2, 6.0]), "mxfp4")).tolist()
    [0.5, -3.0, 2.0, 6.0]
    """
    name = q.dtype.name if dtype is None else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise TypeError(f"dtype must be one of {DTYPES}, got {name}")
    _check_stored(q)
    return _values(q, name)


@functools.partial(jax.jit, static_argnums=1)
def _values(q: QTensor, dtype: str) -> Float[Array, "..."]:
    return _restore(q.format.decode(_encoded(q)), q.row, q.axis, dtype)


def fake_quant(
    x: Shaped[Array | np.ndarray, "..."],
    format: str | Format,
    *,
    axis: int = -1,
    scale_rule: str | None = None,
    block_size: int | None = None,
    per: str | None = None,
    ste: str = "clip",
) -> Float[Array, "..."]:
    """x rounded to what a format can represent, with a straight-through gradient: `dequantize(quantize(x, ...))`.

    The gradient with respect to x is 1, and 0 where the value was clipped; scales count as constants. Clipped are:

        nvfp4     |x| > 6 s_b ts: up to 6 % of the largest magnitude of a block, where s_b was rounded down
        mxfp4     |x| > 6 s_b: with the rule ceil, none
        ternary   |x| > 3/2 (g + eps): what would have been rounded to 2 or more
        others    none: the largest magnitude is in the range, and a sign has no range

    Args:
      x, format, axis, scale_rule, block_size, per: as for `quantize`.
      ste: "clip" as above; "identity" for a gradient of 1 everywhere, as BitNet trains its ternary weights.

    Returns:
      An array of the shape and dtype of x.

    Raises:
      TypeError, ValueError: as `quantize`.

    >>> x = jnp.array([7.9, 0.3, -1.1])
    >>> fake_quant(x, "mxfp4").tolist(), jax.grad(lambda x: fake_quant(x, "mxfp4").sum())(x).tolist()
    ([6.0, 0.5, -1.0], [0.0, 1.0, 1.0])
    """
    if ste not in STE:
        raise ValueError(f"ste must be one of {STE}, got {ste!r}")
    fmt = resolve(format, scale_rule=scale_rule, block_size=block_size, per=per)
    axis = check_array(x, axis, "x")
    x = jnp.asarray(x)
    check_finite(as_array(x), "x")
    return _fake_compiled(x, fmt, axis, ste)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _fake(x: Float[Array, "..."], fmt: Format, axis: int, ste: str) -> Float[Array, "..."]:
    return _restore(fmt.decode(fmt.encode(_rows(x, axis))), x.shape[axis], axis, x.dtype)


def _fake_fwd(x: Float[Array, "..."], fmt: Format, axis: int, ste: str) -> tuple[Any, Any]:
    rows = _rows(x, axis)
    encoded = fmt.encode(rows)
    y = _restore(fmt.decode(encoded), x.shape[axis], axis, x.dtype)
    return y, jnp.moveaxis(fmt.inside(rows, encoded), -1, axis) if ste == "clip" else None


def _fake_bwd(fmt: Format, axis: int, ste: str, inside: Any, g: Any) -> tuple[Any]:
    return (g if inside is None else jnp.where(inside, g, jnp.zeros_like(g)),)


_fake.defvjp(_fake_fwd, _fake_bwd)
_fake_compiled = jax.jit(_fake, static_argnums=(1, 2, 3))
