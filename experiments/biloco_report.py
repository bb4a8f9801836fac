"""Tables and plots of the BiLoCo experiment."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxlab.core import sweep
from jaxlab.core.report import Plot, Result, Series, Table, format_interval, format_number, mean_ci
from jaxlab.experiments import biloco_decode
from jaxlab.experiments.biloco_run import METHODS


def result(
    config: Any,
    cells: Sequence[sweep.Cell],
    results: Sequence[sweep.CellResult],
    exact: dict[int, float],
    times: Mapping[str, float],
) -> Result:
    """The report of a finished run.

    Args:
      config: of the run.
      cells, results: of the methods.
      exact: test loss of the unquantised model, by seed.
      times: as `biloco_decode.measure` gives them; empty where none were measured.
    """
    names = METHODS
    groups: dict[tuple[str, int], list] = {}
    for cell, res in zip(cells, results, strict=True):
        groups.setdefault((cell.labels["method"], cell.labels["rank"]), []).append((cell, res))
    rounded = {cell.seed: res.values["error"] for cell, res in groups.get(("rtn", 0), [])}
    rows, summary = [], {}
    for (method, rank), members in groups.items():
        values = [res.values for _, res in members]
        loss = [v["loss"] for v in values if "loss" in v]
        shift = [v["loss"] - exact[cell.seed] for (cell, _), v in zip(members, values, strict=True) if "loss" in v]
        relative = [v["error"] / rounded[cell.seed] for (cell, _), v in zip(members, values, strict=True) if rounded]
        rows.append([
            names[method], rank or None, _mean(values, "bits a weight"), round(_mean(values, "bytes")),
            f"{_mean(values, 'error'):.3e}", _interval(relative) if relative else None,
            _interval(loss) if loss else None, _interval([math.exp(x) for x in loss]) if loss else None,
            _interval(shift) if shift else None,
            *(times.get(biloco_decode.name(form, method, rank)) for form in biloco_decode.FORMS),
            _mean(values, "seconds"),
        ])  # fmt: skip
        label = f"{names[method]}, rank {rank}" if rank else names[method]
        summary[f"{label}: " + ("loss" if loss else "error")] = _mean(values, "loss" if loss else "error")
    columns = [
        "method", "rank", "bits a weight", "bytes", "weighted error", "against rounding", "test loss", "perplexity",
        "loss - unquantised", "decode / bf16, packed", "decode / bf16, expanded", "seconds to quantise",
    ]  # fmt: skip
    tables = [Table(f"{config.format}, {config.rounding} rounding under corrections", columns, rows)]
    tables.append(_kinds(groups, names))
    plots = []
    for value, label in (("error", "weighted error of a layer, mean"), ("loss", "test loss, nats a token")):
        series = []
        for method in dict.fromkeys(key[0] for key in groups):
            points = sorted(
                (_mean([r.values for _, r in m], "bits a weight"), m) for k, m in groups.items() if k[0] == method
            )
            if method != "bf16" and all(value in r.values for _, m in points for _, r in m):
                heights = [_mean([r.values for _, r in m], value) for _, m in points]
                series.append(Series(names[method], [x for x, _ in points], heights))
        if series:
            plots.append(Plot(f"{value}_bits", label, "bits a weight, everything counted", label, series))
    notes = [
        "Corrections of equal rank take equal bytes; BiLoCo has about sixteen sign terms for every bfloat16 rank. Its "
        "scales and its vector are counted in that, the smoothing of SVDQuant comes on top.",
        "BiLoCo's lead grows with the bytes: sixteen sign terms take more of a residual that looks like noise than one "
        "pair of singular vectors. It is small at low ranks, where smoothing has left little but white noise, of which "
        "no code of R bits a weight can take more than 1 - 2^(-2 R). A planted low-rank part favours singular vectors: "
        "what wins there is that a share of the terms absorbs directions of W before the base is rounded.",
    ]
    if times:
        seconds = times["seconds of " + biloco_decode.name("packed", "bf16", 0)]
        notes.append(
            f"Decode: one row through all linear layers, time over that of bfloat16 weights ({1e3 * seconds:.3g} ms on "
            f"{jax.devices()[0].device_kind}), random weights of the same shapes and formats, all in turn in one "
            "process. Packed: weights as stored, by this backend's kernels (on a CPU, unpacked for every product). "
            "Expanded: unpacked once, to float32."
        )
    if not exact:
        notes.append("Without calibration data: errors are those of the weights.")
    return Result("BiLoCo", summary, sweep.rows(cells, results), tables, plots, notes)


def _kinds(groups: dict, names: dict[str, str]) -> Table:
    """Error by kind of layer: the last words of its name, numbers left out."""
    kinds: dict[str, dict[tuple[str, int], list[float]]] = {}
    for key, members in groups.items():
        for _, res in members:
            for name, value in res.values.items():
                if name.startswith("error of "):
                    words = [w for w in name.removeprefix("error of ").replace(".", "/").split("/") if not w.isdigit()]
                    kinds.setdefault("/".join(words[-3:]), {}).setdefault(key, []).append(value)
    keys = list(groups)
    columns = ["kind of layer", *(f"{names[m]}, {r}" if r else names[m] for m, r in keys)]
    rows = [
        [kind, *(f"{sum(found[k]) / len(found[k]):.3e}" if k in found else None for k in keys)]
        for kind, found in kinds.items()
    ]
    return Table("Weighted error by kind of layer", columns, rows)


def _mean(values: Sequence[Any], name: str) -> float:
    return sum(v[name] for v in values) / len(values)


def _interval(values: Sequence[float]) -> str:
    return format_interval(*mean_ci(values)) if len(values) > 1 else format_number(values[0])
