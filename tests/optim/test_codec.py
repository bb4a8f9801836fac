"""The codec: packing, statistics of the three roundings, any shape, extreme values, the same bits everywhere."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.kernels.bred_update import numerics
from jaxlab.optim import bred
from tests.reference import bred_np

SHAPES = [(), (1,), (127,), (129,), (7, 13), (3, 5, 257), (0, 5), (5, 0), (2, 256)]
SPECS = [
    bred.QuantSpec(bits, rounding=rounding, map=name)
    for bits, rounding, name in itertools.product(
        (3, 4, 8), ("dither", "nearest", "stochastic"), ("linear", "zero", "sqrt")
    )
]


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("spec", "seed", "leaf"))
def roundtrip(x, spec, seed=0, leaf=0, count=0):
    """Decoded after encoding; compiled, since operation by operation it would take longer."""
    return bred.decode(encode(x, spec, seed, leaf, count), seed=seed, leaf=leaf, count=count)


@functools.partial(jax.jit, static_argnames=("spec", "seed", "leaf"))
def encode(x, spec, seed=0, leaf=0, count=0):
    return bred.encode(jnp.asarray(x), spec, seed=seed, leaf=leaf, count=count)


def test_hash_has_fixed_values():
    """Checkpoints of today must be readable by every later version."""
    words = [0, 1, 2, 0xDEADBEEF, 0xFFFFFFFF]
    expected = [bred_np.lowbias32(x) for x in words]
    assert expected[:2] == [0, 0x6D3FA73]
    assert [int(numerics.lowbias32(jnp.uint32(x))) for x in words] == expected
    assert bred.leaf_id("mu/w") == 0xC8D9C86D
    u = bred.dither(bred.QuantSpec(), (2,), 3, seed=5, leaf=0xFFFFFFFF, count=9)
    np.testing.assert_array_equal(u.ravel(), [bred_np.dither(5, 0xFFFFFFFF, 9, j) for j in range(6)])


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_packing_is_exact_and_tight(bits):
    size = 64
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 2**bits, (50, size)), jnp.int32)
    words = bred.pack(codes, bits)
    assert words.dtype == jnp.uint8 and words.shape == (50, size * bits // 8)
    np.testing.assert_array_equal(bred.unpack(words, bits), codes)
    assert len({bytes(w) for w in np.asarray(words)}) == 50


@given(st.sampled_from([3, 4, 8]), st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_packing_holds_for_any_codes(bits, eighths, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (3, 8 * eighths)).astype(np.int32)
    np.testing.assert_array_equal(bred.unpack(bred.pack(jnp.asarray(codes), bits), bits), codes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", [*SPECS[:3], *SPECS[12::5]], ids=lambda s: f"{s.rounding}{s.bits}{s.map}")
def test_any_shape_comes_back_within_a_step(shape, spec):
    x = normal(shape)
    x = x * x if spec.nonneg else x
    y = roundtrip(x, spec, seed=3, leaf=5, count=7)
    assert y.shape == x.shape and y.dtype == jnp.float32
    if not x.size:
        return
    size, n = spec.block_size, x.shape[-1] if x.ndim else 1
    rows, worst = x.reshape(-1, n), {"nearest": 0.5}.get(spec.rounding, 1.0)
    for row, back in zip(rows, np.asarray(y).reshape(-1, n), strict=True):
        for start in range(0, n, size):
            part, got = row[start : start + size], back[start : start + size]
            s = np.max(np.sqrt(part) if spec.nonneg else np.abs(part))
            error = np.abs(np.sqrt(got) - np.sqrt(part)) if spec.nonneg else np.abs(got - part)
            step = s / spec.steps * (1 if spec.nonneg else 2)
            # The floor and the debiasing of squares move a root by at most half a step more.
            assert error.max() <= step * (worst + 0.5 * spec.nonneg) * 1.001


@pytest.mark.parametrize("nonneg", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_equals_the_slow_reference(bits, nonneg):
    spec = bred.QuantSpec(bits, block_size=16, map="sqrt" if nonneg else "linear")
    x = normal((6, 40))
    x = x * x if nonneg else x
    ours = roundtrip(x, spec, seed=2, leaf=77, count=11)
    theirs = bred_np.roundtrip(x, bits=bits, block=16, nonneg=nonneg, seed=2, leaf=77, count=11)
    # A value on the border of two cells may fall on either side in float32.
    different = np.abs(np.asarray(ours) - theirs) > 1e-5 * np.abs(theirs).max()
    assert different.mean() < 0.005


@pytest.mark.parametrize("spec", SPECS[:9], ids=lambda s: f"{s.rounding}{s.bits}{s.map}")
def test_eager_jitted_and_parts_give_the_same_bits(spec):
    x = jnp.asarray(normal((4, 300)) ** 2)
    eager = bred.encode(x, spec, seed=1, leaf=2, count=3)
    jitted = jax.jit(lambda x: bred.encode(x, spec, seed=1, leaf=2, count=3))(x)
    np.testing.assert_array_equal(eager.codes, jitted.codes)
    np.testing.assert_array_equal(eager.scale, jitted.scale)
    back = jax.jit(lambda q: 1.0 * bred.decode(q, seed=1, leaf=2, count=3) + 0.0)(eager)
    np.testing.assert_array_equal(bred.decode(eager, seed=1, leaf=2, count=3), back)
    if spec.rounding == "dither":
        blocks = eager.layout.blocks
        half = bred.encode(x[2:], spec, seed=1, leaf=2, count=3, offset=2 * blocks)
        np.testing.assert_array_equal(half.codes, eager.codes[2:])


def test_error_is_uniform_and_independent_of_the_signal():
    """Subtractive dithering: for each fixed x the error over blocks is U(-1/2, 1/2) steps; bounds of 4 sigma."""
    n, spec = 200_000, bred.QuantSpec(block_size=8, map="linear")
    fixed = jnp.asarray([0.83, -0.7, -0.31, 0.0, 0.111, 0.42, 0.6])  # one step inside the range
    x = jnp.tile(jnp.concatenate([jnp.ones(1), fixed]), (n, 1))
    error = (roundtrip(x, spec, leaf=9, count=4) - x) * spec.steps / 2
    for column in np.asarray(error, np.float64)[:, 1:].T:
        assert abs(column.mean()) < 4 * np.sqrt(1 / 12 / n)
        assert abs(column.var() * 12 - 1) < 0.012  # 4 sigma: var of the sample variance is (1/80 - 1/144) / n
        assert scipy.stats.kstest(column, "uniform", args=(-0.5, 1.0)).pvalue > 1e-4
    signal = jnp.asarray(np.random.default_rng(1).uniform(-0.85, 0.85, (n, 8)), jnp.float32).at[:, 0].set(1.0)
    error = np.asarray(roundtrip(signal, spec, leaf=9, count=5) - signal)[:, 1:]
    assert abs(np.corrcoef(error.ravel(), np.asarray(signal)[:, 1:].ravel())[0, 1]) < 0.005


@pytest.mark.parametrize("f", [0.0, 0.1, 0.25, 0.5])
def test_pairs_in_a_block_share_their_dither(f):
    """E e_i e_j = (1 - 6 f (1 - f)) / 12 in squared steps, f the distance of the two values in steps."""
    n, spec = 200_000, bred.QuantSpec(block_size=8, map="linear")
    step = 2 / spec.steps
    x = jnp.tile(jnp.asarray([1.0, 0.05, 0.05 + f * step, 0, 0, 0, 0, 0]), (n, 1))
    error = np.asarray(roundtrip(x, spec, leaf=1, count=8) - x, np.float64) / step
    assert abs(12 * np.mean(error[:, 1] * error[:, 2]) - (1 - 6 * f * (1 - f))) < 0.01


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_other_roundings_have_their_own_errors(rounding):
    """Stochastic: unbiased, variance f (1 - f). Nearest: no variance, a bias that depends on the value."""
    n, spec = 200_000, bred.QuantSpec(block_size=8, map="linear", rounding=rounding)
    step = 2 / spec.steps
    values = np.array([0.0, 0.3, 0.45, 0.7, 0.9, 0.2, 0.55]) * step + 0.02
    x = jnp.tile(jnp.concatenate([jnp.ones(1), jnp.asarray(values, jnp.float32)]), (n, 1))
    error = np.asarray(roundtrip(x, spec, leaf=2, count=2) - x, np.float64)[:, 1:] / step
    position = (values / step + spec.steps / 2) % 1
    if rounding == "stochastic":
        np.testing.assert_allclose(error.mean(0), 0, atol=4 * 0.5 / np.sqrt(n))
        np.testing.assert_allclose(error.var(0), position * (1 - position), atol=0.004)
    else:
        np.testing.assert_allclose(error.var(0), 0, atol=1e-9)
        np.testing.assert_allclose(error.mean(0), np.round(position) - position, atol=1e-4)


def test_squares_are_unbiased_and_never_zero():
    """E vhat = v for roots above two steps, var = r^2 step^2 / 3 + step^4 / 180; below, at least a quarter step^2."""
    n, spec = 200_000, bred.QuantSpec(block_size=8, map="sqrt")
    roots = np.array([1.0, 0.83, 0.6, 0.4, 0.2, 0.15, 0.0, 1e-4])
    x = jnp.tile(jnp.asarray(roots**2, jnp.float32), (n, 1))
    got = np.asarray(roundtrip(x, spec, leaf=3, count=1), np.float64)
    step = 1 / spec.steps
    np.testing.assert_allclose(got.mean(0)[1:6], roots[1:6] ** 2, rtol=0.01)
    expected = roots**2 * step**2 / 3 + step**4 / 180
    np.testing.assert_allclose(got.var(0)[1:5], expected[1:5], rtol=0.03)
    assert got.min() >= 0.25 * step**2 * 0.999


@pytest.mark.parametrize("beta", [0.9, 0.95])
def test_steady_state_variance_of_an_average(beta):
    """delta <- beta (delta + e) at a fixed scale: variance (step^2 / 12) / (1 - beta^2), within 5 %."""
    spec, blocks = bred.QuantSpec(block_size=8, map="linear"), 4000

    def body(x, count):
        # The first element fixes the scale; the others hover around zero, far from the range's ends.
        x = (beta * x).at[:, 0].set(1.0)
        return roundtrip(x, spec, leaf=4, count=count), None

    x, _ = jax.lax.scan(body, jnp.zeros((blocks, 8)).at[:, 0].set(1.0), jnp.arange(1, 200))
    step = 2 / spec.steps
    # The mean over blocks is exact; elements of a block are equal, so it is `blocks` samples: 5 % is 2.2 sigma of the
    # variance for one beta, and the seed is fixed.
    variance = float(jnp.mean(x[:, 1:] ** 2))
    assert abs(variance / (step**2 / 12 / (1 - beta**2)) - 1) < 0.05


def test_undebiased_squares_drift():
    """Without the subtraction a square settles step^2 / 12 times beta / (1 - beta) too high; with it, it does not."""
    spec, beta, n = bred.QuantSpec(block_size=8, map="sqrt"), 0.95, 2000
    roots = np.array([1.0, 0.8, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35])
    target = jnp.tile(jnp.asarray(roots**2, jnp.float32), (n, 1))

    def run(variance):
        def body(v, count):
            u = bred.dither(spec, (n,), 1, seed=0, leaf=1, count=count)
            v = (beta * v + (1 - beta) * target).at[:, 0].set(1.0)  # a constant scale
            codes, scale = numerics.encode(v, u, steps=15, nonneg=True)
            return numerics.decode(codes, scale, u, steps=15, nonneg=True, variance=variance), v

        late = jax.lax.scan(body, target, jnp.arange(600))[1][100:]
        return np.asarray(late, np.float64).mean((0, 1))[2:]

    drift = beta / (1 - beta) / 15**2 / 12
    np.testing.assert_allclose(run(1 / 12), roots[2:] ** 2, atol=0.15 * drift)
    np.testing.assert_allclose(run(0.0) - roots[2:] ** 2, drift, rtol=0.15)


def test_non_finite_values_stay_in_their_block():
    x = jnp.asarray(normal((2, 256))).at[0, 5].set(jnp.nan).at[1, 200].set(jnp.inf)
    for spec in (bred.QuantSpec(map="linear"), bred.QuantSpec(3, map="linear"), bred.QuantSpec(map="zero")):
        bad = np.isnan(np.asarray(roundtrip(x, spec))).reshape(2, -1, spec.block_size)
        assert bad[0, 0].all() and bad[1, 200 // spec.block_size].all() and bad.sum() == 2 * spec.block_size
    negative = bred.encode(-jnp.ones(8), bred.QuantSpec(map="sqrt"))
    assert np.isnan(bred.decode(negative)).all()


@pytest.mark.parametrize("scale", [1e-30, 1e30, 3e-36])
def test_extreme_scales(scale):
    x = normal((128,)).astype(np.float64)
    back = np.asarray(roundtrip((x * scale).astype(np.float32), bred.QuantSpec(map="linear")), np.float64) / scale
    assert np.abs(back - x).max() <= np.abs(x).max() * 2 / 15 * 1.001


def test_denormals_become_zeros_and_an_outlier_spoils_its_block_alone():
    assert not np.any(roundtrip(np.full(128, 1e-40, np.float32), bred.QuantSpec(map="linear")))
    x = normal((256,))
    x[3] = 1e6
    back = np.asarray(roundtrip(x, bred.QuantSpec(map="linear")))
    assert np.abs(back[128:] - x[128:]).max() <= np.abs(x[128:]).max() * 2 / 15 * 1.001


def test_zeros_are_exact_and_padding_never_matters():
    for spec in SPECS[::4]:
        zeros = roundtrip(np.zeros((3, 130), np.float32), spec, count=5)
        np.testing.assert_array_equal(zeros, 0)
    x = normal((5, 131))
    spec = bred.QuantSpec(map="linear")
    tail = encode(x, spec, seed=1).scale[:, 1]
    np.testing.assert_array_equal(tail, np.abs(x[:, 128:]).max(1))


@pytest.mark.parametrize("bits", [3, 4])
def test_bf16_scales_are_rounded_up(bits):
    spec = bred.QuantSpec(bits, map="linear", scale_dtype="bfloat16")
    x = normal((64, 128))
    q = encode(x, spec)
    assert q.scale.dtype == jnp.bfloat16
    blocks = np.abs(x.reshape(64, -1, spec.block_size)).max(-1)
    stored = np.asarray(q.scale, np.float32)
    assert (stored >= blocks).all() and (stored <= blocks * (1 + 2**-7)).all()
    error = np.abs(np.asarray(bred.decode(q)) - x).reshape(64, -1, spec.block_size).max(-1)
    assert (error <= stored * 2 / spec.steps * 1.001).all()


@pytest.mark.parametrize(("bits", "block", "bound"), [(4, 128, 4.26), (3, 64, 3.51), (8, 256, 8.13)])
def test_bits_an_element(bits, block, bound):
    q = encode(normal((64, 1024)), bred.QuantSpec(bits, map="linear"))
    assert q.spec.block_size == block
    assert 8 * q.nbytes / q.size <= bound and q.nbytes == q.codes.nbytes + q.scale.nbytes


def test_dithers_differ_between_steps_leaves_seeds_and_blocks():
    spec = bred.QuantSpec()
    base = np.asarray(bred.dither(spec, (), 4096, seed=0, leaf=1, count=1))
    assert abs(base.mean()) < 4 * np.sqrt(1 / 12 / 4096) and len(np.unique(base)) > 3900
    for other in ({"count": 2}, {"leaf": 2}, {"seed": 1}):
        u = np.asarray(bred.dither(spec, (), 4096, **{"seed": 0, "leaf": 1, "count": 1, **other}))
        assert abs(np.corrcoef(base, u)[0, 1]) < 4 / np.sqrt(4096)
        assert not np.array_equal(np.sort(base), np.sort(u))
    assert abs(np.corrcoef(base[1:], base[:-1])[0, 1]) < 4 / np.sqrt(4096)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits must be one of"),
        ({"bits": True}, "bits must be one of"),
        ({"block_size": 12}, "block_size must be a positive multiple of 8"),
        ({"block_size": 0}, "block_size must be a positive multiple of 8"),
        ({"block_size": True}, "block_size must be a positive multiple of 8"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"map": "log"}, "map must be one of"),
        ({"scale_dtype": "float16"}, "scale_dtype must be one of"),
    ],
)
def test_bad_specs(options, message):
    with pytest.raises(ValueError, match=message):
        bred.QuantSpec(**options)


def test_bad_calls():
    spec = bred.QuantSpec(map="linear")
    with pytest.raises(ValueError, match="seed must be an integer >= 0, got -1"):
        bred.encode(jnp.ones(8), spec, seed=-1)
    with pytest.raises(ValueError, match="map must be 'linear'"):
        bred.encode(jnp.ones(8), bred.QuantSpec())
    with pytest.raises(TypeError, match="x must be real and floating, got int32"):
        bred.encode(jnp.ones(8, jnp.int32), spec)
    q = bred.encode(jnp.ones(8), spec)
    with pytest.raises(ValueError, match="codes and scale of a"):
        bred.decode(dataclasses.replace(q, codes=q.codes[:2]))
