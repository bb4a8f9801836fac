"""Settings, tables and plots of the low-communication experiments."""

import math
from collections.abc import Sequence
from typing import Any

from jaxlab.core import sweep
from jaxlab.core.report import Plot, Result, Series, Table, format_interval, format_number, mean_ci

Number = int | float
# (better according to the paper, what it is compared with)
PAIRS = (("diloco_sgd_isoc", "diloco_sgd"), ("isoloco", "diloco"))


def settings(config: Any, method: str, k: int, h: int) -> list[tuple[dict[str, Number], dict[str, Number]]]:
    """(settings, extra labels) of every run of a method at K and H: the tuned point, or all points of its grid."""
    if config.grid:
        lrs, etas, mus = next(space[1:] for space in config.grid if space[0] == method)
        points = [(lr, eta, mu) for lr in lrs for eta in etas for mu in mus]
        found = [{"lr": lr, "outer_lr": eta, "outer_momentum": mu} for lr, eta, mu in points]
        return [(point, point) for point in found]
    _, _, *point = _nearest(config.settings[method], k, h)
    point = dict(zip(("lr", "outer_lr", "outer_momentum"), point, strict=True))
    for name in point:
        if config.settings[name] is not None:
            point[name] = config.settings[name]
    return [(point, {})]


def _nearest(tuned: Sequence[Sequence[Number]], k: int, h: int) -> Sequence[Number]:
    """The tuned point nearest to K and H on a logarithmic scale."""
    return min(tuned, key=lambda row: abs(math.log2(row[0] / k)) + abs(math.log2(row[1] / h)))


def result(config: Any, cells: Sequence[sweep.Cell], results: Sequence[sweep.CellResult], names: dict) -> Result:
    """The report of a finished sweep."""
    if config.grid:
        return _tuning(config, cells, results, names)
    groups: dict[tuple, list] = {}
    for cell, res in zip(cells, results, strict=True):
        groups.setdefault((cell.labels["method"], cell.labels["K"], cell.labels["H"]), []).append((cell, res))
    table = Table(
        "Test loss, nats a token",
        ["method", "K", "H", "inner lr", "outer lr", "momentum", "loss", "MB sent a worker", "seeds"],
        [
            [
                names[method], k, h, *(members[0][0].settings[s] for s in ("lr", "outer_lr", "outer_momentum")),
                _interval([r.values["loss"] for _, r in members]), members[0][1].values["MB sent"], len(members),
            ]
            for (method, k, h), members in groups.items()
        ],
    )  # fmt: skip
    gaps, summary = [], {}
    for better, worse in PAIRS:
        for (method, k, h), members in groups.items():
            if method != better or (worse, k, h) not in groups:
                continue
            by_seed = {cell.seed: r.values["loss"] for cell, r in groups[worse, k, h]}
            values = [by_seed[cell.seed] - r.values["loss"] for cell, r in members if cell.seed in by_seed]
            mean, sem = _sem(values)
            shown = "one seed" if len(values) < 2 else "yes" if mean >= 0.1 and mean > 2 * sem else "no"
            gaps.append([f"{names[worse]} - {names[better]}", k, h, _interval(values), sem, len(values), shown])
            summary[f"{names[worse]} - {names[better]}, K={k}, H={h}"] = mean
    tables = [table]
    if gaps:
        columns = ["difference (above 0: the merging method is better)", "K", "H", "nats", "SEM", "seeds"]
        tables.append(Table("Gap to the averaging method", [*columns, ">= 0.1 nats and > 2 SEM"], gaps))
    return Result(
        "Low-communication training",
        summary,
        sweep.rows(cells, results),
        tables,
        _plots(groups, names),
        _untuned(config, groups, names),
    )


def _plots(groups: dict, names: dict) -> list[Plot]:
    seeds = {key: [r for _, r in members] for key, members in groups.items()}
    ks, hs = sorted({k for m, k, _ in groups if m != "dp"}), sorted({h for m, _, h in groups if m != "dp"})
    shown = [(m, k, h) for (m, k, h) in groups if m == "dp" or (k == ks[-1] and h == hs[-1])]
    plots = []
    for x, label, log in (("tokens", "tokens", False), ("MB", "megabytes sent by each worker", True)):
        series = []
        for key in shown:
            if x == "MB" and not all(r.curves["MB"][0] > 0 for r in seeds[key]):
                continue  # a single worker sends nothing
            means = [mean_ci(v) for v in zip(*(r.curves["valid"] for r in seeds[key]), strict=True)]
            err = None if len(seeds[key]) < 2 else [half for _, half in means]
            series.append(Series(names[key[0]], seeds[key][0].curves[x], [mean for mean, _ in means], err))
        if series:
            plots.append(Plot(f"loss_{x.lower()}", "Validation loss", label, "nats a token", series, logx=log))
    for axis, values, label in ((1, ks, "K, workers"), (2, hs, "H, inner steps between synchronisations")):
        if len(values) < 2:
            continue
        series, other = [], (hs if axis == 1 else ks)[-1]
        for method in dict.fromkeys(m for m, _, _ in groups):
            mine = [key for key in groups if key[0] == method and (method == "dp" or key[3 - axis] == other)]
            points = sorted((key[axis], mean_ci([r.values["loss"] for r in seeds[key]])) for key in mine)
            if method == "dp":  # does not depend on either: a level
                points = [(v, points[0][1]) for v in values]
            err = [half if math.isfinite(half) else 0.0 for _, (_, half) in points]
            series.append(Series(names[method], [v for v, _ in points], [mean for _, (mean, _) in points], err))
        plots.append(Plot(f"loss_{'KH'[axis - 1]}", "Test loss", label, "nats a token", series, logx=True))
    return plots


def _untuned(config: Any, groups: dict, names: dict) -> list[str]:
    """Says which settings were tuned at another K or H, and which come from the command line."""
    notes = []
    for method, k, h in groups:
        at_k, at_h, *_ = _nearest(config.settings[method], k, h)
        if method != "dp" and (at_k, at_h) != (k, h):
            notes.append(f"{names[method]} at K={k}, H={h} uses the settings tuned at K={at_k}, H={at_h}.")
    for name in ("lr", "outer_lr", "outer_momentum"):
        if config.settings[name] is not None:
            notes.append(f"settings.{name}={config.settings[name]} was set for all methods and not tuned.")
    return notes


def _tuning(config: Any, cells: Sequence[sweep.Cell], results: Sequence[sweep.CellResult], names: dict) -> Result:
    """The grids, and for every method, K and H the point with the lowest validation loss."""
    points, best = [], {}
    for cell, res in zip(cells, results, strict=True):
        loss = res.values.get("valid", math.inf)
        at = (cell.labels["method"], cell.labels["K"], cell.labels["H"])
        row = [names[at[0]], *at[1:], *(cell.settings[s] for s in ("lr", "outer_lr", "outer_momentum")), loss]
        points.append(row)
        if at not in best or loss < best[at][-1]:
            best[at] = row
    columns = ["method", "K", "H", "inner lr", "outer lr", "momentum", "validation loss"]
    return Result(
        f"Tuning on the validation part, seed {config.seeds[0]}",
        {},
        [],
        [Table("Best points", columns, list(best.values())), Table("All points", columns, points)],
        [],
        [f"settings.{m} = ({k}, {h}, {row[3]}, {row[4]}, {row[5]})" for (m, k, h), row in best.items()],
    )


def _interval(values: Sequence[Number]) -> str:
    return format_interval(*mean_ci(values)) if len(values) > 1 else format_number(values[0])


def _sem(values: Sequence[Number]) -> tuple[Number, Number]:
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
