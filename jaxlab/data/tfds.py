"""Text from tensorflow-datasets through its random-access data sources, without TensorFlow.

Needs the `data` extra (tensorflow-datasets, which brings array_record on Linux). TensorFlow is not needed, and not
imported, for data sets stored as ArrayRecord; those stored as TFRecord cannot be read without it. Preparing a data set
of the catalogue runs its own script, and some of those do need TensorFlow: prepare such a set once on another machine
with `file_format="array_record"` and give its folder as `data_dir`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxlab.core.errors import did_you_mean, require
from jaxlab.data.tokens import Corpus, from_documents


def data_source(
    name: str,
    split: str,
    *,
    data_dir: str | os.PathLike | None = None,
    text_key: str = "text",
    group_key: str | None = None,
    tokenizer: Callable[[str], Any] | None = None,
    vocab: int | None = None,
    download: bool = True,
) -> Corpus:
    """A split of a tensorflow-datasets data set as a corpus in memory; each example is a document.

    For one that does not fit in memory, stream it into a token file:
    `write_tokens(path, documents(name, split, ...), vocab)`, then `read_tokens(path)`.

    Args:
      name: the data set, such as `"ag_news_subset"` or `"wiki40b/en"`.
      split: a split, or a slice of it such as `"train[:10%]"`.
      data_dir: where prepared data sets lie; that of tensorflow-datasets by default.
      text_key: the feature with the text, or with a 1-D array of token ids.
      group_key: a feature (a label, a language) that names the group of a document; one group by default.
      tokenizer: from a `str` to token ids; by default the UTF-8 bytes are the tokens.
      vocab: the number of different token ids; needed with a tokenizer, 256 for bytes.
      download: prepare the data set when it is not there.

    Returns:
      The corpus, with documents in the order of the data source.

    Raises:
      MissingExtraError: when tensorflow-datasets is not installed.
      ValueError: when the data set, the split or a feature does not exist, or `vocab` is missing.
      RuntimeError: when it can be prepared or read with TensorFlow only.
    """
    if tokenizer is not None and vocab is None:
        raise ValueError("vocab must be given with a tokenizer: the number of different token ids")
    source = _open(name, split, data_dir, download)
    texts, groups = [], []
    for example in source:
        texts.append(_encode(_feature(example, text_key, "text_key", name), tokenizer, text_key))
        if group_key is not None:
            group = _feature(example, group_key, "group_key", name)
            groups.append(group.decode("utf-8") if isinstance(group, bytes) else str(group))
    return from_documents(
        texts,
        name=f"{name}:{split}",
        vocab=256 if vocab is None else vocab,
        groups=None if group_key is None else groups,
    )


def documents(
    name: str,
    split: str,
    *,
    data_dir: str | os.PathLike | None = None,
    text_key: str = "text",
    tokenizer: Callable[[str], Any] | None = None,
    download: bool = True,
) -> Iterator[bytes | Sequence[int] | np.ndarray]:
    """The token ids of one example after the other, for `tokens.write_tokens`; arguments as in `data_source`."""
    for example in _open(name, split, data_dir, download):
        yield _encode(_feature(example, text_key, "text_key", name), tokenizer, text_key)


def _open(name: str, split: str, data_dir: str | os.PathLike | None, download: bool) -> Any:
    tfds = require("tensorflow_datasets", extra="data")
    try:
        return tfds.data_source(
            name, split=split, data_dir=None if data_dir is None else os.fspath(data_dir), download=download
        )
    except NotImplementedError as error:  # what tensorflow-datasets raises for a TFRecord folder, or for an empty one
        raise RuntimeError(
            f"data set {name!r} is not stored as ArrayRecord in data_dir={str(data_dir)!r}, and what else it may be "
            f"stored as needs TensorFlow; prepare it with download_and_prepare(file_format='array_record'): {error}"
        ) from error
    except ModuleNotFoundError as error:
        if error.name != "tensorflow" and "tensorflow'" not in str(error):
            raise
        raise RuntimeError(
            f"preparing data set {name!r} needs TensorFlow; prepare it where that is installed, with "
            "download_and_prepare(file_format='array_record'), and give the folder as data_dir"
        ) from error


def _feature(example: dict[str, Any], key: str, argument: str, name: str) -> Any:
    if key not in example:
        raise ValueError(f"{argument}={key!r} is not a feature of data set {name!r}{did_you_mean(key, example)}")
    return example[key]


def _encode(value: Any, tokenizer: Callable[[str], Any] | None, key: str) -> Any:
    if isinstance(value, str | bytes):
        if tokenizer is None:
            return value.encode("utf-8") if isinstance(value, str) else value
        return tokenizer(value if isinstance(value, str) else value.decode("utf-8"))
    if tokenizer is not None or not isinstance(value, np.ndarray):
        raise ValueError(f"text_key={key!r} must be a text feature, got a {type(value).__name__}")
    return value
