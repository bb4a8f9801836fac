"""Packing and maxima of many blocks in forms that XLA for CPUs turns into fast loops; the numbers are `numerics`'."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, PyTree, UInt8

from jaxlab.kernels.bred_update import numerics

PARTS = {8: 1, 4: 2, 3: 4}  # bits -> parts of a block, whose elements share words


def high(words: UInt8[Array, "*n w"]) -> UInt8[Array, "*n 2 w/3"]:
    """The high bits of 3-bit codes, twice: as long as the part of the words with the low bits.

    Only a copy: XLA vectorises copies and arithmetic along 8 elements or more, not both in one kernel.
    """
    size = words.shape[-1] // 3
    return jnp.broadcast_to(words[..., None, 2 * size :], (*words.shape[:-1], 2, size))


def unpack(words: UInt8[Array, "*n w"], high: UInt8[Array, "*n 2 w/3"] | None, bits: int) -> Int32[Array, "*n q p"]:
    """The codes that `numerics.pack` packed, the parts of a block as an axis; `high` for 3 bits."""
    if high is not None:
        size = words.shape[-1] // 3 * 2
        shift = 2 * np.arange(4, dtype=np.int32)[:, None]
        low = words[..., None, :size].astype(jnp.int32) >> shift
        place = shift + np.arange(size, dtype=np.int32) // (size // 2)
        high = high.reshape(*words.shape[:-1], 1, size).astype(jnp.int32) >> place
        return (low & 3) | ((high & 1) << 2)
    words = words[..., None, :].astype(jnp.int32)
    return words if bits == 8 else (words >> (4 * np.arange(2, dtype=np.int32)[:, None])) & 15


def pack(codes: Int32[Array, "*n b"], bits: int) -> Any:
    """Words for the elements at the same place of the parts; bits of `codes` above the lowest `bits` are ignored.

    At 8 and 4 bits those that `numerics.pack` gives; at 3 bits uint16, the high bit of part i at 8 + 2 i.
    """
    if bits == 8:
        return codes.astype(jnp.uint8)
    cuts = jnp.split(codes, PARTS[bits], axis=-1)
    if bits == 4:
        return ((cuts[0] & 15) | (cuts[1] << 4)).astype(jnp.uint8)
    parts = (((x & 3) << (2 * i)) | ((x & 4) << (6 + 2 * i)) for i, x in enumerate(cuts))
    return functools.reduce(operator.or_, parts).astype(jnp.uint16)


def planes(words: Any, bits: int) -> list[UInt8[Array, "*n _"]]:
    """What `numerics.pack` puts one behind the other, from the words of `pack`."""
    if bits != 3:
        return [words]
    high = words >> 8
    half = high.shape[-1] // 2
    return [words.astype(jnp.uint8), (high[..., :half] | (high[..., half:] << 1)).astype(jnp.uint8)]


def peak(x: Float32[Array, "*n b"]) -> Float32[Array, "*n 1"]:
    """max|x| of every block; NaN, of whatever sign, where there is one."""
    size = x.shape[-1]
    if size % 128:  # too short for what follows to vectorise
        return jnp.max(numerics.magnitude(x), axis=-1, keepdims=True)
    # As integers, which have one order. Cuts run along the elements, a reduction across them; XLA fuses eight cuts.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    bits = functools.reduce(jnp.maximum, jnp.split(bits, min(size // 16, 8), axis=-1))
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1, keepdims=True), jnp.float32)


def floor(z: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """floor(z) of 0 <= z < 2^8 in the lowest bits: a conversion would check for what an integer cannot hold."""
    return jax.lax.bitcast_convert_type(jnp.floor(z) + jnp.float32(2**23), jnp.int32)


def serves(x: PyTree) -> bool:
    """Whether these arrays are to be computed by what is here: in a program for a CPU, outside of `shard_map`.

    Eagerly, compiling would take longer than it saves; in `shard_map`, branches and loops want types of their own.
    """
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
    return traced and jax.default_backend() == "cpu" and not jax.sharding.get_abstract_mesh().manual_axes


def stage(known: Bool[Array, ""], f: Callable[[], Any]) -> Any:
    """f(), computed once and before everything that uses it; `known` is true, but XLA does not know."""
    return jax.lax.cond(known, f, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f)))


def spread(turn: Int32[Array, ""]) -> Int32[Array, ""]:
    """The same number; in the body of a loop, it lets the loop's large operations run on all cores.

    XLA for CPUs compiles a loop into one function, which runs on one core, unless something in it needs a library
    function, such as this.
    """
    return jax.lax.sort(jnp.stack([turn, turn]))[0]
