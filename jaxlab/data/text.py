"""Text as bytes: the running Python's own standard library, or local files. No download, no tokenizer."""

import fnmatch
import os
import sys
import sysconfig
import zipfile
from pathlib import Path, PurePosixPath

import numpy as np

from jaxlab.data.tokens import Corpus, from_documents

# Tests are half of the library and mostly repetition; `encodings` is tables; the others are programs, not modules.
_EXCLUDED = frozenset({"test", "tests", "idlelib", "encodings", "turtledemo", "site-packages", "dist-packages"})
_EXCLUDED |= {"__pycache__", "idle_test"}
_MAP_ABOVE = 1 << 26  # bytes; a single larger file is memory-mapped instead of read


def stdlib_corpus(path: str | os.PathLike | None = None) -> Corpus:
    """The source code of CPython's standard library, as bytes: a text corpus that every Python brings along.

    Documents are `.py` files in the order of their paths; a document's group is its top-level package or module.
    Left out are tests, `encodings`, `idlelib`, `turtledemo` and whatever is not a standard module (packages that were
    installed, build configuration). About 9 MB in 700 files; it differs between Python versions, so record `sha256`.

    Args:
      path: a standard library folder or zip file; the running interpreter's by default.

    Raises:
      FileNotFoundError: when there are no sources, as in some embedded Pythons.

    >>> corpus = stdlib_corpus()
    >>> corpus.vocab, "asyncio" in corpus.group_names, len(corpus) > 5_000_000
    (256, True, True)
    """
    places = [Path(path)] if path is not None else _stdlib_places()
    for place in places:
        files = _zip_sources(place) if zipfile.is_zipfile(place) else _folder_sources(place)
        if files:
            break
    else:
        raise FileNotFoundError(
            f"no standard library sources in {', '.join(map(str, places))}; this Python comes without them. "
            "Give a text file or folder of your own instead: jaxlab.data.text.read_files(path)"
        )
    names = sorted(files)
    groups = [PurePosixPath(name).parts[0].removesuffix(".py") for name in names]
    version = f" {sys.version_info.major}.{sys.version_info.minor}" if path is None else ""
    return from_documents([files[name] for name in names], groups=groups, name=f"python standard library{version}")


def read_files(path: str | os.PathLike, pattern: str = "*") -> Corpus:
    """Local files as bytes, whatever they hold; text is taken as the UTF-8 (or other) bytes it is stored in.

    Args:
      path: one file, or a folder that is searched with its sub-folders. Of a folder each file is a document, in the
        order of their paths, and its group is the sub-folder of `path` that it lies in (`"."` for none). Empty files,
        hidden files and hidden folders are left out. One file is one document; see `Corpus.chunked` to split it.
        A single file above 64 MiB is memory-mapped.
      pattern: shell pattern for file names in a folder, such as `"*.txt"`.

    Raises:
      FileNotFoundError: when `path` does not exist, or no file matches.
      ValueError: when the file is empty, or all of them are.
    """
    path = Path(path)
    if path.is_file():
        size = path.stat().st_size
        if size == 0:
            raise ValueError(f"path must hold some text, but {path} is empty")
        tokens = np.memmap(path, np.uint8, "r") if size > _MAP_ABOVE else np.fromfile(path, np.uint8)
        return Corpus(tokens, np.zeros(1, np.int64), np.zeros(1, np.int32), (".",), path.name)
    if not path.is_dir():
        raise FileNotFoundError(f"path must be a file or a folder, but there is none at {path}")
    names = []
    for folder, folders, files in os.walk(path):
        folders[:] = [f for f in folders if not f.startswith(".")]
        here = Path(folder).relative_to(path)
        names += [(here / f).as_posix() for f in fnmatch.filter(files, pattern) if not f.startswith(".")]
    if not names:
        raise FileNotFoundError(f"pattern {pattern!r} matches no file in {path}")
    documents = {name: text for name in sorted(names) if (text := (path / name).read_bytes())}
    if not documents:
        raise ValueError(f"all {len(names)} files that match {pattern!r} in {path} are empty")
    groups = [name.split("/")[0] if "/" in name else "." for name in documents]
    return from_documents(documents.values(), groups=groups, name=path.resolve().name)


def _stdlib_places() -> list[Path]:
    folder = sysconfig.get_path("stdlib")
    zips = [Path(p) for p in sys.path if p.endswith(".zip") and os.path.isfile(p)]
    return ([Path(folder)] if folder else []) + zips


def _wanted(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return (
        name.endswith(".py")
        and parts[0].removesuffix(".py") in sys.stdlib_module_names
        and _EXCLUDED.isdisjoint(parts[:-1])
    )


def _folder_sources(root: Path) -> dict[str, bytes]:
    files = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _EXCLUDED]
        for name in names:
            file = Path(folder, name)
            if _wanted(relative := file.relative_to(root).as_posix()) and (text := file.read_bytes()):
                files[relative] = text
    return files


def _zip_sources(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: text for name in archive.namelist() if _wanted(name) and (text := archive.read(name))}
