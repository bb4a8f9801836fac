"""Streaming DiLoCo: which part of the model synchronises when.

The parameters are cut into P fragments and every inner step t (counted from 1) does at most one synchronisation and
one application, both pure functions of t, so that a worker that rejoins reduces the same fragment as everyone else:

    dh = max(1, round(H / P)),   H_eff = P dh
    synchronise fragment (t mod H_eff) / dh       when t > 0 and t mod dh = 0
    apply       fragment ((t - V) mod H_eff) / dh when t - V > 0 and (t - V) mod dh = 0

"Synchronise" reduces the fragment's pseudo-gradients and steps its outer optimizer; "apply" moves the workers to the
result, V steps later, with `local <- mix * local + (1 - mix) * global`. P = 1, V = 0, mix = 0 is DiLoCo.

A single SPMD program runs its collectives in program order: V and the mixing reproduce how *delayed* merging learns,
they do not hide any latency here. What streaming does save is the peak: each transfer is 1/P of the model.

Source: Streaming DiLoCo (arXiv 2501.18512), sections 2.1 to 2.3.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxlab.core import tree
from jaxlab.lowcomm import checks

PATTERNS = ("strided", "sequential")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When each fragment is synchronised and applied.

    Attributes:
      sync_every: H, inner steps between two synchronisations of the same fragment, as requested.
      fragments: P, number of fragments.
      overlap: V, inner steps between a fragment's synchronisation and its application.

    Raises:
      TypeError: for a value that is not an integer.
      ValueError: for H < 1, P < 1, H < P, V < 0, or V >= dh (a fragment would be applied after the next one was sent).

    Example:
      >>> [Schedule(12, 4, overlap=1).at(t) for t in (3, 4, 5, 12, 13)]
      [(1, -1), (-1, 1), (-1, -1), (0, -1), (-1, 0)]
    """

    sync_every: int
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self):
        for name in ("sync_every", "fragments", "overlap"):
            checks.integer(name, getattr(self, name))
        if self.sync_every < 1:
            raise ValueError(f"sync_every must be >= 1 inner step, got {self.sync_every}")
        if self.fragments < 1:
            raise ValueError(f"fragments must be >= 1, got {self.fragments}")
        if self.sync_every < self.fragments:
            raise ValueError(
                f"sync_every={self.sync_every} is below the number of fragments={self.fragments}: "
                "there would be more than one synchronisation a step"
            )
        if not 0 <= self.overlap < self.stride:
            raise ValueError(
                f"overlap must be in [0, {self.stride}) inner steps (sync_every / fragments), got {self.overlap}"
            )

    @property
    def stride(self) -> int:
        """dh, inner steps between two consecutive synchronisations."""
        return max(1, round(self.sync_every / self.fragments))

    @property
    def period(self) -> int:
        """H_eff, inner steps in which every fragment is synchronised exactly once."""
        return self.fragments * self.stride

    def at(self, step: int) -> tuple[int, int]:
        """(fragment synchronised, fragment applied) after inner step `step` (counted from 1), -1 for none."""
        sync, apply = self.traced(np.int32(step))
        return int(sync), int(apply)

    def traced(self, step: Int[Array | np.ndarray | np.generic, ""]) -> tuple[Array, Array]:
        """`at` for a step number inside jit."""

        def fragment(t):
            fires = (t > 0) & (t % self.stride == 0)
            return jnp.where(fires, (t % self.period) // self.stride, -1)

        return fragment(step), fragment(step - self.overlap)


class Piece(NamedTuple):
    """One leaf of a fragment: the leaf's path and, for stacked layers, which rows of its leading axis."""

    path: str
    rows: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Fragments:
    """A partition of the parameters. No matrix is ever split: a piece is a leaf, or whole layers of a stacked leaf.

    Build it with `whole`, `by_layer` or `by_patterns`; they check that every leaf is in exactly one fragment.
    """

    pieces: tuple[tuple[Piece, ...], ...]

    def __len__(self) -> int:
        return len(self.pieces)

    @staticmethod
    def whole(params: PyTree) -> "Fragments":
        """One fragment with everything: plain DiLoCo."""
        return Fragments((tuple(Piece(path) for path in tree.leaf_paths(params)),))

    @staticmethod
    def by_layer(
        params: PyTree, n: int, *, pattern: str = "strided", layers: str = r"(?:^|/)layers/", stacked: bool = False
    ) -> "Fragments":
        """Fragment 0 holds what is in no layer (embedding, head, final norm), fragments 1..n-1 share the layers.

        Args:
          params: the parameters, leaves [...].
          n: number of fragments P; 1 gives one fragment with everything.
          pattern: "strided" (layer l goes to fragment 1 + l mod (n-1), the paper's choice) or "sequential".
          layers: regular expression for the path in front of a layer's index.
          stacked: True when the leaves under `layers` carry all layers on their leading axis (scan over layers).

        Raises:
          ValueError: for n < 1, n - 1 larger than the number of layers, an unknown pattern, or no layers found.

        Example:
          >>> p = {"embed": jnp.zeros((4, 2)), "layers": {"0": {"w": jnp.zeros((2, 2))}, "1": {"w": jnp.zeros((2, 2))}}}
          >>> [[piece.path for piece in f] for f in Fragments.by_layer(p, 3).pieces]
          [['embed'], ['layers/0/w'], ['layers/1/w']]
        """
        if pattern not in PATTERNS:
            raise ValueError(f"pattern must be one of {PATTERNS}, got {pattern!r}")
        checks.count("n", n)
        checks.pattern("layers", layers)
        # Named: `layers` may have groups of its own.
        before_layer = re.compile(layers if stacked else layers + r"(?P<layer_index>\d+)(?:/|$)")
        if n == 1:
            return Fragments.whole(params)
        found: dict[str, Any] = {}
        for path, leaf in zip(tree.leaf_paths(params), jax.tree.leaves(params), strict=True):
            match = before_layer.search(path)
            if match is not None and stacked and not leaf.ndim:
                raise ValueError(f"layers={layers!r} matches {path!r}, which has no leading axis of layers")
            found[path] = None if match is None else (leaf.shape[0] if stacked else int(match["layer_index"]))
        in_layers = [v for v in found.values() if v is not None]
        if not in_layers:
            raise ValueError(f"layers={layers!r} matches no leaf; paths are {list(found)[:8]}")
        if len(in_layers) == len(found):
            raise ValueError(
                f"layers={layers!r} matches every leaf, which leaves fragment 0 empty; use Fragments.by_patterns"
            )
        count = max(in_layers) if stacked else max(in_layers) + 1
        if n - 1 > count:
            raise ValueError(f"n={n} fragments need at least {n - 1} layers (fragment 0 holds the rest), got {count}")

        def owner(layer: int) -> int:
            return 1 + (layer % (n - 1) if pattern == "strided" else layer * (n - 1) // count)

        groups: list[list[Piece]] = [[] for _ in range(n)]
        for path, layer in found.items():
            if layer is None:
                groups[0].append(Piece(path))
            elif not stacked:
                groups[owner(layer)].append(Piece(path))
            else:
                for f in range(1, n):
                    rows = tuple(row for row in range(layer) if owner(row) == f)
                    if rows:
                        groups[f].append(Piece(path, rows))
        return Fragments(tuple(tuple(group) for group in groups)).check(params)

    @staticmethod
    def by_patterns(params: PyTree, groups: Sequence[Sequence[str]]) -> "Fragments":
        """One fragment a group of regular expressions, searched in the leaves' paths.

        Raises:
          ValueError: naming the leaf that is in no fragment or in several, or the pattern that matches nothing.
        """
        paths = tree.leaf_paths(params)
        for group in groups:
            for pattern in group:
                if not any(checks.pattern("fragment pattern", pattern).search(path) for path in paths):
                    raise ValueError(f"fragment pattern {pattern!r} matches no leaf; paths are {paths[:8]}")
        pieces = tuple(
            tuple(Piece(path) for path in paths if any(re.search(pattern, path) for pattern in group))
            for group in groups
        )
        return Fragments(pieces).check(params)

    def check(self, params: PyTree) -> "Fragments":
        """Returns self, or raises `ValueError` naming a leaf (or layer of a leaf) that is missing or duplicated."""
        paths = tree.leaf_paths(params)
        twice = next((path for i, path in enumerate(paths) if path in paths[:i]), None)
        if twice is not None:
            raise ValueError(f"two leaves have the path {twice!r}; fragments tell leaves apart by their path")
        for path, leaf in zip(paths, jax.tree.leaves(params), strict=True):
            rows = [piece.rows for group in self.pieces for piece in group if piece.path == path]
            whole = [r for r in rows if r is None]
            flat = [i for r in rows if r is not None for i in r]
            if not rows:
                raise ValueError(f"leaf {path!r} is in no fragment")
            if len(whole) > 1 or (whole and flat) or len(set(flat)) != len(flat):
                raise ValueError(f"leaf {path!r} is in more than one fragment")
            if not whole and not leaf.ndim:
                raise ValueError(f"leaf {path!r} has no axis of layers, its fragments hold {sorted(flat)}")
            if not whole and sorted(flat) != list(range(leaf.shape[0])):
                raise ValueError(f"leaf {path!r} has {leaf.shape[0]} layers, its fragments hold {sorted(flat)}")
        known = set(paths)
        for group in self.pieces:
            if len({piece.path for piece in group}) != len(group):
                raise ValueError(f"a fragment holds two pieces of one leaf: {[piece.path for piece in group]}")
            for piece in group:
                if piece.path not in known:
                    raise ValueError(f"fragment leaf {piece.path!r} is not among the parameters")
            if not group:
                raise ValueError("a fragment holds no leaf")
        return self

    def take(self, params: PyTree, f: int, *, lead: int = 0) -> dict[str, Array]:
        """Fragment f as a flat dict path -> leaf; `lead` leading axes (the worker axis) stand before the leaf's own."""
        flat = dict(zip(tree.leaf_paths(params), jax.tree.leaves(params), strict=True))
        return {
            piece.path: flat[piece.path]
            if piece.rows is None
            else jnp.take(flat[piece.path], np.array(piece.rows), axis=lead)
            for piece in self.pieces[f]
        }

    def put(self, params: PyTree, f: int, values: dict[str, Array], *, lead: int = 0) -> PyTree:
        """The inverse of `take`: `params` with fragment f replaced by `values`."""
        rows = {piece.path: piece.rows for piece in self.pieces[f]}

        def replace(path, leaf):
            if path not in rows:
                return leaf
            if rows[path] is None:
                return values[path]
            index = (slice(None),) * lead + (np.array(rows[path]),)
            return leaf.at[index].set(values[path])

        return tree.map_with_path(replace, params)
