"""The numbers: every code against ml_dtypes, scales, packing, exact vectors, means and quotients, inside kernels."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxlab.kernels.lowbit import exact, numerics, packing
from tests.reference import quant_np

RNG = np.random.default_rng(0)
SUBNORMALS = np.array([1e-45, 1e-40, -1e-40, -1e-45, 1.1e-38, -1.1e-38], np.float32)


def neighbours(x):
    """x, and the float32 numbers next to it."""
    x = np.asarray(x, np.float32)
    return np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])


def same(a, b):
    """The same bits."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(
        a.view(np.uint32 if a.dtype == np.float32 else a.dtype), b.view(a.dtype if a.dtype != np.float32 else np.uint32)
    )


def test_every_code_decodes_as_in_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    same(numerics.e2m1_decode(jnp.arange(16)), codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    assert numerics.e2m1_decode(jnp.arange(8)).tolist() == quant_np.E2M1
    everything = np.arange(256, dtype=np.uint8)
    for decode, dtype in (
        (numerics.e4m3_decode, ml_dtypes.float8_e4m3fn),
        (numerics.e8m0_decode, ml_dtypes.float8_e8m0fnu),
    ):
        ours, theirs = np.asarray(decode(jnp.arange(256))), everything.view(dtype).astype(np.float32)
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        finite = ~np.isnan(ours)
        same(ours[finite], theirs[finite])


def test_e2m1_encodes_as_ml_dtypes():
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, 6], np.float32)
    powers = (2.0 ** np.arange(-126, 128)).astype(np.float32)
    special = np.array([0, np.inf, 3.4e38], np.float32)
    x = np.concatenate([neighbours(midpoints), neighbours(powers), special])
    random = RNG.standard_normal(10**6).astype(np.float32) * 3
    x = np.concatenate([x, -x, SUBNORMALS, random])
    expected = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(jax.jit(numerics.e2m1_encode)(x), expected)
    few = jnp.asarray(x[:3000])
    np.testing.assert_array_equal(numerics.e2m1_encode(few), expected[:3000])
    np.testing.assert_array_equal(
        [quant_np.e2m1(v) for v in x[:500].astype(float) if abs(v) < 1e30], expected[:500][np.abs(x[:500]) < 1e30]
    )


def test_e4m3_encodes_as_ml_dtypes_and_saturates():
    numbers = np.array(quant_np.E4M3, np.float32)
    x = np.concatenate(
        [neighbours(numbers), neighbours((numbers[1:] + numbers[:-1]) / 2), neighbours(2.0 ** np.arange(-20, 9))]
    )
    x = np.concatenate(
        [
            x,
            np.abs(SUBNORMALS),
            RNG.uniform(0, 448, 10**5).astype(np.float32),
            np.exp(RNG.uniform(-9, 6, 10**5)).astype(np.float32),
        ]
    )
    x = np.abs(x[x <= 464])
    encode = jax.jit(numerics.e4m3_encode)
    np.testing.assert_array_equal(encode(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    # ml_dtypes makes NaN of these.
    assert encode(np.array([465, 1e30, np.inf], np.float32)).tolist() == [126] * 3
    assert encode(np.array([np.nan, -1], np.float32)).tolist() == [127] * 2


@pytest.mark.parametrize("rule", numerics.E8M0_RULES)
def test_e8m0_rules_take_exponents_from_bits(rule):
    powers = 2.0 ** np.arange(-95, 126)
    x = neighbours(np.concatenate([powers, powers * 1.5, powers * 1.75]))
    x = np.concatenate([x, neighbours([7.9999995, 2.7, 3.4e38, 2.0**-96, 0]), SUBNORMALS])
    x = np.abs(x[np.isfinite(x)])
    byte = np.asarray(jax.jit(numerics.e8m0_encode, static_argnums=1)(x, rule))
    np.testing.assert_array_equal(byte, [quant_np.e8m0(float(v), rule) for v in x])
    live = byte > 0
    ratio = x[live].astype(np.float64) / 2.0 ** (byte[live].astype(np.float64) - 127)
    low, high = {"floor": (4, 8), "ceil": (3, 6), "even": (3.5, 7)}[rule]
    inside = byte[live] < 252
    assert ((ratio >= low) & (ratio <= high))[inside].all() and (rule != "ceil" or ratio[inside].min() > 3)
    assert numerics.e8m0_encode(jnp.array([jnp.inf, jnp.nan, 0.0]), rule).tolist() == [255, 255, 0]


def test_published_vectors():
    """E2M1 in both layouts and BitNet's example, computed with other libraries."""
    x = np.concatenate([np.linspace(-3, 3, 16), 0.01 * np.arange(16)]).astype(np.float32)
    ts = numerics.nvfp4_tensor_scale(jnp.float32(3))
    assert ts == np.float32(3) / np.float32(2688) == np.float32(0.0011160715)
    codes, byte = jax.jit(numerics.nvfp4_encode)(x.reshape(2, 16), ts)
    assert byte.ravel().tolist() == [126, 91]
    assert numerics.e4m3_decode(byte).ravel().tolist() == [448, 22]
    first = [15, 15, 14, 14, 13, 12, 10, 9, 1, 2, 4, 5, 6, 6, 7, 7]
    assert codes.tolist() == [first, [0, 1, 2, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7]]
    assert packing.pack(codes, 4).tolist() == [
        [255, 238, 205, 154, 33, 84, 102, 119],
        [16, 34, 67, 84, 101, 102, 118, 119],
    ]
    codes, byte = jax.jit(numerics.mxfp4_encode)(x[None])
    assert byte.tolist() == [[126]] and codes.tolist() == [first + [0] * 13 + [1] * 3]

    w = jnp.array([[0.4, -0.2, 0.1], [-0.8, 0.05, 0.3]])
    scale = jax.jit(exact.mean_magnitude, static_argnums=1)(w, (0, 1))
    np.testing.assert_allclose(scale, 0.3083333, rtol=1e-6)
    assert (numerics.ternary_encode(w, scale) - 1).tolist() == [[1, -1, 0], [-1, 0, 1]]
    x = jnp.array([0.5, -1.27, 0.005, 1.0])
    assert numerics.int_encode(x, numerics.int_scale(exact.peak(x), 8), 8).tolist() == [50, -127, 0, 100]


def test_codes_and_scales_are_those_of_the_slow_reference():
    x = (RNG.standard_normal((40, 64)) * np.exp(RNG.standard_normal((40, 64)) * 2)).astype(np.float32)
    blocks = jnp.asarray(x).reshape(40, 4, 16)
    codes, byte, ts, values = quant_np.nvfp4(x)
    ours_ts = numerics.nvfp4_tensor_scale(exact.peak(jnp.asarray(x), None).reshape(()))
    ours = jax.jit(numerics.nvfp4_encode)(blocks, ours_ts)
    assert ours_ts == np.float32(ts)
    np.testing.assert_array_equal(ours[0].reshape(40, 64), codes)
    np.testing.assert_array_equal(ours[1][..., 0], byte)
    decoded = jax.jit(numerics.nvfp4_decode)(*ours, ours_ts)
    np.testing.assert_allclose(decoded.reshape(40, 64), values, rtol=2**-23)
    for rule in numerics.E8M0_RULES:
        codes, byte, values = quant_np.mxfp4(x, rule)
        ours = jax.jit(numerics.mxfp4_encode, static_argnums=1)(blocks.reshape(40, 2, 32), rule)
        np.testing.assert_array_equal(ours[0].reshape(40, 64), codes)
        np.testing.assert_array_equal(ours[1][..., 0], byte)
        np.testing.assert_array_equal(jax.jit(numerics.mxfp4_decode)(*ours).reshape(40, 64), values)
    for bits in (4, 8):
        codes, scales = quant_np.integers(x, bits)
        scale = numerics.int_scale(exact.peak(jnp.asarray(x)), bits)
        np.testing.assert_array_equal(jax.jit(numerics.int_encode, static_argnums=2)(x, scale, bits), codes)
        np.testing.assert_array_equal(scale[:, 0], scales.astype(np.float32))
    values, scale = quant_np.ternary(x)
    ours = jax.jit(exact.mean_magnitude, static_argnums=1)(x, (0, 1))
    np.testing.assert_allclose(ours, [[scale]], rtol=2**-23)
    np.testing.assert_array_equal(numerics.ternary_encode(jnp.asarray(x), ours) - 1, values)


def test_scales_of_empty_and_huge_blocks_are_finite_and_positive():
    """A zero block must not become 0 / 0, nor saturate into the byte that means NaN."""
    blocks = np.stack([np.zeros(16), np.full(16, 1e-30), np.full(16, 1e30)]).astype(np.float32)
    blocks[2, 3] *= -1
    codes, byte = jax.jit(numerics.nvfp4_encode)(blocks, numerics.nvfp4_tensor_scale(jnp.float32(1e30)))
    assert byte.ravel().tolist() == [1, 1, 126]
    assert codes[:2].tolist() == [[0] * 16] * 2 and codes[2].tolist() == [7] * 3 + [15] + [7] * 12
    assert numerics.nvfp4_tensor_scale(jnp.array([0, 1e-40, 2.0**-97, jnp.inf, jnp.nan])).tolist()[:3] == [1, 1, 1]
    assert numerics.int_scale(jnp.float32(0), 8) == 1 and numerics.int_scale(jnp.float32(127), 8) == 1
    for bad in (jnp.inf, jnp.nan):
        assert jnp.isnan(numerics.nvfp4_tensor_scale(jnp.float32(bad)))
        assert jnp.isnan(numerics.int_scale(jnp.float32(bad), 4))
        assert jnp.isnan(exact.mean_magnitude(jnp.array([1.0, bad]))).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packing_has_the_first_code_in_the_lowest_bits(bits):
    codes = RNG.integers(0, 2**bits, (5, 24))
    words = packing.pack(jnp.asarray(codes, jnp.int32), bits)
    assert words.dtype == jnp.uint8
    np.testing.assert_array_equal(words, quant_np.pack(codes, bits))
    np.testing.assert_array_equal(packing.unpack(words, bits), codes)
    for i, plane in enumerate(packing.planes(words, bits)):
        np.testing.assert_array_equal(plane, codes[:, i :: 8 // bits])
    negative = jnp.array([[-1, -2, -3, -4, -5, -6, -7, -8]], jnp.int32)
    np.testing.assert_array_equal(packing.unpack(packing.pack(negative, bits), bits), np.asarray(negative) % 2**bits)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.lists(st.integers(0, 255), min_size=4, max_size=4))
def test_unpacking_and_packing_any_bytes_changes_nothing(bits, words):
    words = jnp.array(words, jnp.uint8)
    np.testing.assert_array_equal(packing.pack(packing.unpack(words, bits), bits), words)


@pytest.mark.parametrize("n", [1, 7, 127, 2688, 1000003, 7 * 2**23])
def test_division_is_rounded_to_nearest(n):
    """For every mantissa; the plain quotient of JAX is not, where a compiler sees the constant."""
    m = np.arange(2**23, dtype=np.uint32)[:: 1 if n < 3000 else 16]
    x = (m | np.uint32(0x3F800000)).view(np.float32)
    ours, theirs = np.asarray(jax.jit(exact.divide, static_argnums=1)(x, n)), x / np.float32(n)
    assert (ours != theirs).mean() <= (0 if n < 10**7 else 1e-6)
    few = jnp.asarray(x[:: 2**10]) * jnp.float32(2.0**-90)
    same(exact.divide(few, n), ours[:: 2**10] * np.float32(2.0**-90))
    if n in (7, 127, 2688):
        # The scale of what was dequantised is the scale: quantising twice changes nothing.
        again = jax.jit(exact.divide, static_argnums=1)(ours * np.float32(n), n)
        same(again, ours)


def test_means_do_not_depend_on_order_program_or_devices():
    x = RNG.standard_normal((64, 1250)).astype(np.float32) * np.exp(RNG.standard_normal((64, 1250)).astype(np.float32))
    mean = jax.jit(functools.partial(exact.mean_magnitude, axis=(0, 1)))
    expected = mean(x)
    np.testing.assert_allclose(expected, np.abs(x.astype(np.float64)).mean(), rtol=2**-23)
    same(exact.mean_magnitude(jnp.asarray(x), (0, 1)), expected)
    same(mean(RNG.permutation(x.ravel()).reshape(x.shape)), expected)
    same(jax.jit(exact.mean_magnitude)(RNG.permutation(x.ravel())), expected[0])
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    for spec in (("d",), (None, "d")):
        shape = (64, 1248) if spec[0] is None else x.shape
        part = x[:, : shape[1]]
        split = jax.device_put(part, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        same(mean(split), mean(part))


def test_means_of_long_short_and_constant_rows():
    long = RNG.standard_normal(2**17 + 3).astype(np.float32)  # more than are summed at once
    mean = jax.jit(exact.mean_magnitude)
    np.testing.assert_allclose(mean(long), [np.abs(long.astype(np.float64)).mean()], rtol=2**-23)
    for value in (0.1234567, 3e38, 1e-28, 1.9999999):
        row = np.full((1000,), value, np.float32)
        assert mean(row)[0] == row[0]
    assert not mean(np.full((1000,), 1e-30, np.float32)).any()
    assert exact.mean_magnitude(jnp.zeros((3, 0))).tolist() == [[0]] * 3
    assert exact.mean_magnitude(jnp.array([1.0, 2.0, 0.0, 0.0]), count=2).tolist() == [1.5]
    outlier = np.ones(1000, np.float32)
    outlier[7] = 1e30
    np.testing.assert_allclose(mean(outlier), [1e27], rtol=1e-6)


# What a Pallas kernel would do with the functions: unpack, decode, encode and decode again.
def _tile(words, byte, tensor_scale, codes, values):
    low, high = packing.planes(words[...], 4)
    scale, ts = byte[...].astype(jnp.int32), tensor_scale[...]
    values[0], values[1] = numerics.nvfp4_decode(low, scale, ts), numerics.nvfp4_decode(high, scale, ts)
    codes[0], made = numerics.nvfp4_encode(values[0], ts)
    codes[1] = codes[0] * 0 + made
    codes[2], made = numerics.mxfp4_encode(values[1], "ceil")
    codes[3] = numerics.int_encode(values[0], numerics.int_scale(exact.peak(values[0]), 8), 8)
    values[2] = numerics.mxfp4_decode(codes[2], made)
    values[3] = numerics.ternary_decode(numerics.ternary_encode(values[0], ts), ts)
    values[4] = numerics.sign_decode(numerics.sign_encode(values[0]), ts)


class Whole:
    """An array that is read and written as a reference of a kernel is."""

    def __init__(self, x):
        self.x = x

    def __getitem__(self, i):
        return self.x if i is ... else self.x[i]

    def __setitem__(self, i, value):
        self.x = self.x.at[i].set(value)


SHAPES = jax.ShapeDtypeStruct((4, 32, 128), jnp.int32), jax.ShapeDtypeStruct((5, 32, 128), jnp.float32)


ARGS = (jax.ShapeDtypeStruct((32, 128), jnp.uint8),) * 2 + (jax.ShapeDtypeStruct((32, 1), jnp.float32),)


def plain(words, byte, ts):
    codes, values = (Whole(jnp.zeros(s.shape, s.dtype)) for s in SHAPES)
    _tile(Whole(words), Whole(byte), Whole(ts), codes, values)
    return codes.x, values.x


def kernel(*args, interpret=False, params=None):
    return pl.pallas_call(_tile, out_shape=SHAPES, interpret=interpret, compiler_params=params)(*args)


def test_the_functions_have_the_same_bits_inside_kernels():
    words = jnp.asarray(RNG.integers(0, 256, (32, 128)), jnp.uint8)
    byte = jnp.broadcast_to(jnp.asarray(RNG.integers(1, 127, (32, 1)), jnp.uint8), (32, 128))
    args = words, byte, jnp.full((32, 1), 0.0012345, jnp.float32)
    for a, b in zip(jax.jit(functools.partial(kernel, interpret=True))(*args), jax.jit(plain)(*args), strict=True):
        same(a, b)


def abstract(platform: str) -> contextlib.AbstractContextManager:
    """Tells Pallas which device to lower for where none is there."""
    kind, cores = {"tpu": ("TPU v5e", 1), "cuda": ("NVIDIA H200", None)}[platform]
    device = jax.sharding.AbstractDevice(kind, num_cores=cores, platform={"cuda": "gpu"}.get(platform, platform))
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_functions_lower_for_accelerators(platform):
    params = plgpu.CompilerParams(num_warps=4) if platform == "cuda" else None
    f = jax.jit(functools.partial(kernel, params=params))
    with abstract(platform):
        text = f.trace(*ARGS).lower(lowering_platforms=(platform,)).as_text()
    assert {"tpu": "tpu_custom_call", "cuda": "xla.gpu.triton"}[platform] in text


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 2.0**127, width=32), st.floats(2.0**-100, 2.0**100, width=32))
def test_a_code_is_the_nearest_value(x, scale):
    """Whatever the rounding of the boundaries: no other code is nearer by more than an ulp."""
    scale = np.float32(scale)
    code = int(numerics.e2m1_encode(jnp.float32(x), jnp.float32(scale)))
    error = [abs(x - v * float(scale)) for v in quant_np.E2M1]
    assert error[code] <= min(error) + max(x, 6 * float(scale)) * 2.0**-23 or math.isclose(error[code], min(error))
