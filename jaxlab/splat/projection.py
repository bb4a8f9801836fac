"""Gaussians in the image plane of a camera: means, conics, colours, and what is not seen at all.

    p = R x + t     Sigma' = J R Sigma R' J' + eps I      conic = Sigma'^-1      colour = max(sum_k Y_k(d) c_k + 1/2, 0)

J is the derivative of the projection at p, with p clamped to somewhat more than the field of view; d is the direction
from the camera to the mean, whose gradient is kept. Rows that are not finite, and rows outside of what float32 can
square, are not shown and have no gradient; `Projection.invalid` counts them.

Source: Kerbl et al., "3D Gaussian Splatting" (2023), sections 4 and 5; Zwicker et al., "EWA splatting" (2002); the
opacity of `antialiased`: Yu et al., "Mip-Splatting" (2024), section 4.2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxlab.kernels.splat_raster.api import Splats
from jaxlab.splat.gaussians import Camera, Gaussians

LARGEST = 1e8  # of a mean or a coefficient
LARGEST_LOG_SCALE = 18.0
REACH = 3.33  # standard deviations beyond which alpha < 1/255 whatever the opacity
MARGIN = 0.3  # of tan(fov / 2), by which J's clamp exceeds the image
VISIBLE = 1 / 255


class Projection(NamedTuple):
    """Gaussians as a camera sees them.

    Attributes:
      splats: what is rasterised, a row a Gaussian; with a radius of 0 where it is not seen.
      invalid: rows that hold numbers which are not finite, or too large.
    """

    splats: Splats
    invalid: Int32[Array, ""]

    @property
    def visible(self) -> Bool[Array, " n"]:
        """Rows that touch the image."""
        return jnp.all(self.splats.radii > 0, axis=-1)


def rotation_of(quats: Float[Array, "n 4"]) -> Float[Array, "n 3 3"]:
    """Rotation matrices of quaternions w, x, y, z of any length but 0.

    >>> rotation_of(jnp.array([[0.0, 0.0, 0.0, 2.0]])).tolist()
    [[[-1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 1.0]]]
    """
    w, x, y, z = jnp.moveaxis(quats / jnp.linalg.norm(quats, axis=-1, keepdims=True), -1, 0)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def harmonics(directions: Float[Array, "n 3"], degree: int) -> Float[Array, "n k"]:
    """The real spherical harmonics of degree 0 to `degree` <= 3 at unit vectors, with the signs that 3DGS uses.

    >>> harmonics(jnp.array([[0.0, 0.0, 1.0]]), 1)[0].round(4).tolist()
    [0.28209999203681946, -0.0, 0.4885999858379364, -0.0]
    """
    x, y, z = jnp.moveaxis(directions, -1, 0)
    found = [jnp.full_like(x, 0.28209479177387814)]
    if degree > 0:
        c = 0.4886025119029199
        found += [-c * y, c * z, -c * x]
    if degree > 1:
        xx, yy, zz = x * x, y * y, z * z
        found += [
            1.0925484305920792 * x * y,
            -1.0925484305920792 * y * z,
            0.31539156525252005 * (2 * zz - xx - yy),
            -1.0925484305920792 * x * z,
            0.5462742152960396 * (xx - yy),
        ]
    if degree > 2:
        found += [
            -0.5900435899266435 * y * (3 * xx - yy),
            2.890611442640554 * x * y * z,
            -0.4570457994644658 * y * (4 * zz - xx - yy),
            0.3731763325901154 * z * (2 * zz - 3 * xx - 3 * yy),
            -0.4570457994644658 * x * (4 * zz - xx - yy),
            1.445305721320277 * z * (xx - yy),
            -0.5900435899266435 * x * (xx - 3 * yy),
        ]
    return jnp.stack(found, axis=-1)


def _valid(g: Gaussians) -> Bool[Array, " n"]:
    """Rows of finite numbers, whose squares and products are finite too."""
    fine = jnp.all(jnp.abs(g.means) < LARGEST, axis=1) & jnp.all(jnp.isfinite(g.quats), axis=1)
    length = jnp.max(jnp.abs(g.quats), axis=1)
    fine &= (length > 1e-15) & (length < 1e15)
    fine &= jnp.all(g.log_scales < LARGEST_LOG_SCALE, axis=1) & ~jnp.isnan(g.logit_opacities)
    for x in (g.sh0, g.shN):
        fine &= jnp.all(jnp.abs(x) < LARGEST, axis=(1, 2))
    return fine


def _safe(g: Gaussians, rows: Bool[Array, " n"], forward: Float[Array, "3"], eye: Float[Array, "3"]) -> Gaussians:
    """The same, with a harmless Gaussian before the camera where a row is not shown: its gradient is 0, not NaN."""
    put = lambda x, value: jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, value)  # noqa: E731
    return Gaussians(
        put(g.means, jax.lax.stop_gradient(eye + forward)),
        put(g.quats, jnp.array([1, 0, 0, 0], g.quats.dtype)),
        # An axis without extent is fine; minus infinity is not a number that has a gradient.
        jnp.maximum(put(g.log_scales, 0), -40.0),
        put(g.logit_opacities, 0),
        put(g.sh0, 0),
        put(g.shN, 0),
    )


def project(
    g: Gaussians,
    camera: Camera,
    *,
    mask: Bool[Array, " n"] | None = None,
    degree: int | None = None,
    eps2d: float = 0.3,
    antialiased: bool = False,
    offsets: Float[Array, "n 2"] | None = None,
) -> Projection:
    """Projects Gaussians; differentiable in all of them, and in the camera's pose and intrinsics.

    Args:
      g: the Gaussians.
      camera: who looks.
      mask: rows to take; None for all.
      degree: of the spherical harmonics to use; None for all that there are.
      eps2d: pixels^2 that are added to the variance along both axes.
      antialiased: whether to lower the opacity by sqrt(det Sigma' / det(Sigma' + eps I)), so that a Gaussian smaller
        than a pixel is not brighter for the `eps2d`.
      offsets: pixels that are added to the means; the gradient by zeros is that by the means.

    Returns:
      A `Projection`.
    """
    degree = g.degree if degree is None else degree
    if not 0 <= degree <= g.degree:
        raise ValueError(f"degree must be 0 to {g.degree}, that of the coefficients, got {degree}")
    view, k = camera.viewmat, camera.K
    rotation, shift = view[:3, :3], view[:3, 3]
    eye = -rotation.T @ shift
    taken = jnp.ones(g.count, bool) if mask is None else mask
    valid = _valid(g)
    depths = jnp.where(valid[:, None], g.means, 0) @ rotation[2] + shift[2]
    front = valid & taken & (depths > camera.near) & (depths < camera.far)
    near = 2 * camera.near if camera.near > 0.5 else 1.0
    safe = _safe(g, front, near * rotation[2], eye)
    points = safe.means @ rotation.T + shift
    x, y, z = jnp.moveaxis(points, -1, 0)
    fx, fy, cx, cy = k[0, 0], k[1, 1], k[0, 2], k[1, 2]
    means = jnp.stack([fx * x / z + cx, fy * y / z + cy], axis=-1)
    means = means if offsets is None else means + offsets
    # J is linear in x / z, which is clamped: far outside of the image the linearisation is meaningless.
    ratio = []
    for v, f, c, size in ((x / z, fx, cx, camera.width), (y / z, fy, cy, camera.height)):
        margin = MARGIN * 0.5 * size / f
        ratio.append(jnp.clip(v, -(c / f + margin), (size - c) / f + margin))
    zero = jnp.zeros_like(z)
    jacobian = jnp.stack(
        [jnp.stack([fx / z, zero, -fx * ratio[0] / z], -1), jnp.stack([zero, fy / z, -fy * ratio[1] / z], -1)], -2
    )
    half = jacobian @ (rotation @ (rotation_of(safe.quats) * jnp.exp(safe.log_scales)[:, None, :]))
    a = jnp.sum(half[:, 0] ** 2, -1)
    b = jnp.sum(half[:, 0] * half[:, 1], -1)
    c = jnp.sum(half[:, 1] ** 2, -1)
    wide_a, wide_c = a + eps2d, c + eps2d
    # By the cross product, not as a c - b^2, which cancels for thin Gaussians.
    cross = jnp.cross(half[:, 0], half[:, 1])
    narrow = jnp.sum(cross * cross, -1)
    det = narrow + eps2d * (a + c) + eps2d * eps2d
    opacities = jax.nn.sigmoid(safe.logit_opacities)
    if antialiased:
        opacities = opacities * jnp.sqrt(jnp.maximum(narrow / det, 0.005**2))
    conics = jnp.stack([wide_c / det, -b / det, wide_a / det], axis=-1)
    towards = safe.means - eye
    towards = towards / jnp.linalg.norm(towards, axis=-1, keepdims=True)
    basis = harmonics(towards, degree)
    colors = basis[:, :1] * safe.sh0[:, 0] + jnp.einsum("nk,nkc->nc", basis[:, 1:], safe.shN[:, : basis.shape[1] - 1])
    colors = jnp.maximum(colors + 0.5, 0)
    reach = jnp.minimum(REACH, jnp.sqrt(jnp.maximum(2 * jnp.log(opacities / VISIBLE), 0)))
    radii = jnp.ceil(reach[:, None] * jnp.sqrt(jnp.stack([wide_a, wide_c], -1)))
    inside = jnp.all((means + radii > 0) & (means - radii < jnp.array([camera.width, camera.height])), axis=-1)
    shown = front & inside & (opacities >= VISIBLE) & jnp.isfinite(det)
    radii = jax.lax.stop_gradient(jnp.where(shown[:, None], radii, 0))
    splats = Splats(means, conics, opacities, colors, radii, z)
    return Projection(splats, jnp.sum(taken & ~valid).astype(jnp.int32))
