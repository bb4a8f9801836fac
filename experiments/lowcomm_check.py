"""What the settings of a low-communication experiment must fulfil before anything is trained."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from jaxlab.core import prng, sweep
from jaxlab.core.errors import did_you_mean
from jaxlab.core.metrics import KINDS
from jaxlab.data import per_worker_batch
from jaxlab.experiments import lowcomm_run

UNITS = ("round", "step")
STATE_BITS = (32, 8, 4, 3)


def whole(config: Any, methods: Collection[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Checks what is not the matter of one cell, and returns the values of K and of H that are run.

    Args:
      config: of the experiment.
      methods: the names that `config.methods` may hold.

    Raises:
      ValueError: for the first key that does not fit.
    """
    ks = tuple(config.sweep.workers) or (config.lowcomm.workers,)
    hs = tuple(config.sweep.inner_steps) or (config.lowcomm.inner_steps,)
    numbers = {"workers": (ks, 1), "inner_steps": (hs, 1), "seeds": (tuple(config.seeds), 0)}
    for method in config.methods:
        if method not in methods:
            raise ValueError(f"methods must be among {tuple(methods)}, got {method!r}{did_you_mean(method, methods)}")
    for name, (values, least) in numbers.items():
        if any(type(value) is not int or value < least for value in values):
            raise ValueError(f"{name} must be integers >= {least}, got {values}")
    for name, values in {"methods": config.methods, **{name: values for name, (values, _) in numbers.items()}}.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must be one or more different values, got {tuple(values)}")
    _train(config.train)
    if config.lowcomm.fragments < 1:
        raise ValueError(f"lowcomm.fragments must be >= 1, got {config.lowcomm.fragments}")
    if config.lowcomm.state_bits not in STATE_BITS:
        raise ValueError(f"lowcomm.state_bits must be one of {STATE_BITS}, got {config.lowcomm.state_bits}")
    if config.grid:
        _grid(config.grid, config.methods)
    return ks, hs


def _train(t: Any) -> None:
    if t.unit not in UNITS:
        raise ValueError(f"train.unit must be one of {UNITS}, got {t.unit!r}")
    for name, least in (("steps", 1), ("eval_every", 1), ("checkpoint_every", 0)):
        if t[name] < least:
            raise ValueError(f"train.{name} must be >= {least}, got {t[name]}")
    for writer in t.writers:
        if writer not in KINDS:
            raise ValueError(f"train.writers: unknown metric writer {writer!r}{did_you_mean(writer, KINDS)}")
    if not 0 <= t.warmup < 1:
        raise ValueError(f"train.warmup must be in [0, 1), got {t.warmup}")
    if (rise := max(1, round(t.warmup * t.steps))) >= t.steps:
        raise ValueError(f"train.steps must be > {rise}, the steps of train.warmup={t.warmup}, got {t.steps}")
    if not 0 <= t.final_lr <= 1:
        raise ValueError(f"train.final_lr must be in [0, 1], got {t.final_lr}")
    if not 0 <= t.weight_decay < math.inf:
        raise ValueError(f"train.weight_decay must be finite and >= 0, got {t.weight_decay}")
    if not t.clip > 0:
        raise ValueError(f"train.clip must be > 0 (inf for no clipping), got {t.clip}")


def _grid(grid: Sequence[Any], methods: Sequence[str]) -> None:
    """A grid is `(method, inner learning rates, outer learning rates, outer momenta)` for every method."""
    for space in grid:
        shape = [isinstance(part, tuple) and len(part) > 0 for part in space] if isinstance(space, tuple) else []
        if shape != [False, True, True, True]:
            raise ValueError(
                "grid must hold (method, inner learning rates, outer learning rates, outer momenta) for each method, "
                f"and is set in the config file, not on the command line; got {space!r}"
            )
        for part in space[1:]:
            if any(type(value) not in (int, float) for value in part) or len(set(part)) < len(part):
                raise ValueError(f"grid must hold different numbers for {space[0]!r}, got {part}")
    missing = [method for method in methods if method not in [space[0] for space in grid]]
    if missing:
        raise ValueError(f"grid must hold a space for each of the methods, got none for {missing[0]!r}")


def cell(config: Any, cell: sweep.Cell) -> None:
    """Raises `ValueError` for settings of a cell that its training would trip over."""
    t, k, h = config.train, cell.labels["K"], cell.labels["H"]
    if t.steps % h:
        raise ValueError(f"train.steps must be a multiple of inner_steps={h}, got {t.steps}")
    if not 0 < cell.settings["lr"] < math.inf:
        raise ValueError(f"lr must be > 0 and finite, got {cell.settings['lr']}")
    per_worker_batch(t.global_batch, k)
    prng.key(cell.seed)
    lowcomm_run.worker_mesh(config.lowcomm.devices, k)
