"""GGUF's block layouts against the package `gguf`, which was written independently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import quant
from jaxlab.core.errors import MissingExtraError
from jaxlab.quant import MXFP4, NVFP4, GGUFBlocks, Ternary

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def gguf():
    return pytest.importorskip("gguf", reason="needs the package gguf (the extra of this name)")


def weights(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(np.float32)


def ternary(shape, scale=0.25):
    """Exactly ternary, as the quantisers of gguf need it: they take the maximum for the scale."""
    return (RNG.integers(-1, 2, shape) * scale).astype(np.float32)


def test_mxfp4_has_the_bytes_of_gguf(gguf):
    """Where log2 is right: gguf rounds it in float32, and ties towards zero."""
    x = weights((16, 256))
    x[3, :32], x[4, 32:64] = 0, -np.abs(x[4, 32:64])
    blocks = quant.to_gguf(quant.quantize(x, "mxfp4"))
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType.MXFP4)
    assert blocks.kind == "MXFP4" and blocks.shape == (16, 256)
    np.testing.assert_array_equal(blocks.data, theirs)
    np.testing.assert_array_equal(
        gguf.quants.dequantize(blocks.data, gguf.GGMLQuantizationType.MXFP4),
        quant.dequantize(quant.quantize(x, "mxfp4")),
    )


def test_mxfp4_differs_from_gguf_where_its_logarithm_is_wrong(gguf):
    """Just below a power of two, float32's log2 rounds up to the next integer: twice the scale, and a larger error."""
    x = np.full((1, 32), np.nextafter(np.float32(8), np.float32(0)))
    x[0, 1] = 0.6
    ours = quant.to_gguf(quant.quantize(x, "mxfp4")).data
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType.MXFP4)
    assert ours[0, 0] == 127 and theirs[0, 0] == 128
    decoded = [gguf.quants.dequantize(b, gguf.GGMLQuantizationType.MXFP4)[0, 1] for b in (ours, theirs)]
    assert decoded == [0.5, 1.0]


def test_nvfp4_decodes_in_gguf_but_for_the_tensor_scale(gguf):
    x = weights((16, 192))
    q = quant.quantize(x, "nvfp4")
    blocks = quant.to_gguf(q)
    assert blocks.kind == "NVFP4" and blocks.data.shape == (16, 3 * 36)
    theirs = gguf.quants.dequantize(blocks.data, gguf.GGMLQuantizationType.NVFP4)
    # One product in both: the same bits.
    np.testing.assert_array_equal(theirs * np.float32(blocks.tensor_scale), quant.dequantize(q))


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_are_those_of_gguf(gguf, kind):
    x = ternary((6, 512))
    x[2, :256] = 0
    qtype = gguf.GGMLQuantizationType[kind]
    theirs = gguf.quants.quantize(x, qtype)
    q = quant.from_gguf(GGUFBlocks(kind, theirs))
    np.testing.assert_array_equal(quant.dequantize(q), x)
    np.testing.assert_array_equal(quant.to_gguf(q, kind).data, theirs)
    assert q.format == Ternary("block", 256) and q.scale[2, 0] == 0
    for per in ("tensor", "row"):
        w = weights((6, 512))
        q = quant.quantize(w, "ternary", per=per)
        decoded = gguf.quants.dequantize(quant.to_gguf(q, kind).data, qtype)
        np.testing.assert_array_equal(np.sign(decoded), np.sign(quant.dequantize(q)))
        np.testing.assert_allclose(decoded, quant.dequantize(q), rtol=2**-11)
    wide = quant.quantize(weights((6, 512)), "ternary", block_size=512)
    decoded = gguf.quants.dequantize(quant.to_gguf(wide, kind).data, qtype)
    np.testing.assert_allclose(decoded, quant.dequantize(wide), rtol=2**-11)


def test_all_243_digits_survive():
    codes = np.array([[n // 3**i % 3 for i in range(5)] for n in range(243)], np.uint8)
    padded = np.zeros((243, 256), np.uint8)
    padded[:, [0, 32, 64, 96, 128]] = codes
    padded[:, [160, 176, 192, 208, 224]] = codes
    padded[:, [240, 244, 248, 252]] = codes[:, :4]
    q = quant.quantize((padded.astype(np.float32) - 1), Ternary("block", 256, eps=0.0))
    for kind in ("TQ1_0", "TQ2_0"):
        back = quant.from_gguf(quant.to_gguf(q, kind))
        np.testing.assert_array_equal(back.codes, q.codes)
        np.testing.assert_allclose(back.scale, q.scale, rtol=2**-11)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_blocks_come_back(name):
    x = weights((5, 2, 128))
    q = quant.quantize(x, name)
    back = quant.from_gguf(quant.to_gguf(q))
    assert back.format == q.format and back.shape == q.shape and back.axis == q.axis
    np.testing.assert_array_equal(quant.dequantize(back), quant.dequantize(q))
    np.testing.assert_array_equal(back.scale, q.scale)
    # The rows of GGUF are the quantised axis, wherever it lies.
    kernel = quant.quantize(x[:, 0].T, name, axis=-2)
    blocks = quant.to_gguf(kernel)
    assert blocks.shape == (5, 128)
    back = quant.from_gguf(blocks, axis=-2, dtype=jnp.bfloat16)
    assert back.shape == (128, 5) and back.axis == -2 and back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(quant.dequantize(back, jnp.float32), quant.dequantize(kernel))


def test_files_are_read_by_gguf(gguf, tmp_path):
    w = weights((4, 256))
    q = quant.quantize(w, "nvfp4")
    tensors = {
        "blk.0.up.weight": q,
        "blk.0.down.weight": quant.quantize(w, "mxfp4"),
        "blk.0.gate.weight": quant.to_gguf(quant.quantize(w, "ternary"), "TQ1_0"),
        "norm.weight": jnp.arange(8.0),
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "brain": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
    }
    quant.write_gguf(tmp_path / "model.gguf", tensors)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert {name: tensor.tensor_type.name for name, tensor in read.items()} == {
        "blk.0.up.weight": "NVFP4",
        "blk.0.up.scale": "F32",
        "blk.0.down.weight": "MXFP4",
        "blk.0.gate.weight": "TQ1_0",
        "norm.weight": "F32",
        "half": "F16",
        "brain": "BF16",
    }
    assert read["blk.0.up.weight"].shape.tolist() == [256, 4]  # GGUF names the row first
    up = gguf.quants.dequantize(read["blk.0.up.weight"].data, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(up * read["blk.0.up.scale"].data, quant.dequantize(q))
    blocks = GGUFBlocks("NVFP4", np.array(read["blk.0.up.weight"].data), float(read["blk.0.up.scale"].data[0]))
    np.testing.assert_array_equal(quant.dequantize(quant.from_gguf(blocks)), quant.dequantize(q))
    brain = gguf.quants.dequantize(read["brain"].data, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(brain, np.arange(6.0).reshape(2, 3))


def test_files_need_the_package(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"jaxlab\[gguf\]"):
        quant.write_gguf(tmp_path / "x.gguf", {})


def test_bad_files(gguf, tmp_path):
    path = tmp_path / "x.gguf"
    with pytest.raises(ValueError, match="at most 63 bytes"):
        quant.write_gguf(path, {"x" * 64: np.ones(3, np.float32)})
    with pytest.raises(TypeError, match="n must be quantised, float32, float16 or bfloat16, got int32"):
        quant.write_gguf(path, {"n": jnp.arange(3)})
    q = quant.quantize(weights((1, 64)), "nvfp4")
    with pytest.raises(ValueError, match=r"two have the name 'w\.scale'"):
        quant.write_gguf(path, {"w.scale": np.ones(1, np.float32), "w.weight": q})
    assert not path.exists()


def test_what_gguf_cannot_hold_is_an_error():
    with pytest.raises(ValueError, match="q must be nvfp4, mxfp4 or ternary for a GGUF layout, got int8 per row"):
        quant.to_gguf(quant.quantize(np.ones((1, 64), np.float32), "int8"))
    with pytest.raises(ValueError, match="rows of q must be multiples of 64 for NVFP4, got 48 of nvfp4"):
        quant.to_gguf(quant.quantize(np.ones((1, 48), np.float32), "nvfp4"))
    q = quant.quantize(np.ones((1, 256), np.float32), "ternary")
    with pytest.raises(ValueError, match=r"kind must be one of \('TQ2_0', 'TQ1_0'\)"):
        quant.to_gguf(q, "NVFP4")
    with pytest.raises(ValueError, match="block_size must be a multiple of 256"):
        quant.to_gguf(quant.quantize(np.ones((1, 256), np.float32), "ternary", block_size=64))
    for value in (1e9, 1e-9):
        with pytest.raises(ValueError, match="must fit float16"):
            quant.to_gguf(quant.quantize(np.full((1, 256), value, np.float32), "ternary"))


def test_bytes_that_stand_for_nothing_are_an_error():
    with pytest.raises(ValueError, match="kind 'TQ1' is not known; did you mean 'TQ1_0'"):
        GGUFBlocks("TQ1", np.zeros((1, 54), np.uint8))
    with pytest.raises(TypeError, match="data must be uint8, got int8"):
        GGUFBlocks("MXFP4", np.zeros((1, 17), np.int8))
    with pytest.raises(ValueError, match=r"rows of data must be multiples of 17 bytes for MXFP4, got \[1, 18\]"):
        GGUFBlocks("MXFP4", np.zeros((1, 18), np.uint8))
    full = lambda kind, size, value: GGUFBlocks(kind, np.full((1, size), value, np.uint8))  # noqa: E731
    with pytest.raises(ValueError, match="must be below 255"):
        quant.from_gguf(full("MXFP4", 17, 255))
    with pytest.raises(ValueError, match="sign bit"):
        quant.from_gguf(full("NVFP4", 36, 128))
    with pytest.raises(ValueError, match="code 3"):
        quant.from_gguf(full("TQ2_0", 66, 3))
    with pytest.raises(ValueError, match="scales in data of TQ1_0 must be finite"):
        quant.from_gguf(GGUFBlocks("TQ1_0", np.array([[0] * 52 + [0, 0x7C]], np.uint8)))
    with pytest.raises(ValueError, match="axis must be from -2 to 1"):
        quant.from_gguf(full("MXFP4", 17, 127), axis=2)
    with pytest.raises(TypeError, match="dtype must be one of"):
        quant.from_gguf(full("MXFP4", 17, 127), dtype=jnp.int8)


def test_scale_bytes_of_other_writers(gguf):
    """0x7F is read as zero in NVFP4, and MXFP4 has the smallest scale 2^-127 for zeros."""
    data = np.full((1, 36), 0x21, np.uint8)
    data[0, :4] = [0x7F, 0, 1, 126]
    q = quant.from_gguf(GGUFBlocks("NVFP4", data, 0.5))
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.NVFP4) * np.float32(0.5)
    np.testing.assert_array_equal(quant.dequantize(q), theirs)
    assert q.tensor_scale == 0.5 and q.format == NVFP4()
    data = np.full((1, 34), 0x21, np.uint8)
    data[0, [0, 17]] = [2, 252]
    q = quant.from_gguf(GGUFBlocks("MXFP4", data))
    np.testing.assert_array_equal(
        jax.device_get(quant.dequantize(q)), gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4)
    )
    assert q.format == MXFP4()
