"""Reports round-trip, read well, and comparisons give the right intervals over the right groups."""

import json
import math
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlab.core import report
from jaxlab.core.report import Plot, Result, Row, Series, Table


def sample(seed=0):
    """A result with everything in it."""
    x = np.array([1, 2, 4, 8, 16])
    curves = [Series("diloco", x, np.log(x + 1.0), err=0.1 * x), Series("isoloco", x, jnp.sqrt(x))]
    return Result(
        title="Demo",
        summary={"gap": np.float32(0.25), "method": "isoloco", "workers": np.int64(8), "odd": math.inf, "word": "nan"},
        rows=[Row({"method": m, "K": np.int32(8)}, seed, {"loss": 1.0 + seed, "bad": math.nan}) for m in ("a", "b")],
        tables=[Table("Losses", ["method", "loss"], [["a|b", 1.5], ["c\nd", None], ["e", math.nan]])],
        plots=[
            Plot("gap", "Loss against K", "workers K", "loss (nats/byte)", curves, logx=True),
            Plot("loss", "Loss", "tokens", "loss", [Series("a", [1, 2, 3], [1.0, math.nan, 0.1])], logy=True),
        ],
        notes=["One\nparagraph.", "Two."],
    )


def test_round_trip(tmp_path):
    result = sample()
    assert report.write_report(tmp_path / "run", result) == tmp_path / "run" / "report.md"
    back = report.read_result(tmp_path / "run")
    assert repr(back) == repr(result)  # NaN is not equal to itself, but reads the same
    assert back.summary == {"gap": 0.25, "method": "isoloco", "workers": 8, "odd": math.inf, "word": "nan"}
    assert isinstance(back.summary["workers"], int) and isinstance(back.rows[0].values["loss"], float)
    report.write_report(tmp_path / "run", result)  # again, over the same files
    files = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert files == {"report.md", "result.json", "plots/gap.png", "plots/loss.png"}


def test_result_json_is_strict(tmp_path):
    report.write_report(tmp_path, sample())

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    record = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert record["format"] == 1 and record["summary"]["odd"] == {"$float": "inf"}


def test_markdown_report(tmp_path):
    lines = report.write_report(tmp_path, sample()).read_text().splitlines()
    for expected in (
        "# Demo",
        "| gap | 0.25 |",
        "| workers | 8 |",
        "## Losses",
        "| method | loss |",
        "| :-- | --: |",
        "| a\\|b | 1.5 |",
        "| c<br>d |  |",
        "| e | nan |",
        "![gap](plots/gap.png)",
        "## Notes",
        "- One",
        "  paragraph.",
        "- Two.",
    ):
        assert expected in lines, expected
    links = [line.split("(")[1].rstrip(")") for line in lines if line.startswith("![")]
    assert links == ["plots/gap.png", "plots/loss.png"] and all((tmp_path / link).is_file() for link in links)


def test_a_report_may_be_nearly_empty(tmp_path):
    assert report.write_report(tmp_path, Result("Only a title")).read_text() == "# Only a title\n"
    assert report.read_result(tmp_path) == Result("Only a title")


def test_the_marker_of_a_finished_run_comes_last(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(report, "atomic_write", lambda path, data: written.append(path.name))
    report.write_report(tmp_path, sample())
    assert written == ["gap.png", "loss.png", "report.md", "result.json"]


def test_plots_hold_what_they_should(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    original = Figure.add_subplot

    def remember(self, *args, **options):
        figures.append(self)
        return original(self, *args, **options)

    monkeypatch.setattr(Figure, "add_subplot", remember)
    report.save_plot(sample().plots[0], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    (axes,) = figures[0].axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        "Loss against K",
        "workers K",
        "loss (nats/byte)",
    )
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["diloco", "isoloco"]
    assert axes.get_xscale() == "log" and axes.get_yscale() == "linear"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "8", "16"]
    (band,) = axes.collections  # one series has an error
    vertices = band.get_paths()[0].vertices
    at_eight = vertices[vertices[:, 0] == 8.0][:, 1]
    np.testing.assert_allclose([at_eight.min(), at_eight.max()], [np.log(9) - 0.8, np.log(9) + 0.8])
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 2
    many = Plot("many", "", "x", "y", [Series(str(i), [0, 1], [0, i]) for i in range(20)])
    report.save_plot(many, tmp_path / "b.png")
    styles = {(line.get_color(), line.get_linestyle()) for line in figures[1].axes[0].lines}
    assert len(styles) == 20


def test_plots_leave_no_global_state(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from jaxlab.core import metrics, progress, report\n"
        "light = {'jax', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not light, light\n"
        "plot = report.Plot('p', 't', 'x', 'y', [report.Series('s', [1, 2], [1, 2])], logy=True)\n"
        "report.save_plot(plot, sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "p.png")], check=True, timeout=120)
    assert (tmp_path / "p.png").is_file()


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_t_quantiles_against_scipy(confidence):
    for df in (1, 2, 3, 4, 5, 9, 10, 29, 30, 99, 100, 999, 1000, 1001, 5000, 10**6):
        expected = scipy.stats.t.ppf((1 + confidence) / 2, df)
        assert report.t_quantile(df, confidence) == pytest.approx(expected, rel=1e-7), df


@pytest.mark.parametrize("n", [2, 3, 5, 40])
def test_mean_ci_against_scipy(n):
    values = np.random.default_rng(n).normal(3.0, 2.0, n)
    mean, half = report.mean_ci(values)
    low, high = scipy.stats.t.interval(0.95, n - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-9)


def test_mean_ci_of_few_equal_or_nonfinite_values():
    mean, half = report.mean_ci([2.5])
    assert mean == 2.5 and math.isnan(half)
    assert report.mean_ci([1.0, 1.0, 1.0]) == (1.0, 0.0)
    assert all(map(math.isnan, report.mean_ci([1.0, math.nan])))
    assert report.mean_ci([1.0, math.inf])[0] == math.inf
    with pytest.raises(ValueError, match="at least one value"):
        report.mean_ci([])
    with pytest.raises(ValueError, match="df must be >= 1, got 0"):
        report.t_quantile(0)
    with pytest.raises(ValueError, match="confidence must be in"):
        report.mean_ci([1.0, 2.0], confidence=1.0)


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (0.0, "0"), (True, "True"), (12345.6, "12346"), (999999.4, "999999"), (2.5e6, "2.5e+06"),
     (-0.00002, "-2e-05"),
     (np.float32(0.1), "0.1"), (np.int64(3), "3"), (jnp.float32(1.5), "1.5"), (math.inf, "inf")],
)  # fmt: skip
def test_format_number(value, text):
    assert report.format_number(value) == text


@pytest.mark.parametrize(
    "mean, half, text",
    [(1.63749, 0.0999, "1.64 ± 0.10"), (1234.5, 67.8, "1234 ± 68"), (0.5, 1e-12, "0.5 ± 1.0e-12"),
     (1.0, math.inf, "1")],
)  # fmt: skip
def test_format_interval(mean, half, text):
    assert report.format_interval(mean, half) == text


def run(folder, rows, title="Demo"):
    report.write_report(folder, Result(title, rows=rows))
    return folder


def test_compare_groups_over_seeds_and_folders(tmp_path):
    losses = {"svd": [1.0, 1.2, 1.7], "ns": [2.0, 2.0, 2.0]}
    for seed in range(3):
        rows = [Row({"method": name, "K": 8}, seed, {"loss": values[seed]}) for name, values in losses.items()]
        if seed == 1:  # the order of labels does not matter
            rows = [Row(dict(reversed(row.labels.items())), seed, row.values) for row in rows]
            rows.append(Row({"method": "once", "K": 1}, seed, {"time": 3.0}))
        run(tmp_path / f"run{seed}", rows)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.json").write_text("{}")
    markdown, table = report.compare([tmp_path])
    mean, half = np.mean(losses["svd"]), 4.302653 * np.std(losses["svd"], ddof=1) / math.sqrt(3)
    assert sorted(table.columns[:2]) == ["K", "method"] and table.columns[2:] == ["loss", "time", "n"]
    by_method = {row[table.columns.index("method")]: row[2:] for row in table.rows}
    assert by_method == {
        "svd": [f"{mean:.2f} ± {half:.2f}", None, 3],
        "ns": ["2 ± 0", None, 3],
        "once": [None, "3", 1],  # one seed: no interval
    }
    assert "Comparison of 3 runs" in markdown and report.to_markdown(table) in markdown
    assert f"Not finished, left out: {tmp_path / 'unfinished'}." in markdown
    named = [tmp_path / f"run{seed}" for seed in range(3)]
    assert report.compare(named)[1] == table
    assert report.compare([tmp_path, *named, tmp_path / "run0" / ".." / "run1"])[1] == table  # each run counts once


def test_compare_keeps_runs_with_the_same_seeds_apart(tmp_path):
    first = run(tmp_path / "lr1", [Row({"K": 8}, s, {"loss": 1.0}) for s in range(2)])
    second = run(tmp_path / "lr2", [Row({"K": 8}, s, {"loss": 2.0}) for s in range(2)])
    _, table = report.compare([first, second])
    assert table.columns == ["run", "K", "loss", "n"]
    assert table.rows == [["lr1", 8, "1 ± 0", 2], ["lr2", 8, "2 ± 0", 2]]
    third = run(tmp_path / "other" / "lr1", [Row({"K": 8}, 0, {"loss": 3.0})])
    names = [row[0] for row in report.compare([first, second, third])[1].rows]
    assert names == [str(first), "lr2", str(third)]


def test_compare_keeps_a_label_that_is_called_run(tmp_path):
    folders = [run(tmp_path / name, [Row({"run": "a"}, 0, {"loss": 1.0})]) for name in ("one", "two")]
    _, table = report.compare(folders)
    assert table.columns == ["run folder", "run", "loss", "n"]
    assert [row[:2] for row in table.rows] == [["one", "a"], ["two", "a"]]


def test_summarize_counts_values_that_some_seeds_lack():
    rows = [Row({}, 0, {"a": 1.0, "b": 1.0}), Row({}, 1, {"a": 1.0}), Row({}, 2, {"a": 1.0, "b": 1.0})]
    table = report.summarize(rows, "T")
    assert table == Table("T", ["a", "b", "n"], [["1 ± 0", "1 ± 0 (n=2)", 3]])
    assert "--: | --: | --:" in report.to_markdown(table)
    with pytest.raises(ValueError, match=r"labels \{'K': 1\} have seed 4 2 times"):
        report.summarize([Row({"K": 1}, 4, {}), Row({"K": 1}, 4, {})])


def test_compare_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="at least one run folder"):
        report.compare([])
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder"):
        report.compare([tmp_path / "nowhere"])
    (tmp_path / "sub").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no result\.json"):
        report.compare([tmp_path])
    with pytest.raises(FileNotFoundError, match=r"sub has no result\.json; a run writes it when it finishes"):
        report.read_result(tmp_path / "sub")
    run(tmp_path / "sub", [])
    with pytest.raises(ValueError, match="no run has rows to compare"):
        report.compare([tmp_path])


@pytest.mark.parametrize(
    "text", ['{"format": 1, "tit', "[]", "{}", '{"format": 2}', '{"format": 1, "rows": [{"x": 1}]}']
)
def test_damaged_results_are_named(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"result\.json is not a result that write_report wrote"):
        report.read_result(tmp_path)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Table("T", ["a", "b"], [[1, 2], [3]]), ValueError, "'T': 1 cells in row 1, 2 columns"),
        (lambda: Table("T", ["a"], [[[1]]]), TypeError, "'T': row 0 holds a list"),
        (lambda: Series("s", [1, 2], [1]), ValueError, "'s': lengths must agree, got x 2, y 1"),
        (lambda: Series("s", [1], [1], err=[1, 2]), ValueError, "x 1, y 1, err 2"),
        (lambda: Plot("../up", "", "", "", []), ValueError, r"plot name must consist .* got '\.\./up'"),
        (lambda: Plot("", "", "", "", []), ValueError, "plot name must consist"),
        (lambda: Result("R", plots=[Plot("p", "", "", "", [])] * 2), ValueError, "'p' is used 2 times"),
        (lambda: Result("R", {"a": None}), TypeError, "summary 'a' must be a string or a number, got NoneType"),
        (lambda: Row({"a": (1,)}, 0, {}), TypeError, "label 'a' must be a string or a number, got tuple"),
    ],
)
def test_bad_parts_are_named_where_they_are_made(make, error, message):
    with pytest.raises(error, match=message):
        make()
