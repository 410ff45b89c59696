"""Comparing stored runs: paired ratios, what may not be compared, and a build's exit status."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from reporting_fixtures import ENVIRONMENT, PAIR

from harness.analysis.compare import compare_trials
from harness.analysis.compare_cells import PairedCell
from harness.analysis.compare_gate import headline
from harness.analysis.compare_rows import ComparisonRow, with_holm
from harness.analysis.compare_texts import compare_texts
from harness.analysis.differences import differences
from harness.commands import report
from harness.commands.outcome import Outcome
from harness.config import ReportConfig
from harness.records import Summary, Trial, UserError, Verdict
from harness.stats.intervals import speedup_interval
from harness.storage import RunFolder, load

EXAMPLES = Path(__file__).parents[1] / "results" / "examples"
BLANK = ComparisonRow("a", "b", "d", "d", None, None, 0, "measured", "complete")
TOKENS = 40
SPEEDUP = {0: 1.0, 1: 1.2, 2: 1.6}

Change = Callable[[Trial], Trial]


def same(trial: Trial) -> Trial:
    return trial


def times(factor: float, *, k: int | None = None) -> Change:
    """Generations that take `factor` as long, at one K or at every K."""

    def change(trial: Trial) -> Trial:
        hit = k is None or trial.k == k
        return replace(trial, decode_s=(trial.decode_s or 0.0) * factor) if hit else trial

    return change


def trials(
    *,
    change: Change = same,
    noise: float = 0.0,
    seed: int = 0,
    sets: Sequence[str] = ("easy", "hard"),
    prompts: int = 10,
    temperature: float = 0.0,
) -> list[Trial]:
    """Generations of a pair whose prompts differ by a factor of several in every time."""
    rng, ease = np.random.default_rng(seed), np.random.default_rng(99)
    made: list[Trial] = []
    for name in sets:
        for number in range(prompts):
            pace = float(np.exp(ease.normal(0.0, 0.6)))
            gain = float(np.exp(ease.normal(0.0, 0.2)))
            for k, speedup in SPEEDUP.items():
                seconds = 0.01 * TOKENS * pace / speedup / (gain if k else 1.0)
                made.append(
                    change(
                        _trial(name, number, k, temperature, seconds * np.exp(rng.normal(0, noise)))
                    )
                )
    return made


def _trial(name: str, number: int, k: int, temperature: float, seconds: float) -> Trial:
    drafted: dict[str, Any] = {}
    if k:
        rounds, accepted = 20, 18 + number % 3
        drafted = {
            "rounds": rounds,
            "drafted": rounds * k,
            "accepted": accepted,
            "rejected": rounds - 5,
            "bonus": 5,
            "cut": 0,
        }
    return Trial(
        cell=f"{name}{number}{k}{temperature}",
        prompt_set=name,
        prompt=f"{name}-{number}",
        repetition=0,
        k=k,
        temperature=temperature,
        rule="ratio" if k else None,
        status="ok",
        prompt_tokens=20 + number,
        new_tokens=TOKENS,
        decode_s=float(seconds),
        prefill_s=0.01,
        stop_reason="budget",
        tokens=tuple(range(number, number + TOKENS)),
        **drafted,
    )


def by_cell(rows: Sequence[ComparisonRow]) -> dict[tuple[str | None, int], ComparisonRow]:
    return {(row.prompt_set, row.k): row for row in rows}


def test_a_slower_machine_moves_times_and_leaves_speedups() -> None:
    rows = by_cell(compare_trials(trials(), trials(change=times(1.2)), BLANK))
    assert [key for key in rows if key[1] == 2] == [("easy", 2), ("hard", 2), ("all", 2)]
    for row in rows.values():
        assert row.ms_ratio == pytest.approx(1.2)
        assert row.speedup_ratio is None if row.k == 0 else row.speedup_ratio == pytest.approx(1)
    assert rows["all", 2].p_value_holm == 1.0
    assert rows["all", 2].alpha_difference == 0.0


def test_pairing_by_prompt_makes_a_small_loss_visible() -> None:
    before, after = trials(noise=0.01), trials(noise=0.01, seed=1, change=times(1.1, k=2))
    row = by_cell(compare_trials(before, after, BLANK))["all", 2]
    assert row.speedup_ratio == pytest.approx(1 / 1.1, rel=0.02)
    assert row.speedup_ratio_hi is not None
    assert row.speedup_ratio_hi < 0.95
    assert row.p_value_holm is not None
    assert row.p_value_holm < 0.001
    plain, drafted = ([t for t in before if t.k == k] for k in (0, 2))
    spent = [np.array([t.decode_s for t in side]) for side in (plain, drafted)]
    tokens = np.full(len(plain), float(TOKENS))
    alone = speedup_interval(spent[0], tokens, spent[1], tokens, [t.prompt_set for t in plain])
    assert alone is not None
    assert alone.hi / alone.lo > 1.1, "unpaired, prompts alone would hide it"


def test_weights_make_the_workload() -> None:
    slow_easy = lambda t: times(2.0, k=2)(t) if t.prompt_set == "easy" else t  # noqa: E731
    rows = by_cell(
        compare_trials(trials(), trials(change=slow_easy), BLANK, weights={"easy": 0, "hard": 1})
    )
    assert rows["easy", 2].speedup_ratio == pytest.approx(0.5)
    assert rows["all", 2].speedup_ratio == pytest.approx(1.0)


def test_only_generations_that_all_four_sides_finished_are_compared() -> None:
    def fail(trial: Trial) -> Trial:
        lost = (trial.prompt, trial.k) == ("easy-0", 0) or (trial.prompt, trial.k) == ("easy-1", 2)
        return replace(trial, status="failed", error="broke", decode_s=None) if lost else trial

    rows = by_cell(compare_trials(trials(), trials(change=fail), BLANK))
    assert (rows["easy", 2].prompts, rows["easy", 2].status) == (8, "partial")
    assert (rows["easy", 1].prompts, rows["easy", 1].status) == (9, "complete")
    assert rows["hard", 2].prompts == 10
    assert rows["easy", 2].speedup_ratio == pytest.approx(1.0)


def test_a_prompt_of_another_length_is_another_prompt() -> None:
    longer = lambda t: replace(t, prompt_tokens=99) if t.prompt == "easy-3" else t  # noqa: E731
    rows = by_cell(compare_trials(trials(), trials(change=longer), BLANK))
    assert rows["easy", 2].prompts == 9
    assert compare_trials(trials(sets=["easy"]), trials(sets=["hard"]), BLANK) == []


def test_few_prompts_give_ratios_without_intervals() -> None:
    row = by_cell(compare_trials(trials(prompts=3), trials(prompts=3), BLANK))["all", 2]
    assert row.speedup_ratio == pytest.approx(1.0)
    assert row.speedup_ratio_lo is None


def test_alpha_and_acceptance_rate_differ_as_their_counts_do() -> None:
    worse = lambda t: replace(t, accepted=t.accepted - 6) if t.k else t  # noqa: E731
    row = by_cell(compare_trials(trials(), trials(change=worse), BLANK))["easy", 2]
    before, after = 18 * 10 + 9, 12 * 10 + 9
    assert row.alpha_difference == pytest.approx(after / (after + 150) - before / (before + 150))
    assert row.acceptance_rate_difference == pytest.approx((after - before) / 400)
    assert row.alpha_difference_hi is not None
    assert row.alpha_difference_hi < 0


def test_without_a_difference_the_p_values_are_uniform() -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        pace = np.exp(rng.normal(0, 0.5, 20))
        tokens = rng.integers(20, 60, 20).astype(float)
        seconds = [tokens * pace * np.exp(rng.normal(0, 0.05, 20)) for _ in range(4)]
        columns = np.stack([c for s in seconds for c in (s, tokens)] + [tokens] * 8, axis=1)
        names = ["a"] * 12 + ["b"] * 8
        cell = PairedCell(columns, names, {"a": 0.5, "b": 0.5}, 0)
        found.append(cell.p_value([(6, 1), (2, -1), (4, -1), (0, 1)]))
    assert 0.45 < np.mean(found) < 0.55
    assert 0.03 < np.mean(np.array(found) < 0.05) < 0.09


def test_holm_by_hand() -> None:
    rows = [replace(BLANK, p_value=p) for p in (0.01, 0.04, 0.03, None)]
    assert [row.p_value_holm for row in with_holm(rows)] == pytest.approx([0.03, 0.06, 0.06, None])


def judged(ratio: float, lo: float | None, hi: float | None, **changes: Any) -> ComparisonRow:
    row = replace(BLANK, prompt_set="all", temperature=0.0, k=2, reference_speedup=1.5)
    return replace(row, speedup_ratio=ratio, speedup_ratio_lo=lo, speedup_ratio_hi=hi, **changes)


@pytest.mark.parametrize(
    ("ratio", "lo", "hi", "outcome"),
    [
        (0.90, 0.86, 0.94, "fail"),
        (0.90, 0.84, 0.96, "unclear"),
        (0.97, 0.93, 1.01, "pass"),
        (0.90, None, None, "fail"),
        (0.95, 0.95, 0.95, "pass"),
    ],
)
def test_a_build_fails_only_on_what_is_beyond_noise(
    ratio: float, lo: float | None, hi: float | None, outcome: str
) -> None:
    found = headline("b", [judged(ratio, lo, hi)], temperature=0.0, k=2, fail_below=0.95)
    assert found.outcome == outcome


def test_the_cell_that_decides_is_the_one_that_would_be_served() -> None:
    rows = [
        judged(0.9, None, None, k=1, reference_speedup=1.1),
        judged(0.8, None, None, k=2),
        judged(0.7, None, None, k=2, prompt_set="easy"),
        judged(0.6, None, None, k=2, temperature=1.0),
    ]

    def ratio(**where: Any) -> float | None:
        row = headline("b", rows, **where).row
        return row.speedup_ratio if row else None

    assert ratio(temperature=0.0, k=1) == 0.9
    assert ratio(temperature=1.0, k=2) == 0.6
    assert ratio(temperature=0.0, k=0) == 0.8, "not served: the fastest of the reference"
    assert ratio(temperature=0.0, k=4) == 0.8, "the other run lacks that K"


def test_greedy_texts_and_counts_that_changed_are_found() -> None:
    def other_word(trial: Trial) -> Trial:
        return replace(trial, tokens=(1000, *(trial.tokens or ())[1:])) if trial.k == 1 else trial

    def other_rounds(trial: Trial) -> Trial:
        return replace(trial, rounds=21) if trial.prompt == "hard-2" and trial.k else trial

    check = compare_texts(trials(), trials(change=other_word))
    assert (check.compared, check.differing) == (60, 20)
    assert check.first == "easy/easy-0 at K=1"
    check = compare_texts(trials(), trials(change=other_rounds))
    assert (check.differing, check.counted, check.recounted) == (0, 40, 2)
    sampled = trials(temperature=1.0), trials(temperature=1.0, change=other_word)
    assert compare_texts(*sampled).compared == 0


def test_a_text_that_the_budget_cut_is_compared_as_far_as_it_goes() -> None:
    short = lambda t: replace(t, tokens=(t.tokens or ())[:9], new_tokens=9)  # noqa: E731
    ended = lambda t: replace(short(t), stop_reason="eos")  # noqa: E731
    assert compare_texts(trials(), trials(change=short)).differing == 0
    assert compare_texts(trials(), trials(change=ended)).differing == 60


def stored(
    root: Path,
    made: Sequence[Trial],
    *,
    config: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **manifest: Any,
) -> str:
    """A sweep's folder with these generations, judged to serve K=2."""
    whole = {**PAIR, "mode": "measure", "decode": {"rule": "ratio"}, "repetitions": 1}
    folder = RunFolder.create(root, "sweep", ("tiny",), {**whole, **(config or {})})
    for trial in made:
        folder.append_trial(trial)
    verdict = Verdict("speculate", "tiny_good", 2, 0.0, "all", 1.6, 1.5, 1.7, "K=2")
    folder.write_summary(Summary(verdict=verdict))
    around = {**ENVIRONMENT["environment"], **(environment or {})}
    folder.update_manifest({**ENVIRONMENT, "environment": around, "status": "complete", **manifest})
    return str(folder.path)


def compared(root: Path, *runs: str, **settings: Any) -> Outcome:
    return report.run(ReportConfig(runs=list(runs), results_root=str(root / "out"), **settings))


def summary_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.folder is not None
    return json.loads((outcome.folder / "summary.json").read_text())


def test_a_comparison_is_a_run_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = stored(tmp_path, trials(noise=0.01))
    two = stored(
        tmp_path,
        trials(noise=0.01, seed=1, change=times(1.12, k=2)),
        environment={"packages": {"torch": "2.14.0", "transformers": "5.23.0"}},
    )
    ended = compared(tmp_path, one, two, fail_below=0.95)
    out = capsys.readouterr().out
    assert ended.status == 1
    assert ended.folder is not None
    assert ended.folder.name.endswith("_report_compare")
    table = pd.read_csv(ended.folder / "comparison.csv")
    assert tuple(table.columns) == tuple(field.name for field in fields(ComparisonRow))
    assert len(table) == 9
    assert load(ended.folder).manifest["status"] == "complete"
    text = (ended.folder / "report.md").read_text()
    for said in (out, text):
        flat = " ".join(said.split())
        assert "fail_below=0.95: FAIL, the whole interval is below it" in flat
        assert "What differs around them" in flat
        assert "2.14.0" in flat
    assert compared(tmp_path, one, two, fail_below=0.8).status == 0
    assert compared(tmp_path, two, one, fail_below=0.95).status == 0, "a gain is no regression"


def test_the_same_two_folders_always_give_the_same_numbers(tmp_path: Path) -> None:
    one = stored(tmp_path, trials(noise=0.05, sets=["easy"]))
    two = stored(tmp_path, trials(noise=0.05, seed=1, sets=["easy"]))
    tables = [compared(tmp_path, one, two).folder for _ in range(2)]
    texts = [(folder / "comparison.csv").read_text() for folder in tables if folder]
    assert texts[0] == texts[1]


def warned(root: Path, *runs: str) -> str:
    return "\n".join(summary_of(compared(root, *runs))["caveats"])


EASY = {"sets": ["easy"], "prompts": 4}


def test_what_a_reader_must_be_told_is_told(tmp_path: Path) -> None:
    one = stored(tmp_path, trials(**EASY))
    assert warned(tmp_path, one, stored(tmp_path, trials(**EASY))) == ""
    elsewhere = stored(
        tmp_path, trials(**EASY), environment={"device": "cuda", "device_name": "A10"}
    )
    ended = compared(tmp_path, one, elsewhere)
    summary = summary_of(ended)
    assert "DIFFERENT DEVICES" in summary["caveats"][0]
    assert {row["note"] for row in summary["comparison"]} == {"other device"}
    assert all(row["speedup_ratio"] for row in summary["comparison"] if row["k"])
    assert "FAILED RUN" in warned(tmp_path, one, stored(tmp_path, trials(**EASY), status="failed"))
    unfinished = stored(tmp_path, trials(**EASY), status="running")
    assert "UNFINISHED RUN" in warned(tmp_path, one, unfinished)
    more = stored(tmp_path, trials(sets=["easy"], prompts=6))
    assert "only the 4 prompts that both have" in warned(tmp_path, one, more)
    edited = stored(tmp_path, trials(**EASY), prompts_sha256="other")
    assert "hashes differ" in warned(tmp_path, one, edited)


def test_a_changed_greedy_text_is_said_and_so_is_a_changed_count(tmp_path: Path) -> None:
    one = stored(tmp_path, trials(**EASY))
    word = lambda t: replace(t, tokens=(1000, *(t.tokens or ())[1:]))  # noqa: E731
    said = warned(tmp_path, one, stored(tmp_path, trials(**EASY, change=word)))
    assert "ONE RUN CHANGED ITS OUTPUT" in said
    rounds = lambda t: replace(t, rounds=30) if t.k else t  # noqa: E731
    recounted = trials(**EASY, change=rounds)
    assert "SAME TEXTS, OTHER COUNTS: 8 of 8" in warned(tmp_path, one, stored(tmp_path, recounted))
    draft = {"draft": {**PAIR["draft"], "id": "embedded:tiny_small", "name": "tiny_small"}}
    another = stored(tmp_path, recounted, config=draft)
    assert "OTHER COUNTS" not in warned(tmp_path, one, another), "another draft may"


def test_dummy_weights_are_compared_in_time_only(tmp_path: Path) -> None:
    one = stored(tmp_path, trials(**EASY))
    models = {**ENVIRONMENT["models"], "draft": {"name": "tiny_good", "weights": "dummy"}}
    dummy = stored(tmp_path, trials(**EASY), models=models)
    summary = summary_of(compared(tmp_path, one, dummy))
    assert "NO SPEEDUPS COMPARED" in summary["caveats"][0]
    for row in summary["comparison"]:
        assert row["ms_ratio"] == pytest.approx(1.0)
        assert row["speedup_ratio"] is row["alpha_difference"] is row["reference_alpha"] is None
    with pytest.raises(UserError, match="no speedup of"):
        compared(tmp_path, one, dummy, fail_below=0.95)


def test_runs_that_cannot_be_compared_are_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    one = stored(tmp_path, trials(**EASY))
    other = stored(tmp_path, trials(sets=["hard"], prompts=4))
    model = {"model": {**PAIR["model"], "id": "org/big", "name": "big"}}
    target = stored(tmp_path, trials(**EASY), config=model)
    arithmetic = RunFolder.create(tmp_path, "breakeven", (), {})
    newer = stored(tmp_path, trials(**EASY), schema_version=99)
    cases = [
        ([one], "runs: give at least two"),
        ([one, one], "is given twice"),
        ([one, other], "no prompt in common"),
        ([one, target], "different targets"),
        ([one, str(arithmetic.path)], "was made by breakeven"),
        ([one, str(tmp_path)], "not a run folder"),
        ([one, newer], "newer version"),
    ]
    for folders, says in cases:
        with pytest.raises(UserError) as refused:
            compared(tmp_path, *folders)
        assert says in str(refused.value)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"run": "a", "runs": ["b", "c"]}, "run and runs"),
        ({"run": "a", "fail_below": -1.0}, "fail_below=-1.0"),
        ({"run": "a", "fail_below": float("nan")}, "fail_below=nan"),
        ({}, "run: name the run folder"),
    ],
)
def test_report_settings_that_cannot_be_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        report.run(ReportConfig(**settings))


def test_a_model_in_two_checkouts_is_one_target(tmp_path: Path) -> None:
    paths = [{"model": {**PAIR["model"], "id": f"/home/{who}/model"}} for who in "ab"]
    runs = [stored(tmp_path, trials(**EASY), config=config) for config in paths]
    assert compared(tmp_path, *runs).status == 0


def test_three_runs_are_each_held_against_the_first(tmp_path: Path) -> None:
    runs = [
        stored(tmp_path, trials(**EASY, change=times(factor, k=2))) for factor in (1.0, 1.0, 1.25)
    ]
    summary = summary_of(compared(tmp_path, *runs))
    ratios = [entry["row"]["speedup_ratio"] for entry in summary["comparison_headlines"]]
    assert ratios == pytest.approx([1.0, 0.8])
    assert compared(tmp_path, *runs, fail_below=0.95).status == 1


def test_replayed_runs_are_compared_as_they_stand(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        shutil.copytree(EXAMPLES / "embedded_audition", folder)
    results = folders[1] / "results.csv"
    table = pd.read_csv(results)
    table.loc[table["draft"] == "tiny_good", "speedup"] *= 0.5
    table.to_csv(results, index=False)
    summary = summary_of(compared(tmp_path, *map(str, folders)))
    assert "unpaired" in summary["caveats"][0]
    good = {row["speedup_ratio"] for row in summary["comparison"] if row["draft"] == "tiny_good"}
    small = {row["speedup_ratio"] for row in summary["comparison"] if row["draft"] == "tiny_small"}
    assert good == {0.5}
    assert small == {1.0}
    assert all(row["speedup_ratio_lo"] is None for row in summary["comparison"])


def test_differences_name_what_differs_and_pass_over_what_always_does(tmp_path: Path) -> None:
    one = stored(tmp_path, trials(**EASY), config={"new_tokens": 48, "results_root": "here"})
    two = stored(
        tmp_path,
        trials(**EASY),
        config={"new_tokens": 64, "results_root": "there"},
        environment={"device_name": "Xeon", "command": ["sweep", "new_tokens=64"]},
    )
    found = {entry.name: entry.values for entry in differences([load(one), load(two)])}
    assert found == {"device_name": ("AMD EPYC 7R13", "Xeon"), "new_tokens": (48, 64)}


def test_a_threshold_on_one_run_says_why_it_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = stored(tmp_path, trials(**EASY))
    assert report.run(ReportConfig(run=one, fail_below=1.7)).status == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "fail_below=1.7: FAIL, the verdict's speedup is below it: 1.60x at K=2"
    )
    assert report.run(ReportConfig(run=one, fail_below=1.5)).status == 0


def test_texts_that_a_setting_changes_are_nobodys_fault(tmp_path: Path) -> None:
    one = stored(tmp_path, trials(**EASY))
    changed = trials(**EASY, change=lambda t: replace(t, tokens=(1000, *(t.tokens or ())[1:])))
    penalty = {"decode": {"rule": "ratio", "repetition_penalty": 1.3}}
    said = warned(tmp_path, one, stored(tmp_path, changed, config=penalty))
    assert "decode.repetition_penalty differs, which changes texts" in said
    assert "CHANGED ITS OUTPUT" not in said
