"""MoLF's update in NumPy float64, written from the formulas: modules, experts and tensors one behind the other."""

import math

import numpy as np


class Optimizer:
    """Experts of modules, and tensors of none.

    `modules` maps a module to its experts in order, each a dict of tensors; `plain` maps names to tensors. `rates` and
    `decays` give each expert's learning rate (a function of the number of updates done) and weight decay; those of the
    plain tensors are `plain_rate` and `plain_decay`. Tensors of fewer than two axes do not decay.
    """

    def __init__(self, modules, plain, *, rates, decays, plain_rate=None, plain_decay=0.0, topk=1, score="epd", **adam):
        self.modules = {k: [{n: np.array(x, float) for n, x in e.items()} for e in es] for k, es in modules.items()}
        self.plain = {name: np.array(x, float) for name, x in plain.items()}
        self.rates, self.decays, self.plain_rate, self.plain_decay = rates, decays, plain_rate, plain_decay
        self.topk, self.score = topk, score
        self.b1, self.b2, self.eps = adam.get("b1", 0.9), adam.get("b2", 0.999), adam.get("eps", 1e-8)
        self.m, self.v, self.t = {}, {}, 0
        self.scores, self.winners = {}, {}

    def _moments(self, key, g):
        g = np.array(g, float)
        self.m[key] = self.b1 * self.m.get(key, np.zeros_like(g)) + (1 - self.b1) * g
        self.v[key] = self.b2 * self.v.get(key, np.zeros_like(g)) + (1 - self.b2) * g**2

    def _adamw(self, p, key, rate, decay):
        if p.ndim >= 2:
            p *= 1 - rate * decay
        corrected = self.m[key] / (1 - self.b1**self.t)
        p -= rate * corrected / (np.sqrt(self.v[key] / (1 - self.b2**self.t)) + self.eps)

    def _score(self, keys, rate):
        n = sum(self.m[key].size for key in keys)
        total = 0.0
        for key in keys:
            for m, v in zip(self.m[key].ravel(), self.v[key].ravel(), strict=True):
                if self.score == "epd":
                    total += m**2 / (math.sqrt(v) + 1e-8)
                else:
                    total += (m / (math.sqrt(v) + 1e-8)) ** 2
        return rate * total / n if self.score == "epd" else math.sqrt(total) / math.sqrt(n)

    def step(self, module_grads, plain_grads):
        """One update; gradients are laid out as the tensors are."""
        rates = [rate(self.t) for rate in self.rates]
        self.t += 1
        for module, experts in self.modules.items():
            for e, expert in enumerate(experts):
                for name in expert:
                    self._moments((module, e, name), module_grads[module][e][name])
            scores = [self._score([(module, e, n) for n in x], rates[e]) for e, x in enumerate(experts)]
            order = sorted(range(len(experts)), key=lambda e: -scores[e])  # stable: of equal ones the first
            winners = order[: self.topk]
            for e in winners:
                for name, p in experts[e].items():
                    self._adamw(p, (module, e, name), rates[e], self.decays[e])
            self.scores[module] = np.array(scores)
            self.winners[module] = np.array([e in winners for e in range(len(experts))])
        for name, p in self.plain.items():
            self._moments(name, plain_grads[name])
            self._adamw(p, name, self.plain_rate(self.t - 1), self.plain_decay)
