"""The main job, end to end on the embedded pair: contract, verdict, resume, failures."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import Door
from random_models import fill_hub_cache, qwen3, save

from harness import prompts as prompt_sets
from harness.cli import compose
from harness.commands import sweep
from harness.commands.pair import open_pair, plan
from harness.commands.run import Outcome
from harness.config import SweepConfig
from harness.measurement.generations import run_trial
from harness.models.lean.model import LeanModel
from harness.records import UserError
from harness.storage import RESULT_COLUMNS, StoredRun, load

KS, TEMPERATURES = [1, 4], [0.0, 1.0]


def config(root: Path, *overrides: str) -> SweepConfig:
    grid = ["k=[1,4]", "temperature=[0,1]", "new_tokens=12", "threads=1"]
    return compose("sweep", [f"results_root={root}", *grid, *overrides])


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, StoredRun]:
    root = tmp_path_factory.mktemp("results")
    outcome = sweep.run(config(root, "prompts.limit=8"))
    assert outcome.folder is not None
    return outcome, load(outcome.folder)


def test_a_sweep_completes_with_status_zero(swept: tuple[Outcome, StoredRun]) -> None:
    outcome, stored = swept
    assert outcome.status == 0
    assert stored.manifest["status"] == "complete"
    assert stored.summary is not None
    assert stored.summary["failures"] == []


def test_every_cell_has_one_measured_row(swept: tuple[Outcome, StoredRun]) -> None:
    _, stored = swept
    assert tuple(stored.results.columns) == RESULT_COLUMNS
    measured = stored.results[stored.results.source == "measured"]
    cells = list(measured[["prompt_set", "temperature", "k"]].itertuples(index=False, name=None))
    assert sorted(cells) == [
        (name, temperature, k)
        for name in ("easy", "hard")
        for temperature in TEMPERATURES
        for k in (0, *KS)
    ]
    assert (measured.prompts == 8).all()


def test_rates_follow_from_the_counts_of_the_trials(swept: tuple[Outcome, StoredRun]) -> None:
    _, stored = swept
    measured = stored.results[(stored.results.source == "measured") & (stored.results.k > 0)]
    for row in measured.itertuples():
        own = [
            trial
            for trial in stored.trials
            if (trial.prompt_set, trial.temperature, trial.k)
            == (row.prompt_set, row.temperature, row.k)
        ]
        accepted = sum(trial.accepted or 0 for trial in own)
        drafted = sum(trial.drafted or 0 for trial in own)
        rejected = sum(trial.rejected or 0 for trial in own)
        assert row.acceptance_rate == pytest.approx(accepted / drafted)
        assert row.alpha == pytest.approx(accepted / (accepted + rejected))
    for value in ("alpha", "speedup"):
        assert (measured[f"{value}_lo"] <= measured[value]).all()
        assert (measured[value] <= measured[f"{value}_hi"]).all()


def test_baseline_and_speculation_emit_the_same_greedy_text(
    swept: tuple[Outcome, StoredRun],
) -> None:
    _, stored = swept
    texts: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for trial in stored.trials:
        if trial.temperature == 0.0:
            texts.setdefault((trial.prompt_set, trial.prompt), set()).add(trial.tokens or ())
    assert len(texts) == 16
    assert all(len(seen) == 1 for seen in texts.values())


def test_predictions_stand_beside_the_measurements(swept: tuple[Outcome, StoredRun]) -> None:
    _, stored = swept
    theory = stored.results[stored.results.source == "theory"]
    assert len(theory) == 2 * len(TEMPERATURES) * len(KS)
    assert (theory.speedup > 0).all()
    steps = stored.latency[stored.latency.kind == "verify"]
    assert steps.tokens.tolist() == [1, 2, 3, 4, 5]


def test_the_summary_gives_one_verdict_per_temperature_and_per_set(
    swept: tuple[Outcome, StoredRun],
) -> None:
    _, stored = swept
    assert stored.summary is not None
    assert stored.summary["verdict"] == stored.summary["per_temperature"][0]
    assert [v["temperature"] for v in stored.summary["per_temperature"]] == TEMPERATURES
    assert len(stored.summary["per_prompt_set"]) == 2 * len(TEMPERATURES)
    for verdict in [stored.summary["verdict"], *stored.summary["per_prompt_set"]]:
        assert verdict["speculate"] == (verdict["decision"] == "speculate")
        assert verdict["decision"] in {"speculate", "does_not_pay", "undecided"}


def test_the_report_and_its_plots_are_there(swept: tuple[Outcome, StoredRun]) -> None:
    _, stored = swept
    report = (stored.folder / "report.md").read_text()
    for plot in (stored.folder / "plots").glob("*.svg"):
        assert plot.name in report
    assert len(list((stored.folder / "plots").glob("*.svg"))) == 5


def test_resuming_a_finished_run_generates_nothing_again(
    swept: tuple[Outcome, StoredRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stored = swept

    def forbidden(*_: object) -> None:
        raise AssertionError("nothing is left to run")

    monkeypatch.setattr("harness.commands.pair.run_trial", forbidden)
    again = sweep.run(config(stored.folder.parent, "prompts.limit=8", f"resume={stored.folder}"))
    assert again.status == 0
    assert load(stored.folder).trials == stored.trials


def test_resuming_with_other_settings_names_them(swept: tuple[Outcome, StoredRun]) -> None:
    _, stored = swept
    other = ["seed=5", "prompts.limit=9", f"resume={stored.folder}"]
    changed = config(stored.folder.parent, *other)
    with pytest.raises(UserError, match=r"differs in prompts\.limit, seed;"):
        sweep.run(changed)


def test_every_k_leads_equally_often_at_every_temperature(tmp_path: Path) -> None:
    for grid, temperatures in (("[4]", "[0,1]"), ("[1,2,4]", "[0,1]"), ("[1,2,4,8]", "[0,1,2]")):
        settings = config(tmp_path, f"k={grid}", f"temperature={temperatures}", "prompts.limit=20")
        pair = open_pair(settings, prompt_sets.load(settings.prompts))
        requests = plan(pair, settings, settings.k, settings.temperature)
        size = len(settings.k) + 1
        for temperature in settings.temperature:
            leaders = [
                group[0].k
                for group in zip(*[iter(requests)] * size, strict=True)
                if group[0].sampling.temperature == temperature
            ]
            counts = [leaders.count(k) for k in (0, *settings.k)]
            assert max(counts) - min(counts) <= 1


def test_resuming_after_the_prompts_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    settings = [f"prompts.files=[{file}]", "prompts.sets=[]", "k=[1]", "temperature=[0]"]
    file.write_text('{"prompt": "Count from 1 to 9."}\n')
    first = sweep.run(config(tmp_path / "results", *settings))
    file.write_text('{"prompt": "Count from 2 to 8."}\n')
    with pytest.raises(UserError, match="prompts changed since"):
        sweep.run(config(tmp_path / "results", *settings, f"resume={first.folder}"))
    assert first.folder is not None
    assert load(first.folder).manifest["status"] == "complete"


def test_a_cell_out_of_memory_is_recorded_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LeanModel.forward
    generating = False

    def limited(self: LeanModel, tokens: torch.Tensor) -> torch.Tensor:
        if generating and len(tokens) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return forward(self, tokens)

    def steps_then(*args: object, **kwargs: object) -> object:
        nonlocal generating
        timings = measure(*args, **kwargs)  # type: ignore[arg-type]
        generating = True
        return timings

    measure = sweep.measure_steps
    monkeypatch.setattr(LeanModel, "forward", limited)
    monkeypatch.setattr(sweep, "measure_steps", steps_then)
    outcome = sweep.run(config(tmp_path, "prompts.limit=2", "temperature=[0]"))
    assert outcome.status == 1
    assert outcome.folder is not None
    stored = load(outcome.folder)
    measured = stored.results[stored.results.source == "measured"]
    status = dict(measured.groupby("k").status.first())
    assert status == {0: "complete", 1: "complete", 4: "failed"}
    failed = measured[measured.k == 4]
    assert failed.error.str.contains("out of memory").all()
    assert failed.speedup.isna().all()
    assert stored.summary is not None
    assert len(stored.summary["failures"]) == 4
    assert stored.manifest["status"] == "failed"


def test_a_prompt_beyond_the_context_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"new_tokens=100000: prompt \w+/\S+ has \d+ tokens"):
        sweep.run(config(tmp_path, "new_tokens=100000"))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_plan_and_stores_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = sweep.run(config(tmp_path, "dry_run=true", "prompts.limit=3", "repetitions=2"))
    assert outcome == Outcome(None, 0)
    shown = capsys.readouterr().out
    assert "72 (repetitions=2)" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["tiny_good", "tiny_small"])
def test_greedy_text_is_identical_on_every_shipped_prompt(tmp_path: Path, draft: str) -> None:
    """K = 1, 2, 4, 8, 16, with rejections and full acceptances aplenty."""
    ks = "[1,2,4,8,16]" if draft == "tiny_good" else "[4]"
    grid = ["temperature=[0]", f"k={ks}", "new_tokens=24", f"draft={draft}", "prompts.limit=null"]
    settings = config(tmp_path, *grid)
    pair = open_pair(settings, prompt_sets.load(settings.prompts))
    plain: dict[str, tuple[int, ...] | None] = {}
    counts = {"rounds": 0, "rejected": 0, "bonus": 0}
    requests = plan(pair, settings, settings.k, [0.0])
    for request in sorted(requests, key=lambda entry: entry.k):
        trial = run_trial(request, pair.target_model, pair.draft_model)
        name = f"{trial.prompt_set}/{trial.prompt}"
        if trial.k == 0:
            plain[name] = trial.tokens
            continue
        assert trial.tokens == plain[name], (name, trial.k)
        for key in counts:
            counts[key] += getattr(trial, key)
    assert len(plain) >= 48
    assert counts["bonus"] >= 1
    assert counts["rejected"] / counts["rounds"] >= 0.3


@pytest.mark.slow
def test_the_headline_command_runs_from_a_filled_hub_cache(tmp_path: Path, door: Door) -> None:
    """`python -m harness.sweep model=qwen3_4b draft=qwen3_0_6b`, literally, without a network."""
    home = tmp_path / "hf"
    fill_hub_cache(home, "Qwen/Qwen3-4B", qwen3(1, layers=1))
    fill_hub_cache(home, "Qwen/Qwen3-0.6B", qwen3(1, layers=1))
    done = door(
        "sweep",
        "model=qwen3_4b",
        "draft=qwen3_0_6b",
        env={"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("run: results/")
    assert last.endswith("sweep_qwen3_4b_qwen3_0_6b")
    folder = tmp_path / last.removeprefix("run: ")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["verdict"]["decision"] in {"speculate", "does_not_pay", "undecided"}
    assert "Traceback" not in done.stderr
    assert set(os.listdir(tmp_path)) == {"results", "hf"}


def test_a_run_whose_model_folder_holds_other_weights_is_not_resumed(tmp_path: Path) -> None:
    pair = [save(qwen3(seed), tmp_path / name) for seed, name in ((1, "one"), (2, "two"))]
    small = ["prompts.sets=[easy]", "prompts.limit=1", "k=[1]", "temperature=[0]"]
    names = [f"model=hf model.id={pair[0]} draft=hf draft.id={pair[1]}".split(), small]
    asked = [word for words in names for word in words]
    before = sweep.run(config(tmp_path, *asked))
    assert before.folder is not None
    assert sweep.run(config(tmp_path, *asked, f"resume={before.folder}")).status == 0
    save(qwen3(3), pair[1])
    with pytest.raises(UserError, match="models changed since"):
        sweep.run(config(tmp_path, *asked, f"resume={before.folder}"))
