"""Rules: which leaves they find, what axes they see, and what is said when they do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import peft
from jaxlab.peft.patterns import assign, compile_pattern
from jaxlab.quant.qtensor import dequantize, quantize
from tests.peft.small import KEY, close, trained

LORA = peft.LoRA(2)
LAYERS = {
    "layers": {str(i): {"q": {"kernel": jnp.ones((4, 4))}, "qk": {"kernel": jnp.ones((4, 4))}} for i in range(12)}
}
PATHS = [f"layers/{i}/{name}/kernel" for i in range(12) for name in ("q", "qk")]


def paths(*rules):
    return list(peft.match(LAYERS, list(rules)).paths)


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("layers.1", [p for p in PATHS if p.startswith("layers/1/")]),
        ("layers/1", [p for p in PATHS if p.startswith("layers/1/")]),
        ("layers.1.*", [p for p in PATHS if p.startswith(("layers/1/", "layers/10/", "layers/11/"))]),
        ("q", [p for p in PATHS if "/q/" in p]),
        (".*/q/kernel$", [p for p in PATHS if "/q/" in p]),
        ("^layers/(1|3)/q", ["layers/1/q/kernel", "layers/3/q/kernel"]),
        ("/q/", [p for p in PATHS if "/q/" in p]),
        ("(?i:Layers.11.Q)", ["layers/11/q/kernel"]),
        ("kernel", PATHS),
    ],
)
def test_names_match_whole(pattern, wanted):
    assert sorted(paths(peft.Rule(pattern, LORA))) == sorted(wanted)


def test_the_first_rule_decides():
    big = peft.LoRA(3)
    spec = peft.match(LAYERS, [peft.Rule("layers.0", None), peft.Rule("layers.1", big), peft.Rule("q", LORA)])
    assert not [p for p in spec.paths if p.startswith("layers/0/")]
    assert {t.path: t.method for t in spec.targets} == {
        **{f"layers/1/{name}/kernel": big for name in ("q", "qk")},
        **{f"layers/{i}/q/kernel": LORA for i in range(2, 12)},
    }
    assert spec["layers/5/q/kernel"].method == LORA
    with pytest.raises(KeyError, match=r"'layers/0/q/kernel' is not adapted; adapted: layers/1/q/kernel"):
        spec["layers/0/q/kernel"]


def test_a_rule_without_effect_is_an_error():
    with pytest.raises(ValueError, match=r"rule '\^q_proj' matches no path; paths such as .*q.*, 24 in all"):
        paths(peft.Rule("^q_proj", LORA))
    with pytest.raises(ValueError, match=r"rule 'layers.12' matches no path"):
        paths(peft.Rule("q", LORA), peft.Rule("layers.12", LORA))
    with pytest.raises(ValueError, match=r"rule 'layers.1' decides for no path: 'kernel' before it took all"):
        paths(peft.Rule("kernel", LORA), peft.Rule("layers.1", LORA))
    with pytest.raises(ValueError, match=r"to at least one leaf, got none"):
        paths(peft.Rule("kernel", None))
    with pytest.raises(ValueError, match=r"did you mean 'mlp/up/kernel'"):
        peft.match({"mlp": {"up": {"kernel": jnp.ones((4, 4))}}}, [peft.Rule("mlp/upp/kernel", LORA)])
    assert assign(["a/b", "a/c"], ["c", "a"]) == [1, 0]


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        ("", ValueError, "pattern must not be empty"),
        ("(q", ValueError, r"pattern '\(q' is no regular expression"),
        ("(?i)q", ValueError, r"must not begin with flags .* \(\?i:...\)"),
        (3, TypeError, "got 3|Actual value: 3"),
    ],
)
def test_bad_patterns(pattern, error, message):
    with pytest.raises(error, match=message):
        compile_pattern(pattern)


AXES = {  # shape, in_axes, stack_axes -> the kernel as a matrix [*stack, n, m]
    "matrix": ((6, 8), None, (), lambda k: k),
    "heads": ((6, 2, 4), (0,), (), lambda k: k.reshape(6, 8)),
    "from_heads": ((2, 4, 6), (0, 1), (), lambda k: k.reshape(8, 6)),
    "torch": ((6, 8), (1,), (), lambda k: k.T),
    "negative": ((6, 8), (-1,), (), lambda k: k.T),
    "conv": ((2, 3, 2, 8), (0, 1, 2), (), lambda k: k.reshape(12, 8)),
    "scan": ((3, 6, 8), None, (0,), lambda k: k),
    "scan_heads": ((3, 6, 2, 4), (1,), (0,), lambda k: k.reshape(3, 6, 8)),
    "last": ((6, 8, 3), None, (2,), lambda k: np.moveaxis(k, 2, 0)),
    "between": ((2, 6, 4), (1,), (), lambda k: k.transpose(1, 0, 2).reshape(6, 8)),
    "two_stacks": ((2, 6, 3, 8), (1,), (0, 2), lambda k: k.transpose(0, 2, 1, 3)),
}


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("method", [peft.DoRA(2), peft.OFT(2)], ids=str)
def test_axes(name, method):
    """An adapter of a kernel in any layout is that of its matrix: equal counts, starts, and merged kernels."""
    shape, in_axes, stack_axes, matrix = AXES[name]
    kernel = np.asarray(jax.random.normal(KEY, shape))
    as_matrix = np.asarray(matrix(kernel))
    spec = peft.match({"k": kernel}, [peft.Rule("k", method, in_axes=in_axes, stack_axes=stack_axes)])
    stack = tuple(range(as_matrix.ndim - 2))
    plain = peft.match({"k": as_matrix}, [peft.Rule("k", method, stack_axes=stack)])
    assert spec.count == plain.count
    target = spec["k"]
    np.testing.assert_array_equal(target.to_matrix(jnp.asarray(kernel)), as_matrix)
    np.testing.assert_array_equal(target.from_matrix(jnp.asarray(as_matrix)), kernel)
    a = trained(peft.init(KEY, {"k": kernel}, spec))
    b = trained(peft.init(KEY, {"k": as_matrix}, plain))
    close(a.trainable, b.trainable, 0)
    close(matrix(np.asarray(peft.merge({"k": kernel}, a)["k"])), peft.merge({"k": as_matrix}, b)["k"], 1e-6)
    assert np.abs(peft.delta({"k": kernel}, a, "k")).max() > 1e-2


def test_every_path_and_layer_has_random_numbers_of_its_own():
    params = {"a": jnp.ones((3, 6, 8)), "b": jnp.ones((6, 8)), "c": jnp.ones((6, 8))}
    rules = [peft.Rule("a", LORA, stack_axes=(0,)), peft.Rule("b|c", LORA)]
    state = peft.init(KEY, params, peft.match(params, rules))
    drawn = [*state.trainable["a"]["a"], state.trainable["b"]["a"], state.trainable["c"]["a"]]
    assert all(np.abs(x - y).min() > 0 for i, x in enumerate(drawn) for y in drawn[:i])
    alone = peft.init(KEY, params, peft.match(params, [peft.Rule("b", LORA)]))
    close(alone.trainable["b"], state.trainable["b"], 0)


K = jnp.ones((4, 6))
# Where the signature's check stands in front, its message names the value.
BAD = {
    "no rule": (K, "k", TypeError, r"(got|Actual value:) \[?'k'"),
    "three axes": (
        jnp.ones((4, 2, 3)),
        {},
        ValueError,
        r"k \(rule 'k'\) has shape \[4, 2, 3\], no matrix: name its inputs",
    ),
    "vector": (jnp.ones(4), {}, ValueError, r"shape \[4\], no matrix"),
    "outside": (K, {"in_axes": (2,)}, ValueError, r"in_axes must lie in a leaf of shape \[4, 6\], got \(2,\)"),
    "stack outside": (K, {"stack_axes": (-3,)}, ValueError, r"stack_axes must lie in .*\(-3,\)"),
    "twice": (jnp.ones((4, 2, 3)), {"in_axes": (0,), "stack_axes": (0,)}, ValueError, r"must differ .*\(0, 0\)"),
    "no output": (K, {"in_axes": (0, 1)}, ValueError, r"leave an output of \[4, 6\], got \(0, 1\)"),
    "integers": (jnp.ones((4, 6), int), {}, TypeError, r"must be a float array to be adapted, got int32"),
    "no array": ("text", {}, TypeError, r"must be a float array to be adapted, got <class 'str'>"),
    "empty": (jnp.ones((0, 6)), {}, ValueError, r"k \(rule 'k'\) is empty: \[0, 6\]"),
    "rank": (K, {"method": peft.LoRA(5)}, ValueError, r"rank must be from 1 to min\(n, m\) = 4 for .* 4 x 6, got 5"),
    "block": (K, {"method": peft.OFT(3)}, ValueError, r"block must divide the number of inputs 4, got 3"),
    "butterflies": (K, {"method": peft.BOFT(2, butterflies=3)}, ValueError, r"3 butterflies need a multiple of 8"),
    "no padding": (
        K,
        {"method": peft.DiaBlo(4, pad=False)},
        ValueError,
        r"must divide the 6 outputs with pad=False, got 4",
    ),
    "many blocks": (K, {"method": peft.DiaBlo(5)}, ValueError, r"must leave inputs to every block, but 5 for 4 do not"),
    "scattering": (jnp.ones((8, 4)), {"method": peft.SWIFT(4)}, ValueError, r"scatter each of the 4 .* has tau = 1"),
    "permutation": (K, {"method": peft.SWIFT(2, perm=(0, 1, 2))}, ValueError, r"permutation of 0 to 5, got 3 numbers"),
    "twice routed": (K, {"method": peft.SWIFT(2, perm=(0, 1, 2, 3, 4, 4))}, ValueError, r"permutation of 0 to 5"),
    "butterfly": (jnp.ones((9, 9)), {"method": peft.SWIFT(3, perm="butterfly")}, ValueError, r"power of 2 .* got 3"),
    "entries": (K, {"method": peft.SHiRA(3)}, ValueError, r"4 x 6 has 24 entries, fewer than the 30 to be drawn"),
    "slices": (
        K,
        {"method": peft.CORA(3, basis="slice", height=2)},
        ValueError,
        r"height must be >= rank = 3 .* got 2",
    ),
    "quantised": (
        quantize(jnp.ones((32, 32)), "int8"),
        {"method": peft.PiSSA(2)},
        TypeError,
        r"quantised, and pissa r2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_adapted(name):
    leaf, options, error, message = BAD[name]
    rules = [peft.Rule("k", **{"method": LORA, **options})] if isinstance(options, dict) else [options]
    with pytest.raises(error, match=message):
        peft.match({"k": leaf}, rules)


BAD_ARGUMENTS = {
    "LoRA rank": (lambda: peft.LoRA(0), ValueError, "rank must be >= 1, got 0"),
    "LoRA float": (lambda: peft.LoRA(2.0), TypeError, "got 2.0|Actual value: 2.0"),
    "LoRA bool": (lambda: peft.LoRA(True), TypeError, "rank must be an integer, got True"),
    "alpha": (lambda: peft.LoRA(2, alpha=0), ValueError, "alpha must be a finite number > 0 or None, got 0"),
    "alpha nan": (lambda: peft.AdaLoRA(2, alpha=float("nan")), ValueError, "alpha must be a finite number"),
    "CORA rank": (lambda: peft.CORA(1), ValueError, "rank must be >= 2, got 1"),
    "basis": (lambda: peft.CORA(2, basis="row"), ValueError, r"basis must be one of \('global', 'slice'\), got 'row'"),
    "orth": (lambda: peft.OFT(2, orth="neumann"), ValueError, r"orth must be one of \('cayley', 'expm'\)"),
    "power": (lambda: peft.CORA(2, basis="slice", power=1), ValueError, "power must be None with basis='slice'"),
    "MiLoRA": (lambda: peft.MiLoRA(2, power=1), ValueError, "power must be None"),
    "odd": (lambda: peft.BOFT(3), ValueError, "block must be even"),
    "OFT": (lambda: peft.OFT(1), ValueError, "block must be >= 2, got 1"),
    "SWIFT blocks": (lambda: peft.SWIFT(1), ValueError, "blocks must be >= 2, got 1"),
    "perm": (lambda: peft.SWIFT(2, perm="swap"), ValueError, r"perm must be one of \('shuffle', .*got 'swap'"),
    "perm floats": (lambda: peft.SWIFT(2, perm=(0.0, 1.0)), ValueError, "a vector of integers"),
    "mode": (lambda: peft.SWIFT(2, mode="local"), ValueError, r"mode must be one of \('routed', 'local\+routed'\)"),
    "placement": (lambda: peft.SWIFT(2, placement="both"), ValueError, "placement must be one of"),
    "SHiRA": (lambda: peft.SHiRA(entries=0), ValueError, "entries must be >= 1, got 0"),
    "seed": (lambda: peft.VeRA(2, seed=-1), ValueError, "seed must be >= 0, got -1"),
    "method": (lambda: peft.Rule("k", "lora"), Exception, "(?s)method.*lora"),
    "axes": (lambda: peft.Rule("k", LORA, in_axes=()), ValueError, r"in_axes must name an axis or be None, got \(\)"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name):
    make, error, message = BAD_ARGUMENTS[name]
    with pytest.raises(error, match=message):
        make()


def test_quantised_bases():
    """A low-rank adapter trains over a quantised kernel; merging gives an array."""
    w = jax.random.normal(KEY, (64, 32))
    params = {"k": quantize(w, "int8"), "b": jnp.zeros(32)}
    state = trained(peft.init(KEY, params, peft.match(params, [peft.Rule("k", peft.DoRA(2))])))
    dense = {**params, "k": dequantize(params["k"])}
    close(peft.merge(params, state), peft.merge(dense, state), 0)
    f = lambda p, x: x @ p["k"] + p["b"]  # noqa: E731
    x = jax.random.normal(jax.random.key(5), (3, 64))
    close(jax.jit(peft.adapt(f))(params, state, x), f(peft.merge(dense, state), x), 1e-4)


def test_the_table():
    params = {"a": jnp.ones((6, 8)), "layers": jnp.ones((3, 6, 2, 4)), "bias": jnp.ones(8)}
    rules = [peft.Rule("a", peft.CORA(4)), peft.Rule("layers", LORA, in_axes=(1,), stack_axes=(0,))]
    assert str(peft.match(params, rules)).splitlines() == [
        "kernel  shape    as        method          trained   share",
        "a       6x8      6x8       cora global r4       16  33.33%",
        "layers  3x6x2x4  3 of 6x8  lora r2              84  58.33%",
        "total   200                2 kernels           100  50.00%",
    ]
