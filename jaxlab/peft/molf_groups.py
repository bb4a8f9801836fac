"""What MoLF trains, and where its leaves belong: the mixture of a base and of LoRAs, and routing groups by path."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key, PyTree

from jaxlab.core import tree
from jaxlab.peft.adapters import Adapters, combine, init
from jaxlab.peft.lora import LoRA
from jaxlab.peft.method import natural
from jaxlab.peft.patterns import compile_pattern
from jaxlab.peft.spec import Spec


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "experts"], meta_fields=["specs"])
@dataclasses.dataclass(frozen=True)
class Mixture:
    """What MoLF trains: a pytree of the base and of the LoRAs' arrays; from `mixture`.

    Attributes:
      base: parameters of the model, or None where they are frozen (MoLF-Efficient).
      experts: for each LoRA, path -> name -> array.
      specs: what the experts' arrays mean; static.
    """

    base: Any
    experts: tuple[Any, ...]
    specs: tuple[Spec, ...]

    def states(self) -> list[Adapters]:
        """The LoRAs as adapters, as the other functions of `peft` take them."""
        return [
            Adapters(own, {path: {} for path in spec.paths}, spec)
            for own, spec in zip(self.experts, self.specs, strict=True)
        ]

    def merged(self, params: PyTree = None) -> PyTree:
        """`K + sum_e s_e a_e b_e` in the parameters, rounded once; differentiable.

        Args:
          params: the frozen base; None where it is trained.

        Returns:
          A tree like the base, for the unchanged model.

        Raises:
          ValueError: without a base, with two, and as `combine`.
        """
        if (self.base is None) == (params is None):
            what = (
                "a frozen base: merged(params) needs it" if params is None else "a base of its own: merged() takes none"
            )
            raise ValueError(f"params: this mixture has {what}")
        return combine(self.base if params is None else params, self.states())

    @property
    def checkpoint_meta(self) -> str:
        """What a checkpoint must agree in, beside the arrays."""
        return " | ".join(state.checkpoint_meta for state in self.states())


def mixture(key: Key[Array, ""], params: PyTree, specs: Sequence[Spec], *, base: bool = True) -> Mixture:
    """A mixture that computes what `params` do: all LoRAs start at zero.

    Args:
      key: typed key.
      params: the model's parameters.
      specs: one for each LoRA expert, from `match`; they may adapt other kernels in other ranks.
      base: whether the base is trained (MoLF), or frozen and left out (MoLF-Efficient).

    Returns:
      The pytree to train.

    Raises:
      TypeError: for methods other than `LoRA`: an expert's update must not depend on the base.
      ValueError: for no specs, fewer than two with a frozen base, and as `init`.

    >>> import jax.numpy as jnp
    >>> from jaxlab.peft.spec import Rule, match
    >>> params = {"q": {"kernel": jnp.ones((4, 3))}}
    >>> found = mixture(jax.random.key(0), params, [match(params, [Rule("q/kernel", LoRA(2))])])
    >>> found.merged()["q"]["kernel"].shape
    (4, 3)
    """
    least = 1 if base else 2
    if len(specs) < least:
        raise ValueError(
            f"specs must hold at least {least} with {'a trained' if base else 'a frozen'} base, got {len(specs)}"
        )
    for e, spec in enumerate(specs):
        for target in spec.targets:
            if type(target.method) is not LoRA:
                raise TypeError(
                    f"specs[{e}]: {target.path} has the method {target.method.label}, but experts must be LoRA"
                )
    states = [init(jax.random.fold_in(key, e), params, spec) for e, spec in enumerate(specs)]
    return Mixture(params if base else None, tuple(state.trainable for state in states), tuple(specs))


class Member(NamedTuple):
    """Where a leaf belongs.

    Attributes:
      module: name of the routing group.
      expert: 0 for the base, 1 and up for LoRAs.
      stack_axes: axes of the leaf along which modules lie, as in `Rule`; each is routed by itself.
    """

    module: str
    expert: int
    stack_axes: tuple[int, ...] = ()


Groups = Sequence[str | None] | Callable[[str], Member | tuple[Any, ...] | None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the leaves of a tree belong.

    Attributes:
      paths, members: of the leaves in flattening order.
      modules: module -> expert, ascending -> indices of its leaves.
    """

    paths: list[str]
    members: list[Member | None]
    modules: dict[str, dict[int, list[int]]]


def plan(params: PyTree, groups: Groups | None) -> Plan:
    """Resolves groups on a tree.

    Args:
      params: the tree that is trained.
      groups: as for `molf`.

    Returns:
      The plan.

    Raises:
      ValueError, TypeError: as `molf`.

    >>> import jax.numpy as jnp
    >>> plan({"q": jnp.ones(3), "a": jnp.ones(3)}, lambda path: ("m", 1) if path == "a" else None).modules
    {'m': {1: [0]}}
    """
    paths = tree.leaf_paths(params)
    if groups is None:
        if not isinstance(params, Mixture):
            raise TypeError(f"groups must be given for a tree that is no Mixture, got {type(params).__name__}")
        found = _mixture_members(params)
        members = [found.get(path) for path in paths]
    elif callable(groups):
        members = [_member(path, groups(path)) for path in paths]
    else:
        members = _matched(paths, groups)
    modules: dict[str, dict[int, list[int]]] = {}
    for i, member in enumerate(members):
        if member:
            modules.setdefault(member.module, {}).setdefault(member.expert, []).append(i)
    if not modules:
        raise ValueError("groups must put at least one leaf into a module, got none that is")
    return Plan(paths, members, {module: dict(sorted(experts.items())) for module, experts in modules.items()})


def _member(path: str, given: Any) -> Member | None:
    if given is None:
        return None
    if not isinstance(given, tuple) or not 2 <= len(given) <= 3 or not isinstance(given[0], str):
        raise TypeError(f"groups({path!r}) must give Member(module, expert, stack_axes) or None, got {given!r}")
    member = Member(*given)
    natural(f"expert of groups({path!r})", member.expert, 0)
    return member


def _matched(paths: list[str], patterns: Sequence[str | None]) -> list[Member | None]:
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(f"groups must be a function of a path or a sequence of patterns, got {patterns!r}")
    compiled = [None if pattern is None else compile_pattern(pattern) for pattern in patterns]
    for e, pattern in enumerate(compiled):
        if pattern is None and e > 0:
            raise ValueError(f"groups[{e}] must be a pattern: only the base's, groups[0], may be None")
        if pattern is not None and "module" not in pattern.groupindex:
            raise ValueError(f"groups[{e}] must have a group (?P<module>...), got {patterns[e]!r}")
    members: list[Member | None] = []
    for path in paths:
        hits = ((e, p.search(path)) for e, p in enumerate(compiled) if p is not None)
        members.append(next((Member(hit["module"], e) for e, hit in hits if hit), None))
    for e, pattern in enumerate(patterns):
        if pattern is not None and not any(member and member.expert == e for member in members):
            shown = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
            raise ValueError(f"groups[{e}], {pattern!r}, decides for no path; paths: {shown}")
    return members


def _mixture_members(found: Mixture) -> dict[str, Member]:
    """The adapted kernels with their biases, and the arrays of the LoRAs, by their paths in the mixture."""
    base = set(tree.leaf_paths(found.base))
    members: dict[str, Member] = {}
    for e, spec in enumerate(found.specs):
        for target in spec.targets:
            module, stack = target.path, tuple(range(len(target.stack)))
            for name in target.structs()[0]:
                members[f"experts/{e}/{module}/{name}"] = Member(module, e + 1, stack)
            if module in base:
                members[f"base/{module}"] = Member(module, 0, target.stack_axes)
            parent, slash, _ = module.rpartition("/")
            if (bias := f"{parent}{slash}bias") in base:
                members[f"base/{bias}"] = Member(module, 0, stack)
    return members


def stacks(found: Plan, leaves: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Sizes of the stacked axes of every module.

    Args:
      found: of the tree.
      leaves: of the tree, in its order.

    Returns:
      Module -> sizes.

    Raises:
      ValueError: when a leaf lacks a stacked axis, the leaves of a module differ in them, or an expert has no numbers.

    >>> import jax.numpy as jnp
    >>> stacks(plan([jnp.ones((2, 3))], lambda path: Member("m", 1, (0,))), [jnp.ones((2, 3))])
    {'m': (2,)}
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for path, member, leaf in zip(found.paths, found.members, leaves, strict=True):
        if member is None:
            continue
        if any(not 0 <= axis < leaf.ndim for axis in member.stack_axes):
            raise ValueError(f"{path}: stack_axes must lie in shape {list(leaf.shape)}, got {member.stack_axes}")
        own = tuple(leaf.shape[axis] for axis in member.stack_axes)
        if sizes.setdefault(member.module, own) != own:
            raise ValueError(
                f"{path} has stacked axes of sizes {own}, other leaves of {member.module} have {sizes[member.module]}"
            )
    for module, experts in found.modules.items():
        for expert, indices in experts.items():
            if not any(math.prod(leaves[i].shape) for i in indices):
                raise ValueError(f"expert {expert} of {module} has no numbers")
    return sizes
