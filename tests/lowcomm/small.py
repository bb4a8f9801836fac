"""A regression problem that compiles fast, for the tests of rounds on several devices and processes."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.core import mesh as meshes
from jaxlab.core import tree

WORKERS, SAMPLES = 4, 4


def params():
    """Two matrices and a vector, 34 numbers."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.array(rng.normal(size=shape) * 0.4, jnp.float32)  # noqa: E731
    return {"hidden": {"w": draw(6, 4)}, "out": {"w": draw(4, 2), "b": draw(2)}}


NBYTES = tree.nbytes(jax.eval_shape(params))


def loss_fn(p, batch, key):
    """Mean squared error of a two-layer network."""
    out = jnp.tanh(batch["x"] @ p["hidden"]["w"]) @ p["out"]["w"] + p["out"]["b"]
    return jnp.mean((out - batch["y"]) ** 2)


def batch(i, *, steps=None, workers=WORKERS):
    """The batch of call i: `[K, H, b, ...]`, or `[K, b, ...]` without `steps`; each worker has data of its own kind.

    Call r of H steps holds the same samples as the calls r H .. r H + H - 1 of a step.
    """
    count = 1 if steps is None else steps
    rows = [_rows(i * count + s, workers) for s in range(count)]
    stacked = jax.tree.map(lambda *x: np.stack(x, axis=1), *rows)
    return jax.tree.map(lambda x: x[:, 0], stacked) if steps is None else stacked


def _rows(step, workers):
    rng = np.random.default_rng(1000 + step)
    x = rng.normal(size=(workers, SAMPLES, 6)).astype(np.float32)
    y = np.stack([np.sin(x[..., 0] + np.arange(workers)[:, None]), x[..., 1] * x[..., 2]], -1)
    return {"x": x, "y": y.astype(np.float32)}


def place(rows, mesh, *spec):
    """A batch on a mesh, split by `spec`."""
    return rows if mesh is None else meshes.put(rows, meshes.named(mesh, *spec))


def copies_agree(array):
    """Whether all devices that hold the same part of an array hold the same bits of it."""
    parts = {}
    for shard in array.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return all(len(bits) == 1 for bits in parts.values())
