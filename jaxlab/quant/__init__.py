"""Numbers in few bits: formats, packed arrays, fake quantisation for training, whole trees, GGUF blocks.

    q = quantize(w, "nvfp4", axis=-2)              # QTensor: a pytree of packed arrays; q.nbytes is what it takes
    w_ = dequantize(q)
    w_ = fake_quant(w, "mxfp4", scale_rule="ceil")  # the same bits as dequantize(quantize(...)), differentiable
    params, report = quantize_tree(params, [("embed|norm", "skip"), ("kernel$", "nvfp4")])

Formats: `nvfp4`, `mxfp4`, `int8`, `int4`, `ternary`, `sign`; see `formats`.
"""

from jaxlab.quant.formats import FORMATS, MXFP4, NVFP4, Format, Int, Sign, Ternary, resolve
from jaxlab.quant.gguf import GGUFBlocks, from_gguf, to_gguf, write_gguf
from jaxlab.quant.qtensor import QTensor, dequantize, fake_quant, is_quantized, quantize, unpacked
from jaxlab.quant.tree import Report, Row, Rule, contraction_axis, dequantize_tree, quantize_tree

__all__ = [
    "FORMATS",
    "MXFP4",
    "NVFP4",
    "Format",
    "GGUFBlocks",
    "Int",
    "QTensor",
    "Report",
    "Row",
    "Rule",
    "Sign",
    "Ternary",
    "contraction_axis",
    "dequantize",
    "dequantize_tree",
    "fake_quant",
    "from_gguf",
    "is_quantized",
    "quantize",
    "quantize_tree",
    "resolve",
    "to_gguf",
    "unpacked",
    "write_gguf",
]
