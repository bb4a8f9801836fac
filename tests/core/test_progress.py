"""What a terminal and a log file see, with a fake clock and a fake stream."""

import io
import os
import re
import threading

import pytest

from jaxlab.core.progress import NullProgress, Progress, format_duration


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True

    def screen(self):
        """The lines as a terminal would show them."""
        lines = [""]
        for part in re.split(r"(\r|\n|\x1b\[K)", self.getvalue()):
            if part == "\n":
                lines.append("")
            elif part == "\r":
                column = 0
            elif part == "\x1b[K":
                lines[-1] = lines[-1][:column]
            else:
                column = len(lines[-1]) if lines[-1] == "" else column
                lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
                column += len(part)
        return lines


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


def test_plain_lines_elsewhere():
    stream, clock = io.StringIO(), Clock()
    with Progress(200, label="seed 1/3", stream=stream, clock=clock) as progress:
        for done, now in ((10, 30.0), (20, 31.0), (120, 41.0), (200, 49.0)):
            clock.now = now
            progress.update(done, {"loss": 1 / done, "lr": 0.01})
        progress.line("saved")
    assert stream.getvalue().splitlines() == [
        "seed 1/3  step 10/200 (5%)  loss 0.1  lr 0.01",
        "seed 1/3  step 20/200 (10%)  loss 0.05  lr 0.01  10 step/s  18s left",  # 30 s of compilation do not count
        "seed 1/3  step 120/200 (60%)  loss 0.008333  lr 0.01  10 step/s  8s left",
        "seed 1/3  step 200/200 (100%)  loss 0.005  lr 0.01  10 step/s  took 49s",
        "saved",
    ]


def test_known_start_gives_a_rate_at_once_and_then_leaves_out_the_first_interval():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(600, stream=stream, clock=clock, start=500, unit="round")
    for done, now in ((510, 20.0), (520, 21.0)):
        clock.now = now
        progress.update(done)
    assert stream.getvalue().splitlines() == [
        "round 510/600 (85%)  2 s/round  3:00 left",
        "round 520/600 (86%)  10 round/s  8s left",
    ]


def test_rate_follows_a_change():
    clock = Clock()
    progress = Progress(10_000, stream=io.StringIO(), clock=clock)
    for i in range(1, 101):
        clock.now += 1.0 if i <= 50 else 0.1
        progress.update(i)
    assert progress.rate() == pytest.approx(10.0)


def test_bar_is_redrawn_in_place():
    stream, clock = Terminal(), Clock()
    progress = Progress(100, label="isoloco", stream=stream, clock=clock, width=90)
    assert stream.screen() == ["isoloco [" + "╌" * 24 + "] step 0/100 (0%)"]
    for done, now in ((25, 1.0), (50, 2.0)):
        clock.now = now
        progress.update(done, {"loss": 2.0})
    assert stream.screen() == ["isoloco [" + "━" * 12 + "╌" * 12 + "] step 50/100 (50%)  loss 2  25 step/s  2s left"]
    progress.line("evaluation: 1.5")
    above, below = stream.screen()
    assert above == "evaluation: 1.5" and below.startswith("isoloco [") and below.endswith("2s left")
    clock.now = 4.0
    progress.update(100)  # keeps the fields
    progress.close()
    progress.close()
    assert stream.screen()[1:] == ["isoloco [" + "━" * 24 + "] step 100/100 (100%)  loss 2  25 step/s  took 4s", ""]
    progress.line("after the end")
    assert stream.screen()[2:] == ["after the end", ""]
    with pytest.raises(ValueError, match="closed"):
        progress.update(100)


@pytest.mark.parametrize("width", [1, 5, 20, 33, 60, 80, 200])
def test_never_wider_than_the_terminal(width):
    stream, clock = Terminal(), Clock()
    with Progress(1000, label="a rather long label", stream=stream, clock=clock, width=width) as progress:
        for done in (1, 10, 500, 1000):
            clock.now += 1.0
            progress.update(done, {"train/loss": 1.23456, "grad_norm": 1e-9})
    drawn = [text for text in re.split(r"[\r\n]|\x1b\[K", stream.getvalue()) if text]
    assert max(map(len, drawn), default=0) <= width - 1
    if width in (20, 200):  # the bar is what gives way first
        assert ("━" in stream.getvalue()) == (width == 200)


def test_does_not_flood_a_terminal_and_shows_the_end():
    stream, clock = Terminal(), Clock()
    with Progress(10_001, stream=stream, clock=clock, width=80) as progress:
        for i in range(10_000):
            clock.now += 0.001
            progress.update(i + 1)
        held_back = stream.getvalue()
    assert 90 <= stream.getvalue().count("\r") <= 110  # 10 s, one a 0.1 s
    assert "10000/10001" in stream.getvalue() and held_back != stream.getvalue()


def test_min_interval_elsewhere():
    stream, clock = io.StringIO(), Clock()
    with Progress(100, stream=stream, clock=clock, min_interval=10) as progress:
        for i in range(1, 36):
            clock.now += 1.0
            progress.update(i)
    shown = [int(re.search(r"step (\d+)/", line).group(1)) for line in stream.getvalue().splitlines()]
    assert shown == [1, 11, 21, 31, 35]


def test_ascii_and_dumb_terminals(monkeypatch):
    stream = Terminal()
    stream.encoding = "ascii"
    Progress(4, stream=stream, width=60)
    assert "[....." in stream.getvalue() and stream.getvalue().isascii()
    monkeypatch.setenv("TERM", "dumb")
    dumb = Terminal()
    Progress(4, stream=dumb).update(1)
    assert dumb.getvalue() == "step 1/4 (25%)\n"


def test_width_of_a_real_terminal():
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 31, 0, 0))
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        with Progress(10, label="x" * 50, stream=stream, clock=Clock()):
            pass
        shown = os.read(leader, 1000).decode()
    os.close(leader)
    assert shown.startswith("\r" + "x" * 29 + ">\x1b[K")


def test_threads_do_not_mix_lines():
    stream = io.StringIO()
    progress = Progress(1000, stream=stream)

    def work(n):
        for i in range(100):
            progress.update(i, {"n": n})
            progress.line(f"note {n}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 800
    assert sum(bool(re.fullmatch(r"note \d", line)) for line in lines) == 400
    assert all(re.fullmatch(r"note \d|step \d+/1000 \(\d+%\)  n \d.*", line) for line in lines)


@pytest.mark.parametrize("options", [{"total": -1}, {"total": 3, "start": -1}, {"total": 3, "min_interval": -0.1}])
def test_bad_arguments_are_named(options):
    name = list(options)[-1]
    with pytest.raises(ValueError, match=f"{name} must be >= 0, got -"):
        Progress(**options, stream=io.StringIO())
    with pytest.raises(ValueError, match="done must be >= 0, got -1"):
        Progress(1, stream=io.StringIO()).update(-1)


def test_odd_totals_and_clocks():
    stream = io.StringIO()
    with Progress(0, stream=stream, clock=Clock()) as progress:
        progress.update(0, {"loss": float("nan")})
        progress.update(3)  # more than the total, without time passing
    assert stream.getvalue().splitlines() == ["step 0/0  loss nan  took 0s", "step 3/0  took 0s"]


def test_default_stream_is_standard_error_at_the_time(capsys):
    Progress(2).update(1)
    captured = capsys.readouterr()
    assert captured.err.startswith("step 1/2") and captured.out == ""


def test_null_progress_has_the_same_interface(capsys):
    public = {name for name in dir(Progress) if not name.startswith("_")}
    assert public <= set(dir(NullProgress))
    with NullProgress(10, label="x", unit="round") as progress:
        progress.update(5, {"a": 1.0})
        progress.line("hidden")
        assert progress.rate() is None and progress.total == 10
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "seconds, text", [(0, "0s"), (59.4, "59s"), (59.6, "1:00"), (3599.7, "1:00:00"), (86400, "1d 00:00:00")]
)
def test_durations_round_upwards_through_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_impossible_durations(seconds):
    with pytest.raises(ValueError, match="seconds must be finite"):
        format_duration(seconds)
