"""What all methods have in common, one table of methods through the same tests."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab import peft
from jaxlab.core import mesh as meshes
from jaxlab.core import tree
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.errors import CheckpointError
from tests.peft.small import KEY, METHODS, PARAMS, VARIANTS, M, N, X, close, distance, f, start, trained

every_method = pytest.mark.parametrize("name", METHODS)
mainly = pytest.mark.parametrize("name", [pytest.param(k, marks=[pytest.mark.slow] * (k in VARIANTS)) for k in METHODS])
# Nothing of a kernel's start is a difference of rounded numbers but in these, where Q R or U S V^T comes in.
NOOP = {"dora": 1e-6}
# Products of many factors, whose size the noise of `trained` does not bound.
FROZEN = {"lora_fa", "vera", "pissa", "pissa_fast", "milora", "cora", "cora_expm", "cora_slice", "cora_ragged"}


@every_method
def test_the_start_changes_nothing(name):
    state = start(METHODS[name][0])
    assert distance(peft.merge(PARAMS, state), PARAMS) <= NOOP.get(name, 0)
    assert distance(jax.jit(peft.adapt(f))(PARAMS, state, X), f(PARAMS, X)) <= 1e-6
    for path in state.spec.paths:
        assert float(jnp.abs(peft.delta(PARAMS, state, path)).max()) <= NOOP.get(name, 0)


@every_method
def test_numbers_are_as_many_as_the_formula_says(name):
    method, count = METHODS[name]
    state = start(method)
    assert state.spec["in/kernel"].count == method.count(N, M) == tree.size(state.trainable["in/kernel"]) == count(N, M)
    assert state.spec["out/kernel"].count == tree.size(state.trainable["out/kernel"]) == count(M, N)
    assert peft.size(state) == state.spec.count == count(N, M) + count(M, N)
    assert f"{state.spec.count:,}" in str(state.spec) and method.label in str(state.spec)


@mainly
def test_merged_and_unmerged_agree(name):
    """Forward and gradient of the three ways: merged kernels, `adapt`, `apply` of one kernel."""
    state = trained(start(METHODS[name][0]))
    merged = peft.merge(PARAMS, state)
    assert distance(merged, PARAMS) > 1e-2  # or the rest of the test says nothing
    close(jax.jit(peft.adapt(f))(PARAMS, state, X), f(merged, X))
    kernel = merged["in"]["kernel"]
    close(peft.apply(PARAMS, state, "in/kernel", X), X @ kernel)
    close(PARAMS["in"]["kernel"] + peft.delta(PARAMS, state, "in/kernel"), kernel, 1e-6)
    many = jnp.tile(X, (8, 1))  # so many rows that merging is the cheaper way
    loss = lambda t, run: jnp.sum(run(state.replace(trainable=t), many) ** 2) / len(many)  # noqa: E731
    by_merge = jax.jit(jax.grad(lambda t: loss(t, lambda s, x: f(peft.merge(PARAMS, s), x))))(state.trainable)
    by_adapt = jax.jit(jax.grad(lambda t: loss(t, lambda s, x: peft.adapt(f)(PARAMS, s, x))))(state.trainable)
    close(by_adapt, by_merge, 1e-4)


@every_method
def test_unmerge_gives_the_base_bit_for_bit(name):
    state = trained(start(METHODS[name][0]))
    before = peft.kept(PARAMS, state.spec)
    merged = peft.merge(PARAMS, state)
    assert all(
        x is y for x, y in zip(jax.tree.leaves(peft.unmerge(merged, before)), jax.tree.leaves(PARAMS), strict=True)
    )
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    state = trained(start(METHODS[name][0], narrow))
    found = peft.merge(narrow, state)
    assert found["in"]["kernel"].dtype == jnp.bfloat16
    # One rounding: the same as that of the sum in float32.
    exact = jax.tree.map(lambda x: x.astype(jnp.bfloat16), peft.merge(wide, state))
    assert distance(found, exact) == 0


@mainly
def test_gradients(name):
    """Against differences in float64; everything trained gets a gradient, and what is frozen none."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), PARAMS)
        x = jnp.asarray(np.asarray(X), jnp.float64)
        state = trained(start(METHODS[name][0], params))
        assert {leaf.dtype for leaf in jax.tree.leaves(state.trainable)} == {jnp.dtype("float64")}
        # What the norm in DoRA's denominator does is left out of the gradient, so it must not change in the difference.
        fixed = {"a", "b"} if name == "dora" else set()
        t0 = state.trainable
        way = trained(state, 1.0, seed=3).trainable
        way = {
            p: {k: jnp.zeros_like(a) if k in fixed else a - t0[p][k] for k, a in own.items()} for p, own in way.items()
        }
        value = lambda t: jnp.sum(jnp.sin(f(peft.merge(params, state.replace(trainable=t)), x)))  # noqa: E731
        run = jax.jit(jax.value_and_grad(value))
        g = run(t0)[1]
        for path, leaf in zip(tree.leaf_paths(g), jax.tree.leaves(g), strict=True):
            assert bool(jnp.isfinite(leaf).all()) and float(jnp.abs(leaf).max()) > 1e-4, path
        eps = 1e-5
        at = lambda s: run(jax.tree.map(lambda a, d: a + s * d, t0, way))[0]  # noqa: E731
        slope = (8 * (at(eps) - at(-eps)) - (at(2 * eps) - at(-2 * eps))) / (12 * eps)
        found = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(way), strict=True))
        np.testing.assert_allclose(float(found), float(slope), rtol=1e-6)


@every_method
def test_frozen_arrays_get_no_gradient(name):
    state = trained(start(METHODS[name][0]))
    if not any(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(state.frozen)):
        assert name not in FROZEN
        return
    assert name in FROZEN
    for run in (lambda s: f(peft.merge(PARAMS, s), X), lambda s: peft.adapt(f)(PARAMS, s, X)):
        g = jax.jit(jax.grad(lambda z, run=run: jnp.sum(run(state.replace(frozen=z)) ** 2)))(state.frozen)
        assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(g))


@mainly
def test_training_lowers_the_loss(name):
    state = start(METHODS[name][0])
    goal = f(peft.merge(PARAMS, trained(state, 0.3, seed=9)), X)
    loss = lambda t: jnp.mean((peft.adapt(f)(PARAMS, state.replace(trainable=t), X) - goal) ** 2)  # noqa: E731

    opt = optax.adam(0.03)

    def step(carry, _):
        t, opt_state = carry
        value, g = jax.value_and_grad(loss)(t)
        updates, opt_state = opt.update(g, opt_state)
        return (optax.apply_updates(t, updates), opt_state), value

    _, values = jax.jit(lambda t: jax.lax.scan(step, (t, opt.init(t)), length=100))(state.trainable)
    assert values[-1] < 0.5 * values[0]


@mainly
def test_vmap_over_stacked_adapters(name):
    states = [trained(start(METHODS[name][0]), seed=i) for i in range(2)]
    stacked = peft.stack(states)
    close(
        jax.jit(jax.vmap(lambda s: f(peft.merge(PARAMS, s), X)))(stacked),
        jnp.stack([f(peft.merge(PARAMS, s), X) for s in states]),
    )
    close(
        jax.jit(jax.vmap(lambda s: peft.adapt(f)(PARAMS, s, X)))(stacked),
        jnp.stack([f(peft.merge(PARAMS, s), X) for s in states]),
    )


def scanned(params, x):
    """f with its layers in a scan, each checkpointed."""
    return jax.lax.scan(lambda h, layer: (jax.checkpoint(f)(layer, h), None), x, params)[0]


@mainly
def test_stacked_layers_scan_and_remat(name):
    """Layers on a leading axis have an adapter each; those of the layers one by one, as in a loop."""
    layers = [PARAMS, jax.tree.map(lambda x: 0.5 * x[::-1], PARAMS)]
    params = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    state = trained(start(METHODS[name][0], params, stack_axes=(0,)))
    assert state.spec.count == 2 * start(METHODS[name][0]).spec.count
    loss = lambda t, run: jnp.sum(run(state.replace(trainable=t)) ** 2)  # noqa: E731

    def looped(s):
        x = X
        for i in range(2):
            own = lambda group, i=i: {p: {k: a[i] for k, a in arrays.items()} for p, arrays in group.items()}  # noqa: E731
            one = peft.Adapters(own(s.trainable), own(s.frozen), start(METHODS[name][0]).spec)
            x = f(peft.merge(layers[i], one), x)
        return x

    ways = [looped, lambda s: scanned(peft.merge(params, s), X), lambda s: peft.adapt(scanned)(params, s, X)]
    (value, g), *others = [
        jax.jit(jax.value_and_grad(lambda t, run=run: loss(t, run)))(state.trainable) for run in ways
    ]
    for other in others:
        np.testing.assert_allclose(other[0], value, rtol=1e-5)
        close(other[1], g, 2e-4 * float(value))


@mainly
def test_two_devices(name):
    """Data over one axis, kernels over the other: as on one device."""
    state = trained(start(METHODS[name][0]))
    mesh = meshes.make_mesh({"data": 2, "model": 2})
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    params = jax.tree.map(lambda x: put(x, *[None] * (x.ndim - 1), "model"), PARAMS)
    spread = jax.tree.map(put, state)
    loss = lambda t, p, s, x: jnp.mean(peft.adapt(f)(p, s.replace(trainable=t), x) ** 2)  # noqa: E731
    step = jax.jit(jax.value_and_grad(loss))
    found = step(spread.trainable, params, spread, put(X, "data"))
    close(found, step(state.trainable, PARAMS, state, X))
    close(jax.jit(peft.merge)(params, spread), peft.merge(PARAMS, state), 1e-6)
    # The start is that of one device, too.
    close(jax.jit(lambda p: peft.init(KEY, p, state.spec).trainable)(params), start(METHODS[name][0]).trainable, 1e-5)


def test_saved_and_loaded(tmp_path: Path):
    """All methods in one checkpoint, restored from nothing but their specs."""
    states = {name: trained(start(method)) for name, (method, _) in METHODS.items()}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, states)
        found = checkpoints.restore({name: peft.abstract(state.spec) for name, state in states.items()})
        other = {**states, "lora": start(peft.LoRA(2, alpha=5))}
        with pytest.raises(CheckpointError, match=r"alpha=5"):
            checkpoints.restore({name: peft.abstract(state.spec) for name, state in other.items()})
    assert found is not None and found.step == 3
    assert jax.tree.structure(found.state) == jax.tree.structure(states)
    assert distance(found.state, states) == 0
