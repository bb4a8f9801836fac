"""What the products with packed weights share: layouts, checks, the exact expansion, the choice of an implementation.

    y[m, n] = scale * sum_k x[m, k] w[n, k]          w of 4, 2 or 1 bits, stored [N, K], packed along K

A byte of `packing` holds p = 8 / bits neighbouring codes of a row. Nothing needs to interleave them: the product is
the sum over i = 0 .. p - 1 of x[:, i::p] with plane i of the bytes, and x is small. Sums are float32, or int32 where x
is int8; scales of the whole tensor or of a row are multiplied at the end, and the result is rounded once.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Int32, Shaped, UInt8

from jaxlab.kernels.lowbit import numerics, packing

ROWS = 8  # rows of x in a tile, and what many rows are padded to a multiple of
FEW = 4  # rows that are padded to so many instead
GROUP = 16  # tiles of so many rows that `row_tiles` writes out before it makes a loop of them
FLOATS = ("float32", "bfloat16")
# Name -> the backend that runs it; None for every one.
IMPLEMENTATIONS: dict[str, str | None] = {"xla": None, "pallas_tpu": "tpu", "pallas_gpu": "gpu"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How weights are stored, and what their codes mean.

    Attributes:
      name: "nvfp4", "mxfp4", "ternary" or "sign".
      bits: of a code.
      block: elements of a row that share a scale byte; None without such bytes.
    """

    name: str
    bits: int
    block: int | None = None

    @property
    def per_byte(self) -> int:
        """p, the codes in a byte."""
        return packing.per_byte(self.bits)

    @property
    def block_bytes(self) -> int:
        """Bytes of codes that share a scale byte."""
        if self.block is None:
            raise ValueError(f"layout {self.name!r} has no scale bytes")
        return self.block // self.per_byte

    def values(self, codes: Int32[Array, "*n"]) -> Shaped[Array, "*n"]:
        """What codes stand for: float32 at 4 bits, else int32.

        >>> TERNARY.values(jnp.arange(3)).tolist(), SIGN.values(jnp.arange(2)).tolist()
        ([-1, 0, 1], [1, -1])
        """
        if self.bits == 4:
            return numerics.e2m1_decode(codes)
        return codes - 1 if self.bits == 2 else 1 - 2 * codes

    def scales(self, words: UInt8[Array, "*n"]) -> Float32[Array, "*n"]:
        """What scale bytes stand for."""
        decode = numerics.e4m3_decode if self.name == "nvfp4" else numerics.e8m0_decode
        return decode(words.astype(jnp.int32))


FP4 = {"nvfp4": Layout("nvfp4", 4, numerics.NVFP4_BLOCK), "mxfp4": Layout("mxfp4", 4, numerics.MXFP4_BLOCK)}
TERNARY, SIGN = Layout("ternary", 2), Layout("sign", 1)


def fp4_layout(format: str) -> Layout:
    """The layout of a 4-bit format.

    Raises:
      ValueError: for another name.

    >>> fp4_layout("mxfp4").block
    32
    """
    if format not in FP4:
        raise ValueError(f"format must be one of {tuple(FP4)}, got {format!r}")
    return FP4[format]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is fixed when a product is compiled.

    Attributes:
      layout: of the weights.
      implementation: "xla", "pallas_tpu" or "pallas_gpu".
      interpret: whether a Pallas kernel runs as XLA operations.
      x_dtype, out_dtype: names of the dtypes of x and y.
      schedule: of `fp4_sign_matmul`.
    """

    layout: Layout
    implementation: str
    interpret: bool
    x_dtype: str
    out_dtype: str
    schedule: str = "fused"

    def call(self, op: str, function: str, *args: Any, **more: Any) -> Any:
        """Calls a function of the module of this implementation, imported when it is first needed."""
        names = {"xla": "reference"}
        module: ModuleType = importlib.import_module(
            f"jaxlab.kernels.{op}.{names.get(self.implementation, self.implementation)}"
        )
        if self.implementation != "xla":
            more["interpret"] = self.interpret
        return getattr(module, function)(*args, layout=self.layout, out_dtype=jnp.dtype(self.out_dtype), **more)


def check_implementation(name: str | None, *, interpret: bool = False) -> str:
    """The implementation of a name, None for that of the default backend.

    Raises:
      ValueError: for another name, for one that cannot run here, and for `interpret` without a Pallas kernel.

    >>> check_implementation("pallas_tpu", interpret=True)
    'pallas_tpu'
    """
    backend = jax.default_backend()
    if name is None:
        name = next((x for x, needed in IMPLEMENTATIONS.items() if needed == backend), "xla")
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {tuple(IMPLEMENTATIONS)}, got {name!r}")
    needed = IMPLEMENTATIONS[name]
    if interpret and needed is None:
        raise ValueError(f"interpret=True is for the Pallas kernels, and implementation={name!r} is none of them")
    if needed not in (None, backend) and not interpret:
        raise ValueError(
            f"implementation={name!r} runs on a {needed.upper()}, but the default backend is {backend!r}; "
            "interpret=True runs the kernel as XLA operations, implementation='xla' is the same product without it"
        )
    return name


def check_x(x: Shaped[Array, "..."], allowed: tuple[str, ...] = FLOATS) -> None:
    """Raises TypeError for a dtype of x that is not allowed, ValueError where it has no axis."""
    if x.dtype.name not in allowed:
        raise TypeError(f"x must be one of {allowed}, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("x must be [..., K], got a scalar")


def check_words(name: str, words: Shaped[Array, "..."], layout: Layout, x_shape: tuple[int, ...] | None = None) -> None:
    """Raises for packed weights that are not `uint8 [N, K / p]`, or whose K is not that of x."""
    if words.dtype != jnp.uint8:
        raise TypeError(f"{name} must be uint8, {layout.per_byte} codes a byte, got {words.dtype}")
    if words.ndim != 2:
        raise ValueError(f"{name} must be [N, K / {layout.per_byte}], got shape {words.shape}")
    k = words.shape[1] * layout.per_byte
    if x_shape is not None and x_shape[-1] != k:
        raise ValueError(
            f"x must be [..., K] with the K = {k} of {name} {list(words.shape)} ({layout.per_byte} codes a byte), "
            f"got shape {list(x_shape)}"
        )


def check_scale_bytes(name: str, scales: Shaped[Array, "..."], words: Shaped[Array, "n b"], layout: Layout) -> None:
    """Raises for scale bytes that are not `uint8 [N, K / block]`."""
    k = words.shape[1] * layout.per_byte
    if layout.block is None or k % layout.block:
        raise ValueError(f"K must be a multiple of {layout.block} for {layout.name}, got {k}: pad rows before packing")
    if scales.dtype != jnp.uint8:
        raise TypeError(f"{name} must be the uint8 bytes of {layout.name} scales, got {scales.dtype}")
    wanted = (words.shape[0], k // layout.block)
    if scales.shape != wanted:
        raise ValueError(f"{name} must be {list(wanted)}, a byte for {layout.block} codes, got {list(scales.shape)}")


def check_scale(name: str, scale: Any, rows: int | None) -> Float32[Array, "..."]:
    """A float scale of the tensor `[]`, or, with `rows`, of each row `[N, 1]`, as float32; raises for anything else."""
    scale = jnp.asarray(scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {scale.dtype}")
    if scale.shape not in ((), *([] if rows is None else [(rows, 1)])):
        allowed = "[]" if rows is None else f"[] or [{rows}, 1]"
        raise ValueError(f"{name} must have shape {allowed}, got {list(scale.shape)}")
    return scale.astype(jnp.float32)


def check_out_dtype(out_dtype: Any, default: Any) -> str:
    """The name of a floating-point dtype, `default` for None; raises TypeError for another."""
    name = jnp.dtype(default if out_dtype is None else out_dtype).name
    if name not in FLOATS:
        raise TypeError(f"out_dtype must be None or one of {FLOATS}, got {name}")
    return name


def units(words: UInt8[Array, "n b"], scales: UInt8[Array, "n c"], layout: Layout) -> Float32[Array, "n k"]:
    """E2M1 * E4M3 or E2M1 * E8M0: the weights without their tensor scale; exact, also in bfloat16."""
    values = layout.values(packing.unpack(words, layout.bits))
    blocks = values.reshape(*scales.shape, layout.block) * layout.scales(scales)[..., None]
    return blocks.reshape(values.shape)


def expand(words: UInt8[Array, "n b"], layout: Layout) -> Int8[Array, "n k"]:
    """Ternary or sign weights as int8."""
    return layout.values(packing.unpack(words, layout.bits)).astype(jnp.int8)


def product(x: Shaped[Array, "*m k"], w: Shaped[Array, "..."], axis: int = 1) -> Shaped[Array, "*m n"]:
    """x w' (or x w) with sums in float32, or in int32 for integers.

    For CPUs, rows of x that are not float32 are padded to 4 or to a multiple of `ROWS`: XLA has no fast product of a
    single row of int8 or bfloat16. Integers are fast where both contract their last axis, and up to 4 rows of them
    where the weights, which are not copied then, come first.

    Args:
      x: rows.
      w: `[N, K]`.
      axis: of w that is contracted; 0 for a w of shape `[K, N]`.

    >>> product(jnp.ones((1, 3), jnp.int8), jnp.array([[1, -1, 1]], jnp.int8)).tolist()
    [[1]]
    """
    lead, k = x.shape[:-1], x.shape[-1]
    m = math.prod(lead)
    rows = x.reshape(m, k)
    total = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    few = 0 < m <= FEW
    if x.dtype != jnp.float32:
        rows = jnp.pad(rows, ((0, FEW - m if few else -m % ROWS), (0, 0)))
    dot = functools.partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST, preferred_element_type=total)
    if few and total == jnp.int32:
        # Cut first: XLA would take a transposition into the product, and swap the factors back.
        y = dot(w, rows, (((axis,), (1,)), ((), ())))[:, :m].T
    else:
        y = dot(rows, w, (((1,), (axis,)), ((), ())))
    return y[:m].reshape(*lead, w.shape[1 - axis])


def row_tiles(f: Callable[[Any], Any], x: Float[Array, "*m k"]) -> Float[Array, "*m n"]:
    """f of tiles of `ROWS` rows of x, one after the other: the result of a row does not depend on their number.

    A compiler chooses the loops of a product by its size, and with them the order of sums. Here all products have one
    size. That costs speed where there are many rows, which share what is read of the weights.

    >>> row_tiles(lambda rows: rows.sum(axis=1, keepdims=True) * rows.shape[0], jnp.ones((3, 2))).tolist()
    [[16.0], [16.0], [16.0]]
    """
    lead, k = x.shape[:-1], x.shape[-1]
    m = math.prod(lead)

    def run(rows: Any) -> Any:
        return jnp.concatenate([f(rows[i : i + ROWS]) for i in range(0, max(rows.shape[0], 1), ROWS)])

    flat = x.reshape(m, k)
    if m <= GROUP * ROWS:
        y = run(jnp.pad(flat, ((0, -m % ROWS), (0, 0))))
    else:
        groups = jnp.pad(flat, ((0, -m % (GROUP * ROWS)), (0, 0))).reshape(-1, GROUP * ROWS, k)
        y = jax.lax.map(run, groups)
    return y.reshape(-1, y.shape[-1])[:m].reshape(*lead, y.shape[-1])


def product_back(g: Float[Array, "*m n"], w: Float32[Array, "n k"]) -> Float32[Array, "*m k"]:
    """g w, in float32: the gradient of `product` for x."""
    return product(g.astype(jnp.float32), w, axis=0)


def finish(total: Shaped[Array, "*m n"], scale: Float32[Array, "..."], out_dtype: Any) -> Float[Array, "*m n"]:
    """total * scale, rounded once; scale is `[]` or `[N, 1]`."""
    return (total.astype(jnp.float32) * (scale[:, 0] if scale.ndim else scale)).astype(out_dtype)


def differentiable(
    forward: Callable[..., Float[Array, "*m n"]], backward: Callable[..., Float32[Array, "*m k"]]
) -> Callable[..., Float[Array, "*m n"]]:
    """`forward(options, x, *weights)` whose gradient for x is `backward(options, g, *weights)`.

    Weights and scales are constants: they get zeros. Both functions are compiled once for each `Options` and shape.
    """
    forward, backward = (jax.jit(f, static_argnums=0) for f in (forward, backward))

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def apply(options: Options, x: Any, *weights: Any) -> Any:
        return forward(options, x, *weights)

    def fwd(options: Options, x: Any, *weights: Any) -> Any:
        return forward(options, x, *weights), weights

    def bwd(options: Options, weights: Any, g: Any) -> Any:
        return backward(options, g, *weights).astype(options.x_dtype), *[None] * len(weights)

    apply.defvjp(fwd, bwd)
    return apply


def integer_matmul(
    op: str,
    layout: Layout,
    x: Shaped[Array, "..."],
    codes: Shaped[Array, "..."],
    scale: Any,
    implementation: str | None,
    interpret: bool,
    out_dtype: Any,
) -> Shaped[Array, "..."]:
    """`ternary_matmul` and `sign_matmul`, which differ in their layout only."""
    check_x(x, (*FLOATS, "int8"))
    check_words("codes", codes, layout, x.shape)
    implementation = check_implementation(implementation, interpret=interpret)
    if x.dtype == jnp.int8:
        if scale is not None or out_dtype not in (None, jnp.int32):
            raise ValueError(
                "the product of an int8 x is int32 and has no scale: multiply it by the scales of x and of the weights "
                f"afterwards; got scale={'None' if scale is None else 'an array'} and out_dtype={out_dtype}"
            )
        options = Options(layout, implementation, interpret, "int8", "int32")
        return _integer_forward(op, options, x, codes)
    scale = check_scale("scale", 1.0 if scale is None else scale, codes.shape[0])
    options = Options(layout, implementation, interpret, x.dtype.name, check_out_dtype(out_dtype, x.dtype))
    return _of_integers(op)(options, x, codes, scale)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _integer_forward(op: str, options: Options, x: Array, codes: Array) -> Array:
    return options.call(op, "matmul", x, codes, None)


@functools.cache
def _of_integers(op: str) -> Callable[..., Any]:
    def forward(options: Options, x: Array, codes: Array, scale: Array) -> Array:
        return options.call(op, "matmul", x, codes, scale)

    def backward(options: Options, g: Array, codes: Array, scale: Array) -> Array:
        w = expand(codes, options.layout).astype(jnp.float32)
        return product_back(g.astype(jnp.float32) * (scale[:, 0] if scale.ndim else scale), w)

    return differentiable(forward, backward)


def integer_reference(
    x: Shaped[Array, "*m k"],
    codes: UInt8[Array, "n b"],
    scale: Float32[Array, "..."] | None,
    *,
    layout: Layout,
    out_dtype: Any,
) -> Shaped[Array, "*m n"]:
    """The definition of both: int32 sums of products for an int8 x, else float32 sums, times the scale, rounded."""
    w = expand(codes, layout)
    if scale is None:
        return product(x, w)
    return finish(product(x.astype(jnp.float32), w.astype(jnp.float32)), scale, out_dtype)


def prepared_product(x: Shaped[Array, "..."], w: Shaped[Array, "..."]) -> Int32[Array, "..."]:
    """x w' of int8 arrays in int32, after checks."""
    check_x(x, ("int8",))
    if w.dtype != jnp.int8 or w.ndim != 2:
        raise TypeError(f"w must be int8 [N, K], as prepare() returns it, got {w.dtype} {list(w.shape)}")
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"x must be [..., K] with the K = {w.shape[1]} of w, got shape {list(x.shape)}")
    return product(x, w)


def planes_of(x: Shaped[Array, "m k"], per_byte: int) -> Shaped[Array, "p m b"]:
    """x[:, i::p] for i = 0 .. p - 1: what meets plane i of the packed weights.

    >>> planes_of(jnp.arange(6).reshape(1, 6), 2).tolist()
    [[[0, 2, 4]], [[1, 3, 5]]]
    """
    return jnp.moveaxis(x.reshape(x.shape[0], -1, per_byte), -1, 0)


def operand(x_dtype: Any) -> tuple[Any, Any, Any]:
    """(dtype of both factors in a kernel, of their sum, precision) for an x of this dtype.

    Ternary and sign values, and 4-bit values times their block's scale, are exact in bfloat16.
    """
    if jnp.dtype(x_dtype) == jnp.int8:
        return jnp.int8, jnp.int32, None
    exact = jax.lax.Precision.HIGHEST if jnp.dtype(x_dtype) == np.float32 else None
    return jnp.dtype(x_dtype), jnp.float32, exact


def like(shape: tuple[int, ...], dtype: Any, *inputs: Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output, which inside `shard_map` varies over the axes that any input varies over."""
    axes = frozenset().union(*(getattr(jax.typeof(x), "vma", frozenset()) for x in inputs))
    return jax.ShapeDtypeStruct(shape, dtype, vma=axes) if axes else jax.ShapeDtypeStruct(shape, dtype)


# What a backend gives: round(factor * x W' + t U') of (x, words, scales, factor, layout=, out_dtype=, interpret=,
# extra=(t, u)), all arrays of two axes.
Kernel = Callable[..., Shaped[Array, "m n"]]


def fp4_by_kernel(
    kernel: Kernel,
    x: Float[Array, "*m k"],
    codes: UInt8[Array, "n b"],
    scales: UInt8[Array, "n c"],
    tensor_scale: Float32[Array, ""],
    *,
    layout: Layout,
    out_dtype: Any,
    interpret: bool = False,
) -> Float[Array, "*m n"]:
    """`fp4_matmul` by a backend's kernel: the reference, but for the order of its sums."""
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = kernel(flat, codes, scales, tensor_scale, layout=layout, out_dtype=out_dtype, interpret=interpret)
    return y.reshape(*x.shape[:-1], codes.shape[0])


def integers_by_kernel(
    kernel: Kernel,
    x: Shaped[Array, "*m k"],
    codes: UInt8[Array, "n b"],
    scale: Float32[Array, "..."] | None,
    *,
    layout: Layout,
    out_dtype: Any,
    interpret: bool = False,
) -> Shaped[Array, "*m n"]:
    """`ternary_matmul` and `sign_matmul` likewise; int32 sums are exact."""
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = kernel(flat, codes, None, scale, layout=layout, out_dtype=out_dtype, interpret=interpret)
    return y.reshape(*x.shape[:-1], codes.shape[0])


def fp4_sign_by_kernel(
    kernel: Kernel,
    x: Float[Array, "*m k"],
    codes: UInt8[Array, "n b"],
    scales: UInt8[Array, "n c"],
    tensor_scale: Float32[Array, ""],
    u: UInt8[Array, "r a"],
    v: UInt8[Array, "r w"],
    sign_scale: Float[Array, " r"],
    column: Float[Array, " k"] | None,
    *,
    layout: Layout,
    out_dtype: Any,
    interpret: bool = False,
) -> Float[Array, "*m n"]:
    """`fp4_sign_matmul` by two calls of a backend's kernel: (x * b) V first, which every tile of y needs whole."""
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    wide = flat.astype(jnp.float32)
    wide = wide if column is None else wide * column.astype(jnp.float32)
    one, more = jnp.float32(1), {"out_dtype": jnp.float32, "interpret": interpret}
    t = kernel(wide, v, None, one, layout=SIGN, **more) * sign_scale.astype(jnp.float32)
    more["out_dtype"] = out_dtype
    extra = (t, u) if u.shape[0] else None
    y = kernel(flat, codes, scales, tensor_scale, layout=layout, extra=extra, **more)
    return y.reshape(*x.shape[:-1], codes.shape[0])
