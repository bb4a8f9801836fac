"""The one-worker case as an ordinary optax transformation: inner steps, and every H of them an outer step.

    theta_1 <- theta_1 + inner(g)                                        every step
    every H steps:  theta <- theta + outer(theta - theta_1);  theta_1 <- theta

With `outer = local_sgd(a)` this is Lookahead with slow step size a, with Nesterov momentum it is SNOO, with a Muon
inner optimizer it is MuLoCo with one worker. Unlike a wrapper with fast and slow parameters, the caller keeps one set
of parameters, as for any optax optimizer.

Sources: Lookahead (arXiv 1907.08610), algorithm 1; MuLoCo (arXiv 2505.23725).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from jaxlab.lowcomm import checks


class LookaheadState(NamedTuple):
    """State of `lookahead`.

    Attributes:
      inner_state: the inner optimizer's state.
      outer_state: the outer optimizer's state.
      anchor: theta, the parameters after the last outer step.
      count: inner steps done.
    """

    inner_state: PyTree
    outer_state: PyTree
    anchor: PyTree
    count: Int[Array, ""]


def lookahead(
    inner: optax.GradientTransformation, outer: optax.GradientTransformation, sync_every: int
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with an outer step every `sync_every` steps; equals `LowComm` with one worker.

    Args:
      inner: the optimizer of every step.
      outer: fed with `anchor - params` every `sync_every` steps: `diloco()`, `isoloco()`, `local_sgd(0.5)`, ...
      sync_every: H >= 1, steps between two outer steps.

    Returns:
      A transformation whose `update(grads, state, params)` needs `params`.

    Raises:
      ValueError: for sync_every < 1; in `update`, for `params=None`.
      TypeError: for an `inner` or `outer` that is no transformation, or a sync_every that is no integer.

    Example:
      >>> tx = lookahead(optax.sgd(0.1), optax.sgd(0.5), sync_every=2)
      >>> params = jnp.zeros(1); state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.ones(1), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> round(float(params[0]), 3)
      -0.1
    """
    checks.transformation("inner", inner)
    checks.transformation("outer", outer)
    checks.count("sync_every", sync_every)
    inner = optax.with_extra_args_support(inner)
    outer = optax.with_extra_args_support(outer)

    def init(params: PyTree) -> LookaheadState:
        anchor = jax.tree.map(jnp.array, params)  # a copy, so that donating the parameters cannot alias the anchor
        return LookaheadState(inner.init(params), outer.init(params), anchor, jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: LookaheadState, params: PyTree | None = None, **extra: Any):
        if params is None:
            raise ValueError("lookahead needs params in update(grads, state, params), got None")
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        count = state.count + 1

        def outer_step(operand):
            updates, outer_state, anchor = operand
            delta = jax.tree.map(lambda a, p: a - p, anchor, optax.apply_updates(params, updates))
            step, outer_state = outer.update(delta, outer_state, anchor)
            # anchor + step = params + updates + (delta + step), without the rounding of anchor - params: for a step of
            # size one the bracket is exactly zero, and the anchor is bit for bit what the caller will hold.
            updates = jax.tree.map(lambda u, d, s: u + (d + s).astype(u.dtype), updates, delta, step)
            return updates, outer_state, optax.apply_updates(params, updates)

        updates, outer_state, anchor = jax.lax.cond(
            count % sync_every == 0, outer_step, lambda operand: operand, (updates, state.outer_state, state.anchor)
        )
        return updates, LookaheadState(inner_state, outer_state, anchor, count)

    return optax.GradientTransformationExtraArgs(init, update)
