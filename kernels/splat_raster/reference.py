"""Every pixel against every Gaussian, one Gaussian after the other: the definition, slow, differentiated by JAX.

    alpha = min(0.99, o exp(-sigma))     sigma = (a dx^2 + c dy^2) / 2 + b dx dy
    C = sum_i T_i alpha_i c_i            T_{i+1} = T_i (1 - alpha_i)

Skipped where sigma < 0 or alpha < 1/255; a pixel ends before the first Gaussian that would leave T <= 1e-4.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlab.kernels.splat_raster.tiles import Grid
from jaxlab.kernels.splat_raster.xla import ALPHA_MAX, ALPHA_MIN, FIXED, STOP, alpha_of


def raster(
    packed: Float[Array, "n f"],
    depths: Float[Array, " n"],
    shown: Bool[Array, " n"],
    transmittance: Float[Array, "h w"],
    done: Bool[Array, "h w"],
    grid: Grid,
) -> tuple[Float[Array, "h w c"], Float[Array, "h w"], Bool[Array, "h w"]]:
    """(colour over black, transmittance, whether a pixel takes no more) of all Gaussians that are `shown`.

    Args:
      packed: a row a Gaussian: mean x, y, conic a, b, c, opacity, colour.
      depths: the order, nearest first; equal ones keep the order of the rows.
      shown: those that take part.
      transmittance, done: of what lies before.
      grid: the image; its tiles do not matter.
    """
    order = jnp.argsort(jnp.where(shown, depths, jnp.inf))
    y, x = (v.astype(packed.dtype) + 0.5 for v in jnp.mgrid[: grid.height, : grid.width])

    def blend(state: tuple[Array, Array, Array], row: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        color, t, done = state
        values, shown = row
        _, _, raw, sigma = alpha_of(values[:, None, None], x, y)
        alpha = jnp.minimum(raw, ALPHA_MAX)
        seen = shown & (sigma >= 0) & (alpha >= ALPHA_MIN) & ~done
        after = t * (1 - alpha)
        stop = seen & (transmittance * after <= STOP)
        seen = seen & ~stop
        color = color + jnp.where(seen, t * alpha, 0)[..., None] * values[FIXED:]
        return (color, jnp.where(seen, after, t), done | stop), None

    black = jnp.zeros((*x.shape, packed.shape[1] - FIXED), packed.dtype)
    return jax.lax.scan(blend, (black, jnp.ones_like(x), done), (packed[order], shown[order]))[0]
