"""Images of a scene: colour, alpha and depth, from any number of Gaussians in one pass."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxlab.kernels.splat_raster import tiles
from jaxlab.kernels.splat_raster.api import splat_raster
from jaxlab.splat.gaussians import Camera, Gaussians, check_gaussians
from jaxlab.splat.projection import Projection, project

SMALLEST_CAPACITY = 2**10


class Image(NamedTuple):
    """What `render` gives.

    Attributes:
      color: over the background.
      alpha: 1 - transmittance.
      depth: sum of T alpha z; over `alpha`, the expected depth.
      total: pairs of a tile and a Gaussian; above the capacity, everything is NaN.
      visible: Gaussians that touch the image.
      invalid: Gaussians with numbers that are not finite or too large, which are not shown.
    """

    color: Float[Array, "h w 3"]
    alpha: Float[Array, "h w"]
    depth: Float[Array, "h w"]
    total: Int32[Array, ""]
    visible: Bool[Array, " n"]
    invalid: Int32[Array, ""]


class Options(NamedTuple):
    """How to render; static.

    Attributes:
      degree: of the spherical harmonics to use; None for all that there are.
      eps2d: pixels^2 added to the variance in the image.
      antialiased: see `project`.
      tile_size: pixels along the side of a tile.
      implementation, interpret: see `splat_raster`.
    """

    degree: int | None = None
    eps2d: float = 0.3
    antialiased: bool = False
    tile_size: int = 16
    implementation: str | None = None
    interpret: bool = False


DEFAULT = Options()


def _project(g: Gaussians, camera: Camera, options: Options, **rest: Array | None) -> Projection:
    return project(g, camera, degree=options.degree, eps2d=options.eps2d, antialiased=options.antialiased, **rest)


@functools.partial(jax.jit, static_argnames=("options",))
def capacity_for(g: Gaussians, camera: Camera, options: Options = DEFAULT) -> Int32[Array, ""]:
    """How many pairs of a tile and a Gaussian a view has."""
    splats = _project(g, camera, options).splats
    return tiles.count(splats.means, splats.radii, tiles.Grid(camera.width, camera.height, options.tile_size))


def render(
    g: Gaussians,
    camera: Camera,
    *,
    background: Float[Array, "..."] | None = None,
    capacity: int | None = None,
    options: Options = DEFAULT,
    offsets: Float[Array, "n 2"] | None = None,
) -> Image:
    """Renders a view; differentiable in the Gaussians, the camera and the background.

    Args:
      g: the scene.
      camera: who looks.
      background: colour behind everything; black by default.
      capacity: pairs of a tile and a Gaussian there is room for. None measures what this view needs, which wants values
        and so works outside of `jax.jit` only.
      options: how.
      offsets: see `project`.

    Returns:
      An `Image`; all NaN where the capacity does not suffice.

    Raises:
      ValueError: for arrays that do not belong together, and `capacity=None` where values are traced.

    Source: Kerbl et al., "3D Gaussian Splatting for Real-Time Radiance Field Rendering" (2023).

    >>> import numpy as np
    >>> from jaxlab.splat.gaussians import camera, from_points
    >>> g = from_points(np.zeros((1, 3)), np.ones((1, 3)), degree=0, opacity=0.9)
    >>> view = np.eye(4); view[2, 3] = 5.0
    >>> found = render(g, camera(view, [[20, 0, 8], [0, 20, 8], [0, 0, 1]], 16, 16))
    >>> found.color.shape, round(float(found.alpha[8, 8]), 2), round(float(found.depth[8, 8] / found.alpha[8, 8]), 2)
    ((16, 16, 3), 0.89, 5.0)
    """
    check_gaussians(g)
    behind = jnp.zeros(3, g.means.dtype) if background is None else jnp.asarray(background, g.means.dtype)
    if behind.shape != (3,):
        raise ValueError(f"background must have the shape [3], got {list(behind.shape)}")
    if capacity is None:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((g, camera))):
            raise ValueError("capacity must be given where values are traced: it is the size of arrays")
        need = int(capacity_for(g, camera, options))
        capacity = max(SMALLEST_CAPACITY, 1 << max(need - 1, 1).bit_length())
    return _render(g, camera, behind, offsets, capacity, options)


@functools.partial(jax.jit, static_argnames=("capacity", "options"))
def _render(
    g: Gaussians,
    camera: Camera,
    background: Float[Array, "3"],
    offsets: Float[Array, "n 2"] | None,
    capacity: int,
    options: Options,
) -> Image:
    found = _project(g, camera, options, offsets=offsets)
    splats = found.splats
    splats = splats._replace(colors=jnp.concatenate([splats.colors, splats.depths[:, None]], axis=1))
    out = splat_raster(
        splats,
        camera.width,
        camera.height,
        capacity=capacity,
        tile_size=options.tile_size,
        implementation=options.implementation,
        interpret=options.interpret,
    )
    color = out.color[..., :3] + out.transmittance[..., None] * background
    return Image(color, 1 - out.transmittance, out.color[..., 3], out.total, found.visible, found.invalid)
