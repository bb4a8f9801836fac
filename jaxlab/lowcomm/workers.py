"""Workers that leave, join, count differently or diverge: what is done between rounds, on the host."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from jaxlab.core import tree
from jaxlab.core.errors import NonFiniteError
from jaxlab.lowcomm.lowcomm import LowComm, LowCommState


def resize(algo: LowComm, state: LowCommState, *, keep: Sequence[int], join: int = 0) -> LowCommState:
    """The state with workers `keep` (in that order) and `join` new ones behind them; call it at a round boundary.

    A new worker starts from the merged parameters with a fresh inner state whose integers (step counts, so
    learning-rate schedules too) are those of the first kept worker, and nothing left over from compression.

    Args:
      algo: the algorithm the state belongs to.
      state: with K workers, on one device (place the result again for a mesh).
      keep: numbers of the workers that stay, each in [0, K) and at most once; at least one.
      join: number of new workers.

    Returns:
      A state with `len(keep) + join` workers.

    Raises:
      ValueError: for an empty, repeated or out-of-range `keep`, or a negative `join`.

    Example:
      >>> import optax
      >>> algo = LowComm(optax.sgd(0.1), optax.sgd(1.0), sync_every=2)
      >>> state = algo.init({"w": jnp.zeros(3)}, num_workers=4)
      >>> resize(algo, state, keep=[0, 3], join=1).worker_params["w"].shape
      (3, 3)
    """
    workers = jax.tree.leaves(state.worker_params)[0].shape[0]
    keep = list(keep)
    if not keep or len(set(keep)) != len(keep) or not all(0 <= k < workers for k in keep):
        raise ValueError(f"keep must name at least one worker in [0, {workers}), each once, got {keep}")
    if join < 0:
        raise ValueError(f"join must be >= 0, got {join}")
    stay = np.array(keep)
    kept = jax.tree.map(lambda x: x[stay], (state.worker_params, state.inner_state, state.residual))
    if join:
        newcomers = tree.broadcast_leading(state.params, join)
        fresh = jax.tree.map(
            lambda new, old: new if jnp.issubdtype(old.dtype, jnp.inexact) else jnp.broadcast_to(old[:1], new.shape),
            jax.vmap(algo.inner.init)(newcomers),
            kept[1],
        )
        residual = jax.tree.map(lambda r: jnp.zeros((join, *r.shape[1:]), r.dtype), kept[2])
        kept = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), kept, (newcomers, fresh, residual))
    worker_params, inner_state, residual = kept
    return state._replace(worker_params=worker_params, inner_state=inner_state, residual=residual)


def check_weights(weights: Any, num_workers: int) -> Float[np.ndarray, " K"]:
    """The weights of a weighted mean as float32 `[K]`, checked on the host.

    Args:
      weights: one number a worker, such as its sample count; 0 leaves the worker out. Only ratios matter.
      num_workers: K.

    Raises:
      ValueError: for another shape, a negative or non-finite weight, or a sum of zero.

    Example:
      >>> check_weights([3, 0, 1], 3).tolist()
      [3.0, 0.0, 1.0]
    """
    array = np.asarray(weights, np.float32)
    if array.shape != (num_workers,):
        raise ValueError(f"weights must have shape ({num_workers},), got {array.shape}")
    if not np.all(np.isfinite(array)) or np.any(array < 0):
        raise ValueError(f"weights must be finite and >= 0, got {array.tolist()}")
    if not np.isfinite(array.sum()):
        raise ValueError(f"weights must have a finite float32 sum, got {array.tolist()}")
    if array.sum() == 0:
        raise ValueError(f"weights must not all be 0, got {array.tolist()}: no worker would be left")
    return array


def check_metrics(metrics: dict[str, Any], params: PyTree, step: int = -1) -> None:
    """Raises `NonFiniteError` naming worker and leaf when a round's pseudo-gradients held a NaN or an infinity.

    Args:
      metrics: what `LowComm.round` or `LowComm.step` returned, with `nonfinite="error"`.
      params: the parameters, for the leaves' names.
      step: for the message.
    """
    if "nonfinite_leaf" not in metrics:
        return
    for worker, leaf in enumerate(np.asarray(metrics["nonfinite_leaf"]).tolist()):
        if leaf >= 0:
            path = tree.leaf_paths(params)[leaf]
            raise NonFiniteError(step, f"pseudo-gradient of leaf {path!r} of worker {worker}", float("nan"))
