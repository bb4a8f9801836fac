"""What every language-model experiment shares: a corpus with three parts, a transformer, and its loss on windows."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxlab.data import Corpus, eval_windows, split, text
from jaxlab.data.tokens import read_tokens
from jaxlab.nn import transformer

EVAL_BATCH_TOKENS = 8192


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A corpus in three parts and a model for it.

    Attributes:
      model: the transformer's sizes.
      corpus_sha256: hash of the whole corpus.
      train: the part that is trained on.
      valid: windows `[N, T+1]` for tuning and curves.
      test: windows `[N, T+1]` for the reported losses only.
      programs: compiled training programs that several runs of an experiment share.
    """

    model: transformer.TransformerConfig
    corpus_sha256: str
    train: Corpus
    valid: Int[np.ndarray, "N window"]
    test: Int[np.ndarray, "N window"]
    programs: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    @property
    def loss_fn(self) -> Callable[[PyTree, PyTree, Key[Array, ""]], Float[Array, ""]]:
        """`(params, {"tokens": [B, T+1]}, key) -> nats a token`."""
        return lambda params, batch, key: transformer.loss(self.model, params, batch["tokens"])

    @functools.cached_property
    def evaluate(self) -> Callable[[PyTree, Int[np.ndarray, "N window"]], Float[Array, ""]]:
        """`(params, windows) -> mean nats a token`, compiled once, in chunks of about 8192 tokens."""

        def mean_loss(params, windows):
            count = max(1, EVAL_BATCH_TOKENS // (windows.shape[1] - 1))
            while windows.shape[0] % count:
                count -= 1
            chunks = windows.reshape(-1, count, windows.shape[1])
            return jnp.mean(jax.lax.map(lambda w: transformer.loss(self.model, params, w), chunks))

        return jax.jit(mean_loss)


def model_config(config: Any) -> transformer.TransformerConfig:
    """The transformer of `config.model`."""
    if config.model.preset not in transformer.PRESETS:
        raise ValueError(f"model.preset must be one of {tuple(transformer.PRESETS)}, got {config.model.preset!r}")
    options = {"remat": config.model.remat, "embedding_std": config.model.embedding_std}
    return dataclasses.replace(transformer.PRESETS[config.model.preset], **options)


def load_corpus(path: str) -> Corpus:
    """The standard library's sources for an empty path, a `.npy` token file, or the text of a file or folder."""
    if not path:
        return text.stdlib_corpus()
    corpus = read_tokens(path) if Path(path).suffix == ".npy" else text.read_files(path)
    # One long document cannot be split by documents.
    return corpus if corpus.num_documents >= 100 else corpus.chunked(max(4096, len(corpus) // 1000))


def load_task(config: Any) -> Task:
    """Reads the corpus and splits it by documents: 90 % train, 5 % validation, 5 % test.

    Raises:
      ValueError: when the model or the corpus is too small.
    """
    model, corpus = model_config(config), load_corpus(config.data.path)
    if corpus.vocab > model.vocab:
        raise ValueError(f"model.preset={config.model.preset!r} has {model.vocab} tokens, the corpus {corpus.vocab}")
    train, valid, test = split(corpus)
    windows = functools.partial(eval_windows, seq_len=config.data.seq_len, count=config.data.eval_windows)
    return Task(model, corpus.sha256, train, windows(valid), windows(test))
