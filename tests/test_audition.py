"""Auditions end to end on the embedded family: the door's work, its contract, its bad inputs."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from random_models import qwen3, save

from harness import prompts as prompt_sets
from harness.cli import compose, draft_conf
from harness.commands import audition, drafts, profile, snapshot, sweep
from harness.commands.pair import Target, open_target
from harness.commands.run import Outcome
from harness.config import AuditionConfig, ModelConf
from harness.measurement import round_parts
from harness.models import probe
from harness.models.lean.pieces import compiled_pieces
from harness.models.lean.static import whole_pieces
from harness.models.load import LoadedModel
from harness.records import UserError
from harness.storage import StoredRun, load, load_traces

DRAFTS = ["tiny_good", "tiny_small", "tiny_unrelated", "ngram"]
GRID = ["k=[1,4,16]", "temperature=[0,1]", "new_tokens=12", "prompts.limit=8", "threads=1"]


def config(root: Path, *overrides: str) -> AuditionConfig:
    return compose("audition", [f"results_root={root}", *GRID, *overrides])


def run(root: Path, *overrides: str, drafts: list[str] | None = None) -> Outcome:
    asked = config(root, *overrides)
    return audition.run(asked, [draft_conf(name) for name in drafts or DRAFTS])


@pytest.fixture(scope="module", autouse=True)
def few_samples() -> Any:
    """Step times are not what these tests are about."""
    patch = pytest.MonkeyPatch()
    patch.setattr("harness.measurement.step_times.REPETITIONS", 5)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def auditioned(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    outcome = run(tmp_path_factory.mktemp("results"))
    assert outcome.status == 0
    assert outcome.folder is not None
    return load(outcome.folder)


def summary(run: StoredRun) -> dict[str, Any]:
    assert run.summary is not None
    return run.summary


def test_every_draft_prompt_set_temperature_and_k_is_a_replayed_row(auditioned: StoredRun) -> None:
    replayed = auditioned.results[auditioned.results.source == "replayed"]
    keys = ["draft", "prompt_set", "temperature", "k"]
    assert len(replayed[keys].drop_duplicates()) == len(replayed) == 4 * 2 * 2 * 3
    assert (replayed.prompts == 8).all()
    assert replayed.alpha.between(0, 1).all()
    assert set(auditioned.results.source) == {"replayed", "theory"}


def test_the_manifest_says_how_each_model_ran_and_how_its_texts_were_batched(
    auditioned: StoredRun,
) -> None:
    models = auditioned.manifest["models"]
    assert models["target"]["text_batches"] == {"generation": "padded", "scoring": "padded"}
    assert models["target"]["attention"] == "sdpa"
    assert models["tiny_good"]["text_batches"] == {"scoring": "padded"}
    assert models["tiny_good"]["rewinding"] == "crop"


def test_a_rows_speedup_is_the_baselines_time_over_its_own(auditioned: StoredRun) -> None:
    for _, cell in auditioned.results.groupby(["prompt_set", "temperature"]):
        baseline = cell[cell.k == 0].ms_per_token.item()
        own = cell[cell.k > 0]
        assert (baseline / own.ms_per_token).tolist() == pytest.approx(own.speedup.tolist())


def test_leaderboards_rank_every_draft_and_not_speculating_under_every_rule(
    auditioned: StoredRun,
) -> None:
    boards = summary(auditioned)["leaderboards"]
    assert {(board["rule"], board["temperature"]) for board in boards} == {
        (rule, temperature)
        for rule in ("ratio", "exact_match", "greedy_draft")
        for temperature in (0.0, 1.0)
    }
    for board in boards:
        assert board["engines"]
        assert {row["draft"] for row in board["rows"]} == {*DRAFTS, None}
        assert [row["rank"] for row in board["rows"]] == [1, 2, 3, 4, 5]
        speedups = [row["speedup"] for row in board["rows"]]
        assert speedups == sorted(speedups, reverse=True)
        plain = next(row for row in board["rows"] if row["draft"] is None)
        assert (plain["k"], plain["speedup"]) == (0, 1.0)


def test_the_good_draft_is_accepted_more_than_the_small_and_the_unrelated(
    auditioned: StoredRun,
) -> None:
    replayed = auditioned.results[auditioned.results.source == "replayed"]
    cell = replayed[(replayed.k == 4) & (replayed.prompt_set == "easy")]
    for _, rows in cell.groupby("temperature"):
        alpha = dict(zip(rows.draft, rows.alpha, strict=True))
        assert alpha["tiny_good"] > alpha["tiny_small"] > alpha["tiny_unrelated"]


def test_all_rules_agree_at_temperature_zero(auditioned: StoredRun) -> None:
    boards = [b for b in summary(auditioned)["leaderboards"] if b["temperature"] == 0.0]
    first, *others = [{r["draft"]: (r["k"], r["speedup"]) for r in b["rows"]} for b in boards]
    for other in others:
        assert other == first


def test_the_ratio_accepts_at_least_as_often_as_exact_match(auditioned: StoredRun) -> None:
    boards = [b for b in summary(auditioned)["leaderboards"] if b["temperature"] == 1.0]
    speedup = {b["rule"]: {r["draft"]: r["speedup"] for r in b["rows"]} for b in boards}
    for draft, ratio in speedup["ratio"].items():
        assert ratio >= speedup["exact_match"][draft] - 1e-9


def test_what_was_stored_is_enough_to_rank_again_without_a_model(
    auditioned: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.commands.pair.open_target", lambda *_: pytest.fail("loaded"))
    again = run(tmp_path, f"traces_from={auditioned.folder}")
    assert again.folder is not None
    pd.testing.assert_frame_equal(load(again.folder).results, auditioned.results)
    typed = run(
        tmp_path,
        f"traces_from={auditioned.folder}",
        "latency.target_ms=10",
        "latency.draft_ms=9.9",
        drafts=["tiny_good", "tiny_unrelated"],
    )
    assert typed.folder is not None
    verdict = summary(load(typed.folder))["verdict"]
    assert verdict["decision"] == "does_not_pay"


def test_a_sweeps_step_times_serve_an_audition(auditioned: StoredRun, tmp_path: Path) -> None:
    swept = sweep.run(
        compose(
            "sweep",
            [f"results_root={tmp_path}", "mode=replay", "k=[16]", "new_tokens=4", "threads=1"],
        )
    )
    again = run(
        tmp_path,
        f"traces_from={auditioned.folder}",
        f"latency_from={swept.folder}",
        drafts=["tiny_good"],
    )
    assert again.status == 0


def test_traces_of_another_model_or_of_other_prompts_are_refused(
    auditioned: StoredRun, tmp_path: Path
) -> None:
    source = f"traces_from={auditioned.folder}"
    with pytest.raises(UserError, match="the text of model=tiny"):
        run(tmp_path, source, "model=qwen3_4b", drafts=["tiny_good"])
    with pytest.raises(UserError, match="other prompts"):
        run(tmp_path, source, "prompts.sets=[easy]", drafts=["tiny_good"])
    with pytest.raises(UserError, match="no traces of draft 'qwen3_0_6b'"):
        run(tmp_path, source, drafts=["qwen3_0_6b"])
    assert list(tmp_path.iterdir()) == []


def test_a_draft_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'ngram' is listed twice"):
        run(tmp_path, drafts=["ngram", "ngram"])
    with pytest.raises(UserError, match="no draft named 'nobody'"):
        draft_conf("nobody")


def test_a_draft_with_another_tokenizer_is_not_eligible_and_the_rest_go_on(tmp_path: Path) -> None:
    folder = save(qwen3(), tmp_path / "other")
    text = (folder / "tokenizer_config.json").read_text()
    settings = {**json.loads(text), "eos_token": "a"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    drafts = [ModelConf(name="other", id=str(folder)), draft_conf("ngram")]
    outcome = audition.run(config(tmp_path / "results", "temperature=[0]"), drafts)
    assert outcome.status == 0
    assert outcome.folder is not None
    (entry,) = summary(load(outcome.folder))["not_eligible"]
    assert entry["draft"] == "other"
    assert "tokenizer" in entry["reason"]


def test_nan_logits_fail_that_draft_by_name_and_the_rest_go_on(tmp_path: Path) -> None:
    network = qwen3()
    with torch.no_grad():
        network.get_parameter("model.norm.weight").fill_(float("nan"))
    folder = save(network, tmp_path / "broken")
    drafts = [ModelConf(name="broken", id=str(folder)), draft_conf("tiny_small")]
    outcome = audition.run(config(tmp_path / "results", "temperature=[1]"), drafts)
    assert outcome.status == 1
    assert outcome.folder is not None
    stored = load(outcome.folder)
    (failure,) = summary(stored)["failures"]
    assert "broken" in failure["where"]
    assert set(stored.results.draft.dropna()) == {"tiny_small"}


def test_an_audition_that_was_interrupted_goes_on_with_the_drafts_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    measured = drafts._measured

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        conf = args[2]
        if conf.name == "tiny_small" and "interrupted" not in seen:
            seen.append("interrupted")
            raise KeyboardInterrupt
        seen.append(conf.name)
        return measured(*args, **kwargs)

    monkeypatch.setattr(drafts, "_measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, drafts=["tiny_good", "tiny_small"])
    (folder,) = tmp_path.iterdir()
    assert {trace.draft for trace in load_traces(folder)} == {"tiny_good"}
    texts = (folder / "trials.jsonl").read_bytes()
    outcome = run(tmp_path, f"resume={folder}", drafts=["tiny_good", "tiny_small"])
    assert outcome.status == 0
    assert seen == ["tiny_good", "interrupted", "tiny_small"]
    assert (folder / "trials.jsonl").read_bytes() == texts


def test_texts_of_one_token_and_k_beyond_the_text_are_fine(tmp_path: Path) -> None:
    outcome = run(tmp_path, "new_tokens=1", "temperature=[1]")
    assert outcome.status == 0
    assert outcome.folder is not None
    replayed = load(outcome.folder).results.query("source == 'replayed'")
    assert (replayed.tokens_per_round == 1.0).all()


def test_a_sweep_sets_replay_beside_measurement(tmp_path: Path) -> None:
    settings = ["k=[1,4]", "temperature=[0,1]", "new_tokens=12", "threads=1"]
    outcome = sweep.run(compose("sweep", [f"results_root={tmp_path}", *settings]))
    assert outcome.folder is not None
    stored = load(outcome.folder)
    gaps = summary(stored)["replay_gaps"]
    assert len(gaps) == 2 * 2 * 2
    for gap in gaps:
        if gap["temperature"] == 0.0:
            assert gap["measured_tokens_per_round"] == pytest.approx(
                gap["replayed_tokens_per_round"], abs=1e-9
            )
        else:
            assert abs(gap["gap_standard_errors"]) < 5
    assert set(stored.results.source) == {"measured", "theory", "replayed"}


def test_a_replayed_sweep_measures_no_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "harness.commands.pair.run_trial", lambda *_: pytest.fail("a generation was run")
    )
    settings = ["mode=replay", "k=[1,4]", "new_tokens=12", "threads=1"]
    outcome = sweep.run(compose("sweep", [f"results_root={tmp_path}", *settings]))
    assert outcome.folder is not None
    stored = load(outcome.folder)
    assert "measured" not in set(stored.results.source)
    assert summary(stored)["verdict"]["decision"] in {"speculate", "does_not_pay", "undecided"}


# CUDA graphs: their code in fixed shapes runs on the CPU as well, where nothing is recorded


@pytest.fixture
def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are allowed without a CUDA device, and nothing is compiled."""
    monkeypatch.setattr(probe, "check_graphs", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    compiled_pieces.cache_clear()
    yield
    compiled_pieces.cache_clear()


def exhaustive(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def target_of(config: AuditionConfig) -> Target:
    return open_target(config, prompt_sets.load(config.prompts))


@pytest.mark.usefixtures("graphs_on_the_cpu")
@pytest.mark.parametrize("room", [8, 1, *exhaustive(*range(2, 8))])
def test_graphs_are_timed_at_every_context_near_the_end_of_a_cache(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.measurement.step_times.REPETITIONS", 1)
    graphs = ["backend=cuda_graphs", "k=[8]", "prompts.limit=1", "prompts.sets=[easy]"]
    prompt = len(target_of(config(tmp_path)).prompts[0].tokens)
    context = whole_pieces(1) - room
    asked = config(tmp_path, *graphs, f"new_tokens={2 * (context - prompt)}")
    opened = target_of(asked)
    assert opened.target_model.engine == "cuda_graphs"
    for draft in ("tiny_good", "ngram"):
        turn = drafts._measured(opened, [], draft_conf(draft), asked, timed=False)
        assert {t.context_tokens for t in turn.timings if t.kind != "prefill"} == {context}


class NoCompilerError(Exception):
    """What a compiler raises is no RuntimeError as a rule."""


def no_compiler(*_: Any) -> Any:
    raise NoCompilerError("no C compiler\nand a long explanation")


UNCOMPILED = "compiling failed (NoCompilerError: no C compiler): graphs of uncompiled kernels"


@pytest.mark.usefixtures("graphs_on_the_cpu")
@pytest.mark.parametrize("door", ["audition", "sweep", "snapshot", *exhaustive("profile")])
def test_pieces_that_do_not_compile_go_on_uncompiled_with_a_caveat(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: no_compiler)
    monkeypatch.setattr("harness.measurement.step_times.REPETITIONS", 3)
    monkeypatch.setattr(round_parts, "MOST_VISITS", 1)
    small = ["backend=cuda_graphs", "k=[1]", "prompts.limit=2", "new_tokens=4", "threads=1"]
    grid = ["contexts=[16]", "batches=[1]"] if door == "profile" else ["temperature=[0]"]
    asked = compose(door, [f"results_root={tmp_path}", *small, *grid])
    if door == "audition":
        outcome = audition.run(asked, [draft_conf("tiny_good")])
    else:
        outcome = {"sweep": sweep, "profile": profile, "snapshot": snapshot}[door].run(asked)
    assert outcome.folder is not None
    stored = load(outcome.folder)
    draft = "tiny_good" if door == "audition" else "draft"
    for role in ("target", draft):
        described = stored.manifest["models"][role]
        assert described["engine"] == "cuda_graphs"
        assert described["compiled"] is False
        assert described["engine_reason"] == UNCOMPILED
    shown = [
        capsys.readouterr().out,
        (outcome.folder / "report.md").read_text(),
        (outcome.folder / "report.html").read_text(),
    ]
    for role in ("target", draft):
        caveat = f"{role}: {UNCOMPILED}; its steps launch more kernels"
        assert any(line.startswith(caveat) for line in summary(stored)["caveats"])
        for text in shown:
            assert caveat.lower() in " ".join(text.lower().split())


@pytest.mark.usefixtures("graphs_on_the_cpu")
def test_pieces_that_compile_are_no_caveat(tmp_path: Path) -> None:
    small = ["backend=cuda_graphs", "k=[1]", "temperature=[0]", "prompts.limit=2", "new_tokens=4"]
    outcome = run(tmp_path, *small, drafts=["tiny_good"])
    assert outcome.folder is not None
    stored = load(outcome.folder)
    assert stored.manifest["models"]["tiny_good"]["compiled"] is True
    assert not any("kernels" in line for line in summary(stored)["caveats"])


@pytest.mark.usefixtures("graphs_on_the_cpu")
def test_a_terminal_shows_that_a_model_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    target_of(config(tmp_path, "backend=cuda_graphs"))
    assert "compiling model tiny, the first time takes minutes" in capsys.readouterr().err
    target_of(config(tmp_path))
    assert "compiling" not in capsys.readouterr().err


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def of_another_family(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "a"}))


def test_every_bad_draft_is_named_and_the_others_are_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = [draft_conf("tiny_small")]
    for spoil in (truncated, not_json, of_another_family):
        folder = save(qwen3(), tmp_path / spoil.__name__)
        spoil(folder)
        drafts.insert(0, draft_conf(f"{spoil.__name__}@{folder}"))
    drafts.insert(0, draft_conf(f"crashing@{save(qwen3(), tmp_path / 'crashing')}"))
    describe = LoadedModel.describe

    def crash(self: LoadedModel) -> dict[str, Any]:
        if self.name == "crashing":
            raise AttributeError("'Gemma4Config' object has no attribute 'head_dim'\nmore")
        return describe(self)

    monkeypatch.setattr(LoadedModel, "describe", crash)
    outcome = audition.run(config(tmp_path / "results", "temperature=[0]", "debug=true"), drafts)
    assert outcome.status == 1
    assert outcome.folder is not None
    stored = load(outcome.folder)
    errors = {entry["where"]: entry["error"] for entry in summary(stored)["failures"]}
    assert set(errors) == {"draft crashing", "draft truncated", "draft not_json"}
    assert "damaged or cut short" in errors["draft truncated"]
    assert "cannot be loaded" in errors["draft not_json"]
    assert errors["draft crashing"] == (
        "AttributeError: 'Gemma4Config' object has no attribute 'head_dim' more "
        "(run again with debug=true for the traceback)"
    )
    assert "in crash" in capsys.readouterr().err
    assert [entry["draft"] for entry in summary(stored)["not_eligible"]] == ["of_another_family"]
    assert set(stored.results.draft.dropna()) == {"tiny_small"}


def test_an_entry_of_drafts_may_carry_keys(tmp_path: Path) -> None:
    folder = save(qwen3(), tmp_path / "a@b")
    asked = compose(
        "audition",
        [f"drafts=[mine@{folder}@dtype:bfloat16@attention:eager,tiny_good@dtype:float16]"],
    )
    mine, good = (draft_conf(entry) for entry in asked.drafts)
    assert (mine.name, mine.id, mine.dtype) == ("mine", str(folder), "bfloat16")
    assert mine.attention == "eager"
    assert (good.id, good.dtype) == ("embedded:tiny_good", "float16")
    assert draft_conf("x@embedded:tiny").id == "embedded:tiny"
    assert draft_conf("x@embedded:tiny@trust_remote_code:true").trust_remote_code is True


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("mine@folder@dtyp:float32", "sets 'dtyp'; a draft may set dtype, attention"),
        ("mine@folder@dtype:int3", "draft mine.dtype: 'int3' is unknown"),
        ("mine@folder@trust_remote_code:maybe", "trust_remote_code is true or false"),
        ("mine@", "is not name@folder-or-hub-id"),
        ("@folder", "is not name@folder-or-hub-id"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_by_name(entry: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        draft_conf(entry)


def test_an_audition_whose_prompts_changed_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"id": "a", "prompt": "one two three"}\n')
    asked = ["prompts.sets=[]", f"prompts.files=[{file}]", "k=[1]", "temperature=[0]"]
    before = run(tmp_path, *asked, drafts=["tiny_small"])
    assert before.folder is not None
    file.write_text('{"id": "a", "prompt": "four"}\n{"id": "b", "prompt": "five"}\n')
    with pytest.raises(UserError, match="prompts changed since; one run cannot mix the two"):
        run(tmp_path, *asked, f"resume={before.folder}", drafts=["tiny_small"])
    assert load(before.folder).manifest["status"] == "complete"


def test_a_budget_that_stored_texts_do_not_have_is_said_to_have_no_effect(
    auditioned: StoredRun, tmp_path: Path
) -> None:
    latency = ["latency.target_ms=2", "latency.draft_ms=1"]
    asked = [f"traces_from={auditioned.folder}", *latency, "new_tokens=200"]
    again = run(tmp_path, *asked, drafts=["tiny_good"])
    assert again.folder is not None
    said = (
        "new_tokens=200 had no effect: the texts of traces_from were generated with new_tokens=12"
    )
    assert said in " ".join(summary(load(again.folder))["caveats"])
