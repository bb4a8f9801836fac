"""Factorisations of stacks: right results, and on CPU never a batched LAPACK call (see the module's head)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import lowcomm
from jaxlab.core import linalg
from jaxlab.core.mesh import make_mesh, named, put

SHAPES = [(5, 3), (3, 5), (1, 4), (2, 5, 3), (2, 3, 4, 4), (1, 2, 1)]
STACK = np.random.default_rng(0).normal(size=(6, 5, 3)).astype(np.float32)


def draw(shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_svd(shape):
    a = draw(shape)
    u, s, vt = map(np.asarray, jax.jit(linalg.svd)(a))
    r = min(shape[-2:])
    assert u.shape == (*shape[:-1], r) and s.shape == (*shape[:-2], r) and vt.shape == (*shape[:-2], r, shape[-1])
    np.testing.assert_allclose((u * s[..., None, :]) @ vt, a, atol=2e-6)
    np.testing.assert_allclose(s, np.linalg.svd(a, compute_uv=False), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(linalg.singular_values(jnp.array(a)), s, rtol=1e-5, atol=1e-6)
    for factor in (np.swapaxes(u, -1, -2) @ u, vt @ np.swapaxes(vt, -1, -2)):
        np.testing.assert_allclose(factor, np.broadcast_to(np.eye(r), factor.shape), atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qr(shape):
    a = draw(shape)
    q, r = map(np.asarray, jax.jit(linalg.qr)(a))
    small = min(shape[-2:])
    assert q.shape == (*shape[:-1], small) and r.shape == (*shape[:-2], small, shape[-1])
    np.testing.assert_allclose(q @ r, a, atol=2e-6)
    np.testing.assert_allclose(
        np.swapaxes(q, -1, -2) @ q, np.broadcast_to(np.eye(small), (*shape[:-2], small, small)), atol=2e-6
    )
    np.testing.assert_allclose(np.tril(r, -1), 0)


def test_a_stack_is_its_matrices():
    """Bit for bit: how many matrices there are must not change any of them."""
    for f in (lambda a: linalg.svd(a)[0], lambda a: linalg.qr(a)[0], linalg.singular_values):
        whole = jax.jit(f)(STACK)
        np.testing.assert_array_equal(whole, np.stack([jax.jit(f)(matrix) for matrix in STACK]))
        np.testing.assert_array_equal(whole, jax.jit(jax.vmap(f))(STACK))
        nested = jax.jit(jax.vmap(jax.vmap(f)))(STACK.reshape(2, 3, 5, 3))
        np.testing.assert_array_equal(whole, np.reshape(nested, whole.shape))


def lapack_shapes(function, *arrays):
    """The result shapes of every LAPACK call in the compiled program."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    calls = [line for line in text.splitlines() if "custom-call(" in line and "lapack" in line]
    return [tuple(map(int, filter(None, d.split(",")))) for c in calls for d in re.findall(r"f32\[([\d,]*)\]", c)]


FUNCTIONS = {
    "svd": lambda a: linalg.svd(a),
    "qr": lambda a: linalg.qr(a),
    "singular_values": linalg.singular_values,
    "vmap": jax.vmap(linalg.svd),
    "vmap of vmap": lambda a: jax.vmap(jax.vmap(linalg.svd))(a.reshape(2, 3, 5, 3)),
    "scan": lambda a: jax.lax.scan(lambda c, x: (c, linalg.svd(x)), 0, a.reshape(2, 3, 5, 3)),
    "gradient": jax.grad(lambda a: linalg.svd(a)[0][..., 0, 0].sum() + linalg.qr(a)[1][..., 0, 0].sum()),
    "isotropize": lambda a: lowcomm.polar(a),
    "merging": lambda a: lowcomm.merging.get("tsv_m")({"w": a}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_lapack_call_gets_a_stack(name):
    shapes = lapack_shapes(FUNCTIONS[name], STACK)
    assert shapes and max(map(len, shapes)) == 2


def test_the_check_sees_a_batched_call():
    assert max(map(len, lapack_shapes(lambda a: jnp.linalg.svd(a, full_matrices=False), STACK))) == 3


def test_other_backends_get_one_batched_call():
    """The branch for accelerators is in the program before it is lowered, and holds the whole stack."""
    text = str(jax.make_jaxpr(linalg.svd)(STACK))
    assert re.search(r"f32\[6,5,3\].* = svd\[", text)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 3)], ids=str)
def test_both_modes_of_differentiation(shape):
    """Against finite differences, of what does not depend on the signs of the factors."""
    a, direction = draw(shape), draw((*shape, 2))[..., 0]

    def f(x):
        u, s, vt = linalg.svd(x)
        r = linalg.qr(x)[1]
        return jnp.sum((u * jnp.sin(s)[..., None, :]) @ vt) + linalg.singular_values(x).sum() + jnp.sum(jnp.abs(r))

    slope = (jax.jit(f)(a + 1e-3 * direction) - jax.jit(f)(a - 1e-3 * direction)) / 2e-3
    _, forward = jax.jit(lambda x, t: jax.jvp(f, (x,), (t,)))(a, direction)
    reverse = jnp.vdot(jax.jit(jax.grad(f))(a), direction)
    np.testing.assert_allclose([forward, reverse], slope, rtol=2e-2, atol=2e-2)


def test_many_shapes_on_eight_devices_at_once():
    """Every device factorises stacks of several shapes in the same program: what a round of IsoLoCo on a mesh does."""
    mesh = make_mesh({"worker": 8})
    stacks = [draw((4, m, n)) for m, n in ((32, 32), (16, 48), (48, 16), (8, 24))]
    placed = put(stacks, named(mesh))
    total = jax.jit(lambda arrays: [linalg.singular_values(a).sum() + linalg.svd(a)[1].sum() for a in arrays])
    for _ in range(5):
        found = jax.block_until_ready(total(placed))
    wanted = [2 * np.linalg.svd(a, compute_uv=False).sum() for a in stacks]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
