"""BiLoCo and its baselines: the fit, the bytes, the metric, synthetic weights, bad input."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import taps, transformer
from jaxlab.quant import awq, biloco, calibrate, dequantize, gptq, quantize, smooth, svdquant
from jaxlab.quant.sign_lowrank import (
    SignLowRank,
    column_scale,
    fit_terms,
    memory_match_rank,
    pack_signs,
    sweep,
    unpack_signs,
    weighted_error,
)
from tests.quant.planted import generate

KEY = jax.random.key(0)
RTN = gptq.quantizer("nvfp4")
NVFP4 = functools.partial(gptq.quantizer, "nvfp4")


@pytest.mark.parametrize("size", [1, 8, 13])
def test_signs_pack_exactly(size):
    x = np.where(np.random.default_rng(size).random((5, size)) < 0.5, -1.0, 1.0).astype(np.float32)
    words = pack_signs(jnp.asarray(x))
    assert words.dtype == jnp.uint8 and words.shape == (5, -(-size // 8))
    np.testing.assert_array_equal(unpack_signs(words, size), x)


def test_bytes_are_those_of_the_stored_arrays_and_a_sixteenth_of_bfloat16():
    w, h = generate(0)
    settings = biloco.Settings(columns=True, smoothing=(), shares=(0.0,), iterations=0)
    found = biloco.fit(w, h, NVFP4, rank=24, settings=settings).correction
    m, n = w.shape
    assert found.nbytes == 24 * (m + n) // 8 + 2 * 24 + 2 * n == sum(x.nbytes for x in jax.tree.leaves(found))
    signs = found.u.nbytes + found.v.nbytes
    assert signs * 16 == 2 * 24 * (m + n)
    for rank in (1, 2, 8, 32):
        for columns in (True, False):
            terms = memory_match_rank(m, n, rank, columns=columns)
            bits = lambda r, c=columns: r * (m + n + 16) + 16 * n * c  # noqa: E731
            assert bits(terms) <= 16 * rank * (m + n) < bits(terms + 1)


@pytest.mark.parametrize("kind", ["none", "diag", "full"])
def test_every_term_and_every_pass_lowers_the_objective(kind):
    w, h = generate(1)
    metric = {"none": jnp.ones(128), "diag": jnp.diagonal(jnp.asarray(h)), "full": jnp.asarray(h)}[kind]
    errors = []
    ut, vt, s = fit_terms(jnp.asarray(w), metric, KEY, rank=16, passes=0)
    for terms in (1, 2, 4, 8, 16):
        part = (ut[:terms] * s[:terms, None]).T @ vt[:terms]
        errors.append(weighted_error(w, part, np.asarray(metric)))
    assert all(b < a for a, b in zip([1.0, *errors], errors, strict=False))
    for _ in range(2):
        ut, vt, s = sweep(jnp.asarray(w), metric, KEY, (ut, vt, s), 0, 16, False)
        errors.append(weighted_error(w, (ut * s[:, None]).T @ vt, np.asarray(metric)))
        assert errors[-1] <= errors[-2] * (1 + 1e-5)


def test_a_full_metric_fits_at_least_as_well_as_its_diagonal():
    w, h = generate(2)
    r = jnp.asarray(w - RTN(w)[1])
    found = {}
    for kind, metric in (("diag", np.diagonal(h)), ("full", h), ("none", np.ones(128, np.float32))):
        ut, vt, s = fit_terms(r, jnp.asarray(metric), KEY, rank=16, passes=0)
        found[kind] = weighted_error(r, (ut * s[:, None]).T @ vt, h)
    assert found["full"] <= found["diag"] * 1.001 and found["diag"] < 0.9 * found["none"]


def test_gaussian_energy_a_term():
    """Each of the first terms takes 1.9 / n of the energy of a square Gaussian matrix; rate theory allows 2.77 / n."""
    n = 256
    r = jax.random.normal(KEY, (n, n))
    ut, vt, s = fit_terms(r, jnp.ones(n), KEY, rank=16, passes=0)
    left = float(jnp.sum((r - (ut * s[:, None]).T @ vt) ** 2) / jnp.sum(r * r))
    assert 1 - 2.77 * 16 / n < left < 1 - 1.8 * 16 / n


def test_planted_sign_matrices_are_recovered():
    rng = np.random.default_rng(3)
    u, v = (np.where(rng.random((k, 8)) < 0.5, -1.0, 1.0) for k in (96, 128))
    s = 2.0 ** -np.arange(8)
    r = jnp.asarray((u * s) @ v.T, jnp.float32)
    ut, vt, found = fit_terms(r, jnp.ones(128), KEY, rank=10, passes=2)
    assert float(jnp.linalg.norm(r - (ut * found[:, None]).T @ vt) / jnp.linalg.norm(r)) < 1e-4


def test_scales_are_solved_for_together():
    """Against the normal equations in float64."""
    w, h = generate(4)
    ut, vt, s = (np.asarray(x, np.float64) for x in fit_terms(jnp.asarray(w), jnp.asarray(h), KEY, rank=16, passes=0))
    hv = vt @ h
    gram, rhs = (ut @ ut.T) * (hv @ vt.T), np.sum((ut @ w.astype(np.float64)) * hv, axis=1)
    expected = np.linalg.solve(gram, rhs)
    error = lambda x: weighted_error(w, (ut * x[:, None]).T @ vt, h)  # noqa: E731
    assert error(s) <= error(expected) * (1 + 1e-3)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rank", [2, 8])
@pytest.mark.slow
def test_better_than_the_strongest_svdquant_also_on_a_planted_low_rank_part(seed, rank):
    """The generator on which a plain residual fit loses: absorbing terms first turns it."""
    w, h = generate(seed, 192, 256)
    plain, smoothed = (
        min(svdquant.fit(w, h, NVFP4, rank=rank, whiten=white, smoothing=grid).error for white in (True, False))
        for grid in ((smooth.NONE,), smooth.GRID)
    )
    found = biloco.fit(w, h, NVFP4, match_svd_rank=rank)
    assert found.extra_bytes <= 2 * rank * sum(w.shape)
    # Smoothing costs the baseline nothing here, and BiLoCo two bytes an input.
    assert found.error <= 0.8 * plain and found.error <= smoothed
    settings = biloco.Settings(shares=(0.0,), smoothing=(), iterations=0)
    residual = biloco.fit(w, h, NVFP4, match_svd_rank=rank, settings=settings)
    assert found.error < residual.error and found.share > 0
    whole = (np.asarray(dequantize(found.base)) + np.asarray(found.correction.materialize())) / found.smooth
    assert weighted_error(w, whole, h) == pytest.approx(found.error, rel=1e-5)


def test_better_than_svdquant_in_a_small_case():
    w, h = generate(0)
    strongest = min(
        svdquant.fit(w, h, NVFP4, rank=2, whiten=white, smoothing=smooth.GRID).error for white in (True, False)
    )
    settings = biloco.Settings(columns=False, smoothing=(), shares=(0.5,), iterations=1)
    found = biloco.fit(w, h, NVFP4, match_svd_rank=2, settings=settings)
    assert found.error < 0.85 * strongest and found.correction.nbytes <= 4 * sum(w.shape)


def test_iterating_is_never_worse():
    w, h = generate(5)
    settings = biloco.Settings(columns=False, smoothing=(), shares=(0.0, 0.5))
    fits = [
        biloco.fit(w, h, NVFP4, rank=16, settings=dataclasses.replace(settings, iterations=i)).error for i in (0, 2)
    ]
    assert fits[1] <= fits[0]


def test_gptq_is_rounding_for_the_identity_and_better_for_correlated_inputs():
    w, h = generate(6)
    np.testing.assert_array_equal(gptq.round_columns(w, None)[3], RTN(w)[1])
    stored, decoded = gptq.quantizer("nvfp4", h, rounding="gptq")(w)
    np.testing.assert_array_equal(dequantize(stored), decoded)
    assert weighted_error(w, decoded, h) < 0.85 * weighted_error(w, RTN(w)[1], h)
    plain = gptq.quantizer("mxfp4")(w)[1]
    assert weighted_error(w, gptq.quantizer("mxfp4", h, rounding="gptq")(w)[1], h) < weighted_error(w, plain, h)


def test_gptq_against_a_slow_reference():
    """Column by column in float64, every later column changed at once."""
    w, h = generate(7, 16, 32)
    inverse = np.linalg.inv(h.astype(np.float64))
    x, q = w.astype(np.float64).copy(), np.zeros_like(w, np.float64)
    _, bytes_, ts, decoded = gptq.round_columns(w, h)
    from jaxlab.kernels.lowbit import numerics

    scale = np.repeat(np.asarray(numerics.e4m3_decode(bytes_) * ts, np.float64), 16, axis=1)
    for j in range(32):
        code = numerics.e2m1_encode(jnp.asarray(x[:, j], jnp.float32), jnp.asarray(scale[:, j], jnp.float32))
        q[:, j] = np.asarray(numerics.e2m1_decode(code)) * scale[:, j]
        change = np.outer((x[:, j] - q[:, j]) / inverse[j, j], inverse[j])
        x[:, j:] -= change[:, j:]
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    assert np.mean(np.abs(q - np.asarray(decoded)) > 1e-6) < 0.01  # a tie may fall on either side


def test_svdquant_iterates_while_it_helps():
    w, h = generate(8)
    found = svdquant.fit(w, h, NVFP4, rank=4)
    assert len(found.errors) >= 2 and found.error < weighted_error(w, RTN(w)[1], h) and found.smooth is None
    assert found.correction.nbytes == 2 * 4 * sum(w.shape)
    total = np.asarray(dequantize(found.base)) + np.asarray(found.correction.materialize())
    np.testing.assert_allclose(total, found.decoded, rtol=1e-6, atol=1e-7)
    assert weighted_error(w, total, h) == pytest.approx(found.error, rel=1e-6)


def test_awq_scales_help_where_channels_differ():
    w, h = generate(9)
    t, alpha = awq.search(w, h, RTN)
    assert alpha > 0 and weighted_error(w, RTN(w * t)[1] / t, h) < weighted_error(w, RTN(w)[1], h)


def test_moments_stream_and_merge():
    x = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
    whole = calibrate.update(calibrate.moments(6), x)
    parts = [calibrate.update(calibrate.moments(6), part) for part in (x[:8].reshape(2, 4, 6), x[8:])]
    merged = functools.reduce(calibrate.merge, parts)
    np.testing.assert_allclose(merged.total, whole.total, rtol=1e-5)
    h = calibrate.hessian(merged, damping=0.0)
    np.testing.assert_allclose(h, x.T @ x / 40, rtol=1e-4, atol=1e-6)
    diagonal = calibrate.hessian(calibrate.update(calibrate.moments(6, full=False), x), damping=0.0)
    np.testing.assert_allclose(diagonal, np.diagonal(h), rtol=1e-5)


def test_the_product_equals_that_of_the_dense_matrix():
    w, h = generate(10)
    settings = biloco.Settings(columns=True, smoothing=(), shares=(0.5,), iterations=0)
    found = biloco.fit(w, h, NVFP4, rank=19, settings=settings)
    x = jax.random.normal(KEY, (3, 5, 128))
    dense = dequantize(found.base) + found.correction.materialize()
    np.testing.assert_allclose(biloco.matmul(x, found.base, found.correction), x @ dense.T, rtol=1e-4, atol=1e-5)
    assert biloco.matmul(x.astype(jnp.bfloat16), found.base, found.correction).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="base must be nvfp4 or mxfp4 along axis -1"):
        biloco.matmul(x, quantize(w, "int8"), found.correction)


def test_zero_weights_and_zero_columns_are_finite():
    w, h = generate(11)
    w[:, 3] = 0
    found = biloco.fit(w, h, NVFP4, rank=8)
    assert np.isfinite(found.error) and np.isfinite(found.decoded).all()
    assert np.isfinite(np.asarray(column_scale(jnp.zeros((4, 8))), np.float32)).all()
    ut, vt, s = fit_terms(jnp.zeros((16, 24)), jnp.ones(24), KEY, rank=8)
    assert not np.any(np.asarray((ut * s[:, None]).T @ vt))


def test_bad_input():
    w, h = generate(0)
    for arguments, message in (
        ({}, "give either rank or match_svd_rank"),
        ({"rank": 8, "match_svd_rank": 2}, "give either rank or match_svd_rank"),
        ({"rank": 0}, "rank must be an integer >= 1"),
        ({"match_svd_rank": 0}, "match_svd_rank must be an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            biloco.fit(w, h, NVFP4, **arguments)
    for arguments, message in (
        ({"shares": (1.5,)}, "shares must be"),
        ({"shares": ()}, "shares must be"),
        ({"hessian": "half"}, "hessian must be one of"),
        ({"passes": -1}, "passes must be an integer >= 0"),
        ({"iterations": -1}, "iterations must be an integer >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            biloco.Settings(**arguments)
    with pytest.raises(ValueError, match="too small a budget"):
        memory_match_rank(8, 8, 0)
    for bad, message in (
        (h[:5], "must have the shape"),
        (h * np.nan, "must be finite"),
        (-h, "positive diagonal"),
        (np.triu(h) + np.eye(128, dtype=np.float32), "symmetric"),
    ):
        with pytest.raises(ValueError, match=message):
            biloco.fit(w, bad, NVFP4, rank=8)
    with pytest.raises(ValueError, match="needs a matrix, got a diagonal"):
        biloco.fit(w, np.diagonal(h).copy(), NVFP4, rank=8, settings=biloco.Settings("full"))
    with pytest.raises(ValueError, match="w must be finite"):
        biloco.fit(w * np.float32(np.inf), h, NVFP4, rank=8)
    with pytest.raises(ValueError, match="multiple of 16 columns"):
        gptq.round_columns(w[:, :50], None)
    with pytest.raises(ValueError, match="format must be one of"):
        gptq.quantizer("int4")
    with pytest.raises(ValueError, match=r"rank must be in \[1, 96\]"):
        svdquant.fit(w, h, NVFP4, rank=200)
    with pytest.raises(ValueError, match="x must have 6 features"):
        calibrate.update(calibrate.moments(6), jnp.ones((2, 5)))
    with pytest.raises(ValueError, match="at least one vector"):
        calibrate.hessian(calibrate.moments(6))


def test_inputs_of_the_linear_layers():
    config = transformer.TransformerConfig(vocab=32, dim=16, layers=2, heads=2, kv_heads=1, ffn=24)
    params = transformer.init(config, KEY)
    tokens = jax.random.randint(KEY, (2, 7), 0, 32)
    found = jax.jit(functools.partial(taps.linear_inputs, config))(params, tokens)
    assert len(found) == 2 * 7 + 1
    logits = transformer.apply(config, params, tokens)
    np.testing.assert_allclose(found["head/kernel"] @ params["head"]["kernel"], logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["layers/1/attn/q/kernel"], found["layers/1/attn/v/kernel"])
    np.testing.assert_array_equal(transformer.apply(config, params, tokens), logits)
    with pytest.raises(ValueError, match="scan_layers=False"):
        taps.linear_inputs(transformer.PRESETS["178m"], params, tokens)


def test_weights_that_are_all_zero_have_no_error():
    assert (
        weighted_error(np.zeros((4, 8)), np.zeros((4, 8))) == 0
        and weighted_error(np.zeros(8)[None], np.ones((1, 8))) == 8
    )


def test_a_correction_is_a_pytree():
    c = SignLowRank(
        jnp.zeros((4, 2), jnp.uint8), jnp.zeros((4, 3), jnp.uint8), jnp.ones(4, jnp.bfloat16), None, (16, 24)
    )
    assert jax.tree.map(lambda x: x, c).rank == 4 and len(jax.tree.leaves(c)) == 3
    np.testing.assert_array_equal(jax.jit(lambda c: c.materialize())(c), 4.0)
