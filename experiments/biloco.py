"""Post-training quantisation to 4 bits with corrections: what does a byte of correction buy, as signs or as bfloat16?

A small language model is trained, calibrated on windows of its training part, and quantised with every method; the
corrections of SVDQuant and BiLoCo take the same bytes. With `weights=FILE` the matrices of a checkpoint are quantised
instead, without calibration data, and errors are those of the weights.
"""

import functools
from pathlib import Path
from typing import Any

import jax

from jaxlab.core import run, sweep, tree
from jaxlab.core.errors import ConfigError, did_you_mean
from jaxlab.core.progress import NullProgress, Progress
from jaxlab.core.report import Result
from jaxlab.experiments import biloco_decode, biloco_report, biloco_run, lm
from jaxlab.quant import gptq
from jaxlab.quant.calibrate import HESSIANS


def cells(config: Any) -> list[sweep.Cell]:
    """Everything the config asks for; methods without a correction run once a seed, at rank 0.

    Raises:
      ConfigError: for settings that do not fit together.
    """
    names = biloco_run.METHODS
    for method in config.methods:
        if method not in names:
            raise ConfigError(f"methods must be among {tuple(names)}, got {method!r}{did_you_mean(method, names)}")
    for key, allowed in (("format", gptq.BLOCKS), ("rounding", gptq.ROUNDINGS), ("hessian", HESSIANS)):
        if config[key] not in tuple(allowed):
            raise ConfigError(f"{key} must be one of {tuple(allowed)}, got {config[key]!r}")
    if config.layout not in ("out_in", "in_out"):
        raise ConfigError(f"layout must be 'out_in' or 'in_out', got {config.layout!r}")
    if config.save and config.save not in config.methods:
        raise ConfigError(f"save must be one of the methods or empty, got {config.save!r}")
    for key in ("methods", "ranks", "seeds"):
        if not config[key] or len(set(config[key])) < len(config[key]):
            raise ConfigError(f"{key} must be one or more different values, got {tuple(config[key])}")
    if any(type(r) is not int or r < 1 for r in config.ranks) or any(type(s) is not int or s < 0 for s in config.seeds):
        raise ConfigError(f"ranks must be >= 1 and seeds >= 0, got {tuple(config.ranks)} and {tuple(config.seeds)}")
    for part, key in (("train", "steps"), ("train", "batch"), ("train", "checkpoint_every"), ("data", "calibration")):
        if config[part][key] < 1:
            raise ConfigError(f"{part}.{key} must be >= 1, got {config[part][key]}")
    if config.decode < 0:
        raise ConfigError(f"decode must be >= 0, got {config.decode}")
    return [
        sweep.Cell({"method": method, "rank": rank}, seed, 1)
        for seed in config.seeds
        for method in config.methods
        for rank in (config.ranks if method in biloco_run.RANKED else (0,))
    ]


def main(config: Any, workdir: Path) -> Result:
    """Trains or reads the weights, quantises them with every method, and reports errors, bytes and losses."""
    todo = cells(config)
    return _file(config, workdir, todo) if config.weights else _model(config, workdir, todo)


def _model(config: Any, workdir: Path, todo: list[sweep.Cell]) -> Result:
    try:
        task = lm.load_task(config)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(str(error)) from error
    run.add_env(workdir, {"corpus_sha256": task.corpus_sha256})
    resume = run.resume_command(workdir)
    base = {seed: sweep.Cell({"method": "train", "rank": 0}, seed, config.train.steps) for seed in config.seeds}
    shapes = [x.shape[::-1] for x in biloco_run.abstract(config)[1]]

    @functools.cache
    def prepared(seed: int) -> tuple[Any, dict[str, Any]]:
        params = biloco_run.load_base(config, task, workdir / "cells" / base[seed].name)
        return params, biloco_run.hessians(config, task, params, seed)

    def work(cell: sweep.Cell, folder: Path, view: Any) -> sweep.CellResult:
        if cell in base.values():
            return biloco_run.train_base(config, task, cell, folder, view, resume)
        if cell.labels["method"] == "decode":
            return biloco_decode.work(config, todo, shapes)
        result, found = biloco_run.quantize_model(config, task, *prepared(cell.seed), cell, view)
        if _saved(config, cell):
            _save(config, workdir, found)
        return result

    todo = [sweep.Cell(c.labels, c.seed, len(shapes)) for c in todo]
    everything = [*base.values(), *todo, *biloco_decode.cells(config)]
    with Progress(sum(cell.steps for cell in everything)) as progress:
        results = sweep.run_cells(everything, work, workdir, progress=progress, facts={"corpus": task.corpus_sha256})
    exact = {seed: r.values["loss"] for seed, r in zip(base, results, strict=False)}
    times = results[-1].values if config.decode else {}
    return biloco_report.result(config, todo, results[len(base) : len(base) + len(todo)], exact, times)


def _file(config: Any, workdir: Path, todo: list[sweep.Cell]) -> Result:
    try:
        shapes = biloco_run.matrix_shapes(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    def work(cell: sweep.Cell, folder: Path, view: Any) -> sweep.CellResult:
        if cell.labels["method"] == "decode":
            return biloco_decode.work(config, todo, list(shapes.values()))
        kept: dict[str, Any] = {}
        keep = kept.__setitem__ if _saved(config, cell) else lambda name, layer: None
        try:
            result, _ = biloco_run.quantize_file(config, cell, view, keep)
        except ValueError as error:  # NaN, or a matrix too small for the rank: the message names it
            raise ConfigError(str(error)) from error
        if kept:
            _save(config, workdir, kept)
        return result

    todo = [sweep.Cell(c.labels, c.seed, len(shapes)) for c in todo if c.seed == config.seeds[0]]
    everything = [*todo, *biloco_decode.cells(config)]
    with (Progress if jax.process_index() == 0 else NullProgress)(sum(cell.steps for cell in everything)) as progress:
        results = sweep.run_cells(everything, work, workdir, progress=progress, facts={"weights": str(config.weights)})
    times = results[-1].values if config.decode else {}
    return biloco_report.result(config, todo, results[: len(todo)], {}, times)


def _saved(config: Any, cell: sweep.Cell) -> bool:
    best = max(config.ranks) if config.save in biloco_run.RANKED else 0
    return (cell.labels["method"], cell.labels["rank"], cell.seed) == (config.save, best, config.seeds[0])


def _save(config: Any, workdir: Path, layers: dict[str, biloco_run.Layer]) -> None:
    meta = {"method": config.save, "format": config.format, "layout": "out_in", "written_by": "jaxlab"}
    arrays = {name: layer.arrays for name, layer in layers.items()}
    biloco_run.save(workdir / "quantized.safetensors", arrays, meta)


def describe(config: Any) -> dict[str, Any]:
    """Sizes without training: parameters, and the matrices that are quantised."""
    cells(config)
    if config.weights:
        return {"matrices": len(biloco_run.matrix_shapes(config))}
    params, kernels = biloco_run.abstract(config)
    return {"parameters": tree.size(params), "matrices": len(kernels), "weights quantised": tree.size(kernels)}


if __name__ == "__main__":
    run.app(main, "biloco")
