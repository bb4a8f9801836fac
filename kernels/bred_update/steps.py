"""One optimizer step on whole blocks: decode, the optimizer's arithmetic, encode. Shared by XLA and Pallas.

Every function takes tiles: parameters and gradients `[..., B]`, packed states `[..., w]`, scales and dithers
`[..., 1]`, and the scalars of `Hyper`; u0 is the dither that the states were encoded with, u1 the one for the new
states. The arithmetic is that of optax, operation by operation, so that the codes are those of the wrapped optimizer.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from jaxlab.kernels.bred_update.codec import QuantSpec


class Hyper(NamedTuple):
    """Scalars of one step, float32; those that an optimizer does not have are ignored.

    Attributes:
      lr: learning rate.
      b1: decay of the first average (AdamW, Lion) or of the momentum (SGD).
      b2: decay of the second average (AdamW), or of the momentum (Lion).
      eps: added to the root of the second moment.
      eps_root: added to the second moment.
      weight_decay: decoupled.
      correction1, correction2: 1 - b^t of the two averages (AdamW).
    """

    lr: Float[Array, ""] | float
    b1: Float[Array, ""] | float
    b2: Float[Array, ""] | float = 0.0
    eps: Float[Array, ""] | float = 0.0
    eps_root: Float[Array, ""] | float = 0.0
    weight_decay: Float[Array, ""] | float = 0.0
    correction1: Float[Array, ""] | float = 1.0
    correction2: Float[Array, ""] | float = 1.0


class Moment(NamedTuple):
    """A packed state of some blocks.

    Attributes:
      words: packed codes.
      scale: of every block.
    """

    words: UInt8[Array, "*n w"]
    scale: Float[Array, "*n 1"]


Dithers = tuple[Float32[Array, "*n 1"], Float32[Array, "*n 1"]]  # (u0, u1)


def zero_of(scale: Float[Array, "*n"]) -> Float32[Array, "*n"]:
    """The number 0 for every block, in a form that no compiler knows to be 0; NaN where the scale is."""
    return jnp.minimum(scale.astype(jnp.float32), jnp.float32(0))


def average(
    decay: Float[Array, ""] | float, new: Float32[Array, "*n"], old: Float32[Array, "*n"], zero: Float32[Array, "*m"]
) -> Float32[Array, "*n"]:
    """decay old + (1 - decay) new, with both products rounded, as they are in a program that does one operation a time.

    Args:
      decay: b.
      new: what enters the average.
      old: the average before, decoded.
      zero: `zero_of` the scale of `old`. A product plus an unknown 0 is the product, rounded once, fused or not.

    Returns:
      The average.
    """
    return ((1 - decay) * new + zero) + (decay * old + zero)


def adamw(
    p: Float[Array, "*n B"],
    g: Float[Array, "*n B"],
    mu: Moment,
    nu: Moment,
    dithers: tuple[Dithers, Dithers],
    h: Hyper,
    specs: tuple[QuantSpec, QuantSpec],
) -> tuple[Float[Array, "*n B"], Moment, Moment]:
    """AdamW: m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p -= lr (m / c1 / (sqrt(v / c2) + eps) + wd p)."""
    (m0, m1), (v0, v1) = dithers
    g32, p32 = g.astype(jnp.float32), p.astype(jnp.float32)
    m = average(h.b1, g32, specs[0].decode_block(*mu, m0), zero_of(mu.scale))
    v = average(h.b2, g32 * g32, specs[1].decode_block(*nu, v0), zero_of(nu.scale))
    direction = (m / h.correction1) / (jnp.sqrt(v / h.correction2 + h.eps_root) + h.eps)
    new_p = p32 - h.lr * (direction + h.weight_decay * p32)
    return new_p.astype(p.dtype), Moment(*specs[0].encode_block(m, m1)), Moment(*specs[1].encode_block(v, v1))


def lion(
    p: Float[Array, "*n B"], g: Float[Array, "*n B"], mu: Moment, dithers: Dithers, h: Hyper, spec: QuantSpec
) -> tuple[Float[Array, "*n B"], Moment]:
    """Lion: p -= lr (sign(b1 m + (1 - b1) g) + wd p), m = b2 m + (1 - b2) g."""
    u0, u1 = dithers
    g32, p32 = g.astype(jnp.float32), p.astype(jnp.float32)
    old, zero = spec.decode_block(*mu, u0), zero_of(mu.scale)
    direction = jnp.sign(average(h.b1, g32, old, zero))
    m = average(h.b2, g32, old, zero)
    new_p = p32 - h.lr * (direction + h.weight_decay * p32)
    return new_p.astype(p.dtype), Moment(*spec.encode_block(m, u1))


def sgdm(
    p: Float[Array, "*n B"],
    g: Float[Array, "*n B"],
    trace: Moment,
    dithers: Dithers,
    h: Hyper,
    spec: QuantSpec,
    *,
    nesterov: bool = False,
) -> tuple[Float[Array, "*n B"], Moment]:
    """SGD with momentum: t = g + b1 t, p -= lr t, or p -= lr (g + b1 t) with Nesterov's."""
    u0, u1 = dithers
    g32, p32 = g.astype(jnp.float32), p.astype(jnp.float32)
    t = g32 + (h.b1 * spec.decode_block(*trace, u0) + zero_of(trace.scale))
    direction = g32 + h.b1 * t if nesterov else t
    return (p32 - h.lr * direction).astype(p.dtype), Moment(*spec.encode_block(t, u1))
