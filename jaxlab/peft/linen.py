"""A thin view for flax linen: the same functions on `variables`, whose collection "params" is adapted."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Array, Key

from jaxlab.peft import adapters, spec


def _params(variables: Mapping[str, Any]) -> Any:
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            "variables must be a dict of collections with 'params', as module.init returns it, got "
            f"{sorted(variables) if isinstance(variables, Mapping) else type(variables).__name__}"
        )
    return variables["params"]


def match(variables: Mapping[str, Any], rules: Sequence[spec.Rule]) -> spec.Spec:
    """`peft.match` on the parameters; paths begin below "params".

    Raises:
      ValueError: without a collection "params", and as `peft.match`.
    """
    return spec.match(_params(variables), rules)


def init(key: Key[Array, ""], variables: Mapping[str, Any], found: spec.Spec) -> adapters.Adapters:
    """`peft.init` on the parameters."""
    return adapters.init(key, _params(variables), found)


def merge(variables: Mapping[str, Any], state: adapters.Adapters) -> dict[str, Any]:
    """Variables with the adapters in their parameters, for `module.apply`; other collections stay.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jaxlab import peft
    >>> module = nn.Dense(3)
    >>> variables = module.init(jax.random.key(0), jnp.ones((1, 2)))
    >>> state = init(jax.random.key(1), variables, match(variables, [peft.Rule("kernel", peft.LoRA(1))]))
    >>> module.apply(merge(variables, state), jnp.ones((1, 2))).shape
    (1, 3)
    """
    return {**variables, "params": adapters.merge(_params(variables), state)}
