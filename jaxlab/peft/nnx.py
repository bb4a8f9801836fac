"""A thin view for flax nnx: adapters of a module, and a module that holds both."""

from collections.abc import Sequence
from typing import Any

from flax import nnx
from jaxtyping import Array, Key

from jaxlab.peft import adapters, spec


class Frozen(nnx.Variable):
    """An array that belongs to an adapter and is not trained."""


def params(module: nnx.Module) -> dict[str, Any]:
    """The parameters of a module as a nested dict of arrays, whose paths the rules see.

    >>> sorted(params(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    ['bias', 'kernel']
    """
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def merged(module: nnx.Module, state: adapters.Adapters) -> Any:
    """A new module with the adapters in its parameters; the given one is left alone.

    Args:
      module: of the base.
      state: adapters made for `params(module)`.

    Returns:
      A module of the same class, which shares the variables that are no parameters.

    Raises:
      ValueError: as `peft.merge`.
    """
    graph, own, rest = nnx.split(module, nnx.Param, ...)
    return nnx.merge(graph, adapters.merge(nnx.to_pure_dict(own), state), rest)


class Adapted(nnx.Module):
    """A module with adapters: calls are those of the merged module; made by `wrap`.

    Trained arrays are `nnx.LoRAParam`, so `nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)` and
    `nnx.DiffState(0, nnx.LoRAParam)` train the adapters alone.

    Attributes:
      base: the module.
      trainable, frozen: arrays of the adapters, by path and name.
      spec: what they mean.
    """

    def __init__(self, base: nnx.Module, state: adapters.Adapters):
        self.base = base
        self.trainable = nnx.Dict(
            {path: nnx.Dict({k: nnx.LoRAParam(x) for k, x in own.items()}) for path, own in state.trainable.items()}
        )
        self.frozen = nnx.Dict(
            {path: nnx.Dict({k: Frozen(x) for k, x in own.items()}) for path, own in state.frozen.items()}
        )
        self.spec = nnx.static(state.spec)

    @property
    def adapters(self) -> adapters.Adapters:
        """The state, as the functions of `peft` take it."""
        read = lambda group: {path: {k: x[...] for k, x in own.items()} for path, own in group.items()}  # noqa: E731
        return adapters.Adapters(read(self.trainable), read(self.frozen), self.spec)

    def merged(self) -> Any:
        """The plain module with the adapters in its parameters."""
        return merged(self.base, self.adapters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.merged()
        out = module(*args, **kwargs)
        # What the call has changed, such as running means and random counters, belongs to the base.
        nnx.update(self.base, nnx.state(module, nnx.Not(nnx.Param)))
        return out


def wrap(module: nnx.Module, rules: Sequence[spec.Rule], key: Key[Array, ""]) -> Adapted:
    """The module with new adapters.

    Args:
      module: any nnx module; it becomes a part of the new one and is not changed.
      rules: as for `peft.match`, on the paths of `params(module)`.
      key: typed key.

    Returns:
      An `Adapted`, which computes what the module does until it is trained.

    Raises:
      ValueError: as `peft.match`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxlab import peft
    >>> module = wrap(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), [peft.Rule("kernel", peft.LoRA(1))], jax.random.key(0))
    >>> module(jnp.ones((4, 2))).shape, len(jax.tree.leaves(nnx.state(module, nnx.LoRAParam)))
    ((4, 3), 2)
    """
    own = params(module)
    return Adapted(module, adapters.init(key, own, spec.match(own, rules)))
