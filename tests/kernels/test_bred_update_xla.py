"""The fused step in XLA: bit for bit what codec and formulas give on whole arrays; dispatch; bad input."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.kernels.bred_update import api, codec, numerics, reference, steps
from jaxlab.kernels.bred_update.codec import QTensor, QuantSpec

SEED, LEAVES, COUNT = 3, (11, 0xFFFFFFF0), 7
HYPER = steps.Hyper(1e-3, 0.9, 0.99, 1e-8, 0.0, 0.1, np.float32(1 - 0.9**8), np.float32(1 - 0.99**8))


@dataclasses.dataclass(frozen=True)
class Case:
    """A leaf, how its states are stored, and how many elements are updated at a time."""

    shape: tuple[int, ...]
    bits: int = 4
    bits_nu: int = 0  # 0: the same
    block: int | None = None
    rounding: str = "dither"
    map: str = "linear"
    dtype: str = "float32"
    scale: str = "float32"
    chunk: int = reference.CHUNK

    def specs(self) -> tuple[QuantSpec, QuantSpec]:
        mu = QuantSpec(self.bits, self.block, self.rounding, self.map, self.scale)
        return mu, QuantSpec(self.bits_nu or self.bits, mu.block_size, self.rounding, "sqrt", self.scale)


CASES = {
    "one number": Case(()),
    "rows shorter than a byte of parts": Case((7, 13), bits=3),
    "three axes, tail": Case((3, 5, 257)),
    "rows of half a block": Case((40, 64)),
    "several chunks": Case((24, 256), chunk=1024),
    "chunks that do not divide": Case((7, 256), chunk=1024),
    "chunks of rows with tails": Case((11, 200), bits=3, bits_nu=4, block=64, chunk=512),
    "a long row with a tail": Case((2, 1031), bits=4, block=64, map="zero", chunk=512),
    "8 bits, bfloat16": Case((6, 512), bits=8, dtype="bfloat16", scale="bfloat16"),
    "8 and 3 bits": Case((6, 64), bits=8, bits_nu=3, block=64),
    "nearest": Case((6, 208), block=104, rounding="nearest", scale="bfloat16"),
    "stochastic": Case((6, 130), rounding="stochastic", chunk=256),
}


def inputs(case: Case) -> tuple[Any, ...]:
    """Parameters, gradient, states at COUNT; with rows of zeros, of large and of tiny numbers."""
    rng = np.random.default_rng(0)
    p, g = (np.asarray(rng.standard_normal(case.shape), np.float32) for _ in range(2))
    states = []
    for spec in case.specs():
        # Any bytes are codes; those behind a tail that is no multiple of 8 must not matter.
        layout, lead = codec.Layout(case.shape[-1] if case.shape else 1, spec), case.shape[:-1]
        scale = rng.exponential(size=(*lead, layout.blocks)).astype(spec.scale_dtype)
        if case.shape and case.shape[0] > 5:
            scale[2:4] = 0
        states.append((rng.integers(256, size=(*lead, layout.bytes), dtype=np.uint8), scale, spec))
    if case.shape and case.shape[0] > 5:
        g[2], g[4], g[5] = 0, g[4] * 1e15, g[5] * 1e-25
    f32 = np.dtype("float32")
    tensors = [QTensor(jnp.asarray(c), jnp.asarray(x), case.shape, f32, spec) for c, x, spec in states]
    return jnp.asarray(p.astype(case.dtype)), jnp.asarray(g.astype(case.dtype)), *tensors


def whole(
    name: str, p: Any, g: Any, states: tuple[QTensor, ...], count: Any, h: steps.Hyper = HYPER
) -> tuple[Any, ...]:
    """The step on whole arrays, one operation after the other: decode, the arithmetic of `steps`, encode."""
    g32, p32 = g.astype(jnp.float32), p.astype(jnp.float32)
    old, zeros = [], []
    for q, leaf in zip(states, LEAVES, strict=False):
        old.append(codec.decode(q, seed=SEED, leaf=leaf, count=count))
        n = q.shape[-1] if q.shape else 1
        zero = jnp.repeat(steps.zero_of(q.scale), q.spec.block_size, axis=-1)[..., :n]
        zeros.append(zero.reshape(q.shape))
    if name == "adamw":
        new = [steps.average(h.b1, g32, old[0], zeros[0]), steps.average(h.b2, g32 * g32, old[1], zeros[1])]
        direction = (new[0] / h.correction1) / (jnp.sqrt(new[1] / h.correction2 + h.eps_root) + h.eps)
    elif name == "lion":
        direction = jnp.sign(steps.average(h.b1, g32, old[0], zeros[0]))
        new = [steps.average(h.b2, g32, old[0], zeros[0])]
    else:
        new = [g32 + (h.b1 * old[0] + zeros[0])]
        direction = g32 + h.b1 * new[0] if name == "nesterov" else new[0]
    decay = 0.0 if name in ("sgdm", "nesterov") else h.weight_decay
    p = (p32 - h.lr * (direction + decay * p32)).astype(p.dtype)
    pairs = zip(new, states, LEAVES, strict=False)
    return p, *(codec.encode(x, q.spec, seed=SEED, leaf=leaf, count=count + 1) for x, q, leaf in pairs)


def jitted(name: str, *args: Any) -> tuple[Any, ...]:
    """`whole`, compiled: the same, as `test_whole_arrays_jitted_are_eager` says, and quicker."""
    hyper = args[4:] or (HYPER,)
    return jax.jit(lambda *arrays: whole(name, *arrays, *hyper))(*args[:4])


def step(name: str, *args: Any, **options: Any) -> tuple[Any, ...]:
    """`reference`'s step: `(p, g, *states, count)`."""
    *arrays, count = args
    options |= {"leaves": LEAVES} if name == "adamw" else {"leaf": LEAVES[0]}
    options |= {"nesterov": True} if name == "nesterov" else {}
    f = getattr(reference, "sgdm" if name == "nesterov" else name)
    return f(*arrays, HYPER, seed=SEED, count=count, **options)


def same(got: tuple[Any, ...], want: tuple[Any, ...], p: Any) -> None:
    """Codes and scales bit for bit; new parameters up to a few roundings of the step."""
    for x, y in zip(got[1:], want[1:], strict=True):
        assert x.spec == y.spec and x.shape == y.shape
        np.testing.assert_array_equal(np.asarray(x.codes), np.asarray(y.codes))
        np.testing.assert_array_equal(np.asarray(x.scale), np.asarray(y.scale))
    assert got[0].dtype == want[0].dtype
    a, b, start = (np.asarray(x, np.float64) for x in (got[0], want[0], p))
    coarse = np.finfo(np.float32).eps if got[0].dtype == jnp.float32 else 2.0**-7
    np.testing.assert_allclose(a, b, rtol=0, atol=4 * coarse * (np.abs(start) + np.abs(b - start)).max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_adamw_is_that_of_whole_arrays(case: Case) -> None:
    p, g, *states = inputs(case)
    got = jax.jit(functools.partial(step, "adamw", chunk=case.chunk))(p, g, *states, jnp.int32(COUNT))
    same(got, jitted("adamw", p, g, tuple(states), jnp.int32(COUNT)), p)


@pytest.mark.parametrize("name", ["lion", "sgdm", "nesterov"])
def test_others_are_those_of_whole_arrays(name: str) -> None:
    case = CASES["chunks of rows with tails"]
    p, g, mu, _ = inputs(case)
    got = jax.jit(functools.partial(step, name, chunk=case.chunk))(p, g, mu, jnp.int32(COUNT))
    same(got, jitted(name, p, g, (mu,), jnp.int32(COUNT)), p)


def test_whole_arrays_jitted_are_eager() -> None:
    """What `steps.average` is for: products that a compiler fuses with the sum, or does not, give the same state.

    The second leaf is one block: XLA reorders products of single numbers.
    """
    for case in (CASES["several chunks"], Case((128,))):
        p, g, *states = inputs(case)
        eager = whole("adamw", p, g, tuple(states), jnp.int32(COUNT))
        same(jitted("adamw", p, g, tuple(states), jnp.int32(COUNT)), eager, p)
    same(step("adamw", p, g, *states, jnp.int32(COUNT)), eager, p)


def test_tiles_of_steps_are_whole_arrays() -> None:
    """`steps.adamw` on tiles, as the kernels call it."""
    case = CASES["several chunks"]
    p, g, *states = inputs(case)
    blocks = p.size // 128
    pairs = [
        tuple(
            codec.dither(q.spec, q.scale.shape[:-1], 2, seed=SEED, leaf=leaf, count=COUNT + i).reshape(blocks, 1)
            for i in (0, 1)
        )
        for q, leaf in zip(states, LEAVES, strict=True)
    ]
    moments = [steps.Moment(q.codes.reshape(blocks, -1), q.scale.reshape(blocks, 1)) for q in states]
    f = jax.jit(lambda *args: steps.adamw(*args, tuple(pairs), HYPER, case.specs()))
    tiles = f(p.reshape(-1, 128), g.reshape(-1, 128), *moments)
    want = jitted("adamw", p, g, tuple(states), jnp.int32(COUNT))
    got = [
        dataclasses.replace(q, codes=t.words.reshape(q.codes.shape), scale=t.scale.reshape(q.scale.shape))
        for q, t in zip(states, tiles[1:], strict=True)
    ]
    same((tiles[0].reshape(p.shape), *got), want, p)


@pytest.mark.parametrize("block", [128, 64])
def test_a_gradient_that_is_not_finite_stays_in_its_block(block: int) -> None:
    """The maximum of XLA for CPUs passes over NaN where it is taken by a library, of 64 rows and more."""
    rows, spec = 100, QuantSpec(block_size=block, map="linear")
    rng = np.random.default_rng(0)
    p, g = (rng.standard_normal((rows, 256), np.float32) for _ in range(2))
    bad = {(3, 5): np.nan, (50, 200): np.inf, (80, 255): -np.inf, (99, 0): -np.nan}
    spoilt = np.zeros((rows, 256 // block), bool)
    for (row, column), value in bad.items():
        g[row, column] = value
        spoilt[row, column // block] = True
    zeros = jnp.zeros((rows, 256))
    mu, nu = (codec.encode(zeros, s) for s in (spec, dataclasses.replace(spec, map="sqrt")))
    new_p, mu, nu = jax.jit(functools.partial(step, "adamw"))(p, g, mu, nu, jnp.int32(0))
    whole_mu = codec.encode(jnp.asarray(0.1 * g), spec)
    for q in (mu, nu, whole_mu):
        np.testing.assert_array_equal(np.isnan(np.asarray(q.scale)), spoilt)
    per_element = np.repeat(spoilt, block, axis=1)
    np.testing.assert_array_equal(np.isnan(np.asarray(codec.decode(mu, leaf=LEAVES[0], count=1))), per_element)
    assert np.isfinite(np.asarray(new_p)[~per_element]).all()
    assert not np.isfinite([np.asarray(new_p)[at] for at in bad]).any()


def test_nothing_to_do() -> None:
    for shape in ((0, 5), (5, 0)):
        p = jnp.zeros(shape)
        mu, nu = (codec.encode(p, s) for s in Case(()).specs())
        new = step("adamw", p, p, mu, nu, jnp.int32(0))
        assert new[0].shape == shape and new[1].codes.shape == mu.codes.shape


def test_eps_root_takes_the_root_twice() -> None:
    p, g, *states = inputs(CASES["several chunks"])
    h = HYPER._replace(eps_root=1e-3)
    f = functools.partial(reference.adamw, hyper=h, seed=SEED, leaves=LEAVES, chunk=1024)
    new = jax.jit(lambda *args: f(*args[:-1], count=args[-1]))(p, g, *states, jnp.int32(COUNT))
    same(new, jitted("adamw", p, g, tuple(states), jnp.int32(COUNT), h), p)


def test_in_place_without_a_state_in_full_precision() -> None:
    """Buffers of a chunk only, whether a leaf is one chunk or many."""
    for rows, chunk in ((64, 2**13), (4, 2**13)):
        shape = (rows, 1024)
        p, (mu, nu) = jnp.zeros(shape), (codec.encode(jnp.zeros(shape), s) for s in Case(()).specs())
        f = jax.jit(functools.partial(step, "adamw", chunk=chunk), donate_argnums=(0, 2, 3))
        compiled = f.lower(p, p + 1, mu, nu, jnp.int32(0)).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 16 * chunk
        _ = f(p, p + 1, mu, nu, jnp.int32(0))
        assert p.is_deleted() and mu.codes.is_deleted() and nu.scale.is_deleted()


def test_random_numbers_are_one_a_block() -> None:
    """A hash an element would be a shift by 15 of an array as large as the leaf."""
    p, g, *states = inputs(CASES["several chunks"])
    text = str(jax.make_jaxpr(functools.partial(step, "adamw"))(p, g, *states, jnp.int32(0)))
    drawn = [line for line in text.splitlines() if "u32[" in line and "shift_right_logical" in line]
    assert drawn and not any(f"u32[{p.size}" in line or "u32[48,128" in line for line in drawn)


def test_dispatch() -> None:
    p, g, *states = inputs(CASES["several chunks"])
    options = {"seed": SEED, "leaves": LEAVES, "count": jnp.int32(COUNT)}
    one = {"seed": SEED, "leaf": LEAVES[0], "count": jnp.int32(COUNT)}
    for name in (None, "xla"):
        same(api.adamw(p, g, *states, HYPER, implementation=name, **options), step("adamw", p, g, *states, COUNT), p)
    same(api.lion(p, g, states[0], HYPER, **one), step("lion", p, g, states[0], COUNT), p)
    same(api.sgdm(p, g, states[0], HYPER, nesterov=True, **one), step("nesterov", p, g, states[0], COUNT), p)
    with pytest.raises(ValueError, match=r"one of \('xla', 'pallas_tpu', 'pallas_gpu'\), got 'triton'"):
        api.adamw(p, g, *states, HYPER, implementation="triton", **options)
    with pytest.raises(ValueError, match=r"'pallas_gpu' runs on a GPU, but the default backend is 'cpu'; interpret="):
        api.lion(p, g, states[0], HYPER, implementation="pallas_gpu", **one)
    with pytest.raises(ValueError, match="interpret=True is for the Pallas kernels"):
        api.sgdm(p, g, states[0], HYPER, implementation="xla", interpret=True, **one)
    for name in ("pallas_tpu", "pallas_gpu"):
        assert api.check_implementation(name, interpret=True) == name
        assert api._module(name, True)[0].adamw


def test_bad_input() -> None:
    p, g, mu, nu = inputs(CASES["rows of half a block"])
    f = functools.partial(reference.adamw, hyper=HYPER, seed=0, leaves=(1, 2), count=0)
    with pytest.raises(TypeError, match="p must be real and floating, got int32"):
        f(p.astype(jnp.int32), g, mu, nu)
    with pytest.raises(ValueError, match=r"g has the shape \[64, 40\], the parameters have \[40, 64\]"):
        f(p, g.T, mu, nu)
    with pytest.raises(ValueError, match=r"a state has the shape \[40, 64\]"):
        f(p.T, g.T, mu, nu)
    with pytest.raises(ValueError, match=r"one block_size in a fused step, got \[64, 128\]"):
        f(p, g, mu, codec.encode(g, QuantSpec(block_size=64, map="sqrt")))
    with pytest.raises(ValueError, match=r"must have the shapes \(40, 32\) and \(40, 1\), got \(40, 31\)"):
        f(p, g, dataclasses.replace(mu, codes=mu.codes[:, :31]), nu)
    with pytest.raises(ValueError, match="got 'auto'"):
        f(p, g, dataclasses.replace(mu, spec=QuantSpec()), nu)


def test_helpers() -> None:
    assert reference._fit(100, 60) == 50 and reference._fit(101, 60) == 60 and reference._fit(7, 60) == 7
    covered = np.zeros((7, 23), int)
    for t in reference._tiles(7, 23, 10):
        covered[t.row : t.row + t.down * t.rows, t.block : t.block + t.across * t.blocks] += 1
        assert t.rows * t.blocks <= 10
    assert (covered == 1).all()
    x = jnp.array([[0.5, -3.0, jnp.nan, 1.0]])
    assert numerics.magnitude(x)[0].tolist() == [0.5, 3.0, np.inf, 1.0]
