"""The main job, end to end on the embedded pair: contract, verdict, resume, failures."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import fill_hub_cache, qwen3, save
from runs import stored, timed_little

from harness import prompts as prompt_sets
from harness.analysis import analyse
from harness.cli import compose
from harness.commands import sweep
from harness.commands.pair import ModelPair, open_pair
from harness.commands.requests import request
from harness.commands.run_lifecycle import Outcome
from harness.commands.tasks import grid_tasks
from harness.config import SweepConfig
from harness.measurement.generations import run_trial
from harness.models.lean.model import LeanModel
from harness.records import NotMeasured, UserError
from harness.storage import TABLES, StoredRun, load
from harness.summary import from_json

KS, TEMPERATURES = [1, 4], [0.0, 1.0]


def config(root: Path, *overrides: str) -> SweepConfig:
    grid = ["k=[1,4]", "temperature=[0,1]", "new_tokens=12", "threads=1", "until=all"]
    return compose("sweep", [f"results_root={root}", *grid, *overrides])


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    with timed_little():
        outcome = sweep.run(config(tmp_path_factory.mktemp("results"), "prompts.limit=8"))
    assert outcome.status == 0
    return stored(outcome)


def test_a_sweep_measures_predicts_and_replays_every_cell(swept: StoredRun) -> None:
    assert swept.manifest.status == "complete"
    assert tuple(swept.results.columns) == TABLES["results.csv"].columns
    names = ["prompt_set", "temperature", "k"]
    cells = {
        source: sorted(rows[names].itertuples(index=False, name=None))
        for source, rows in swept.results.groupby("source")
    }
    grid = [(name, t, k) for name in ("easy", "hard") for t in TEMPERATURES for k in (0, *KS)]
    assert cells == {"measured": grid, "replayed": grid}
    measured = swept.results[swept.results.source == "measured"]
    assert (measured.prompts == 8).all()
    for row in measured[measured.k > 0].itertuples():
        trials = [
            t
            for t in swept.trials
            if (t.prompt_set, t.temperature, t.k) == (row.prompt_set, row.temperature, row.k)
        ]
        accepted, drafts, rejected = (
            sum(getattr(trial, name) for trial in trials)
            for name in ("accepted", "drafted", "rejected")
        )
        assert row.acceptance_rate == pytest.approx(accepted / drafts)
        assert row.alpha == pytest.approx(accepted / (accepted + rejected))
    assert swept.latency[swept.latency.kind == "verify"].tokens.tolist() == [1, 2, 3, 4, 5]
    plots = sorted(path.name for path in (swept.folder / "plots").glob("*.svg"))
    report = (swept.folder / "report.md").read_text()
    assert plots
    assert all(name in report for name in plots)


def test_the_summary_is_what_the_analysis_of_the_folder_gives(swept: StoredRun) -> None:
    written = from_json((swept.folder / "summary.json").read_bytes())
    again = analyse(swept)
    assert written.run.status == again.run.status == "complete"
    assert (written.headline, written.answers) == (again.headline, again.answers)
    assert written.headline == written.per_temperature[0]
    assert [verdict.temperature for verdict in written.per_temperature] == TEMPERATURES
    assert len(written.per_prompt_set) == 2 * len(TEMPERATURES)
    assert len(written.replay_checks) == 8
    for check in written.replay_checks:
        if check.temperature == 0:
            assert check.gap_in_standard_errors == pytest.approx(0.0, abs=1e-6)
        else:
            assert abs(check.gap_in_standard_errors or 0.0) < 5


def test_latency_csv_has_a_row_of_plain_tokens_and_of_each_k_by_temperature(
    swept: StoredRun,
) -> None:
    rounds = swept.latency[swept.latency.kind == "round"]
    assert swept.latency.columns[-1] == "temperature"
    listed = list(zip(rounds.role, rounds.tokens, rounds.temperature, strict=True))
    assert listed == [
        ("draft" if k else "target", k, temperature)
        for temperature in TEMPERATURES
        for k in (0, *KS)
    ]
    plain = [t.seconds / t.new_tokens for t in swept.rounds if (t.k, t.temperature) == (0, 0.0)]
    assert rounds.median_ms.iloc[0] == pytest.approx(1e3 * np.median(plain))
    visits = len({timing.visit for timing in swept.rounds})
    assert list(rounds.samples) == [len(plain)] * len(rounds) == [visits] * len(rounds)
    assert swept.latency[swept.latency.kind != "round"].temperature.isna().all()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("few_samples")
def test_a_replayed_sweep_measures_no_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.commands.requests.run_trial", lambda *_: pytest.fail("it ran one"))
    run = stored(sweep.run(config(tmp_path, "mode=replay", "prompts.limit=4")))
    assert set(run.results.source) == {"replayed"}
    assert analyse(run).headline is not None


@pytest.mark.usefixtures("few_samples")
def test_resuming_runs_what_is_missing_and_nothing_else(
    swept: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = ["prompts.limit=8", f"resume={swept.folder}"]
    for module in ("commands.requests", "measurement.round_times"):
        monkeypatch.setattr(f"harness.{module}.run_trial", lambda *_: pytest.fail("it ran one"))
    assert sweep.run(config(swept.folder.parent, *same)).status == 0
    assert load(swept.folder).trials == swept.trials
    assert load(swept.folder).rounds == swept.rounds
    with pytest.raises(UserError, match=r"differs in prompts\.limit=9 \(.*: 8\), seed=5 "):
        sweep.run(config(swept.folder.parent, "seed=5", "prompts.limit=9", same[1]))


@pytest.mark.usefixtures("few_samples")
def test_a_run_is_not_resumed_with_other_prompts_or_other_weights(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    models = [save(qwen3(seed), tmp_path / name) for seed, name in ((1, "one"), (2, "two"))]
    asked = [
        *("model=hf", f"model.id={models[0]}", "draft=hf", f"draft.id={models[1]}"),
        *(f"prompts.files=[{file}]", "prompts.sets=[]", "k=[1]", "temperature=[0]"),
    ]
    file.write_text('{"prompt": "Count from 1 to 9."}\n')
    before = sweep.run(config(tmp_path / "results", *asked))
    again = [*asked, f"resume={before.folder}"]
    assert sweep.run(config(tmp_path / "results", *again)).status == 0
    save(qwen3(3), models[1])
    with pytest.raises(UserError, match="models changed since"):
        sweep.run(config(tmp_path / "results", *again))
    save(qwen3(2), models[1])
    file.write_text('{"prompt": "Count from 2 to 8."}\n')
    with pytest.raises(UserError, match="prompts changed since"):
        sweep.run(config(tmp_path / "results", *again))
    assert stored(before).manifest.status == "complete"


def test_every_k_leads_equally_often_at_every_temperature(tmp_path: Path) -> None:
    for grid, temperatures in (("[4]", "[0,1]"), ("[1,2,4]", "[0,1]"), ("[1,2,4,8]", "[0,1,2]")):
        settings = config(tmp_path, f"k={grid}", f"temperature={temperatures}", "prompts.limit=20")
        pair = open_pair(settings, prompt_sets.load(settings.prompts))
        tasks = grid_tasks(pair.prompts, settings, settings.k, settings.temperature)
        requests = [request(pair, settings, task) for task in tasks]
        groups = list(zip(*[iter(requests)] * (len(settings.k) + 1), strict=True))
        for temperature in settings.temperature:
            leaders = [g[0].k for g in groups if g[0].sampling.temperature == temperature]
            counts = [leaders.count(k) for k in (0, *settings.k)]
            assert max(counts) - min(counts) <= 1


@pytest.mark.usefixtures("few_samples")
def test_a_cell_out_of_memory_is_recorded_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, measure = LeanModel.forward, sweep.measure_steps
    generating = False

    def limited(self: LeanModel, tokens: torch.Tensor) -> torch.Tensor:
        if generating and len(tokens) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return forward(self, tokens)

    def steps_then(*args: object) -> object:
        nonlocal generating
        timings = measure(*args)  # type: ignore[arg-type]
        generating = True
        return timings

    monkeypatch.setattr(LeanModel, "forward", limited)
    monkeypatch.setattr(sweep, "measure_steps", steps_then)
    outcome = sweep.run(config(tmp_path, "prompts.limit=2", "temperature=[0]"))
    run = stored(outcome)
    assert (outcome.status, run.manifest.status) == (1, "failed")
    measured = run.results[run.results.source == "measured"]
    status = dict(measured.groupby("k").status.first())
    assert status == {0: "complete", 1: "complete", 4: "failed"}
    assert measured[measured.k == 4].error.str.contains("out of memory").all()
    assert {line.k for line in run.rounds} == {0, 1, 4}, "one visit came before the steps"
    (noted,) = run.manifest.not_measured
    assert noted == NotMeasured("rounds", draft="tiny_good", k=4, temperature=0.0)
    assert noted.error.startswith("out of memory")
    failures = analyse(run).failures
    assert len(failures) == 4 + 1
    assert failures[-1].where == "rounds of tiny_good at K=4, temperature 0"


def test_nothing_is_stored_where_nothing_can_be_or_is_to_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"new_tokens=100000: prompt \w+/\S+ has \d+ tokens"):
        sweep.run(config(tmp_path, "new_tokens=100000"))
    outcome = sweep.run(config(tmp_path, "dry_run=true", "prompts.limit=3", "repetitions=2"))
    assert outcome == Outcome(None, 0)
    assert "72 (repetitions=2)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("draft", "ks", "limit"),
    [
        ("tiny_good", "[4,16]", 3),
        pytest.param("tiny_small", "[4]", "null", marks=pytest.mark.exhaustive),
        pytest.param("tiny_good", "[1,2,4,8,16]", "null", marks=pytest.mark.exhaustive),
    ],
)
def test_greedy_text_is_identical_on_every_shipped_prompt(
    tmp_path: Path, draft: str, ks: str, limit: int | str
) -> None:
    """With rejections and full acceptances aplenty; some prompts of each set in make test."""
    grid = ["temperature=[0]", f"k={ks}", "new_tokens=16", f"draft={draft}"]
    grid += [f"prompts.limit={limit}"]
    settings = config(tmp_path, *grid)
    pair = open_pair(settings, prompt_sets.load(settings.prompts))
    assert isinstance(pair, ModelPair)
    tasks = grid_tasks(pair.prompts, settings, settings.k, [0.0])
    requests = [request(pair, settings, task) for task in tasks]
    trials = [run_trial(each, pair.target_model, pair.draft_model) for each in requests]
    plain = {trial.key: trial.tokens for trial in trials if trial.k == 0}
    drafted = [trial for trial in trials if trial.k]
    assert len(plain) == (6 if limit == 3 else 64)
    assert [t.key for t in drafted if t.tokens != plain[t.key]] == []
    rounds, rejected, bonus = (
        sum(getattr(trial, name) for trial in drafted) for name in ("rounds", "rejected", "bonus")
    )
    assert bonus >= 1
    assert rejected / rounds >= 0.3


# A command that times each thing a few times alone, and draws nothing
LITTLE = """
import sys
sys.path.append(sys.argv.pop(1))
from harness.cli import run_app
from runs import timed_little, without_plots
with timed_little(), without_plots():
    run_app("sweep")
"""


@pytest.mark.exhaustive
def test_the_headline_command_runs_from_a_filled_hub_cache(tmp_path: Path) -> None:
    """The command of the README, without a network, on few short texts."""
    home = tmp_path / "hf"
    for name in ("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"):
        fill_hub_cache(home, name, qwen3(1, layers=1, max_position_embeddings=512))
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    pair = ("model=qwen3_4b", "draft=qwen3_0_6b")
    few = ("new_tokens=8", "prompts.limit=1", "k=[4]", "temperature=[0]")
    done = subprocess.run(
        [sys.executable, "-c", LITTLE, str(Path(__file__).parent), *pair, *few],
        cwd=tmp_path,
        env={**os.environ, **offline},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("run: results/")
    assert last.endswith("sweep_qwen3_4b_qwen3_0_6b")
    assert from_json((tmp_path / last[5:] / "summary.json").read_bytes()).headline is not None
    assert "Traceback" not in done.stderr
    assert set(os.listdir(tmp_path)) == {"results", "hf"}
