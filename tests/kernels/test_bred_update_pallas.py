"""The Pallas kernels of the fused step: interpreted, against the codec and plain formulas; lowered for TPU and CUDA."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.kernels.bred_update import codec, numerics, pallas_common, pallas_gpu, pallas_tpu, steps
from jaxlab.kernels.bred_update.codec import QTensor, QuantSpec

BACKENDS = pytest.mark.parametrize("kernels", [pallas_tpu, pallas_gpu], ids=["tpu", "gpu"])
SEED, LEAVES, COUNT = 3, (11, 0xFFFFFFF0), 7
# Products and quotients of powers of two are exact, so that it does not matter how a compiler fuses or reorders them:
# with these the kernels must agree with the formulas bit for bit, in whatever program they stand.
EXACT = steps.Hyper(
    lr=2**-10, b1=0.5, b2=0.5, eps=1e-8, eps_root=0.0, weight_decay=2**-3, correction1=0.5, correction2=0.25
)
TYPICAL = steps.Hyper(lr=3e-4, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, correction1=0.52, correction2=0.077)


@dataclasses.dataclass(frozen=True)
class Case:
    """A leaf and how its states are stored."""

    shape: tuple[int, ...]
    bits: int = 4
    block: int | None = None
    map: str = "linear"
    rounding: str = "dither"
    dtype: str = "float32"
    scale: str = "float32"

    def spec(self, map: str) -> QuantSpec:
        return QuantSpec(self.bits, self.block, self.rounding, map, self.scale)


CASES = {
    "full blocks": Case((64, 256)),
    "rows beyond a multiple of 32, bf16": Case((70, 256), dtype="bfloat16"),
    "odd tail": Case((3, 257)),
    "3 bits, three axes, tail": Case((2, 2, 96), bits=3),
    "3 bits, a block no power of two, zero map": Case((5, 48), bits=3, block=24, map="zero"),
    "rows of one short block, bf16 scales": Case((7, 40), bits=8, scale="bfloat16"),
    "one axis, nearest": Case((21,), block=16, rounding="nearest"),
    "no axis": Case((), bits=8),
    "several tiles a row": Case((2, 16700)),
}


@functools.cache
def inputs(case: Case) -> tuple[jax.Array, jax.Array, QTensor, QTensor]:
    """Parameters, gradient, and the two states at COUNT."""
    rng = np.random.default_rng(0)
    p, g = (jnp.asarray(rng.standard_normal(case.shape), jnp.float32) for _ in range(2))
    states = []
    for map in (case.map, "sqrt"):
        # Any bytes are codes; those behind a tail that is no multiple of 8 must not matter.
        spec, lead = case.spec(map), case.shape[:-1]
        layout = codec.Layout(case.shape[-1] if case.shape else 1, spec)
        codes = rng.integers(256, size=(*lead, layout.bytes), dtype=np.uint8)
        scale = jnp.asarray(rng.exponential(size=(*lead, layout.blocks)), spec.scale_dtype)
        states.append(QTensor(jnp.asarray(codes), scale, case.shape, np.dtype("float32"), spec))
    mu, nu = states
    return p.astype(case.dtype), g.astype(case.dtype), mu, nu


def as_float32(h: steps.Hyper) -> steps.Hyper:
    return steps.Hyper(*(jnp.float32(x) for x in h))


def formula(name: str, p: Any, g: Any, states: Any, h: steps.Hyper) -> tuple[Any, ...]:
    """The step on whole arrays: decode, the textbook update in float32, encode."""
    g32, p32 = g.astype(jnp.float32), p.astype(jnp.float32)
    old = [codec.decode(q, seed=SEED, leaf=leaf, count=COUNT) for q, leaf in zip(states, LEAVES, strict=False)]
    decay = h.weight_decay
    if name == "adamw":
        new = [(1 - h.b1) * g32 + h.b1 * old[0], (1 - h.b2) * (g32 * g32) + h.b2 * old[1]]
        direction = (new[0] / h.correction1) / (jnp.sqrt(new[1] / h.correction2 + h.eps_root) + h.eps)
    elif name == "lion":
        new = [(1 - h.b2) * g32 + h.b2 * old[0]]
        direction = jnp.sign((1 - h.b1) * g32 + h.b1 * old[0])
    else:
        new, decay = [g32 + h.b1 * old[0]], 0.0
        direction = g32 + h.b1 * new[0] if name == "nesterov" else new[0]
    p = (p32 - h.lr * (direction + decay * p32)).astype(p.dtype)
    pairs = zip(new, states, LEAVES, strict=False)
    return p, *(codec.encode(x, q.spec, seed=SEED, leaf=leaf, count=COUNT + 1) for x, q, leaf in pairs)


@functools.cache
def expected(name: str, case: Case, h: steps.Hyper = EXACT) -> tuple[Any, ...]:
    p, g, mu, nu = inputs(case)
    states = (mu, nu) if name == "adamw" else (mu,)
    return jax.jit(functools.partial(formula, name))(p, g, states, as_float32(h))


def kernel(kernels: ModuleType, name: str, interpret: bool = True) -> Callable[..., tuple[Any, ...]]:
    """f(p, g, *states, hyper, count) of a backend."""
    extra = {"leaves": LEAVES} if name == "adamw" else {"leaf": LEAVES[0]}
    extra |= {"nesterov": True} if name == "nesterov" else {}
    f = getattr(kernels, "sgdm" if name == "nesterov" else name)
    return lambda *args: f(*args[:-1], seed=SEED, count=args[-1], interpret=interpret, **extra)


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@BACKENDS
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_adamw_is_decode_update_encode(kernels: ModuleType, case: Case) -> None:
    got = jax.jit(kernel(kernels, "adamw"))(*inputs(case), as_float32(EXACT), jnp.int32(COUNT))
    same(got, expected("adamw", case))
    assert got[1].spec == inputs(case)[2].spec and got[0].shape == case.shape


@BACKENDS
@pytest.mark.parametrize("name", ["lion", "sgdm", "nesterov"])
def test_optimizers_with_one_state(kernels: ModuleType, name: str) -> None:
    case = CASES["odd tail"]
    p, g, mu, _ = inputs(case)
    got = jax.jit(kernel(kernels, name))(p, g, mu, as_float32(EXACT), jnp.int32(COUNT))
    same(got, expected(name, case))


@BACKENDS
def test_usual_hyperparameters_agree_but_for_the_fusion_of_products_with_sums(kernels: ModuleType) -> None:
    case = CASES["full blocks"]
    got = jax.jit(kernel(kernels, "adamw"))(*inputs(case), as_float32(TYPICAL), jnp.int32(COUNT))
    want = expected("adamw", case, TYPICAL)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-7, atol=1e-9)
    for x, y in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_max_ulp(np.asarray(x.scale), np.asarray(y.scale), maxulp=1)
        assert np.mean(np.asarray(x.codes) != np.asarray(y.codes)) < 1e-3


@BACKENDS
def test_non_finite_gradients_stay_in_their_blocks(kernels: ModuleType) -> None:
    case = CASES["odd tail"]
    p, g, mu, nu = inputs(case)
    g = g.at[1, 130].set(jnp.nan).at[2, 5].set(-jnp.inf)
    got = jax.jit(kernel(kernels, "adamw"))(p, g, mu, nu, as_float32(EXACT), jnp.int32(COUNT))
    want = expected("adamw", case)
    hit = np.zeros((3, 257), bool)
    hit[1, 128:256] = hit[2, :128] = True
    for x, y, leaf in zip(got[1:], want[1:], LEAVES, strict=True):
        decode = jax.jit(functools.partial(codec.decode, seed=SEED, leaf=leaf, count=COUNT + 1))
        x, y = np.asarray(decode(x)), np.asarray(decode(y))
        assert np.isnan(x[hit]).all()
        np.testing.assert_array_equal(x[~hit], y[~hit])
    changed = np.asarray(got[0]) != np.asarray(want[0])
    assert np.argwhere(changed).tolist() == [[1, 130], [2, 5]] and np.isnan(np.asarray(got[0])[changed]).all()


@pytest.mark.parametrize("map", ["linear", "zero", "sqrt"])
def test_a_maximum_that_passes_over_nan_does_not_hide_it(map: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = pallas_common.tile_spec(QuantSpec(map=map), bytewise=True)
    x = jnp.array([[1.0, jnp.nan, 2.0, 0.5]] * 2).at[0, 1].set(1.0)
    monkeypatch.setattr(numerics.jnp, "max", jnp.nanmax)  # as on GPUs
    _, scale = spec.encode_block(x, jnp.zeros((2, 1)))
    assert np.isfinite(scale[0, 0]) and np.isnan(scale[1, 0])


@BACKENDS
def test_donated_leaves_are_updated_in_place(kernels: ModuleType) -> None:
    p, g, mu, nu = jax.tree.map(lambda x: x + 0, inputs(CASES["full blocks"]))
    f = jax.jit(kernel(kernels, "adamw"), donate_argnums=(0, 2, 3))
    same(f(p, g, mu, nu, as_float32(EXACT), jnp.int32(COUNT)), expected("adamw", CASES["full blocks"]))
    assert all(x.is_deleted() for x in jax.tree.leaves((p, mu, nu))) and not g.is_deleted()


def abstract(platform: str) -> contextlib.AbstractContextManager[Any]:
    """Tells Pallas which device to lower for where none is there: some of its rules ask for the generation."""
    kind, cores = {"tpu": ("TPU v5e", 1), "cuda": ("NVIDIA H200", None)}[platform]
    device = jax.sharding.AbstractDevice(kind, num_cores=cores, platform={"cuda": "gpu"}.get(platform, platform))
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


LOWERED = {
    "4 bits": Case((512, 1024), dtype="bfloat16", scale="bfloat16"),
    "3 bits": Case((64, 1024), bits=3),
    "8 bits": Case((1024, 4096), bits=8, map="zero"),
    "odd tail": Case((3, 5, 301)),
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", kind) for kind in LOWERED] + [(name, "4 bits") for name in ("lion", "sgdm", "nesterov")],
)
def test_lowers_without_the_hardware(platform: str, name: str, kind: str) -> None:
    case = LOWERED[kind]
    kernels, target = {"tpu": (pallas_tpu, "tpu_custom_call"), "cuda": (pallas_gpu, "xla.gpu.triton")}[platform]
    p, g, mu, nu = jax.eval_shape(lambda: inputs.__wrapped__(case))
    states = [mu, nu] if name == "adamw" else [mu]
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    args = (p, g, *states, steps.Hyper(*[scalar] * len(steps.Hyper._fields)), jax.ShapeDtypeStruct((), jnp.int32))
    f = jax.jit(kernel(kernels, name, interpret=False), donate_argnums=(0, *range(2, 2 + len(states))))
    with abstract(platform):
        text = f.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    # For CUDA, a short block at the end of the rows is a second call.
    calls = 2 if platform == "cuda" and kind == "odd tail" else 1
    assert text.count(f"@{target}") + text.count(f"@__gpu${target}") == calls
    arrays = 1 + 2 * len(states)
    assert text.count("output_operand_alias<") == calls * arrays
    assert text.count("tf.aliasing_output") == arrays


@BACKENDS
def test_what_a_kernel_cannot_take_is_an_error(kernels: ModuleType) -> None:
    p, g, mu, nu = inputs(CASES["full blocks"])
    h, f = as_float32(EXACT), kernel(kernels, "adamw")
    change = lambda q, **kw: dataclasses.replace(q, spec=dataclasses.replace(q.spec, **kw))  # noqa: E731
    with pytest.raises(ValueError, match="'stochastic'"):
        f(p, g, change(mu, rounding="stochastic"), nu, h, COUNT)
    with pytest.raises(ValueError, match="'auto'"):
        f(p, g, change(mu, map="auto"), nu, h, COUNT)
    with pytest.raises(ValueError, match="one block_size"):
        f(p, g, inputs(Case((64, 256), block=64))[2], nu, h, COUNT)
    with pytest.raises(ValueError, match=r"shapes \(64, 128\)"):
        f(p, g, dataclasses.replace(mu, codes=mu.codes[:, :-1]), nu, h, COUNT)
    with pytest.raises(ValueError, match=r"shape \[64, 256\], but the parameters have \[256, 64\]"):
        f(p.T, g.T, mu, nu, h, COUNT)
    with pytest.raises(TypeError, match="g must be one of"):
        f(p, g.astype(jnp.float8_e5m2), mu, nu, h, COUNT)


@BACKENDS
def test_an_empty_leaf_stays(kernels: ModuleType) -> None:
    p, g, mu, nu = inputs(Case((0, 5)))
    same(kernel(kernels, "adamw")(p, g, mu, nu, as_float32(EXACT), COUNT), (p, mu, nu))
