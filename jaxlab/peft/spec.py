"""Which kernels of a model are adapted, and how: rules over paths, resolved to a list of targets."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxlab.core import tree
from jaxlab.peft.method import Arrays, Method
from jaxlab.peft.patterns import assign, compile_pattern
from jaxlab.quant.qtensor import is_quantized


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the kernels whose path a pattern is found in are adapted.

    Attributes:
      pattern: regular expression, found at borders of names only (see `patterns`): `.*/attn/(q|v)/kernel$`.
      method: such as `LoRA(8)`; None leaves the kernels alone, to except them from later rules.
      in_axes: the axes of the kernel that are its inputs: (0,) for (in, heads, head_dim), (0, 1) for
        (heads, head_dim, out), (0, 1, 2) for a convolution (height, width, in, out), (1,) for (out, in). By default
        the first of the two axes that are not in `stack_axes`.
      stack_axes: the axes along which different kernels lie, such as (0,) for layers stacked for `lax.scan`. Each
        kernel of the stack has an adapter of its own.

    Raises:
      ValueError: for a pattern that is no regular expression, and axes that occur twice.
      TypeError: when something is of another type.

    >>> Rule("kernel", None, stack_axes=(0,))
    Rule(pattern='kernel', method=None, in_axes=None, stack_axes=(0,))
    """

    pattern: str
    method: Method | None
    in_axes: tuple[int, ...] | None = None
    stack_axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)
        if self.method is not None and not isinstance(self.method, Method):
            raise TypeError(f"rule {self.pattern!r}: method must be one of jaxlab.peft's or None, got {self.method!r}")
        for name, axes in (("in_axes", self.in_axes or ()), ("stack_axes", self.stack_axes)):
            if not isinstance(axes, tuple) or not all(isinstance(a, int) and not isinstance(a, bool) for a in axes):
                raise TypeError(f"rule {self.pattern!r}: {name} must be a tuple of integers, got {axes!r}")
        if self.in_axes == ():
            raise ValueError(f"rule {self.pattern!r}: in_axes must name an axis or be None, got ()")


@dataclasses.dataclass(frozen=True)
class Target:
    """One leaf that is adapted: a kernel, or a stack of kernels.

    Attributes:
      path: of the leaf.
      method: how.
      shape: of the leaf.
      dtype: name of the leaf's dtype.
      in_axes, stack_axes: as in `Rule`, none negative.
    """

    path: str
    method: Method
    shape: tuple[int, ...]
    dtype: str
    in_axes: tuple[int, ...]
    stack_axes: tuple[int, ...]

    @property
    def out_axes(self) -> tuple[int, ...]:
        """The axes that are outputs, in their order."""
        return tuple(i for i in range(len(self.shape)) if i not in (*self.in_axes, *self.stack_axes))

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the stacked axes."""
        return tuple(self.shape[i] for i in self.stack_axes)

    @property
    def n(self) -> int:
        """Number of inputs."""
        return math.prod(self.shape[i] for i in self.in_axes)

    @property
    def m(self) -> int:
        """Number of outputs."""
        return math.prod(self.shape[i] for i in self.out_axes)

    @property
    def count(self) -> int:
        """Number of trained numbers."""
        return math.prod(self.stack) * self.method.count(self.n, self.m)

    @property
    def compute(self) -> jnp.dtype:
        """What is computed in: float32, or float64 for a kernel in float64."""
        return jax.dtypes.canonicalize_dtype(jnp.promote_types(self.dtype, jnp.float32))

    def to_matrix(self, leaf: Float[Array, "..."]) -> Float[Array, "*stack n m"]:
        """The leaf as matrices [*stack, inputs, outputs]."""
        order = (*self.stack_axes, *self.in_axes, *self.out_axes)
        return leaf.transpose(order).reshape(*self.stack, self.n, self.m)

    def from_matrix(self, matrix: Float[Array, "*stack n m"]) -> Float[Array, "..."]:
        """The inverse of `to_matrix`."""
        order = (*self.stack_axes, *self.in_axes, *self.out_axes)
        back = sorted(range(len(order)), key=order.__getitem__)
        return matrix.reshape([self.shape[i] for i in order]).transpose(back)

    def structs(self) -> tuple[Arrays, Arrays]:
        """Shapes and dtypes of the trainable and of the frozen arrays."""
        trainable, frozen = _structs(self.method, self.n, self.m, str(self.compute))
        extend = lambda x: jax.ShapeDtypeStruct((*self.stack, *x.shape), x.dtype)  # noqa: E731
        return jax.tree.map(extend, trainable), jax.tree.map(extend, frozen)


@functools.lru_cache(maxsize=1024)
def _structs(method: Method, n: int, m: int, dtype: str) -> tuple[Arrays, Arrays]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(method.init, key, jax.ShapeDtypeStruct((n, m), dtype))


@dataclasses.dataclass(frozen=True)
class Spec:
    """What `match` found; `str()` is a table. Hashable: a static part of an adapter.

    Attributes:
      targets: what is adapted, in flattening order.
      total: number of parameters of the model.
    """

    targets: tuple[Target, ...]
    total: int

    @property
    def count(self) -> int:
        """Number of trained numbers."""
        return sum(target.count for target in self.targets)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the targets."""
        return tuple(target.path for target in self.targets)

    def __getitem__(self, path: str) -> Target:
        for target in self.targets:
            if target.path == path:
                return target
        raise KeyError(f"{path!r} is not adapted; adapted: {', '.join(self.paths)}")

    def __str__(self) -> str:
        head = ("kernel", "shape", "as", "method", "trained", "share")
        rows = [
            (
                t.path,
                "x".join(map(str, t.shape)),
                "".join(f"{s} of " for s in t.stack) + f"{t.n}x{t.m}",
                t.method.label,
                f"{t.count:,}",
                f"{t.count / math.prod(t.shape):.2%}",
            )
            for t in self.targets
        ]
        share = f"{self.count / max(1, self.total):.2%}"
        rows.append(("total", f"{self.total:,}", "", f"{len(self.targets)} kernels", f"{self.count:,}", share))
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = (
            "  ".join(c.rjust(w) if i > 3 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in [head, *rows]
        )
        return "\n".join(line.rstrip() for line in lines)


def flatten(params: PyTree) -> dict[str, Any]:
    """The leaves by path, in order; a quantised array is one leaf.

    Raises:
      ValueError: when two leaves have the same path.

    >>> flatten({"a": [1, 2]})
    {'a/0': 1, 'a/1': 2}
    """
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    found = {tree.path_str(path): leaf for path, leaf in flat}
    if len(found) != len(flat):
        raise ValueError("params must have a path of its own for every leaf, but two are equal")
    return found


def match(params: PyTree, rules: Sequence[Rule]) -> Spec:
    """Resolves rules on a tree of parameters: the first rule whose pattern is found in a leaf's path decides.

    Args:
      params: pytree of arrays, or of `jax.ShapeDtypeStruct`; leaves of no rule stay as they are.
      rules: in order of precedence.

    Returns:
      The `Spec`; print it to see what is adapted and how many numbers are trained.

    Raises:
      ValueError: when a rule decides for no leaf (with the nearest path), no rule has a method, the leaf is no matrix
        and its rule has no `in_axes`, the axes do not fit it, or the method cannot adapt a kernel of this size.
      TypeError: when something is no `Rule`, or a leaf is no float array, or is quantised and the method must read it.

    >>> from jaxlab.peft.lora import LoRA
    >>> params = {"q": {"kernel": jnp.zeros((8, 2, 4)), "bias": jnp.zeros((2, 4))}}
    >>> print(match(params, [Rule("q/kernel", LoRA(2), in_axes=(0,))]))
    kernel    shape  as   method   trained   share
    q/kernel  8x2x4  8x8  lora r2       32  50.00%
    total     72          1 kernels     32  44.44%
    """
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules must hold Rule(pattern, method), got {rule!r}")
    leaves = flatten(params)
    found = assign(list(leaves), [rule.pattern for rule in rules])
    targets = []
    for (path, leaf), i in zip(leaves.items(), found, strict=True):
        if i is not None and rules[i].method is not None:
            targets.append(_target(path, leaf, rules[i]))
    if not targets:
        raise ValueError("rules must give a method to at least one leaf, got none that does")
    return Spec(tuple(targets), sum(math.prod(leaf.shape) for leaf in leaves.values()))


def _target(path: str, leaf: Any, rule: Rule) -> Target:
    where = f"{path} (rule {rule.pattern!r})"
    method = rule.method
    assert method is not None
    if is_quantized(leaf) and method.reads_kernel:
        raise TypeError(f"{where} is quantised, and {method.label} starts from its values: dequantize_tree it first")
    if not hasattr(leaf, "shape") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(f"{where} must be a float array to be adapted, got {getattr(leaf, 'dtype', type(leaf))}")
    shape = tuple(leaf.shape)
    axes = {}
    for name, given in (("stack_axes", rule.stack_axes), ("in_axes", rule.in_axes or ())):
        if any(not -len(shape) <= axis < len(shape) for axis in given):
            raise ValueError(f"{where}: {name} must lie in a leaf of shape {list(shape)}, got {given}")
        axes[name] = tuple(axis % len(shape) for axis in given)
    if rule.in_axes is None:
        rest = [i for i in range(len(shape)) if i not in axes["stack_axes"]]
        if len(rest) != 2:
            raise ValueError(
                f"{where} has shape {list(shape)}, no matrix: name its inputs with in_axes and stacked layers with "
                "stack_axes, or except it with an earlier rule whose method is None"
            )
        axes["in_axes"] = (rest[0],)
    used = (*axes["stack_axes"], *axes["in_axes"])
    if len(set(used)) != len(used) or len(used) >= len(shape):
        raise ValueError(
            f"{where}: in_axes and stack_axes must differ and leave an output of {list(shape)}, got {used}"
        )
    target = Target(path, method, shape, str(leaf.dtype), axes["in_axes"], axes["stack_axes"])
    if 0 in shape:
        raise ValueError(f"{where} is empty: {list(shape)}")
    try:
        method.check(target.n, target.m)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return target


def check_arrays(spec: Spec, trainable: Mapping[str, Any], frozen: Mapping[str, Any]) -> None:
    """Raises `ValueError` naming every array that is missing, unexpected, or has another shape than the spec says."""
    lines = []
    for what, given, side in (("trainable", trainable, 0), ("frozen", frozen, 1)):
        wanted = {f"{t.path}:{name}": s for t in spec.targets for name, s in t.structs()[side].items()}
        got = {f"{path}:{name}": x for path, arrays in given.items() for name, x in arrays.items()}
        lines += [f"{what} {name} is missing" for name in wanted if name not in got]
        lines += [f"{what} {name} is unexpected" for name in got if name not in wanted]
        lines += [
            f"{what} {name} has shape {list(jnp.shape(got[name]))}, the spec says {list(wanted[name].shape)}"
            for name in wanted
            if name in got and tuple(jnp.shape(got[name])) != wanted[name].shape
        ]
    if lines:
        shown = lines[:10] + ([f"... and {len(lines) - 10} more"] if len(lines) > 10 else [])
        raise ValueError("adapters do not fit their spec:\n  " + "\n  ".join(shown))
