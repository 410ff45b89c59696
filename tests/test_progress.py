"""Progress on standard error: bars on a terminal, lines elsewhere."""

import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stand_in_server import StandIn

from harness.commands import progress as shown
from harness.commands.progress import fetching, progress
from harness.engines.http_client import HttpClient

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are due after fractions of a second."""
    monkeypatch.setattr(shown, "EVERY_S", 0.2)
    monkeypatch.setattr(shown, "SOON_S", 0.05)
    monkeypatch.setattr(shown, "FIRST_S", 0.05)
    monkeypatch.setattr(shown, "LOOKS_PER_S", 100)
    monkeypatch.setattr(shown, "_DISPLAY", shown._Display())


def waited(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.usefixtures("fast")
def test_a_pipe_gets_lines_with_what_is_done_and_how_many(capsys: Captured) -> None:
    lines: list[str] = []

    def written(pattern: str) -> bool:
        out, err = capsys.readouterr()
        assert out == ""
        lines.extend(err.splitlines())
        return any(re.fullmatch(pattern, line) for line in lines)

    begin = time.monotonic()
    with progress("generating", 4) as tick, progress("timing rounds") as inner:
        assert waited(lambda: written(r"0:00:\d\d generating 0/4; timing rounds"))
        inner.say("timing K=2")
        tick()
        after = r"0:00:\d\d generating 1/4; timing K=2"
        assert waited(lambda: written(after))
    written("")
    assert len(lines) <= 1 + (time.monotonic() - begin) / 0.2
    with progress("too short for a line"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("fast")
def test_a_line_says_for_which_server_it_waits_and_how_long_at_most(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "LATE_S", 0.1)
    said: list[str] = []

    def lines(least: int) -> bool:
        said.extend(capsys.readouterr().err.splitlines())
        return len(said) >= least

    enough = threading.Event()
    hangs = StandIn({"/v1/completions": lambda _: {"in time": enough.wait(20)}})
    with progress("asking the servers", 4) as tick, ThreadPoolExecutor(1) as pool:
        tick()
        answer = pool.submit(HttpClient(hangs.url).post, "/v1/completions", {}, 30)
        assert waited(lambda: lines(3))
        enough.set()
        assert answer.result() == {"in time": True}
    waiting = rf"waiting for {hangs.url}/v1/completions, 0:00:\d\d of 0:00:30 at most"
    assert len([line for line in said if re.search(rf"servers 1/4.*; {waiting}$", line)]) >= 2
    capsys.readouterr()
    said.clear()
    with progress("asking the servers", 4):
        assert waited(lambda: lines(1))
    hangs.close()
    assert "waiting" not in said[0]


@pytest.mark.usefixtures("fast")
def test_the_time_left_is_that_of_the_mean_tick_and_grows_with_one_that_takes_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bar = shown.Bar(shown._Display(), "generating", 10)
    assert str(bar) == "generating 0/10"
    for _ in range(2):
        now += 60
        bar()
    assert str(bar) == "generating 2/10, about 0:08:00 left"
    now += 30
    assert bar.left == "about 0:07:30 left"
    now += 90
    assert bar.left == "about 0:08:40 left", "by the pace of what is under way"
    bar.expect(2)
    assert bar.counts == "2/12"
    last = shown.Bar(shown._Display(), "generating", 3)
    for _ in range(2):
        now += 60
        last()
    now += 61
    assert str(last) == "generating 2/3", "nobody knows how long the last one takes"


@pytest.mark.usefixtures("fast")
def test_the_sizes_of_what_is_counted_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bar = shown.Bar(shown._Display(), "asking", 4, sizes=[1, 17, 17, 1])
    for seconds in (10.0, 170.0):
        assert bar.left == ""
        now += seconds
        bar()
    assert bar.left == "about 0:03:00 left"


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("offline", ["0", "1"])
def test_what_waits_for_the_hub_says_so_at_once_and_how_to_do_without(
    offline: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(shown, "EVERY_S", 1000.0)
    for source in (str(tmp_path), None):
        with fetching("loading mine", source):
            time.sleep(0.1)
    assert capsys.readouterr().err == "", "a folder waits for nothing"
    said: list[str] = []

    def written() -> bool:
        said.append(capsys.readouterr().err)
        return bool("".join(said))

    with fetching("loading mine", "org/mine"):
        if offline == "0":
            assert waited(written)
        else:
            time.sleep(0.2)
    written()
    assert ("asking the Hugging Face hub for org/mine" in "".join(said)) == (offline == "0")
    assert ("HF_HUB_OFFLINE=1" in "".join(said)) == (offline == "0")


@pytest.mark.usefixtures("fast")
def test_nested_blocks_share_one_display_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(shown.Bar, "left", property(lambda _: "about 0:00:07 left"))
    with progress("generating", 4) as tick:
        tick()
        with progress("timing rounds", 12):
            pass
    out, err = capsys.readouterr()
    assert out == ""
    (frame,) = [part for part in err.split("timing rounds")[:1] if "generating" in part]
    assert "1/4" in frame
    assert "about 0:00:07 left" in frame
