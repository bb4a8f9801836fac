"""What the linear layers of a transformer see: their inputs, for calibration."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Integer

from jaxlab.nn import layers, transformer


class _Inputs:
    """Where the tapped layers of one forward pass leave their inputs."""

    def __init__(self) -> None:
        self.found: dict[str, Array] = {}


class TappedLinear(layers.Linear):
    """A `Linear` that also records its input; made from one by `linear_inputs`."""

    def __call__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        self.inputs.found[self.path] = x
        return super().__call__(x)


def linear_inputs(
    config: transformer.TransformerConfig, params: Any, tokens: Integer[Array, "B T"]
) -> dict[str, Float[Array, "B T i"]]:
    """The input of every linear layer in a forward pass; a pure function, to be jitted.

    Args:
      config: of the model; its layers must not be stacked.
      params: of the model.
      tokens: `[B, T]`.

    Returns:
      Path of the kernel, such as `layers/0/attn/q/kernel` -> input `[B, T, in]`.

    Raises:
      ValueError: for a model with `scan_layers` or with `remat`, whose layers run inside another transformation.

    >>> import jax, jax.numpy as jnp
    >>> config = transformer.TransformerConfig(vocab=16, dim=8, layers=1, heads=1, kv_heads=1, ffn=4)
    >>> params = transformer.init(config, jax.random.key(0))
    >>> found = linear_inputs(config, params, jnp.zeros((1, 3), jnp.int32))
    >>> sorted(found)[:2], found["layers/0/mlp/down/kernel"].shape
    (['head/kernel', 'layers/0/attn/k/kernel'], (1, 3, 4))
    """
    if config.scan_layers or config.remat != "none":
        raise ValueError(
            f"config must have scan_layers=False and remat='none', got {config.scan_layers} and {config.remat!r}"
        )
    model, inputs = transformer.to_module(config, params), _Inputs()
    names = sorted(params["layers"])
    for keys, node in nnx.iter_graph(model):
        if type(node) is layers.Linear:
            parts = [str(key) for key in keys]
            if parts[0] == "layers":
                parts[1] = names[int(parts[1])]
            node.__class__ = TappedLinear
            node.path, node.inputs = "/".join([*parts, "kernel"]), inputs
    hidden, _ = model.hidden(tokens)
    # The output matrix is applied by `logits`, which also serves tied embeddings.
    return inputs.found if config.tied else {"head/kernel": hidden, **inputs.found}
