"""Auditions end to end on the embedded family: the command's work, its contract, its bad inputs."""

import errno
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from random_models import qwen3, save, small, swap_tokens
from runs import outcome_of, ran, sample, stored
from stubs import CPU
from transformers import MixtralConfig

from harness import prompts as prompt_sets
from harness.analysis import analyse
from harness.analysis.setup import Setup, architecture
from harness.cli import compose, draft_conf
from harness.commands import audition, draft_scoring, sweep
from harness.commands.pair import Target, open_target
from harness.commands.run_lifecycle import Outcome
from harness.config import EMBEDDED_DRAFTS, AuditionConfig, ModelConf
from harness.models import probe
from harness.models.lean.layers import compiled_pieces
from harness.models.lean.static import whole_pieces
from harness.models.load import LoadedModel
from harness.models.load import load as load_model
from harness.records import RULES, UserError
from harness.storage import RunFolder, StoredRun, load, load_traces
from harness.summary import Summary

pytestmark = pytest.mark.usefixtures("few_samples")
DRAFTS = [*EMBEDDED_DRAFTS]
GRID = ["k=[1,4,16]", "temperature=[0,1]", "new_tokens=12", "prompts.limit=8", "threads=1"]
# Where it does not matter how many
FEW = ["k=[1]", "temperature=[0]", "new_tokens=4", "prompts.limit=1"]


def config(root: Path, *overrides: str) -> AuditionConfig:
    return compose("audition", [f"results_root={root}", *GRID, *overrides])


def run(root: Path, *overrides: str, drafts: list[str] | None = None) -> Outcome:
    asked = config(root, *overrides)
    return audition.run(asked, [draft_conf(name) for name in drafts or DRAFTS])


@pytest.fixture(scope="module")
def auditioned(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    outcome = run(tmp_path_factory.mktemp("results"))
    assert outcome.status == 0
    return stored(outcome)


@pytest.fixture(scope="module")
def summary(auditioned: StoredRun) -> Summary:
    return analyse(auditioned)


def test_every_draft_prompt_set_temperature_and_k_is_a_replayed_row(auditioned: StoredRun) -> None:
    assert set(auditioned.results.source) == {"replayed"}
    replayed = auditioned.results[auditioned.results.k > 0]
    keys = ["draft", "prompt_set", "temperature", "k"]
    assert len(replayed[keys].drop_duplicates()) == len(replayed) == len(DRAFTS) * 2 * 2 * 3
    assert (replayed.prompts == 8).all()
    for _, cell in auditioned.results.groupby(["prompt_set", "temperature"]):
        baseline, drafted = cell[cell.k == 0].ms_per_token.item(), cell[cell.k > 0]
        assert (baseline / drafted.ms_per_token).tolist() == pytest.approx(drafted.speedup.tolist())
    for _, rows in replayed[(replayed.k == 4) & (replayed.prompt_set == "easy")].groupby(
        "temperature"
    ):
        alpha = dict(zip(rows.draft, rows.alpha, strict=True))
        assert 1 >= alpha["tiny_good"] > alpha["tiny_small"] > alpha["tiny_unrelated"] >= 0


def test_the_manifest_says_how_each_model_ran_and_how_its_texts_were_batched(
    auditioned: StoredRun,
) -> None:
    models = {role: entry.entries for role, entry in auditioned.manifest.models.items()}
    assert models["target"]["text_batches"] == {"generation": "padded", "scoring": "padded"}
    assert models["target"]["attention"] == "sdpa"
    assert models["tiny_good"]["text_batches"] == {"scoring": "padded"}
    costs = auditioned.manifest.audition.costs
    assert (costs.generation_s or 0.0) > 0
    assert (costs.scoring_s or 0.0) > 0


def test_leaderboards_rank_every_draft_and_not_speculating_under_every_rule(
    summary: Summary,
) -> None:
    boards = {(board.rule, board.temperature): board for board in summary.leaderboards}
    assert set(boards) == {(rule, t) for rule in RULES for t in (0.0, 1.0)}
    for board in boards.values():
        assert board.engines
        assert {row.draft for row in board.rows} == {*DRAFTS, None}
        assert [row.rank for row in board.rows] == [*range(1, len(DRAFTS) + 2)]
        speedups = [row.speedup for row in board.rows]
        assert speedups == sorted(speedups, reverse=True)
        assert next((row.k, row.speedup) for row in board.rows if row.draft is None) == (0, 1.0)
    best = {
        key: {row.draft: (row.k, row.speedup) for row in board.rows}
        for key, board in boards.items()
    }
    assert best["ratio", 0.0] == best["exact_match", 0.0] == best["greedy_draft", 0.0]
    (named,) = (a.named[0] for a in summary.per_temperature if a.temperature == 1.0)
    for draft, (_, speedup) in best["ratio", 1.0].items():
        assert draft == named or speedup >= best["exact_match", 1.0][draft][1] - 1e-9


def test_what_was_stored_is_enough_to_rank_again_without_a_model(
    auditioned: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.commands.audition.open_target", lambda *_: pytest.fail("loaded"))
    source = f"traces_from={auditioned.folder}"
    again = stored(run(tmp_path, source))
    pd.testing.assert_frame_equal(again.results, auditioned.results)
    assert [t.key for t in again.traces] == [t.key for t in auditioned.traces]
    assert again.timings == auditioned.timings
    typed = ["latency.target_ms=10", "latency.draft_ms=9.9", "new_tokens=200"]
    summary = analyse(stored(run(tmp_path, source, *typed, drafts=["tiny_unrelated"])))
    assert summary.headline is not None
    assert summary.headline.decision == "does_not_pay"
    values = {caveat.code: caveat.values for caveat in summary.caveats}["other_budget"]
    assert values == {"ignored": "new_tokens=200", "made_with": "new_tokens=12"}


def test_traces_from_takes_all_other_keys_from_its_run_and_typed_ones_replace_them(
    auditioned: StoredRun, tmp_path: Path
) -> None:
    source = (f"traces_from={auditioned.folder}", f"results_root={tmp_path}")
    same = ran("audition", *source)
    pd.testing.assert_frame_equal(same.results, auditioned.results)
    assert same.rounds == auditioned.rounds
    of_run = {**auditioned.config, "results_root": str(tmp_path), "threads": "auto", "until": "all"}
    assert same.config == {**of_run, "traces_from": str(auditioned.folder)}
    again = ran("audition", *source, "k=1", "temperature=1", "draft=tiny_small", "seed=3")
    replayed = again.results.query("source == 'replayed' and k > 0")
    assert set(zip(replayed.draft, replayed.k, replayed.temperature, strict=True)) == {
        ("tiny_small", 1, 1.0)
    }
    assert {trace.temperature for trace in again.traces} == {1.0}
    assert (again.config["new_tokens"], again.config["prompts"]["limit"]) == (12, 8)


def test_a_sweeps_traces_bring_its_draft_and_its_round_times(tmp_path: Path) -> None:
    grid = ["k=[2]", "new_tokens=4", "threads=1", "prompts.limit=1", "temperature=[0]"]
    swept = ran("sweep", tmp_path, "draft=tiny_small", *grid)
    run = ran("audition", f"traces_from={swept.folder}", tmp_path)
    taken = [run.config[name] for name in ("k", "temperature", "drafts")]
    assert taken == [[2], [0.0], ["tiny_small"]]
    assert swept.rounds
    assert run.rounds == swept.rounds


def test_a_sweeps_step_times_serve_an_audition_and_are_kept_in_it(
    auditioned: StoredRun, tmp_path: Path
) -> None:
    grid = ["mode=replay", "k=[16]", "new_tokens=4", "threads=1", "prompts.limit=2"]
    swept = ran("sweep", tmp_path, *grid)
    source = [f"traces_from={auditioned.folder}", f"latency_from={swept.folder}"]
    again = run(tmp_path, *source, drafts=["tiny_good"])
    assert again.status == 0
    assert stored(again).timings == swept.timings
    assert stored(again).rounds == swept.rounds
    with pytest.raises(UserError, match="no step times of draft 'ngram'; there are tiny_good"):
        run(tmp_path, *source, drafts=["ngram"])


@pytest.mark.parametrize(
    ("overrides", "names", "says"),
    [
        (["model=qwen3_4b"], ["tiny_good"], "the text of model=tiny"),
        (["prompts.sets=[easy]"], ["tiny_good"], "other prompts"),
        ([], ["qwen3_0_6b"], "no traces of draft 'qwen3_0_6b'"),
        (["temperature=0.5"], ["tiny_good"], "no texts at temperature=0.5; it has 0, 1"),
        (["decode.top_k=4"], ["tiny_good"], "made with decode.top_k=None"),
        (["latency.draft_ms=1"], ["tiny_good"], "latency.target_ms: give it with"),
        (["latency.target_ms=1"], ["tiny_good"], "no time for draft 'tiny_good'"),
    ],
)
def test_traces_that_are_not_of_this_audition_are_refused(
    overrides: list[str], names: list[str], says: str, auditioned: StoredRun, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        run(tmp_path, f"traces_from={auditioned.folder}", *overrides, drafts=names)
    assert list(tmp_path.iterdir()) == []


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def test_every_bad_draft_is_named_and_the_others_are_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    confs = [draft_conf("tiny_small")]
    for spoil in (truncated, not_json, swap_tokens):
        folder = save(qwen3(), tmp_path / spoil.__name__)
        spoil(folder)
        confs.insert(0, draft_conf(f"{spoil.__name__}@{folder}"))
    network = qwen3()
    with torch.no_grad():
        network.get_parameter("model.norm.weight").fill_(float("nan"))
    confs.insert(0, draft_conf(f"nan@{save(network, tmp_path / 'nan')}"))
    confs.insert(0, draft_conf(f"crashing@{save(qwen3(), tmp_path / 'crashing')}"))
    describe = LoadedModel.describe

    def crash(self: LoadedModel) -> dict[str, Any]:
        if self.name == "crashing":
            raise AttributeError("'Gemma4Config' object has no attribute 'head_dim'\nmore")
        return describe(self)

    monkeypatch.setattr(LoadedModel, "describe", crash)
    outcome = audition.run(config(tmp_path / "results", *FEW, "debug=true"), confs)
    assert outcome.status == 1
    summary = analyse(stored(outcome))
    errors = {failure.where: failure.error for failure in summary.failures}
    assert set(errors) == {f"draft {name}" for name in ("crashing", "nan", "truncated", "not_json")}
    assert "damaged or cut short" in errors["draft truncated"]
    assert "cannot be loaded" in errors["draft not_json"]
    assert "not finite" in errors["draft nan"]
    assert errors["draft crashing"] == (
        "AttributeError: 'Gemma4Config' object has no attribute 'head_dim' more "
        "(run again with debug=true for the traceback)"
    )
    assert "in crash" in capsys.readouterr().err
    (ineligible,) = summary.ineligible
    assert ineligible.where == "swap_tokens"
    assert "tokenizer" in ineligible.error
    assert summary.drafts == ("tiny_small",)


@pytest.mark.exhaustive
def test_a_ranking_without_its_unusable_drafts_is_named_so_and_can_be_completed_without_them(
    tmp_path: Path,
) -> None:
    spoilt = {spoil.__name__: spoil for spoil in (truncated, swap_tokens)}
    entries = ["trained@tiny_small"]
    for name, spoil in spoilt.items():
        folder = save(qwen3(), tmp_path / name)
        spoil(folder)
        entries.append(f"{name}@{folder}")
    words = [*FEW, f"drafts=[{','.join(entries)}]", tmp_path / "results"]
    before = ran("audition", *words, status=1)
    report = (before.folder / "report.md").read_text()
    assert "1 of 3 drafts are ranked. Not ranked: truncated, swap_tokens." in report
    assert "FAILED RUN" not in report
    source = f"traces_from={before.folder}"
    with pytest.raises(
        UserError, match=r"'truncated' could not be used there .*drafts=\[trained\]"
    ):
        ran("audition", source, tmp_path / "results")
    again = ran("audition", source, "drafts=[trained]", tmp_path / "results")
    assert analyse(again).drafts == ("trained",)
    with pytest.raises(UserError, match="its configuration differs in drafts"):
        ran("audition", f"resume={before.folder}", f"drafts=[{entries[1]}]")
    done = ran("audition", f"resume={before.folder}", "drafts=[trained]")
    assert done.manifest.status == "complete"
    assert done.config["drafts"] == entries[:1]
    assert "ranked. Not ranked" not in (done.folder / "report.md").read_text()


def test_an_audition_that_was_interrupted_goes_on_with_the_drafts_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    measured = draft_scoring._measure_draft

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        name = args[3].name
        seen.append(name)
        if name == "tiny_small" and seen.count(name) == 1:
            raise KeyboardInterrupt
        return measured(*args, **kwargs)

    monkeypatch.setattr(draft_scoring, "_measure_draft", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *FEW, drafts=["tiny_good", "tiny_small"])
    (folder,) = tmp_path.iterdir()
    assert {trace.draft for trace in load_traces(folder)} == {"tiny_good"}
    texts = (folder / "trials.jsonl").read_bytes()
    unfinished = f"interrupted by SIGINT: python -m harness.audition resume={folder} completes it"
    with pytest.raises(UserError, match=f"no traces of draft 'tiny_small'; .*{unfinished}"):
        run(tmp_path, *FEW, f"traces_from={folder}", drafts=["tiny_good", "tiny_small"])
    with pytest.raises(UserError, match=f"it may lack times; .*{unfinished}"):
        run(tmp_path, *FEW, f"latency_from={folder}", drafts=["tiny_good"])
    elsewhere = run(tmp_path / "else", *FEW, f"traces_from={folder}", drafts=["tiny_good"])
    assert stored(elsewhere).traces
    outcome = run(tmp_path, *FEW, f"resume={folder}", drafts=["tiny_good", "tiny_small"])
    assert outcome.status == 0
    assert seen == ["tiny_good", "tiny_small", "tiny_small"]
    assert (folder / "trials.jsonl").read_bytes() == texts
    assert set(analyse(load(folder)).drafts) == {"tiny_good", "tiny_small"}


def test_a_resumed_run_needs_no_other_key_and_refuses_one_that_differs(
    auditioned: StoredRun,
) -> None:
    resume = f"resume={auditioned.folder}"
    free = {"resume": str(auditioned.folder), "results_root": "results"}
    assert asdict(compose("audition", [resume])) == {**auditioned.config, **free}
    assert outcome_of("audition", resume).status == 0
    with pytest.raises(UserError, match=r"differs in k=\[2\] \(the run: \[1, 4, 16\]\)"):
        outcome_of("audition", resume, "k=2", "model=tiny")


def test_an_audition_whose_prompts_changed_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"id": "a", "prompt": "one two three"}\n')
    asked = [*FEW, "prompts.sets=[]", f"prompts.files=[{file}]"]
    before = stored(run(tmp_path, *asked, drafts=["tiny_small"]))
    file.write_text('{"id": "a", "prompt": "four"}\n{"id": "b", "prompt": "five"}\n')
    with pytest.raises(UserError, match="prompts changed since; one run cannot mix the two"):
        run(tmp_path, *asked, f"resume={before.folder}", drafts=["tiny_small"])
    assert load(before.folder).manifest.status == "complete"


def test_texts_of_one_token_and_k_beyond_the_text_are_fine(tmp_path: Path) -> None:
    few = ["new_tokens=1", "temperature=[1]", "prompts.limit=2"]
    outcome = run(tmp_path, *few, drafts=["tiny_good", "ngram"])
    assert outcome.status == 0
    replayed = stored(outcome).results.query("k > 0")
    assert (replayed.tokens_per_round == 1.0).all()


def test_drafts_whose_embeddings_are_padded_to_other_widths_are_sampled(tmp_path: Path) -> None:
    """As those of one family are: ids beyond the tokenizer's are padding."""
    padding = {"target": ("tiny", 64), "narrow": ("tiny_good", 32), "wide": ("tiny_good", 128)}
    for name, (model, more) in padding.items():
        conf = ModelConf(name=model, id=f"embedded:{model}")
        network: Any = load_model(conf, CPU).network
        rows = network.config.vocab_size
        network.resize_token_embeddings(rows + more, mean_resizing=False)
        network.get_input_embeddings().weight.data[rows:] = 0.0
        save(network, tmp_path / name)
    words = ["model=hf", f"model.id={tmp_path / 'target'}", "k=[2]", "temperature=[1]"]
    words += ["decode.top_k=20", "prompts.limit=2", "new_tokens=6"]
    names = [f"{name}@{tmp_path / name}" for name in ("narrow", "wide")]
    outcome = run(tmp_path, *words, drafts=names)
    assert outcome.status == 0
    rows = stored(outcome).results
    speculative = rows[rows.k == 2].set_index(["prompt_set", "draft"]).alpha.unstack()
    assert {*speculative.columns} == {"narrow", "wide"}
    np.testing.assert_allclose(speculative.narrow, speculative.wide, rtol=1e-3)


def test_a_mixture_whose_experts_have_the_width_of_the_feed_forward_is_reported(
    tmp_path: Path,
) -> None:
    """As Mixtral and gpt-oss are: their configs have no moe_intermediate_size."""
    folder = save(small(MixtralConfig, vocab_size=1024), tmp_path / "mixture")
    words = ["model=hf", f"model.id={folder}", "k=[2]", "temperature=[0]", "prompts.limit=2"]
    outcome = run(tmp_path, *words, "new_tokens=6", drafts=["ngram"])
    assert outcome.status == 0
    shape = architecture(Setup(stored(outcome)).target)
    assert shape is not None
    assert shape.parameters == pytest.approx(146_080, rel=1e-3)


def test_an_entry_of_drafts_may_carry_keys(tmp_path: Path) -> None:
    folder = save(qwen3(), tmp_path / "a@b")
    entries = f"drafts=[mine@{folder}@dtype:bfloat16@attention:eager,tiny_good@dtype:float16]"
    mine, good = (draft_conf(entry) for entry in compose("audition", [entries]).drafts)
    assert (mine.name, mine.id, mine.dtype) == ("mine", str(folder), "bfloat16")
    assert mine.attention == "eager"
    assert (good.id, good.dtype) == ("embedded:tiny_good", "float16")
    assert draft_conf("x@embedded:tiny").id == "embedded:tiny"
    assert draft_conf("x@embedded:tiny@trust_remote_code:true").trust_remote_code is True


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("mine@folder@dtyp:float32", "sets 'dtyp'; a draft may set dtype, attention, revision"),
        ("mine@folder@dtype:int3", r"drafts=\[mine@dtype:...\]: 'int3' is unknown"),
        ("mine@folder@trust_remote_code:maybe", "trust_remote_code is true or false"),
        ("mine@", "is not name@folder-or-hub-id"),
        ("@folder", "is not name@folder-or-hub-id"),
        ("nobody", "no draft named 'nobody'"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_by_name(entry: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        draft_conf(entry)


@pytest.mark.parametrize(
    ("command", "run_command"),
    [
        ("audition", lambda config: audition.run(config, [draft_conf("ngram")])),
        ("sweep", sweep.run),
    ],
)
def test_a_results_folder_that_cannot_be_written_is_noticed_before_a_model_is_loaded(
    command: str,
    run_command: Callable[[Any], Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    def read_only(**_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("harness.commands.pair.load_model", loaded)
    file = tmp_path / "file"
    file.touch()
    for root in (file, tmp_path / "new" / "results"):
        asked = compose(command, [f"results_root={root}", *GRID])
        with pytest.raises(UserError, match=f"results_root={root}: "):
            run_command(asked)
        monkeypatch.setattr("harness.storage.mkdtemp", read_only)
    assert not (tmp_path / "new").exists()


# CUDA graphs: their code in fixed shapes runs on the CPU as well, where nothing is recorded


@pytest.fixture
def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are allowed without a CUDA device, and nothing is compiled."""
    monkeypatch.setattr(probe, "check_graphs", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    compiled_pieces.cache_clear()
    yield
    compiled_pieces.cache_clear()


def target_of(asked: AuditionConfig) -> Target:
    return open_target(asked, prompt_sets.load(asked.prompts))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("graphs_on_the_cpu")
@pytest.mark.parametrize("left", range(1, 9))
def test_graphs_are_timed_at_every_context_near_the_end_of_a_cache(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.measurement.step_times.REPETITIONS", 1)
    graphs = ["backend=cuda_graphs", "k=[8]", "prompts.limit=1", "prompts.sets=[easy]"]
    prompt = len(target_of(config(tmp_path)).prompts[0].tokens)
    context = whole_pieces(1) - left
    asked = config(tmp_path, *graphs, "temperature=[0]", f"new_tokens={2 * (context - prompt)}")
    target = target_of(asked)
    assert target.target_model.engine == "cuda_graphs"
    folder = RunFolder.create(tmp_path, "audition", [], {})
    for draft in ("tiny_good", "ngram"):
        draft_scoring._measure_draft(folder, target, [], draft_conf(draft), asked, timed=False)
        timings = [each for each in folder.timings() if draft in (each.model, each.beside)]
        assert {each.context_tokens for each in timings if each.kind != "prefill"} == {context}
        rounds = [line for line in folder.rounds.read() if line.draft == draft]
        assert {line.k for line in rounds} == {0, 1, 8}


class NoCompilerError(Exception):
    """What a compiler raises is no RuntimeError as a rule."""


def no_compiler(*_: Any) -> Any:
    raise NoCompilerError("no C compiler\nand a long explanation")


UNCOMPILED = "compiling failed (NoCompilerError: no C compiler): graphs of uncompiled kernels"


@pytest.mark.usefixtures("graphs_on_the_cpu")
@pytest.mark.parametrize("command", sample(["audition", "sweep", "profile", "snapshot"], "sweep"))
@pytest.mark.parametrize("compiles", sample([False, True], False))
def test_pieces_that_do_not_compile_go_on_uncompiled_with_a_caveat(
    compiles: bool, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiles:
        monkeypatch.setattr(torch, "compile", lambda *_, **__: no_compiler)
    small = ["backend=cuda_graphs", "k=[1]", "prompts.limit=2", "new_tokens=4", "threads=1"]
    grid = ["contexts=[16]", "batches=[1]"] if command == "profile" else ["temperature=[0]"]
    grid += ["drafts=[tiny_good]"] if command == "audition" else []
    run = ran(command, tmp_path, *small, *grid)
    roles = ("target", "tiny_good" if command == "audition" else "draft")
    described = [run.manifest.models[role] for role in roles]
    assert all(model.engine == "cuda_graphs" for model in described)
    assert all(model.compiled is compiles for model in described)
    fallbacks = [c.values for c in analyse(run).caveats if c.code == "engine_fallback"]
    assert [(v["role"], v["reason"]) for v in fallbacks] == [
        (role, UNCOMPILED) for role in roles if not compiles
    ]
