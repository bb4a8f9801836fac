"""How long one step of AdamW takes: float32 averages in plain jnp, and averages in few bits by XLA and by Pallas.

    python -m jaxlab.kernels.bred_update.bench

A step reads and writes every byte of parameters, gradient and averages at least once, and an accelerator does little
else meanwhile, so the bytes a parameter predict the time; `bench.md` has the numbers. All variants are timed in turn
in one process, each updating its own arrays in place.
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
from jaxtyping import Array, Float

from jaxlab.kernels.bred_update import api, codec, steps
from jaxlab.kernels.bred_update.codec import QuantSpec

PALLAS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
LEAVES = (1, 2)
HYPER = steps.Hyper(lr=1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, correction1=0.5, correction2=0.25)


@dataclasses.dataclass(frozen=True)
class Row:
    """What one variant took.

    Attributes:
      name: how the averages are stored, and what computes the step.
      dtype: of parameters and gradient.
      parameters: how many.
      best, median: seconds a step.
      bytes: read and written, a parameter, at least.
      speed: of the float32 averages' best time over this one's.
    """

    name: str
    dtype: str
    parameters: int
    best: float
    median: float
    bytes: float
    speed: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second that the best time stands for."""
        return self.bytes * self.parameters / self.best


State = tuple[Any, Any, Any]  # (parameters, first average, second average)


def _float32_step(state: State, g: Float[Array, "r n"], h: steps.Hyper, count: Any) -> State:
    """AdamW on float32 averages, as optax computes it."""
    del count
    p, m, v = state
    g32, p32 = g.astype(jnp.float32), p.astype(jnp.float32)
    m, v = (1 - h.b1) * g32 + h.b1 * m, (1 - h.b2) * (g32 * g32) + h.b2 * v
    direction = (m / h.correction1) / (jnp.sqrt(v / h.correction2 + h.eps_root) + h.eps)
    return (p32 - h.lr * (direction + h.weight_decay * p32)).astype(p.dtype), m, v


def _fused_step(implementation: str, state: State, g: Float[Array, "r n"], h: steps.Hyper, count: Any) -> State:
    p, mu, nu = state
    return api.adamw(p, g, mu, nu, h, seed=0, leaves=LEAVES, count=count, implementation=implementation)


def _start(shape: tuple[int, int], dtype: str, bits: int | None) -> State:
    """Random parameters and averages; `bits` None for float32."""
    keys = jax.random.split(jax.random.key(0), 3)
    p, m, v = (jax.random.normal(key, shape) for key in keys)
    v = v * v
    if bits is not None:
        linear, sqrt = (QuantSpec(bits=bits, map=map) for map in ("linear", "sqrt"))
        m, v = (codec.encode(x, spec, leaf=leaf) for x, spec, leaf in zip((m, v), (linear, sqrt), LEAVES, strict=True))
    return p.astype(dtype), m, v


def _nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _runner(step: Callable[..., State], state: State, g: Any, h: steps.Hyper, inner: int) -> Callable[[], None]:
    """A call that does `inner` steps and waits; its arrays are donated, and so updated in place."""
    jitted, box = jax.jit(step, donate_argnums=0), [state, 0]

    def call() -> None:
        for _ in range(inner):
            box[0] = jitted(box[0], g, h, jnp.int32(box[1]))
            box[1] += 1
        jax.block_until_ready(box[0])

    return call


def run(
    parameters: int | None = None,
    *,
    bits: Sequence[int] = (8, 4, 3),
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    implementations: Sequence[str] | None = None,
    repeats: int = 20,
    inner: int = 5,
) -> list[Row]:
    """Times all variants on the default device.

    Args:
      parameters: about how many, a square matrix of a multiple of 256 rows; None for 2^28 on an accelerator and 2^20
        on a CPU.
      bits: of the averages.
      dtypes: of parameters and gradient.
      implementations: of the fused step; None for XLA and the kernel for this device, if there is one.
      repeats: timings of each variant, taken in turn, >= 1.
      inner: steps a timing, >= 1: their dispatch overlaps.

    Returns:
      A row a variant; of every dtype, that with float32 averages comes first.

    Raises:
      ValueError: for a number below 1.

    >>> rows = run(2**16, bits=(4,), dtypes=("float32",), implementations=("xla",), repeats=1, inner=1)
    >>> [(row.name, row.parameters, round(row.bytes, 3)) for row in rows]
    [('float32', 65536, 28.0), ('4 bits, xla', 65536, 14.125)]
    """
    platform = jax.default_backend()
    if parameters is None:
        parameters = 2**20 if platform == "cpu" else 2**28
    if min(parameters, repeats, inner) < 1:
        raise ValueError(f"need numbers >= 1, got parameters={parameters}, repeats={repeats}, inner={inner}")
    if implementations is None:
        implementations = ("xla", *([PALLAS[platform]] if platform in PALLAS else []))
    size = max(round(parameters**0.5 / 256), 1) * 256
    shape, rows = (size, size), []
    h = steps.Hyper(*(jnp.float32(x) for x in HYPER))
    for dtype in dtypes:
        g = jax.random.normal(jax.random.key(1), shape).astype(dtype)
        calls, moved = {}, {}
        variants: list[tuple[str, int | None, Callable[..., State]]] = [("float32", None, _float32_step)]
        variants += [
            (f"{k} bits, {name}", k, functools.partial(_fused_step, name)) for k in bits for name in implementations
        ]
        for name, k, step in variants:
            state = jax.jit(_start, static_argnums=(0, 1, 2))(shape, dtype, k)
            moved[name] = (2 * _nbytes(state) + g.nbytes) / g.size
            calls[name] = _runner(step, state, g, h, inner)
            del state
            calls[name]()
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[name].append((time.perf_counter() - start) / inner)
        first = min(seconds["float32"])
        rows += [
            Row(name, dtype, g.size, min(t), statistics.median(t), moved[name], first / min(t))
            for name, t in seconds.items()
        ]
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = ("averages", "parameters in", "parameters", "best ms", "median ms", "bytes each", "GB/s", "vs float32")
    lines = [head, tuple("---" for _ in head)]
    lines += [
        (
            row.name,
            row.dtype,
            f"{row.parameters / 1e6:.0f}M",
            f"{1e3 * row.best:.2f}",
            f"{1e3 * row.median:.2f}",
            f"{row.bytes:.2f}",
            f"{row.bandwidth / 1e9:.0f}",
            f"{row.speed:.2f}x",
        )
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> str:
    """Runs the benchmark with the options of a command line and returns the device and the table."""
    parser = argparse.ArgumentParser(prog="python -m jaxlab.kernels.bred_update.bench", description=__doc__)
    parser.add_argument("--parameters", type=int, help="about how many; 2^28 on an accelerator, 2^20 on a CPU")
    parser.add_argument("--repeats", type=int, default=20, help="timings of each variant")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 3], choices=[3, 4, 8])
    args = parser.parse_args(argv)
    rows = run(args.parameters, bits=args.bits, repeats=args.repeats)
    return f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n\n{table(rows)}\n"


if __name__ == "__main__":
    sys.stdout.write(main())
