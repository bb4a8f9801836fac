"""How long products with packed weights take, against the same product with float32 and bfloat16 weights.

    python -m jaxlab.kernels.lowbit.bench

A product with one row reads every byte of the weights once, and an accelerator does little else meanwhile: the bytes
predict the time, 4.5, 2 and 1 bits a weight against 16. All variants are timed in turn in one process. On a CPU the
kernels only run interpreted and are left out; there, weights expanded once (`prepare`) are what is fast.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.kernels.fp4_matmul import api as fp4
from jaxlab.kernels.fp4_sign_matmul import api as fp4_sign
from jaxlab.kernels.sign_matmul import api as sign
from jaxlab.kernels.ternary_matmul import api as ternary

PALLAS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
DENSE = ("bfloat16", "float32")
RANK = 512  # of the correction: as many bytes as a bfloat16 one of rank 32


@dataclasses.dataclass(frozen=True)
class Row:
    """What one variant took.

    Attributes:
      name: the product.
      best, median: seconds.
      nbytes: of its weights.
      speed: of the best time with dense weights, bfloat16 or float32, over this one's.
      fraction: of the bandwidth of a copy that the weights' bytes over the best time are.
    """

    name: str
    best: float
    median: float
    nbytes: int
    speed: float
    fraction: float


def _packed(rng: np.random.Generator, *shape: int) -> Array:
    return jnp.asarray(rng.integers(256, size=shape, dtype=np.uint8))


def _dense(x: Float[Array, "m k"], w: Float[Array, "n k"]) -> Float[Array, "m n"]:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def _variants(m: int, n: int, k: int, platform: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Name -> (function of x, the weights, arguments), where the first argument is x."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    x8 = jnp.asarray(rng.integers(-127, 128, (m, k), dtype=np.int8))
    w = jax.random.normal(jax.random.key(0), (n, k))
    codes = _packed(rng, n, k // 2)
    bytes4 = jnp.asarray(rng.integers(40, 80, (n, k // 16), dtype=np.uint8))
    bytes_mx = jnp.asarray(rng.integers(120, 134, (n, k // 32), dtype=np.uint8))
    ts, trits, bits = jnp.float32(0.01), _packed(rng, n, k // 4), _packed(rng, n, k // 8)
    u, v = _packed(rng, RANK, -(-n // 8)), _packed(rng, RANK, k // 8)
    s, b = jnp.ones(RANK, jnp.bfloat16), jnp.ones(k, jnp.bfloat16)
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "bfloat16": (_dense, (x, w.astype(jnp.bfloat16))),
        "float32": (_dense, (x.astype(jnp.float32), w)),
    }
    if platform == "cpu":
        found["ternary, int8 prepared"] = (ternary.matmul_prepared, (x8, ternary.prepare(trits)))
        found["sign, int8 prepared"] = (sign.matmul_prepared, (x8, sign.prepare(bits)))
        found["nvfp4, bfloat16 prepared"] = (fp4.matmul_prepared, (x, fp4.prepare(codes, bytes4, dtype=jnp.bfloat16)))
        prepared = fp4_sign.prepare(codes, bytes4, u, v)
        found["nvfp4 + sign, float32 prepared"] = (fp4_sign.matmul_prepared, (x, prepared, ts, s, b))
    for name in ("xla", *([PALLAS[platform]] if platform in PALLAS else [])):
        run = {"implementation": name}
        pairs = (("nvfp4", bytes4), ("mxfp4", bytes_mx))
        for format, scales in pairs:
            f = functools.partial(fp4.fp4_matmul, format=format, **run)
            found[f"{format}, {name}"] = (f, (x, codes, scales, ts))
        for schedule in fp4_sign.SCHEDULES:
            f = functools.partial(fp4_sign.fp4_sign_matmul, schedule=schedule, **run)
            found[f"nvfp4 + sign, {schedule}, {name}"] = (f, (x, codes, bytes4, ts, u, v, s, b))
        found[f"ternary, {name}"] = (functools.partial(ternary.ternary_matmul, **run), (x, trits))
        found[f"ternary x int8, {name}"] = (functools.partial(ternary.ternary_matmul, **run), (x8, trits))
        found[f"sign, {name}"] = (functools.partial(sign.sign_matmul, **run), (x, bits))
        found[f"sign x int8, {name}"] = (functools.partial(sign.sign_matmul, **run), (x8, bits))
    return found


def _seconds(call: Callable[[], Any], inner: int) -> float:
    start = time.perf_counter()
    out = None
    for _ in range(inner):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / inner


def run(
    m: int = 1,
    n: int | None = None,
    k: int | None = None,
    *,
    repeats: int = 20,
    inner: int = 10,
    keep: Callable[[str], bool] = lambda name: True,
) -> list[Row]:
    """Times all variants on the default device.

    Args:
      m: rows of x.
      n, k: of the weights, k a multiple of 32; None for 8192 on an accelerator and 1024 on a CPU.
      repeats: timings of each variant, taken in turn, >= 1.
      inner: products a timing, >= 1: their dispatch overlaps.
      keep: which names to time beside the dense products.

    Returns:
      A row a variant, the dense ones first.

    Raises:
      ValueError: for sizes or numbers that cannot be.

    >>> rows = run(1, 32, 64, repeats=1, inner=1, keep=lambda name: name == "ternary, xla")
    >>> [(row.name, row.nbytes) for row in rows]
    [('bfloat16', 4096), ('float32', 8192), ('ternary, xla', 512)]
    """
    platform = jax.default_backend()
    n, k = (size or (1024 if platform == "cpu" else 8192) for size in (n, k))
    if min(m, n, repeats, inner) < 1 or k < 32 or k % 32:
        raise ValueError(
            f"need m, n, repeats, inner >= 1 and k a multiple of 32, got m={m}, n={n}, k={k}, repeats={repeats}, "
            f"inner={inner}"
        )
    variants = {name: v for name, v in _variants(m, n, k, platform).items() if name in DENSE or keep(name)}
    calls = {name: functools.partial(jax.jit(f), *args) for name, (f, args) in variants.items()}
    source = jnp.ones(max(n * k, 2**22), jnp.float32)
    calls["copy"] = functools.partial(jax.jit(lambda a: a + 1), source)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(_seconds(call, inner))
    bandwidth = 2 * source.nbytes / min(seconds.pop("copy"))
    first, rows = min(min(seconds[name]) for name in DENSE), []
    for name, times in seconds.items():
        nbytes = sum(x.nbytes for x in jax.tree.leaves(variants[name][1][1:]))
        best = min(times)
        rows.append(Row(name, best, statistics.median(times), nbytes, first / best, nbytes / best / bandwidth))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = ("product", "best us", "median us", "MB of weights", "vs dense", "of copy bandwidth")
    lines = [head, tuple("---" for _ in head)]
    lines += [
        (
            row.name,
            f"{1e6 * row.best:.0f}",
            f"{1e6 * row.median:.0f}",
            f"{row.nbytes / 1e6:.2f}",
            f"{row.speed:.2f}x",
            f"{row.fraction:.0%}",
        )
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> str:
    """Runs the benchmark with the options of a command line and returns the device and the table."""
    parser = argparse.ArgumentParser(prog="python -m jaxlab.kernels.lowbit.bench", description=__doc__)
    parser.add_argument("-m", type=int, default=1, help="rows of x")
    parser.add_argument("-n", type=int, help="rows of the weights; 8192 on an accelerator, 1024 on a CPU")
    parser.add_argument("-k", type=int, help="their columns; likewise")
    parser.add_argument("--repeats", type=int, default=20, help="timings of each variant")
    args = parser.parse_args(argv)
    rows = run(args.m, args.n, args.k, repeats=args.repeats)
    return f"{jax.devices()[0].device_kind}, jax {jax.__version__}, M = {args.m}\n\n{table(rows)}\n"


if __name__ == "__main__":
    sys.stdout.write(main())
