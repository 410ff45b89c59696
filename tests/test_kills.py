"""Commands that are killed at seeded moments and resumed lose nothing and measure nothing twice."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.storage import TABLES, StoredRun, load, load_traces

KILLER = Path(__file__).with_name("killer.py")
STATUS = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}
EVERY = "KILL,TERM,INT,HUP"
SMALL = ("k=[2]", "temperature=[1]", "prompts.limit=2", "new_tokens=8", "threads=1")
GRID = ("temperature=[0,1]", "prompts.limit=4", "new_tokens=12", "threads=1")
# What is timed, and what follows from it; the rest must be as in a run that was left alone.
TIMED = ("ms", "second", "speedup", "peak", "breakeven")
COUNTS = [name for name in TABLES["results.csv"].columns if not any(word in name for word in TIMED)]


def killed(command: str, root: Path, seed: int, signals: str, *overrides: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(KILLER), command, str(root), str(seed), signals, *overrides],
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_ends(seen: dict[str, Any], signals: str) -> None:
    """Every attempt ended as its signal says, with one line where it could still say one."""
    assert seen["calm"]["status"] == 0
    assert [end["signal"] for end in seen["ends"]] == [f"SIG{name}" for name in signals.split(",")]
    for end in seen["ends"]:
        assert not end["left_running"]
        # A run that has just ended by itself is no longer there to be signalled
        assert end["status"] in (STATUS[end["signal"]], 0), end
        if end["status"] > 0:
            (line,) = end["stderr"]
            assert line.startswith(f"error: interrupted by {end['signal']}; ")
            assert not end["traceback"]


def check_counts(calm: StoredRun, run: StoredRun) -> None:
    """Nothing lost, nothing doubled, and the counts of a run that was left alone."""
    assert run.manifest.status == "complete"
    assert Counter(trial.cell for trial in run.trials) == Counter(t.cell for t in calm.trials)
    texts = [{trial.cell: trial.tokens for trial in stored.trials} for stored in (calm, run)]
    assert texts[0] == texts[1]
    left, right = (stored.results[COUNTS].reset_index(drop=True) for stored in (calm, run))
    pd.testing.assert_frame_equal(left, right)
    keys = ["role", "model", "kind", "tokens", "context_tokens", "batch", "samples"]
    # How many visits time rounds depends on what they take, and their prompts with it
    steps, rows = (
        stored.latency[stored.latency["kind"] != "round"].reset_index(drop=True)
        for stored in (calm, run)
    )
    assert sorted(map(tuple, steps[keys].to_numpy())) == sorted(map(tuple, rows[keys].to_numpy()))
    assert (steps["floor_ms"].isna() == rows["floor_ms"].isna()).all()
    timed = [{(t.draft, t.k, t.temperature) for t in stored.rounds} for stored in (calm, run)]
    assert timed[0] == timed[1]
    visits = Counter((t.draft, t.visit, t.turn, t.k, t.temperature, t.batch) for t in run.rounds)
    assert {*visits.values()} <= {1}
    traces = [
        {(t.draft, t.draft_temperature, t.prompt_set, t.prompt, t.temperature, tuple(t.tokens))
         for t in load_traces(stored.folder)}
        for stored in (calm, run)
    ]  # fmt: skip
    assert traces[0] == traces[1]
    assert len(load_traces(calm.folder)) == len(load_traces(run.folder))


def check(command: str, root: Path, seed: int, signals: str, *overrides: str) -> None:
    check_ends(killed(command, root, seed, signals, *overrides), signals)
    (calm,) = (load(path) for path in (root / "calm").iterdir())
    runs = [path for path in (root / "killed").iterdir() if (path / "manifest.json").exists()]
    assert runs
    for path in runs:
        check_counts(calm, load(path))


def test_a_kill_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """With so few prompts no look decides, so that all are made."""
    check("sweep", tmp_path, 11, "KILL", *SMALL, "prompts.limit=1", "until=decided")


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("command", "rounds", "overrides"),
    [
        ("sweep", 1, SMALL),
        ("sweep", 4, ("k=[1,4]", "until=all", *GRID)),
        ("sweep", 2, ("k=[4]", "prompts.sets=[easy]", *GRID)),
        ("audition", 3, ("k=[1,4]", "drafts=[tiny_good,tiny_small,ngram]", *GRID)),
        ("profile", 3, ("k=[2]", "contexts=[64]", "batches=[1,2]", *GRID[1:])),
    ],
)
def test_forty_kills_lose_and_double_nothing(
    command: str, rounds: int, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Ten of each signal over the three commands, and three over the looks of a sweep."""
    check(command, tmp_path, 7, ",".join([EVERY] * rounds), *overrides)
