"""Bases and sign terms of several layers fitted in turn, layers of equal shape by one vmapped program.

A `Job` is one attempt at a layer: in its own coordinates (smoothed or not, columns scaled or not), with its own number
of terms that absorb. All jobs of one `Run` have matrices of one shape, so one compiled program fits them; those that
also have equal numbers of terms are fitted together, up to `together` of them in a call.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxlab.quant import sign_lowrank, smooth
from jaxlab.quant.calibrate import restrict
from jaxlab.quant.sign_lowrank import Terms, weighted_error

STACK = 4  # fits a call where that serves
# Weights of a matrix. Measured on 2 cores: vmapped fits take 0.7 to 0.8 of the time of fits one after the other up to
# 192 x 64, and 1.1 to 3 times as long from 256 x 256 on, where a single one keeps the caches busy.
SMALL_ON_CPU = 2**14


def together(m: int, n: int) -> int:
    """How many fits of m x n matrices one call of the compiled program should do on the default backend.

    >>> together(64, 64) == STACK
    True
    """
    return 1 if jax.default_backend() == "cpu" and m * n > SMALL_ON_CPU else STACK


@dataclasses.dataclass
class Job:
    """One attempt at one layer, and what has become of it.

    Attributes:
      w: weights in smoothed coordinates, W diag(t).
      h: H in these coordinates; errors are measured with it.
      quantize: weights -> (what is stored, what it decodes to).
      t: the smoothing, or None.
      column: b in bfloat16, or None.
      wide: b in float32; ones where there is none.
      metric: what the fit sees of H, in the coordinates of scaled columns.
      absorbing: the metric of the terms that absorb.
      rank, first: number of terms, and how many of them absorb.
      base, decoded: the base that is being fitted against.
      terms: the terms so far.
      error: the smallest so far; infinite before the first fit.
      kept, kept_base, kept_decoded: for this error: terms, base, and what both stand for, in the coordinates of W.
      history: errors since the refinement began.
    """

    w: Float[np.ndarray, "m n"]
    h: Any
    quantize: Any
    t: Float[np.ndarray, " n"] | None
    column: Any
    wide: Float[np.ndarray, " n"]
    metric: Array
    absorbing: Array
    rank: int
    first: int
    base: Any
    decoded: Float[np.ndarray, "m n"]
    terms: Terms
    error: float = float("inf")
    kept: Any = None
    kept_base: Any = None
    kept_decoded: Any = None
    history: list[float] = dataclasses.field(default_factory=list)

    def residual(self) -> Float[Array, "m n"]:
        """What the terms fit, in the coordinates of scaled columns."""
        return jnp.asarray((self.w - self.decoded) / self.wide)

    def correction(self) -> Float[np.ndarray, "m n"]:
        """L diag(b), with scales as they will be stored."""
        ut, vt, s = self.terms
        rounded = s.astype(jnp.bfloat16).astype(jnp.float32)
        return np.asarray((ut * rounded[:, None]).T @ vt) * self.wide

    def measure(self) -> None:
        """Takes the error, and keeps what has the smallest."""
        whole = self.decoded + self.correction()
        self.history.append(weighted_error(self.w, whole, self.h))
        if self.history[-1] < self.error or self.kept is None:
            self.error, self.kept, self.kept_base = self.history[-1], self.terms, self.base
            self.kept_decoded = whole if self.t is None else whole / self.t

    def requantize(self) -> None:
        """Rounds what the terms leave of the weights."""
        self.base, self.decoded = self.quantize(self.w - self.correction())


def start(
    w: np.ndarray, h: Any, seen: Any, quantizer: Any, t: Any, column: bool, rank: int, first: int, capacity: int
) -> Job:
    """A job with a base, where its terms fit a residual, and without one, where the first of them absorb.

    Args:
      w: weights of the layer.
      h, seen: H, and what the fit may see of it.
      quantizer: H -> how weights are quantised.
      t: the smoothing, or None.
      column: whether to scale columns.
      rank, first: number of terms, and how many of them absorb.
      capacity: of the arrays of terms.
    """
    w = w if t is None else w * t
    h, seen = smooth.moments(h, t), smooth.moments(seen, t)
    quantize = quantizer(h)
    base, decoded = (None, np.zeros_like(w)) if first else quantize(w)
    b = sign_lowrank.column_scale(jnp.asarray(w - decoded)) if column else None
    wide = np.ones(w.shape[1], np.float32) if b is None else np.asarray(b, np.float32)
    # The base errs in proportion to what it has to represent, wherever that is: in smoothed coordinates, which bring
    # the channels to one size, terms that absorb go by size alone. Without smoothing, channels that matter come first.
    absorb = restrict(seen, "none" if t is not None else "diag")
    metric, absorbing = _scaled(seen, wide), _scaled(absorb, wide)
    terms = sign_lowrank.no_terms(*w.shape, capacity)
    return Job(w, h, quantize, t, b, wide, metric, absorbing, rank, first, base, decoded, terms)


def _scaled(h: Any, wide: np.ndarray) -> Array:
    """H in the coordinates of scaled columns, of mean diagonal one."""
    if h is None or np.ndim(h) == 1:
        inner = (np.ones_like(wide) if h is None else h) * wide**2
        return jnp.asarray(inner / np.mean(inner), jnp.float32)
    inner = h * wide[:, None] * wide[None, :]
    return jnp.asarray(inner / np.mean(np.diagonal(inner)), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Run:
    """How jobs are fitted.

    Attributes:
      key: of the starts of new terms.
      capacity: of the arrays of terms.
      together: fits a call, at most; 1 for one after the other.
    """

    key: Key[Array, ""]
    capacity: int
    together: int

    def short(self, jobs: Sequence[Job]) -> None:
        """All terms once: those that absorb, a base for what they leave, the others."""
        absorbing = [job for job in jobs if job.first]
        self._sweep(absorbing, True, absorbing=True)
        for job in absorbing:
            job.requantize()
        self._sweep(jobs, True)
        for job in jobs:
            job.measure()

    def refine(self, jobs: Sequence[Job], passes: int, iterations: int) -> None:
        """Terms against each other, then terms against the base and the base against the terms, in turn."""
        for job in jobs:
            job.history = [job.error]
        for number in range(passes + iterations):
            self._sweep(jobs, False)
            for job in jobs:
                job.measure()
                if number >= passes:
                    job.requantize()
                    job.measure()

    def _sweep(self, jobs: Sequence[Job], fresh: bool, absorbing: bool = False) -> None:
        groups: dict[Any, list[Job]] = {}
        for job in jobs:
            begin, stop = (0, job.first) if absorbing else (job.first if fresh else 0, job.rank)
            if stop > begin:
                metric = job.absorbing if absorbing else job.metric
                groups.setdefault((begin, stop, metric.shape), []).append(job)
        for (begin, stop, _), members in groups.items():
            for i in range(0, len(members), self.together):
                part = members[i : i + self.together]
                inputs = [(job.residual(), job.absorbing if absorbing else job.metric, job.terms) for job in part]
                if self.together == 1:
                    r, h, terms = inputs[0]
                    part[0].terms = sign_lowrank.sweep(r, h, self.key, terms, begin, stop, fresh)
                    continue
                # Filled up with the last one again: one compiled program for any number of jobs.
                inputs += inputs[-1:] * (self.together - len(part))
                r, h, terms = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
                found = sign_lowrank.sweeps(r, h, self.key, terms, begin, stop, fresh)
                for number, job in enumerate(part):
                    job.terms = jax.tree.map(lambda x, i=number: x[i], found)
