"""Whole parameter trees in few bits: ordered rules over leaf paths, and a report of what each leaf costs and loses."""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PyTree

from jaxlab.core import tree
from jaxlab.quant.formats import Format, resolve
from jaxlab.quant.qtensor import as_array, check_array, check_finite, dequantize, is_quantized, quantize

SKIP = "skip"


@dataclasses.dataclass(frozen=True)
class Rule:
    """What happens to the leaves whose path a pattern is found in.

    Attributes:
      pattern: regular expression, searched (`re.search`) in paths such as `layers/0/mlp/kernel`.
      format: a name or a `Format`; None or "skip" to leave the leaf alone.
      axis: along which blocks lie; None for `contraction_axis`.

    Raises:
      ValueError: for a pattern that is no regular expression, and a format that is not known.
      TypeError: when `format` or `axis` is something else.

    >>> Rule("embed", None).keeps, Rule("kernel", "nvfp4", axis=0).keeps
    (True, False)
    """

    pattern: str
    format: Any
    axis: int | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"rules: {self.pattern!r} is no regular expression ({error})") from error
        if self.axis is not None and (isinstance(self.axis, bool) or not isinstance(self.axis, int)):
            raise TypeError(f"rules: axis must be an integer or None, got {self.axis!r} for {self.pattern!r}")
        if not self.keeps:
            object.__setattr__(self, "format", resolve(self.format))

    @property
    def keeps(self) -> bool:
        """Whether leaves are left as they are."""
        return self.format is None or self.format == SKIP


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf of a report.

    Attributes:
      path: of the leaf.
      shape: of the leaf.
      format: how it is stored now: a format, or the dtype of a leaf that was left alone.
      before: bytes before.
      after: bytes now.
      snr: signal-to-noise ratio, 10 log10(sum w^2 / sum (w - what)^2) in dB; infinite where nothing changed.
      note: the axis of the blocks, or why the leaf was left alone.
    """

    path: str
    shape: tuple[int, ...]
    format: str
    before: int
    after: int
    snr: float
    note: str

    @property
    def bits(self) -> float:
        """Bits a weight."""
        return 8 * self.after / max(1, math.prod(self.shape))


@dataclasses.dataclass(frozen=True)
class Report:
    """What `quantize_tree` did, a `Row` a leaf; `str()` is a table.

    Attributes:
      rows: in flattening order.
    """

    rows: tuple[Row, ...]

    @property
    def before(self) -> int:
        """Bytes of all leaves before."""
        return sum(row.before for row in self.rows)

    @property
    def after(self) -> int:
        """Bytes of all leaves now."""
        return sum(row.after for row in self.rows)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Paths that no rule was found in."""
        return tuple(row.path for row in self.rows if row.note == _NO_RULE)

    def __str__(self) -> str:
        head = ("leaf", "shape", "stored as", "bytes before", "after", "bits", "SNR dB", "note")
        cells = [
            (
                row.path,
                "x".join(map(str, row.shape)) or "scalar",
                row.format,
                f"{row.before:,}",
                f"{row.after:,}",
                f"{row.bits:.2f}",
                "" if math.isinf(row.snr) else f"{row.snr:.2f}",
                row.note,
            )
            for row in self.rows
        ]
        ratio = f"{self.after / max(1, self.before):.1%}"
        cells.append(("total", "", "", f"{self.before:,}", f"{self.after:,}", "", "", ratio))
        widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
        lines = (
            "  ".join(
                cell.rjust(w) if 3 <= i <= 6 else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in [head, *cells]
        )
        return "\n".join(line.rstrip() for line in lines)


_NO_RULE = "no rule"


def contraction_axis(ndim: int) -> int:
    """-2 from two axes on: that of the inputs in a Flax kernel (in, out) or (height, width, in, out); -1 for a vector.

    >>> contraction_axis(2), contraction_axis(1)
    (-2, -1)
    """
    return -2 if ndim >= 2 else -1


@functools.partial(jax.jit, static_argnames=("fmt", "axis"))
def _measured(x: Float[Array, "..."], fmt: Format, axis: int) -> tuple[Any, Float32[Array, "2"]]:
    """The quantised leaf, and the sums of squares of it and of its error, over the square of its maximum."""
    q = quantize(x, fmt, axis=axis)
    x = x.astype(jnp.float32)
    error = dequantize(q, jnp.float32) - x
    top = jnp.maximum(jnp.max(jnp.abs(x), initial=0), np.float32(2.0**-126))
    return q, jnp.stack([jnp.sum((x / top) ** 2), jnp.sum((error / top) ** 2)])


def _snr(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


def _rule(rule: Any) -> Rule:
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, Sequence) or isinstance(rule, str) or len(rule) not in (2, 3):
        raise TypeError(f"rules must hold (pattern, format), (pattern, format, axis) or Rule, got {rule!r}")
    return Rule(*rule)


def _quantize_leaf(path: str, leaf: Any, rule: Rule) -> tuple[Any, Row]:
    if is_quantized(leaf):
        raise ValueError(f"{path} is quantised already ({leaf.checkpoint_meta}); rule {rule.pattern!r} matches it")
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"{path} is traced, but quantize_tree reports numbers: call it outside of jit, grad and vmap")
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(f"{path} must be an array, got {type(leaf).__name__}")
    advice = f"; rule {rule.pattern!r} matches it, put one with 'skip' before"
    try:
        axis = check_array(leaf, contraction_axis(leaf.ndim) if rule.axis is None else rule.axis, path)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}{advice}") from error
    shape, before, x = tuple(leaf.shape), int(leaf.nbytes), as_array(leaf)
    check_finite(x, path)
    q, sums = _measured(x, rule.format, axis)
    row = Row(path, shape, str(rule.format), before, q.nbytes, _snr(*map(float, sums)), f"axis {axis}")
    return q, row


def _kept(path: str, leaf: Any, note: str) -> Row:
    if is_quantized(leaf):
        return Row(path, leaf.shape, str(leaf.format), leaf.nbytes, leaf.nbytes, math.inf, note)
    shape, dtype = tuple(np.shape(leaf)), getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    nbytes = math.prod(shape) * dtype.itemsize
    return Row(path, shape, str(dtype), nbytes, nbytes, math.inf, note)


def quantize_tree(params: PyTree, rules: Sequence[Any], *, allow_unused: bool = False) -> tuple[PyTree, Report]:
    """Quantises the leaves of a tree by ordered rules.

    The first rule whose pattern is found in a leaf's path decides. Leaves that no rule is found in are left alone, and
    reported as such. One leaf is worked on at a time, so that NumPy leaves (of a memory-mapped file, say) need not fit
    into the device's memory together.

    Args:
      params: pytree of arrays; kernels as Flax has them, (in, out).
      rules: `Rule`s, or tuples (pattern, format) and (pattern, format, axis). Blocks lie along `contraction_axis` by
        default; embeddings, whose rows are looked up, want -1, and kernels with several output axes want theirs.
      allow_unused: whether a rule may be found in no path.

    Returns:
      `(tree, report)`: the tree with `QTensor`s in the place of the leaves.

    Raises:
      TypeError: when a rule is something else, or is for a leaf that is no float array.
      ValueError: when a rule is found in no path, or is for a leaf that holds NaN or infinities, has no axis, or is
        quantised already. All messages name the leaf's path.

    >>> kernel = jnp.linspace(-1, 1, 256).reshape(32, 8)
    >>> params = {"embed": jnp.ones((8, 16)), "mlp": {"kernel": kernel, "bias": jnp.zeros(8)}}
    >>> quantized, report = quantize_tree(params, [("embed", "skip"), ("kernel$", "nvfp4")])
    >>> print(report)
    leaf        shape  stored as  bytes before  after   bits  SNR dB  note
    embed       8x16   float32             512    512  32.00          rule 'embed'
    mlp/bias    8      float32              32     32  32.00          no rule
    mlp/kernel  32x8   nvfp4             1,024    148   4.62   19.52  axis -2
    total                                1,568    692                 44.1%
    """
    ordered = [_rule(rule) for rule in rules]
    flat, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
    paths = [tree.path_str(path) for path, _ in flat]
    unused = [rule.pattern for rule in ordered if not any(re.search(rule.pattern, path) for path in paths)]
    if unused and not allow_unused:
        shown = ", ".join(paths[:8]) + (f", ... ({len(paths)} in all)" if len(paths) > 8 else "")
        raise ValueError(f"rules: {', '.join(map(repr, unused))} found in no path; paths: {shown or 'none'}")
    leaves, rows = [], []
    for path, (_, leaf) in zip(paths, flat, strict=True):
        rule = next((rule for rule in ordered if re.search(rule.pattern, path)), None)
        if rule is None or rule.keeps:
            row = _kept(path, leaf, f"rule {rule.pattern!r}" if rule else _NO_RULE)
        else:
            leaf, row = _quantize_leaf(path, leaf, rule)
        leaves.append(leaf)
        rows.append(row)
    return jax.tree.unflatten(structure, leaves), Report(tuple(rows))


def dequantize_tree(params: PyTree, dtype: Any = None) -> PyTree:
    """The tree with every `QTensor` replaced by the array it stands for.

    Args:
      params: as `quantize_tree` gave it.
      dtype: of these arrays; None for what each was before.

    Returns:
      A tree of arrays.

    >>> quantized, _ = quantize_tree({"w": jnp.ones((2, 4))}, [("w", "sign")])
    >>> dequantize_tree(quantized)["w"].tolist()
    [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    """
    restore = lambda x: dequantize(x, dtype) if is_quantized(x) else x  # noqa: E731
    return jax.tree.map(restore, params, is_leaf=is_quantized)
