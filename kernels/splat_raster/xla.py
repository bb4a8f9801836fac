"""Tiles of Gaussians composited in plain XLA: all pixels of a batch of tiles walk down their lists together.

A step takes the next Gaussian of every tile in the batch and blends it into the tile's pixels. The batch ends when its
lists do, or when no pixel of it takes more; batches are made of tiles whose lists are about equally long. Backward
walks the same way, front to back, with what is still to come as a running remainder: with g = dL/dC, T_i the
transmittance before Gaussian i, and C_{<=i} the colour after it,

    dL/dalpha_i = T_i <g, c_i> - (<g, C - C_{<=i}> + dL/dT T) / (1 - alpha_i)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jaxlab.kernels.splat_raster.tiles import Grid, Lists

BATCH = 64  # tiles that walk together
ALPHA_MAX = 0.99
ALPHA_MIN = 1 / 255
STOP = 1e-4  # a Gaussian that would leave less transmittance than this is the first that is not blended
FIXED = 6  # columns of a row before its colour: mean x, y, conic a, b, c, opacity


class Seed(NamedTuple):
    """What lies before the first Gaussian, by tile.

    Attributes:
      transmittance: of what lies before; only the stop rule sees it.
      done: pixels that take nothing more.
    """

    transmittance: Float[Array, "t p"]
    done: Bool[Array, "t p"]


class Out(NamedTuple):
    """What the lists give, by tile: colour over black, transmittance without the seed's, and which pixels are done."""

    color: Float[Array, "c t p"]
    transmittance: Float[Array, "t p"]
    done: Bool[Array, "t p"]


def alpha_of(
    row: Float[Array, "f *#n"], x: Float[Array, "*n"], y: Float[Array, "*n"]
) -> tuple[Float[Array, "*n"], Float[Array, "*n"], Float[Array, "*n"], Float[Array, "*n"]]:
    """(dx, dy, alpha before its limit, sigma) of Gaussians at pixel centres."""
    dx, dy = row[0] - x, row[1] - y
    sigma = 0.5 * (row[2] * dx * dx + row[4] * dy * dy) + row[3] * dx * dy
    return dx, dy, row[5] * jnp.exp(-sigma), sigma


def _batches(found: Lists, grid: Grid) -> tuple[Int32[Array, "b t"], int]:
    """Tiles by batches, longest lists first; beyond the last tile, the number of tiles."""
    number = -(-grid.tiles // BATCH)
    order = jnp.argsort(-(found.starts[1:] - found.starts[:-1])).astype(jnp.int32)
    pad = jnp.full(number * BATCH - grid.tiles, grid.tiles, jnp.int32)
    return jnp.concatenate([order, pad]).reshape(number, BATCH), number


def _centres(tile: Int32[Array, " t"], grid: Grid, dtype: Any) -> tuple[Float[Array, "t p"], Float[Array, "t p"]]:
    pixel = np.arange(grid.tile**2, dtype=np.int32)
    x = (tile % grid.across * grid.tile)[:, None] + pixel % grid.tile
    y = (tile // grid.across * grid.tile)[:, None] + pixel // grid.tile
    return x.astype(dtype) + 0.5, y.astype(dtype) + 0.5


class _Walk(NamedTuple):
    """A batch on its way: the list positions and the pixels."""

    first: Int32[Array, " t"]
    last: Int32[Array, " t"]
    x: Float[Array, "t p"]
    y: Float[Array, "t p"]
    seed: Float[Array, "t p"]


def _blend(
    walk: _Walk, k: Int32[Array, ""], row: Float[Array, "f t"], t: Float[Array, "t p"], done: Bool[Array, "t p"]
) -> tuple[Any, ...]:
    """(what `alpha_of` gives, alpha, whether it is blended, new transmittance, new done) of step k."""
    dx, dy, raw, sigma = alpha_of(row[..., None], walk.x, walk.y)
    alpha = jnp.minimum(raw, ALPHA_MAX)
    seen = (walk.first + k < walk.last)[:, None] & (sigma >= 0) & (alpha >= ALPHA_MIN) & ~done
    after = t * (1 - alpha)
    stop = seen & (walk.seed * after <= STOP)
    seen = seen & ~stop
    return (dx, dy, raw, sigma), alpha, seen, jnp.where(seen, after, t), done | stop


def _start(found: Lists, tile: Int32[Array, " t"], seed: Seed, grid: Grid) -> tuple[_Walk, Bool[Array, "t p"]]:
    inside = jnp.minimum(tile, grid.tiles - 1)
    x, y = _centres(inside, grid, seed.transmittance.dtype)
    first, last = found.starts[inside], found.starts[inside + 1]
    walk = _Walk(first, jnp.where(tile < grid.tiles, last, first), x, y, seed.transmittance[inside])
    return walk, seed.done[inside] | (tile >= grid.tiles)[:, None]


def _going(walk: _Walk, k: Int32[Array, ""], done: Bool[Array, "t p"]) -> Bool[Array, ""]:
    return jnp.any((walk.first + k < walk.last) & ~jnp.all(done, axis=1))


def _row(packed: Float[Array, "n f"], found: Lists, place: Int32[Array, " t"]) -> Float[Array, "f t"]:
    return packed[found.rows[jnp.minimum(place, found.rows.shape[0] - 1)]].T


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def raster(packed: Float[Array, "n f"], found: Lists, seed: Seed, grid: Grid) -> Out:
    """Composites the lists of all tiles.

    Args:
      packed: a row a Gaussian: mean x, y, conic a, b, c, opacity, colour.
      found: lists of the tiles.
      seed: what lies before.
      grid: the tiles.

    Returns:
      An `Out`; differentiable by `packed`.
    """
    return _forward(packed, found, seed, grid)


def _forward(packed: Float[Array, "n f"], found: Lists, seed: Seed, grid: Grid) -> Out:
    channels = packed.shape[1] - FIXED
    batches, number = _batches(found, grid)

    def batch(tile: Int32[Array, " t"]) -> tuple[Array, Array, Array]:
        walk, done = _start(found, tile, seed, grid)

        def step(state: Any) -> Any:
            k, color, t, done = state
            row = _row(packed, found, walk.first + k)
            _, alpha, seen, after, done = _blend(walk, k, row, t, done)
            weight = jnp.where(seen, t * alpha, 0)
            color = [c + weight * row[FIXED + i][:, None] for i, c in enumerate(color)]
            return k + 1, color, after, done

        black = [jnp.zeros(walk.x.shape, packed.dtype)] * channels
        state = jnp.int32(0), black, jnp.ones(walk.x.shape, packed.dtype), done
        _, color, t, done = jax.lax.while_loop(lambda s: _going(walk, s[0], s[3]), step, state)
        return jnp.stack(color), t, done

    color, t, done = jax.lax.map(batch, batches)
    place = (
        jnp.zeros(number * BATCH + 1, jnp.int32)
        .at[batches.reshape(-1)]
        .set(jnp.arange(number * BATCH, dtype=jnp.int32))
    )
    place = place[: grid.tiles]
    color = jnp.moveaxis(color, 1, 0).reshape(channels, number * BATCH, -1)
    return Out(color[:, place], *(x.reshape(number * BATCH, -1)[place] for x in (t, done)))


def _raster_fwd(packed: Any, found: Lists, seed: Seed, grid: Grid) -> tuple[Out, Any]:
    out = _forward(packed, found, seed, grid)
    return out, (packed, found, seed, out)


def _raster_bwd(grid: Grid, residuals: Any, cotangent: Out) -> tuple[Any, None, None]:
    packed, found, seed, out = residuals
    columns = packed.shape[1]
    batches, _ = _batches(found, grid)
    limit = found.rows.shape[0]

    def batch(grads: Float[Array, "capacity f"], tile: Int32[Array, " t"]) -> tuple[Any, None]:
        walk, done = _start(found, tile, seed, grid)
        inside = jnp.minimum(tile, grid.tiles - 1)
        slope = cotangent.color[:, inside]
        total = jnp.sum(slope * out.color[:, inside], axis=0)
        total = total + cotangent.transmittance[inside] * out.transmittance[inside]

        def step(state: Any) -> Any:
            k, passed, t, done, grads = state
            place = walk.first + k
            row = _row(packed, found, place)
            (dx, dy, raw, sigma), alpha, seen, after, done = _blend(walk, k, row, t, done)
            along = sum(slope[i] * row[FIXED + i][:, None] for i in range(columns - FIXED))
            weight = jnp.where(seen, t * alpha, 0)
            passed = passed + weight * along
            by_alpha = jnp.where(seen, t * along - (total - passed) / (1 - alpha), 0)
            free = jnp.where(raw < ALPHA_MAX, by_alpha, 0)
            by_sigma = -raw * free
            a, b, c = (row[i][:, None] for i in (2, 3, 4))
            new = [
                (a * dx + b * dy) * by_sigma,
                (c * dy + b * dx) * by_sigma,
                0.5 * dx * dx * by_sigma,
                dx * dy * by_sigma,
                0.5 * dy * dy * by_sigma,
                jnp.exp(-jnp.where(seen, sigma, 0)) * free,
                *(weight * slope[i] for i in range(columns - FIXED)),
            ]
            new = jnp.stack([jnp.sum(x, axis=1) for x in new], axis=1)
            place = jnp.where(place < walk.last, place, limit)
            return k + 1, passed, after, done, grads.at[place].set(new, mode="drop")

        state = jnp.int32(0), jnp.zeros_like(walk.x), jnp.ones_like(walk.x), done, grads
        return jax.lax.while_loop(lambda s: _going(walk, s[0], s[3]), step, state)[-1], None

    grads, _ = jax.lax.scan(batch, jnp.zeros((limit, columns), packed.dtype), batches)
    # A place that no tile walks to has no gradient; padding is in no list.
    return jax.ops.segment_sum(grads, found.rows, num_segments=packed.shape[0]), None, None


raster.defvjp(_raster_fwd, _raster_bwd)
