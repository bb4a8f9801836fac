"""Runs of anything that is not trained by gradient: one jitted scan, vmapped over seeds."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Key, PyTree, UInt32

Seeds = int | Sequence[int] | Integer[np.ndarray, " S"] | Integer[Array, " S"]
Init = Callable[[Key[Array, ""]], PyTree]
Step = Callable[[PyTree, Key[Array, ""], Integer[Array, ""]], tuple[PyTree, PyTree]]


def simulate(
    init: Init,
    step: Step,
    *,
    key: Key[Array, ""],
    steps: int,
    seeds: Seeds,
    chunk: int | None = None,
    on_chunk: Callable[[int], Any] | None = None,
) -> PyTree[Array]:
    """Simulates `steps` steps for every seed at once and returns what each step put out; see `rollout`.

    Args, Raises: as in `rollout`.

    Returns:
      The outputs of `step`, every leaf `[S, T, ...]`: seed s, step t.

    >>> def init(key):
    ...     return jnp.zeros(())
    >>> def step(position, key, t):
    ...     position = position + jax.random.rademacher(key, (), jnp.float32)
    ...     return position, position
    >>> walks = simulate(init, step, key=jax.random.key(0), steps=100, seeds=4)
    >>> walks.shape, bool((abs(walks[:, 0]) == 1).all())
    ((4, 100), True)
    """
    return rollout(init, step, key=key, steps=steps, seeds=seeds, chunk=chunk, on_chunk=on_chunk)[1]


def rollout(
    init: Init,
    step: Step,
    *,
    key: Key[Array, ""],
    steps: int,
    seeds: Seeds,
    chunk: int | None = None,
    on_chunk: Callable[[int], Any] | None = None,
) -> tuple[PyTree[Array], PyTree[Array]]:
    """Simulates `steps` steps for every seed at once, and also returns where each seed ended.

    For seed s:  k_init, k_loop = split(fold_in(key, s));  c_0 = init(k_init);
    c_{t+1}, out_t = step(c_t, fold_in(k_loop, t), t).

    The initial key is split off first because `split` and `fold_in` of one key overlap: an `init` that splits the key
    it gets would otherwise share random numbers with the first steps.

    The random numbers of a seed depend on neither the other seeds nor `chunk`; results then agree to the rounding with
    which XLA compiles another batch or length. The compiled program is kept for the same `init`, `step` and length, so
    pass functions, not new lambdas, when calling repeatedly.

    Args:
      init: key -> carry, a pytree of arrays.
      step: (carry, key, t int32 scalar) -> (carry of the same shapes and dtypes, outputs).
      key: typed root key.
      steps: T >= 1.
      seeds: how many (0, 1, ..., S-1), or the S different seeds themselves, each in [0, 2**32).
      chunk: when given, that many steps run at a time, so that progress shows and Ctrl-C works between; the last chunk
        may be shorter, which compiles once more.
      on_chunk: called with the number of steps done after each chunk, such as `Progress.update`; what it raises ends
        the run.

    Returns:
      (carry after the last step, leaves `[S, ...]`; outputs, leaves `[S, T, ...]`).

    Raises:
      ValueError: for `steps` or `chunk` below 1, no seeds, or seeds that repeat or are out of range.
      TypeError: when `key` is not a typed scalar key, or `step` changes the carry's shapes or dtypes.

    >>> def step(count, key, t):
    ...     return count + 1, t
    >>> final, outputs = rollout(lambda key: jnp.zeros(2), step, key=jax.random.key(0), steps=5, seeds=3)
    >>> final.shape, final[0, 0].item(), outputs[2].tolist()
    ((3, 2), 5.0, [0, 1, 2, 3, 4])
    """
    if not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key) or jnp.ndim(key) != 0:
        got = f"{jnp.result_type(key)}{list(jnp.shape(key))}"
        raise TypeError(f"key must be one typed key from jax.random.key, got {got}")
    length = steps if chunk is None else chunk
    for name, value in (("steps", steps), ("chunk", length)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    carry, loop_keys = _begin(init, key, _seed_array(seeds))
    parts = []
    for start in range(0, steps, length):
        carry, outputs = _scan(step, carry, loop_keys, jnp.int32(start), min(length, steps - start))
        parts.append(outputs)
        if on_chunk is not None:
            # Dispatch is asynchronous: without waiting, progress would run ahead of the work.
            jax.block_until_ready(outputs if jax.tree.leaves(outputs) else carry)
            on_chunk(min(start + length, steps))
    if len(parts) == 1:
        return carry, parts[0]
    return carry, jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)


def _seed_array(seeds: Seeds) -> UInt32[np.ndarray, " S"]:
    """The seeds as checked 32-bit words."""
    values = list(range(seeds)) if isinstance(seeds, int) else [operator.index(s) for s in seeds]
    if not values:
        raise ValueError(f"seeds must name at least one seed, got {seeds}")
    wrong = [s for s in values if not 0 <= s < 2**32]
    if wrong:
        raise ValueError(f"seeds must be in [0, 2**32), got {wrong[0]}")
    if len(set(values)) < len(values):
        raise ValueError(f"seeds must differ (a repeated seed is no new sample), got {values}")
    return np.array(values, np.uint32)


@partial(jax.jit, static_argnums=0)
def _begin(
    init: Init, key: Key[Array, ""], seeds: UInt32[np.ndarray, " S"] | UInt32[Array, " S"]
) -> tuple[PyTree[Array], Key[Array, " S"]]:
    """Initial carries and the keys that the steps fold in their number."""

    def one(seed: UInt32[Array, ""]) -> tuple[PyTree[Array], Key[Array, ""]]:
        init_key, loop_key = jax.random.split(jax.random.fold_in(key, seed))
        return jax.tree.map(jnp.asarray, init(init_key)), loop_key

    return jax.vmap(one)(seeds)


@partial(jax.jit, static_argnums=(0, 4))
def _scan(
    step: Step, carry: PyTree[Array], keys: Key[Array, " S"], start: Integer[Array, ""], length: int
) -> tuple[PyTree[Array], PyTree[Array]]:
    """`length` steps from step number `start`, for all seeds."""

    def one(carry: PyTree[Array], key: Key[Array, ""]) -> tuple[PyTree[Array], PyTree[Array]]:
        def body(carry: PyTree[Array], t: Integer[Array, ""]) -> tuple[PyTree[Array], PyTree[Array]]:
            carry, outputs = step(carry, jax.random.fold_in(key, t), t)
            return carry, outputs

        return jax.lax.scan(body, carry, start + jnp.arange(length, dtype=jnp.int32))

    return jax.vmap(one)(carry, keys)
