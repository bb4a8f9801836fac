"""Whole trees: which rule decides, what is reported, what is refused and by which name."""

import dataclasses
import math

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import quant
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.quant import MXFP4, NVFP4, Rule

RNG = np.random.default_rng(0)


def params():
    """As Flax names and shapes them: kernels are (in, out)."""
    layer = lambda: {  # noqa: E731
        "attention": {"kernel": jnp.asarray(RNG.standard_normal((32, 48)), jnp.float32), "bias": jnp.zeros(48)},
        "norm": {"scale": jnp.ones(32)},
    }
    return {
        "embed": jnp.asarray(RNG.standard_normal((10, 32)), jnp.bfloat16),
        "layers": [layer(), layer()],
        "steps": jnp.int32(3),
    }


RULES = [("norm|bias", "skip"), ("embed", "int8", -1), (r"layers/0/.*kernel", MXFP4("ceil")), ("kernel$", "nvfp4")]


def test_the_first_rule_that_is_found_decides():
    before = params()
    tree, report = quant.quantize_tree(before, RULES)
    rows = {row.path: row for row in report.rows}
    assert {path: (row.format, row.note) for path, row in rows.items()} == {
        "embed": ("int8 per row", "axis -1"),
        "layers/0/attention/bias": ("float32", "rule 'norm|bias'"),
        "layers/0/attention/kernel": ("mxfp4 ceil", "axis -2"),
        "layers/0/norm/scale": ("float32", "rule 'norm|bias'"),
        "layers/1/attention/bias": ("float32", "rule 'norm|bias'"),
        "layers/1/attention/kernel": ("nvfp4", "axis -2"),
        "layers/1/norm/scale": ("float32", "rule 'norm|bias'"),
        "steps": ("int32", "no rule"),
    }
    assert report.unmatched == ("steps",) and tree["steps"] is before["steps"]
    kernel = tree["layers"][1]["attention"]["kernel"]
    # (in, out) with blocks along the inputs: stored as [out, in].
    assert kernel.format == NVFP4() and kernel.codes.shape == (48, 16) and kernel.scale.shape == (48, 2)
    w = before["layers"][1]["attention"]["kernel"]
    np.testing.assert_array_equal(quant.dequantize(kernel), quant.fake_quant(w, "nvfp4", axis=0))
    restored = quant.dequantize_tree(tree)
    assert jax.tree.structure(restored) == jax.tree.structure(before)
    assert restored["embed"].dtype == jnp.bfloat16
    assert quant.dequantize_tree(tree, jnp.float32)["embed"].dtype == jnp.float32


def test_the_report_counts_bytes_and_noise():
    before = params()
    tree, report = quant.quantize_tree(before, RULES)
    sizes = jax.tree.map(lambda x: x.nbytes, before)
    assert report.before == sum(jax.tree.leaves(sizes))
    assert report.after == sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    row = next(row for row in report.rows if row.path == "layers/1/attention/kernel")
    w = np.asarray(before["layers"][1]["attention"]["kernel"])
    error = np.asarray(quant.dequantize(tree["layers"][1]["attention"]["kernel"])) - w
    assert row.snr == pytest.approx(10 * math.log10((w**2).sum() / (error**2).sum()), abs=1e-3)
    assert row.before == w.nbytes and row.after == 48 * (16 + 2) + 4
    assert row.bits == pytest.approx(4.5 + 32 / w.size)
    table = str(report)
    lines = table.splitlines()
    assert " ".join(lines[0].split()) == "leaf shape stored as bytes before after bits SNR dB note"
    assert lines[-1].split() == [
        "total",
        f"{report.before:,}",
        f"{report.after:,}",
        f"{report.after / report.before:.1%}",
    ]
    assert "layers/1/attention/kernel  32x48   nvfp4" in table and table.count("no rule") == 1


def test_extreme_leaves_have_a_signal_to_noise_ratio():
    tree = {
        "zero": jnp.zeros((4, 4)),
        "huge": jnp.full((4, 4), 1e30),
        "lost": jnp.full((4, 4), 1e-30),
        "none": jnp.ones((0, 4)),
    }
    _, report = quant.quantize_tree(tree, [(".", "mxfp4")])
    snr = {row.path: row.snr for row in report.rows}
    assert snr["zero"] == math.inf and snr["none"] == math.inf and 10 < snr["huge"] < 60 and snr["lost"] == 0


def test_states_of_modules_and_numpy_arrays():
    model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    tree, report = quant.quantize_tree(nnx.to_pure_dict(state), [("kernel", "nvfp4")])
    assert quant.is_quantized(tree["kernel"]) and report.unmatched == ("bias",)
    nnx.replace_by_pure_dict(state, quant.dequantize_tree(tree))
    x = jnp.ones((2, 32))
    y = nnx.merge(graph, state)(x)
    np.testing.assert_allclose(y, x @ quant.dequantize(tree["kernel"]), rtol=1e-5)
    loaded, _ = quant.quantize_tree({"w": RNG.standard_normal((8, 32)).astype(np.float32)}, [("w", "sign", 1)])
    assert isinstance(loaded["w"].codes, jax.Array) and loaded["w"].codes.shape == (8, 4)


def test_a_quantised_tree_is_a_tree(tmp_path):
    tree, _ = quant.quantize_tree(params(), RULES)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, tree)
        back = checkpoints.restore(jax.eval_shape(lambda: tree)).state
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, tree))
    loss = jax.jit(lambda tree: sum(jnp.sum(x) for x in jax.tree.leaves(quant.dequantize_tree(tree, jnp.float32))))
    assert np.isfinite(loss(tree))
    again, report = quant.quantize_tree(tree, [("bias", "sign")])
    assert again["embed"] is tree["embed"]
    assert {row.note for row in report.rows if row.path == "embed"} == {"no rule"}


def test_a_rule_that_is_found_nowhere_is_an_error():
    with pytest.raises(
        ValueError, match=r"rules: 'kernels' found in no path; paths: embed, .*, steps, \.\.\. \(9 in all\)"
    ):
        quant.quantize_tree({**params(), "z": jnp.ones(3)}, [*RULES, ("kernels", "nvfp4")])
    quant.quantize_tree({"w": jnp.ones((2, 4))}, [("x", "sign"), ("w", None)], allow_unused=True)
    # One that is found, but never decides, is none.
    quant.quantize_tree({"w": jnp.ones((2, 4))}, [("w", None), (".", "sign")])
    with pytest.raises(ValueError, match="paths: none"):
        quant.quantize_tree({}, [("w", None)])
    assert quant.quantize_tree({}, []) == ({}, quant.Report(()))


def test_what_cannot_be_quantised_is_named_by_its_path():
    bad = params()
    bad["layers"][1]["attention"]["kernel"] = bad["layers"][1]["attention"]["kernel"].at[2, 3].set(jnp.nan)
    with pytest.raises(ValueError, match=r"layers/1/attention/kernel of shape .* must be finite.* 1 NaN"):
        quant.quantize_tree(bad, RULES)
    with pytest.raises(TypeError, match=r"steps must be one of .*got int32; rule '\.' matches it.*'skip'"):
        quant.quantize_tree(params(), [("embed|layers", None), (".", "int8")])
    with pytest.raises(ValueError, match=r"a/scale must have at least one axis, got a scalar; rule 'scale'"):
        quant.quantize_tree({"a": {"scale": jnp.float32(1)}}, [("scale", "int8")])
    with pytest.raises(ValueError, match=r"axis must be from -2 to 1 for w of shape \[2, 4\], got 2"):
        quant.quantize_tree({"w": jnp.ones((2, 4))}, [("w", "int8", 2)])
    with pytest.raises(TypeError, match="w must be an array, got float"):
        quant.quantize_tree({"w": 1.5}, [("w", "int8")])
    once, _ = quant.quantize_tree({"w": jnp.ones((2, 4))}, [("w", "int8")])
    with pytest.raises(ValueError, match=r"w is quantised already \(int8 per row of float32"):
        quant.quantize_tree(once, [("w", "int4")])
    with pytest.raises(TypeError, match="w is traced"):
        jax.jit(lambda w: quant.quantize_tree({"w": w}, [("w", "int8")])[0])(jnp.ones((2, 4)))


def test_bad_rules():
    with pytest.raises(ValueError, match=r"rules: '\(' is no regular expression"):
        quant.quantize_tree({}, [("(", "nvfp4")])
    with pytest.raises(ValueError, match="did you mean 'nvfp4'"):
        quant.quantize_tree({}, [("w", "nvfp")])
    for rule in ("w", ("w",), ("w", "nvfp4", 0, 1), 3):
        with pytest.raises(TypeError, match="rules must hold"):
            quant.quantize_tree({}, [rule])
    with pytest.raises(TypeError, match="axis must be an integer or None, got True"):
        Rule("w", "nvfp4", axis=True)
    assert Rule("w", "mxfp4").format == MXFP4() and Rule("w", "skip").keeps and Rule("w", None).keeps


def test_the_default_axis():
    assert [quant.contraction_axis(n) for n in (1, 2, 3, 4)] == [-1, -2, -2, -2]
    tree, _ = quant.quantize_tree({"conv": jnp.ones((3, 3, 32, 8)), "b": jnp.ones(8)}, [(".", "nvfp4")])
    assert tree["conv"].codes.shape == (3, 3, 8, 16) and tree["b"].axis == -1
    assert dataclasses.replace(tree["b"], axis=-1) is not tree["b"]
