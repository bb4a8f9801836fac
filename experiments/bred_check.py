"""What the settings of the BReD experiment must fulfil before anything is trained, and its two corpora."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxlab.core import prng
from jaxlab.core.errors import did_you_mean
from jaxlab.core.metrics import KINDS
from jaxlab.data import Corpus, eval_windows, split
from jaxlab.experiments import bred_run, lm


def finetunes(config: Any) -> bool:
    """Whether the runs go on from a checkpoint."""
    return bool(config.finetune.group or config.finetune.checkpoint)


def whole(config: Any) -> None:
    """Checks every key.

    Raises:
      ValueError: for the first one that does not fit.
    """
    for name in config.optimizers:
        if name not in bred_run.OPTIMIZERS:
            options = tuple(bred_run.OPTIMIZERS)
            raise ValueError(f"optimizers must be among {options}, got {name!r}{did_you_mean(name, options)}")
    for name in config.storages:
        bred_run.storage(name)
    for name in ("optimizers", "storages", "seeds"):
        if not config[name] or len(set(config[name])) < len(config[name]):
            raise ValueError(f"{name} must be one or more different values, got {tuple(config[name])}")
    for seed in config.seeds:
        if type(seed) is not int or seed < 0:
            raise ValueError(f"seeds must be integers >= 0, got {tuple(config.seeds)}")
    t, f = config.train, config.finetune
    for name, value, least in (
        ("train.steps", t.steps, 1), ("train.batch", t.batch, 1), ("train.eval_every", t.eval_every, 1),
        ("train.checkpoint_every", t.checkpoint_every, 0), ("finetune.steps", f.steps, 1),
        ("bred.min_size", config.bred.min_size, 0),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}")
    for writer in t.writers:
        if writer not in KINDS:
            raise ValueError(f"train.writers: unknown metric writer {writer!r}{did_you_mean(writer, KINDS)}")
    if not 0 <= t.warmup < 1:
        raise ValueError(f"train.warmup must be in [0, 1), got {t.warmup}")
    if not 0 <= t.final_lr <= 1:
        raise ValueError(f"train.final_lr must be in [0, 1], got {t.final_lr}")
    if not 0 <= t.weight_decay < math.inf:
        raise ValueError(f"train.weight_decay must be finite and >= 0, got {t.weight_decay}")
    if not t.clip > 0:
        raise ValueError(f"train.clip must be > 0 (inf for no clipping), got {t.clip}")
    if not 0 < f.lr < math.inf:
        raise ValueError(f"finetune.lr must be > 0 and finite, got {f.lr}")
    if finetunes(config) and not f.checkpoint and t.checkpoint_every == 0:
        raise ValueError("train.checkpoint_every must be > 0 where a checkpoint is trained first, got 0")
    _decays(config)
    prng.key(config.bred.seed)
    bred_run.data_mesh(config)


def _decays(config: Any) -> None:
    given = [*config.sweep.decays, *(pair[1] for pair in _pairs(config)), *_grid_decays(config)]
    for decay in [*given, *([] if config.settings.decay is None else [config.settings.decay])]:
        if not 0 < decay < 1:
            raise ValueError(f"decays must be in (0, 1), got {decay}")
    for lr in [pair[0] for pair in _pairs(config)] + [lr for space in config.grid for lr in space[1]]:
        if not 0 < lr < math.inf:
            raise ValueError(f"learning rates must be > 0 and finite, got {lr}")


def _pairs(config: Any) -> list[tuple[float, float]]:
    pairs = [config.settings[name] for name in config.optimizers]
    for name, pair in zip(config.optimizers, pairs, strict=True):
        if len(pair) != 2:
            raise ValueError(f"settings.{name} must be (learning rate, decay), got {tuple(pair)}")
    return pairs


def _grid_decays(config: Any) -> list[float]:
    missing = [name for name in config.optimizers if config.grid and name not in [space[0] for space in config.grid]]
    if missing:
        raise ValueError(f"grid must hold a space for each of the optimizers, got none for {missing[0]!r}")
    return [decay for space in config.grid for decay in space[2]]


def split_group(config: Any, task: lm.Task) -> tuple[lm.Task, lm.Task]:
    """The tasks before and after the checkpoint: the corpus without a group of documents, and that group alone.

    Raises:
      ValueError: when the corpus has no such group, or nothing else.
    """
    group = config.finetune.group
    if not group:
        return task, task
    corpus = lm.load_corpus(config.data.path)
    if group not in corpus.group_names:
        raise ValueError(f"finetune.group: the corpus has no {group!r}{did_you_mean(group, corpus.group_names)}")
    inside = corpus.groups == corpus.group_names.index(group)
    if inside.all():
        raise ValueError(f"finetune.group: the corpus is nothing but {group!r}, so there is nothing to train on before")
    parts = corpus.select(np.flatnonzero(~inside)), corpus.select(np.flatnonzero(inside))
    before, after = (_task(config, task, part) for part in parts)
    return before, after


def _task(config: Any, task: lm.Task, corpus: Corpus) -> lm.Task:
    # A package has few documents: pieces of them can be dealt to the three parts.
    corpus = corpus if corpus.num_documents >= 100 else corpus.chunked(max(4096, len(corpus) // 100))
    train, valid, test = split(corpus)
    windows = [
        eval_windows(part, seq_len=config.data.seq_len, count=config.data.eval_windows) for part in (valid, test)
    ]
    return dataclasses.replace(task, train=train, valid=windows[0], test=windows[1], programs={})
