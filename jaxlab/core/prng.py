"""Typed random keys: one a run, folded with what it is for. Nothing here keeps state."""

import jax
from jaxtyping import Array, Integer, Key


def key(seed: int) -> Key[Array, ""]:
    """A typed root key from a non-negative integer seed.

    Raises:
      ValueError: when the seed is negative (JAX would wrap it silently).
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    return jax.random.key(seed)


def step_key(root: Key[Array, ""], step: int | Integer[Array, ""]) -> Key[Array, ""]:
    """The key of one step: the same whether the run was interrupted before it or not."""
    return jax.random.fold_in(root, step)


def worker_keys(root: Key[Array, ""], workers: int) -> Key[Array, " K"]:
    """`workers` independent keys; key k does not depend on how many workers there are."""
    return jax.vmap(lambda k: jax.random.fold_in(root, k))(jax.numpy.arange(workers))
