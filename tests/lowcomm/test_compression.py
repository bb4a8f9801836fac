"""Round trips within the promised bounds for every rank and scale, and error feedback that loses nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.lowcomm import Compression, LowComm, local_sgd
from jaxlab.lowcomm.compression import FORMATS
from tests.lowcomm.problems import compiled
from tests.reference.lowcomm_np import quantise

BLOCK = 16
LEVELS = {"int8": 254, "int4": 14}


def roundtrip(c, x):
    packed = jax.jit(c.encode)(x)
    return packed, np.asarray(jax.jit(c.decode, static_argnums=(1, 2))(packed, x.shape, jnp.dtype(x.dtype)))


def bound(form, x):
    """Largest error allowed for each entry of a flat vector."""
    out = np.zeros(x.shape)
    for start in range(0, x.size, BLOCK):
        part = np.abs(x[start : start + BLOCK])
        s = part.max()
        out[start : start + BLOCK] = s / LEVELS[form] if form in LEVELS else np.maximum(part / 3, s * 2.0**-7)
    return out * (1 + 1e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(), (1,), (35,), (5, 7), (2, 3, 5), (2, 3, 2, 3), (0,), (4, 0, 2)])
def test_round_trip_of_any_rank(form, shape):
    c = Compression(form, block_size=BLOCK)
    x = np.random.default_rng(len(shape)).standard_t(3, size=shape).astype(np.float32)
    packed, y = roundtrip(c, jnp.asarray(x))
    assert y.shape == shape and y.dtype == np.float32
    flat = x.ravel().astype(np.float64)
    assert np.all(np.abs(y.ravel() - flat) <= bound(form, flat))
    np.testing.assert_allclose(y.ravel(), quantise(flat, form, BLOCK), rtol=1e-5, atol=1e-7)
    assert packed.codes.dtype == np.uint8 and packed.scales.dtype == np.float32
    assert packed.codes.nbytes + packed.scales.nbytes == c.nbytes(x.size)
    np.testing.assert_array_equal(roundtrip(c, jnp.asarray(-x))[1], -y)


def test_sizes():
    n = 1000  # four blocks of 256
    assert [Compression(form).nbytes(n) for form in FORMATS] == [4 * 260, 4 * 132, 4 * 132]
    assert Compression("int4").nbytes(0) == 0


@pytest.mark.parametrize("form", FORMATS)
def test_values_that_the_format_holds_are_exact(form):
    codes = {"int8": np.arange(-127, 128, 17) * 1.0, "int4": np.arange(-7, 8) * 1.0,
             "e3m0": np.array([0, 1, -2, 4, 8, -16, 32, 64]) * 1.0}[form]  # fmt: skip
    x = jnp.asarray(np.resize(codes, BLOCK), jnp.float32)
    x = x.at[0].set(jnp.abs(x).max())
    np.testing.assert_allclose(roundtrip(Compression(form, BLOCK), x)[1], x, rtol=1e-6)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 1.2e-38, 1e-35, 1e38, 3.4e38])
def test_scales_at_the_ends_of_the_range(form, scale):
    """Blocks next to the smallest normal number are sent as zeros; nothing overflows and nothing is NaN."""
    x = np.array([1.0, -0.5, 0.25, 0.0] * (BLOCK // 4)) * scale
    x = x.astype(np.float32)
    _, y = roundtrip(Compression(form, BLOCK), jnp.asarray(x))
    assert np.isfinite(y).all()
    if scale < 2.0**-118:
        assert not y.any()
    else:
        assert np.all(np.abs(y - x.astype(np.float64)) <= bound(form, x.astype(np.float64)))
        assert y[0] == x[0]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_spoil_their_block_alone(form, bad):
    x = np.ones(3 * BLOCK, np.float32)
    x[BLOCK + 3] = bad
    y = roundtrip(Compression(form, BLOCK), jnp.asarray(x))[1].reshape(3, BLOCK)
    assert np.isnan(y[1]).all() and (y[[0, 2]] == 1).all()


def test_low_precision_leaves_come_back_in_their_dtype():
    x = jnp.linspace(-1, 1, 5, dtype=jnp.bfloat16)
    _, y = roundtrip(Compression("int8"), x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(y), np.float32(x), atol=0.01)


def test_workers_are_packed_on_their_own():
    c = Compression("int4", block_size=4)
    x = {"a": jnp.array([[1.0, 0.5, 0.0], [100.0, 50.0, 0.0]]), "b": jnp.ones((2, 2, 2))}
    packed = jax.jit(c.encode_workers)(x)
    assert packed["a"].codes.shape == (2, 2) and packed["a"].scales.tolist() == [[1.0], [100.0]]
    y = jax.jit(c.decode_workers)(packed, x)
    np.testing.assert_allclose(y["a"][1], 100 * y["a"][0], rtol=1e-6)
    np.testing.assert_array_equal(y["b"], x["b"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"format": "int2"}, r"format must be one of \('int8', 'int4', 'e3m0'\), got 'int2'"),
        ({"format": ""}, "format must be one of"),
        ({"block_size": 0}, "block_size must be even and >= 2, got 0"),
        ({"block_size": 7}, "block_size must be even"),
        ({"block_size": -2}, "block_size must be even"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Compression(**options)


def linear(params, batch, key):
    return jnp.sum(params["a"] * batch["a"]) + jnp.sum(params["s"] * batch["s"])


DELTAS = {
    "a": np.random.default_rng(0).normal(size=(2, 1, 5, 3)).astype(np.float32),
    "s": np.array([[0.3], [-0.1]], np.float32),
}
ZEROS = {"a": jnp.zeros((5, 3)), "s": jnp.zeros(())}


def rounds(compress, count, weights=None, params=ZEROS, **options):
    """`count` rounds in which worker k's pseudo-gradient is DELTAS[k]: inner and outer steps of size one."""
    algo = LowComm(optax.sgd(1.0), local_sgd(), 1, compress=compress, **options)
    state = algo.init(params, 2)
    for _ in range(count):
        state, metrics = compiled(algo, "round", linear)(state, DELTAS, jax.random.key(0), weights)
    return state, metrics


@pytest.mark.parametrize("form", FORMATS)
def test_error_feedback_makes_the_sum_exact_to_one_quantum(form):
    """In 200 rounds of a constant delta only the last residual is missing; without feedback the error adds up."""
    total = 200 * DELTAS["a"][:, 0].astype(np.float64).mean(0)
    state, _ = rounds(Compression(form, BLOCK), 200)
    left = np.asarray(state.residual["a"], np.float64).mean(0)
    np.testing.assert_allclose(-np.float64(state.params["a"]), total - left, atol=2e-3)  # float32 parameters near 200
    quantum = {"int8": 1 / 127, "int4": 1 / 7, "e3m0": 1.0}[form] * np.abs(DELTAS["a"]).max() * 1.5
    assert np.abs(-np.asarray(state.params["a"]) - total).max() <= quantum
    without, _ = rounds(Compression(form, BLOCK, error_feedback=False), 200)
    assert without.residual == ()
    assert np.abs(-np.asarray(without.params["a"]) - total).max() > 2 * quantum
    scalar = 200 * float(DELTAS["s"].mean())
    np.testing.assert_allclose(-float(state.params["s"]), scalar, rtol=1e-4)  # one entry a block is exact


def test_one_round_sends_the_quantised_delta_and_keeps_the_rest():
    state, metrics = rounds(Compression("e3m0", BLOCK), 1)
    sent = np.array([quantise(DELTAS["a"][k].ravel().astype(np.float64), "e3m0", BLOCK) for k in range(2)])
    np.testing.assert_allclose(-np.asarray(state.params["a"]).ravel(), sent.mean(0), atol=1e-6)
    np.testing.assert_allclose(state.residual["a"].reshape(2, -1), DELTAS["a"].reshape(2, -1) - sent, atol=1e-6)
    np.testing.assert_allclose(metrics["delta_sq"][0], (DELTAS["a"][0] ** 2).sum() + DELTAS["s"][0, 0] ** 2, rtol=1e-5)


def test_workers_left_out_keep_their_residual():
    compress = Compression("int4", BLOCK)
    first, _ = rounds(compress, 1)
    algo = LowComm(optax.sgd(1.0), local_sgd(), 1, compress=compress)
    state, _ = compiled(algo, "round", linear)(first, DELTAS, jax.random.key(0), jnp.array([0.0, 1.0]))
    np.testing.assert_array_equal(state.residual["a"][0], first.residual["a"][0])
    assert (np.asarray(state.residual["a"][1]) != np.asarray(first.residual["a"][1])).any()


def test_feedback_works_in_float32_for_low_precision_parameters():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), ZEROS)
    state, _ = rounds(Compression("int8", BLOCK), 3, params=params)
    assert state.residual["a"].dtype == jnp.float32 and state.params["a"].dtype == jnp.bfloat16


def test_a_worker_that_diverged_leaves_nothing_in_its_residual():
    """Of its leaf and of its healthy leaves, of this round and of those before."""
    algo = LowComm(optax.sgd(1.0), local_sgd(), 1, compress=Compression("int4", 4), nonfinite="drop")
    bad = {"a": DELTAS["a"].copy(), "s": DELTAS["s"]}
    bad["a"][0, 0, 2, 1] = np.nan
    first, _ = compiled(algo, "round", linear)(algo.init(ZEROS, 2), DELTAS, jax.random.key(0), None)
    kept = np.asarray(first.residual["a"], np.float64)
    assert kept.any(axis=(1, 2)).all()
    state, _ = compiled(algo, "round", linear)(first, bad, jax.random.key(0), None)
    assert not np.asarray(state.residual["a"][0]).any() and np.asarray(state.residual["a"][1]).any()
    sent = quantise((DELTAS["a"][1, 0] + kept[1]).ravel(), "int4", 4)
    np.testing.assert_allclose((np.asarray(first.params["a"]) - state.params["a"]).ravel(), sent, atol=1e-6)


def test_states_with_and_without_residual_are_told_apart():
    plain = LowComm(optax.sgd(1.0), local_sgd(), 1)
    packed = LowComm(optax.sgd(1.0), local_sgd(), 1, compress=Compression("int8"))
    for algo, other in ((plain, packed), (packed, plain)):
        with pytest.raises(ValueError, match="state was made by another LowComm: 1 fragments and residual"):
            algo.round(linear)(other.init(ZEROS, 2), DELTAS, jax.random.key(0))
