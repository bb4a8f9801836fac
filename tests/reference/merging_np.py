"""Isotropisation and model merging in plain NumPy, float64, one matrix at a time: slow, from the formulas."""

import numpy as np

EPS32 = float(np.finfo(np.float32).eps)


def rank_cut(s, shape, eps=EPS32):
    """Which singular values count."""
    return s > max(shape) * eps * s.max()


def polar(a, rtol=True):
    """U V^T over the singular values that count (all of them without `rtol`)."""
    u, s, vt = np.linalg.svd(np.asarray(a, np.float64), full_matrices=False)
    keep = rank_cut(s, a.shape) if rtol else np.ones_like(s, bool)
    return u[:, keep] @ vt[keep]


def iso(a, rtol=True):
    """Mean singular value times the polar factor."""
    s = np.linalg.svd(np.asarray(a, np.float64), compute_uv=False)
    return s.mean() * polar(a, rtol)


def mean(deltas, weights=None):
    deltas = np.asarray(deltas, np.float64)
    w = np.ones(len(deltas)) if weights is None else np.asarray(weights, np.float64)
    out = np.zeros(deltas.shape[1:])
    for wk, d in zip(w, deltas, strict=True):
        if wk > 0:
            out = out + wk / w.sum() * d
    return out


def ties(deltas, density=0.9, sign="mass", weights=None):
    """Entry by entry, over the workers of positive weight."""
    deltas = np.asarray(deltas, np.float64)
    w = np.ones(len(deltas)) if weights is None else np.asarray(weights, np.float64)
    deltas, w = deltas[w > 0], w[w > 0]
    n = deltas[0].size
    drop = min(round((1 - density) * n), n - 1)
    trimmed = []
    for d in deltas:
        smallest_kept = np.sort(np.abs(d).ravel())[drop]
        trimmed.append(np.where(np.abs(d) >= smallest_kept, d, 0.0))
    trimmed = np.array(trimmed)
    out = np.zeros(deltas.shape[1:])
    for index in np.ndindex(out.shape):
        entries = trimmed[(slice(None), *index)]
        vote = entries.sum() if sign == "mass" else np.sign(entries).sum()
        agreeing = [k for k in range(len(w)) if entries[k] * vote > 0]
        if agreeing:
            out[index] = sum(w[k] * entries[k] for k in agreeing) / sum(w[k] for k in agreeing)
    return out


def tsv_m(deltas, weights=None):
    """One matrix a worker, `[K, m, n]`."""
    deltas = np.asarray(deltas, np.float64)
    workers = len(deltas)
    w = np.ones(workers) if weights is None else np.asarray(weights, np.float64)
    present = [k for k in range(workers) if w[k] > 0]
    count = max(1, int(min(deltas.shape[1:]) / workers))
    us, ss, vs = [], [], []
    for k in present:
        u, s, vt = np.linalg.svd(deltas[k], full_matrices=False)
        us.append(u[:, :count])
        ss.append(s[:count] * w[k] / w.sum() * len(present))
        vs.append(vt[:count])
    return polar(np.concatenate(us, 1)) @ np.diag(np.concatenate(ss)) @ polar(np.concatenate(vs, 0))


def iso_cts(deltas, common=0.8, weights=None):
    """One matrix a worker, `[K, m, n]`."""
    deltas = np.asarray(deltas, np.float64)
    workers = len(deltas)
    w = np.ones(workers) if weights is None else np.asarray(weights, np.float64)
    r = min(deltas.shape[1:])
    specific = round((r - int(common * r)) / workers) * workers
    if specific > r:
        specific -= workers
    shared, each = r - specific, specific // workers
    scaled = [w[k] / w.sum() * deltas[k] for k in range(workers) if w[k] > 0]
    whole = sum(scaled)
    if specific == 0:
        return iso(whole)
    u, s, vt = np.linalg.svd(whole, full_matrices=False)
    u, s, vt = u[:, :shared], s[:shared], vt[:shared]
    us, ss, vs = [], [], []
    for d in scaled:
        uk, sk, vk = np.linalg.svd(d - u @ (u.T @ d), full_matrices=False)
        us.append(uk[:, :each])
        ss.append(sk[:each])
        vs.append(vk[:each])
    sigma = np.concatenate([*ss, s])
    return sigma.mean() * polar(np.concatenate([*us, u], 1)) @ polar(np.concatenate([*vs, vt], 0))


def muon_newton_schulz(a, steps=5):
    """Muon's quintic iteration, which pushes singular values near 1 but not to it: not the polar factor."""
    x = np.asarray(a, np.float64)
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        g = x @ x.T
        x = 3.4445 * x + (-4.7750 * g + 2.0315 * g @ g) @ x
    return x
