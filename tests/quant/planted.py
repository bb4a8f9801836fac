"""The synthetic layers of the BiLoCo tests: they have a low-rank part, and inputs that are correlated."""

import numpy as np


def generate(seed, m=96, n=128, planted=4):
    """Heavy-tailed weights with a planted low-rank part, and H of correlated inputs with channels of unequal size."""
    rng = np.random.default_rng(seed)
    low = rng.standard_normal((m, planted)) @ rng.standard_normal((planted, n))
    w = 0.02 * (rng.standard_t(4, (m, n)) + low)
    mixing = np.eye(n) + rng.standard_normal((n, n)) / np.sqrt(n)
    x = rng.standard_normal((4 * n, n)) @ mixing * np.exp(rng.standard_normal(n))
    h = x.T @ x / len(x)
    return w.astype(np.float32), (h + 0.01 * np.mean(np.diag(h)) * np.eye(n)).astype(np.float32)
