"""Splits and worker shards of a corpus: disjoint, random access, with one integer a shard as the whole state.

A window is `seq_len + 1` consecutive tokens: inputs are its first `seq_len`, targets its last. Windows do not overlap,
so no token is in two windows. A shard is a set of windows; window number p of worker k is a pure function of (seed, k,
p), so a run resumes by knowing its step and nothing is kept. Each epoch goes through a shard in another order: a keyed
permutation of [0, W), computed for the needed positions alone, which takes no memory and no start-up time.

Source of the permutation: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), the generalised Feistel
network with cycle walking. It is arithmetic on 64-bit integers, so orders do not change with the version of NumPy.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from jaxtyping import Int32, Integer

from jaxlab.core.errors import did_you_mean
from jaxlab.data.tokens import Corpus

_KINDS = ("iid", "group", "contiguous")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 3  # each mixes both halves


def permute(index: Integer[np.ndarray, " n"], size: int, key: Integer[np.ndarray, " n"]) -> Integer[np.ndarray, " n"]:
    """Where a keyed permutation of [0, size) sends each index.

    The index is written as (l, r) with l < a, r < b and a b >= size; in turn l is moved by a hash of r modulo a, and r
    by a hash of l modulo b. Each move can be undone, so the whole is a bijection of [0, a b). A result outside of
    [0, size) goes through again until it is inside, which leaves a bijection of [0, size).

    Args:
      index: [n] in [0, size).
      size: the size of the domain.
      key: [n] which permutation to use for each index, any integers.

    Returns:
      [n] int64 in [0, size).

    >>> sorted(permute(np.arange(5), 5, np.full(5, 7)).tolist())
    [0, 1, 2, 3, 4]
    """
    rows = np.uint64(math.isqrt(size - 1) + 1)
    columns = np.uint64(-(-size // int(rows)))
    out = _network(index.astype(np.uint64), rows, columns, key.astype(np.uint64))
    while len(outside := np.flatnonzero(out >= size)):
        out[outside] = _network(out[outside], rows, columns, key.astype(np.uint64)[outside])
    return out.astype(np.int64)


def split(
    corpus: Corpus, fractions: Sequence[float] = (0.9, 0.05, 0.05), seed: int = 0, *, shuffle: bool = True
) -> tuple[Corpus, ...]:
    """Splits a corpus by documents into parts, such as train, validation and test.

    Documents are ordered by a hash of (seed, index) and cut where the parts have their share of the tokens. No
    document is in two parts, so sizes are off by up to half of the document at a cut. Copies of the same text in
    different documents are not looked for.

    Args:
      corpus: at least as many documents as parts; cut one long document with `corpus.chunked(size)` first.
      fractions: the share of each part, positive, with a sum of 1.
      seed: which split.
      shuffle: False keeps the order of the corpus: the first documents are the first part. The parts are then views,
        while shuffled parts are copied into memory.

    Returns:
      One corpus a fraction, with documents in the order of the original.

    Raises:
      ValueError: when the fractions are not positive with a sum of 1, or a part gets no document.

    >>> from jaxlab.data.tokens import from_documents
    >>> train, valid = split(from_documents([b"abcd"] * 10, name="x"), (0.8, 0.2))
    >>> len(train), len(valid)
    (32, 8)
    """
    shares = np.array(fractions, float)
    if shares.ndim != 1 or not np.all(shares > 0) or abs(shares.sum() - 1) > 1e-6:
        raise ValueError(f"fractions must be positive with a sum of 1, got {tuple(fractions)}")
    index = np.arange(corpus.num_documents)
    order = np.argsort(_mix(_fold(seed, 1) ^ index.astype(np.uint64)), kind="stable") if shuffle else index
    sizes = corpus.sizes[order]
    # Twice the middle of each document, so that everything stays an integer.
    middle = 2 * (np.cumsum(sizes) - sizes) + sizes
    cuts = np.rint(2 * len(corpus) * np.cumsum(shares)[:-1]).astype(np.int64)
    part = np.searchsorted(cuts, middle, side="right")
    parts = []
    for i, fraction in enumerate(fractions):
        documents = np.sort(order[part == i])
        if len(documents) == 0 or corpus.sizes[documents].sum() == 0:
            raise ValueError(
                f"fractions {tuple(fractions)} leave no document for part {i} ({fraction}): corpus {corpus.name!r} has "
                f"{corpus.num_documents} documents; cut long ones with corpus.chunked(size), or add more"
            )
        parts.append(corpus.select(documents))
    return tuple(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """K disjoint sets of W windows each; made by `make_shards`.

    Attributes:
      tokens: the token ids of the corpus; sorted by worker when the kind is "group".
      bases: [K] where the windows of each worker begin in `tokens`; all 0 when the kind is "iid".
      windows: W, the windows of one worker; one epoch.
      total: windows in all workers and the remainder that belongs to none ("iid" deals from all of them).
      seq_len: T; a window has T + 1 tokens.
      seed: which order (and, when "iid", which deal).
      kind: "iid", "group" or "contiguous".
      vocab: the number of different token ids.
      worker_groups: names of the document groups of each worker when the kind is "group", else empty.
    """

    tokens: np.ndarray
    bases: np.ndarray
    windows: int
    total: int
    seq_len: int
    seed: int
    kind: str
    vocab: int
    worker_groups: tuple[tuple[str, ...], ...] = ()

    @property
    def workers(self) -> int:
        """K."""
        return len(self.bases)

    def starts(
        self, workers: Integer[np.ndarray, " n"], positions: Integer[np.ndarray, " n"]
    ) -> Integer[np.ndarray, " n"]:
        """Where in `tokens` the windows at these positions of these workers begin."""
        epoch, index = np.divmod(positions, self.windows)
        index = permute(index, self.windows, _fold(self.seed, 2, workers, epoch))
        if self.kind == "iid":
            index = permute(workers * self.windows + index, self.total, _fold(self.seed, 3, np.zeros_like(index)))
        return self.bases[workers] + index * (self.seq_len + 1)

    def window(self, worker: SupportsIndex, position: SupportsIndex) -> Int32[np.ndarray, " window"]:
        """The window at a position of a worker's endless stream; each `windows` positions are one epoch.

        Args:
          worker: k in [0, K).
          position: p >= 0.

        Returns:
          [T + 1] int32 token ids.

        Raises:
          ValueError: when the worker does not exist or the position is negative.
        """
        worker, position = self._worker(worker), _at_least("position", position, 0)
        return self._gather(self.starts(np.array([worker]), np.array([position])))[0]

    def batch(
        self,
        step: SupportsIndex,
        *,
        batch_per_worker: int,
        inner_steps: int | None = None,
        workers: Sequence[int] | None = None,
    ) -> dict[str, Int32[np.ndarray, "K *inner b window"]]:
        """The windows of one step, or of one round of `inner_steps` steps, for all workers.

        Inner step s takes positions s b .. s b + b - 1 of every worker. Round r is made of the inner steps
        r H .. r H + H - 1: the same windows whether they are asked for one step at a time or as a round.

        Args:
          step: which step (or which round), from 0.
          batch_per_worker: b, windows a worker and step.
          inner_steps: H; None for a single step without the H axis.
          workers: which workers to build, such as the ones of this process; all by default.

        Returns:
          `{"tokens": [K, H, b, T + 1]}` int32, or [K, b, T + 1] when `inner_steps` is None.

        Raises:
          ValueError: when a number is below what is allowed, or a worker does not exist.
        """
        step, b = _at_least("step", step, 0), _at_least("batch_per_worker", batch_per_worker, 1)
        h = 1 if inner_steps is None else _at_least("inner_steps", inner_steps, 1)
        chosen = np.array([self._worker(w) for w in (range(self.workers) if workers is None else workers)], np.int64)
        positions = np.arange(step * h * b, (step + 1) * h * b)
        starts = self.starts(np.repeat(chosen, h * b), np.tile(positions, len(chosen)))
        shape = (len(chosen), b) if inner_steps is None else (len(chosen), h, b)
        return {"tokens": self._gather(starts).reshape(*shape, self.seq_len + 1)}

    def epochs(self, steps: SupportsIndex, *, batch_per_worker: int) -> float:
        """How many times `steps` inner steps go through a shard."""
        return steps.__index__() * batch_per_worker / self.windows

    def for_worker(self, worker: SupportsIndex) -> "Shard":
        """One worker's shard on its own."""
        return Shard(self, self._worker(worker))

    def _worker(self, worker: SupportsIndex) -> int:
        if not 0 <= (k := worker.__index__()) < self.workers:
            raise ValueError(f"worker must be in 0..{self.workers - 1}, got {k}")
        return k

    @functools.cached_property
    def _view(self) -> np.ndarray:
        return _sliding(self.tokens, self.seq_len + 1)

    def _gather(self, starts: np.ndarray) -> np.ndarray:
        return _take(self._view, starts, self.vocab)


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """The stream of one worker of `shards`, for a process that trains that worker alone."""

    shards: Shards
    worker: int

    def __len__(self) -> int:
        """Windows in an epoch."""
        return self.shards.windows

    def window(self, position: SupportsIndex) -> Int32[np.ndarray, " window"]:
        """[T + 1] the window at a position; see `Shards.window`."""
        return self.shards.window(self.worker, position)

    def batch(
        self, step: SupportsIndex, *, batch_size: int, inner_steps: int | None = None
    ) -> dict[str, Int32[np.ndarray, "*inner b window"]]:
        """`{"tokens": [b, T + 1]}`, or [H, b, T + 1] for a round; see `Shards.batch`."""
        rows = self.shards.batch(step, batch_per_worker=batch_size, inner_steps=inner_steps, workers=(self.worker,))
        return {"tokens": rows["tokens"][0]}


def make_shards(corpus: Corpus, workers: int, *, seq_len: int, split: str = "iid", seed: int = 0) -> Shards:
    """Deals the windows of a corpus to K workers: disjoint, and the same number for each.

    Windows may cross the border of two documents of the same shard. Tokens that fill no window, and windows beyond K
    equal shares, belong to no worker. Which windows a worker has depends on K, so runs with different K see the same
    corpus in different orders.

    Args:
      corpus: the (training part of the) corpus.
      workers: K >= 1.
      seq_len: T >= 1; windows have T + 1 tokens.
      split: "iid" deals the windows of the whole corpus at random; "contiguous" gives each worker one stretch of the
        corpus; "group" gives each worker whole document groups, balanced by size, so that workers see different kinds
        of text. The smallest of them then sets W; unless the groups already lie in that order the tokens are copied.
      seed: the order of the windows in each epoch, and the deal when "iid".

    Raises:
      ValueError: when a number is too small, there are fewer windows or groups than workers, or `split` is unknown.

    >>> from jaxlab.data.tokens import from_documents
    >>> shards = make_shards(from_documents([bytes(range(100))], name="x"), 2, seq_len=4)
    >>> shards.windows, shards.batch(0, batch_per_worker=3)["tokens"].shape
    (10, (2, 3, 5))
    """
    k, seq_len = _at_least("workers", workers, 1), _at_least("seq_len", seq_len, 1)
    if split not in _KINDS:
        raise ValueError(f"split must be one of {_KINDS}, got {split!r}{did_you_mean(split, _KINDS)}")
    width, bases, names = seq_len + 1, np.zeros(k, np.int64), ()
    total = len(corpus) // width
    if split == "group":
        owner, names = _deal_groups(corpus, k)
        sizes = _sum_by(owner[corpus.groups], corpus.sizes, k)
        corpus = corpus.select(np.argsort(owner[corpus.groups], kind="stable"))
        bases, windows = np.cumsum(sizes) - sizes, int(sizes.min()) // width
    else:
        windows = total // k
        if split == "contiguous":
            bases = np.arange(k) * windows * width
    if windows < 1:
        raise ValueError(
            f"workers={k} with seq_len={seq_len} is too much for corpus {corpus.name!r}: its {len(corpus)} tokens give "
            f"{total} windows of {width}, and split={split!r} leaves a worker without any"
        )
    return Shards(corpus.tokens, bases, windows, total, seq_len, seed, split, corpus.vocab, names)


def per_worker_batch(global_batch: int, workers: int) -> int:
    """b = B / K, the windows a worker takes a step.

    Raises:
      ValueError: when K does not divide B, or one of them is below 1.

    >>> per_worker_batch(32, 8)
    4
    """
    b, k = _at_least("global_batch", global_batch, 1), _at_least("workers", workers, 1)
    if b % k:
        near = sorted({max(k, b - b % k), b - b % k + k})
        raise ValueError(f"global_batch must be a multiple of workers={k}, got {b}; near: {', '.join(map(str, near))}")
    return b // k


def eval_windows(corpus: Corpus, *, seq_len: int, count: int, seed: int = 0) -> Int32[np.ndarray, "count window"]:
    """The same evenly spaced windows of a corpus every time, none overlapping, for evaluation.

    Args:
      corpus: the validation or test part.
      seq_len: T.
      count: how many windows.
      seed: moves all of them together within the gap between two.

    Returns:
      [count, T + 1] int32 token ids.

    Raises:
      ValueError: when the corpus has fewer than `count` windows, or a number is below 1.

    >>> from jaxlab.data.tokens import from_documents
    >>> eval_windows(from_documents([bytes(range(12))], name="x"), seq_len=3, count=3).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    """
    width, count = _at_least("seq_len", seq_len, 1) + 1, _at_least("count", count, 1)
    if (stride := len(corpus) // count) < width:
        raise ValueError(
            f"count must be <= {len(corpus) // width} (windows of {width} in {corpus.name!r}), got {count}"
        )
    offset = int(_fold(seed, 4)[0]) % (stride - width + 1)
    starts = offset + stride * np.arange(count)
    return _take(_sliding(corpus.tokens, width), starts, corpus.vocab)


def _deal_groups(corpus: Corpus, workers: int) -> tuple[np.ndarray, tuple[tuple[str, ...], ...]]:
    """[G] the worker of each group: the largest group left goes to the worker with the fewest tokens."""
    sizes = _sum_by(corpus.groups, corpus.sizes, len(corpus.group_names))
    present = np.flatnonzero(sizes)
    if len(present) < workers:
        raise ValueError(
            f"split='group' needs a group for each of the workers={workers}, but corpus {corpus.name!r} has "
            f"{len(present)}"
        )
    loads, owner = np.zeros(workers, np.int64), np.zeros(len(sizes), np.int64)
    for group in present[np.argsort(-sizes[present], kind="stable")]:
        owner[group] = worker = int(np.argmin(loads))
        loads[worker] += sizes[group]
    names = tuple(tuple(corpus.group_names[g] for g in present if owner[g] == w) for w in range(workers))
    return owner, names


def _sliding(tokens: np.ndarray, width: int) -> np.ndarray:
    # A view of the window at every start: indexing it copies whole windows, with no index array of their size.
    return np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), width)


def _take(view: np.ndarray, starts: np.ndarray, vocab: int) -> np.ndarray:
    rows = view[starts]
    info = np.iinfo(rows.dtype)  # the look at the ids costs time, and bytes of a vocabulary of 256 need none
    if (info.min < 0 or info.max >= vocab) and rows.size and (rows.max() >= vocab or rows.min() < 0):
        raise ValueError(f"tokens must be in [0, vocab={vocab}), got {rows.min()}..{rows.max()}")
    return rows.astype(np.int32)


def _sum_by(index: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    # np.bincount would sum in floating point.
    sums = np.zeros(length, np.int64)
    np.add.at(sums, index, values)
    return sums


def _network(x: np.ndarray, rows: np.uint64, columns: np.uint64, key: np.ndarray) -> np.ndarray:
    left, right = np.divmod(x, columns)
    for _ in range(_ROUNDS):
        # The hash is reduced first: a sum that wraps at 2^64 could not be undone.
        key = key + _GOLDEN
        left = (left + _mix(right ^ key) % rows) % rows
        right = (right + _mix(left ^ ~key) % columns) % columns
    return left * columns + right


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijective hash of 64-bit integers: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _fold(seed: int, *values: int | np.ndarray) -> np.ndarray:
    """[n] 64-bit keys from a seed and further integers; n = 1 unless some of those are [n] arrays."""
    key = np.array([seed % 2**64], np.uint64)  # never 0-d: NumPy warns when scalars wrap, arrays wrap silently
    for value in values:
        key = _mix(key * _GOLDEN + np.atleast_1d(np.asarray(value)).astype(np.uint64) + _GOLDEN)
    return key


def _at_least(name: str, value: SupportsIndex, least: int) -> int:
    if (number := value.__index__()) < least:
        raise ValueError(f"{name} must be >= {least}, got {number}")
    return number
