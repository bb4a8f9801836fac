"""MoLF: full fine-tuning and LoRA at once, and an optimizer that lets one of them step in each module.

"Beyond LoRA vs. Full Fine-Tuning: Gradient-Guided Optimizer Routing for LLM Adaptation" (Tang et al., arXiv
2605.07111). Every adapted kernel is K + sum_e s_e a_e b_e: the base is expert 0, each LoRA another one. The forward
pass is dense, so every expert has its exact gradient at every step; the routing is in the optimizer. For each module:

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   t = t + 1            for all experts, winners or not
    EPD    S_e = lr_e / N_e  sum m^2 / (sqrt(v) + 1e-8)                      over all N_e numbers of an expert
    PFN    S_e = sqrt( sum (m / (sqrt(v) + 1e-8))^2 / N_e )                  the paper's ablation
    winners: the `topk` largest S_e; of equal ones the lower e
    p = (1 - lr_e wd) p - lr_e  m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)          for winners alone: AdamW

Scores take the moments without bias correction, so PFN's are all the same after the first gradient, but for zeros and
rounding. A loser neither steps nor decays, its moments go on. What belongs to no module (embeddings, norms) is trained
by AdamW. MoLF-Efficient has a frozen base and two or more LoRAs, which may differ in rank.

    spec = peft.match(params, [peft.Rule(".*/attn/(q|v)/kernel", peft.LoRA(128, alpha=32, rs=True))])
    mixture = peft.mixture(key, params, [spec])                    # frozen base: base=False, and two or more specs
    tx = peft.molf(lr_full=5e-5, lr_lora=5e-5)
    grads = jax.grad(lambda mixture: loss(mixture.merged(), batch))(mixture)

EPD decides by the learning rates: with gradients that do not depend on the direction, EPD_lora / EPD_full is about
s lr_lora / (3.5 lr_full) at the start (s the scale of the LoRA), so for much of the range one expert wins everywhere.
Whether MoLF comes near the better of full fine-tuning and LoRA is a question of their rates; `routing` tells who steps.

The authors' code drops activations of the LoRA path at random (0.05); kernels that are merged have no such path.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from jaxlab.peft.method import natural
from jaxlab.peft.molf_groups import Groups, Member, Plan, plan, stacks

Rate = float | Array | np.ndarray | Callable[[Array], Any]
_SCORE_EPS = 1e-8


class Score(NamedTuple):
    """How experts are compared: `finish(sum element(m, v), N, lr)`; the sums are made over arrays, layers and devices.

    Attributes:
      element: (m, v) -> array of their shape.
      finish: (sum, number of elements, learning rate) -> score.
    """

    element: Callable[[Array, Array], Array]
    finish: Callable[[Array, Any, Any], Array]


EPD = Score(lambda m, v: m * m / (jnp.sqrt(v) + _SCORE_EPS), lambda total, n, lr: lr * total / n)
PFN = Score(lambda m, v: (m / (jnp.sqrt(v) + _SCORE_EPS)) ** 2, lambda total, n, lr: jnp.sqrt(total / n))
SCORES = {"epd": EPD, "pfn": PFN}


class Routing(NamedTuple):
    """Who stepped in one module; columns are the module's experts in the order of their numbers.

    Attributes:
      scores: of the last step.
      winners: of the last step.
      wins: how often each has won.
    """

    scores: Float[Array, "*stack e"]
    winners: Bool[Array, "*stack e"]
    wins: Int32[Array, "*stack e"]


class MolfState(NamedTuple):
    """State of `molf`.

    Attributes:
      count: updates done.
      mu, nu: moments, trees like the parameters, in at least float32.
      routing: by module.
    """

    count: Int32[Array, ""]
    mu: Any
    nu: Any
    routing: dict[str, Routing]


def molf(
    lr_full: Rate | None = None,
    lr_lora: Rate | Sequence[Rate] | None = None,
    *,
    groups: Groups | None = None,
    topk: int | Array | np.ndarray = 1,
    score: str | Score | Callable[[Array, Array], Array] = "epd",
    b1: float | Array = 0.9,
    b2: float | Array = 0.999,
    eps: float | Array = 1e-8,
    weight_decay_full: float | Array = 0.0,
    weight_decay_lora: float | Array = 0.0,
    decay: Callable[[str, int], bool] | None = None,
    shards: Callable[[str], Sequence[str]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of MoLF; the module's head has the formulas.

    Scores are sums over whole arrays: under `jax.jit` with sharded arrays every device gets the same ones. Inside of
    `jax.shard_map`, where a function sees a shard, `shards` says what to sum over.

    Args:
      lr_full: learning rate of the base and of what belongs to no module; a number or a schedule of the number of
        updates done. None where neither is trained.
      lr_lora: the same for the LoRAs, or a sequence with one for each.
      groups: None for a `Mixture`, whose modules are the adapted kernels, each with a `bias` beside it. Otherwise a
        function path -> `Member` (or its tuple, or None for a leaf of no module), or regular expressions, one an
        expert, whose group `module` names the module; the first is the base's, None without: `[r"base/(?P<module>.*)/
        (kernel|bias)$", r"lora/(?P<module>.*)/(a|b)$"]`.
      topk: how many experts step in each module; from 1 to the number of experts.
      score: "epd", "pfn", a `Score`, or a function (m, v) -> elements, whose mean times the learning rate is the score.
      b1, b2, eps: of AdamW.
      weight_decay_full, weight_decay_lora: decoupled, for the base and what is in no module, and for the LoRAs.
      decay: (path, number of axes without stacked ones) -> whether a leaf decays; by default those of two axes and
        more that are not named `bias` or `scale`.
      shards: path -> names of the mapped axes that split the leaf there.

    Returns:
      A transformation; its `update` needs `params`.

    Raises:
      ValueError: for a value that is not allowed, a pattern that matches nothing, `topk` above the number of experts
        of a module, a leaf whose learning rate is None, an expert without numbers.
      TypeError: for groups of another type, and without groups for a tree that is no `Mixture`.

    >>> params = {"base": {"q": jnp.ones((4, 3))}, "lora": {"q": {"a": jnp.ones((4, 1)), "b": jnp.zeros((1, 3))}}}
    >>> tx = molf(1e-3, 1e-3, groups=[r"base/(?P<module>\\w+)$", r"lora/(?P<module>\\w+)/(a|b)$"])
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> routing(state)["q"].winners.tolist()
    [True, False]
    """
    rates = _Rates(lr_full, tuple(lr_lora) if isinstance(lr_lora, list | tuple) else lr_lora)
    rates.check()
    chosen = _score(score)
    if not isinstance(topk, jax.Array | np.ndarray):
        natural("topk", topk)
    for name, value in (("weight_decay_full", weight_decay_full), ("weight_decay_lora", weight_decay_lora)):
        if not isinstance(value, jax.Array | np.ndarray) and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
    for name, value in (("b1", b1), ("b2", b2)):
        if not isinstance(value, jax.Array | np.ndarray) and not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}")
    decays = decay or _decays

    def init(params: PyTree) -> MolfState:
        found = plan(params, groups)
        rates.check_leaves(found)
        routes = {}
        for module, stack in stacks(found, jax.tree.leaves(params)).items():
            experts = len(found.modules[module])
            if not isinstance(topk, jax.core.Tracer) and not 1 <= topk <= experts:
                raise ValueError(f"topk must be from 1 to {experts}, the number of experts of {module}, got {topk}")
            routes[module] = Routing(*(jnp.zeros((*stack, experts), kind) for kind in (jnp.float32, bool, jnp.int32)))
        mu, nu = (jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_wide(p)), params) for _ in range(2))
        return MolfState(jnp.zeros((), jnp.int32), mu, nu, routes)

    def update(
        updates: PyTree, state: MolfState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, MolfState]:
        del extra
        if params is None:
            raise ValueError("molf's update needs params, which decay, got None")
        found, (grads, structure) = plan(updates, groups), jax.tree.flatten(updates)
        wide = [g.astype(_wide(g)) for g in grads]
        mu = [(1 - b1) * g + b1 * m for g, m in zip(wide, jax.tree.leaves(state.mu), strict=True)]
        nu = [(1 - b2) * jnp.square(g) + b2 * v for g, v in zip(wide, jax.tree.leaves(state.nu), strict=True)]
        rate = {e: rates.at(e, state.count) for e in {member.expert if member else 0 for member in found.members}}

        routes, masks = {}, {}
        for module, experts in found.modules.items():
            scores = [
                chosen.finish(*_sums(found, indices, mu, nu, chosen.element, shards), rate[e])
                for e, indices in experts.items()
            ]
            table = jnp.stack(scores, axis=-1).astype(jnp.float32)
            winners = _winners(table, topk)
            routes[module] = Routing(table, winners, state.routing[module].wins + winners)
            masks |= {i: winners[..., k] for k, indices in enumerate(experts.values()) for i in indices}

        count, steps = optax.safe_increment(state.count), []
        for i, (path, member, p) in enumerate(zip(found.paths, found.members, jax.tree.leaves(params), strict=True)):
            expert, stacked = (member.expert, member.stack_axes) if member else (0, ())
            step = mu[i] / (1 - b1**count) / (jnp.sqrt(nu[i] / (1 - b2**count)) + eps)
            if decays(path, step.ndim - len(stacked)):
                step = step + (weight_decay_lora if expert else weight_decay_full) * p.astype(step.dtype)
            step = -rate[expert] * step
            if member:
                step = jnp.where(_spread(masks[i], member, step.ndim), step, 0)
            steps.append(step.astype(grads[i].dtype))
        trees = (jax.tree.unflatten(structure, leaves) for leaves in (steps, mu, nu))
        out, *moments = trees
        return out, MolfState(count, *moments, routes)

    return optax.GradientTransformationExtraArgs(init, update)


def routing(opt_state: PyTree) -> dict[str, Routing]:
    """The routing of the last step, and how often who won, by module.

    Args:
      opt_state: of `molf`, or of a transformation around one.

    Returns:
      Module -> `Routing`.

    Raises:
      ValueError: when it holds no state of `molf`, or more than one.
    """
    return _state(opt_state).routing


def shares(opt_state: PyTree) -> dict[str, Float[Array, "*stack e"]]:
    """The share of all steps so far that each expert took part in, by module: `wins / updates`.

    Args:
      opt_state: as of `routing`.

    Returns:
      Module -> shares in [0, 1], which add up to `topk`; 0 before the first update.

    Raises:
      ValueError: as `routing`.
    """
    state = _state(opt_state)
    return {module: found.wins / jnp.maximum(state.count, 1) for module, found in state.routing.items()}


def _state(opt_state: PyTree) -> MolfState:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, MolfState))
    found = [leaf for leaf in leaves if isinstance(leaf, MolfState)]
    if len(found) != 1:
        raise ValueError(f"opt_state must hold one state of molf, got {len(found)}")
    return found[0]


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Learning rates by expert."""

    full: Any
    lora: Any

    def check(self) -> None:
        each = self.lora if isinstance(self.lora, tuple) else (self.lora,)
        for name, rate in (("lr_full", self.full), *(("lr_lora", rate) for rate in each)):
            plain = not callable(rate) and rate is not None and not isinstance(rate, jax.Array | np.ndarray)
            if plain and (not isinstance(rate, int | float) or not 0 <= rate < math.inf):
                raise ValueError(f"{name} must be a finite number >= 0, a schedule or None, got {rate!r}")

    def check_leaves(self, found: Plan) -> None:
        for path, member in zip(found.paths, found.members, strict=True):
            expert = member.expert if member else 0
            if isinstance(self.lora, tuple) and expert > len(self.lora):
                raise ValueError(f"lr_lora has {len(self.lora)} rates, but {path} belongs to LoRA {expert}")
            if self._of(expert) is None:
                what = f"LoRA {expert}" if expert else "the base" if member else "no module"
                raise ValueError(
                    f"{'lr_lora' if expert else 'lr_full'} must be given: {path} belongs to {what}, and is trained"
                )

    def _of(self, expert: int) -> Any:
        if expert == 0:
            return self.full
        return self.lora[expert - 1] if isinstance(self.lora, tuple) else self.lora

    def at(self, expert: int, count: Int32[Array, ""]) -> Any:
        rate = self._of(expert)
        return rate(count) if callable(rate) else rate


def _score(score: Any) -> Score:
    if isinstance(score, Score):
        return score
    if callable(score):
        return Score(score, EPD.finish)
    if score not in SCORES:
        raise ValueError(f"score must be one of {tuple(SCORES)}, a Score or a function, got {score!r}")
    return SCORES[score]


def _wide(x: Any) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _sums(
    found: Plan,
    indices: Sequence[int],
    mu: Sequence[Array],
    nu: Sequence[Array],
    element: Callable[[Array, Array], Array],
    shards: Callable[[str], Sequence[str]] | None,
) -> tuple[Float[Array, "*stack"], int]:
    """(sum of the elements of an expert, their number), for each module of a stack."""
    total, n = jnp.zeros(()), 0
    for i in indices:
        stack_axes = found.members[i].stack_axes
        rest = tuple(axis for axis in range(mu[i].ndim) if axis not in stack_axes)
        part = jnp.sum(element(mu[i], nu[i]), axis=rest)
        # The sum has the stacked axes in ascending order, the module has them in the order of the member.
        part = part.transpose([sorted(stack_axes).index(axis) for axis in stack_axes])
        size = math.prod(mu[i].shape[axis] for axis in rest)
        if shards and (axes := tuple(shards(found.paths[i]))):
            part = jax.lax.psum(part, axes)
            size *= math.prod(jax.lax.axis_size(axis) for axis in axes)
        total, n = total + part, n + size
    return total, n


def _winners(scores: Float[Array, "*stack e"], topk: Any) -> Bool[Array, "*stack e"]:
    """The topk largest; of equal ones the first."""
    mine, other = scores[..., :, None], scores[..., None, :]
    index = jnp.arange(scores.shape[-1])
    before = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    return jnp.sum(before, axis=-1) < topk


def _spread(mask: Bool[Array, "*stack"], member: Member, ndim: int) -> Bool[Array, "..."]:
    """A mask over stacked axes, to be broadcast with a leaf of the member."""
    order = sorted(range(mask.ndim), key=member.stack_axes.__getitem__)
    return jnp.expand_dims(mask.transpose(order), [axis for axis in range(ndim) if axis not in member.stack_axes])


def _decays(path: str, ndim: int) -> bool:
    return ndim >= 2 and path.rpartition("/")[2] not in ("bias", "scale")
