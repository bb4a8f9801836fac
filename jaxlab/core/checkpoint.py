"""Checkpoints: orbax behind one small class that checks what it reads and falls back to the previous one.

Layout of a step: `state` holds the leaves of the pytree under flat names (`0003.params.w`), `meta` is JSON: the
caller's dict and a manifest of path -> dtype, shape and a checksum. The manifest names every differing path before
orbax is asked to read anything; the checksum catches a flipped bit, which orbax returns as data. Neither depends on how
the arrays were sharded, so a checkpoint of eight devices restores onto one.

A node of the pytree with an attribute `checkpoint_meta`, a string, has it in the manifest, too: what its arrays mean,
such as the number of bits and the seed of a quantised state. A checkpoint with another text does not fit.
"""

import gc
import json
import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxlab.core import tree
from jaxlab.core.errors import CheckpointError

_FORMAT = 1
_MASK = (1 << 64) - 1


class Restored(NamedTuple):
    """What `Checkpointer.restore` found.

    Attributes:
      state: the pytree, with the structure and shardings of `like`.
      step: its step.
      meta: the dict given to `save`.
    """

    state: PyTree
    step: int
    meta: dict[str, Any]


class Checkpointer:
    """Saves pytrees by step into a directory, and restores the newest one that is intact.

    Saving copies the arrays to the host before it returns (they may be donated at once) and writes the files in the
    background; a step appears in the directory only when it is complete, so a killed process leaves the previous one.
    With several processes every method is a collective.

    Args:
      directory: where the steps live; made if absent.
      keep: how many of the newest steps to keep.
      on_message: called with a line when a checkpoint is damaged and an older one is used.

    Raises:
      ValueError: when `keep` < 1, or `directory` is a file.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, keep: int = 3, on_message: Callable[[str], Any] = warnings.warn
    ):
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        text = os.fspath(directory)
        self.directory = epath.Path(text if "://" in text else Path(text).absolute())
        if self.directory.is_file():
            raise ValueError(f"directory must be a folder, got the file {self.directory}")
        self._on_message = on_message
        self._damaged: set[int] = set()
        self._manager = ocp.CheckpointManager(
            self.directory, options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        )

    def latest(self) -> int | None:
        """The newest step not known to be damaged, or None."""
        return max(self._steps(), default=None)

    def save(self, step: int, state: PyTree, meta: dict[str, Any] | None = None, force: bool = False) -> None:
        """Saves `state` as `step`; returns once the arrays are copied, while the files are still being written.

        Args:
          step: number of the checkpoint, larger than every one there.
          state: pytree of arrays (typed keys, `None` and empty containers too).
          meta: JSON-serialisable dict that comes back with the state (tuples as lists, all keys as strings).
          force: go back in time: first deletes this step and all later ones.

        Raises:
          TypeError: when a leaf is not an array, or `meta` is not JSON.
          ValueError: when `step` is negative, or two leaves have the same path.
          CheckpointError: when this or a later step exists and `force` is False, or an earlier background write failed.
        """
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        arrays, entries = _split(state)
        try:
            text = json.dumps({} if meta is None else meta)
        except (TypeError, ValueError) as error:
            raise TypeError(f"meta must be JSON-serialisable: {error}") from error
        self.wait()
        self._set_damaged_aside()
        newer = [s for s in self._steps() if s >= step]
        if newer and not force:
            raise CheckpointError(
                f"cannot save step {step}: {self.directory} already holds step {max(newer)}; restore it first, use "
                "another directory, or pass force=True to delete the steps from here on"
            )
        for old in newer:
            self._manager.delete(old)
        sums = _checksums(arrays)
        for entry in entries.values():
            if "name" in entry:
                entry["sum"] = sums[entry["name"]]
        record = {"format": _FORMAT, "meta": json.loads(text), "manifest": entries}
        record["sum"] = _json_sum(record)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                meta=ocp.args.JsonSave(record),
                # Orbax refuses an empty tree, so a state without leaves still writes one number.
                state=ocp.args.StandardSave(arrays or {"empty": np.zeros((), np.int32)}),
            ),
            force=True,
        )

    def restore(self, like: PyTree, step: int | None = None) -> Restored | None:
        """Reads the newest intact checkpoint, or exactly `step`, onto the shardings of `like`.

        Args:
          like: pytree with the structure, shapes and dtypes that were saved: arrays, or `jax.ShapeDtypeStruct`. JAX
            leaves come back with its sharding (any number of devices; without one, on the default device), NumPy leaves
            as NumPy arrays. Its values are never read; donated arrays will do.
          step: the one to read; then there is no falling back.

        Returns:
          The state, its step and its meta; None when the directory holds no checkpoint.

        Raises:
          CheckpointError: when the structure, a shape or a dtype differs (the message lists the paths); when `step` is
            absent or damaged; when every checkpoint is damaged.
          TypeError: when a leaf of `like` is not an array.
        """
        self.wait()
        steps = self._steps()
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.directory} holds no step {step}; it holds {steps or 'none'}")
        reasons: list[str] = []
        for candidate in reversed(steps) if step is None else [step]:
            try:
                restored = self._read(candidate, like)
            except _Damaged as error:
                reasons.append(f"step {candidate}: {error}")
                if step is None:
                    self._damaged.add(candidate)
                continue
            if reasons:
                self._on_message(
                    f"checkpoint damaged, using step {candidate} of {self.directory} instead; " + "; ".join(reasons)
                )
            return restored
        if reasons:
            raise CheckpointError(f"no checkpoint in {self.directory} can be read:\n  " + "\n  ".join(reasons))
        return None

    def _read(self, step: int, like: PyTree) -> Restored:
        request = ocp.args.Composite(meta=ocp.args.JsonRestore())
        record = _attempt(lambda: self._manager.restore(step, args=request).meta)
        if not isinstance(record, dict) or record.pop("sum", None) != _json_sum(record):
            raise _Damaged("its manifest is missing or was changed")
        if record["format"] != _FORMAT:
            raise CheckpointError(f"step {step} of {self.directory} has format {record['format']}, not {_FORMAT}")
        entries = record["manifest"]
        wanted, expected = _split(like)
        lines = [
            f"{path}: checkpoint {entries.get(path, _ABSENT)['leaf']}, like {expected.get(path, _ABSENT)['leaf']}"
            for path in dict.fromkeys([*entries, *expected])
            if entries.get(path, _ABSENT)["leaf"] != expected.get(path, _ABSENT)["leaf"]
        ]
        if lines:
            shown = lines[:20] + ([f"... and {len(lines) - 20} more"] if len(lines) > 20 else [])
            raise CheckpointError(
                f"step {step} of {self.directory} does not fit the state it is restored into:\n  " + "\n  ".join(shown)
            )
        # The files are read under the names they were saved with: leaf order may differ where paths do not.
        stored = {path: entry["name"] for path, entry in entries.items() if "name" in entry}
        abstract = {stored[path]: _target(wanted[e["name"]]) for path, e in expected.items() if "name" in e}
        arrays = {}
        if abstract:
            request = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            arrays = _attempt(lambda: self._manager.restore(step, args=request).state)
            for path, name in stored.items():
                # Without its metadata file orbax returns a typed key as plain integers.
                found = f"{arrays[name].dtype}{list(arrays[name].shape)}"
                if found != entries[path]["leaf"]:
                    raise _Damaged(f"{path} is {found}, not {entries[path]['leaf']}")
            sums = _checksums(arrays)
            bad = [path for path, name in stored.items() if sums[name] != entries[path].get("sum")]
            if bad:
                raise _Damaged(f"checksum of {', '.join(bad[:5])} differs")
        leaves = [
            arrays[stored[path]] if path in stored else _nothing(leaf)
            for path, leaf in zip(tree.leaf_paths(like), jax.tree.leaves(like), strict=True)
        ]
        return Restored(jax.tree.unflatten(jax.tree.structure(like), leaves), step, record["meta"])

    def _set_damaged_aside(self) -> None:
        """Renames what could not be read, so that it is neither taken for the newest nor counted by `keep`."""
        if not self._damaged:
            return
        if jax.process_index() == 0:
            for step in self._damaged:
                target = self.directory / f"damaged-{step}"
                if target.exists():
                    target.rmtree()
                (self.directory / str(step)).rename(target)
        multihost_utils.sync_global_devices("jaxlab.checkpoint.set_aside")
        self._damaged.clear()
        self._manager.reload()

    def wait(self) -> None:
        """Returns when everything saved so far is on disk.

        Raises:
          CheckpointError: when writing failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise CheckpointError(f"writing a checkpoint into {self.directory} failed: {error}") from error

    def close(self) -> None:
        """Waits for the last write and stops the background threads."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _steps(self) -> list[int]:
        return sorted(s for s in self._manager.all_steps() if s not in self._damaged)


_ABSENT = {"leaf": "absent"}


class _Damaged(Exception):
    """A checkpoint's files are missing or hold something else than was saved."""


def _json_sum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _attempt(read: Callable[[], Any]) -> Any:
    """Runs one orbax read; on any process' failure, all of them call the checkpoint damaged."""
    problem, result = "", None
    try:
        result = read()
    except MemoryError:
        raise
    except Exception as error:  # orbax raises bare Exception, ValueError, OSError, ... for damaged files
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    if problem:
        _collect_abandoned_reads()
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.int32(bool(problem)))
        problem = problem or ("another process could not read it" if failed.any() else "")
    if problem:
        raise _Damaged(problem)
    return result


def _collect_abandoned_reads() -> None:
    """Frees the reads that orbax abandons when one of them fails.

    Python would report each as "Exception ignored in coroutine" with pages of detail, long after the message that says
    what happened.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook


def _split(state: PyTree) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Leaves by file name, and the manifest: path -> what is there (empty containers and None included)."""
    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: not jax.tree.leaves(x))
    arrays: dict[str, Any] = {}
    entries: dict[str, dict[str, str]] = {}
    for keys, leaf in flat:
        path = tree.path_str(keys)
        if path in entries:
            raise ValueError(f"two leaves of the state have the path {path!r}")
        if leaf is None or not jax.tree.leaves(leaf):
            entries[path] = {"leaf": "None" if leaf is None else "empty"}
            continue
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(f"{path or 'the state'} must be an array, got {type(leaf).__name__}")
        entries[path] = {"leaf": f"{leaf.dtype}{list(leaf.shape)}"}
        if 0 in leaf.shape:  # nothing to store, and orbax refuses it
            continue
        name = f"{len(arrays):04d}.{re.sub(r'[^A-Za-z0-9_]+', '.', path)[-100:]}"
        arrays[name] = leaf
        entries[path]["name"] = name
    for path, text in _static(state, ()):
        entries[path] = {"leaf": text}
    return arrays, entries


def _static(node: PyTree, keys: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """(path, `checkpoint_meta`) of every node that has this text: how its arrays are to be read."""
    text = getattr(node, "checkpoint_meta", None)
    if isinstance(text, str):
        yield f"{tree.path_str(keys)} (meaning)", text
    for path, child in tree.children(node):
        if path:
            yield from _static(child, keys + path)


def _target(leaf: Any) -> Any:
    """What orbax shall restore a leaf into."""
    if isinstance(leaf, np.ndarray | np.generic):
        return np.empty(leaf.shape, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        if jax.process_count() > 1:
            raise ValueError("with several processes every leaf of `like` needs a sharding")
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _nothing(leaf: Any) -> Any:
    """An array without elements, of the shape, dtype and sharding of `leaf`."""
    target = _target(leaf)
    if isinstance(target, np.ndarray):
        return target
    return jax.jit(lambda: jnp.empty(target.shape, target.dtype), out_shardings=target.sharding)()


def _checksums(arrays: dict[str, Any]) -> dict[str, str]:
    """Per leaf, the sum over elements of bits x (1 + 2 sum_d index_d P_d) mod 2^64, as hexadecimal.

    A sum over elements with weights that depend on the global position does not depend on how the array is split over
    devices and processes, so it also proves that restoring onto other devices put every element in its place. Odd
    weights make any change of a single element visible.
    """
    totals = {}
    for name, leaf in arrays.items():
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable and jax.process_index() > 0):
            parts = [(s.data, [i.start or 0 for i in s.index]) for s in leaf.addressable_shards if s.replica_id == 0]
        else:
            # Values that every process holds are counted by the first.
            parts = [(leaf, [0] * np.ndim(leaf))] if jax.process_index() == 0 else []
        totals[name] = sum(_weighted_sum(np.asarray(data), offset) for data, offset in parts) & _MASK
    if jax.process_count() > 1:
        halves = np.array([[total & 0xFFFFFFFF, total >> 32] for total in totals.values()], np.uint32)
        rows = multihost_utils.process_allgather(halves).astype(object)
        totals = {n: int((rows[:, i, 0] + (rows[:, i, 1] << 32)).sum()) & _MASK for i, n in enumerate(totals)}
    return {name: f"{total:016x}" for name, total in totals.items()}


def _weighted_sum(block: np.ndarray, offset: list[int]) -> int:
    """The checksum's share of one block whose first element sits at `offset` of the whole array."""
    width = min(block.dtype.itemsize, 8)
    # The view splits complex128 in two along a last axis of its own, and gives everything else one of length 1.
    bits = np.ascontiguousarray(block).reshape(*block.shape, 1).view(f"u{width}")
    total = int(bits.sum(dtype=np.uint64))
    for axis, start in enumerate([*offset, 0]):
        if bits.shape[axis] == 1 and start == 0:
            continue
        # The weight is linear in the index, so the sums over all other axes suffice.
        marginal = bits.sum(axis=tuple(d for d in range(bits.ndim) if d != axis), dtype=np.uint64)
        index = np.arange(start, start + bits.shape[axis], dtype=np.uint64)
        total += 2 * pow(0x9E3779B97F4A7C15, axis + 1, 1 << 64) * int((index * marginal).sum(dtype=np.uint64))
    return total & _MASK
