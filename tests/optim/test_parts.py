"""An update in parts and in chunks gives what the update of whole arrays gives, and needs little memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.core import tree
from jaxlab.kernels.bred_update import vector
from jaxlab.kernels.bred_update.codec import QuantSpec
from jaxlab.optim import bred, parts

CUT = {"matrix": (37, 160), "vector": (4096,)}  # rows with a short block, and a row too many for equal chunks
SHAPES = {"stack": (3, 20, 64), "matrix": (20, 70), "small": (5,)}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "ademamix": lambda: optax.contrib.ademamix(1e-2),
    "clipped nadam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.nadamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clipped after": lambda: optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0)),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(parts, "CHUNK", 2**10)
    monkeypatch.setattr(parts, "LARGE", 2**6)


def normal(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}


def trained(tx, steps=3, shapes=SHAPES):
    """(parameters, state) after some jitted steps."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = normal(0, shapes)
    state = tx.init(params)
    for t in range(steps):
        params, state = step(params, state, normal(t + 1, shapes))
    return params, state


def devices(monkeypatch, number):
    monkeypatch.setattr(jax, "device_count", lambda: number)


def chunked(tx, shapes=SHAPES):
    """How many loops the update of `tx` has."""
    params = normal(0, shapes)
    return str(jax.make_jaxpr(tx.update)(params, tx.init(params), params)).count(" while[")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_and_chunks_give_what_whole_arrays_give(name, monkeypatch):
    tx = bred.quantize_state(OPTIMIZERS[name](), QuantSpec(block_size=32), select=bred.default_select(min_size=64))
    found = []
    for number in (1, 8):
        devices(monkeypatch, number)
        found.append(trained(tx, 2))
    monkeypatch.setattr(vector, "serves", lambda x: False)
    found.append(trained(tx, 2))
    for params, state in found[:-1]:
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(found[-1][0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(found[-1][1]), strict=True):
            if a.dtype == jnp.uint8:  # codes next to a rounding edge may differ by one where XLA fused otherwise
                assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3
            else:
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("rounding", ["dither", "nearest", "stochastic"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_every_form_of_a_state_is_cut_right(bits, rounding, monkeypatch):
    spec = QuantSpec(bits, block_size=64, rounding=rounding)
    tx = bred.quantize_state(optax.sgd(0.1, momentum=0.9), spec, select=bred.default_select(min_size=64))
    devices(monkeypatch, 1)
    assert chunked(tx, CUT) == (1 if rounding == "stochastic" else 3)
    params, state = trained(tx, 2, CUT)
    monkeypatch.setattr(vector, "serves", lambda x: False)
    expected_params, expected = trained(tx, 2, CUT)
    for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves((expected_params, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_what_needs_whole_arrays_is_not_cut(monkeypatch):
    devices(monkeypatch, 1)
    shapes = {"a": (64, 64), "b": (48, 96)}
    quantized = functools.partial(bred.quantize_state, select=bred.default_select(min_size=64))
    assert chunked(quantized(optax.adamw(1e-2)), shapes) == 2
    assert chunked(quantized(optax.lamb(1e-2)), shapes) == 0
    devices(monkeypatch, 8)
    assert chunked(quantized(optax.adamw(1e-2)), shapes) == 0


def test_callbacks_run_once(monkeypatch):
    devices(monkeypatch, 1)
    seen = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda x: seen.append(float(x)), updates["a"][0, 0])
        return updates, jax.tree.map(lambda g, m: g + 0.5 * m, updates, state)

    inner = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    tx = bred.quantize_state(inner, select=lambda leaf: True)
    params = {"a": jnp.full((64, 64), 2.0)}
    jax.block_until_ready(jax.jit(tx.update)(params, tx.init(params)))
    jax.effects_barrier()
    assert seen == [2.0]


def test_nan_stays_in_its_block(monkeypatch):
    devices(monkeypatch, 1)
    tx = bred.quantize_state(optax.adamw(1e-2), select=bred.default_select(min_size=64))
    params = {"a": jnp.ones((64, 256))}
    grads = {"a": params["a"].at[40, 130].set(jnp.nan)}
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    for x in jax.tree.leaves(bred.dequantize(state)):
        if x.ndim == 2:
            bad = np.argwhere(np.isnan(np.asarray(x)))
            assert set(map(tuple, bad)) == {(40, i) for i in range(128, 256)}


def test_full_precision_exists_for_a_chunk_only(monkeypatch):
    devices(monkeypatch, 1)
    monkeypatch.setattr(parts, "CHUNK", 2**14)
    shapes = {str(i): (512, 256) for i in range(6)}
    params, tx = normal(0, shapes), bred.quantize_state(optax.adamw(1e-2))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    analysis = step.lower(params, tx.init(params), params).compile().memory_analysis()
    leaf = tree.nbytes(params) / len(shapes)  # the update of one parameter; optax hands it over whole
    assert analysis.temp_size_in_bytes < 1.5 * leaf + 10 * 4 * parts.CHUNK
