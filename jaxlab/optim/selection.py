"""Which parts of an optimizer's state are stored in low bits: an explicit rule over named leaves, with reasons.

Only averages may be quantised again and again: an exponential average forgets old errors at the rate at which it
forgets old gradients. Sums, copies of parameters, gradient accumulators and bases of eigenvectors would keep every
error, and differences of two quantised averages can change their sign. The rule is therefore a list of the fields that
are known to be averages; everything else stays as it is, and `summary` says why.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxlab.core import tree
from jaxlab.kernels.bred_update.codec import Layout, QuantSpec, is_quantized, leaf_id

# Fields of optimizer states that are exponential averages, of values with a sign and of squares.
SIGNED = frozenset({"mu", "trace", "ema", "m", "m1", "m2", "exp_avg", "momentum"})
NONNEG = frozenset({"nu", "nu_max", "v", "v_row", "v_col", "n", "exp_avg_sq", "e_g", "e_x"})
# Running maxima: with dither, every upward error would be kept. Nearest rounding leaves a stored value where it is.
MAXIMA = frozenset({"nu_max"})
# Where a field's name means something else.
SIGNED_IN = frozenset({("ScaleByAdanState", "v"), ("SophiaState", "nu")})
EXEMPT_IN = {
    "ScaleByRStdDevState": "nu - mu^2 of two quantised averages can turn negative",
    "ScaleBySM3State": "running maxima over rows and columns, not an average",
}
# States that hold another optimizer's state in a field.
CONTAINERS = frozenset(
    {"inner", "inner_state", "inner_states", "inner_opt_state", "base_optimizer_state", "opt_state", "fast_state"}
)
MIN_SIZE = 4096  # as in the 8-bit and 4-bit optimizers that are in use


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One leaf of an optimizer's state, as a selection rule sees it.

    Attributes:
      path: its path in the state, such as `0/mu/layers/0/kernel`.
      owner: class of the state that holds the field, such as `ScaleByAdamState`; empty where there is none.
      field: name of the field, such as `mu`; empty where there is none.
      rest: the path below the field: that of the parameter, for a state that mirrors the parameters.
      shape: of the leaf, over all devices.
      dtype: of the leaf.
    """

    path: str
    owner: str
    field: str
    rest: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of elements, over all devices."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in full precision."""
        return self.size * self.dtype.itemsize

    @property
    def name(self) -> str:
        """`mu/layers/0/kernel`: does not change when a transformation is put before or around this one."""
        return f"{self.field}/{self.rest}" if self.field else self.path


Decision = QuantSpec | bool | str | None
Select = Callable[[StateLeaf], Decision]


def packed_bytes(shape: tuple[int, ...], spec: QuantSpec) -> int:
    """Bytes of codes and scales of an array of this shape."""
    layout = Layout(shape[-1] if shape else 1, spec)
    return math.prod(shape[:-1]) * (layout.bytes + layout.blocks * jnp.dtype(spec.scale_dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class DefaultSelect:
    """The rule of `default_select`; compares by value, so that equal optimizers have equal states."""

    min_size: int
    fields: tuple[str, ...]
    overrides: tuple[tuple[str, QuantSpec | bool | str], ...]

    def __call__(self, leaf: StateLeaf) -> Decision:
        """True, False with a reason as a string, or the `QuantSpec` of an override."""
        for pattern, decision in self.overrides:
            if re.search(pattern, leaf.path):
                return f"override {pattern!r}" if decision is False else decision
        if leaf.owner in EXEMPT_IN:
            return EXEMPT_IN[leaf.owner]
        if leaf.field not in SIGNED | NONNEG | set(self.fields):
            return f"field {leaf.field!r} is not known to be an average" if leaf.field else "not a field of a state"
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return f"{leaf.dtype} is not real and floating"
        if leaf.size < self.min_size:
            return f"{leaf.size} elements, fewer than min_size={self.min_size}"
        return True


def default_select(
    min_size: int = MIN_SIZE,
    *,
    fields: tuple[str, ...] = (),
    overrides: Mapping[str, QuantSpec | bool | str] | None = None,
) -> DefaultSelect:
    """The selection rule of `quantize_state`: known averages of at least `min_size` elements over all devices.

    The size is that of the whole array, not of a device's share: sharding a parameter does not change its precision.

    Args:
      min_size: elements below which a leaf stays in full precision.
      fields: further field names to quantise, of optimizers that this library does not know.
      overrides: regular expression -> decision; the first one that is found (`re.search`) in a leaf's path decides
        before everything else: a `QuantSpec`, True for the spec of the wrapper, or False, or a string that says why
        not, to leave the leaf alone.

    Returns:
      `StateLeaf -> True, QuantSpec, or the reason why not`.

    Raises:
      ValueError: for a negative `min_size` or a pattern that is no regular expression.
      TypeError: for a decision of another type.

    Example:
      >>> select = default_select(overrides={"embed": False, "head": QuantSpec(bits=8)})
      >>> select(StateLeaf("0/mu/embed/w", "ScaleByAdamState", "mu", "embed/w", (64, 64), np.dtype("float32")))
      "override 'embed'"
    """
    if min_size < 0:
        raise ValueError(f"min_size must be >= 0, got {min_size}")
    for pattern, decision in (overrides or {}).items():
        if not isinstance(decision, QuantSpec | bool | str):
            raise TypeError(f"overrides[{pattern!r}] must be a QuantSpec, a bool or a string, got {decision!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"overrides: {pattern!r} is no regular expression ({error})") from error
    return DefaultSelect(min_size, tuple(fields), tuple((overrides or {}).items()))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a wrapper does with a state; a static part of that state.

    Attributes:
      spec: of the leaves that the rule selects without naming another.
      seed: of the dither.
      select: the rule.
      nonneg: names of further fields that are never negative.
    """

    spec: QuantSpec
    seed: int
    select: Select = dataclasses.field(compare=False)
    nonneg: tuple[str, ...] = dataclasses.field(compare=False)

    def decide(self, leaf: StateLeaf) -> QuantSpec | str:
        """The spec of a leaf, with a fixed map, or the reason why it stays as it is.

        Raises:
          TypeError: when the rule selects a leaf that is not real and floating, or returns something else.
          ValueError: when the rule names a map for values >= 0 for a field that has a sign.
        """
        decision = self.select(leaf)
        if decision is None or decision is False:
            return "not selected"
        if isinstance(decision, str):
            return decision
        if decision is not True and not isinstance(decision, QuantSpec):
            raise TypeError(f"select must return a QuantSpec, True, None, False or a reason, got {decision!r}")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"select chose {leaf.path!r}, but {leaf.dtype} is not real and floating")
        spec = self.spec if decision is True else decision
        signed = (leaf.owner, leaf.field) in SIGNED_IN
        nonneg = (leaf.field in NONNEG or leaf.field in self.nonneg) and not signed
        if spec.nonneg and leaf.field in SIGNED and not nonneg:
            raise ValueError(f"map='sqrt' is for values >= 0, but {leaf.path!r} has a sign")
        # The wrapper's own map is for averages with a sign; a spec for this leaf is taken as it is.
        spec = dataclasses.replace(spec, map="sqrt") if nonneg and decision is True else spec.resolve(nonneg)
        if leaf.field in MAXIMA and spec.rounding != "nearest":
            spec = dataclasses.replace(spec, rounding="nearest")
        if decision is True and 2 * packed_bytes(leaf.shape, spec) > leaf.nbytes:
            return f"a last axis of {leaf.shape[-1] if leaf.shape else 1} would not save half"
        return spec


def _walk(node: PyTree, keys: tuple[Any, ...], owner: str, field: str, below: int) -> Iterator[tuple[StateLeaf, Any]]:
    if is_quantized(node):
        yield StateLeaf(tree.path_str(keys), owner, field, tree.path_str(keys[below:]), node.shape, node.dtype), node
        return
    for path, child in tree.children(node):
        if not path:
            shape, dtype = tuple(jnp.shape(child)), np.dtype(jnp.result_type(child)) if _plain(child) else _KEY
            yield StateLeaf(tree.path_str(keys), owner, field, tree.path_str(keys[below:]), shape, dtype), child
            return
        inside = (*keys, *path)
        named = isinstance(path[0], jax.tree_util.GetAttrKey) and path[0].name not in CONTAINERS
        if not field and named:
            yield from _walk(child, inside, type(node).__name__, path[0].name, len(inside))
        else:
            yield from _walk(child, inside, owner, field, below if field else len(inside))


_KEY = np.dtype("O")  # of typed random keys, which no rule selects


def _plain(x: Any) -> bool:
    return not jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)


def state_leaves(state: PyTree) -> list[tuple[StateLeaf, Any]]:
    """Every leaf of an optimizer's state with its name, in flattening order; a `QTensor` counts as one leaf.

    >>> import optax
    >>> [leaf.path for leaf, _ in state_leaves(optax.sgd(0.1, momentum=0.9).init({"w": jnp.zeros(2)}))]
    ['0/trace/w']
    """
    return list(_walk(state, (), "", "", 0))


def leaf_ids(leaves: list[StateLeaf]) -> list[int]:
    """The dither's word of every leaf: that of its name; a name that came before gets a number behind it."""
    seen: dict[str, int] = {}
    ids = []
    for leaf in leaves:
        number = seen[leaf.name] = seen.get(leaf.name, 0) + 1
        ids.append(leaf_id(leaf.name if number == 1 else f"{leaf.name}#{number}"))
    return ids
