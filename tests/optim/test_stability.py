"""Ten thousand steps of an average of noise: what stays bounded, and what does not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.kernels.bred_update import numerics
from jaxlab.optim import bred

# Relative error of the average after many steps: measured by an independent prototype on AdamW-like noise.
EXPECTED = {
    (4, 0.9): 0.330, (4, 0.95): 0.476, (4, 0.99): 0.966, (4, 0.999): 1.81,
    (3, 0.9): 0.599, (3, 0.95): 0.865, (3, 0.99): 1.72, (3, 0.999): 1.38,
}  # fmt: skip
BLOCKS, STEPS = 16, 10_000


def roundtrip(x, spec, count, saturate):
    """Decoded after encoding; without saturation, what plain subtractive dithering decodes."""
    u = bred.dither(spec, (BLOCKS,), 1, seed=0, leaf=1, count=count)
    if spec.rounding == "dither" and not saturate:
        codes, scale = numerics.encode(x, u, steps=spec.steps, nonneg=False)
        return (codes - u - spec.steps / 2) * (scale * (2 / spec.steps))
    q = bred.encode(x, spec, leaf=1, count=count)
    return bred.decode(q, leaf=1, count=count)


@functools.partial(jax.jit, static_argnames=("spec", "saturate"))
def run(spec, beta, saturate=True):
    """Relative error and absmax ratio over the second half; noise whose size differs between elements."""
    key = jax.random.key(7)
    size = jnp.exp(0.4 * jax.random.normal(jax.random.key(8), (BLOCKS, spec.block_size)))

    def body(carry, t):
        stored, exact = carry
        noise = size * jax.random.normal(jax.random.fold_in(key, t), exact.shape)
        update = lambda m: beta * m + (1 - beta) * noise  # noqa: E731
        stored, exact = roundtrip(update(stored), spec, t, saturate), update(exact)
        top = lambda m: jnp.mean(jnp.max(jnp.abs(m), axis=-1))  # noqa: E731
        out = jnp.sum((stored - exact) ** 2), jnp.sum(exact**2), top(stored), top(exact)
        return (stored, exact), out

    zeros = jnp.zeros((BLOCKS, spec.block_size))
    _, (error, norm, ours, theirs) = jax.lax.scan(body, (zeros, zeros), jnp.arange(STEPS))
    late = slice(STEPS // 2, None)
    return jnp.sqrt(jnp.mean(error[late]) / jnp.mean(norm[late])), jnp.mean(ours[late]) / jnp.mean(theirs[late])


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("bits", [3, 4])
def test_dithered_averages_stay_bounded(bits, beta):
    error, top = run(bred.QuantSpec(bits, map="linear"), beta)
    assert error <= 1.2 * EXPECTED[bits, beta]
    assert 0.5 <= top <= 1.2


@pytest.mark.parametrize("bits", [3, 4])
def test_a_decoder_that_does_not_saturate_fails(bits):
    """The same test must tell a plain copy of subtractive dithering from this method."""
    error, top = run(bred.QuantSpec(bits, map="linear"), 0.999, saturate=False)
    assert not (error <= 1.2 * EXPECTED[bits, 0.999] and 0.5 <= top <= 1.2)
    assert top > 3


@pytest.mark.parametrize("bits", [3, 4])
def test_other_roundings_are_worse_where_the_decay_is_close_to_one(bits):
    for rounding, beta in (("nearest", 0.99), ("stochastic", 0.99), ("nearest", 0.999), ("stochastic", 0.999)):
        for name in ("linear", "zero"):
            error, _ = run(bred.QuantSpec(bits, rounding=rounding, map=name), beta)
            assert error > 1.2 * EXPECTED[bits, beta], (rounding, beta, name)


def test_nearest_is_better_where_the_signal_dominates():
    """|mean| = 3 standard deviations of the noise, beta = 0.99: the caveat in `QuantSpec`."""
    key, beta = jax.random.key(3), 0.99
    mean = 3 * jnp.sign(jax.random.normal(key, (BLOCKS, 128)))

    def error(spec):
        def body(carry, t):
            stored, exact = carry
            g = mean + jax.random.normal(jax.random.fold_in(key, t), mean.shape)
            stored, exact = roundtrip(beta * stored + (1 - beta) * g, spec, t, True), beta * exact + (1 - beta) * g
            return (stored, exact), jnp.sum((stored - exact) ** 2) / jnp.sum(exact**2)

        return float(jnp.sqrt(jnp.mean(jax.lax.scan(body, (0 * mean, 0 * mean), jnp.arange(2000))[1][1000:])))

    errors = {r: error(bred.QuantSpec(rounding=r, map="linear")) for r in ("dither", "nearest", "stochastic")}
    assert errors["nearest"] < 0.7 * errors["dither"] and errors["stochastic"] < 0.7 * errors["dither"]
    assert np.isfinite(list(errors.values())).all()
