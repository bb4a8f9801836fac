"""Low-bit formats in Python and float64, a number at a time: slow, and independent of the library's code."""

import math

import numpy as np

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]


def nearest(x, table):
    """Index of the number of a rising table that is nearest to x, the even one of two."""
    errors = [abs(value - x) for value in table]
    best = min(errors)
    found = [i for i, error in enumerate(errors) if error == best]
    return found[0] if len(found) == 1 else next(i for i in found if i % 2 == 0)


def e2m1(x):
    """Code of x, with the sign of -0."""
    return nearest(min(abs(x), 8.0), E2M1) + (8 if math.copysign(1, x) < 0 else 0)


def e2m1_value(code):
    return math.copysign(E2M1[code % 8], -1 if code >= 8 else 1)


def e8m0(peak, rule):
    """Byte of the scale of a block with this largest magnitude."""
    if peak < 2.0**-96:
        return 0
    mantissa, exponent = math.frexp(peak)  # peak = mantissa 2^exponent, 1/2 <= mantissa < 1
    exponent -= 3  # such that peak / 2^exponent is in [4, 8)
    if rule == "ceil" and peak > 6 * 2.0**exponent:
        exponent += 1
    if rule == "even" and mantissa >= 7 / 8:
        exponent += 1
    return min(exponent + 127, 252)


def blocks_of(row, size):
    padded = list(row) + [0.0] * (-len(row) % size)
    return [padded[i : i + size] for i in range(0, len(padded), size)]


def nvfp4(x):
    """(codes, scale bytes, tensor scale, values) of `[rows, n]`."""
    x = np.asarray(x, np.float64)
    peak = np.abs(x).max(initial=0)
    ts = 1.0 if peak < 2.0**-96 else float(np.float32(peak) / np.float32(2688))
    codes, scales, values = [], [], []
    for row in x:
        cut = blocks_of(row, 16)
        byte = [nearest(min(max(max(map(abs, b)) / 6 / ts, 2.0**-9), 448.0), E4M3) for b in cut]
        steps = [E4M3[k] * ts for k in byte]
        row_codes = [e2m1(v / s) for b, s in zip(cut, steps, strict=True) for v in b]
        codes.append(row_codes)
        scales.append(byte)
        values.append([e2m1_value(c) * steps[i // 16] for i, c in enumerate(row_codes)][: len(row)])
    return np.array(codes), np.array(scales), ts, np.array(values)


def mxfp4(x, rule="floor"):
    """(codes, scale bytes, values) of `[rows, n]`."""
    x = np.asarray(x, np.float64)
    codes, scales, values = [], [], []
    for row in x:
        cut = blocks_of(row, 32)
        byte = [e8m0(max(map(abs, b)), rule) for b in cut]
        row_codes = [e2m1(v / 2.0 ** (k - 127)) if k else 0 for b, k in zip(cut, byte, strict=True) for v in b]
        codes.append(row_codes)
        scales.append(byte)
        values.append([e2m1_value(c) * 2.0 ** (byte[i // 32] - 127) for i, c in enumerate(row_codes)][: len(row)])
    return np.array(codes), np.array(scales), np.array(values)


def integers(x, bits):
    """(codes, scales) with a scale a row."""
    x = np.asarray(x, np.float64)
    top = 2 ** (bits - 1) - 1
    scales = [max(map(abs, row)) / top or 1.0 for row in x]
    codes = [[max(-top, min(top, round(v / s))) for v in row] for row, s in zip(x, scales, strict=True)]
    return np.array(codes), np.array(scales)


def ternary(x, eps=1e-5):
    """(values, scale) of BitNet b1.58, one scale a tensor."""
    x = np.asarray(x, np.float64)
    scale = float(np.mean([abs(v) for v in x.ravel()]))
    return np.array([[max(-1, min(1, round(v / (scale + eps)))) for v in row] for row in x]), scale


def pack(codes, bits):
    """Bytes of rows of codes, the first in the lowest bits."""
    per = 8 // bits
    return np.array(
        [
            [sum(int(c) << (bits * i) for i, c in enumerate(row[j : j + per])) for j in range(0, len(row), per)]
            for row in codes
        ],
        np.uint8,
    )
