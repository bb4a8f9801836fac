"""Rendering: against brute force, published pixels, finite differences, and numbers that are no numbers."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.splat.gaussians import Gaussians, camera, from_points, look_at
from jaxlab.splat.projection import harmonics, project
from jaxlab.splat.render import Options, render
from tests.splat.scenes import random_scene, ring

BRUTE = Options(implementation="reference")
DEFAULT = Options()
CAPACITY = 4096


def scalar(g, cam, options=DEFAULT, background=None, weights=0):
    """Some number that depends on all pixels of colour, alpha and depth."""
    out = render(g, cam, capacity=CAPACITY, options=options, background=background)
    rng = np.random.default_rng(weights)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return sum(jnp.sum(x * draw(x)) for x in (out.color, out.alpha, 0.1 * out.depth))


def test_pixels_of_another_renderer():
    path = Path(__file__).parents[2].parent / "shared/data/splat/tiny_case.safetensors"
    numpy = pytest.importorskip("safetensors.numpy")
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    data = {k: jnp.asarray(v) for k, v in numpy.load_file(path).items()}
    g = Gaussians(
        data["means"], data["quats"], data["scales"], data["opacities"], data["coeffs"][:, :1], data["coeffs"][:, 1:]
    )
    height, width = data["out_img"].shape[:2]
    view = np.eye(4)
    view[:3, 3] = [-0.123, -0.456, 8]
    found = render(g, camera(view, [[width / 2, 0, width / 2], [0, width / 2, height / 2], [0, 0, 1]], width, height))
    np.testing.assert_allclose(found.color, data["out_img"][..., :3], atol=2e-6)
    np.testing.assert_allclose(found.alpha, data["out_img"][..., 3], atol=2e-6)


@pytest.mark.parametrize(("width", "height", "tile"), [(50, 37, 16), (1, 1, 16), (32, 32, 16), (33, 9, 8)])
def test_tiles_equal_brute_force(width, height, tile):
    g, cam = random_scene(), ring(1, width, height)[0]
    assert_equal_images(g, cam, Options(tile_size=tile))


def assert_equal_images(g, cam, options):
    brute = options._replace(implementation="reference")
    a, b = (render(g, cam, capacity=CAPACITY, options=o) for o in (options, brute))
    for x, y in zip(a[:3], b[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)
    da, db = (jax.jit(jax.grad(scalar), static_argnums=2)(g, cam, o) for o in (options, brute))
    for name, x, y in zip(g._fields, da, db, strict=True):
        assert np.linalg.norm(x - y) <= 1e-4 * np.linalg.norm(y) + 1e-7, name


def test_pixels_that_are_ended():
    """Opaque layers: the stop rule acts in most pixels, and what lies behind gets no gradient."""
    g = random_scene(40)._replace(
        logit_opacities=jnp.full(40, 8.0), log_scales=jnp.tile(jnp.array([0, -0.5, 0.3]), (40, 1))
    )
    cam = ring(1)[0]
    assert float(render(g, cam).alpha.mean()) > 0.99
    assert_equal_images(g, cam, Options())


def test_one_gaussian_and_none():
    cam = ring(1)[0]
    for n in (1, 0):
        g = jax.tree.map(lambda x, n=n: x[:n], random_scene())
        assert_equal_images(g, cam, Options())
    out = render(g, cam, background=jnp.array([0.1, 0.2, 0.3]))
    np.testing.assert_allclose(out.color[5, 5], [0.1, 0.2, 0.3])


def test_nothing_in_view_is_background_with_no_gradient():
    g = random_scene()._replace(means=jnp.full((60, 3), 100.0))
    cam = ring(1)[0]
    assert not render(g, cam).visible.any()
    for x in jax.tree.leaves(jax.grad(scalar)(g, cam)):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("degree", [0, 3])
def test_gradients_are_finite_differences(degree, antialiased):
    with jax.enable_x64(True):
        g = random_scene(12, degree, dtype=jnp.float64)
        cam = ring(1, 20, 17, dtype=jnp.float64)[0]
        background = jnp.array([0.3, 0.1, 0.6])
        f = jax.jit(
            lambda g, pose, k, b: scalar(g, camera_with(cam, pose, k), Options(antialiased=antialiased), background=b)
        )
        point = (g, jnp.zeros(6), cam.K, background)
        slope = jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*point)
        rng = np.random.default_rng(1)
        leaves, treedef = jax.tree.flatten(point)
        for i, leaf in enumerate(leaves):
            if leaf.size == 0:
                continue
            way = rng.normal(size=leaf.shape)
            if leaf.shape == (3, 3):
                way = way * (np.asarray(leaf) > 1)  # only what an intrinsic matrix may differ in
            h = 1e-6
            moved = [treedef.unflatten([*leaves[:i], leaf + s * h * way, *leaves[i + 1 :]]) for s in (1, -1)]
            numeric = (f(*moved[0]) - f(*moved[1])) / (2 * h)
            analytic = jnp.sum(jax.tree.leaves(slope)[i] * way)
            np.testing.assert_allclose(analytic, numeric, rtol=2e-4, atol=1e-5 * float(jnp.linalg.norm(leaf) + 1))


def camera_with(cam, twist, k):
    """The camera moved by a small rotation and translation, with other intrinsics."""
    x, y, z = twist[:3]
    skew = jnp.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    motion = jnp.eye(4).at[:3, :3].add(skew + skew @ skew / 2).at[:3, 3].set(twist[3:])
    return cam.__class__(motion @ cam.viewmat, k, cam.width, cam.height, cam.near, cam.far)


def test_the_direction_of_view_has_a_gradient():
    """With harmonics of a degree above 0, moving a mean turns the direction from which it is seen."""
    g = random_scene(3, 3)._replace(sh0=jnp.ones((3, 1, 3)))
    cam = ring(1)[0]

    def color(means):
        return jnp.sum(project(g._replace(means=means), cam).splats.colors[0])

    assert np.linalg.norm(jax.grad(color)(g.means)[0]) > 1e-2


def test_harmonics_are_orthonormal():
    """Over the sphere, by a product rule that is exact for their products."""
    z, weight = np.polynomial.legendre.leggauss(8)
    angle = 2 * np.pi * np.arange(16) / 16
    ring_of = np.sqrt(1 - z * z)[:, None]
    d = np.stack([ring_of * np.cos(angle), ring_of * np.sin(angle), np.repeat(z[:, None], 16, 1)], -1).reshape(-1, 3)
    basis = np.asarray(harmonics(jnp.asarray(d), 3))
    gram = basis.T @ (basis * np.repeat(weight * 2 * np.pi / 16, 16)[:, None])
    np.testing.assert_allclose(gram, np.eye(16), atol=1e-5)


def test_only_the_direction_of_a_quaternion_matters():
    g, cam = random_scene(10), ring(1)[0]
    slope = jax.grad(scalar)(g, cam).quats
    np.testing.assert_allclose(jnp.sum(slope * g.quats, -1), 0, atol=1e-4 * float(jnp.abs(slope).max()))
    a, b = (scalar(g._replace(quats=s * g.quats), cam) for s in (1.0, 3.0))
    np.testing.assert_allclose(a, b, rtol=1e-4)


def test_a_capacity_that_does_not_suffice_is_seen():
    g, cam = random_scene(), ring(1)[0]
    need = int(render(g, cam).total)
    assert np.isfinite(render(g, cam, capacity=need).color).all()
    out = render(g, cam, capacity=need - 1)
    assert np.isnan(out.color).all() and int(out.total) == need


def test_vmap_over_views_equals_a_loop():
    g, cams = random_scene(), ring(3)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *cams)
    images = jax.vmap(lambda c: render(g, c, capacity=CAPACITY).color)(stacked)
    for image, cam in zip(images, cams, strict=True):
        np.testing.assert_allclose(image, render(g, cam, capacity=CAPACITY).color, atol=1e-5)


def test_opaque_gaussians_show():
    """Two opaque layers in one pixel: the first has alpha 0.99, the second is where the stop rule's bound lies."""
    points, colors = np.array([[0, 0, 0], [0, 0, 1.0]]), np.array([[1.0, 0, 0], [0, 1.0, 0]])
    g = from_points(points, colors, degree=0, opacity=0.999999)
    view = np.eye(4)
    view[2, 3] = 4.0
    cam = camera(view, [[100, 0, 8], [0, 100, 8], [0, 0, 1]], 16, 16)
    out = render(g, cam)
    np.testing.assert_allclose(out.color[8, 8], [0.99, 0.0, 0.0], atol=0.011)
    assert_equal_images(g, cam, Options())


POISON = [np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-40, 0.0, 1e10, 16.0, 1 / 255, 0.01]


@pytest.mark.parametrize("field", Gaussians._fields)
def test_poison_never_gives_nan(field):
    """Poisoned rows are not shown, or shown with finite numbers; other rows render as if they were alone."""
    g, cam = random_scene(30, 1), ring(1)[0]
    slope = jax.jit(jax.grad(scalar))
    for value in POISON:
        x = getattr(g, field)
        bad = g._replace(**{field: x.at[: min(5, x.shape[0])].set(value)})
        out = render(bad, cam, capacity=2**14)
        assert not any(np.isnan(y).any() for y in out[:3]), value
        if not np.isfinite(value) and wrong_in(field, value):
            assert int(out.invalid) == 5
        for name, y in zip(g._fields, slope(bad, cam), strict=True):
            assert np.isfinite(y).all(), (value, name)


def wrong_in(field, value):
    """An opacity of 0 or 1 and an axis without extent are meaningful limits."""
    return np.isnan(value) or (field != "logit_opacities" and not (field == "log_scales" and value < 0))


def test_zero_quaternions_are_counted():
    g, cam = random_scene(10), ring(1)[0]
    assert int(render(g._replace(quats=g.quats.at[:3].set(0)), cam).invalid) == 3


def test_smaller_than_a_pixel_is_not_brighter():
    """Antialiased, the light of a small Gaussian does not depend on how far the camera is, but for its solid angle."""
    g = from_points(np.zeros((1, 3)), np.ones((1, 3)), degree=0, opacity=0.5)
    g = g._replace(log_scales=jnp.full((1, 3), np.log(0.05)))
    light = {}
    for mip in (False, True):
        for distance in (4.0, 16.0):
            view = np.eye(4)
            view[2, 3] = distance
            cam = camera(view, [[100, 0, 32.5], [0, 100, 32.5], [0, 0, 1]], 65, 65)
            image = render(g, cam, options=Options(antialiased=mip)).color
            light[mip, distance] = float(image.sum()) * distance**2
    assert abs(light[True, 16.0] / light[True, 4.0] - 1) < 0.15
    assert light[False, 16.0] / light[False, 4.0] > 2


def test_bad_input():
    g, cam = random_scene(5), ring(1)[0]
    for change, message in (
        ({"means": g.means[:4]}, "quats must have the shape"),
        ({"shN": g.shN[:, :5]}, "shN must have the shape"),
        ({"quats": g.quats[:, :3]}, "quats must have the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            render(g._replace(**change), cam)
    with pytest.raises(TypeError, match="sh0 must be floating"):
        render(g._replace(sh0=g.sh0.astype(jnp.float16)), cam)
    with pytest.raises(ValueError, match="capacity must be given"):
        jax.jit(lambda g: render(g, cam).color)(g)
    with pytest.raises(ValueError, match="background must have the shape"):
        render(g, cam, background=jnp.zeros(4))
    with pytest.raises(ValueError, match="degree must be 0 to 2"):
        render(g, cam, options=Options(degree=3))
    with pytest.raises(ValueError, match="implementation must be"):
        render(g, cam, options=Options(implementation="cuda"))
    make = functools.partial(camera, width=8, height=8)
    k = np.array([[10.0, 0, 4], [0, 10, 4], [0, 0, 1]])
    for view, matrix, message in (
        (np.eye(3), k, "viewmat must have the shape"),
        (2 * np.eye(4), k, "viewmat must be a rotation"),
        (np.full((4, 4), np.nan), k, "viewmat must be finite"),
        (np.eye(4), k + np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]]), "without skew"),
        (np.eye(4), -k, "focal lengths > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make(view, matrix)
    with pytest.raises(ValueError, match="width must be an integer"):
        camera(np.eye(4), k, 0, 8)
    with pytest.raises(ValueError, match="target must lie"):
        look_at([0, 0, 1], [0, 0, 0])
    with pytest.raises(ValueError, match="points must have the shape"):
        from_points(np.zeros((0, 3)), np.zeros((0, 3)))
