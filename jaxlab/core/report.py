"""What a run found, as data: written to `report.md`, PNG plots and `result.json`, read back, and compared over seeds.

An experiment returns a `Result`. Its `rows` are the measurements that comparisons use: one row a setting and seed. The
tables and plots are what the report shows. Only the standard library is imported until a plot is drawn.
"""

import dataclasses
import functools
import io
import itertools
import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from jaxlab.core.metrics import atomic_write

FORMAT = 1  # of result.json


def _plain(value: Any) -> Any:
    """A numpy or jax scalar as the Python number it holds; anything else unchanged."""
    return value.item() if hasattr(value, "item") and not isinstance(value, (str, int, float)) else value


def _plain_items(what: str, items: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping to strings and Python numbers, or an error that names the item."""
    plain = {name: _plain(value) for name, value in items.items()}
    for name, value in plain.items():
        if not isinstance(value, (str, int, float)):
            raise TypeError(f"{what} {name!r} must be a string or a number, got {type(value).__name__}")
    return plain


def _set(instance: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(instance, name, value)  # frozen dataclasses are filled in this way after __init__


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: the values that one setting gave with one seed.

    Attributes:
      labels: the setting, such as `{"method": "isoloco", "K": 8}`; rows with equal labels are repetitions.
      seed: the seed.
      values: the numbers measured.

    >>> Row({"method": "adamw"}, 0, {"loss": 2})
    Row(labels={'method': 'adamw'}, seed=0, values={'loss': 2.0})
    """

    labels: Mapping[str, Any]
    seed: int
    values: Mapping[str, SupportsFloat]

    def __post_init__(self) -> None:
        values = {name: float(value) for name, value in self.values.items()}
        _set(self, labels=_plain_items("label", self.labels), values=values)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of strings and numbers; None is an empty cell.

    Attributes:
      title: its heading; may be empty.
      columns: the column heads.
      rows: one sequence of cells a row, as long as `columns`.

    Raises:
      ValueError: when a row has another length.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        rows = [[_plain(cell) for cell in row] for row in self.rows]
        for index, row in enumerate(rows):
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: {len(row)} cells in row {index}, {len(self.columns)} columns")
            for cell in row:
                if cell is not None and not isinstance(cell, (str, int, float)):
                    raise TypeError(f"table {self.title!r}: row {index} holds a {type(cell).__name__}: {cell!r}")
        _set(self, columns=list(self.columns), rows=rows)


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
      label: its name in the legend.
      x: positions.
      y: heights, as many.
      err: half-widths of the error band, as many, or None for no band.

    Raises:
      ValueError: when the lengths differ.
    """

    label: str
    x: Iterable[SupportsFloat]
    y: Iterable[SupportsFloat]
    err: Iterable[SupportsFloat] | None = None

    def __post_init__(self) -> None:
        x, y = [float(v) for v in self.x], [float(v) for v in self.y]
        err = None if self.err is None else [float(v) for v in self.err]
        if len(x) != len(y) or (err is not None and len(err) != len(y)):
            lengths = f"x {len(x)}, y {len(y)}" + ("" if err is None else f", err {len(err)}")
            raise ValueError(f"series {self.label!r}: lengths must agree, got {lengths}")
        _set(self, x=x, y=y, err=err)


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure of curves over common axes.

    Attributes:
      name: its file name without `.png`: letters, digits, `_`, `-` and `.`.
      title: its heading.
      xlabel: what x is, with its unit.
      ylabel: what y is, with its unit.
      series: the curves.
      logx: logarithmic x axis.
      logy: logarithmic y axis.

    Raises:
      ValueError: when `name` cannot be a file name.
    """

    name: str
    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    logx: bool = False
    logy: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"plot name must consist of letters, digits, '_', '-' and '.', got {self.name!r}")
        _set(self, series=list(self.series))


@dataclasses.dataclass(frozen=True)
class Result:
    """What an experiment found.

    Attributes:
      title: the report's heading.
      summary: the few numbers or words that matter.
      rows: all measurements, one a setting and seed.
      tables: shown in the report.
      plots: shown in the report.
      notes: one paragraph each.

    Raises:
      ValueError: when two plots have the same name.
    """

    title: str
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: Sequence[Row] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = [plot.name for plot in self.plots]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"plot names must differ, {twice[0]!r} is used {len(twice)} times")
        lists = {name: list(getattr(self, name)) for name in ("rows", "tables", "plots", "notes")}
        _set(self, summary=_plain_items("summary", self.summary), **lists)


def format_number(value: str | SupportsFloat | None, digits: int = 4) -> str:
    """A number for a table: integers in full, others to `digits` significant digits; strings stay, None is empty.

    Args:
      value: what to show.
      digits: significant digits, >= 1.

    >>> [format_number(v) for v in (163840, 1.23456, 0.000012345, 12345678.9, float("nan"), "svd", None)]
    ['163840', '1.235', '1.234e-05', '1.235e+07', 'nan', 'svd', '']
    """
    if value is None or isinstance(value, str):
        return value or ""
    value = _plain(value)
    if isinstance(value, int):
        return str(value)
    value = float(value)
    if math.isfinite(value) and 10**digits <= abs(value) < 1e6:
        return f"{value:.0f}"  # without this 12345.6 would read 1.235e+04
    return f"{value:.{digits}g}"


def format_interval(mean: SupportsFloat, half_width: SupportsFloat) -> str:
    """`mean ± half_width`, both to the half-width's second digit; the mean alone when the half-width is not finite.

    >>> format_interval(1.63749, 0.01234), format_interval(1.63749, float("nan")), format_interval(2.0, 0.0)
    ('1.637 ± 0.012', '1.637', '2 ± 0')
    """
    mean, half_width = float(mean), float(half_width)
    if not math.isfinite(half_width):
        return format_number(mean)
    if half_width <= 0:
        return f"{format_number(mean)} ± 0"
    # Rounding first makes 0.0999 count as 0.10, so that both parts get the same number of places.
    exponent = math.floor(math.log10(float(f"{half_width:.1e}")))
    places = 1 - exponent
    if places > 8 or places < -5:
        return f"{mean:.6g} ± {half_width:.1e}"
    return f"{mean:.{max(places, 0)}f} ± {half_width:.{max(places, 0)}f}"


@functools.cache
def t_quantile(df: int, confidence: float = 0.95) -> float:
    """The two-sided quantile of Student's t: P(|T| <= t) = confidence.

    With theta = atan(t / sqrt(df)), P(|T| <= t) is a finite sum for integer df, solved for theta by bisection. Above
    df = 1000: t = z + (z^3 + z) / (4 df) + (5 z^5 + 16 z^3 + 3 z) / (96 df^2), z the normal quantile.

    Args:
      df: degrees of freedom, >= 1.
      confidence: in (0, 1).

    Returns:
      t, to about 1e-9 relative.

    Raises:
      ValueError: when an argument is out of range.

    Source: Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.3, 26.7.4 and 26.7.5.

    >>> [round(t_quantile(df), 3) for df in (1, 2, 9, 5000)]
    [12.706, 4.303, 2.262, 1.96]
    """
    if df < 1:
        raise ValueError(f"df must be >= 1, got {df}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    if df > 1000:
        z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
        return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, df) < confidence else (low, middle)
    return math.sqrt(df) * math.tan((low + high) / 2)


def _t_probability(theta: float, df: int) -> float:
    """P(|T| <= sqrt(df) tan(theta)) for Student's t."""
    sine, square = math.sin(theta), math.cos(theta) ** 2
    odd = df % 2
    # Term j over term j-1 is (2j)/(2j+1) cos^2 for odd df and (2j-1)/(2j) cos^2 for even df.
    term = math.cos(theta) if odd else 1.0
    total = 0.0 if df == 1 else term
    for j in range(1, (df - 1) // 2 if odd else df // 2):
        term *= square * ((2 * j) / (2 * j + 1) if odd else (2 * j - 1) / (2 * j))
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def mean_ci(values: Iterable[SupportsFloat], confidence: float = 0.95) -> tuple[float, float]:
    """Mean and half-width of its confidence interval, for independent values of one normal distribution.

    half_width = t_{n-1} s / sqrt(n), with s^2 = sum((v - mean)^2) / (n - 1).

    Args:
      values: n >= 1 numbers.
      confidence: in (0, 1).

    Returns:
      (mean, half_width); the half-width is NaN for one value, which says nothing about the spread, and for values that
      are not all finite.

    Raises:
      ValueError: for no values.

    >>> mean, half = mean_ci([1.0, 2.0, 3.0]); round(mean, 3), round(half, 3)
    (2.0, 2.484)
    """
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("mean_ci needs at least one value, got none")
    n = len(numbers)
    if not all(map(math.isfinite, numbers)):
        return sum(numbers) / n, math.nan
    mean = math.fsum(numbers) / n
    if n == 1:
        return mean, math.nan
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in numbers) / (n - 1))
    return mean, t_quantile(n - 1, confidence) * deviation / math.sqrt(n)


def to_markdown(table: Table) -> str:
    """The table as GitHub markdown below its title, if it has one; columns of numbers are aligned to the right.

    >>> print(to_markdown(Table("", ["method", "loss"], [["a|b", 1.5], ["c", 2]])))
    | method | loss |
    | :-- | --: |
    | a\\|b | 1.5 |
    | c | 2 |
    """

    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(_escape(format_number(cell)) for cell in cells) + " |"

    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.columns)
    rules = ["--:" if column and not any(_is_text(cell) for cell in column) else ":--" for column in columns]
    heading = [f"## {table.title}", ""] if table.title else []
    return "\n".join([*heading, line(table.columns), "| " + " | ".join(rules) + " |", *map(line, table.rows)])


def _is_text(cell: Any) -> bool:
    """True for words; a number, nothing, or a number with its interval is not text."""
    return isinstance(cell, str) and not re.fullmatch(r"|([-+0-9.e]+|nan|-?inf)( ± [-+0-9.e]+)?( \(n=\d+\))?", cell)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\r\n", "\n").replace("\n", "<br>")


def write_report(workdir: str | os.PathLike[str], result: Result) -> Path:
    """Writes `plots/*.png`, `report.md` and `result.json` into a run folder.

    Every file is replaced atomically; `result.json`, which marks the run as finished for `compare`, comes last.

    Args:
      workdir: the run folder; made when absent.
      result: what was found.

    Returns:
      The path of `report.md`.

    >>> import tempfile
    >>> path = write_report(tempfile.mkdtemp(), Result("Demo", {"loss": 1.5}))
    >>> print(path.read_text().strip())
    # Demo
    <BLANKLINE>
    | summary | value |
    | :-- | --: |
    | loss | 1.5 |
    """
    workdir = Path(workdir)
    (workdir / "plots").mkdir(parents=True, exist_ok=True)
    for plot in result.plots:
        save_plot(plot, workdir / "plots" / f"{plot.name}.png")
    parts = [f"# {result.title}"]
    if result.summary:
        parts.append(to_markdown(Table("", ["summary", "value"], list(result.summary.items()))))
    parts += [to_markdown(table) for table in result.tables]
    if result.plots:
        parts += ["## Plots"] + [f"![{plot.name}](plots/{plot.name}.png)" for plot in result.plots]
    if result.notes:
        parts += ["## Notes", "\n".join("- " + note.replace("\n", "\n  ") for note in result.notes)]
    atomic_write(path := workdir / "report.md", "\n\n".join(parts) + "\n")
    record = {"format": FORMAT} | dataclasses.asdict(result)
    atomic_write(workdir / "result.json", json.dumps(_encode(record), indent=1, allow_nan=False) + "\n")
    return path


def _encode(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become `{"$float": "nan"}`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, dict):
        return {name: _encode(item) for name, item in value.items()}
    return [_encode(item) for item in value] if isinstance(value, (list, tuple)) else value


def _decode(value: dict[str, Any]) -> Any:
    return float(value["$float"]) if value.keys() == {"$float"} else value


def read_result(workdir: str | os.PathLike[str]) -> Result:
    """The `Result` that `write_report` stored in a run folder.

    Args:
      workdir: the run folder.

    Raises:
      FileNotFoundError: when the folder has no `result.json`: the run has not finished.
      ValueError: when the file is not what `write_report` writes.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> result = Result("Demo", {"loss": 1.5}, [Row({"K": 8}, 0, {"loss": 1.5})])
    >>> _ = write_report(folder, result); read_result(folder) == result
    True
    """
    path = Path(workdir) / "result.json"
    if not path.is_file():
        raise FileNotFoundError(f"{workdir} has no result.json; a run writes it when it finishes")
    try:
        record = json.loads(path.read_text(encoding="utf-8"), object_hook=_decode)
        if record.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        record["rows"] = [Row(**row) for row in record["rows"]]
        record["tables"] = [Table(**table) for table in record["tables"]]
        record["plots"] = [Plot(**p | {"series": [Series(**s) for s in p["series"]]}) for p in record["plots"]]
        return Result(**record)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a result that write_report wrote: {type(error).__name__}: {error}") from error


def summarize(rows: Sequence[Row], title: str = "") -> Table:
    """Groups rows by labels and gives each value as mean ± 95 % confidence half-width over the seeds.

    Args:
      rows: one row a setting and seed; settings may have different labels and values.
      title: the table's title.

    Returns:
      Columns: the labels, the values, `n`; groups in order of first appearance. One seed shows no interval. A value
      that only some seeds of a group have carries its own count, `(n=2)`.

    Raises:
      ValueError: when a setting has the same seed twice, which would make the interval too narrow.

    >>> rows = [Row({"method": "svd"}, seed, {"loss": loss}) for seed, loss in enumerate([1.0, 1.1, 1.2])]
    >>> print(to_markdown(summarize(rows)))
    | method | loss | n |
    | :-- | --: | --: |
    | svd | 1.10 ± 0.25 | 3 |
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(row)
    for members in groups.values():
        seeds = [row.seed for row in members]
        twice = [seed for seed in seeds if seeds.count(seed) > 1]
        if twice:
            raise ValueError(f"rows with labels {dict(members[0].labels)} have seed {twice[0]} {len(twice)} times")
    labels = list(dict.fromkeys(name for row in rows for name in row.labels))
    values = list(dict.fromkeys(name for row in rows for name in row.values))
    cells = [
        [
            *(members[0].labels.get(name) for name in labels),
            *(_cell([row.values[name] for row in members if name in row.values], len(members)) for name in values),
            len(members),
        ]
        for members in groups.values()
    ]
    return Table(title, [*labels, *values, "n"], cells)


def _group(row: Row) -> tuple[tuple[str, str | int | float], ...]:
    return tuple(sorted(row.labels.items()))


def _cell(values: list[float], n: int) -> str | None:
    if not values:
        return None
    return format_interval(*mean_ci(values)) + (f" (n={len(values)})" if len(values) != n else "")


def compare(dirs: Sequence[str | os.PathLike[str]]) -> tuple[str, Table]:
    """Compares finished runs: rows grouped by labels, mean ± 95 % confidence half-width over all seeds and folders.

    When several folders hold the same labels with the same seed, they differ in something the labels do not say, and
    their rows are no repetitions: a first column `run` then keeps the folders apart.

    Args:
      dirs: run folders, or folders of run folders.

    Returns:
      (markdown, the table in it).

    Raises:
      ValueError: for no folders, no rows, or a setting that one folder measured twice with the same seed.
      FileNotFoundError: for a folder that is absent, or has no `result.json` in it or one level below.

    >>> import tempfile
    >>> parent = Path(tempfile.mkdtemp())
    >>> for seed, loss in enumerate([1.0, 1.1, 1.2]):
    ...     _ = write_report(parent / f"seed{seed}", Result("Demo", rows=[Row({"K": 8}, seed, {"loss": loss})]))
    >>> print(compare([parent])[0])
    ## Comparison of 3 runs
    <BLANKLINE>
    | K | loss | n |
    | --: | --: | --: |
    | 8 | 1.10 ± 0.25 | 3 |
    <BLANKLINE>
    Mean ± 95 % confidence half-width (Student t) over n seeds.
    """
    if not dirs:
        raise ValueError("dirs must name at least one run folder, got none")
    folders: dict[Path, Path] = {}  # resolved -> as named, so that a folder given twice counts once
    unfinished: list[Path] = []
    for folder in map(Path, dirs):
        found, missing = _runs_in(folder)
        folders |= {path.resolve(): path for path in found if path.resolve() not in folders}
        unfinished += missing
    runs = {path: read_result(path).rows for path in folders.values()}
    if not any(runs.values()):
        raise ValueError(f"no run has rows to compare: {', '.join(map(str, runs))}")
    owners: dict[Any, set[Path]] = {}
    for path, rows in runs.items():
        for row in rows:
            owners.setdefault((_group(row), row.seed), set()).add(path)
    if any(len(paths) > 1 for paths in owners.values()):
        names = _short_names(list(runs))
        column = "run folder" if any("run" in row.labels for rows in runs.values() for row in rows) else "run"
        rows = [Row({column: names[p]} | dict(r.labels), r.seed, r.values) for p, rows in runs.items() for r in rows]
    else:
        rows = [row for rows in runs.values() for row in rows]
    table = summarize(rows, f"Comparison of {len(runs)} run{'s' if len(runs) > 1 else ''}")
    parts = [to_markdown(table), "Mean ± 95 % confidence half-width (Student t) over n seeds."]
    if unfinished:
        parts.append(f"Not finished, left out: {', '.join(map(str, dict.fromkeys(unfinished)))}.")
    return "\n\n".join(parts), table


def _runs_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """(finished runs, unfinished runs) in a folder: itself, or its direct subfolders."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    if (folder / "result.json").is_file():
        return [folder], []
    below = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [path for path in below if (path / "result.json").is_file()]
    if not found:
        raise FileNotFoundError(f"{folder} has no result.json, nor has a folder in it; a run writes it at its end")
    return found, [path for path in below if path not in found and (path / "config.json").is_file()]


def _short_names(paths: list[Path]) -> dict[Path, str]:
    """Folder names where they differ, else whole paths."""
    names = [path.resolve().name for path in paths]
    return {path: name if names.count(name) == 1 else str(path) for path, name in zip(paths, names, strict=True)}


# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow, which is faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", ":", "-.")


def save_plot(plot: Plot, path: str | os.PathLike[str]) -> None:
    """Draws a plot into a PNG file, with labels, a grid, a legend, and bands of y ± err.

    Args:
      plot: what to draw. Colours, line styles and (for up to 30 points) markers tell the curves apart; values that are
        not finite are gaps.
      path: the file; its folder must exist.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas objects instead of pyplot: no global state, no display, and safe in threads.
    figure = Figure(figsize=(7.0, 4.4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, series in enumerate(plot.series):
        colour = _COLOURS[index % len(_COLOURS)]
        marker = _MARKERS[index % len(_MARKERS)] if len(series.x) <= 30 else None
        style = {"color": colour, "linestyle": _LINES[index // len(_COLOURS) % len(_LINES)], "marker": marker}
        axes.plot(series.x, series.y, markersize=5, linewidth=1.8, label=series.label, **style)
        if series.err is not None:
            low = [y - e for y, e in zip(series.y, series.err, strict=True)]
            high = [y + e for y, e in zip(series.y, series.err, strict=True)]
            axes.fill_between(series.x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set(title=plot.title, xlabel=plot.xlabel, ylabel=plot.ylabel)
    _scale_axes(axes, plot)
    axes.grid(True, which="major", color="0.85", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(plot.series) > 6:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    elif plot.series:
        long = sum(len(series.x) for series in plot.series) > 5000
        axes.legend(loc="upper right" if long else "best", framealpha=0.85)  # "best" takes seconds for long curves
    data = io.BytesIO()
    canvas.print_png(data)
    atomic_write(path, data.getvalue())


def _scale_axes(axes: Any, plot: Plot) -> None:
    """Sets logarithmic scales, and labels a few measured x positions (such as 1, 2, 4, 8) instead of powers of ten."""
    from matplotlib.ticker import NullLocator

    if plot.logx:
        axes.set_xscale("log")
        positions = sorted({x for series in plot.series for x in series.x if x > 0 and math.isfinite(x)})
        if 2 <= len(positions) <= 8 and all(b / a >= 1.4 for a, b in itertools.pairwise(positions)):
            axes.set_xticks(positions, [format_number(x) for x in positions])
            axes.xaxis.set_minor_locator(NullLocator())
    if plot.logy:
        axes.set_yscale("log")
