"""`ternary_matmul` against NumPy: exact in int32; its kernels interpreted, and lowered for TPU and CUDA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.kernels.lowbit import matmul_common
from jaxlab.kernels.ternary_matmul import api, pallas_gpu, pallas_tpu
from jaxlab.kernels.ternary_matmul.api import ternary_matmul
from tests.kernels.test_fp4_matmul import KERNELS, PALLAS, TRITON, kernels_in, over_two_devices, row_error

# (M, N, K): one row; several tiles of K; several tiles of M and N, the last ones short.
SIZES = ((1, 5, 64), (3, 40, 2112), (130, 300, 96))


def trits(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(n).integers(-1, 2, (n, k)).astype(np.int8)


def packed(w: np.ndarray) -> jax.Array:
    """value + 1, four a byte, the first in the lowest bits."""
    codes = (w + 1).astype(np.uint8).reshape(w.shape[0], -1, 4)
    return jnp.asarray(np.sum(codes << np.arange(0, 8, 2, dtype=np.uint8), axis=-1, dtype=np.uint8))


def integers(m: int, k: int) -> np.ndarray:
    x = np.random.default_rng(m).integers(-127, 128, (m, k)).astype(np.int8)
    x[0] = -128  # the largest sums there are
    return x


@pytest.mark.parametrize("m", [1, 3, 8, 130])
def test_the_reference(m: int) -> None:
    w, x = trits(7, 96), integers(m, 96)
    wanted = x.astype(np.int32) @ w.T.astype(np.int32)
    y = ternary_matmul(jnp.asarray(x), packed(w))
    assert y.dtype == jnp.int32
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(api.prepare(packed(w)), w)
    np.testing.assert_array_equal(api.matmul_prepared(jnp.asarray(x), api.prepare(packed(w))), wanted)
    # Integers of this size are exact in float32, too.
    np.testing.assert_array_equal(ternary_matmul(jnp.asarray(x, jnp.float32), packed(w), 0.5), 0.5 * wanted)
    rows = jnp.asarray(np.random.default_rng(0).random((7, 1)), jnp.float32)
    scaled = ternary_matmul(jnp.asarray(x, jnp.bfloat16), packed(w), rows)
    assert scaled.dtype == jnp.bfloat16 and row_error(scaled, wanted * np.asarray(rows).T) < 5e-3


@PALLAS
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_equal_the_reference(size: tuple[int, int, int], implementation: str) -> None:
    m, n, k = size
    codes, x = packed(trits(n, k)), jnp.asarray(integers(m, k))
    f = functools.partial(ternary_matmul, implementation=implementation, interpret=True)
    np.testing.assert_array_equal(f(x, codes), ternary_matmul(x, codes))


@PALLAS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_equal_the_reference_in_floating_point(implementation: str, dtype: str) -> None:
    codes, scale = packed(trits(40, 128)), jnp.asarray(np.random.default_rng(0).random((40, 1)), jnp.float32)
    x = jax.random.normal(jax.random.key(0), (8, 128), dtype)
    f = functools.partial(ternary_matmul, out_dtype=jnp.float32)
    y = f(x, codes, scale, implementation=implementation, interpret=True)
    assert row_error(y, f(x, codes, scale)) < 1e-6


@TRITON
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(("m", "dtype"), [(1, "int8"), (256, "int8"), (1, "bfloat16"), (256, "float32")])
def test_lowers_without_the_hardware(platform: str, m: int, dtype: str) -> None:
    run = {"tpu": pallas_tpu, "cuda": pallas_gpu}[platform].matmul
    out = jnp.int32 if dtype == "int8" else jnp.dtype(dtype)
    scale = None if dtype == "int8" else jnp.float32(1)
    f: Any = functools.partial(run, layout=matmul_common.TERNARY, out_dtype=out)
    args = jnp.zeros((m, 4096), dtype), jnp.zeros((520, 1024), jnp.uint8)
    assert kernels_in(lambda x, codes: f(x, codes, scale), platform, *args) == 1


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_gradient_and_vmap(implementation: str) -> None:
    w, scale = trits(5, 64), jnp.asarray([[0.5], [1], [2], [3], [4]], jnp.float32)
    x = jax.random.normal(jax.random.key(0), (3, 64))
    f = functools.partial(ternary_matmul, implementation=implementation, interpret=implementation != "xla")
    y, pull = jax.vjp(f, x, packed(w), scale)
    g = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    dx, dcodes, dscale = pull(jnp.asarray(g))
    assert row_error(dx, np.float64(g) @ (np.asarray(scale, np.float64) * w)) < 1e-6
    assert dcodes.dtype == jax.dtypes.float0 and not dscale.any()
    assert row_error(jax.vmap(lambda row: f(row, packed(w), scale))(x), y) < 1e-6
    xs = jnp.asarray(integers(6, 64)).reshape(2, 3, 64)
    whole = f(xs, packed(w))
    np.testing.assert_array_equal(jax.vmap(lambda part: f(part, packed(w)))(xs), whole)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_shard_map_over_the_rows_of_the_weights(implementation: str) -> None:
    x, codes = jnp.asarray(integers(3, 64)), packed(trits(6, 64))
    f = functools.partial(ternary_matmul, implementation=implementation, interpret=implementation != "xla")
    y = over_two_devices(f, x, codes, check_vma=implementation == "xla")
    np.testing.assert_array_equal(y, ternary_matmul(x, codes))


def test_bad_input() -> None:
    x, codes = jnp.asarray(integers(3, 64)), packed(trits(5, 64))
    floats = x.astype(jnp.float32)
    with pytest.raises(TypeError, match=r"x must be one of \('float32', 'bfloat16', 'int8'\), got int32"):
        ternary_matmul(x.astype(jnp.int32), codes)
    with pytest.raises(TypeError, match="codes must be uint8, 4 codes a byte, got int8"):
        ternary_matmul(x, codes.astype(jnp.int8))
    with pytest.raises(ValueError, match=r"x must be .* K = 64 of codes \[5, 16\].*, got shape \[3, 63\]"):
        ternary_matmul(x[:, :63], codes)
    with pytest.raises(ValueError, match=r"scale must have shape \[\] or \[5, 1\], got \[5\]"):
        ternary_matmul(floats, codes, jnp.ones(5))
    with pytest.raises(TypeError, match="scale must be floating point, got int32"):
        ternary_matmul(floats, codes, jnp.ones((), jnp.int32))
    with pytest.raises(ValueError, match="int8 x is int32 and has no scale"):
        ternary_matmul(x, codes, 0.5)
    with pytest.raises(ValueError, match=r"int8 x is int32 .* out_dtype"):
        ternary_matmul(x, codes, out_dtype=jnp.float32)
    with pytest.raises(ValueError, match="runs on a GPU"):
        ternary_matmul(x, codes, implementation="pallas_gpu")
    with pytest.raises(TypeError, match=r"x must be one of \('int8',\), got float32"):
        api.matmul_prepared(floats, api.prepare(codes))
    with pytest.raises(TypeError, match=r"w must be int8 \[N, K\]"):
        api.matmul_prepared(x, codes)
    with pytest.raises(ValueError, match=r"K = 64 of w, got shape \[3, 8\]"):
        api.matmul_prepared(x[:, :8], api.prepare(codes))
