"""A scene of 3D Gaussians: unconstrained parameters, and a camera that looks at them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

COEFFICIENTS = (1, 4, 9, 16)  # of spherical harmonics of degree 0, 1, 2, 3


class Gaussians(NamedTuple):
    """N Gaussians; every number may take any value, so an optimizer needs no constraints.

    Attributes:
      means: centres, in the scene's units.
      quats: rotations w, x, y, z, of any length but 0.
      log_scales: logarithms of the standard deviations along the Gaussian's own axes.
      logit_opacities: logits of the opacity at the centre.
      sh0: coefficients of the constant spherical harmonic, red, green, blue.
      shN: coefficients of the others, `K - 1` of them for K = 1, 4, 9 or 16.
    """

    means: Float[Array, "n 3"]
    quats: Float[Array, "n 4"]
    log_scales: Float[Array, "n 3"]
    logit_opacities: Float[Array, " n"]
    sh0: Float[Array, "n 1 3"]
    shN: Float[Array, "n k 3"]

    @property
    def count(self) -> int:
        """N."""
        return self.means.shape[0]

    @property
    def degree(self) -> int:
        """Of the spherical harmonics."""
        return COEFFICIENTS.index(self.shN.shape[1] + 1)


def check_gaussians(g: Gaussians) -> None:
    """Checks shapes and dtypes.

    Raises:
      ValueError: naming the field whose shape does not fit the others.
      TypeError: for a field that is not floating, or of another dtype than the means.
    """
    n = g.means.shape[0] if g.means.ndim else 0
    shapes = {"means": (n, 3), "quats": (n, 4), "log_scales": (n, 3), "logit_opacities": (n,), "sh0": (n, 1, 3)}
    for name, shape in shapes.items():
        got = tuple(getattr(g, name).shape)
        if got != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, got {list(got)}")
    rest = tuple(g.shN.shape)
    if len(rest) != 3 or rest[0] != n or rest[2] != 3 or rest[1] + 1 not in COEFFICIENTS:
        raise ValueError(f"shN must have the shape [{n}, 0 or 3 or 8 or 15, 3] (K = 1, 4, 9, 16), got {list(rest)}")
    for name, x in g._asdict().items():
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype != g.means.dtype:
            raise TypeError(f"{name} must be floating, of one dtype with means ({g.means.dtype}), got {x.dtype}")


def from_points(
    points: Float[np.ndarray, "n 3"],
    colors: Float[np.ndarray, "n 3"],
    *,
    degree: int = 3,
    opacity: float = 0.1,
) -> Gaussians:
    """Gaussians at points, round, as wide as the mean distance to the three nearest other points.

    Args:
      points: centres.
      colors: in [0, 1].
      degree: of the spherical harmonics, 0 to 3.
      opacity: of all of them.

    Raises:
      ValueError: for no points, values that are not finite, colours outside of [0, 1], or another degree.

    Source: the initialisation of Kerbl et al., "3D Gaussian Splatting" (2023), section 5.1.

    >>> g = from_points(np.eye(3), np.full((3, 3), 0.5), degree=1)
    >>> g.count, g.degree, round(float(jnp.exp(g.log_scales[0, 0])), 4)
    (3, 1, 1.4142)
    """
    from scipy.spatial import cKDTree

    points, colors = np.asarray(points, np.float32), np.asarray(colors, np.float32)
    if points.ndim != 2 or points.shape[1:] != (3,) or len(points) == 0:
        raise ValueError(f"points must have the shape [n >= 1, 3], got {list(points.shape)}")
    if colors.shape != points.shape:
        raise ValueError(f"colors must have the shape {list(points.shape)} of the points, got {list(colors.shape)}")
    if not np.isfinite(points).all():
        raise ValueError("points must be finite")
    if not ((colors >= 0) & (colors <= 1)).all():
        raise ValueError("colors must be in [0, 1]")
    if degree not in range(len(COEFFICIENTS)):
        raise ValueError(f"degree must be 0, 1, 2 or 3, got {degree!r}")
    if not 0 < opacity < 1:
        raise ValueError(f"opacity must be in (0, 1), got {opacity}")
    n, near = len(points), min(3, len(points) - 1)
    size = np.full(n, 1.0)
    if near:
        found, _ = cKDTree(points).query(points, k=near + 1)
        size = np.sqrt(np.maximum((np.asarray(found)[:, 1:] ** 2).mean(1), 1e-14))
    quats = np.zeros((n, 4), np.float32)
    quats[:, 0] = 1
    return Gaussians(
        *map(
            jnp.asarray,
            (
                points,
                quats,
                np.repeat(np.log(size, dtype=np.float64).astype(np.float32)[:, None], 3, 1),
                np.full(n, np.log(opacity / (1 - opacity)), np.float32),
                ((colors - 0.5) / SH_C0)[:, None].astype(np.float32),
                np.zeros((n, COEFFICIENTS[degree] - 1, 3), np.float32),
            ),
        )
    )


SH_C0 = 0.28209479177387814  # 1 / (2 sqrt(pi))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["viewmat", "K"], meta_fields=["width", "height", "near", "far"]
)
@dataclasses.dataclass(frozen=True)
class Camera:
    """A pinhole camera in OpenCV's axes: x right, y down, z forward.

    Attributes:
      viewmat: world to camera, `[4, 4]`.
      K: `[[fx, 0, cx], [0, fy, cy], [0, 0, 1]]`, in pixels; the centre of the first pixel is (0.5, 0.5).
      width, height: of the image, in pixels.
      near, far: depths between which a Gaussian's centre is seen.
    """

    viewmat: Any  # not annotated as arrays: tree functions put structs and batch axes here
    K: Any
    width: int
    height: int
    near: float = 0.01
    far: float = 1e10


def camera(
    viewmat: Any, K: Any, width: int, height: int, *, near: float = 0.01, far: float = 1e10, dtype: Any = jnp.float32
) -> Camera:
    """A checked `Camera`.

    Raises:
      ValueError: for shapes, sizes, a viewmat that is no rigid motion, or a K with skew or a focal length <= 0.

    >>> camera(np.eye(4), [[50, 0, 32], [0, 50, 24], [0, 0, 1]], 64, 48).width
    64
    """
    view, k = np.asarray(viewmat, np.float64), np.asarray(K, np.float64)
    for name, x, size in (("viewmat", view, 4), ("K", k, 3)):
        if x.shape != (size, size):
            raise ValueError(f"{name} must have the shape [{size}, {size}], got {list(x.shape)}")
        if not np.isfinite(x).all():
            raise ValueError(f"{name} must be finite")
    rotation = view[:3, :3]
    if np.abs(rotation @ rotation.T - np.eye(3)).max() > 1e-3 or np.linalg.det(rotation) < 0:
        raise ValueError(f"viewmat must be a rotation and a translation, got the linear part {rotation.tolist()}")
    if np.abs(view[3] - [0, 0, 0, 1]).max() > 1e-6:
        raise ValueError(f"viewmat must end with the row [0, 0, 0, 1], got {view[3].tolist()}")
    if k[0, 0] <= 0 or k[1, 1] <= 0:
        raise ValueError(f"K must have focal lengths > 0, got {k[0, 0]} and {k[1, 1]}")
    if abs(k[0, 1]) > 1e-6 or np.abs(k[1:, 0]).max() > 1e-6 or np.abs(k[2] - [0, 0, 1]).max() > 1e-6:
        raise ValueError(f"K must be [[fx, 0, cx], [0, fy, cy], [0, 0, 1]] without skew, got {k.tolist()}")
    for name, value in (("width", width), ("height", height)):
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if not 0 < near < far:
        raise ValueError(f"near and far must be 0 < near < far, got {near} and {far}")
    return Camera(jnp.asarray(view, dtype), jnp.asarray(k, dtype), int(width), int(height), float(near), float(far))


def look_at(eye: Any, target: Any, up: Any = (0.0, 0.0, 1.0)) -> Float[np.ndarray, "4 4"]:
    """The viewmat of a camera at `eye` that looks at `target`, with `up` upwards in the image.

    Raises:
      ValueError: when `target` is `eye`, or lies along `up` from it.

    >>> look_at([0, -2, 0], [0, 0, 0])[:3, 3].tolist()
    [0.0, 0.0, 2.0]
    """
    eye, target, up = (np.asarray(x, np.float64) for x in (eye, target, up))
    forward = target - eye
    right = np.cross(forward, up)
    if np.linalg.norm(forward) == 0 or np.linalg.norm(right) < 1e-9 * np.linalg.norm(forward) * np.linalg.norm(up):
        raise ValueError(f"target must lie in another direction from eye than up, got {eye}, {target} and {up}")
    forward, right = forward / np.linalg.norm(forward), right / np.linalg.norm(right)
    rotation = np.stack([right, np.cross(forward, right), forward])
    view = np.eye(4)
    view[:3, :3], view[:3, 3] = rotation, -rotation @ eye
    return view + 0.0
