"""`fp4_matmul` against ml_dtypes and NumPy in float64; its kernels interpreted, and lowered for TPU and CUDA."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.kernels.fp4_matmul import api, pallas_gpu, pallas_tpu
from jaxlab.kernels.fp4_matmul.api import fp4_matmul
from jaxlab.kernels.lowbit import matmul_common

KERNELS = ("pallas_tpu", "pallas_gpu")
PALLAS = pytest.mark.parametrize("implementation", KERNELS)
FORMATS = pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
TRITON = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a product."""

    m: int
    n: int
    k: int
    format: str = "nvfp4"
    dtype: str = "float32"


# One row; several tiles of K; several tiles of M and N, the last ones short.
CASES = (Case(1, 5, 64), Case(3, 40, 4160, "mxfp4"), Case(3, 7, 2112, "nvfp4", "bfloat16"), Case(130, 300, 96))


def weights(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(codes, scale bytes, tensor scale): any codes, and scales of usual sizes."""
    rng = np.random.default_rng(case.n)
    low, high, block = (40, 80, 16) if case.format == "nvfp4" else (120, 134, 32)
    codes = rng.integers(256, size=(case.n, case.k // 2), dtype=np.uint8)
    scales = rng.integers(low, high, size=(case.n, case.k // block), dtype=np.uint8)
    return jnp.asarray(codes), jnp.asarray(scales), jnp.float32(0.037)


def values(case: Case, seed: int = 0) -> jax.Array:
    """x `[M, K]`."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((case.m, case.k), np.float32), case.dtype)


def oracle(case: Case) -> np.ndarray:
    """The weights `[N, K]` in float64, decoded by ml_dtypes."""
    codes, scales, tensor_scale = (np.asarray(x) for x in weights(case))
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(case.n, case.k)
    kind = ml_dtypes.float8_e4m3fn if case.format == "nvfp4" else ml_dtypes.float8_e8m0fnu
    blocks = np.repeat(scales.view(kind).astype(np.float64), case.k // scales.shape[1], axis=1)
    return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * blocks * np.float64(tensor_scale)


def row_error(y: Any, wanted: Any) -> float:
    """The largest error, relative to the norm of its row."""
    y, wanted = np.asarray(y, np.float64), np.asarray(wanted, np.float64)
    assert y.shape == wanted.shape
    return float(np.max(np.abs(y - wanted) / np.linalg.norm(wanted, axis=-1, keepdims=True)))


def abstract(platform: str) -> contextlib.AbstractContextManager[Any]:
    """Tells Pallas which device to lower for where none is there: some of its rules ask for the generation."""
    kind, cores = {"tpu": ("TPU v5e", 1), "cuda": ("NVIDIA H200", None)}[platform]
    device = jax.sharding.AbstractDevice(kind, num_cores=cores, platform={"cuda": "gpu"}.get(platform, platform))
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def kernels_in(function: Any, platform: str, *args: Any) -> int:
    """How many kernels the function lowers to on a platform that is not there."""
    with abstract(platform):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    target = {"tpu": "tpu_custom_call", "cuda": "xla.gpu.triton"}[platform]
    return text.count(f"@{target}") + text.count(f"@__gpu${target}")


def over_two_devices(function: Any, x: jax.Array, *arrays: jax.Array, check_vma: bool = True) -> jax.Array:
    """y `[M, N]` by `shard_map`: the arrays are split along their first axis, N, and x is on both devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("n",))
    split, whole = PartitionSpec("n"), PartitionSpec()
    specs = tuple(split if a.ndim else whole for a in arrays)
    out = PartitionSpec(None, "n")
    f = jax.shard_map(function, mesh=mesh, in_specs=(whole, *specs), out_specs=out, check_vma=check_vma)
    return jax.jit(f)(x, *arrays)


@FORMATS
@pytest.mark.parametrize(("m", "dtype"), [(1, "float32"), (3, "bfloat16"), (8, "bfloat16"), (130, "float32")])
def test_the_reference_is_the_product_with_the_decoded_weights(m: int, format: str, dtype: str) -> None:
    case = Case(m, 7, 96, format, dtype)
    x, w = values(case), weights(case)
    wanted = np.asarray(x, np.float64) @ oracle(case).T
    assert row_error(fp4_matmul(x, *w, format=format, out_dtype=jnp.float32), wanted) < 1e-6
    y = fp4_matmul(x, *w, format=format)
    assert y.dtype == dtype and row_error(y, wanted) < (5e-3 if dtype == "bfloat16" else 1e-6)
    again = api.matmul_prepared(x, api.prepare(*w[:2], format=format, dtype=dtype), w[2])
    assert again.dtype == dtype and row_error(again, wanted) < (5e-3 if dtype == "bfloat16" else 1e-6)


@PALLAS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case: Case, implementation: str) -> None:
    x, w = values(case), weights(case)
    f = functools.partial(fp4_matmul, format=case.format, out_dtype=jnp.float32)
    y = f(x, *w, implementation=implementation, interpret=True)
    assert y.dtype == jnp.float32 and row_error(y, f(x, *w)) < 1e-6


@TRITON
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@FORMATS
@pytest.mark.parametrize(("m", "dtype"), [(1, "bfloat16"), (256, "float32")])
def test_lowers_without_the_hardware(platform: str, format: str, m: int, dtype: str) -> None:
    case = Case(m, 520, 4096, format, dtype)
    run = {"tpu": pallas_tpu, "cuda": pallas_gpu}[platform].matmul
    f = functools.partial(run, layout=matmul_common.FP4[format], out_dtype=jnp.dtype(dtype))
    assert kernels_in(f, platform, values(case), *weights(case)) == 1


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_gradient_and_vmap(implementation: str) -> None:
    case = Case(3, 5, 64)
    x, w = values(case), weights(case)
    f = functools.partial(fp4_matmul, implementation=implementation, interpret=implementation != "xla")
    g = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    y, pull = jax.vjp(f, x, *w)
    dx, dcodes, dscales, dts = pull(jnp.asarray(g))
    assert row_error(dx, np.float64(g) @ oracle(case)) < 1e-6
    assert dcodes.dtype == dscales.dtype == jax.dtypes.float0 and dts == 0
    stacked = jax.vmap(lambda row: f(row, *w))(x)
    assert row_error(stacked, y) < 1e-6
    assert row_error(f(x.reshape(3, 1, 64), *w), y[:, None]) < 1e-6


def test_the_gradient_has_the_dtype_of_x() -> None:
    case = Case(2, 5, 64, dtype="bfloat16")
    dx = jax.grad(lambda x: fp4_matmul(x, *weights(case), out_dtype=jnp.float32).sum())(values(case))
    assert dx.dtype == jnp.bfloat16


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_shard_map_over_the_rows_of_the_weights(implementation: str) -> None:
    case = Case(3, 6, 64)
    x, (codes, scales, tensor_scale) = values(case), weights(case)
    extra = {"implementation": implementation, "interpret": implementation != "xla"}
    f = functools.partial(fp4_matmul, **extra)
    y = over_two_devices(f, x, codes, scales, tensor_scale, check_vma=implementation == "xla")
    assert row_error(y, fp4_matmul(x, codes, scales, tensor_scale)) < 1e-6


def test_jit_with_weights_on_two_devices() -> None:
    case = Case(3, 6, 64)
    x, (codes, scales, tensor_scale) = values(case), weights(case)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("n",))
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("n", None)))
    y = jax.jit(fp4_matmul)(x, put(codes), put(scales), tensor_scale)
    assert row_error(y, fp4_matmul(x, codes, scales, tensor_scale)) < 1e-6


@PALLAS
def test_the_result_of_a_row_does_not_depend_on_their_number_in_a_kernel(implementation: str) -> None:
    case = Case(8, 40, 256)
    x, w = values(case), weights(case)
    f = functools.partial(fp4_matmul, implementation=implementation, interpret=True)
    y = np.asarray(f(x, *w))
    for m in (1, 5):
        np.testing.assert_array_equal(f(x[:m], *w), y[:m])


def test_nan_scales_and_zero_blocks() -> None:
    x, codes = jnp.ones((2, 32)), jnp.full((2, 16), 0x22, jnp.uint8)
    y = fp4_matmul(x, codes, jnp.array([[127, 56], [0, 0]], jnp.uint8))
    assert np.isnan(y[:, 0]).all() and (y[:, 1] == 0).all()


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_no_rows(implementation: str) -> None:
    y = fp4_matmul(jnp.zeros((0, 64)), *weights(Case(0, 5, 64)), implementation=implementation,
                   interpret=implementation != "xla")  # fmt: skip
    assert y.shape == (0, 5)


def test_bad_input() -> None:
    case = Case(3, 5, 64)
    x, (codes, scales, ts) = values(case), weights(case)
    with pytest.raises(TypeError, match=r"x must be one of .*, got int8"):
        fp4_matmul(x.astype(jnp.int8), codes, scales, ts)
    with pytest.raises(TypeError, match="codes must be uint8, 2 codes a byte, got int32"):
        fp4_matmul(x, codes.astype(jnp.int32), scales, ts)
    with pytest.raises(TypeError, match="scales must be the uint8 bytes of nvfp4 scales, got float32"):
        fp4_matmul(x, codes, scales.astype(jnp.float32), ts)
    with pytest.raises(ValueError, match=r"x must be \[..., K\] with the K = 64 of codes \[5, 32\].*\[3, 62\]"):
        fp4_matmul(x[:, :62], codes, scales, ts)
    with pytest.raises(ValueError, match=r"scales must be \[5, 4\], a byte for 16 codes, got \[5, 2\]"):
        fp4_matmul(x, codes, scales[:, :2], ts)
    with pytest.raises(ValueError, match="K must be a multiple of 16 for nvfp4, got 40: pad rows"):
        fp4_matmul(x[:, :40], codes[:, :20], scales[:, :3], ts)
    with pytest.raises(ValueError, match=r"format must be one of \('nvfp4', 'mxfp4'\), got 'fp4'"):
        fp4_matmul(x, codes, scales, ts, format="fp4")
    with pytest.raises(ValueError, match=r"tensor_scale must have shape \[\], got \[5, 1\]"):
        fp4_matmul(x, codes, scales, jnp.ones((5, 1)))
    with pytest.raises(ValueError, match=r"codes must be \[N, K / 2\]"):
        fp4_matmul(x, codes[0], scales, ts)
    with pytest.raises(TypeError, match=r"out_dtype must be None or one of .*, got int32"):
        fp4_matmul(x, codes, scales, ts, out_dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"x must be .*, got a scalar"):
        fp4_matmul(x[0, 0], codes, scales, ts)


@pytest.mark.parametrize(("name", "device"), [("pallas_tpu", "TPU"), ("pallas_gpu", "GPU")])
def test_an_implementation_that_cannot_run_says_why(name: str, device: str) -> None:
    case = Case(1, 5, 64)
    with pytest.raises(ValueError, match=f"runs on a {device}, but the default backend is 'cpu'.*interpret=True"):
        fp4_matmul(values(case), *weights(case), implementation=name)
    with pytest.raises(ValueError, match=r"must be None or one of .* got 'triton'"):
        fp4_matmul(values(case), *weights(case), implementation="triton")
    with pytest.raises(ValueError, match="interpret=True is for the Pallas kernels"):
        fp4_matmul(values(case), *weights(case), interpret=True)
