"""Which Gaussians touch which tiles of an image, front to back, with shapes that do not depend on the data.

A pair (tile, Gaussian) is one 32-bit word, `tile << bits | rank`, where the rank is the Gaussian's place in the order
of depth: sorting the words sorts by tile and then, exactly, by depth.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32


class Grid(NamedTuple):
    """An image cut into square tiles; static.

    Attributes:
      width, height: pixels.
      tile: pixels along the side of a tile.
    """

    width: int
    height: int
    tile: int

    @property
    def across(self) -> int:
        """Tiles of a row."""
        return -(-self.width // self.tile)

    @property
    def down(self) -> int:
        """Tiles of a column."""
        return -(-self.height // self.tile)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.across * self.down


class Lists(NamedTuple):
    """The Gaussians of every tile.

    Attributes:
      rows: Gaussians, by tile and then by depth; what follows the last is padding.
      starts: where the list of every tile starts, and where the last ends.
      total: length of all lists, which may exceed the capacity: then `rows` lacks some of them.
    """

    rows: Int32[Array, " capacity"]
    starts: Int32[Array, " tiles+1"]
    total: Int32[Array, ""]


def rectangles(
    means: Float[Array, "n 2"], radii: Float[Array, "n 2"], grid: Grid
) -> tuple[Int32[Array, "n 2"], Int32[Array, "n 2"]]:
    """(first tile, number of tiles) along x and y that the boxes `means +- radii` overlap; none where a radius is 0."""
    limit = jnp.array([grid.across, grid.down], means.dtype)
    # Clipped before the conversion: an integer cannot hold the place of what lies far outside.
    first = jnp.clip(jnp.floor((means - radii) / grid.tile), 0, limit).astype(jnp.int32)
    last = jnp.clip(jnp.ceil((means + radii) / grid.tile), 0, limit).astype(jnp.int32)
    seen = jnp.all(radii > 0, axis=-1, keepdims=True)
    return first, jnp.where(seen & jnp.all(last > first, axis=-1, keepdims=True), last - first, 0)


def count(means: Float[Array, "n 2"], radii: Float[Array, "n 2"], grid: Grid) -> Int32[Array, ""]:
    """How many pairs of a tile and a Gaussian there are: the capacity that `lists` needs."""
    _, size = rectangles(means, radii, grid)
    return jnp.sum(size[:, 0] * size[:, 1], dtype=jnp.int32)


def lists(
    means: Float[Array, "n 2"],
    radii: Float[Array, "n 2"],
    depths: Float[Array, " n"],
    grid: Grid,
    capacity: int,
) -> Lists:
    """The lists of all tiles.

    Args:
      means: centres, in pixels.
      radii: half sizes of the boxes that hold all that is seen of a Gaussian; 0 for one that is not.
      depths: the order, nearest first; equal ones keep the order of the rows.
      grid: the tiles.
      capacity: length of the static arrays.

    Raises:
      ValueError: when a pair of tile and rank does not fit 32 bits.

    >>> grid = Grid(32, 16, 16)
    >>> found = lists(jnp.array([[8.0, 8.0], [16.0, 8.0]]), jnp.full((2, 2), 4.0), jnp.array([2.0, 1.0]), grid, 4)
    >>> found.rows.tolist(), found.starts.tolist(), int(found.total)
    ([1, 0, 1, 0], [0, 2, 3], 3)
    """
    n = means.shape[0]
    bits = max(n - 1, 1).bit_length()
    if (grid.tiles + 1) << bits > 2**32:
        raise ValueError(
            f"{n} Gaussians and {grid.tiles} tiles do not fit a 32-bit key: render blocks of fewer Gaussians, or use "
            f"a larger tile than {grid.tile}"
        )
    order = jnp.argsort(jnp.where(jnp.all(radii > 0, axis=-1), depths, jnp.inf)).astype(jnp.int32)
    first, size = rectangles(means[order], radii[order], grid)
    number = size[:, 0] * size[:, 1]
    ends = jnp.cumsum(number, dtype=jnp.int32)
    total = ends[-1]
    place = jnp.arange(capacity, dtype=jnp.int32)
    rank = jnp.repeat(jnp.arange(n, dtype=jnp.int32), number, total_repeat_length=capacity)
    within = place - (ends - number)[rank]
    wide = jnp.maximum(size[rank, 0], 1)
    tile = (first[rank, 1] + within // wide) * grid.across + first[rank, 0] + within % wide
    tile = jnp.where(place < total, tile, grid.tiles)
    words: UInt32[Array, " capacity"] = (tile.astype(jnp.uint32) << bits) | rank.astype(jnp.uint32)
    words = jnp.sort(words)
    marks = jnp.arange(grid.tiles + 1, dtype=jnp.uint32) << bits
    starts = jnp.searchsorted(words, marks).astype(jnp.int32)
    rows = order[(words & jnp.uint32((1 << bits) - 1)).astype(jnp.int32)]
    return Lists(rows, starts, total)


def to_tiles(image: Float[Array, "h w *c"] | Bool[Array, "h w"], grid: Grid, fill: float | bool = 0.0) -> Array:
    """`[tiles, tile^2, ...]` of an image, `fill` outside of it."""
    pad = [(0, grid.down * grid.tile - grid.height), (0, grid.across * grid.tile - grid.width)]
    image = jnp.pad(image, pad + [(0, 0)] * (image.ndim - 2), constant_values=fill)
    image = image.reshape(grid.down, grid.tile, grid.across, grid.tile, *image.shape[2:])
    return jnp.moveaxis(image, 2, 1).reshape(grid.tiles, grid.tile**2, *image.shape[4:])


def to_image(x: Array, grid: Grid) -> Array:
    """The inverse of `to_tiles`."""
    x = x.reshape(grid.down, grid.across, grid.tile, grid.tile, *x.shape[2:])
    x = jnp.moveaxis(x, 1, 2).reshape(grid.down * grid.tile, grid.across * grid.tile, *x.shape[4:])
    return x[: grid.height, : grid.width]
