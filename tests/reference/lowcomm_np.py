"""Low-communication training in plain NumPy, float64, one worker and one step at a time: slow, from the formulas.

Parameters are a flat dict path -> array, the model a small tanh network with its gradient written out by hand.
"""

import numpy as np

from tests.reference.merging_np import iso


def layers(params):
    """(weights, bias) of every hidden layer, whether stacked on one leading axis or one leaf each."""
    if "layers/w" in params:
        return list(zip(params["layers/w"], params["layers/b"], strict=True))
    count = sum(path.startswith("layers/") for path in params) // 2
    return [(params[f"layers/{i}/w"], params[f"layers/{i}/b"]) for i in range(count)]


def loss_and_grads(params, x, y):
    """mean((tanh network(x) - y)^2) and its gradient."""
    hidden = [x @ params["embed/w"]]
    for w, b in layers(params):
        hidden.append(np.tanh(hidden[-1] @ w + b))
    error = hidden[-1] @ params["head/w"] - y
    back = 2 * error / error.size
    grads = {"head/w": hidden[-1].T @ back}
    back = back @ params["head/w"].T
    found = []
    for i, (w, _) in reversed(list(enumerate(layers(params)))):
        back = back * (1 - hidden[i + 1] ** 2)
        found.append((hidden[i].T @ back, back.sum(0)))
        back = back @ w.T
    found.reverse()
    if "layers/w" in params:
        grads["layers/w"], grads["layers/b"] = (np.stack(g) for g in zip(*found, strict=True))
    else:
        for i, (gw, gb) in enumerate(found):
            grads[f"layers/{i}/w"], grads[f"layers/{i}/b"] = gw, gb
    grads["embed/w"] = x.T @ back
    return (error**2).mean(), grads


class SGD:
    """theta <- theta - lr(t) g."""

    def __init__(self, lr):
        self.lr, self.count = lr, 0

    def step(self, params, grads):
        rate = self.lr(self.count)
        self.count += 1
        return {path: p - rate * grads[path] for path, p in params.items()}


class AdamW:
    """Adam with bias correction and decoupled weight decay; its state lives as long as the object."""

    def __init__(self, lr, b1=0.9, b2=0.95, eps=1e-8, decay=0.1):
        self.lr, self.b1, self.b2, self.eps, self.decay = lr, b1, b2, eps, decay
        self.count, self.m, self.v = 0, {}, {}

    def step(self, params, grads):
        rate = self.lr(self.count)
        self.count += 1
        new = {}
        for path, p in params.items():
            g = grads[path]
            self.m[path] = self.b1 * self.m.get(path, 0.0) + (1 - self.b1) * g
            self.v[path] = self.b2 * self.v.get(path, 0.0) + (1 - self.b2) * g * g
            m = self.m[path] / (1 - self.b1**self.count)
            v = self.v[path] / (1 - self.b2**self.count)
            new[path] = p - rate * (m / (np.sqrt(v) + self.eps) + self.decay * p)
        return new


class OuterStep:
    """The authors' outer rule for one leaf: isotropisation before ("gradient") or after ("update") the momentum."""

    def __init__(self, eta, mu, nesterov, isotropic, order="gradient"):
        self.eta, self.mu, self.nesterov, self.isotropic, self.order = eta, mu, nesterov, isotropic, order
        self.m = 0.0

    def iso(self, a):
        if not self.isotropic or a.ndim < 2:
            return a
        return iso(a) if a.ndim == 2 else np.stack([iso(layer) for layer in a])

    def __call__(self, theta, delta):
        g = self.iso(delta) if self.order == "gradient" else delta
        self.m = self.mu * self.m + g
        update = g + self.mu * self.m if self.nesterov else self.m
        if self.order == "update":
            update = self.iso(update)
        return theta - self.eta * update


def train(params, x, y, *, inner, outer, period, pieces=None, overlap=0, mix=0.0, weights=None, kept=None):
    """Runs `x [K, T, b, d]`, `y [K, T, b, o]` through K workers.

    `inner()` makes a worker's optimizer and `outer()` the outer step of one piece. `pieces` is a list of fragments,
    each a list of (path, rows or None). Fragment p is merged after steps p dh, p dh + H, ... (fragment 0 after H) and
    the workers take it over `overlap` steps later.
    """
    workers, steps = x.shape[:2]
    pieces = [[(path, None) for path in params]] if pieces is None else pieces
    stride = period // len(pieces)
    w = np.ones(workers) if weights is None else np.asarray(weights, np.float64)
    w = w / w.sum()
    theta = {path: np.array(p, np.float64) for path, p in params.items()}
    local = [{path: p.copy() for path, p in theta.items()} for _ in range(workers)]
    optimizers = [inner() for _ in range(workers)]
    outers = {(path, rows): outer() for group in pieces for path, rows in group}
    losses, trace = np.zeros((workers, steps)), []
    for t in range(1, steps + 1):
        for k in range(workers):
            losses[k, t - 1], grads = loss_and_grads(local[k], x[k, t - 1], y[k, t - 1])
            local[k] = optimizers[k].step(local[k], grads)
        for p, group in enumerate(pieces):
            first = p * stride if p else period
            if t >= first and (t - first) % period == 0:
                for path, rows in group:
                    where = slice(None) if rows is None else list(rows)
                    delta = sum(w[k] * (theta[path][where] - local[k][path][where]) for k in range(workers))
                    theta[path][where] = outers[path, rows](theta[path][where], delta)
            if t - overlap >= first and (t - overlap - first) % period == 0:
                for path, rows in group:
                    where = slice(None) if rows is None else list(rows)
                    for k in range(workers):
                        local[k][path][where] = mix * local[k][path][where] + (1 - mix) * theta[path][where]
        if kept is not None and t in kept:
            trace.append({path: value.copy() for path, value in theta.items()})
    return {"params": theta, "workers": local, "losses": losses, "optimizers": optimizers, "trace": trace}


def quantise(x, form, block):
    """C(x) of one vector, block by block, with the nearest of the format's values."""
    levels = {
        "int8": np.arange(-127, 128) / 127,
        "int4": np.arange(-7, 8) / 7,
        "e3m0": np.array([0.0, *(s * 2.0 ** (e - 7) for e in range(1, 8) for s in (-1, 1))]),
    }[form]
    out = np.zeros_like(x, np.float64)
    for start in range(0, x.size, block):
        part = x[start : start + block]
        scale = np.abs(part).max()
        for i, v in enumerate(part):
            out[start + i] = scale * levels[np.argmin(np.abs(levels - v / scale))] if scale else 0.0
    return out
