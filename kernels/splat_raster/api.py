"""Composites projected Gaussians into an image, by the implementation for the device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxlab.kernels.splat_raster import reference, tiles, xla
from jaxlab.kernels.splat_raster.tiles import Grid

IMPLEMENTATIONS = ("xla", "pallas_gpu", "reference")


class Splats(NamedTuple):
    """Gaussians in the image plane.

    Attributes:
      means: centres, in pixels; the centre of the first pixel is (0.5, 0.5).
      conics: a, b, c of the inverse covariance [[a, b], [b, c]], in pixels^-2.
      opacities: in [0, 1].
      colors: of any number of channels.
      radii: half sizes of a box that holds every pixel whose alpha is at least 1/255; 0 for Gaussians not to be shown.
      depths: their order, nearest first.
    """

    means: Float[Array, "n 2"]
    conics: Float[Array, "n 3"]
    opacities: Float[Array, " n"]
    colors: Float[Array, "n c"]
    radii: Float[Array, "n 2"]
    depths: Float[Array, " n"]


class Raster(NamedTuple):
    """What was composited.

    Attributes:
      color: over black.
      transmittance: how much of what lies behind is seen.
      done: pixels that take no more, because the stop rule ended them.
      total: pairs of a tile and a Gaussian; where it exceeds the capacity, colour and transmittance are NaN.
    """

    color: Float[Array, "h w c"]
    transmittance: Float[Array, "h w"]
    done: Bool[Array, "h w"]
    total: Int32[Array, ""]


def splat_raster(
    splats: Splats,
    width: int,
    height: int,
    *,
    capacity: int,
    tile_size: int = 16,
    transmittance: Float[Array, "h w"] | None = None,
    done: Bool[Array, "h w"] | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Raster:
    """Composites Gaussians front to back, differentiably in `means`, `conics`, `opacities` and `colors`.

        alpha = min(0.99, o exp(-(a dx^2 + c dy^2) / 2 - b dx dy))
        C = sum_i T_i alpha_i c_i          T_{i+1} = T_i (1 - alpha_i)

    Gaussians with alpha < 1/255 are skipped; a pixel ends before the first Gaussian that would leave T <= 1e-4.

    Args:
      splats: the Gaussians.
      width, height: of the image, in pixels.
      capacity: how many pairs of a tile and a Gaussian there is room for; `tiles.count` says how many there are.
      tile_size: pixels along the side of a tile.
      transmittance: of what lies before these Gaussians; the stop rule counts it, the result does not.
      done: pixels that what lies before has ended.
      implementation: None for that of the default backend; "reference" is brute force, and ignores the capacity.
      interpret: whether to run the Pallas kernel as XLA operations, on any device.

    Returns:
      A `Raster`. Too small a capacity makes it NaN: nothing is dropped.

    Raises:
      ValueError: for sizes below 1, arrays that do not belong together, more tiles times Gaussians than 32 bits hold,
        and an implementation that cannot run here.

    >>> one = Splats(*(jnp.array([x]) for x in ([4.0, 4.0], [0.1, 0.0, 0.1], 0.5, [1.0], [9.0, 9.0], 1.0)))
    >>> found = splat_raster(one, 8, 8, capacity=4)
    >>> found.color.shape, round(float(found.color[3, 3, 0]), 3), int(found.total)
    ((8, 8, 1), 0.488, 1)
    """
    grid = _check(splats, width, height, tile_size, capacity)
    chosen = _choose(implementation, interpret)
    dtype = splats.means.dtype
    before = jnp.ones((height, width), dtype) if transmittance is None else transmittance
    ended = jnp.zeros((height, width), bool) if done is None else done
    for name, x in (("transmittance", before), ("done", ended)):
        if x.shape != (height, width):
            raise ValueError(f"{name} must have the shape [{height}, {width}] of the image, got {list(x.shape)}")
    packed = jnp.concatenate([splats.means, splats.conics, splats.opacities[:, None], splats.colors], axis=1)
    frozen = jax.lax.stop_gradient(splats)
    total = tiles.count(frozen.means, frozen.radii, grid)
    if splats.means.shape[0] == 0:
        return Raster(jnp.zeros((height, width, splats.colors.shape[1]), dtype), jnp.ones_like(before), ended, total)
    if chosen == "reference":
        shown = jnp.all(frozen.radii > 0, axis=1)
        return Raster(*reference.raster(packed, frozen.depths, shown, before, ended, grid), total)
    found = tiles.lists(frozen.means, frozen.radii, frozen.depths, grid, capacity)
    seed = xla.Seed(tiles.to_tiles(before, grid, 1.0), tiles.to_tiles(ended, grid, True))
    seed = jax.lax.stop_gradient(seed)
    out = xla.raster(packed, found, seed, grid)
    color = jnp.moveaxis(out.color, 0, -1)
    color, behind, ended = (tiles.to_image(x, grid) for x in (color, out.transmittance, out.done))
    fits = found.total <= capacity
    return Raster(jnp.where(fits, color, jnp.nan), jnp.where(fits, behind, jnp.nan), ended, found.total)


def _choose(implementation: str | None, interpret: bool) -> str:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    chosen = implementation or "xla"
    if chosen == "pallas_gpu":
        raise ValueError("not yet")
    if interpret and chosen != "pallas_gpu":
        raise ValueError(f"interpret is for 'pallas_gpu', got it with {chosen!r}")
    return chosen


def _check(splats: Splats, width: Any, height: Any, tile_size: Any, capacity: Any) -> Grid:
    for name, value in (("width", width), ("height", height), ("tile_size", tile_size), ("capacity", capacity)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    n = splats.means.shape[0]
    shapes = {"means": (n, 2), "conics": (n, 3), "opacities": (n,), "radii": (n, 2), "depths": (n,)}
    for name, shape in shapes.items():
        got = getattr(splats, name).shape
        if tuple(got) != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, got {list(got)}")
    if splats.colors.ndim != 2 or splats.colors.shape[0] != n:
        raise ValueError(f"colors must have the shape [{n}, channels], got {list(splats.colors.shape)}")
    return Grid(width, height, tile_size)
