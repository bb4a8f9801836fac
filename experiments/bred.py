"""Optimizer states in few bits: how much does training lose, for which optimizer, with which rounding?

Every cell (optimizer, storage, decay, seed) trains the same model on the same batches with the same hyper-parameters,
tuned in full precision on the validation part with another seed; only the way the state is stored differs. Losses are
those of the test part, and differences are paired by seed.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxlab.core import run, sweep, tree
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.errors import CheckpointError, ConfigError
from jaxlab.core.progress import NullProgress, Progress
from jaxlab.core.report import Result
from jaxlab.experiments import bred_check, bred_report, bred_run, lm
from jaxlab.nn import transformer
from jaxlab.optim import bred

BASE = "base"  # the cell that a fine-tuning run starts from


def cells(config: Any) -> list[sweep.Cell]:
    """Everything the config asks for.

    Raises:
      ConfigError: for settings that do not fit together, before anything is trained.
    """
    try:
        bred_check.whole(config)
        steps = config.finetune.steps if bred_check.finetunes(config) else config.train.steps
        found = [
            sweep.Cell({"optimizer": name, "storage": how, "decay": decay, **extra}, seed, steps, settings)
            for seed in config.seeds
            for name in config.optimizers
            for decay, settings, extra in bred_report.settings(config, name)
            for how in config.storages
        ]
        params = _abstract_params(config)
        for cell in found:
            _optimizer(config, cell)
        jax.eval_shape(_optimizer(config, found[0]).init, params)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return found


def _optimizer(config: Any, cell: sweep.Cell) -> optax.GradientTransformation:
    stacked, decay = lm.model_config(config).scan_layers, cell.settings["decay"]
    tx = bred_run.optimizer(config, cell.labels["optimizer"], cell.settings["lr"], decay, cell.steps, stacked)
    return bred_run.stored(config, tx, cell.labels["storage"])


def main(config: Any, workdir: Path) -> Result:
    """Runs every cell and reports losses, shifts against full precision, bytes, times and errors of the state."""
    todo = cells(config)
    try:
        task = lm.load_task(config)
        before, task = bred_check.split_group(config, task)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(str(error)) from error
    run.add_env(workdir, {"corpus_sha256": task.corpus_sha256})
    resume = run.resume_command(workdir)
    base = []
    if bred_check.finetunes(config) and not config.finetune.checkpoint:
        lr, decay = config.settings.adamw
        labels = {"optimizer": "adamw", "storage": "fp32", "decay": decay, "part": BASE}
        base = [sweep.Cell(labels, config.seeds[0], config.train.steps, {"lr": lr, "decay": decay})]
    everything = base + todo
    first = jax.process_index() == 0

    def train(cell: sweep.Cell, folder: Path, view: Any) -> sweep.CellResult:
        if cell in base or not bred_check.finetunes(config):
            return bred_run.train(config, before if cell in base else task, cell, folder, view, resume)
        source = Path(config.finetune.checkpoint) if config.finetune.checkpoint else workdir / "cells" / base[0].name
        return bred_run.train(config, task, cell, folder, view, resume, functools.partial(_load, config, source))

    with (Progress if first else NullProgress)(sum(cell.steps for cell in everything)) as progress:
        results = sweep.run_cells(
            everything, train, workdir, progress=progress, allow_divergence=True, facts={"corpus": task.corpus_sha256}
        )
    if not first:
        return Result("written by process 0")
    return bred_report.result(config, todo, results[len(base) :], bred_run.OPTIMIZERS)


def _load(config: Any, folder: Path) -> Any:
    """The parameters in the newest checkpoint of a cell of this experiment that was trained in full precision."""
    model = lm.model_config(config)
    params = transformer.init(model, jax.random.key(0))
    exact = bred_run.optimizer(config, "adamw", 1.0, config.settings.adamw[1], 2, model.scan_layers)
    like = bred_run.TrainState(params, jax.eval_shape(exact.init, params), ())
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"finetune.checkpoint: {folder} is no cell with checkpoints")
    with Checkpointer(folder / "checkpoints") as checkpointer:
        restored = checkpointer.restore(like)
    if restored is None:
        raise CheckpointError(f"finetune.checkpoint: {folder} holds no checkpoint")
    return jax.tree.map(jnp.asarray, restored.state.params)


def describe(config: Any) -> dict[str, Any]:
    """Sizes of one run without training: parameters, arithmetic, and bytes of the state of every kind."""
    todo = cells(config)
    model, params = lm.model_config(config), _abstract_params(config)
    tokens = config.train.batch * config.data.seq_len
    facts: dict[str, Any] = {
        "parameters": tree.size(params),
        "tokens a step": tokens,
        "FLOPs a step": transformer.flops_per_token(model, config.data.seq_len) * tokens,
    }
    for cell in {(c.labels["optimizer"], c.labels["storage"]): c for c in todo}.values():
        state = jax.eval_shape(_optimizer(config, cell).init, params)
        name = f"{bred_run.OPTIMIZERS[cell.labels['optimizer']]}, {cell.labels['storage']}"
        facts[f"state bytes, {name}"] = bred.state_bytes(state).stored
    return facts


def _abstract_params(config: Any) -> Any:
    model = lm.model_config(config)
    return jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))


if __name__ == "__main__":
    run.app(main, "bred")
