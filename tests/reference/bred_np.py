"""Block replay dithering in NumPy float64, an element at a time: slow, and independent of the library's code."""

import numpy as np

MASK = 0xFFFFFFFF


def lowbias32(x):
    """Bijection of 32-bit integers, on Python ints."""
    x ^= x >> 16
    x = x * 0x21F0AAAD & MASK
    x ^= x >> 15
    x = x * 0xD35A2D97 & MASK
    return x ^ (x >> 15)


def dither(seed, leaf, count, block):
    """u of one block."""
    word = 0
    for part in (seed, leaf, count):
        word = lowbias32((word + 0x9E3779B9 & MASK) ^ (part & MASK))
    top = lowbias32(lowbias32(block ^ word) + word & MASK) >> 16
    return top / 2**16 - 0.5


def roundtrip(x, *, bits, block, nonneg=False, seed=0, leaf=0, count=0):
    """What is decoded after encoding: blocks along the last axis, one dither value each, in float64."""
    x = np.asarray(x, np.float64)
    rows = x.reshape(-1, x.shape[-1])
    out, steps, number = np.zeros_like(rows), 2**bits - 1, 0
    for i, row in enumerate(rows):
        for start in range(0, rows.shape[1], block):
            part, u = row[start : start + block], dither(seed, leaf, count, number)
            number += 1
            values = np.sqrt(part) if nonneg else part
            s = np.max(np.abs(values))
            for j, value in enumerate(values):
                if s == 0:
                    continue
                y = value / s * steps if nonneg else (value / s + 1) * steps / 2
                k = min(max(np.floor(y + u + 0.5), 0), steps)
                w = min(max(k - u, 0), steps)
                if nonneg:
                    out[i, start + j] = max((w * s / steps) ** 2 - (s / steps) ** 2 / 12, (s / steps / 2) ** 2)
                else:
                    out[i, start + j] = (w * 2 / steps - 1) * s
    return out.reshape(x.shape)
