"""Data-parallel training, the gold standard that low-communication methods are compared with.

    theta <- theta + inner(mean_k grad loss_k(theta))        an all-reduce of the gradients at every step

It takes the same `[K, H, ...]` batches as `LowComm` and sees the same data in the same order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from jaxlab.core import prng, tree
from jaxlab.lowcomm import checks
from jaxlab.lowcomm.lowcomm import LossFn, check_params


class DataParallelState(NamedTuple):
    """Parameters, optimizer state and number of steps done."""

    params: PyTree
    inner_state: PyTree
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Synchronous training: one optimizer step a batch of all workers.

    Attributes:
      inner: the optimizer.

    Example:
      >>> algo = DataParallel(optax.sgd(0.5))
      >>> state = algo.init({"w": jnp.zeros(3)}, num_workers=2)
      >>> loss = lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2)
      >>> state, metrics = algo.round(loss)(state, jnp.ones((2, 5, 4, 3)), jax.random.key(0))
      >>> metrics["loss"].shape
      (5,)
    """

    inner: optax.GradientTransformation

    def __post_init__(self):
        checks.transformation("inner", self.inner)

    def init(self, params: PyTree, num_workers: int = 1, *, mesh: Mesh | None = None) -> DataParallelState:
        """The state before the first step, replicated over `mesh` when given."""
        check_params(params)
        checks.count("num_workers", num_workers)

        def make(p):
            return DataParallelState(p, self.inner.init(p), jnp.zeros((), jnp.int32))

        if mesh is None:
            return make(jax.tree.map(jnp.array, params))
        return jax.jit(make, out_shardings=NamedSharding(mesh, PartitionSpec()))(params)

    def step(self, loss_fn: LossFn, *, mesh: Mesh | None = None, axis: str = "worker") -> Callable[..., Any]:
        """One optimizer step: `f(state, batch [K, b, ...], key) -> (state, {"loss": scalar})`.

        Args:
          loss_fn: `(params, batch, key) -> scalar loss`, the mean over its batch.
          mesh, axis: as in `LowComm.round`, so that one can stand for the other. Only the axis is checked: where the
            batch lies decides where the work is done.
        """
        _check_mesh(mesh, axis)
        inner = optax.with_extra_args_support(self.inner)

        def run(state, batch, key):
            _check_batch(batch, 1)
            rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
            loss, grads = jax.value_and_grad(loss_fn)(state.params, rows, prng.step_key(key, state.step))
            updates, inner_state = inner.update(grads, state.inner_state, state.params)
            return DataParallelState(optax.apply_updates(state.params, updates), inner_state, state.step + 1), {
                "loss": loss
            }

        return run

    def round(self, loss_fn: LossFn, *, mesh: Mesh | None = None, axis: str = "worker") -> Callable[..., Any]:
        """H steps: `f(state, batch [K, H, b, ...], key) -> (state, {"loss": [H]})`; arguments as in `step`."""
        step = self.step(loss_fn, mesh=mesh, axis=axis)

        def run(state, batch, key):
            _check_batch(batch, 2)
            by_step = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), batch)
            return jax.lax.scan(lambda s, b: step(s, b, key), state, by_step)

        return run

    def bytes_per_round(self, params: PyTree, num_workers: int, steps: int) -> dict[str, int]:
        """Bytes that `steps` steps put on the network for each worker, as in `LowComm.bytes_per_round`.

        Gradients are reduced in the parameters' dtype; XLA's CPU backend may widen bfloat16 to float32.
        """
        checks.count("num_workers", num_workers)
        payload = tree.nbytes(params) * steps
        return {"payload": payload, "ring": 2 * (num_workers - 1) * payload // num_workers}


def _check_mesh(mesh: Mesh | None, axis: str) -> None:
    if mesh is not None and axis not in mesh.axis_names:
        raise ValueError(f"axis {axis!r} is not in the mesh; it has {mesh.axis_names}")


def _check_batch(batch: PyTree, lead: int) -> None:
    """Every leaf has the same leading axes, [K] or [K, H], and behind them at least the axis of samples."""
    names = "[K, b, ...]" if lead == 1 else "[K, H, b, ...]"
    shapes = dict(zip(tree.leaf_paths(batch), map(jnp.shape, jax.tree.leaves(batch)), strict=True))
    first = next(iter(shapes.values()), ())[:lead]
    for path, shape in shapes.items():
        if len(shape) <= lead or shape[:lead] != first:
            raise ValueError(f"batch leaf {path!r} must be {names} with {list(first)} in front, got {shape}")
