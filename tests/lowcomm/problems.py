"""A tanh network small enough to compile fast, shared by the tests of low-communication training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlab.core import tree

DIM, OUT, ROWS = 4, 2, 3  # width, outputs, samples a worker and step


def make_params(layers=2, stacked=False, seed=0):
    """embed (3, 4), hidden layers (4, 4) with bias, head (4, 2)."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32)  # noqa: E731
    hidden = [{"w": draw(DIM, DIM), "b": draw(DIM)} for _ in range(layers)]
    blocks = jax.tree.map(lambda *x: jnp.stack(x), *hidden) if stacked else {str(i): h for i, h in enumerate(hidden)}
    return {"embed": {"w": draw(3, DIM)}, "layers": blocks, "head": {"w": draw(DIM, OUT)}}


def loss_fn(params, batch, key):
    h = batch["x"] @ params["embed"]["w"]
    blocks = params["layers"]
    if "w" in blocks:
        blocks = [jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(blocks["w"].shape[0])]
    else:
        blocks = [blocks[name] for name in sorted(blocks)]
    for block in blocks:
        h = jnp.tanh(h @ block["w"] + block["b"])
    return jnp.mean((h @ params["head"]["w"] - batch["y"]) ** 2)


def make_batches(workers, steps, seed=1):
    """Leaves [K, T, b, ...]: each worker learns another random map, so that their pseudo-gradients disagree."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(workers, steps, ROWS, 3))
    y = np.einsum("ktbi,kio->ktbo", x, rng.normal(size=(workers, 3, OUT)))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def adamw(lr=0.01):
    return optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=0.1)


@functools.lru_cache(maxsize=64)
def compiled(algo, unit, loss=loss_fn):
    """One compiled program an algorithm; `round` and `step` return new closures at each call."""
    return jax.jit(getattr(algo, unit)(loss))


def run(algo, state, batches, *, unit="round", weights=None, key=None, loss=loss_fn):
    """All steps of `batches [K, T, ...]`: (state, metrics stacked over calls)."""
    key = jax.random.key(7) if key is None else key
    size = algo.sync_every if unit == "round" else 1
    total = jax.tree.leaves(batches)[0].shape[1]
    rows = []
    for start in range(0, total, size):
        part = slice(start, start + size) if unit == "round" else start
        batch = jax.tree.map(lambda leaf, part=part: leaf[:, part], batches)
        args = (state, batch, key) if weights is None else (state, batch, key, weights)
        state, metrics = compiled(algo, unit, loss)(*args)
        rows.append(metrics)
    return state, jax.tree.map(lambda *m: np.stack(m), *rows)


def flat(params):
    """path -> float64 array."""
    leaves = jax.tree.leaves(params)
    return {path: np.asarray(leaf, np.float64) for path, leaf in zip(tree.leaf_paths(params), leaves, strict=True)}


def worker(state, k):
    return jax.tree.map(lambda leaf: leaf[k], state.worker_params)


def assert_close(actual, expected, tol=1e-5):
    actual = actual if isinstance(actual, dict) and "embed/w" in actual else flat(actual)
    expected = expected if isinstance(expected, dict) and "embed/w" in expected else flat(expected)
    assert actual.keys() == expected.keys()
    for path in expected:
        np.testing.assert_allclose(actual[path], expected[path], rtol=tol, atol=tol, err_msg=path)


def assert_same(a, b):
    """Bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, x, y in zip(tree.leaf_paths(a), jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=path)


def post_init(cls, **fields):
    """The checks of a dataclass alone: in the tests, type checks of its arguments come before them."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    made.__post_init__()
