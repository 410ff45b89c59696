"""Where drafts lose rounds: shares that add up, replayed gains, classes, checkpoints, the page."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pandas as pd
import pytest
import torch
from runs import FROZEN, outcome_of, ran, timed_little
from safetensors.torch import load_file, save_file

import harness
from harness.analysis import head_training
from harness.analysis.head_training import WORTH, accuracy_gap, checkpoint_groups, training
from harness.analysis.losses import AXES, KnownTexts, Losses, losses_of
from harness.analysis.scored import Scored, raised_everywhere, raised_in
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import Audition
from harness.analysis.token_classes import CLASSES, rare_tokens, token_classes
from harness.analysis.verdict import Candidate
from harness.cloud.jobs import card_named
from harness.commands import head_causes
from harness.commands.losses import conf_of, known_texts, written
from harness.config import DraftConf, ModelConf
from harness.measurement.target_texts import GeneratedText
from harness.models.cached import CachedModel
from harness.models.load import LoadedModel
from harness.models.load import load as load_model
from harness.records import UserError
from harness.serving.drafts import DRAFTS
from harness.stats.crossfit import Workload
from harness.storage import StoredRun, load
from harness.storage.imported_scores import read_table
from harness.storage.training_log import TrainingLog, read_training_log

DOCUMENT = Path(__file__).parents[1] / "docs" / "scores.md"
pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module")
def run() -> StoredRun:
    """An audition of four models and heads and a look-up on 16 prompts."""
    return load(FROZEN / "audition")


@pytest.fixture(scope="module")
def losses(run: StoredRun) -> Losses:
    """What it says of its losses."""
    return losses_of(Setup(run), known_texts(run, run.traces))


def test_every_axis_covers_the_tokens_and_its_lost_rounds_add_up(losses: Losses) -> None:
    assert {draft.temperature for draft in losses.drafts} == {0.0, 1.0}
    for draft in losses.drafts:
        for axis in AXES[:-1]:  # this run is older than the last, the target's entropy
            rows = [row for row in draft.rows if row.axis == axis]
            assert math.fsum(row.token_share for row in rows) == pytest.approx(1.0, abs=1e-12)
            assert math.fsum(row.lost_share for row in rows) == pytest.approx(1.0, abs=1e-12)
            assert len({row.name for row in rows}) == len(rows)
        used = (1.0 - draft.lost_rounds - draft.cut_rounds) * (draft.k + 1)
        assert used == pytest.approx(_tokens_per_round(draft))


def _tokens_per_round(draft) -> float:
    """By the map, at the run's own alpha, which is one of its alphas."""
    column = draft.map.alphas.index(draft.alpha)
    return draft.map.tokens_per_round[draft.map.ks.index(draft.k)][column]


def test_the_numbers_of_a_draft_are_those_of_its_ranking(run: StoredRun, losses: Losses) -> None:
    for ranking in Audition(Setup(run)).own_rankings:
        rows = {row.draft: row for row in ranking.leaderboard.rows}
        at = ranking.replays.temperature
        for draft in (each for each in losses.drafts if each.temperature == at):
            row = rows[draft.draft]
            assert (draft.k, draft.speedup) == (row.k, pytest.approx(row.speedup))
            assert draft.alpha == pytest.approx(row.alpha)
            assert draft.map is not None
            best = draft.map.speedups(1.0)[:, draft.map.alphas.index(draft.alpha)]
            assert best.max() == pytest.approx(row.speedup)
            # Were every token accepted
            assert draft.map.speedups(1.0)[:, -1].max() == pytest.approx(draft.ceiling)


def test_a_class_raised_to_the_rest_is_accepted_as_the_rest_and_others_are_as_before(
    run: StoredRun,
) -> None:
    analysis = Audition(Setup(run))
    ranking = analysis.own_rankings[1]
    scored = Scored.of(analysis, ranking, Candidate("tiny_good", 1))
    labels = [np.arange(len(text.tokens)) % 3 for text in scored.texts]

    def alphas(chances: list[np.ndarray]) -> list[float]:
        every = np.concatenate(chances)
        return [every[np.concatenate(labels) == n].mean() for n in range(3)]

    (part,) = scored.parts
    sizes = part.lengths
    before = alphas([part.chances[row, :size, 0] for row, size in enumerate(sizes)])
    raised = raised_in(labels, 2, 0.4)(part, 0)
    after = alphas([raised[row, :size, 0] for row, size in enumerate(sizes)])
    assert after[:2] == pytest.approx(before[:2])
    assert after[2] == pytest.approx(before[2] + 0.4 * (1.0 - before[2]))
    # At every place at once alpha rises by the points that were asked for
    everywhere = scored.replays(raised_everywhere(0.25)).candidates[scored.name]
    today = scored.replays().candidates[scored.name].alpha
    assert everywhere.alpha == pytest.approx(today + 0.25 * (1.0 - today), abs=0.01)


def test_a_better_draft_costs_what_the_ranking_makes_of_its_speedup(run: StoredRun) -> None:
    gpu = {**asdict(card_named("L4")[1]), "price_per_hour_usd": 1.0}
    environment = {**run.manifest.environment.entries, "device_name": "NVIDIA L4"}
    priced = replace(
        run,
        config={**run.config, "gpu": gpu, "temperature": [0.0], "k": [1]},
        manifest=run.manifest.updated(environment={**environment, "device_memory_bytes": 24e9}),
    )
    drafts = ("tiny_good", "tiny_small")
    priced.__dict__["traces"] = [t for t in run.traces if t.draft in drafts and t.temperature == 0]
    rows = {row.draft: row for row in Audition(Setup(priced)).own_rankings[0].leaderboard.rows}
    for draft in losses_of(Setup(priced), KnownTexts({}, {})).drafts:
        row = rows[draft.draft]
        for worth in draft.worth:
            plain = (row.usd_per_million_tokens or 0.0) * row.speedup
            cost = plain / max(1.0, worth.best_speedup)
            assert worth.usd_per_million_tokens == pytest.approx(cost)


def test_a_part_that_holds_every_token_has_no_rest_to_be_accepted_as() -> None:
    run = load(FROZEN / "sweep_replay")
    run.__dict__["traces"] = [trace for trace in run.traces if trace.prompt_set == "easy"]
    # Where no text is known, all tokens are of one class
    for draft in losses_of(Setup(run), KnownTexts({}, {})).drafts:
        whole = [row for row in draft.rows if row.token_share > 0.999]
        assert {row.axis for row in whole} >= {"token"}
        assert {row.gain for row in whole} == {None}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """An audition by this version: of a model, a head and a look-up."""
    words = ["drafts=[tiny_good,tiny_eagle3,ngram]", "k=[1,2]", "temperature=[0.0,1.0]"]
    words += ["prompts.limit=4", "new_tokens=16", "threads=1", "until=all"]
    with timed_little():
        return ran("audition", tmp_path_factory.mktemp("fresh"), *words)


def test_a_run_stores_the_targets_entropy_and_the_drafts_token_for_its_losses(
    fresh: StoredRun,
) -> None:
    target = load_model(conf_of(ModelConf, fresh.config["model"]), torch.device("cpu"))
    known = known_texts(fresh, fresh.traces)
    for trial in fresh.trials:
        if trial.k == 0 and trial.entropies is not None:
            ids = [*known.prompts[trial.prompt_set, trial.prompt], *(trial.tokens or ())]
            logits = target.network(torch.tensor([ids[:-1]])).logits[0, -len(trial.tokens or ()) :]
            entropies = torch.distributions.Categorical(logits=logits.double()).entropy()
            assert trial.entropies == pytest.approx(entropies.tolist(), abs=2e-4)
    for trace in fresh.traces:
        assert trace.draft_token is not None
        at = np.arange(len(trace.tokens))
        if trace.depth is not None:
            at = np.minimum(at[:, None] + np.arange(trace.depth), len(at) - 1)
        inside = ~np.isnan(trace.draft_logprob) & ~np.isnan(trace.draft_token)
        right = trace.draft_token == trace.tokens[at]
        assert (right[inside] == trace.draft_is_argmax[inside]).all()
    losses = losses_of(Setup(fresh), known)
    for draft in losses.drafts:
        rows = [row for row in draft.rows if row.axis == "entropy"]
        assert math.fsum(row.token_share for row in rows) == pytest.approx(1.0, abs=1e-12)
        assert math.fsum(row.lost_share for row in rows) == pytest.approx(1.0, abs=1e-12)
        assert "not stored" not in {row.name for row in rows}
        for span in draft.spans:
            assert span.drafted is not None
            if draft.temperature == 0.0 and span.lost_share > 0.0:
                assert span.drafted != span.pieces[span.worst]
    head = next(draft for draft in losses.drafts if draft.draft == "tiny_eagle3")
    by_change = {row.change: row for row in head.cheaper}
    # Its output matrix is 512 x 128 of what a step reads
    assert by_change["half_vocabulary"].step_share == pytest.approx(1.0 - 256 * 128 / 295_424)
    assert (by_change["half_vocabulary"].speedup or 0.0) > head.speedup
    assert by_change["layer_less"].unknown == "one_layer"


def test_points_of_acceptance_are_those_of_the_replayed_rounds(run: StoredRun) -> None:
    analysis = Audition(Setup(run))
    for ranking in analysis.own_rankings:
        for k in ranking.replays.ks:
            scored = Scored.of(analysis, ranking, Candidate("tiny_small", k))
            alpha = scored.replays().weighted(scored.name, scored.weights).alpha
            better = scored.replays(scored.raised_to(alpha + 0.05))
            reached = better.weighted(scored.name, scored.weights).alpha
            assert reached == pytest.approx(alpha + 0.05, abs=1e-3)


def test_more_acceptance_and_cheaper_drafts_are_worth_more(losses: Losses) -> None:
    for draft in losses.drafts:
        everywhere = [row for row in draft.worth if row.offset is None]
        speedups = [draft.speedup, *(row.speedup for row in everywhere)]
        assert speedups == sorted(speedups)
        for row in draft.worth:
            assert draft.speedup - 1e-9 <= row.speedup <= row.best_speedup + 1e-9
            assert row.best_speedup <= draft.ceiling + 1e-9
        for change in draft.cheaper:
            assert (change.step_share is None) == (change.unknown is not None)
            if change.step_share is not None:
                assert change.step_share < 1.0
                assert (change.speedup or 0.0) > draft.speedup
    unknown = {
        draft.draft: {row.change: row.unknown for row in draft.cheaper} for draft in losses.drafts
    }
    assert unknown["ngram"] == {}
    assert unknown["tiny_good"] == {
        "faster": None,
        "half_vocabulary": None,
        "layer_less": "one_layer",
    }
    # A head of an earlier version, which did not say what its step reads
    assert unknown["tiny_eagle3"]["half_vocabulary"] == "no_sizes"


@pytest.mark.usefixtures("few_samples")
def test_the_loop_at_the_acceptance_of_raised_chances_emits_what_their_replay_does(
    run: StoredRun, tmp_path: Path
) -> None:
    analysis = Audition(Setup(run))
    scored = Scored.of(analysis, analysis.own_rankings[0], Candidate("tiny_good", 4))
    counts = scored.replays(raised_everywhere(0.3)).candidates[scored.name]
    rates = [round(rate, 6) for rate in counts.acceptance_by_position]
    words = ["k=[4]", "temperature=[0.0]", "prompts.limit=16", "new_tokens=32", "threads=1"]
    looped = ran("sweep", tmp_path, f"decode.acceptance={rates}", *words, "until=all")
    trials = [trial for trial in looped.trials if trial.k == 4]
    rounds = np.array([trial.rounds for trial in trials], dtype=float)
    accepted = np.array([trial.accepted for trial in trials], dtype=float)
    measured = accepted.sum() / rounds.sum()
    error = np.std(accepted - measured * rounds, ddof=1) / rounds.mean() / len(rounds) ** 0.5
    expected = counts.accepted.sum() / counts.rounds.sum()
    assert abs(measured - expected) < 3.0 * error


# ---- classes of tokens ---------------------------------------------------------------------------


def test_every_token_has_one_class() -> None:
    parts = [
        *(
            "The",
            " cat",
            ",",
            " and",
            " Mar",
            "a",
            " 12",
            "\n",
            "Then",
            " **",
            "qu",
            "ux",
            ".",
            "\n",
        ),
        *("x", " =", " 3", ";", "\n", "So", ""),
    ]
    pieces = dict(enumerate(parts))
    classes = token_classes(range(len(parts)), pieces, (), frozenset({10}))
    assert {*classes} <= {*CLASSES}
    assert classes == [
        *("word", "word", "punctuation", "word", "name", "name", "digits", "punctuation"),
        *("new line", "markup", "rare", "word", "punctuation", "punctuation"),
        *("new line", "code", "code", "code", "code", "new line", "special"),
    ]


def test_a_token_is_copied_where_it_ends_three_that_stand_in_the_prompt() -> None:
    pieces = {n: f" {'abcdefgh'[n]}" for n in range(8)}
    classes = token_classes([3, 4, 0, 1, 2, 7], pieces, [0, 1, 2, 3, 4], frozenset())
    # The first ends "c d", the prompt's end, and itself: no three of the prompt
    assert classes == ["word", "word", "word", "word", "copied", "word"]


def test_fenced_lines_are_code_and_so_are_statements() -> None:
    text = ["Like", " this", ":", "\n", "```", "\n", "a", " b", "\n", "```", "\n", "Done", "."]
    classes = token_classes(range(len(text)), dict(enumerate(text)), (), frozenset())
    assert classes[6:9] == ["new line", "code", "code"]
    assert classes[11:] == ["new line", "punctuation"]


def test_rare_ids_make_up_a_tenth_of_the_tokens_at_most() -> None:
    texts = [[1] * 50 + [2] * 40 + [3, 4, 5, 6, 7]]
    assert rare_tokens(texts) == {3, 4, 5, 6, 7}
    assert rare_tokens([[1, 1, 2, 2]]) == frozenset()


# ---- checkpoints, and two drafts -----------------------------------------------------------------


def with_ids(run: StoredRun, ids: dict[str, str], **changes: object) -> StoredRun:
    """The run, had its drafts these ids and all the same architecture but for the changes."""
    alike = {"kind": "eagle3", "parameters": 100, "layers": 1, "layers_read": None}
    described = {role: entry.entries for role, entry in run.manifest.models.items()}
    for name, place in ids.items():
        described[name] = {**described[name], **alike, "id": place}
    for name, kind in changes.items():
        described[name] = {**described[name], "kind": kind}
    return replace(run, manifest=run.manifest.updated(models=described))


STEPS = {10: "early_exit", 100: "tiny_small", 1000: "tiny_good"}


def test_checkpoints_are_known_by_their_folders_and_must_be_of_one_head(run: StoredRun) -> None:
    ids = {name: f"heads/h1/step_{step}" for step, name in STEPS.items()}
    known = with_ids(run, ids)
    assert checkpoint_groups(Setup(known), [*ids]) == {"heads/h1": STEPS}
    for head, pattern in (("out", "out/epoch_{}_step_{}"), ("out/run", "out/run-step{1}")):
        made = {name: pattern.format(n, step) for n, (step, name) in enumerate(STEPS.items())}
        assert checkpoint_groups(Setup(with_ids(run, made)), [*made]) == {head: STEPS}
    with pytest.raises(
        UserError, match="tiny_good are not checkpoints of one head: kind eagle3 and mtp"
    ):
        losses_of(Setup(with_ids(run, ids, tiny_good="mtp")), KnownTexts({}, {}))
    apart = {**ids, "tiny_good": "heads/h2/step_1000"}
    assert checkpoint_groups(Setup(with_ids(run, apart)), [*apart]) == {}


@pytest.mark.parametrize("spread", [0.05, 0.1])
def test_training_that_still_pays_is_rarely_called_enough(spread: float) -> None:
    random, prompts, early = np.random.default_rng(0), 16, 0
    speedups = np.array([1.60, 1.70, 1.80, 1.90])
    for _ in range(200):
        tokens = np.full(prompts, 128.0)
        noise = random.normal(0.0, 0.2, prompts) + random.normal(0.0, spread, (4, prompts))
        seconds = tokens / speedups[:, None] * np.exp(noise)
        workload = Workload(
            tokens, tokens, seconds, np.tile(tokens, (4, 1)), ("easy", "hard") * (prompts // 2)
        )
        early += head_training._enough(workload, range(4)) is not None
    assert early <= 8  # of 200, where 2.5 % are allowed


def test_training_is_enough_where_no_later_checkpoint_is_faster_beyond_noise(
    run: StoredRun,
) -> None:
    analysis = Audition(Setup(run))
    ranking = analysis.own_rankings[0]
    made = training(ranking, analysis, "h1", STEPS)
    assert made is not None
    assert [row.step for row in made.checkpoints] == [10, 100, 1000]
    last = made.checkpoints[-1]
    assert (last.left, last.left_lo, last.left_hi) == (1.0, 1.0, 1.0)
    for row in made.checkpoints:
        assert row.left == pytest.approx(last.speedup / row.speedup)
        assert row.left_lo is not None
        assert row.left_hi is not None
        assert row.left_lo <= row.left <= row.left_hi
        later = [each for each in made.checkpoints if each.step > row.step]
        beaten = any(each.speedup >= (1.0 + WORTH) * row.speedup for each in later)
        assert made.enough != row.step or not beaten
    # Steps the other way round: the first is the best
    worse = training(ranking, analysis, "h1", {1: "tiny_good", 2: "tiny_small", 3: "early_exit"})
    assert worse is not None
    assert worse.enough == 1


def test_two_drafts_are_compared_on_the_same_tokens(losses: Losses) -> None:
    for pair in losses.compared:
        every, *classes = pair.rows
        assert every.both + every.first + every.second + every.neither == pytest.approx(1.0)
        assert math.fsum(row.token_share for row in classes) == pytest.approx(1.0)
        for name in ("both", "first", "second", "neither"):
            parts = math.fsum(row.token_share * getattr(row, name) for row in classes)
            assert parts == pytest.approx(getattr(every, name), abs=1e-9)
        assert pair.alpha_difference == pytest.approx(every.second - every.first)
        speedups = {
            draft.draft: draft.speedup
            for draft in losses.drafts
            if draft.temperature == pair.temperature
        }
        first, second = speedups[pair.first], speedups[pair.second]
        assert pair.ratio == pytest.approx(second / first)
        assert pair.ratio_lo is not None
        assert pair.ratio_hi is not None
        assert pair.ratio_lo < pair.ratio < pair.ratio_hi
        # A bound: no worse than either of the two alone
        assert pair.router is not None
        assert pair.router >= max(first, second) - 1e-9


def test_who_accepts_more_is_judged_by_what_only_one_of_them_accepts(
    run: StoredRun, losses: Losses
) -> None:
    """McNemar's difference of pairs, whose error is that of prompts, not of tokens."""
    scored = {
        (trace.draft, trace.prompt_set, trace.prompt): trace.draft_is_argmax.reshape(
            len(trace.tokens), -1
        )[:, 0]
        for trace in run.traces
        if trace.temperature == 0.0
    }
    models = [p for p in losses.compared if p.temperature == 0.0 and "ngram" not in p.second]
    assert models
    for pair in models:
        value, variance = 0.0, 0.0
        for name in ("easy", "hard"):
            prompts = [key[2] for key in scored if key[:2] == (pair.first, name)]
            counts = [
                (scored[pair.second, name, p].astype(int) - scored[pair.first, name, p].astype(int))
                for p in prompts
            ]
            more = np.array([each.sum() for each in counts])
            tokens = np.array([len(each) for each in counts])
            share, n = more.sum() / tokens.sum(), len(prompts)
            value += share / 2
            residuals = more - share * tokens
            variance += (residuals @ residuals) / tokens.sum() ** 2 * n / (n - 1) / 4
        assert pair.alpha_difference == pytest.approx(value)
        assert pair.alpha_difference_lo is not None
        assert pair.alpha_difference_hi is not None
        half = (pair.alpha_difference_hi - pair.alpha_difference_lo) / 2
        # Student's t of 7 to 14 degrees of freedom
        assert 2.1 < half / variance**0.5 < 2.5


# ---- the command and its page --------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, with the page."""
    copy = tmp_path_factory.mktemp("losses") / "audition"
    shutil.copytree(FROZEN / "audition", copy)
    assert outcome_of("report", f"run={copy}", "losses=true").status == 0
    return copy


def test_the_command_prints_the_answer_and_links_its_page(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome_of("report", f"run={folder}", "losses=true")
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 28
    assert "is worth" in printed
    assert f"{folder}/losses.html" in printed
    assert 'href="losses.html"' in (folder / "report.html").read_text()
    page = (folder / "losses.html").read_text()
    assert len(page.encode()) <= 1_000_000
    assert 'href="report.html"' in page
    maps = [
        json.loads(text.replace("&#34;", '"')) for text in re.findall('data-map="([^"]*)"', page)
    ]
    assert len(maps) == len({*re.findall('id="(draft-[0-9]+)"', page)})
    assert all(len(row) == len(each["alphas"]) for each in maps for row in each["tokens"])


@browser.needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_a_reader_moves_alpha_and_draft_time(folder: Path, width: int, tmp_path: Path) -> None:
    with browser.chromium(tmp_path) as running:
        page = running.page(folder / "losses.html", width=width)
        assert page.evaluate("document.querySelectorAll('.map svg polyline').length") > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        said = "document.querySelector('.map .numbers').textContent"
        move = (
            "(() => {{ const input = document.querySelector('.map input[name={}]');"
            " input.value = {}; input.dispatchEvent(new Event('input')); }})()"
        )
        page.evaluate(move.format("alpha", 0.1))
        assert page.evaluate(said) == "no draft: 1.00x"
        page.evaluate(move.format("alpha", 1))
        everything = float(page.evaluate(said).split()[-1].rstrip("x"))
        page.evaluate(move.format("scale", 0.5))
        assert float(page.evaluate(said).split()[-1].rstrip("x")) > everything > 1.0
        assert not page.complaints
        # A link to another draft opens its section
        page.evaluate("location.hash = 'draft-1'")
        opened = "document.getElementById('draft-1').closest('details').open"
        assert page.evaluate(opened)
        assert not page.requests[1:]


def test_a_run_without_scores_or_times_is_refused(run: StoredRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no traces\.parquet; give an audition, or a sweep"):
        losses_of(Setup(replace(run, folder=tmp_path)), KnownTexts({}, {}))
    copy = Path(shutil.copytree(FROZEN / "audition", tmp_path / "audition"))
    (copy / "traces.parquet").unlink()
    with pytest.raises(UserError, match=r"traces\.parquet"):
        outcome_of("report", f"run={copy}", "losses=true")
    untimed = replace(run, rounds=(), latency_samples=run.latency_samples.iloc[:0])
    with pytest.raises(UserError, match="has no times of its drafts"):
        losses_of(Setup(untimed), KnownTexts({}, {}))
    with pytest.raises(UserError, match="losses: needs run="):
        outcome_of("report", f"runs=[{FROZEN / 'sweep'},{FROZEN / 'sweep'}]", "losses=true")


# ---- a trainer's log -----------------------------------------------------------------------------

# In the shapes that the trainers' sources print (named in harness/storage/training_log.py)
LOGS = {
    # SpecForge since July 2026: without a tracker, with one, its history and its export
    "specforge.log": "[INFO] starting\nstep 50: {'acc_0': 0.4, 'acc_1': 0.3, 'ploss_0': 1.2, 'acc':"
    " 0.35, 'loss': 2.1}\nstep 50: {'eval/avg_loss': 1.1, 'eval/avg_acc': 0.8,"
    " 'eval/per_position_acc': [0.8, 0.7], 'eval/simulated_acc_len': 1.36,"
    " 'eval/acceptance_rate_0': 0.9}\n",
    "specforge_tracked.log": "step 50: {'train/acc_0': 0.4, 'train/acc_1': 0.3}\nstep 50:"
    " {'eval/per_position_acc/0': 0.8, 'eval/per_position_acc/1': 0.7}\n",
    "specforge.jsonl": '{"eval/per_position_acc/0": 0.5, "eval/per_position_acc/1": 0.2}\n'
    '{"eval/per_position_acc/1": 0.7, "eval/per_position_acc/0": 0.8, "_step": 100}',
    # scripts/train_eagle3.py before that
    "history.jsonl": '{"eval/acc_0": 0.5, "eval/acc_1": 0.2, "eval/acceptance_rate_0": 0.9}\n'
    '{"eval/acc_1": 0.7, "eval/acc_0": 0.8}',
    "specforge_wandb.csv": "Step,run - eval/acc_0,run - eval/acc_0__MIN,run - eval/acc_1\n"
    "10,0.5,0.1,0.4\n20,0.8,0.1,0.7\n",
    # speculators: rich's console, which breaks lines between values; val_metrics.json
    "speculators.log": "[12:00:01] INFO     train/loss_0=1.980, train/full_acc_0=0.410,\n"
    "           train/cond_acc_0=0.410, epoch=0, lr=1.00e-04, global_step=7\n"
    "[12:01:01] INFO     val/loss_0_epoch=1.980, val/full_acc_0_epoch=0.800,      trainer.py:576\n"
    "           val/cond_acc_0_epoch=0.800, val/full_acc_1_epoch=0.560,\n"
    "           val/cond_acc_1_epoch=0.700, val/loss_epoch=3.1, epoch=0\n",
    "val_metrics.json": '{"loss_epoch": 0.1, "full_acc_0_epoch": 0.8, "full_acc_1_epoch": 0.56}',
    "dflash_metrics.json": '{"full_acc_epoch": 0.75, "position_1_acc_epoch": 0.8,'
    ' "position_2_acc_epoch": 0.7, "eal_epoch": 1.36}',
}


@pytest.mark.parametrize("name", LOGS)
def test_logs_of_both_trainers_are_read_in_every_form(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(LOGS[name])
    log = read_training_log(str(tmp_path / name))
    assert log.accuracies == pytest.approx((0.8, 0.7))
    spec = name.startswith(("specforge", "history"))
    assert (log.framework, log.of) == ("SpecForge" if spec else "speculators", "eval")
    assert log.given == (name in ("speculators.log", "val_metrics.json"))


@pytest.mark.parametrize(
    "text",
    [
        "step 50: {'acc_0': 0.4, 'acc_1': 0.3}\nstep 100: {'acc_0': 0.8, 'acc_1': 0.7, 'lr': 1e-4}",
        "Eval - Step 9 [10/2], position 0,  Acc: 0.80\nEval - Step 9 [10/2], position 1,  Acc: 0.70"
        "\nEval - Step 9 [10/2], position 0,  Acceptance Rate: 0.9123\n",
    ],
)
def test_accuracies_of_training_are_read_where_nothing_was_evaluated(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(text)
    log = read_training_log(str(tmp_path / "log"))
    assert (log.framework, log.of, log.accuracies) == ("SpecForge", "train", (0.8, 0.7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'loss': 0.3, 'lr': 1e-4}", "no accuracy by draft token in it, found are loss, lr; read"),
        ("{'loss': 0.3, 'eval/avg_acc': 0.6}", "found are eval/avg_acc, loss; read are SpecForge"),
        ("training has begun", "no accuracy by draft token in it, it names no values; read are"),
        ("eval/acc_0=1.02", "acc has 1.02, which is no share"),
        ("eval/acc_0=nan", "acc has nan, which is no share"),
        ("eval/acc_1=0.5", r"acc of offsets \[1\]; read are"),
    ],
)
def test_a_log_of_an_unknown_shape_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(UserError, match=message):
        read_training_log(str(tmp_path / "log"))
    with pytest.raises(UserError, match="absent: no such file; read are"):
        read_training_log(str(tmp_path / "absent"))


def test_lengths_go_from_the_log_to_replay_one_step_at_a_time(run: StoredRun) -> None:
    log = TrainingLog("SpecForge", "eval", (0.9, 0.8, 0.7, 0.6, 0.5))
    gap = accuracy_gap(Setup(run), log, None)
    assert (gap.draft, gap.k) == ("tiny_eagle3", 4)
    assert gap.logged_length == pytest.approx(1 + 0.9 * (1 + 0.8 * (1 + 0.7 * 1.6)))
    traces = [t for t in run.traces if t.draft == "tiny_eagle3" and t.temperature == 0.0]
    firsts = {
        s: [t.draft_is_argmax[:, 0] for t in traces if t.prompt_set == s] for s in ("easy", "hard")
    }
    shares = [np.concatenate(each).mean() for each in firsts.values()]
    assert gap.rows[0].everywhere == pytest.approx(np.mean(shares))
    assert gap.rows[0].everywhere == gap.rows[0].given
    own = TrainingLog("SpecForge", "eval", tuple(row.everywhere for row in gap.rows))
    again = accuracy_gap(Setup(run), own, "tiny_eagle3")
    assert again.logged_length == pytest.approx(again.everywhere_length)
    assert again.cause in ("dependence", "starts", "none")
    dropped = replace(own, accuracies=(own.accuracies[0], own.accuracies[0], *own.accuracies[2:]))
    if again.rows[1].everywhere < 0.8 * again.rows[0].everywhere:
        assert accuracy_gap(Setup(run), dropped, None).cause == "own_states"
    with pytest.raises(UserError, match=r"tiny_good is of no head .* \(heads: tiny_eagle3\)"):
        accuracy_gap(Setup(run), log, "tiny_good")


HEAD = Path(harness.__file__).parent / "models" / "embedded" / "tiny_eagle3"
TEMPLATE = "{% for message in messages %}<<{{ message['content'] }}>> =>{% endfor %}"


def broken(tmp_path: Path, cause: str) -> tuple[Path, list[str]]:
    """The embedded head with one thing wrong, and what else the audition needs for it."""
    folder = Path(shutil.copytree(HEAD, tmp_path / cause))
    config = json.loads((folder / "config.json").read_text())
    words: list[str] = []
    if cause == "layers":
        layers = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]
        config["eagle_aux_hidden_state_layer_ids"] = layers
    if cause == "norm":
        config["norm_before_residual"] = not config["norm_before_residual"]
    if cause == "embedding":
        tensors = load_file(folder / "model.safetensors")
        target = load_file(HEAD.parent / "tiny" / "model.safetensors")
        tensors["embed_tokens.weight"] = target["model.embed_tokens.weight"].flip(0).contiguous()
        save_file(tensors, folder / "model.safetensors")
    if cause == "template":
        target_folder = Path(shutil.copytree(HEAD.parent / "tiny", tmp_path / "target"))
        (target_folder / "chat_template.jinja").write_text(TEMPLATE)
        words = ["model=hf", f"model.id={target_folder}"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder, words


@pytest.fixture(scope="module")
def opened(run: StoredRun) -> tuple[LoadedModel, CachedModel, list[GeneratedText]]:
    """The target of the run, and its greedy texts."""
    target = load_model(conf_of(ModelConf, run.config["model"]), torch.device("cpu"))
    texts = head_causes._texts(run, known_texts(run, run.traces), target)
    return target, CachedModel(target.network, target.vocab_size), texts


WRONG: dict[str, Callable[[Any], tuple[str, Any]]] = {
    "intact": lambda network: ("layers", network.layers),
    "layers": lambda network: ("layers", tuple(layer - 1 for layer in network.layers)),
    "layers higher": lambda network: ("layers", tuple(layer + 1 for layer in network.layers)),
    "norm": lambda network: ("norm_before_residual", not network.norm_before_residual),
    "embedding": lambda network: (
        "embed_tokens",
        torch.nn.Embedding.from_pretrained(network.embed_tokens.weight.detach().flip(0)),
    ),
    "frequencies": lambda network: ("rotary", rounded(network)),
}


def rounded(network: Any) -> Any:
    """Its positions with frequencies in bfloat16."""
    rotary = type(network.rotary)(network.config)
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()
    return rotary


@pytest.mark.parametrize("wrong", WRONG)
def test_a_change_that_makes_a_head_better_on_the_same_tokens_is_named(
    wrong: str, opened: tuple[LoadedModel, CachedModel, list[GeneratedText]]
) -> None:
    target, model, texts = opened
    conf = DraftConf(name="head", kind="eagle3", id="embedded:tiny_eagle3")
    network: Any = DRAFTS["eagle3"].load(conf, target).network
    network.own_embedding = True  # as in a checkpoint that brings one
    setattr(network, *WRONG[wrong](network))
    now, tried = head_causes.changed_heads(network, target, model, texts)
    found = head_causes.named(tried)
    # Frequencies in bfloat16 cost this head nothing, so they are no cause of anything
    causes = {"intact": set(), "frequencies": set(), "layers higher": {"layers"}}
    assert {each.cause for each in found} == causes.get(wrong, {wrong})
    for each in found:
        assert each.accuracy > now
    if wrong == "frequencies":
        (rotary,) = (each for each in tried if each.cause == "rotary")
        assert abs(rotary.gain.value) < 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("cause", ["layers", "norm", "embedding", "template"])
def test_what_is_wrong_with_a_head_is_named(cause: str, run: StoredRun, tmp_path: Path) -> None:
    log = TrainingLog("SpecForge", "eval", (0.0, 0.0))
    healthy = accuracy_gap(Setup(run), log, None)
    folder, words = broken(tmp_path, cause)
    words += ["temperature=[0.0]", "k=[2]", "prompts.limit=8", "new_tokens=32", "threads=1"]
    audition = ran("audition", tmp_path / "results", f"drafts=[h@{folder}@kind:eagle3]", *words)
    (tmp_path / "log").write_text(
        " ".join(f"eval/acc_{row.offset - 1}={row.everywhere}" for row in healthy.rows)
    )
    gap = written(audition, str(tmp_path / "log")).accuracy
    assert gap is not None
    assert gap.cause == cause
    assert gap.rows[0].everywhere < gap.rows[0].logged
    assert gap.now is not None
    assert gap.fixed is not None
    assert gap.fixed > gap.now
    assert "Why: " in (audition.folder / "losses.html").read_text()


def test_scores_by_the_documented_callback_are_those_of_the_run(
    run: StoredRun, tmp_path: Path
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    traces = [t for t in run.traces if t.draft == "tiny_eagle3" and t.temperature == 0.0]
    rows: list[dict[str, Any]] = []
    for trace in traces:
        tokens = trace.tokens.tolist()
        drafted = [
            [
                token if right else -1
                for token, right in zip(tokens[n:], trace.draft_is_argmax[:, n], strict=False)
            ]
            for n in range(4)
        ]
        rows += namespace["score_rows"]("h1_step_5", trace.prompt, tokens, drafted)
    pd.DataFrame(rows).to_parquet(tmp_path / "scores.parquet")
    for read in read_table(tmp_path / "scores.parquet"):
        trace = next(t for t in traces if t.prompt == read.prompt)
        assert read.tokens.tolist() == trace.tokens.tolist()
        assert (read.draft_is_argmax == trace.draft_is_argmax).all()
