"""What a step of decoding costs with the weights of each method: one row through every linear layer, against bfloat16.

Two forms of the weights, both timed in turn in one process (`core.timing`):

  packed     as they are stored, by the kernels of the default backend. On a CPU that is XLA code that unpacks all
             weights for every product: it saves memory, and costs time. It is what an accelerator's kernels are for.
  expanded   unpacked once, to float32: the fast form on a CPU, in the memory of float32 weights.

A time depends on shapes and formats and not on values, so weights are drawn at random, with the shapes, formats and
ranks of the run. The step is the linear layers alone: no attention, no norms.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxlab.core import sweep, timing
from jaxlab.kernels.fp4_matmul import api as fp4
from jaxlab.kernels.fp4_sign_matmul import api as fp4_sign
from jaxlab.kernels.lowbit.matmul_common import product
from jaxlab.quant.gptq import BLOCKS
from jaxlab.quant.sign_lowrank import memory_match_rank

MOST = 2**25  # weights of a step: from a larger model, one matrix of each shape is timed
FORMS = ("packed", "expanded")
# Method -> how its weights are applied.
KINDS = {
    "bf16": "bfloat16",
    "rtn": "base",
    "gptq": "base",
    "awq": "base, smoothed",
    "svdquant": "base and singular vectors, smoothed",
    "svdquant_whitened": "base and singular vectors, smoothed",
    "biloco": "base and signs, smoothed",
}


def name(form: str, method: str, rank: int) -> str:
    """Of a measured ratio; methods whose weights are applied alike share it."""
    return f"{form}: {KINDS[method]}" + (f", rank {rank}" if rank else "")


def cells(config: Any) -> list[sweep.Cell]:
    """The cell that measures, or none where the config does not ask for it."""
    return [sweep.Cell({"method": "decode", "rank": 0}, config.seeds[0], 1)] if config.decode else []


def work(config: Any, todo: Sequence[sweep.Cell], shapes: Sequence[tuple[int, int]]) -> sweep.CellResult:
    """What that cell does: `measure` for the methods and ranks of all others."""
    methods = [(cell.labels["method"], cell.labels["rank"]) for cell in todo]
    return sweep.CellResult(measure(config.format, shapes, methods, repeats=config.decode))


def measure(
    format: str, shapes: Sequence[tuple[int, int]], methods: Sequence[tuple[str, int]], *, repeats: int
) -> dict[str, float]:
    """Times a step with the weights of each method.

    Args:
      format: of the base.
      shapes: `[out, in]` of the linear layers.
      methods: (method, rank) to time, rank 0 for those without a correction.
      repeats: timed steps of each, >= 1.

    Returns:
      `name(...)` -> time over that of bfloat16 weights as they are stored, and "seconds of " + each -> seconds.
    """
    if sum(m * n for m, n in shapes) > MOST:
        shapes = list(dict.fromkeys(shapes))
    rng, calls = np.random.default_rng(0), {}
    xs = [jnp.asarray(rng.standard_normal((1, n)), jnp.bfloat16) for _, n in shapes]
    for method, rank in dict.fromkeys([("bf16", 0), *methods]):
        for form in FORMS:
            if name(form, method, rank) not in calls:
                build = functools.partial(_layer, rng, format, KINDS[method], rank, form == "expanded")
                made = [build(*shape) for shape in shapes]
                applied = [f for f, _ in made]

                def step(xs: list[Array], ws: list[Any], applied: list[Any] = applied) -> list[Array]:
                    return [f(x, w) for f, x, w in zip(applied, xs, ws, strict=True)]

                calls[name(form, method, rank)] = functools.partial(jax.jit(step), xs, [w for _, w in made])
    found = timing.measure(calls, repeats=repeats)
    first = found[name("packed", "bf16", 0)]
    ratios = {key: timing.ratio(each, first).best for key, each in found.items()}
    return ratios | {f"seconds of {key}": each.best for key, each in found.items()}


def _layer(
    rng: np.random.Generator, format: str, kind: str, rank: int, expanded: bool, m: int, n: int
) -> tuple[Callable[[Array, Any], Array], Any]:
    """(x, weights -> y; the weights) of one matrix."""
    draw = lambda *shape: jnp.asarray(rng.integers(256, size=shape, dtype=np.uint8))  # noqa: E731
    dense = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)  # noqa: E731
    wide = jnp.float32 if expanded else jnp.bfloat16
    if kind == "bfloat16":
        return (lambda x, w: product(x.astype(wide), w).astype(x.dtype)), dense(m, n).astype(wide)
    codes, ts = draw(m, n // 2), jnp.float32(0.01)
    low, high = (40, 80) if format == "nvfp4" else (120, 134)  # ordinary numbers
    scales = jnp.asarray(rng.integers(low, high, (m, n // BLOCKS[format]), dtype=np.uint8))
    base = (codes, scales, ts) if not expanded else (fp4.prepare(codes, scales, format=format), ts)
    t = jnp.ones(n, jnp.bfloat16)

    def multiply(x: Array, base: Any, out_dtype: Any = None) -> Array:
        if expanded:
            return fp4.matmul_prepared(x, *base, out_dtype=out_dtype)
        return fp4.fp4_matmul(x, *base, format=format, out_dtype=out_dtype)

    def smoothed(x: Array, t: Array) -> Array:
        return (x.astype(jnp.float32) / t.astype(jnp.float32)).astype(x.dtype)

    if kind == "base":
        return multiply, base
    if kind == "base, smoothed":
        return (lambda x, w: multiply(smoothed(x, w[1]), w[0])), (base, t)
    if kind == "base and singular vectors, smoothed":
        factors = dense(m, rank).astype(wide), dense(rank, n).astype(wide)

        def low_rank(x: Array, w: Any) -> Array:
            base, t, (left, right) = w
            x = smoothed(x, t)
            inner = product(x.astype(wide), right).astype(wide)
            return (multiply(x, base, jnp.float32) + product(inner, left)).astype(x.dtype)

        return low_rank, (base, t, factors)
    terms = memory_match_rank(m, n, rank)
    u, v, s = draw(terms, -(-m // 8)), draw(terms, n // 8), jnp.ones(terms, jnp.bfloat16)
    if expanded:
        prepared = fp4_sign.prepare(codes, scales, u, v, format=format)
        f = lambda x, w: fp4_sign.matmul_prepared(smoothed(x, w[1]), w[0], *w[2:])  # noqa: E731
        return f, (prepared, t, ts, s)
    f = lambda x, w: fp4_sign.fp4_sign_matmul(smoothed(x, w[1]), *w[0], *w[2:], format=format)  # noqa: E731
    return f, (base, t, u, v, s)
