"""`fp4_sign_matmul` against NumPy in float64: schedules, batch invariance, kernels interpreted and lowered."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.experiments.bench import lowbit as bench
from jaxlab.kernels.fp4_sign_matmul import api, pallas_gpu, pallas_tpu
from jaxlab.kernels.fp4_sign_matmul.api import fp4_sign_matmul
from jaxlab.kernels.lowbit import bench as kernel_bench
from jaxlab.kernels.lowbit import matmul_common
from jaxlab.quant.sign_lowrank import SignLowRank, unpack_signs
from tests.kernels import test_fp4_matmul as fp4
from tests.kernels.test_fp4_matmul import KERNELS, PALLAS, TRITON, Case, kernels_in, over_two_devices, row_error

RANK = 20
# One row and an odd N; several tiles of K; several tiles of M and N, the last ones short.
CASES = (Case(1, 5, 64), Case(3, 42, 4160, "mxfp4", "bfloat16"), Case(130, 300, 96))


def correction(case: Case, rank: int = RANK, column: bool = True) -> SignLowRank:
    """Any signs, those behind N too; scales of both signs."""
    rng = np.random.default_rng(case.k)
    u = jnp.asarray(rng.integers(256, size=(rank, -(-case.n // 8)), dtype=np.uint8))
    v = jnp.asarray(rng.integers(256, size=(rank, case.k // 8), dtype=np.uint8))
    scale = jnp.asarray(rng.standard_normal(rank), jnp.bfloat16)
    b = jnp.asarray(rng.random(case.k) + 0.5, jnp.bfloat16) if column else None
    return SignLowRank(u, v, scale, b, (case.n, case.k))


def arrays(case: Case, column: bool = True) -> tuple[Any, ...]:
    """Everything but x."""
    c = correction(case, column=column)
    return *fp4.weights(case), c.u, c.v, c.scale, c.column


def oracle(case: Case, column: bool = True) -> np.ndarray:
    """W `[N, K]` in float64."""
    u, v, s, b = (np.asarray(x, np.float64) for x in correction(case, column=column).factors())
    return fp4.oracle(case) + (u.T * s) @ (v * b)


def ulps(y: jax.Array, z: jax.Array) -> int:
    """How many numbers of their dtype lie between any two elements."""
    kind = {2: np.int16, 4: np.int32}[y.dtype.itemsize]
    a, b = (np.asarray(x).view(kind).astype(np.int64) for x in (y, z))
    a, b = (np.where(x < 0, np.iinfo(kind).min - x, x) for x in (a, b))
    return int(np.max(np.abs(a - b)))


@pytest.mark.parametrize(
    ("m", "dtype", "column"),
    [(1, "float32", True), (3, "bfloat16", False), (8, "float32", False), (130, "float32", True)],
)
def test_the_reference_is_the_product_with_the_sum(m: int, dtype: str, column: bool) -> None:
    case = Case(m, 11, 96, dtype=dtype)
    x, w = fp4.values(case), arrays(case, column)
    wanted = np.asarray(x, np.float64) @ oracle(case, column).T
    y = fp4_sign_matmul(x, *w, out_dtype=jnp.float32)
    assert row_error(y, wanted) < 1e-6
    np.testing.assert_array_equal(fp4_sign_matmul(x, *w), y.astype(dtype))  # rounded once
    prepared = api.prepare(w[0], w[1], w[3], w[4])
    again = api.matmul_prepared(x, prepared, w[2], w[5], w[6])
    assert again.dtype == dtype and row_error(again, y) < (5e-3 if dtype == "bfloat16" else 1e-6)


@PALLAS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case: Case, implementation: str) -> None:
    x, w = fp4.values(case), arrays(case)
    f = functools.partial(fp4_sign_matmul, format=case.format, out_dtype=jnp.float32)
    assert row_error(f(x, *w, implementation=implementation, interpret=True), f(x, *w)) < 1e-6


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_schedules_agree(implementation: str) -> None:
    case = Case(8, 40, 128, dtype="bfloat16")
    x, w = fp4.values(case), arrays(case)
    f = functools.partial(fp4_sign_matmul, implementation=implementation, interpret=implementation != "xla")
    fused, two = (f(x, *w, schedule=schedule) for schedule in api.SCHEDULES)
    assert fused.dtype == two.dtype == jnp.bfloat16 and ulps(fused, two) <= 1
    assert row_error(two, fp4_sign_matmul(x, *w)) < 5e-3


@pytest.mark.parametrize(("k", "sizes"), [(64, (1, 2, 5, 8, 130)), (2560, (1, 5, 130))])
def test_the_result_of_a_row_does_not_depend_on_their_number(k: int, sizes: tuple[int, ...]) -> None:
    case = Case(300, 43, k)
    x, w = fp4.values(case), arrays(case)
    y = np.asarray(fp4_sign_matmul(x, *w))  # more rows than `matmul_common.GROUP` tiles: a loop
    for m in sizes:
        np.testing.assert_array_equal(fp4_sign_matmul(x[:m], *w), y[:m])
    np.testing.assert_array_equal(fp4_sign_matmul(x[61:66], *w), y[61:66])  # other places in their tiles


@TRITON
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(("m", "dtype"), [(1, "bfloat16"), (256, "float32")])
def test_lowers_without_the_hardware(platform: str, m: int, dtype: str) -> None:
    case = Case(m, 523, 4096, "nvfp4", dtype)
    run = {"tpu": pallas_tpu, "cuda": pallas_gpu}[platform].matmul
    f = functools.partial(run, layout=matmul_common.FP4["nvfp4"], out_dtype=jnp.dtype(dtype))
    assert kernels_in(f, platform, fp4.values(case), *arrays(case)) == 2


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_gradient_and_vmap(implementation: str) -> None:
    case = Case(3, 5, 64)
    x, w = fp4.values(case), arrays(case)
    f = functools.partial(fp4_sign_matmul, implementation=implementation, interpret=implementation != "xla")
    y, pull = jax.vjp(f, x, *w)
    g = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    dx, *others = pull(jnp.asarray(g))
    assert row_error(dx, np.float64(g) @ oracle(case)) < 1e-6
    assert all(d.dtype == jax.dtypes.float0 or not d.any() for d in others)
    assert row_error(jax.vmap(lambda row: f(row, *w))(x), y) < 1e-6


@pytest.mark.parametrize("implementation", ["xla", "pallas_gpu"])
def test_shard_map_over_the_rows_of_the_weights(implementation: str) -> None:
    case = Case(3, 16, 64)
    x, (codes, scales, ts, u, v, s, b) = fp4.values(case), arrays(case)
    extra = {"implementation": implementation, "interpret": implementation != "xla"}

    def f(x: Any, codes: Any, scales: Any, ut: Any) -> Any:
        return fp4_sign_matmul(x, codes, scales, ts, ut.T, v, s, b, **extra)

    y = over_two_devices(f, x, codes, scales, u.T, check_vma=implementation == "xla")
    assert row_error(y, fp4_sign_matmul(x, codes, scales, ts, u, v, s, b)) < 1e-6


@PALLAS
def test_rank_zero_is_the_4_bit_product(implementation: str) -> None:
    case = Case(2, 5, 64)
    x, w, c = fp4.values(case), fp4.weights(case), correction(case, rank=0)
    y = fp4_sign_matmul(x, *w, c.u, c.v, c.scale, implementation=implementation, interpret=True)
    assert row_error(y, fp4.fp4_matmul(x, *w)) < 1e-6


def test_signs_are_those_of_the_fit() -> None:
    c = correction(Case(1, 11, 96))
    u, v = api.reference.signs(c.u, c.v, 11)
    np.testing.assert_array_equal(u, unpack_signs(c.u, 11))
    np.testing.assert_array_equal(v, unpack_signs(c.v, 96))


def test_bad_input() -> None:
    case = Case(3, 5, 64)
    x, (codes, scales, ts, u, v, s, b) = fp4.values(case), arrays(case)
    call = dataclasses.make_dataclass("Call", [(n, Any) for n in ("x", "codes", "scales", "ts", "u", "v", "s", "b")])
    good = call(x, codes, scales, ts, u, v, s, b)

    def run(error: type[Exception], match: str, options: dict[str, Any] | None = None, **change: Any) -> None:
        with pytest.raises(error, match=match):
            fp4_sign_matmul(*vars(dataclasses.replace(good, **change)).values(), **(options or {}))

    run(TypeError, "u must be uint8, 8 signs a byte, got int32", u=u.astype(jnp.int32))
    run(ValueError, r"u must be \[r, 1\], the signs of 5, got \[20, 2\]", u=jnp.tile(u, (1, 2)))
    run(ValueError, r"v must be \[r, 8\], the signs of 64, got \[20, 7\]", v=v[:, :7])
    run(ValueError, "as many rows, the rank r, got 20 and 19", v=v[:19])
    run(ValueError, r"sign_scale must be \[20\], got \[20, 1\]", s=s[:, None])
    run(TypeError, "sign_scale must be floating point, got int32", s=s.astype(jnp.int32))
    run(ValueError, r"column must be \[64\], got \[5\]", b=b[:5])
    run(TypeError, "x must be one of", x=x.astype(jnp.int8))
    run(ValueError, "K = 64 of codes", x=x[:, :32])
    run(TypeError, "codes must be uint8", codes=codes.astype(jnp.int8))
    run(ValueError, "scales must be", scales=scales[:, :1])
    run(ValueError, "got 'nvfp8'", {"format": "nvfp8"})
    run(ValueError, r"schedule must be one of \('fused', 'two_ops'\), got 'one'", {"schedule": "one"})
    run(ValueError, "runs on a TPU", {"implementation": "pallas_tpu"})


def test_tables_of_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"REPEATS": 2, "LAYERS": 1, "ROWS": (8,)}.items():
        monkeypatch.setattr(bench, name, value)
    integers, corrected = bench.integer_products([(64, 48)]), bench.corrected_products([(64, 48)])
    assert [(row[2], row[-2]) for row in integers.rows] == [("ternary", 3.0), ("sign", 3.0)]
    assert [(row[1], row[-1]) for row in corrected.rows] == [(8, 1.5)]
    rows = [kernel_bench.Row("sign, xla", 2e-6, 3e-6, 1000, 1.5, 0.25)]
    assert kernel_bench.table(rows).endswith("| sign, xla | 2 | 3 | 0.00 | 1.50x | 25% |")
    with pytest.raises(ValueError, match="k a multiple of 32, got m=1, n=64, k=40"):
        kernel_bench.run(1, 64, 40)
