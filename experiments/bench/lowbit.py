"""How fast products with ternary, sign and 4-bit weights are on this machine, in the forms that are made for it.

Weights are expanded once (`prepare`), as one does on a CPU; everything jitted, one process, all programs of a table in
turn (`core.timing`). A call goes through the weights of several layers, as a step of decoding does, so that they do not
stay in a cache: a product with one row is as fast as its weights come from memory. On a shared machine only ratios
mean anything. What packed weights save on an accelerator is measured by `python -m jaxlab.kernels.lowbit.bench`, and
is not measured here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.core import timing
from jaxlab.core.report import Table
from jaxlab.kernels.fp4_matmul import api as fp4
from jaxlab.kernels.fp4_sign_matmul import api as fp4_sign
from jaxlab.kernels.sign_matmul import api as sign
from jaxlab.kernels.ternary_matmul import api as ternary
from jaxlab.quant.sign_lowrank import memory_match_rank

REPEATS = 25  # timed calls of each program
LAYERS = 6  # whose products are a call
SIZES = ((2560, 2560), (2560, 6912))  # (K, N)
ROWS = (1, 8)
BOUNDS = {1: 1.3, 8: 3.0}  # rows -> float32's time over the int8 product's, at least
SVD_RANK = 32  # whose bytes the sign correction has
APPLY_BOUND = 1.5  # of the corrected product's time over the 4-bit one's, at most


def dense(x: Float[Array, "m k"], w: Float[Array, "n k"]) -> Float[Array, "m n"]:
    """The float32 product as one writes it."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def unpadded(x: Array, w: Array) -> Array:
    """The int8 product without padding, slow for one row."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def layers(f: Callable[..., Any], x: Array, weights: Sequence[Any], *rest: Any) -> Callable[[], Any]:
    """A call of the jitted product of x with the weights of every layer; returns the last result."""
    run = jax.jit(f)
    return lambda: [run(x, w, *rest) for w in weights][-1]


def copies(w: Any) -> list[Any]:
    """The weights in `LAYERS` places in memory."""
    return [jax.tree.map(jnp.array, w) for _ in range(LAYERS)]


def _bytes(rng: np.random.Generator, *shape: int) -> Array:
    return jnp.asarray(rng.integers(256, size=shape, dtype=np.uint8))


def integer_products(sizes: Sequence[tuple[int, int]] = SIZES) -> Table:
    """int8 products with ternary and sign weights against float32, exact results checked first.

    Raises:
      ValueError: when a product is not exact.
    """
    rng, rows = np.random.default_rng(0), []
    for k, n in sizes:
        w = copies(jnp.asarray(rng.standard_normal((n, k), np.float32)))
        weights = {
            "ternary": (ternary.matmul_prepared, copies(ternary.prepare(_bytes(rng, n, k // 4)))),
            "sign": (sign.matmul_prepared, copies(sign.prepare(_bytes(rng, n, k // 8)))),
        }
        for m in ROWS:
            x8 = jnp.asarray(rng.integers(-127, 128, (m, k), dtype=np.int8))
            calls = {"float32": layers(dense, x8.astype(jnp.float32), w)}
            notes: dict[str, str] = {}
            for name, (f, w8) in weights.items():
                calls[name] = layers(f, x8, w8)
                if not np.array_equal(calls[name](), np.asarray(x8, np.int32) @ np.asarray(w8[-1], np.int32).T):
                    raise ValueError(f"the {name} product of [{m}, {k}] and [{n}, {k}] is not exact")
                notes[name] = "exact"
            if m == 1:
                calls["ternary, not padded"] = layers(unpadded, x8, weights["ternary"][1])
                notes["ternary, not padded"] = "warning: never write it like this"
            found = timing.measure(calls, repeats=REPEATS)
            for name in list(calls)[1:]:
                r = timing.ratio(found["float32"], found[name])
                times = [1e3 * found[each].best / LAYERS for each in ("float32", name)]
                bound = BOUNDS[m] if name in weights else None
                quartiles = f"{r.low:.2f} to {r.high:.2f}"
                rows.append([f"{k} x {n}", m, name, *times, r.best, quartiles, r.cpu, bound, notes[name]])
    columns = ["K x N", "M", "int8 product", "float32 ms", "int8 ms", "float32 / int8, best", "quartiles", "CPU time"]
    return Table("Ternary and sign weights, float32's time over the int8 product's", [*columns, "bound", "note"], rows)


def corrected_products(sizes: Sequence[tuple[int, int]] = SIZES) -> Table:
    """The 4-bit product with a sign correction of the bytes of rank 32 against the 4-bit product alone."""
    rng, rows = np.random.default_rng(1), []
    for k, n in sizes:
        rank = memory_match_rank(n, k, SVD_RANK)
        codes = _bytes(rng, n, k // 2)
        scales = jnp.asarray(rng.integers(40, 80, (n, k // 16), dtype=np.uint8))
        w = copies(fp4_sign.prepare(codes, scales, _bytes(rng, rank, -(-n // 8)), _bytes(rng, rank, k // 8)))
        ts, s, b = jnp.float32(0.01), jnp.ones(rank, jnp.bfloat16), jnp.ones(k, jnp.bfloat16)
        for m in ROWS:
            x = jnp.asarray(rng.standard_normal((m, k), np.float32))
            calls = {
                "4 bits": layers(fp4.matmul_prepared, x, [layer.base for layer in w], ts),
                "corrected": layers(fp4_sign.matmul_prepared, x, w, ts, s, b),
            }
            found = timing.measure(calls, repeats=REPEATS)
            r = timing.ratio(found["corrected"], found["4 bits"])
            times = [1e3 * found[name].best / LAYERS for name in ("4 bits", "corrected")]
            quartiles = f"{r.low:.2f} to {r.high:.2f}"
            rows.append([f"{k} x {n}", m, rank, *times, r.best, quartiles, r.cpu, APPLY_BOUND])
    columns = ["K x N", "M", "sign rank", "4 bits ms", "corrected ms", "corrected / 4 bits, best", "quartiles"]
    title = f"The correction at the bytes of rank {SVD_RANK}, weights expanded to float32"
    return Table(title, [*columns, "CPU time", "bound"], rows)


def main(config: Any = None) -> list[Table]:
    """The tables that `jaxlab bench lowbit` prints; it needs no config."""
    del config
    return [integer_products(), corrected_products()]
