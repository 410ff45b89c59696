"""Comparing stored runs: paired ratios, what may not be compared, and a build's exit status.

The reference is the stored sweep of tests/frozen; what changed in the other run is made from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from runs import FROZEN, analysed

from harness.analysis import comparison
from harness.analysis.comparison import compare, deciding
from harness.commands import report
from harness.commands.run_lifecycle import Outcome
from harness.config import ReportConfig
from harness.records import Trial, UserError
from harness.stats.jackknife import exponential, log_speedup
from harness.storage import RunFolder, StoredRun, load
from harness.storage.manifest import Manifest
from harness.summary import ComparisonRow

pytestmark = pytest.mark.usefixtures("no_plots")
SWEEP = load(FROZEN / "sweep")
Change = Callable[[Trial], Trial]


@pytest.fixture(autouse=True)
def reference_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly every test compares with SWEEP, of which the analysis is the same each time."""
    analyse = comparison.analyse_pair
    monkeypatch.setattr(
        comparison,
        "analyse_pair",
        lambda setup: analysed("sweep") if setup.run is SWEEP else analyse(setup),
    )


def other(change: Change = lambda trial: trial, **changes: Any) -> StoredRun:
    """The reference once more, in another folder, each generation changed."""
    trials = tuple(change(trial) for trial in SWEEP.trials)
    return replace(SWEEP, **{"folder": Path("other"), "trials": trials, **changes})


def slower(factor: float, noise: float = 0.0, **where: Any) -> Change:
    """Generations with these fields take `factor` as long."""
    rng = np.random.default_rng(0)

    def change(trial: Trial) -> Trial:
        hit = all(getattr(trial, name) == value for name, value in where.items())
        scale = (factor if hit else 1.0) * np.exp(rng.normal(0, noise))
        return replace(trial, decode_s=(trial.decode_s or 0.0) * scale)

    return change


def rows(run: StoredRun, temperature: float = 0.0) -> dict[tuple[str | None, int], ComparisonRow]:
    compared = compare([SWEEP, run]).rows
    return {(row.prompt_set, row.k): row for row in compared if row.temperature == temperature}


def nested(entries: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of nested mappings with one value replaced."""
    key, _, rest = path.partition(".")
    return {**entries, key: nested(entries.get(key) or {}, rest, value) if rest else value}


def test_a_slower_machine_moves_times_and_leaves_speedups() -> None:
    compared = rows(other(slower(1.2)))
    assert {k for _, k in compared} == {0, 1, 2, 4}
    for (_, k), row in compared.items():
        assert row.ms_per_token == pytest.approx(1.2 * (row.reference_ms_per_token or 0.0))
        assert row.speedup_ratio is None if k == 0 else row.speedup_ratio == pytest.approx(1)
        assert k == 0 or (row.p_value_holm, row.alpha_difference) == (1.0, 0.0)


def test_pairing_by_prompt_makes_a_small_loss_visible() -> None:
    row = rows(other(slower(1.1, noise=0.01, k=2)))["all", 2]
    assert row.speedup_ratio == pytest.approx(1 / 1.1, rel=0.02)
    assert row.speedup_ratio_hi is not None
    assert row.speedup_ratio_hi < 0.95
    assert row.p_value_holm is not None
    assert row.p_value_holm < 0.001
    greedy = [t for t in SWEEP.trials if t.temperature == 0 and t.k in (0, 2)]
    cells = [sorted((t for t in greedy if t.k == k), key=lambda t: t.prompt) for k in (0, 2)]
    numbers = [
        np.array([float(getattr(t, name) or 0) for t in cell])
        for cell in cells
        for name in ("decode_s", "new_tokens")
    ]
    log = log_speedup(
        numbers[0], numbers[1], numbers[2], numbers[3], [t.prompt_set for t in cells[0]]
    )
    alone = exponential(log.interval(skew=True))
    assert alone is not None
    assert alone.hi / alone.lo > 1.1, "unpaired, the prompts' own scatter would hide it"


def test_weights_make_the_workload() -> None:
    config = nested(SWEEP.config, "prompts.weights", {"easy": 0, "hard": 1})
    changed = other(slower(2.0, k=2, prompt_set="easy"), config=config)
    compared = compare([replace(SWEEP, config=config), changed]).rows
    ratios = {row.prompt_set: row.speedup_ratio for row in compared if row.k == 2}
    assert ratios == {"easy": pytest.approx(0.5), "hard": pytest.approx(1), "all": pytest.approx(1)}
    for temperature in (0.0, 1.0):
        cells = [r for r in compared if (r.k, r.temperature) == (2, temperature)]
        alphas = {row.prompt_set: row.alpha for row in cells}
        assert alphas["all"] == pytest.approx(alphas["hard"])
        assert alphas["easy"] != pytest.approx(alphas["hard"])


def test_only_what_all_four_sides_finished_on_the_same_prompt_is_compared() -> None:
    easy = sorted({t.prompt for t in SWEEP.trials if t.prompt_set == "easy"})

    def change(trial: Trial) -> Trial:
        if (trial.prompt, trial.k) in {(easy[0], 0), (easy[1], 2)}:
            return replace(trial, status="failed", error="broke", decode_s=None)
        return replace(trial, prompt_tokens=99) if trial.prompt == easy[2] else trial

    run = other(change)
    compared_rows = rows(run)
    assert (compared_rows["easy", 2].prompts, compared_rows["easy", 2].status) == (5, "partial")
    assert (compared_rows["easy", 1].prompts, compared_rows["easy", 1].status) == (6, "complete")
    assert compared_rows["easy", 2].speedup_ratio == pytest.approx(1.0)
    assert compared_rows["easy", 2].speedup_ratio_lo is None, "too few prompts for an interval"
    (said,) = [each for each in compare([SWEEP, run]).caveats if each.code == "other_prompts"]
    assert (said.values["prompts"], said.values["other_lengths"]) == (15, 1)


def test_alpha_differs_as_its_counts_do() -> None:
    cell = [t for t in SWEEP.trials if (t.prompt_set, t.temperature, t.k) == ("hard", 0.0, 4)]
    accepted = sum(t.accepted or 0 for t in cell)
    judged = accepted + sum(t.rejected or 0 for t in cell)
    row = rows(other(lambda t: replace(t, accepted=(t.accepted or 0) + 1) if t.k else t))["hard", 4]
    more = (accepted + len(cell)) / (judged + len(cell))
    assert row.alpha_difference == pytest.approx(more - accepted / judged)


def test_without_a_difference_p_values_are_uniform() -> None:
    p_values = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        scale = {id(t): np.exp(rng.normal(0, 0.1)) for t in SWEEP.trials}
        trials = [replace(t, decode_s=(t.decode_s or 0) * scale[id(t)]) for t in SWEEP.trials]
        one_k = tuple(t for t in trials if t.k in (0, 2) and t.temperature == 0)
        compared = compare([SWEEP, replace(SWEEP, folder=Path("other"), trials=one_k)]).rows
        p_values += [r.p_value_holm for r in compared if r.prompt_set != "all" and r.p_value_holm]
    assert len(p_values) == 50
    # Three p-values are adjusted together, so at most a third of them is below 0.05 / 3
    assert np.mean(np.array(p_values) < 0.05) < 0.1
    assert np.mean(np.array(p_values) == 1.0) > 0.2


@pytest.mark.parametrize(
    ("factor", "noise", "fail_below", "outcome"),
    [
        (1.25, 0.01, 0.95, "fail"),
        (1.05, 0.15, 0.97, "unclear"),
        (1.0, 0.01, 0.95, "pass"),
        (0.8, 0.01, 0.95, "pass"),
    ],
)
def test_a_build_fails_only_on_a_loss_beyond_noise(
    factor: float, noise: float, fail_below: float, outcome: str
) -> None:
    comparison = compare([SWEEP, other(slower(factor, noise, k=4))], fail_below)
    assert comparison.runs[0].outcome == outcome
    assert comparison.failed == (outcome == "fail")


@pytest.mark.parametrize(
    ("temperature", "k", "decides"),
    [(0.0, 1, (0.0, 1)), (1.0, 2, (1.0, 2)), (0.0, 0, (0.0, 4)), (0.0, 16, (0.0, 4))],
)
def test_the_cell_that_decides_is_the_one_that_would_be_served(
    temperature: float, k: int, decides: tuple[float, int]
) -> None:
    """Where none is served, or the other run lacks that K: the reference's fastest."""
    row = deciding(compare([SWEEP, other()]).rows, temperature, k)
    assert row is not None
    assert (row.prompt_set, row.temperature, row.k) == ("all", *decides)


DUMMY = Manifest.of(nested(SWEEP.manifest.entries, "models.draft.weights", "dummy"))
ELSEWHERE = Manifest.of(nested(SWEEP.manifest.entries, "environment.device", "cuda"))


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (other(), None),
        (other(manifest=SWEEP.manifest.updated(status="failed")), "incomplete_run"),
        (other(manifest=SWEEP.manifest.updated(status="running")), "incomplete_run"),
        (other(manifest=ELSEWHERE), None),  # it is the first of the settings that differ
        (other(slower(1.2)), None),  # speedups are each against their own baseline
        (other(manifest=DUMMY), "speedups_not_compared"),
        (other(manifest=SWEEP.manifest.updated(prompts_sha256="other")), "other_prompts"),
        (other(trials=SWEEP.trials[:64]), "other_prompts"),
    ],
)
def test_what_a_reader_must_know_is_said(run: StoredRun, code: str | None) -> None:
    caveats = compare([SWEEP, run]).caveats
    assert list(dict.fromkeys(caveat.code for caveat in caveats)) == ([code] if code else [])


def test_repetitions_pair_in_their_order_whatever_the_first_is_called() -> None:
    """Of a sweep that ends with its verdicts the first that is timed has the number 1."""
    later = other(lambda trial: replace(trial, repetition=trial.repetition + 1))
    assert {row.speedup_ratio for row in rows(later).values() if row.k} == {1.0}


def test_dummy_weights_are_compared_in_time_only() -> None:
    run = other(manifest=DUMMY)
    compared = compare([SWEEP, run]).rows
    assert compared
    for row in compared:
        assert row.ms_per_token == row.reference_ms_per_token
        assert row.speedup is row.speedup_ratio is row.alpha is row.p_value_holm is None
    with pytest.raises(UserError, match="no speedup of other can be compared"):
        compare([SWEEP, run], 0.95)


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([SWEEP], "give at least two"),
        ([SWEEP, SWEEP], "is given twice"),
        ([SWEEP, other(lambda t: replace(t, prompt="x"))], "no prompt in common"),
        ([SWEEP, other(config=nested(SWEEP.config, "model", {"id": "b"}))], "different targets"),
        ([SWEEP, load(FROZEN / "audition")], "was made by audition and timed no generation"),
        ([load(FROZEN / "sweep_replay"), SWEEP], "was replayed and timed no generation"),
        ([SWEEP, other(trials=())], "holds no results yet"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs: list[StoredRun], says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        compare(runs)
    assert "\n" not in str(refused.value)


def test_a_model_in_two_checkouts_is_one_target() -> None:
    moved = other(config=nested(SWEEP.config, "model.id", "/home/b/model"))
    assert compare([SWEEP, moved]).rows


def test_differences_name_what_differs_and_not_what_always_does() -> None:
    config = nested(nested(SWEEP.config, "new_tokens", 64), "results_root", "there")
    machine = {**SWEEP.manifest.environment.entries, "device_name": "Xeon"}
    manifest = SWEEP.manifest.updated(environment=machine, created_utc="")
    differences = compare([SWEEP, other(config=config, manifest=manifest)]).differences
    assert [(entry.name, entry.values[1]) for entry in differences] == [
        ("device_name", "Xeon"),
        ("new_tokens", 64),
    ]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """The reference, and a run whose speculative generations took longer; both unfinished."""
    paths: list[str] = []
    for name, change in (("one", lambda trial: trial), ("two", slower(1.25, k=4))):
        folder = RunFolder.create(tmp_path / name, "sweep", ["tiny"], SWEEP.config)
        for trial in SWEEP.trials:
            folder.trials.append(change(trial))
        folder.write_timings(RunFolder(SWEEP.folder, SWEEP.manifest).timings())
        folder.note(**{**SWEEP.manifest.entries, "status": "running"})
        paths.append(str(folder.path))
    return paths


def test_a_comparison_is_a_run_of_its_own(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(*runs: str, fail_below: float) -> Outcome:
        root = str(tmp_path / "out")
        return report.run(ReportConfig(runs=list(runs), results_root=root, fail_below=fail_below))

    ended = compared(*folders, fail_below=0.95)
    assert ended.status == 1
    assert ended.folder is not None
    assert ended.folder.name.endswith("_report_compare")
    assert len(pd.read_csv(ended.folder / "comparison.csv")) == 24
    assert load(ended.folder).manifest.status == "complete"
    for text in (capsys.readouterr().out, (ended.folder / "report.md").read_text()):
        assert "FAIL, the whole interval is below fail_below=0.95: " in " ".join(text.split())
    assert compared(*folders, fail_below=0.7).status == 0
    assert compared(*reversed(folders), fail_below=0.95).status == 0, "a gain is no loss"
    three = compared(folders[0], folders[1], str(FROZEN / "sweep"), fail_below=0.95)
    assert three.status == 1
    with pytest.raises(UserError, match="is given twice"):
        compared(folders[0], folders[0], fail_below=0.95)
    assert len(list((tmp_path / "out").iterdir())) == 4, "nothing is stored of what is refused"


def test_a_threshold_on_one_run_says_why_it_failed(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.run(ReportConfig(run=folders[0], fail_below=99)).status == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("fail_below=99: FAIL, the headline's speedup is below it: ")
    assert last.endswith(", measured, for the harness's loop at temperature 0")
    assert report.run(ReportConfig(run=folders[0], fail_below=0.5)).status == 0
    with pytest.raises(UserError, match="timed no round of mlx-lm"):
        report.run(ReportConfig(run=folders[0], fail_below=0.5, engine="mlx"))
