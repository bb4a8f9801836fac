"""Blocks as GGUF files (llama.cpp) have them: MXFP4, NVFP4, TQ1_0 and TQ2_0, from and to `QTensor`.

    kind    elements  bytes of a block
    MXFP4   32        1 E8M0 byte, then 16: byte i holds element i (low nibble) and i + 16
    NVFP4   64        4 E4M3 bytes, then for each of 4 x 16 elements 8: byte i holds element i (low) and i + 8
    TQ2_0   256       2 x 32: byte i holds elements i, i + 32, i + 64, i + 96 of 128 (low bits first), then a float16
    TQ1_0   256       32, 16 and 4 bytes of 5, 5 and 4 base-3 digits as fractions of 256, then a float16

NumPy only, and on the host: this is for files. GGUF has rows of whole blocks, no negative zeros in FP4, and no tensor
scale: that of NVFP4 is a number beside the blocks, to multiply with afterwards (llama.cpp reads it from a tensor of its
own). The float16 scale of TQ rounds that of a `QTensor`.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt8

from jaxlab.core.errors import did_you_mean, require
from jaxlab.kernels.lowbit import packing
from jaxlab.quant.formats import MXFP4, NVFP4, Format, Ternary
from jaxlab.quant.qtensor import DTYPES, QTensor, is_quantized, unpacked

SIZES = {"MXFP4": (32, 17), "NVFP4": (64, 36), "TQ1_0": (256, 54), "TQ2_0": (256, 66)}  # elements and bytes of a block
_TQ1_PARTS = ((32, 5), (16, 5), (4, 4))  # bytes, and digits in each
_MAX_NAME = 63


@dataclasses.dataclass(frozen=True)
class GGUFBlocks:
    """An array in one of the block layouts.

    Attributes:
      kind: "MXFP4", "NVFP4", "TQ1_0" or "TQ2_0".
      data: `uint8 [*lead, bytes a row]`, rows of whole blocks.
      tensor_scale: what the blocks of NVFP4 are to be multiplied with; 1 for the other kinds.

    Raises:
      ValueError: for another kind, and rows that are not whole blocks.
      TypeError: when `data` is not uint8.

    >>> GGUFBlocks("MXFP4", np.zeros((2, 34), np.uint8)).shape
    (2, 64)
    """

    kind: str
    data: Any
    tensor_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in SIZES:
            raise ValueError(f"kind {self.kind!r} is not known{did_you_mean(str(self.kind), SIZES)}")
        if self.data.dtype != np.uint8:
            raise TypeError(f"data must be uint8, got {self.data.dtype}")
        size = SIZES[self.kind][1]
        if self.data.ndim == 0 or self.data.shape[-1] % size:
            raise ValueError(
                f"rows of data must be multiples of {size} bytes for {self.kind}, got {list(self.data.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array they stand for, rows last."""
        elements, size = SIZES[self.kind]
        return (*self.data.shape[:-1], self.data.shape[-1] // size * elements)


def _kind(fmt: Format, kind: str | None) -> str:
    allowed = {NVFP4: ("NVFP4",), MXFP4: ("MXFP4",), Ternary: ("TQ2_0", "TQ1_0")}.get(type(fmt), ())
    if not allowed:
        raise ValueError(f"q must be nvfp4, mxfp4 or ternary for a GGUF layout, got {fmt}")
    if kind is not None and kind not in allowed:
        raise ValueError(f"kind must be one of {allowed} for {fmt}, got {kind!r}")
    return kind or allowed[0]


def to_gguf(q: QTensor, kind: str | None = None) -> GGUFBlocks:
    """The blocks of a quantised array; its rows (`q.axis`) become the rows of GGUF.

    Args:
      q: nvfp4, mxfp4 or ternary. Blocks of a ternary array must be multiples of 256.
      kind: None for the layout of the format, which for ternary is "TQ2_0", the other choice being "TQ1_0".

    Returns:
      Blocks that decode to the values of q, but for the tensor scale and the rounding of a ternary scale to float16.

    Raises:
      ValueError: for another format, rows that are not whole blocks, and scales that float16 cannot hold.

    >>> from jaxlab.quant.qtensor import quantize
    >>> blocks = to_gguf(quantize(jnp.ones((3, 64)), "nvfp4"))
    >>> blocks.kind, blocks.data.shape, blocks.shape
    ('NVFP4', (3, 36), (3, 64))
    """
    kind = _kind(q.format, kind)
    elements = SIZES[kind][0]
    if q.row % elements:
        raise ValueError(f"rows of q must be multiples of {elements} for {kind}, got {q.row} of {q.checkpoint_meta}")
    encoded = unpacked(q)
    codes, scale = np.asarray(encoded.codes).astype(np.uint8), np.asarray(encoded.scale)
    blocks = codes.reshape(*q.lead, q.row // elements, elements)
    if kind in ("MXFP4", "NVFP4"):
        blocks = np.where(blocks == 8, np.uint8(0), blocks)
        parts = blocks.reshape(*blocks.shape[:-1], -1, 2, 16 if kind == "MXFP4" else 8)
        words = parts[..., 0, :] | (parts[..., 1, :] << 4)
        head = scale.reshape(*blocks.shape[:-1], -1)
        data = np.concatenate([head, words.reshape(*blocks.shape[:-1], -1)], axis=-1)
        ts = float(encoded.tensor_scale) if kind == "NVFP4" else 1.0
    else:
        tail = _half_scales(q, scale, blocks.shape[:-1])
        words = _tq1_words(blocks) if kind == "TQ1_0" else _tq2_words(blocks)
        data, ts = np.concatenate([words, tail], axis=-1), 1.0
    return GGUFBlocks(kind, data.reshape(*q.lead, data.shape[-2] * data.shape[-1]), ts)


def _half_scales(q: QTensor, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes of a float16 scale for each block of 256."""
    size = q.format.block_size
    if size is not None and size % 256:
        raise ValueError(f"block_size must be a multiple of 256 for TQ layouts, got {size}")
    if q.format.per == "block":
        scale = np.repeat(scale, size // 256, axis=-1)[..., : shape[-1]]
    with np.errstate(over="ignore", under="ignore"):
        half = np.broadcast_to(scale, shape).astype("<f2")
    if not np.isfinite(half).all() or ((half == 0) & (scale != 0)).any():
        raise ValueError(f"scales of q must fit float16 for TQ layouts, got {scale.min():g} to {scale.max():g}")
    return half[..., None].view(np.uint8)


def _tq2_words(codes: np.ndarray) -> np.ndarray:
    parts = codes.reshape(*codes.shape[:-1], 2, 4, 32)
    words = parts[..., 0, :] | (parts[..., 1, :] << 2) | (parts[..., 2, :] << 4) | (parts[..., 3, :] << 6)
    return words.reshape(*codes.shape[:-1], 64)


def _tq2_codes(words: np.ndarray) -> np.ndarray:
    parts = words.reshape(*words.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (parts & 3).reshape(*words.shape[:-1], 256)


def _tq1_words(codes: np.ndarray) -> np.ndarray:
    out, at = [], 0
    for size, digits in _TQ1_PARTS:
        part = codes[..., at : at + size * digits].reshape(*codes.shape[:-1], digits, size).astype(np.uint16)
        # Five places even where four are used: the number is a fraction of 3^5, rounded up to one of 256.
        number = sum(part[..., i, :] * 3 ** (4 - i) for i in range(digits))
        out.append(((number * 256 + 242) // 243).astype(np.uint8))
        at += size * digits
    return np.concatenate(out, axis=-1)


def _tq1_codes(words: np.ndarray) -> np.ndarray:
    out, at = [], 0
    for size, digits in _TQ1_PARTS:
        part = words[..., None, at : at + size].astype(np.uint16) * 3 ** np.arange(digits, dtype=np.uint16)[:, None]
        out.append((((part & 255) * 3) >> 8).astype(np.uint8).reshape(*words.shape[:-1], digits * size))
        at += size
    return np.concatenate(out, axis=-1)


def from_gguf(blocks: GGUFBlocks, *, axis: int = -1, dtype: Any = jnp.float32) -> QTensor:
    """A quantised array from GGUF blocks.

    Args:
      blocks: raw bytes of a tensor and what they are.
      axis: where the rows shall lie; -2 for a kernel (in, out) whose GGUF rows run along the inputs.
      dtype: of the array that it shall stand for.

    Returns:
      nvfp4, mxfp4 (rule "floor"), or ternary with a scale for each block of 256.

    Raises:
      ValueError: for an axis that the array does not have, and bytes that stand for no number of the format.
      TypeError: for another dtype.

    >>> from jaxlab.quant.qtensor import dequantize, quantize
    >>> q = from_gguf(to_gguf(quantize(jnp.eye(32), "mxfp4")))
    >>> bool((dequantize(q) == jnp.eye(32)).all())
    True
    """
    kind, shape = blocks.kind, blocks.shape
    elements, size = SIZES[kind]
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis must be from {-len(shape)} to {len(shape) - 1} for shape {list(shape)}, got {axis}")
    if jnp.dtype(dtype).name not in DTYPES:
        raise TypeError(f"dtype must be one of {DTYPES}, got {jnp.dtype(dtype).name}")
    axis = axis - len(shape) if axis >= 0 else axis
    lead, n = shape[:-1], shape[-1]
    data = np.asarray(blocks.data).reshape(*lead, n // elements, size)
    ts = None
    if kind in ("MXFP4", "NVFP4"):
        fmt: Format = MXFP4() if kind == "MXFP4" else NVFP4()
        head = size - elements // 2
        scale, words = data[..., :head], data[..., head:]
        scale = _checked_bytes(kind, scale).reshape(*lead, n // fmt.block_size)
        parts = words.reshape(*lead, n // fmt.block_size, 1, fmt.block_size // 2)
        codes = np.concatenate([parts & 15, parts >> 4], axis=-2)
        ts = jnp.float32(blocks.tensor_scale) if kind == "NVFP4" else None
    else:
        fmt = Ternary("block", 256)
        codes = _tq1_codes(data[..., :-2]) if kind == "TQ1_0" else _tq2_codes(data[..., :-2])
        if (codes == 3).any():
            raise ValueError("data of TQ2_0 holds the code 3, which stands for no ternary value")
        scale = np.ascontiguousarray(data[..., -2:]).view("<f2")[..., 0].astype(np.float32)
        if not np.isfinite(scale).all():
            raise ValueError(f"scales in data of {kind} must be finite")
    packed = packing.pack(jnp.asarray(codes.reshape(*lead, n), jnp.int32), fmt.bits)
    full = list(lead)
    full.insert(len(shape) + axis, n)
    return QTensor(packed, jnp.asarray(scale), ts, fmt, tuple(full), np.dtype(dtype), axis)


def _checked_bytes(kind: str, scale: UInt8[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    if kind == "NVFP4":
        scale = np.where(scale == 0x7F, np.uint8(0), scale)  # as llama.cpp reads it
        if (scale > 0x7F).any():
            raise ValueError("scale bytes in data of NVFP4 must not have the sign bit")
    elif (scale == 255).any():
        raise ValueError("scale bytes in data of MXFP4 must be below 255, which is NaN")
    return scale


def write_gguf(
    path: str | os.PathLike[str], tensors: Mapping[str, GGUFBlocks | QTensor | Shaped[Array | np.ndarray, "..."]]
) -> None:
    """Writes tensors into a GGUF file, with no metadata of a model beside them.

    Args:
      path: of the file.
      tensors: by name; a `QTensor` is written in the layout of `to_gguf`, a float array as it is. A tensor scale other
        than 1 becomes a tensor `<name>.scale`, where the name is without a `.weight` at its end.

    Raises:
      MissingExtraError: when the package `gguf` is not installed.
      ValueError: for names of more than 63 bytes, two tensors of one name, and as `to_gguf`.
      TypeError: for arrays that are not float32, float16 or bfloat16.
    """
    library = require("gguf", extra="gguf")
    types = library.GGMLQuantizationType
    entries: dict[str, tuple[np.ndarray, Any]] = {}

    def add(name: str, data: np.ndarray, raw: Any) -> None:
        if len(name.encode()) > _MAX_NAME:
            raise ValueError(f"tensors: names must have at most {_MAX_NAME} bytes, got {name!r}")
        if name in entries:
            raise ValueError(f"tensors: two have the name {name!r}")
        entries[name] = (data, raw)

    for name, value in tensors.items():
        value = to_gguf(value) if is_quantized(value) else value
        if isinstance(value, GGUFBlocks):
            add(name, np.asarray(value.data), types[value.kind])
            if value.tensor_scale != 1:
                add(f"{name.removesuffix('.weight')}.scale", np.array([value.tensor_scale], np.float32), None)
        elif value.dtype == jnp.bfloat16:
            add(name, np.ascontiguousarray(value).view(np.uint8), types.BF16)
        elif value.dtype in (np.float32, np.float16):
            add(name, np.asarray(value), None)
        else:
            raise TypeError(f"{name} must be quantised, float32, float16 or bfloat16, got {value.dtype}")
    writer = library.GGUFWriter(os.fspath(path), "jaxlab")
    try:
        for name, (data, raw) in entries.items():
            writer.add_tensor(name, data, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
