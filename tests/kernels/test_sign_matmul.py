"""`sign_matmul` against NumPy: exact in int32; its kernels interpreted, and lowered for TPU and CUDA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.kernels.lowbit import matmul_common
from jaxlab.kernels.sign_matmul import api, pallas_gpu, pallas_tpu
from jaxlab.kernels.sign_matmul.api import sign_matmul
from tests.kernels.test_fp4_matmul import KERNELS, PALLAS, TRITON, kernels_in, over_two_devices, row_error
from tests.kernels.test_ternary_matmul import integers

# (M, N, K): one row; several tiles of K; several tiles of M and N, the last ones short.
SIZES = ((1, 5, 64), (3, 40, 4160), (130, 300, 96))


def signs(n: int, k: int) -> np.ndarray:
    return (1 - 2 * np.random.default_rng(n).integers(0, 2, (n, k))).astype(np.int8)


def packed(w: np.ndarray) -> jax.Array:
    """1 for -1, eight a byte, the first in the lowest bit."""
    return jnp.asarray(np.packbits(w < 0, axis=-1, bitorder="little"))


@pytest.mark.parametrize("m", [1, 3, 8, 130])
def test_the_reference(m: int) -> None:
    w, x = signs(7, 96), integers(m, 96)
    wanted = x.astype(np.int32) @ w.T.astype(np.int32)
    y = sign_matmul(jnp.asarray(x), packed(w))
    assert y.dtype == jnp.int32
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(api.prepare(packed(w)), w)
    np.testing.assert_array_equal(api.matmul_prepared(jnp.asarray(x), api.prepare(packed(w))), wanted)
    np.testing.assert_array_equal(sign_matmul(jnp.asarray(x, jnp.float32), packed(w), 0.5), 0.5 * wanted)


@PALLAS
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_equal_the_reference(size: tuple[int, int, int], implementation: str) -> None:
    m, n, k = size
    codes, x = packed(signs(n, k)), jnp.asarray(integers(m, k))
    f = functools.partial(sign_matmul, implementation=implementation, interpret=True)
    np.testing.assert_array_equal(f(x, codes), sign_matmul(x, codes))


@PALLAS
def test_kernels_equal_the_reference_in_floating_point(implementation: str) -> None:
    codes, scale = packed(signs(40, 128)), jnp.float32(0.3)
    x = jax.random.normal(jax.random.key(0), (8, 128))
    y = sign_matmul(x, codes, scale, implementation=implementation, interpret=True)
    assert row_error(y, sign_matmul(x, codes, scale)) < 1e-6


@TRITON
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(("m", "dtype"), [(1, "int8"), (256, "float32")])
def test_lowers_without_the_hardware(platform: str, m: int, dtype: str) -> None:
    run = {"tpu": pallas_tpu, "cuda": pallas_gpu}[platform].matmul
    out = jnp.int32 if dtype == "int8" else jnp.dtype(dtype)
    scale = None if dtype == "int8" else jnp.ones((520, 1))
    f: Any = functools.partial(run, layout=matmul_common.SIGN, out_dtype=out)
    args = jnp.zeros((m, 8192), dtype), jnp.zeros((520, 1024), jnp.uint8)
    assert kernels_in(lambda x, codes: f(x, codes, scale), platform, *args) == 1


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_gradient_and_vmap(implementation: str) -> None:
    w, x = signs(5, 64), jax.random.normal(jax.random.key(0), (3, 64))
    f = functools.partial(sign_matmul, implementation=implementation, interpret=implementation != "xla")
    y, pull = jax.vjp(f, x, packed(w), jnp.float32(0.5))
    g = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    dx, dcodes, dscale = pull(jnp.asarray(g))
    assert row_error(dx, 0.5 * np.float64(g) @ w) < 1e-6
    assert dcodes.dtype == jax.dtypes.float0 and dscale == 0
    assert row_error(jax.vmap(lambda row: f(row, packed(w), jnp.float32(0.5)))(x), y) < 1e-6


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_shard_map_over_the_rows_of_the_weights(implementation: str) -> None:
    x, codes = jnp.asarray(integers(3, 64)), packed(signs(6, 64))
    f = functools.partial(sign_matmul, implementation=implementation, interpret=implementation != "xla")
    y = over_two_devices(f, x, codes, check_vma=implementation == "xla")
    np.testing.assert_array_equal(y, sign_matmul(x, codes))


def test_bad_input() -> None:
    x, codes = jnp.asarray(integers(3, 64)), packed(signs(5, 64))
    with pytest.raises(TypeError, match="codes must be uint8, 8 codes a byte, got int32"):
        sign_matmul(x, codes.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"x must be .* K = 64 of codes \[5, 8\].*, got shape \[3, 60\]"):
        sign_matmul(x[:, :60], codes)
    with pytest.raises(ValueError, match=r"scale must have shape \[\] or \[5, 1\], got \[1, 5\]"):
        sign_matmul(x.astype(jnp.float32), codes, jnp.ones((1, 5)))
    with pytest.raises(ValueError, match="runs on a TPU"):
        sign_matmul(x, codes, implementation="pallas_tpu")
