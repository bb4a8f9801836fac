"""AdaLoRA: a low-rank update in the form of an SVD, whose rank is distributed over the kernels while training.

    K' = K + s (a diag(e)) b,    s = alpha / r,    e = 0 at the start

(arXiv 2303.10512). r (n + m + 1) numbers. `orthogonality` is the penalty that keeps a and b near orthonormal. The
allocator takes singular values e_i away: with I = |w dL/dw| for each number, smoothed, and its smoothed variation,

    I~ <- b1 I~ + (1 - b1) I        U~ <- b2 U~ + (1 - b2) |I - I~|
    score_i = I~U~(e_i) + mean_j I~U~(a_ji) + mean_j I~U~(b_ij)

the e_i with the largest scores over all kernels stay, as many as the budget says, and the others become 0. The budget
falls by a cubic from all to `target_rank` a kernel. Nothing happens by itself: the training step calls `update`, after
the optimizer.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key, PyTree

from jaxlab.peft.adapters import Adapters
from jaxlab.peft.lora import check_alpha
from jaxlab.peft.method import Arrays, LowRank, check_rank, natural


@dataclasses.dataclass(frozen=True)
class AdaLoRA(LowRank):
    """AdaLoRA; r (n + m + 1) numbers.

    Attributes:
      rank: r, at the start.
      alpha: s = alpha / r; None for alpha = r.

    >>> AdaLoRA(4).count(10, 6)
    68
    """

    name: ClassVar[str] = "adalora"
    rank: int = 12
    alpha: float | int | None = None

    def __post_init__(self) -> None:
        natural("rank", self.rank)
        check_alpha(self.alpha)

    @property
    def label(self) -> str:
        return f"{self.name} r{self.rank}"

    @property
    def scale(self) -> float:
        """s."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def check(self, n: int, m: int) -> None:
        check_rank(self.rank, n, m)

    def count(self, n: int, m: int) -> int:
        return self.rank * (n + m + 1)

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        (n, m), r, dtype = kernel.shape, self.rank, kernel.dtype
        first, second = jax.random.split(key)
        a, b = jax.random.normal(first, (n, r), dtype), jax.random.normal(second, (r, m), dtype)
        # Columns of length about 1, where the penalty wants them.
        return {"a": a * n**-0.5, "e": jnp.zeros(r, dtype), "b": b * m**-0.5}, {}

    def factors(self, t: Arrays, f: Arrays) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
        return t["a"] * t["e"], self.scale * t["b"]


def _targets(state: Adapters) -> list[str]:
    paths = [t.path for t in state.spec.targets if isinstance(t.method, AdaLoRA)]
    if not paths:
        raise ValueError(
            f"state must have a target with AdaLoRA, got {sorted({t.method.name for t in state.spec.targets})}"
        )
    return paths


def orthogonality(state: Adapters) -> Float[Array, ""]:
    """`||a^T a - I||^2 + ||b b^T - I||^2`, the mean over all kernels: to be added to the loss, with a small weight.

    Raises:
      ValueError: when no target has AdaLoRA.
    """
    terms = []
    for path in _targets(state):
        a, b = state.trainable[path]["a"], state.trainable[path]["b"]
        eye = jnp.eye(a.shape[-1], dtype=a.dtype)
        for gram in (jnp.swapaxes(a, -1, -2) @ a, b @ jnp.swapaxes(b, -1, -2)):
            terms.append(jnp.sum((gram - eye) ** 2, axis=(-2, -1)).reshape(-1))
    return 2 * jnp.mean(jnp.concatenate(terms))  # twice, as a kernel has two terms


class AllocatorState(NamedTuple):
    """State of an `Allocator`.

    Attributes:
      count: steps done.
      importance: I~, like the trainable arrays.
      uncertainty: U~, likewise.
      keep: which e_i stay, 1 or 0, by path.
    """

    count: Int32[Array, ""]
    importance: PyTree
    uncertainty: PyTree
    keep: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Allocator:
    """Distributes ranks over the kernels with AdaLoRA.

    Attributes:
      target_rank: singular values that stay, a kernel on average.
      total: steps of the whole training.
      warmup: steps at the start in which all stay.
      final: steps at the end in which those that stay are trained on unchanged.
      every: steps between two decisions.
      beta1, beta2: of the smoothing.

    Raises:
      ValueError: for numbers out of range, and `warmup + final >= total`.

    >>> allocator = Allocator(target_rank=2, total=100, warmup=10, final=30)
    >>> [int(allocator.budget(jnp.int32(t), 4, 16)) for t in (0, 10, 40, 70, 99)]
    [16, 16, 9, 8, 8]
    """

    target_rank: int
    total: int
    warmup: int = 0
    final: int = 0
    every: int = 1
    beta1: float = 0.85
    beta2: float = 0.85

    def __post_init__(self) -> None:
        natural("target_rank", self.target_rank)
        natural("total", self.total)
        natural("every", self.every)
        natural("warmup", self.warmup, 0)
        natural("final", self.final, 0)
        if self.warmup + self.final >= self.total:
            raise ValueError(f"warmup + final must be < total = {self.total}, got {self.warmup} + {self.final}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    def budget(self, step: Int32[Array, ""], kernels: int, start: int) -> Int32[Array, ""]:
        """How many singular values stay after `step` steps: from `start` to `target_rank * kernels`.

        Raises:
          ValueError: when that is no decrease.
        """
        end = self.target_rank * kernels
        if end > start:
            raise ValueError(f"target_rank must be at most the mean rank {start / kernels:g}, got {self.target_rank}")
        left = 1 - (step - self.warmup) / (self.total - self.final - self.warmup)
        return jnp.ceil(end + (start - end) * jnp.clip(left, 0, 1) ** 3).astype(jnp.int32)

    def init(self, state: Adapters) -> AllocatorState:
        """The state before the first step.

        Raises:
          ValueError: when no target has AdaLoRA.
        """
        own = {path: state.trainable[path] for path in _targets(state)}
        zeros = jax.tree.map(jnp.zeros_like, own)
        keep = {path: jnp.ones_like(arrays["e"]) for path, arrays in own.items()}
        return AllocatorState(jnp.zeros((), jnp.int32), zeros, zeros, keep)

    def update(self, allocation: AllocatorState, state: Adapters, grads: Any) -> tuple[Adapters, AllocatorState]:
        """One step, after the optimizer's; pure, to be jitted with it.

        Args:
          allocation: from `init` or the last step.
          state: with the parameters after the optimizer's step.
          grads: gradients, like `state.trainable`.

        Returns:
          The state with the e_i set to 0 that do not stay, and the new allocation.
        """
        paths = _targets(state)
        own = {path: state.trainable[path] for path in paths}
        now = jax.tree.map(lambda w, g: jnp.abs(w * g), own, {path: grads[path] for path in paths})
        importance = jax.tree.map(lambda i, x: self.beta1 * i + (1 - self.beta1) * x, allocation.importance, now)
        uncertainty = jax.tree.map(
            lambda u, x, i: self.beta2 * u + (1 - self.beta2) * jnp.abs(x - i), allocation.uncertainty, now, importance
        )
        values = jax.tree.map(jnp.multiply, importance, uncertainty)
        scores = {p: v["e"] + jnp.mean(v["a"], axis=-2) + jnp.mean(v["b"], axis=-1) for p, v in values.items()}
        flat = jnp.concatenate([scores[path].reshape(-1) for path in paths])
        # Ranks of the scores; equal ones in the order of the targets.
        place = jnp.argsort(jnp.argsort(-flat, stable=True))
        kernels = sum(math.prod(scores[path].shape[:-1]) for path in paths)
        step = allocation.count + 1
        stays = (place < self.budget(step, kernels, flat.size)).astype(flat.dtype)
        decides = (step > self.warmup) & (step <= self.total - self.final) & (step % self.every == 0)
        decides |= step == self.total - self.final
        keep, start = {}, 0
        for path in paths:
            shape = scores[path].shape
            chosen = stays[start : start + math.prod(shape)].reshape(shape)
            keep[path], start = jnp.where(decides, chosen, allocation.keep[path]), start + math.prod(shape)
        # Between decisions a value may come back, as in the paper; in the final phase it may not.
        cut = decides | (step > self.total - self.final)
        trainable = dict(state.trainable)
        for path in paths:
            e = own[path]["e"]
            trainable[path] = {**own[path], "e": jnp.where(cut, e * keep[path], e)}
        return state.replace(trainable=trainable), AllocatorState(step, importance, uncertainty, keep)


def ranks(allocation: AllocatorState) -> dict[str, Any]:
    """How many singular values stay, by path; an array for stacked kernels."""
    return {path: jnp.sum(keep, axis=-1).astype(jnp.int32) for path, keep in allocation.keep.items()}
