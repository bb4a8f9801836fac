"""Pytrees by path: readable leaf names, sizes, stacking, and comparisons that say where two trees differ."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree


def path_str(path: tuple[Any, ...]) -> str:
    """A key path as `a/0/b`: dict keys, sequence indices and attribute names joined by slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_paths(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The paths of all leaves, in flattening order.

    >>> leaf_paths({"a": [1, 2], "b": 3})
    ['a/0', 'a/1', 'b']
    """
    return [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def map_with_path(f: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` whose function gets the leaf's path string first."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: f(path_str(path), *leaves), tree, *rest)


def children(node: PyTree) -> list[tuple[tuple[Any, ...], Any]]:
    """(key path, child) of every child of a node; a leaf is its own only child, with an empty path.

    >>> [path_str(path) for path, _ in children({"a": [1, 2], "b": 3})]
    ['a', 'b']
    """
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]


def size(tree: PyTree) -> int:
    """Number of elements over all leaves (arrays or `jax.ShapeDtypeStruct`)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def nbytes(tree: PyTree) -> int:
    """Bytes over all leaves (arrays or `jax.ShapeDtypeStruct`), as stored in memory."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def broadcast_leading(tree: PyTree, k: int) -> PyTree:
    """Repeats every leaf `[...]` to `[k, ...]`."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (k, *jnp.shape(x))), tree)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """True where every element of every floating leaf is finite."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in leaves])) if leaves else jnp.array(True)


def differences(a: PyTree, b: PyTree, names: tuple[str, str] = ("first", "second")) -> list[str]:
    """Where two trees differ in structure, shape or dtype, a line each; empty when they agree.

    >>> differences({"w": jnp.zeros((2,))}, {"w": jnp.zeros((3,))}, ("anchor", "worker"))
    ['w: anchor float32[2], worker float32[3]']
    """

    def describe(tree: PyTree) -> dict[str, str]:
        flat = jax.tree_util.tree_leaves_with_path(tree)
        return {path_str(path): f"{jnp.result_type(x)}{list(jnp.shape(x))}" for path, x in flat}

    left, right = describe(a), describe(b)
    return [
        f"{path}: {names[0]} {left.get(path, 'absent')}, {names[1]} {right.get(path, 'absent')}"
        for path in dict.fromkeys([*left, *right])
        if left.get(path) != right.get(path)
    ]


def check_match(a: PyTree, b: PyTree, names: tuple[str, str]) -> None:
    """Raises `ValueError` naming every path at which two trees differ in structure, shape or dtype."""
    lines = differences(a, b, names)
    if not lines and jax.tree.structure(a) != jax.tree.structure(b):
        lines = [f"containers differ: {names[0]} {jax.tree.structure(a)}, {names[1]} {jax.tree.structure(b)}"]
    if lines:
        shown = lines[:10] + ([f"... and {len(lines) - 10} more"] if len(lines) > 10 else [])
        raise ValueError(f"{names[0]} and {names[1]} do not match:\n  " + "\n  ".join(shown))
