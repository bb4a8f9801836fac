"""Formats and QTensor: the same bits everywhere, any shape, extreme values, gradients, transformations, bad input."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab import quant
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.errors import CheckpointError
from jaxlab.quant import MXFP4, NVFP4, Int, Sign, Ternary
from tests.reference import quant_np

FORMATS = [
    NVFP4(),
    MXFP4("floor"),
    MXFP4("ceil"),
    MXFP4("even"),
    Int(8),
    Int(4),
    Int(4, "tensor"),
    Int(8, "block", 32),
    Ternary(),
    Ternary("row"),
    Ternary("block", 24),
    Sign(),
    Sign("row"),
    Sign("block", 16),
]
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)

# Compiled once a format and shape; operation by operation they would take longer.
encode = jax.jit(quant.quantize, static_argnames=("format", "axis"))
decode = jax.jit(quant.dequantize, static_argnames="dtype")
fake = jax.jit(quant.fake_quant, static_argnames=("format", "axis", "ste"))


def heavy(shape, seed=0, dtype=np.float32):
    """Values over several orders of magnitude."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) * 1.5), dtype)


def same(a, b):
    """The same bits, leaf by leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes(), f"{(x != y).sum()} of {x.size} differ"


@functools.partial(jax.jit, static_argnames="fmt")
def together(x, fmt):
    """In one program, where XLA may fuse and reorder: fake, there and back, and fake in a wider type."""
    y = quant.fake_quant(x, fmt)
    return y, quant.dequantize(quant.quantize(x, fmt)), y.astype(jnp.float32)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(f, "float32") for f in FORMATS] + [(f, "bfloat16") for f in FORMATS[:8:2] + FORMATS[8:9]],
    ids=str,
)
def test_every_path_gives_the_same_bits(fmt, dtype):
    x = heavy((3, 40), dtype=dtype)
    expected = decode(encode(x, fmt))
    assert expected.shape == x.shape and expected.dtype == x.dtype
    # What a longer program does with the result must not take the rounding to a short type away again.
    same(together(x, fmt), (expected, expected, expected.astype(jnp.float32)))
    if fmt == NVFP4():
        same(quant.dequantize(quant.quantize(x, fmt)), expected)
        same(quant.fake_quant(x, fmt), expected)


@pytest.mark.parametrize("fmt", [NVFP4(), Ternary()], ids=str)
def test_operation_by_operation_gives_the_same_bits(fmt):
    x = heavy((3, 40))
    with jax.disable_jit():
        q = quant.quantize(x, fmt)
        y = quant.dequantize(q)
        same(quant.fake_quant(x, fmt), y)
    same(q, encode(x, fmt))
    same(y, decode(q))


@pytest.mark.parametrize("fmt", [NVFP4(), Int(8), Ternary("row")], ids=str)
def test_a_single_block_has_the_same_bits_too(fmt):
    """There XLA sees scales as scalars, and would reorder products with them."""
    for seed in range(20):
        x = heavy((1, 16), seed)
        same(together(x, fmt), (decode(encode(x, fmt)),) * 3)


def test_values_are_those_of_the_slow_reference():
    x = np.asarray(heavy((3, 40)))
    codes, byte, ts, values = quant_np.nvfp4(x)
    q = encode(x, NVFP4())
    np.testing.assert_array_equal(q.codes, quant_np.pack(codes, 4))
    np.testing.assert_array_equal(q.scale, byte)
    assert q.tensor_scale == np.float32(ts) and q.codes.dtype == q.scale.dtype == jnp.uint8
    np.testing.assert_allclose(decode(q), values, rtol=2**-23)
    for rule in ("floor", "ceil", "even"):
        codes, byte, values = quant_np.mxfp4(x, rule)
        q = encode(x, MXFP4(rule))
        np.testing.assert_array_equal(q.codes, quant_np.pack(codes, 4))
        np.testing.assert_array_equal(q.scale, byte)
        np.testing.assert_array_equal(decode(q), values)
        assert q.tensor_scale is None
    for bits in (4, 8):
        codes, scales = quant_np.integers(x, bits)
        q = encode(x, Int(bits))
        np.testing.assert_array_equal(q.codes, quant_np.pack(codes % 2**bits, bits))
        np.testing.assert_allclose(decode(q), codes * scales[:, None], rtol=2**-23)
    values, scale = quant_np.ternary(x)
    q = encode(x, Ternary())
    np.testing.assert_array_equal(q.codes, quant_np.pack(values + 1, 2))
    np.testing.assert_allclose(decode(q), values * scale, rtol=2**-22)
    q = encode(x, Sign("row"))
    np.testing.assert_array_equal(q.codes, quant_np.pack(x < 0, 1))
    np.testing.assert_allclose(decode(q), np.where(x < 0, -1, 1) * np.abs(x).mean(1, keepdims=True), rtol=2**-22)


@pytest.mark.parametrize("fmt", [FORMATS[i] for i in (0, 1, 5, 7, 10, 12)], ids=str)
@pytest.mark.parametrize("shape", [(1,), (2, 3, 17)], ids=str)
def test_any_shape_comes_back(fmt, shape):
    x = heavy(shape, len(shape))
    q = encode(x, fmt)
    y = decode(q)
    assert y.shape == x.shape and bool(jnp.isfinite(y).all())
    assert q.codes.shape == (*shape[:-1], fmt.padded(shape[-1]) * fmt.bits // 8)
    assert q.scale.shape == fmt.scale_shape(shape[:-1], shape[-1])
    assert q.nbytes == q.codes.size + q.scale.size * q.scale.dtype.itemsize + (4 if fmt == NVFP4() else 0)
    step = {NVFP4: 1 / 6, MXFP4: 1 / 4, Int: 1 / 14}.get(type(fmt))
    if step:
        assert bool((jnp.abs(y - x) <= step * jnp.abs(x).max() * 1.01).all())


@pytest.mark.parametrize("fmt", [NVFP4(), MXFP4("ceil"), Ternary(), Sign("block", 16)], ids=str)
def test_blocks_lie_along_the_axis_and_never_across_rows(fmt):
    """A row's bytes depend on that row alone, but for what is shared by the whole tensor."""
    x = heavy((40, 1, 3))
    q = encode(x, fmt, axis=0)
    assert q.axis == -3 and q.lead == (1, 3) and q.row == 40 and q.shape == (40, 1, 3)
    moved = encode(x[:, 0].T, fmt)
    same((q.codes[0], q.tensor_scale), (moved.codes, moved.tensor_scale))
    same(decode(q)[:, 0], decode(moved).T)
    same(quant.quantize(x, fmt, axis=-3), q)
    same(fake(x, fmt, axis=0), decode(q))
    if fmt.per != "tensor" and not fmt.tensor_scaled:
        changed = encode(x[:, 0].T.at[1].multiply(37.0), fmt)
        for a, b in ((moved.codes, changed.codes), (moved.scale, changed.scale)):
            same(a[::2], b[::2])


SCALES = st.integers(-60, 60)
ROW = st.lists(st.floats(-8, 8, width=32), min_size=40, max_size=40)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(0, 2**31), SCALES)
def test_quantising_twice_changes_nothing(fmt, seed, power):
    x = heavy((3, 40), seed) * jnp.float32(2.0**power)
    q = encode(x, fmt)
    again = encode(decode(q), fmt)
    if isinstance(fmt, Ternary):  # the mean of what was dequantised is another
        same(again.codes, q.codes) if power > 0 else None
    elif fmt == MXFP4("ceil"):  # a maximum that was rounded down to 3 fits half the scale, too
        same(decode(again), decode(q))
    else:
        same(again, q)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*FORMATS[1:8], *FORMATS[-3:]]), ROW)
def test_quantising_any_values_twice_gives_the_same_values(fmt, row):
    y = decode(encode(jnp.array([row, row[::-1], [0.0] * 40], jnp.float32), fmt))
    assert bool(jnp.isfinite(y).all())
    same(decode(encode(y, fmt)), y)


@settings(max_examples=40, deadline=None)
@given(ROW)
def test_nvfp4_is_idempotent_where_block_scales_are_normal_numbers(row):
    """Subnormal E4M3 scales round by up to a third, which can take a block's maximum to another code than 6."""
    q = encode(jnp.array([row, row[::-1], [0.0] * 40], jnp.float32), NVFP4())
    y = decode(q)
    again = encode(y, NVFP4())
    assert bool(jnp.isfinite(y).all()) and q.scale.min() >= 1 and q.scale.max() <= 126
    same(again.tensor_scale, q.tensor_scale)
    normal = np.asarray(q.scale) >= 8
    same(np.asarray(again.scale)[normal], np.asarray(q.scale)[normal])
    kept = np.repeat(normal, 16, axis=1)[:, :40]
    same(np.asarray(decode(again))[kept], np.asarray(y)[kept])
    # Elsewhere it changes by less than the scale of the smallest normal block.
    assert bool((jnp.abs(decode(again) - y) <= 2.0**-6 * q.tensor_scale).all())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([f for f in FORMATS if not isinstance(f, Ternary)]), st.integers(0, 2**31), SCALES)
def test_powers_of_two_pass_through(fmt, seed, power):
    x, factor = heavy((3, 40), seed), jnp.float32(2.0**power)
    same(decode(encode(x * factor, fmt)), decode(encode(x, fmt)) * factor)
    same(encode(x * factor, fmt).codes, encode(x, fmt).codes)


def test_ternary_without_eps_passes_powers_of_two_on():
    fmt, x = Ternary("row", eps=0.0), heavy((3, 40))
    same(decode(encode(x * 2.0**-40, fmt)), decode(encode(x, fmt)) * 2.0**-40)


EDGES = {
    "zeros": np.zeros((3, 40)),
    "negative zeros": -np.zeros((3, 40)),
    "a zero block": np.concatenate([np.zeros((3, 32)), np.ones((3, 8))], 1),
    "an outlier of 1e30": np.where(np.arange(40) == 7, 1e30, 1e-3) * np.ones((3, 1)),
    "1e-38": np.full((3, 40), 1e-38),
    "subnormal": np.full((3, 40), -1e-45),
    "the largest": np.full((3, 40), np.finfo(np.float32).max),
    "near the largest": np.linspace(1.7e38, 3.4e38, 120).reshape(3, 40),
    "all negative": -np.abs(np.random.default_rng(0).standard_normal((3, 40))),
    "one sign, tiny": np.full((3, 40), 2.0**-95),
}


@by_format
def test_extreme_values_stay_finite(fmt):
    for name, x in EDGES.items():
        x = jnp.asarray(x, jnp.float32)
        q = encode(x, fmt)
        y = decode(q)
        assert bool(jnp.isfinite(y).all()), name
        top = float(jnp.abs(x).max())
        assert float(jnp.abs(y).max()) <= top * 4 / 3, name
        if top < 2.0**-96:
            assert not jnp.any(y), name
        if fmt.scale_dtype == np.uint8:
            assert bool((q.scale != 127).all()) or not isinstance(fmt, NVFP4), name
            assert bool((q.scale < 255).all()), name
        if name == "all negative":
            assert bool((y <= 0).all())
        same(together(x, fmt)[0], y)


def test_zero_blocks_and_tensors():
    q = encode(jnp.zeros((3, 40)), NVFP4())
    assert not q.codes.any() and set(q.scale.ravel().tolist()) == {1} and q.tensor_scale == 1
    q = encode(jnp.zeros((3, 40)), MXFP4())
    assert not q.codes.any() and not q.scale.any()
    q = encode(jnp.zeros((3, 40)), Int(8))
    assert not q.codes.any() and (q.scale == 1).all()
    assert (decode(encode(jnp.zeros((3, 40)), Sign())) == 0).all()
    assert (decode(encode(jnp.array([[0.0, -0.0, 2.0, -2.0]]), Sign())) == jnp.array([[1.0, 1, 1, -1]])).all()


@pytest.mark.parametrize("fmt", [FORMATS[i] for i in (0, 4, 6, 10)], ids=str)
@pytest.mark.parametrize("shape", [(0, 40), (3, 0)], ids=str)
def test_empty_arrays(fmt, shape):
    q = quant.quantize(jnp.zeros(shape), fmt)
    y = quant.fake_quant(jnp.zeros(shape), fmt) if shape[0] else quant.dequantize(q)
    assert y.shape == shape
    assert q.nbytes == q.scale.nbytes + (4 if fmt.tensor_scaled else 0)


@pytest.mark.parametrize(
    ("fmt", "expected", "bits"),
    [(NVFP4(), 20.4, 4.5), (MXFP4("floor"), 18.8, 4.25), (MXFP4("ceil"), 18.75, 4.25), (Int(8, "row"), 40, 8.008)],
    ids=str,
)
def test_signal_to_noise_of_gaussian_data(fmt, expected, bits):
    x = np.random.default_rng(1).standard_normal((256, 4096)).astype(np.float32)
    q = encode(x, fmt)
    snr = 10 * math.log10((x**2).sum() / ((np.asarray(decode(q)) - x) ** 2).sum())
    assert abs(snr - expected) < (0.15 if fmt.bits == 4 else 2)
    assert q.nbytes * 8 / x.size == pytest.approx(bits, abs=1e-3)


def gradient(x, fmt, ste="clip"):
    weights = jnp.arange(1.0, x.size + 1).reshape(x.shape)
    f = jax.jit(jax.grad(lambda x: (weights * quant.fake_quant(x, fmt, ste=ste).astype(jnp.float32)).sum()))
    return np.asarray(f(x), np.float32) / np.asarray(weights)


def test_gradients_pass_inside_and_stop_where_values_were_clipped():
    row = jnp.array([[7.9, 6.5, 6.0, -6.1, -3.0, 0.0, 0.1, 5.9] + [0.5] * 24])
    clipped = np.abs(np.asarray(row)) > 6
    np.testing.assert_array_equal(gradient(row, MXFP4("floor")), np.where(clipped, 0, 1))
    np.testing.assert_array_equal(gradient(row, MXFP4("floor"), "identity"), np.ones(row.shape))
    np.testing.assert_array_equal(gradient(row, MXFP4("ceil")), np.ones(row.shape))
    for fmt in (Int(8), Int(4), Sign(), Sign("row")):
        np.testing.assert_array_equal(gradient(row, fmt), np.ones(row.shape))
    x = heavy((3, 40))
    mean = float(jnp.abs(x).mean())
    np.testing.assert_array_equal(gradient(x, Ternary()), (np.abs(x) < 1.5 * (mean + 1e-5)).astype(float))
    half = gradient(x.astype(jnp.bfloat16), MXFP4("floor"))
    assert set(half.ravel().round(2)) <= {0.0, 1.0}


def test_gradient_of_nvfp4_stops_above_the_rounded_scale_alone():
    x = np.asarray(heavy((4, 40)))
    _, byte, ts, _ = quant_np.nvfp4(x)
    limit = np.repeat([[6 * quant_np.E4M3[b] * ts for b in row] for row in byte], 16, axis=1)[:, :40]
    expected = np.abs(x) <= limit * (1 + 1e-6)
    np.testing.assert_array_equal(gradient(jnp.asarray(x), NVFP4()), expected.astype(float))
    assert not expected.all()
    # The largest element of the tensor is in the range by definition, whatever the rounding of its scale.
    for seed in range(30):
        one = heavy((1, 16), seed)
        assert gradient_at_peak(one) == 1


@jax.jit
def gradient_at_peak(x):
    g = jax.grad(lambda x: quant.fake_quant(x, "nvfp4").sum())(x)
    return g.ravel()[jnp.argmax(jnp.abs(x))]


def test_fake_quant_works_inside_transformations():
    x = heavy((4, 3, 40))
    per_item = jnp.stack([decode(encode(item, NVFP4())) for item in x])
    same(jax.jit(jax.vmap(lambda x: quant.fake_quant(x, "nvfp4")))(x), per_item)
    same(jax.lax.map(lambda item: quant.fake_quant(item, "nvfp4"), x), per_item)
    mapped = jax.jit(jax.vmap(jax.grad(lambda x: (quant.fake_quant(x, "mxfp4") ** 2).sum())))(x)
    assert mapped.shape == x.shape
    remat = jax.jit(jax.grad(lambda x: jax.checkpoint(lambda x: quant.fake_quant(x, "nvfp4").sum())(x)))(x[0])
    assert set(np.unique(remat)) <= {0.0, 1.0}


@pytest.mark.parametrize("fmt", [NVFP4(), Ternary(), Int(4)], ids=str)
def test_qtensors_map_scan_and_donate(fmt):
    x = heavy((4, 3, 40))
    stack = jax.jit(jax.vmap(lambda x: quant.quantize(x, fmt)))(x)
    assert stack.shape == (3, 40) and stack.codes.shape[0] == 4
    each = [encode(item, fmt) for item in x]
    same(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), stack)
    assert stack.nbytes == sum(q.nbytes for q in each)
    _, scanned = jax.lax.scan(lambda _, q: (None, quant.dequantize(q)), None, stack)
    same(scanned, jax.vmap(quant.dequantize)(stack))
    with pytest.raises(ValueError, match=r"codes of .* must have the shape .*got \[4, .*jax.vmap"):
        quant.dequantize(stack)
    q = each[0]
    f = jax.jit(lambda q: dataclasses.replace(q, codes=q.codes ^ 1), donate_argnums=0)
    flipped = np.asarray(q.codes) ^ 1
    out = f(jax.tree.map(jnp.copy, q))
    np.testing.assert_array_equal(out.codes, flipped)
    assert jax.tree.structure(out) == jax.tree.structure(q)


def test_sharded_arrays_give_the_same_bits():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    x = heavy((16, 64))
    for fmt, spec in ((NVFP4(), (None, "d")), (Ternary(), ("d",)), (Ternary(), (None, "d"))):
        split = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        same(encode(split, fmt), encode(x, fmt))


def test_checkpoints_restore_and_refuse_another_meaning(tmp_path):
    x = heavy((3, 40))
    state = {str(fmt): quant.quantize(x, fmt, axis=0) for fmt in (NVFP4(), MXFP4("ceil"), Ternary(), Sign("row"))}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        like = jax.eval_shape(lambda: state)
        assert like["nvfp4"].nbytes == state["nvfp4"].nbytes
        same(checkpoints.restore(like).state, state)
        other = {**state, "mxfp4 ceil": dataclasses.replace(state["mxfp4 ceil"], format=MXFP4("floor"))}
        with pytest.raises(CheckpointError, match="mxfp4 ceil of float32"):
            checkpoints.restore(other)


def test_a_qtensor_says_what_it_is():
    q = quant.quantize(heavy((40, 3)).astype(jnp.bfloat16), "int4", axis=-2, block_size=8)
    assert q.checkpoint_meta == "int4 per block of 8 of bfloat16[40, 3] along axis -2"
    assert repr(q) == f"QTensor({q.checkpoint_meta})"
    assert (q.size, q.row, q.lead, q.codes.shape, q.scale.shape) == (120, 40, (3,), (3, 20), (3, 5))
    assert quant.is_quantized(q) and not quant.is_quantized(q.codes)
    assert hash(q.format) == hash(Int(4, "block", 8)) and len({*FORMATS, *FORMATS}) == len(FORMATS)
    restored = quant.dequantize(q, jnp.float32)
    assert restored.dtype == jnp.float32 and quant.dequantize(q).dtype == jnp.bfloat16
    same(restored.astype(jnp.bfloat16), quant.dequantize(q))
    unpacked = quant.unpacked(q)
    assert unpacked.codes.shape == (3, 40) and unpacked.codes.max() < 16


def test_half_precision_saturates_instead_of_overflowing():
    x = jnp.array([65504.0, -65504.0, 1.0], jnp.float16)
    y = quant.fake_quant(x, "mxfp4", scale_rule="ceil")
    assert y.dtype == jnp.float16 and bool(jnp.isfinite(y).all())
    big = quant.quantize(jnp.array([1e6, 1.0]), "int8")
    assert quant.dequantize(big, "float16")[0] == 65504


def test_numpy_and_double_arrays():
    x = np.random.default_rng(0).standard_normal((3, 40))
    q = quant.quantize(x, "nvfp4")
    assert q.dtype == np.float32  # as JAX has it without 64-bit mode
    same(q, quant.quantize(x.astype(np.float32), "nvfp4"))
    with pytest.raises(ValueError, match="1 infinite"):
        quant.quantize(np.array([1e300, 1.0]), "nvfp4")
    with jax.enable_x64(True):
        q = quant.quantize(jnp.asarray(x), "nvfp4")
        assert q.dtype == np.float64 and quant.dequantize(q).dtype == jnp.float64
        y = quant.fake_quant(jnp.asarray(x), "nvfp4")
        assert y.dtype == jnp.float64 and bool((y == quant.dequantize(q)).all())
        same(quant.quantize(jnp.asarray(x), "ternary").scale, encode(x.astype(np.float32), Ternary()).scale)


@by_format
def test_traced_values_that_are_not_finite_show_in_the_result(fmt):
    """Values cannot be checked inside jit; they must not become plausible numbers."""
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        x = jnp.ones((3, 40)).at[1, 5].set(bad)
        y = np.asarray(decode(encode(x, fmt)))
        assert np.isnan(y[1, 5])
        assert np.isfinite(y[0]).all() or fmt.per == "tensor" or fmt.tensor_scaled


@pytest.mark.parametrize("f", [quant.quantize, quant.fake_quant])
def test_bad_arrays_are_named(f):
    name = "w" if f is quant.quantize else "x"
    with pytest.raises(ValueError, match=rf"{name} of shape \[3\] must be finite.*1 NaN and 1 infinite"):
        f(jnp.array([jnp.nan, 1, jnp.inf]), "nvfp4")
    with pytest.raises(TypeError, match=rf"{name} must be one of .*got int32"):
        f(jnp.arange(4), "int8")
    with pytest.raises(TypeError, match="complex64"):
        f(jnp.ones(4, jnp.complex64), "int8")
    with pytest.raises(ValueError, match="at least one axis, got a scalar"):
        f(jnp.float32(1), "int8")
    with pytest.raises(ValueError, match=r"axis must be from -2 to 1 .*\[3, 4\], got 2"):
        f(jnp.ones((3, 4)), "int8", axis=2)


BAD_OPTIONS = [
    (("nvfp5", {}), "did you mean 'nvfp4'"),
    (("zzz", {}), "allowed: int4, int8, mxfp4, nvfp4, sign, ternary"),
    (("nvfp4", {"block_size": 32}), "block_size must be 16 for nvfp4, got 32"),
    (("mxfp4", {"block_size": 16}), "block_size must be 32 for mxfp4, got 16"),
    (("mxfp4", {"scale_rule": "round"}), "scale_rule must be one of .*'floor', 'ceil', 'even'.* got 'round'"),
    (("nvfp4", {"scale_rule": "ceil"}), "scale_rule is an option of mxfp4"),
    (("nvfp4", {"per": "row"}), "per must be 'block' for nvfp4"),
    (("int4", {"block_size": 3}), "block_size must be a positive multiple of 2 for 4-bit codes, got 3"),
    (("sign", {"block_size": 0}), "block_size must be a positive multiple of 8 for 1-bit codes, got 0"),
    (("int8", {"per": "column"}), "per must be one of .*got 'column'"),
    (("int8", {"per": "block"}), "per='block' and block_size go together"),
    (("ternary", {"per": "row", "block_size": 4}), "per='block' and block_size go together"),
]


@pytest.mark.parametrize(("case", "message"), BAD_OPTIONS)
def test_bad_options_are_named(case, message):
    name, options = case
    with pytest.raises(ValueError, match=message):
        quant.quantize(jnp.ones(32), name, **options)
    with pytest.raises(ValueError, match=message):
        quant.resolve(name, **options)


def test_other_bad_input():
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3"):
        Int(3)
    with pytest.raises(ValueError, match="eps must be finite and >= 0, got -1"):
        Ternary(eps=-1.0)
    with pytest.raises(ValueError, match="ste must be one of"):
        quant.fake_quant(jnp.ones(4), "int8", ste="none")
    q = quant.quantize(jnp.ones((2, 32)), "nvfp4")
    with pytest.raises(TypeError, match=r"dtype must be one of .*got int8"):
        quant.dequantize(q, jnp.int8)
    with pytest.raises(TypeError, match=r"codes of nvfp4 .* must be uint8, got int32"):
        quant.dequantize(dataclasses.replace(q, codes=q.codes.astype(jnp.int32)))
    with pytest.raises(TypeError, match=r"scale of nvfp4 .* must be uint8, got float32"):
        quant.dequantize(dataclasses.replace(q, scale=q.scale.astype(jnp.float32)))
    with pytest.raises(ValueError, match=r"scale of .* must have the shape \[2, 2\], got \[2, 1\]"):
        quant.dequantize(dataclasses.replace(q, scale=q.scale[:, :1]))


def test_options_of_formats():
    assert quant.resolve("mxfp4", scale_rule="even", block_size=32, per="block") == MXFP4("even")
    assert quant.resolve("nvfp4", block_size=16) == NVFP4()
    assert quant.resolve("ternary", per="row") == Ternary("row")
    assert quant.resolve(Sign("block", 8), per="tensor") == Sign()
    assert quant.resolve(Int(4, "block", 8), block_size=16) == Int(4, "block", 16)
    assert [str(quant.FORMATS[name]).split()[0] for name in quant.FORMATS] == list(quant.FORMATS)


def test_formats_are_static_arguments():
    f = functools.partial(jax.jit, static_argnames="fmt")(lambda x, fmt: quant.quantize(x, fmt).nbytes)
    assert f(jnp.ones((2, 32)), fmt=NVFP4()) == 40 and f(jnp.ones((2, 32)), fmt=MXFP4()) == 34
