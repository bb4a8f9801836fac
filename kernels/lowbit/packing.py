"""Codes of 4, 2 and 1 bits in bytes: code i of a row is in byte i // p, p codes a byte, the first in the lowest bits.

At 4 bits this is the layout of OCP and NVIDIA: the low nibble holds the element with the even index.
"""

import functools
import operator

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt8


def per_byte(bits: int) -> int:
    """Codes that share a byte.

    >>> [per_byte(bits) for bits in (1, 2, 4, 8)]
    [8, 4, 2, 1]
    """
    return 8 // bits


def pack(codes: Int32[Array, "*lead n"], bits: int) -> UInt8[Array, "*lead b"]:
    """Packs the lowest `bits` bits of every code.

    Args:
      codes: n a multiple of `per_byte(bits)`.
      bits: 1, 2, 4 or 8.

    Returns:
      n * bits / 8 bytes a row.

    >>> pack(jnp.array([15, 15, 14, 13]), 4).tolist(), pack(jnp.array([1, 0, 0, 1, 0, 0, 0, 0]), 1).tolist()
    ([255, 222], [9])
    """
    codes = codes & ((1 << bits) - 1)
    parts = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte(bits), per_byte(bits))
    words = functools.reduce(operator.or_, (parts[..., i] << (bits * i) for i in range(per_byte(bits))))
    return words.astype(jnp.uint8)


def planes(words: UInt8[Array, "*lead b"], bits: int) -> list[Int32[Array, "*lead b"]]:
    """The codes i, i + p, i + 2p, ... of every row for i = 0 .. p - 1: unpacked without moving an element.

    A product with unpacked weights may take the matching strides of the other factor instead of interleaving these.

    >>> [x.tolist() for x in planes(jnp.array([0x21, 0x43], jnp.uint8), 4)]
    [[1, 3], [2, 4]]
    """
    words = words.astype(jnp.int32)
    return [(words >> (bits * i)) & ((1 << bits) - 1) for i in range(per_byte(bits))]


def unpack(words: UInt8[Array, "*lead b"], bits: int) -> Int32[Array, "*lead n"]:
    """The codes that `pack` packed.

    >>> unpack(pack(jnp.array([1, 0, 2, 1]), 2), 2).tolist()
    [1, 0, 2, 1]
    """
    codes = jnp.stack(planes(words, bits), axis=-1)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * per_byte(bits))
