"""`quantize_state`: every kind of optax transformation, selection, composition, sharding, checkpoints, errors."""

import dataclasses
import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from optax import contrib

from jaxlab.core import mesh as meshes
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.errors import CheckpointError
from jaxlab.optim import bred
from jaxlab.optim.selection import StateLeaf, state_leaves

PARAMS = {"embed": {"w": jnp.ones((40, 200))}, "w": jnp.ones((64, 128)), "b": jnp.ones((128,))}
LR = 1e-2
TRANSFORMS = {
    "adamw": optax.adamw(LR),
    "lion": optax.lion(LR),
    "muon": contrib.muon(LR),
    "sgd": optax.sgd(LR, 0.9, nesterov=True),
    "rmsprop": optax.rmsprop(LR),
    "rmsprop_centered": optax.rmsprop(LR, centered=True),
    "amsgrad": optax.amsgrad(LR),
    "adabelief": optax.adabelief(LR),
    "nadamw": optax.nadamw(LR),
    "adan": optax.adan(LR),
    "ademamix": contrib.ademamix(LR),
    "adafactor": optax.adafactor(LR, momentum=0.9, min_dim_size_to_factor=1024),
    "schedule_free": contrib.schedule_free_adamw(LR),
    "adadelta": optax.adadelta(1.0),
    "adopt": contrib.adopt(LR),
    "yogi": optax.yogi(LR),
    "lamb": optax.lamb(LR),
    "sm3": optax.sm3(LR),
    "sophia_like_chain": optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-LR)),
}


def gradients(params, t):
    """Noise around the parameters: a quadratic that every optimizer decreases."""
    key = jax.random.fold_in(jax.random.key(5), t)
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.fold_in(key, x.size), x.shape), params)


def train(tx, params=PARAMS, steps=30, state=None, start=0):
    """Scans the optimizer: the state must keep its structure, shapes and dtypes."""

    def body(carry, t):
        p, s = carry
        updates, s = tx.update(gradients(p, t), s, p)
        return (optax.apply_updates(p, updates), s), None

    state = tx.init(params) if state is None else state
    run = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(start, start + steps))[0], donate_argnums=())
    return run((params, state))


def assert_same(a, b):
    for path, (x, y) in enumerate(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)):
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def loss(params):
    return float(sum(jnp.sum(x * x) for x in jax.tree.leaves(params)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transformation_trains_as_before(name):
    inner, tx = TRANSFORMS[name], bred.quantize_state(TRANSFORMS[name])
    params, state = train(tx)
    exact, exact_state = train(inner)
    start = loss(PARAMS)
    assert abs(loss(params) - loss(exact)) < 0.1 * (start - loss(exact))
    assert int(state.count) == 30
    full = bred.dequantize(state)
    assert jax.tree.structure(full) == jax.tree.structure(exact_state)
    assert [x.dtype for x in jax.tree.leaves(full)] == [x.dtype for x in jax.tree.leaves(exact_state)]
    mapped = optax.tree.map_params(tx, lambda x: x, state, is_leaf=bred.is_quantized)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    shapes = jax.eval_shape(tx.init, PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)


@pytest.mark.parametrize("name", ["adamw", "adan", "ademamix", "muon", "amsgrad"])
def test_nothing_selected_is_plain_optax(name):
    tx = bred.quantize_state(TRANSFORMS[name], select=lambda leaf: False)
    (a, state), (b, exact) = train(tx), train(TRANSFORMS[name])
    assert_same(a, b)
    assert_same(state.inner, exact)


def specs(tx, params=PARAMS):
    """Path -> spec or reason of every leaf."""
    return {row[0]: row[2] if not row[5] else row[5] for row in bred.summary(tx, params).rows}


def test_the_rule_knows_what_fields_mean():
    found = specs(bred.quantize_state(TRANSFORMS["adan"]))
    assert "linear" in found["0/v/w"] and "sqrt" in found["0/n/w"] and "not known to be an average" in found["0/g/w"]
    found = specs(bred.quantize_state(TRANSFORMS["amsgrad"]))
    assert "dither" in found["0/nu/w"] and "nearest" in found["0/nu_max/w"]
    assert "turn negative" in specs(bred.quantize_state(TRANSFORMS["rmsprop_centered"]))["0/nu/w"]
    assert "fewer than min_size=4096" in specs(bred.quantize_state(TRANSFORMS["adamw"]))["0/mu/b"]
    assert "not known" in specs(bred.quantize_state(TRANSFORMS["schedule_free"]))["z/w"]
    found = specs(bred.quantize_state(optax.MultiSteps(optax.adamw(LR), 2).gradient_transformation()))
    assert "dither" in found["inner_opt_state/0/mu/w"] and "not known" in found["acc_grads/w"]
    narrow = specs(bred.quantize_state(optax.adamw(LR)), {"w": jnp.ones((4096, 2))})
    assert "would not save half" in narrow["0/mu/w"]


def test_names_of_parameters_are_not_fields():
    """A parameter called `mu` in a field that is no average stays as it is."""
    state = contrib.schedule_free_adamw(LR).init({"mu": jnp.ones((64, 128))})
    kinds = {leaf.path: (leaf.owner, leaf.field, leaf.rest) for leaf, _ in state_leaves(state)}
    assert kinds["z/mu"] == ("ScheduleFreeState", "z", "mu")
    assert kinds["base_optimizer_state/0/nu/mu"] == ("ScaleByRmsWithCountState", "nu", "mu")


def test_overrides_by_path():
    select = bred.default_select(
        min_size=100, overrides={"embed": False, "nu/b": bred.QuantSpec(8, map="sqrt"), "mu/b": "kept for a test"}
    )
    tx = bred.quantize_state(optax.adamw(LR), bred.QuantSpec(3), select=select)
    found = specs(tx)
    assert found["0/mu/embed/w"] == "override 'embed'" and found["0/mu/b"] == "kept for a test"
    assert found["0/nu/b"].startswith("8 bits") and found["0/mu/w"].startswith("3 bits, B=64")
    own = bred.quantize_state(optax.adamw(LR), select=lambda leaf: bred.QuantSpec(8) if leaf.field == "mu" else None)
    found = specs(own)
    assert found["0/mu/b"].startswith("8 bits") and found["0/nu/w"] == "not selected"


def test_states_of_unknown_optimizers():
    tx = optax.GradientTransformation(lambda p: {"first": p}, lambda g, s, p=None: (g, {"first": g}))
    assert specs(bred.quantize_state(tx))["first/w"] == "not a field of a state"

    class State(NamedTuple):
        momentum_of_mine: dict
        variance: dict

    tx = optax.GradientTransformation(lambda p: State(p, p), lambda g, s, p=None: (g, State(g, g)))
    assert "not known" in specs(bred.quantize_state(tx))["momentum_of_mine/w"]
    select = bred.default_select(fields=("momentum_of_mine", "variance"))
    found = specs(bred.quantize_state(tx, select=select, nonneg=("variance",)))
    assert "linear" in found["momentum_of_mine/w"] and "sqrt" in found["variance/w"]


@pytest.mark.parametrize(("bits", "block", "bound"), [(4, 128, 4.26), (3, 64, 3.51)])
def test_bits_of_a_whole_state(bits, block, bound):
    params = {"a": jnp.zeros((512, 1024)), "b": jnp.zeros((1024, 2048))}
    state = jax.eval_shape(bred.adamw(LR, spec=bred.QuantSpec(bits)).init, params)
    found = bred.state_bytes(state)
    assert found.bits_per_element <= bound
    assert found.stored == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert found.full == 2 * 4 * (512 * 1024 + 1024 * 2048) + 8
    assert 1 - found.stored / found.full >= 0.86


def test_no_random_array_of_the_states_size():
    """Random numbers are a block's: every integer array of the state's size comes from packing, none from hashing."""
    params = {"w": jnp.ones((256, 1024))}

    def hashed(rounding):
        tx = bred.lion(LR, spec=bred.QuantSpec(rounding=rounding))
        state = tx.init(params)
        text = str(jax.make_jaxpr(tx.update)(params, state, params))
        return [line for line in text.splitlines() if "u32[" in line and ("262144" in line or "256,1024" in line)]

    assert not hashed("dither") and not hashed("nearest")
    assert hashed("stochastic")  # the test sees it where it is
    text = str(jax.make_jaxpr(lambda s: bred.lion(LR).update(params, s, params))(bred.lion(LR).init(params)))
    assert "random_bits" not in text and "threefry" not in text


@pytest.mark.parametrize("alias", ["adamw", "lion", "muon", "adafactor"])
def test_aliases_have_the_signature_of_optax(alias):
    ours = getattr(bred, alias)
    theirs = getattr(optax, alias, None) or getattr(contrib, alias)
    names = [p for p in inspect.signature(ours).parameters if p not in ("spec", "seed", "select")]
    assert names == list(inspect.signature(theirs).parameters)
    tx = ours(learning_rate=LR, spec=bred.QuantSpec(8), seed=3)
    state = tx.init(PARAMS)
    assert state.plan.seed == 3 and state.plan.spec.bits == 8
    assert any(bred.is_quantized(x) for x in jax.tree.leaves(state, is_leaf=bred.is_quantized)) or alias == "adafactor"


def test_sgd_without_momentum_has_nothing_to_quantise():
    assert bred.state_bytes(bred.sgd(LR).init(PARAMS)).stored == 4
    assert bred.state_bytes(bred.sgd(LR, momentum=0.9).init(PARAMS)).bits_per_element < 5


def test_composes_with_injected_hyperparameters_masks_and_partitions():
    injected = optax.inject_hyperparams(bred.adamw)(learning_rate=LR)
    plain = bred.adamw(LR)
    # The learning rate is an array there: products round elsewhere.
    np.testing.assert_allclose(train(injected)[0]["w"], train(plain)[0]["w"], rtol=1e-4, atol=1e-5)
    inside = bred.quantize_state(optax.inject_hyperparams(optax.adamw)(learning_rate=LR))
    np.testing.assert_allclose(train(inside)[0]["w"], train(plain)[0]["w"], rtol=1e-4, atol=1e-5)
    mask = {"embed": False, "w": True, "b": True}
    params, state = train(optax.masked(bred.adamw(LR), mask))
    assert not any("embed" in p for p, _ in bred_leaves(state))
    parts = optax.partition({"a": bred.lion(LR), "b": optax.sgd(LR)}, {"embed": "b", "w": "a", "b": "a"})
    params, state = train(parts)
    assert loss(params) < loss(PARAMS)
    chained = optax.chain(optax.clip_by_global_norm(1.0), bred.adamw(LR))
    assert loss(train(chained)[0]) < loss(PARAMS)
    assert "bits" in str(bred.summary(chained, PARAMS))


def bred_leaves(state):
    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=bred.is_quantized)
    return [(jax.tree_util.keystr(path), x) for path, x in flat if bred.is_quantized(x)]


def test_the_dither_does_not_depend_on_what_is_around():
    """The same leaf has the same codes behind a clip, in a chain, and with other parameters beside it."""
    alone = bred.quantize_state(optax.lion(LR))
    behind = bred.quantize_state(optax.chain(optax.identity(), optax.lion(LR)))
    fewer = {"w": PARAMS["w"]}
    grads = gradients(PARAMS, 0)
    codes = []
    for tx, params in ((alone, PARAMS), (behind, PARAMS), (alone, fewer)):
        g = grads if params is PARAMS else {"w": grads["w"]}
        _, state = tx.update(g, tx.init(params), params)
        codes.append(next(x.codes for path, x in bred_leaves(state) if path.endswith("['w']") and "embed" not in path))
    np.testing.assert_array_equal(codes[0], codes[1])
    np.testing.assert_array_equal(codes[0], codes[2])


def test_skipped_steps_change_nothing():
    tx = optax.apply_if_finite(bred.adamw(LR), max_consecutive_errors=5)
    params, state = train(tx, steps=3)
    bad = jax.tree.map(lambda x: x * jnp.nan, PARAMS)
    _, after = jax.jit(tx.update)(bad, state, params)
    assert int(after.inner_state.count) == int(state.inner_state.count) == 3
    assert_same(bred.dequantize(after).inner_state, bred.dequantize(state).inner_state)
    many = optax.MultiSteps(bred.adamw(LR), every_k_schedule=4)
    params, state = train(many, steps=10)
    assert int(state.inner_opt_state.count) == 2
    assert jax.tree.leaves(state.acc_grads)[0].dtype == jnp.float32


def test_vmap_over_seeds():
    tx = bred.adamw(LR)
    batch = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    states = jax.vmap(tx.init)(batch)
    updates, states = jax.jit(jax.vmap(tx.update))(batch, states, batch)
    one = jax.tree.map(lambda x: x[1], batch)
    expected, state = jax.jit(tx.update)(one, tx.init(one), one)
    np.testing.assert_allclose(updates["w"][1], expected["w"], rtol=1e-6)
    full = bred.dequantize(states)
    np.testing.assert_allclose(full[0].mu["w"][1], bred.dequantize(state)[0].mu["w"], rtol=1e-6)
    assert bred.state_bytes(states).full == 2 * bred.state_bytes(state).full


def test_low_precision_moments_and_parameters():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = bred.adamw(LR, mu_dtype=jnp.bfloat16)
    state = tx.init(params)
    assert dict(bred_leaves(state))[".inner[0].mu['w']"].dtype == jnp.bfloat16
    updates, after = tx.update(params, state, params)
    assert updates["w"].dtype == jnp.bfloat16 and jax.tree.structure(after) == jax.tree.structure(state)


def test_rows_without_gradients_never_move():
    params = {"w": jnp.ones((64, 128))}
    tx = bred.quantize_state(optax.adam(1e-3))

    def body(carry, t):
        p, s = carry
        g = jax.random.normal(jax.random.fold_in(jax.random.key(0), t), (64, 128)).at[5].set(0.0).at[:, 7].set(0.0)
        updates, s = tx.update({"w": g}, s, p)
        return (optax.apply_updates(p, updates), s), jnp.mean(jnp.abs(updates["w"][:, 7]))

    (p, _), sizes = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(2000)))((params, tx.init(params)))
    np.testing.assert_array_equal(p["w"][5], 1.0)
    # A coordinate without a gradient in a live block has noise for an average: on average less than a step of Adam, and
    # no drift. 64 coordinates that each moved by about 0.19: 0.1 is four standard errors of their mean.
    assert float(sizes.mean()) <= 1e-3
    assert float(jnp.abs(jnp.mean(p["w"][:, 7]) - 1)) < 0.1
    assert float(jnp.sqrt(jnp.mean((p["w"][:, 7] - 1) ** 2))) < 0.4


def test_nearest_rounding_without_a_level_at_zero_drifts():
    """Why `QuantSpec` has the map "zero": a coordinate without gradients moves by Adam steps of one sign."""
    params, moved = {"w": jnp.ones((64, 128))}, {}
    for name in ("linear", "zero"):
        tx = bred.quantize_state(optax.adam(1e-3), bred.QuantSpec(rounding="nearest", map=name))

        def body(carry, t, tx=tx):
            p, s = carry
            g = jax.random.normal(jax.random.fold_in(jax.random.key(0), t), (64, 128)).at[:, 7].set(0.0)
            updates, s = tx.update({"w": g}, s, p)
            return (optax.apply_updates(p, updates), s), None

        (p, _), _ = jax.jit(lambda c, body=body: jax.lax.scan(body, c, jnp.arange(2000)))((params, tx.init(params)))
        moved[name] = float(jnp.mean(p["w"][:, 7] - 1))
    assert moved["zero"] == 0 and moved["linear"] < -1


def test_non_finite_gradients_are_visible_in_their_block_and_nowhere_else():
    tx = bred.adamw(LR)
    params, state = train(tx, steps=2)
    g = gradients(params, 9)
    g["embed"]["w"] = g["embed"]["w"].at[3, 150].set(jnp.nan)
    _, after = jax.jit(tx.update)(g, state, params)
    mu = np.isnan(bred.dequantize(after)[0].mu["embed"]["w"])
    assert mu[3, 128:].all() and mu.sum() == 72
    assert not np.isnan(bred.dequantize(after)[0].mu["w"]).any()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e15])
def test_extreme_gradients(scale):
    params = {"w": jnp.ones((64, 128))}
    g = jax.tree.map(lambda x: scale * jax.random.normal(jax.random.key(1), x.shape), params)
    tx, exact = bred.lion(LR), optax.lion(LR)
    ours, state = tx.update(g, tx.update(g, tx.init(params), params)[1], params)
    theirs, other = exact.update(g, exact.update(g, exact.init(params), params)[1], params)
    assert np.mean(np.asarray(ours["w"] == theirs["w"])) > 0.99  # a sign near zero may flip
    error = jnp.abs(bred.dequantize(state)[0].mu["w"] - other[0].mu["w"]).max(-1) / jnp.abs(other[0].mu["w"]).max(-1)
    assert float(error.max()) < 2 * 2 / 15


SHARDINGS = [("data", None), (None, "data"), (None, None)]


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("split", SHARDINGS, ids=str)
def test_sharded_states_have_the_same_bits(devices, split):
    params = {"w": jnp.ones((64, 1024)), "v": jnp.ones((16, 200)), "b": jnp.ones((128,))}
    tx = bred.quantize_state(optax.adamw(LR), select=bred.default_select(min_size=1000))
    grads = [
        jax.tree.map(lambda x, t=t: jax.random.normal(jax.random.key(t + x.size), x.shape), params) for t in (0, 1)
    ]

    def steps(params, state, grads):
        for g in grads:
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    expected = jax.jit(steps)(params, tx.init(params), grads)
    mesh = meshes.make_mesh({"data": devices})
    placed = {"w": NamedSharding(mesh, PartitionSpec(*split)), "v": NamedSharding(mesh, PartitionSpec("data"))}
    placed["b"] = NamedSharding(mesh, PartitionSpec())
    shardings = bred.state_sharding(tx, params, placed)
    sharded = jax.device_put(params, placed)
    state = jax.jit(tx.init, out_shardings=shardings)(sharded)
    assert state.inner[0].mu["w"].codes.sharding.is_equivalent_to(placed["w"], 2)
    run = jax.jit(steps, out_shardings=(placed, shardings))
    given = [jax.device_put(g, placed) for g in grads]
    found = run(sharded, state, given)
    for a, b in zip(bred_leaves(found[1]), bred_leaves(expected[1]), strict=True):
        np.testing.assert_array_equal(a[1].codes, b[1].codes, err_msg=a[0])
        np.testing.assert_array_equal(a[1].scale, b[1].scale, err_msg=a[0])
    text = run.lower(sharded, state, given).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text


def test_a_split_that_cuts_blocks_is_kept_off_the_last_axis():
    mesh = meshes.make_mesh({"data": 8})
    params = {"w": jnp.ones((64, 256))}
    tx = bred.lion(LR)
    placed = {"w": NamedSharding(mesh, PartitionSpec(None, "data"))}
    found = bred.state_sharding(tx, params, placed).inner[0].mu["w"]
    assert found.codes.spec == PartitionSpec(None, None)
    with pytest.raises(ValueError, match="shardings must hold a NamedSharding for every parameter"):
        bred.state_sharding(tx, params, {})


def test_resume_is_bit_identical_also_on_another_mesh(tmp_path):
    tx = bred.adamw(LR)
    whole = train(tx, steps=8)
    half = train(tx, steps=5)
    with Checkpointer(tmp_path) as saver:
        saver.save(5, half)
    with Checkpointer(tmp_path) as loader:
        restored = loader.restore((PARAMS, tx.init(PARAMS))).state
        mesh = meshes.make_mesh({"data": 4})
        placed = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec("data" if x.ndim == 2 else None)), PARAMS)
        like = jax.device_put((PARAMS, tx.init(PARAMS)), (placed, bred.state_sharding(tx, PARAMS, placed)))
        spread = loader.restore(like).state
    assert_same(train(tx, restored[0], 3, restored[1], 5), whole)
    assert_same(spread, restored)
    assert spread[1].inner[0].mu["w"].codes.sharding.num_devices == 4


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (bred.adamw(LR, spec=bred.QuantSpec(3)), "3 bits"),
        (bred.adamw(LR, spec=bred.QuantSpec(block_size=64)), "block_size=64"),
        (bred.adamw(LR, seed=1), "seed=1"),
        (bred.adamw(LR, spec=bred.QuantSpec(rounding="nearest")), "nearest"),
        (optax.adamw(LR), "absent"),
    ],
)
def test_another_spec_does_not_fit_a_checkpoint(tmp_path, other, message):
    tx = bred.adamw(LR)
    state = tx.init(PARAMS)
    with Checkpointer(tmp_path) as saver:
        saver.save(1, state)
    with Checkpointer(tmp_path) as loader, pytest.raises(CheckpointError, match=message):
        loader.restore(other.init(PARAMS))
    if message != "absent":
        with pytest.raises(ValueError, match="the checkpoint does not fit this optimizer"):
            bred.check_metadata(bred.metadata(state), other.init(PARAMS))
        with pytest.raises(ValueError, match="state was made with"):
            other.update(PARAMS, state, PARAMS)
    bred.check_metadata(bred.metadata(state), tx.init(PARAMS))


def test_bad_input():
    # The message is ours, or that of the run-time type check of the tests.
    with pytest.raises(TypeError, match="inner"):
        bred.quantize_state(1.0)
    with pytest.raises(TypeError, match="spec"):
        bred.quantize_state(optax.sgd(LR), 4)
    for seed in (-1, True):
        with pytest.raises(ValueError, match="seed must be an integer >= 0"):
            bred.quantize_state(optax.sgd(LR), seed=seed)
    with pytest.raises(TypeError, match="nonneg"):
        bred.quantize_state(optax.sgd(LR), nonneg="nu")
    with pytest.raises(ValueError, match="quantised already, at"):
        bred.quantize_state(bred.adamw(LR)).init(PARAMS)
    tx = bred.adamw(LR)
    with pytest.raises((ValueError, TypeError), match="state"):
        tx.update(PARAMS, optax.adamw(LR).init(PARAMS), PARAMS)
    with pytest.raises(ValueError):
        tx.update(PARAMS, tx.init(PARAMS))  # optax's own error: weight decay needs params
    with pytest.raises(ValueError, match="no quantize_state in it"):
        bred.summary(optax.adamw(LR), PARAMS)
    with pytest.raises(TypeError, match="select chose '0/count', but int32"):
        bred.quantize_state(optax.adamw(LR), select=lambda leaf: True).init(PARAMS)
    with pytest.raises(TypeError, match="select must return"):
        bred.quantize_state(optax.adamw(LR), select=lambda leaf: 4).init(PARAMS)
    with pytest.raises(ValueError, match="map='sqrt' is for values >= 0"):
        bred.lion(LR, spec=bred.QuantSpec(map="sqrt")).init(PARAMS)
    with pytest.raises(ValueError, match="min_size must be >= 0"):
        bred.default_select(min_size=-1)
    with pytest.raises(ValueError, match="is no regular expression"):
        bred.default_select(overrides={"(": False})
    with pytest.raises(TypeError, match="overrides"):
        bred.default_select(overrides={"w": 4})


def test_equal_optimizers_have_equal_states():
    """Two builds of one config give one treedef, so that a compiled step serves both."""
    a, b = (bred.adamw(LR).init(PARAMS) for _ in range(2))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    leaf = StateLeaf("0/mu/w", "ScaleByAdamState", "mu", "w", (64, 128), np.dtype("float32"))
    assert leaf.size == 8192 and leaf.nbytes == 32768 and dataclasses.is_dataclass(leaf)
    assert bred.default_select()(leaf) is True


def test_parameters_without_elements_and_without_axes():
    params = {"none": jnp.ones((0, 5)), "scalar": jnp.ones(()), "odd": jnp.ones((3, 5, 257))}
    tx = bred.quantize_state(optax.adamw(LR), select=bred.default_select(min_size=0))
    step = jax.jit(functools.partial(tx.update))
    updates, _ = step(params, tx.init(params), params)
    assert updates["odd"].shape == (3, 5, 257) and np.isfinite(updates["scalar"]).all()
