"""Settings, tables and plots of the BReD experiment."""

import math
from collections.abc import Sequence
from typing import Any

from jaxlab.core import sweep
from jaxlab.core.report import Plot, Result, Series, Table, format_interval, format_number, mean_ci

Number = int | float


def settings(config: Any, name: str) -> list[tuple[Number, dict[str, Number], dict[str, Number]]]:
    """(decay, settings, extra labels) of every run of an optimizer: the tuned point, a sweep, or all of its grid."""
    lr, decay = config.settings[name]
    if config.grid:
        _, lrs, decays = next(space for space in config.grid if space[0] == name)
        return [(b, {"lr": a, "decay": b}, {"lr": a}) for a in lrs for b in decays]
    if config.finetune.group or config.finetune.checkpoint:
        lr = lr * config.finetune.lr
    decays = tuple(config.sweep.decays) or (decay if config.settings.decay is None else config.settings.decay,)
    return [(b, {"lr": lr, "decay": b}, {}) for b in decays]


def result(
    config: Any, cells: Sequence[sweep.Cell], results: Sequence[sweep.CellResult], names: dict[str, str]
) -> Result:
    """The report of a finished sweep."""
    groups: dict[tuple, list] = {}
    for cell, res in zip(cells, results, strict=True):
        key = tuple(cell.labels.get(label) for label in ("optimizer", "decay", "lr", "storage"))
        groups.setdefault(key, []).append((cell, res))
    if config.grid:
        return _tuning(config, groups, names)
    rows, summary = [], {}
    several = len({key[1] for key in groups if key[0] == config.optimizers[0]}) > 1
    for (name, decay, lr, how), members in groups.items():
        losses = [r.values["loss"] for _, r in members]
        exact = {cell.seed: r.values["loss"] for cell, r in groups.get((name, decay, lr, "fp32"), [])}
        shifts = [r.values["loss"] - exact[cell.seed] for cell, r in members if cell.seed in exact]
        label = f"{names[name]}, decay {decay}" if several else names[name]
        rows.append([
            names[name], decay, how, _interval(losses),
            None if how == "fp32" or not shifts else _interval(shifts), None if how == "fp32" else _sem(shifts),
            members[0][1].values.get("state bytes"), _last(members, "error_m"), _last(members, "error_v"),
            min((r.values.get("ms a step", math.nan) for _, r in members), default=math.nan), len(members),
        ])  # fmt: skip
        if how != "fp32" and shifts:
            summary[f"{label}: {how} - fp32"] = sum(shifts) / len(shifts)
    columns = [
        "optimizer", "decay", "storage", "test loss", "shift against fp32", "SEM", "state bytes", "error of averages",
        "error of squares", "ms a step", "seeds",
    ]  # fmt: skip
    title = "Test loss, nats a token; shifts are paired by seed"
    notes = [
        "A cell that diverged has an infinite loss.",
        "Errors of the state: |stored - exact| / |exact| at the end, exact being full precision on the same gradients.",
        "ms a step: median of one run, the measurement of the error included; `jaxlab bench bred` compares speeds.",
    ]
    plots = _plots(groups, names, several)
    return Result(
        "Optimizer states in few bits", summary, sweep.rows(cells, results), [Table(title, columns, rows)], plots, notes
    )


def _last(members: list, error: str) -> str | None:
    found = [r.curves[error][-1] for _, r in members if r.curves.get(error)]
    return f"{sum(found) / len(found):.3f}" if found else None


def _plots(groups: dict, names: dict[str, str], several: bool) -> list[Plot]:
    plots = []
    for name, decay in dict.fromkeys((key[0], key[1]) for key in groups):
        mine = {key[3]: [r for _, r in members] for key, members in groups.items() if key[:2] == (name, decay)}
        suffix, title = (f"_{decay}", f"{names[name]}, decay {decay}") if several else ("", names[name])
        for curve, at, label in (
            ("valid", "steps", "validation loss, nats a token"), ("error_m", "error steps", "error of the averages"),
            ("error_v", "error steps", "error of the squares"),
        ):  # fmt: skip
            series = []
            for how, results in mine.items():
                curves = [r.curves[curve] for r in results if r.curves.get(curve)]
                if not curves:
                    continue
                means = [mean_ci(values) for values in zip(*curves, strict=False)]
                at_steps = next(r.curves[at] for r in results if r.curves.get(curve))[: len(means)]
                err = None if len(curves) < 2 else [half for _, half in means]
                series.append(Series(how, at_steps, [mean for mean, _ in means], err))
            if series:
                plots.append(Plot(f"{curve}_{name}{suffix}", title, "steps", label, series))
    return plots


def _tuning(config: Any, groups: dict, names: dict[str, str]) -> Result:
    """The grids, and for every optimizer the point with the lowest validation loss."""
    points, best = [], {}
    for (name, decay, lr, how), members in groups.items():
        loss = sum(r.values.get("valid", math.inf) for _, r in members) / len(members)
        row = [names[name], how, lr, decay, loss]
        points.append(row)
        if (name, how) not in best or loss < best[name, how][-1]:
            best[name, how] = row
    columns = ["optimizer", "storage", "learning rate", "decay", "validation loss"]
    return Result(
        f"Tuning on the validation part, seeds {tuple(config.seeds)}",
        {},
        [],
        [Table("Best points", columns, list(best.values())), Table("All points", columns, points)],
        [],
        [f"settings.{name} = ({row[2]}, {row[3]})" for (name, _), row in best.items()],
    )


def _interval(values: Sequence[Number]) -> str:
    return format_interval(*mean_ci(values)) if len(values) > 1 else format_number(values[0])


def _sem(values: Sequence[Number]) -> Number | None:
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
