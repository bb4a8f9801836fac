"""What every language-model experiment shares: a corpus with three parts, a transformer, its loss, and a cell's run."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxlab.core import sweep
from jaxlab.core.metrics import make_writer, read_jsonl
from jaxlab.core.train import checkpoint, evaluate, fit
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


def fit_cell(
    config: Any,
    task: Task,
    state: PyTree,
    step: Callable[..., Any],
    batches: Callable[[int], PyTree],
    *,
    folder: Path,
    facts: dict[str, Any],
    key: Key[Array, ""],
    per_call: int,
    log_every: int,
    progress: Any,
    resume: str,
) -> tuple[PyTree, list[dict[str, Any]]]:
    """Trains one cell of a sweep from its newest checkpoint on, and evaluates `state.params` on the way.

    Args:
      config: with the group `train`: steps, eval_every and checkpoint_every (in intervals), writers.
      task: what the model is evaluated on.
      state: freshly initialised, with an attribute `params`; consumed.
      step: `(state, batch, key) -> (state, metrics)`.
      batches: number of the call -> batch.
      folder: the cell's own.
      facts: what a checkpoint must have been made with.
      key: root key of the training.
      per_call: optimizer steps in one call of `step`.
      log_every: calls in an interval.
      progress: the cell's part of the progress.
      resume: the command that continues the run.

    Returns:
      The final state, and the records that hold a validation loss (`valid/loss`), on process 0.
    """
    t, first = config.train, jax.process_index() == 0
    checkpointer, state, start = sweep.restore(folder, state, facts, keep=2, on_message=progress.line)
    hooks = [evaluate(lambda s: {"loss": task.evaluate(s.params, task.valid)}, t.eval_every * log_every, "valid")]
    if t.checkpoint_every:
        hooks.append(checkpoint(checkpointer, t.checkpoint_every * log_every, facts))
    kinds = dict.fromkeys(("jsonl", *t.writers)) if first else ()  # the curves are read back from the first
    with checkpointer, make_writer(folder, tuple(kinds), resume_step=start, line=progress.line) as writer:
        state = fit(
            state, step, batches, steps=t.steps // per_call, key=key, start=start, log_every=log_every, hooks=hooks,
            writer=writer, progress=progress, resume_command=resume,
        ).state  # fmt: skip
    return state, [r for r in (read_jsonl(folder / "metrics.jsonl") if first else []) if "valid/loss" in r]
