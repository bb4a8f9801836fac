"""The algebra of compositing: ordered parts of a scene, each an image of colour and transmittance.

    (C1, T1) over (C2, T2) = (C1 + T1 C2, T1 T2)          associative, identity (0, 1), not commutative

The image of block k is I = C_F + T_F (C_k + T_k R): F is all that is nearer, R the colour of all that lies behind, the
background included. With one gradient g = dL/dI of the whole image,

    dL/dC_k = T_F g        dL/dT_k = T_F <g, R>

and the block's own backward pass with these two images gives exactly its part of the gradient of the whole image. That
holds when blocks are contiguous in the order of depth, when the stop rule of a block starts from T_F and skips pixels
that were ended before, and when the contexts belong to the parameters that made I.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Composite(NamedTuple):
    """An ordered part of a scene as an image.

    Attributes:
      color: over black, any number of channels.
      transmittance: how much of what lies behind is seen.
    """

    color: Float[Array, "*b h w c"]
    transmittance: Float[Array, "*b h w"]

    def __matmul__(self, behind: "Composite") -> "Composite":
        return over(self, behind)


def identity(height: int, width: int, channels: int = 3, dtype: jnp.dtype = jnp.float32) -> Composite:
    """Nothing: over and under every other part, it changes nothing."""
    return Composite(jnp.zeros((height, width, channels), dtype), jnp.ones((height, width), dtype))


def over(front: Composite, behind: Composite) -> Composite:
    """`front` before `behind`: (C1 + T1 C2, T1 T2).

    >>> half = Composite(jnp.full((1, 1, 1), 0.5), jnp.full((1, 1), 0.5))
    >>> found = over(half, half)
    >>> found.color.item(), found.transmittance.item()
    (0.75, 0.25)
    """
    return Composite(
        front.color + front.transmittance[..., None] * behind.color, front.transmittance * behind.transmittance
    )


def prefixes(parts: Sequence[Composite] | Composite) -> Composite:
    """What is seen of the first k parts, for k = 1 .. K, `[K, ...]`; in parallel.

    Args:
      parts: front to back, a sequence, or stacked along the first axis.
    """
    return jax.lax.associative_scan(over, _stacked(parts))


def behind(parts: Sequence[Composite] | Composite, background: Float[Array, " c"]) -> Float[Array, "k h w c"]:
    """R_k, the colour of all that lies behind part k, the background included; by the recurrence from the back.

    Taking it from the whole image as (I - C_{<=k}) / T_{<=k} would lose all digits where T is small.
    """
    stacked = _stacked(parts)
    last = jnp.broadcast_to(background, stacked.color.shape[1:]).astype(stacked.color.dtype)

    def step(rest: Array, part: Composite) -> tuple[Array, Array]:
        return part.color + part.transmittance[..., None] * rest, rest

    return jax.lax.scan(step, last, stacked, reverse=True)[1]


def block_cotangent(
    g: Float[Array, "h w c"],
    front: Float[Array, "h w"],
    rest: Float[Array, "h w c"],
    by_alpha: Float[Array, "h w"] | None = None,
    total: Float[Array, "h w"] | None = None,
) -> Composite:
    """(dL/dC_k, dL/dT_k) of a block from the gradient of the whole image.

    Args:
      g: dL/dI.
      front: T_F, the transmittance of what is nearer.
      rest: R, the colour behind the block.
      by_alpha: dL/dalpha of the whole image, where alpha is supervised.
      total: T_R, the transmittance of all that lies behind the block; needed with `by_alpha`.

    Returns:
      T_F g and T_F <g, R> - T_F T_R dL/dalpha, as a `Composite`.
    """
    slope = front * jnp.sum(g * rest, axis=-1)
    if by_alpha is not None:
        if total is None:
            raise ValueError("total, the transmittance behind the block, must be given with by_alpha")
        slope = slope - front * total * by_alpha
    return Composite(front[..., None] * g, slope)


def _stacked(parts: Sequence[Composite] | Composite) -> Composite:
    if isinstance(parts, Composite):
        return parts
    if not parts:
        raise ValueError("parts must hold at least one Composite")
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)
