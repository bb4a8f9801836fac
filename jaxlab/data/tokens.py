"""The corpus: one flat array of token ids plus where its documents start; and token files on disk.

A token file is an ordinary `.npy` vector of token ids, so anything that writes NumPy files can make one. Beside it an
optional `NAME.documents.npz` holds the document starts, their groups and the vocabulary size.
"""

import dataclasses
import functools
import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Integer

MAX_VOCAB = 2**31  # batches are int32
_CHUNK = 1 << 24  # tokens looked at in one go, so that a memory-mapped file never has to fit in memory
_NPY_HEADER = 128  # bytes; room for any length, so that the header can be written after the tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Documents of token ids, concatenated.

    Document i is `tokens[starts[i]:starts[i + 1]]`, the last one runs to the end. Nothing separates the documents.

    Attributes:
      tokens: [N] token ids, an integer array or memory map, each in [0, vocab).
      starts: [D] document starts, sorted, `starts[0] == 0`.
      groups: [D] the group of each document, an index into `group_names`.
      group_names: the groups (packages, folders, domains).
      name: what the corpus is, for reports.
      vocab: the number of different token ids; 256 for bytes.

    >>> corpus = Corpus(np.arange(10, dtype=np.uint8), np.array([0, 4]), np.array([0, 1]), ("a", "b"), "ten", 16)
    >>> len(corpus), corpus.num_documents, corpus.document(0).tolist()
    (10, 2, [0, 1, 2, 3])
    """

    tokens: np.ndarray
    starts: np.ndarray
    groups: np.ndarray
    group_names: tuple[str, ...]
    name: str
    vocab: int = 256

    def __post_init__(self):
        for field in ("tokens", "starts", "groups"):
            value = getattr(self, field)
            if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
                raise TypeError(f"{field} must be a 1-D integer NumPy array, got {_describe(value)}")
        if len(self.tokens) == 0:
            raise ValueError(f"tokens must not be empty (corpus {self.name!r})")
        if not 1 <= self.vocab <= MAX_VOCAB:
            raise ValueError(f"vocab must be in 1..{MAX_VOCAB}, got {self.vocab}")
        starts = self.starts.astype(np.int64)
        if len(starts) == 0 or starts[0] != 0 or np.any(np.diff(starts) < 0) or starts[-1] > len(self.tokens):
            raise ValueError(
                f"starts must be sorted, begin with 0 and end within {len(self.tokens)} tokens, got {starts}"
            )
        if len(self.groups) != len(starts):
            raise ValueError(
                f"groups must have one entry for each of the {len(starts)} documents, got {len(self.groups)}"
            )
        if self.groups.min() < 0 or self.groups.max() >= len(self.group_names):
            raise ValueError(f"groups must index the {len(self.group_names)} group_names, got {self.groups.max()}")
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "group_names", tuple(str(name) for name in self.group_names))

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.starts)

    @functools.cached_property
    def sizes(self) -> Integer[np.ndarray, " D"]:
        """Tokens in each document."""
        return np.diff(self.starts, append=len(self.tokens))

    @functools.cached_property
    def sha256(self) -> str:
        """Hex digest of the token ids and the document starts, little-endian; reads the whole corpus once."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.starts):
            for begin in range(0, len(array), _CHUNK):
                chunk = np.ascontiguousarray(array[begin : begin + _CHUNK])
                digest.update(chunk.astype(chunk.dtype.newbyteorder("<"), copy=False).data)
        return digest.hexdigest()

    def document(self, index: SupportsIndex) -> Integer[np.ndarray, " n"]:
        """The tokens of one document, without copying."""
        index = range(self.num_documents)[index]
        return self.tokens[self.starts[index] : self.starts[index] + self.sizes[index]]

    def select(self, documents: Sequence[int] | Integer[np.ndarray, " n"], name: str | None = None) -> "Corpus":
        """A corpus of some of the documents, in the order given.

        Documents that follow each other in the corpus stay a view of it; any other choice is copied into memory.

        Raises:
          ValueError: when `documents` is empty or holds no tokens.
          TypeError: when they are not integers; a boolean mask is not one either.
          IndexError: when one of them does not exist.
        """
        documents = np.asarray(documents)
        if documents.size == 0:
            raise ValueError(f"documents must name at least one document of corpus {self.name!r}, got none")
        if documents.ndim != 1 or documents.dtype.kind not in "iu":
            raise TypeError(f"documents must be a 1-D sequence of integers, got {_describe(documents)}")
        bad = documents[(documents < -self.num_documents) | (documents >= self.num_documents)]
        if bad.size:
            raise IndexError(f"documents must be below {self.num_documents}, or count from the end, got {bad[0]}")
        # Counted from the start, because only then are documents that follow each other neighbours.
        documents = documents.astype(np.int64) % self.num_documents
        sizes = self.sizes[documents]
        if np.all(np.diff(documents) == 1):
            begin = self.starts[documents[0]]
            tokens = self.tokens[begin : begin + sizes.sum()]
        else:
            tokens = np.concatenate([self.document(i) for i in documents])
        starts = np.cumsum(sizes) - sizes
        return dataclasses.replace(
            self, tokens=tokens, starts=starts, groups=self.groups[documents], name=self.name if name is None else name
        )

    def chunked(self, size: int) -> "Corpus":
        """The same tokens with every document cut into documents of at most `size` tokens, for one long file.

        >>> one = Corpus(np.arange(10, dtype=np.uint8), np.array([0]), np.array([0]), ("",), "ten")
        >>> one.chunked(4).starts.tolist()
        [0, 4, 8]

        Raises:
          ValueError: when `size` is below 1.
        """
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}")
        pieces = np.maximum(-(-self.sizes // size), 1)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(self.starts, pieces) + (np.arange(pieces.sum()) - first) * size
        return dataclasses.replace(self, starts=starts, groups=np.repeat(self.groups, pieces))


def from_documents(
    documents: Iterable[Any], *, name: str, vocab: int = 256, groups: Sequence[str] | None = None
) -> Corpus:
    """A corpus in memory from separate documents.

    Args:
      documents: each a bytes object or a sequence of token ids.
      name: what the corpus is.
      vocab: the number of different token ids.
      groups: the name of each document's group; all in one group by default.

    Raises:
      ValueError: when there are no tokens, or an id is not in [0, vocab); the document is named.

    >>> corpus = from_documents([b"one", b"two"], name="pair", groups=["a", "b"])
    >>> corpus.starts.tolist(), corpus.group_names
    ([0, 3], ('a', 'b'))
    """
    arrays = [_ids(document, i, vocab) for i, document in enumerate(documents)]
    if sum(map(len, arrays)) == 0:
        raise ValueError(f"documents of corpus {name!r} hold no tokens")
    sizes = np.array([len(a) for a in arrays], np.int64)
    names, index = _number_groups(groups, len(arrays))
    return Corpus(np.concatenate(arrays), np.cumsum(sizes) - sizes, index, names, name, vocab)


def write_tokens(
    path: str | os.PathLike,
    documents: Iterable[Any],
    vocab: int,
    *,
    groups: Sequence[str] | None = None,
    name: str = "",
) -> Path:
    """Writes a token file and its sidecar, one document at a time, so that the whole never has to fit in memory.

    Token ids take the smallest of one, two or four bytes that holds `vocab`. A file appears only when it is complete.

    Args:
      path: the file to write, ending in `.npy`.
      documents: an iterable of documents, each a bytes object or a sequence of token ids.
      vocab: the number of different token ids.
      groups: the name of each document's group; all in one group by default.
      name: what the corpus is; the file's name by default.

    Returns:
      The path written.

    Raises:
      ValueError: when the path does not end in `.npy`, there are no tokens, or an id is not in [0, vocab).
    """
    path = _npy_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    sizes = []
    try:
        with open(partial, "wb") as file:
            file.write(bytes(_NPY_HEADER))
            for i, document in enumerate(documents):
                ids = _ids(document, i, vocab)
                sizes.append(len(ids))
                file.write(ids.astype(ids.dtype.newbyteorder("<"), copy=False).data)
            if sum(sizes) == 0:
                raise ValueError(f"documents must hold at least one token, got {len(sizes)} documents without any")
            names, index = _number_groups(groups, len(sizes))
            file.seek(0)
            file.write(_npy_header(_token_dtype(vocab), sum(sizes)))
        sizes = np.array(sizes, np.int64)
        side = sidecar(path)
        side_partial = side.with_name(side.name + ".partial.npz")
        np.savez(
            side_partial,
            starts=np.cumsum(sizes) - sizes,
            groups=index,
            group_names=np.array(names),
            vocab=vocab,
            length=sizes.sum(),
            name=name or path.stem,
        )
        os.replace(side_partial, side)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_tokens(path: str | os.PathLike, *, vocab: int | None = None, check: bool = True) -> Corpus:
    """Opens a token file, memory-mapped.

    Args:
      path: a `.npy` file with a 1-D integer array. Without a sidecar it is one document.
      vocab: the number of different token ids. It must agree with the sidecar where there is one. Without either it
        is the largest id in the file plus one.
      check: read the file once (about a gigabyte a second) to see that every id is in [0, vocab). Accelerators clamp
        an id that is too large to the last row of an embedding without a word, so leave this out only for a file
        that was checked before.

    Raises:
      FileNotFoundError: when there is no such file.
      TypeError: when the array is not a 1-D array of integers.
      ValueError: when an id or `vocab` does not fit, or the sidecar is damaged or belongs to another file.
    """
    path = _npy_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no token file at {path}; write one with write_tokens(path, documents, vocab)")
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a complete .npy file of numbers: {error}") from error
    if not isinstance(tokens, np.ndarray):
        tokens.close()
        raise ValueError(f"{path} is not a .npy file of numbers: it is an .npz archive of several arrays")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(f"{path} must hold a 1-D integer array, got {_describe(tokens)}")
    if len(tokens) == 0:
        raise ValueError(f"{path} holds no tokens")
    fields = {"starts": np.zeros(1, np.int64), "groups": np.zeros(1, np.int32), "group_names": ("",), "name": path.stem}
    if sidecar(path).is_file():
        length, written, fields = _read_sidecar(sidecar(path))
        if length != len(tokens):
            raise ValueError(f"{sidecar(path)} describes {length} tokens, but {path} holds {len(tokens)}")
        if vocab is not None and vocab != written:
            raise ValueError(f"vocab must be {written}, as {path} was written with, got {vocab}")
        vocab = written
    if vocab is None and not check:
        raise ValueError(f"vocab must be given when check=False and {path} has no sidecar")
    if check:
        low, high = _extremes(tokens)
        vocab = high + 1 if vocab is None else vocab
        if low < 0 or high >= vocab:
            raise ValueError(f"{path} must hold ids in [0, {vocab}), got {low}..{high}")
    return Corpus(tokens, vocab=vocab, **fields)


def sidecar(path: str | os.PathLike) -> Path:
    """Where the document starts of a token file are kept.

    >>> sidecar("data/wiki.npy").name
    'wiki.documents.npz'
    """
    return Path(path).with_suffix(".documents.npz")


def _read_sidecar(path: Path) -> tuple[int, int, dict[str, Any]]:
    """(number of tokens, vocabulary size, the other fields of the corpus)."""
    try:
        with np.load(path, allow_pickle=False) as side:
            names = tuple(map(str, side["group_names"]))
            fields = {"starts": side["starts"], "groups": side["groups"], "group_names": names}
            return int(side["length"]), int(side["vocab"]), fields | {"name": str(side["name"])}
    # NumPy and zipfile do not agree on how they call a damaged file.
    except (ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged or not a sidecar that write_tokens wrote ({type(error).__name__}: {error}); "
            "write the token file again"
        ) from error


def _token_dtype(vocab: int) -> np.dtype:
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"vocab must be in 1..{MAX_VOCAB}, got {vocab}")
    return np.dtype(np.uint8 if vocab <= 2**8 else np.uint16 if vocab <= 2**16 else np.uint32)


def _ids(document: Any, index: int, vocab: int) -> np.ndarray:
    dtype = _token_dtype(vocab)
    if isinstance(document, bytes | bytearray | memoryview):
        ids = np.frombuffer(document, np.uint8)
    else:
        ids = np.asarray(document)
        if ids.size == 0:
            return np.empty(0, dtype)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"document {index} must be bytes or a 1-D sequence of integers, got {_describe(ids)}")
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
        raise ValueError(f"document {index} must hold ids in [0, {vocab}), got {ids.min()}..{ids.max()}")
    return ids.astype(dtype, copy=False)


def _number_groups(groups: Sequence[str] | None, count: int) -> tuple[tuple[str, ...], np.ndarray]:
    if groups is None:
        return ("",), np.zeros(count, np.int32)
    if len(groups) != count:
        raise ValueError(f"groups must name the group of each of the {count} documents, got {len(groups)} names")
    names, index = np.unique(np.array(groups, str), return_inverse=True)
    return tuple(map(str, names)), index.astype(np.int32)


def _extremes(tokens: np.ndarray) -> tuple[int, int]:
    parts = [tokens[begin : begin + _CHUNK] for begin in range(0, len(tokens), _CHUNK)]
    return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)


def _npy_path(path: str | os.PathLike) -> Path:
    path = Path(path)
    if path.suffix != ".npy":
        raise ValueError(f"path must end in .npy, got {str(path)!r}")
    return path


def _npy_header(dtype: np.dtype, length: int) -> bytes:
    """An .npy header of fixed size, which NumPy's own writer does not promise."""
    fields = repr({"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (length,)})
    prefix = np.lib.format.magic(1, 0) + struct.pack("<H", _NPY_HEADER - 10)
    return prefix + fields.encode("latin1").ljust(_NPY_HEADER - 11) + b"\n"


def _describe(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return f"a {type(value).__name__}"
    return f"an array of dtype {value.dtype} and shape {value.shape}"
