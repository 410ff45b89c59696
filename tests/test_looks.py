"""A sweep that measures in looks: in which order, how long, and that nothing is lost or twice."""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs import outcome_of, ran, stored

from harness import reporting
from harness.analysis import analyse
from harness.cli import compose
from harness.commands import pair, requests, run_time, sweep, timing
from harness.commands.sweep import imprecise_cells
from harness.commands.tasks import (
    PROMPTS_OF_EVERY_K,
    EncodedPrompt,
    in_random_order,
    look_groups,
    prompts_at,
    replayed_prompts,
    sweep_tasks,
)
from harness.config import SweepConfig
from harness.measurement import generations, target_texts
from harness.measurement.round_times import LEAST_VISITS
from harness.records import Cell, Prompt, Trial, UserError, grouped
from harness.stats.verdict_interval import LOOKS, most_measured
from harness.storage import StoredRun, load
from harness.storage.manifest import ChosenK
from harness.storage.manifest import Looks as LooksMade

pytestmark = pytest.mark.usefixtures("few_samples")
KS, TEMPERATURES = [1, 2, 4], [0.0, 1.0]
CHOSEN = LooksMade((ChosenK(0.0, 2), ChosenK(1.0, 4)))
SMALL = ("k=[1,2]", "temperature=[0,1]", "new_tokens=8", "threads=1", "prompts.limit=6")


def entries(**sizes: int) -> list[EncodedPrompt]:
    prompts = (Prompt(name, str(n), ("?",)) for name, size in sizes.items() for n in range(size))
    return [EncodedPrompt(prompt, (1,)) for prompt in prompts]


def settings(*words: str) -> SweepConfig:
    return compose("sweep", ["k=[1,2,4]", *words])


# ---- the order -----------------------------------------------------------------------------------


def test_every_beginning_of_the_order_has_its_share_of_each_set() -> None:
    prompts = entries(easy=40, hard=20, rare=3)
    order = in_random_order(prompts, 5)
    assert {entry for each in order for entry in each.turns} == set(prompts)
    for length in range(1, len(order)):
        counts = Counter(each.prompt_set for each in order[:length])
        for name, size in (("easy", 40), ("hard", 20), ("rare", 3)):
            assert abs(counts[name] - length * size / 63) <= 1.0
    ids = [each.turns[0].prompt.id for each in order if each.prompt_set == "easy"]
    assert ids != sorted(ids, key=int), "in random order"
    assert order == in_random_order(prompts, 5)
    assert order != in_random_order(prompts, 6)


def test_the_turns_of_a_conversation_are_measured_in_one_look() -> None:
    talks = [Prompt("talks", str(number), ("a", "b", "c")) for number in range(9)]
    prompts = [EncodedPrompt(t.up_to(turn, ["x", "y"]), (1,)) for t in talks for turn in (1, 2, 3)]
    order = in_random_order(prompts, 0)
    assert [[entry.turn for entry in each.turns] for each in order] == [[1, 2, 3]] * 9
    groups = look_groups(order, settings("temperature=[0]"), CHOSEN, 1)
    assert len(groups) == 3 * prompts_at(9, 1) == 9


def test_of_many_prompts_all_are_replayed_and_a_part_is_measured() -> None:
    prompts, config = entries(easy=64, hard=64), settings("temperature=[0]")
    tasks = sweep_tasks(prompts, config)
    assert len(tasks.texts) == 128
    measured = Counter(task.entry.prompt.prompt_set for task in tasks.measured if task.k == 0)
    assert measured == {"easy": 32, "hard": 32}
    assert [most_measured(count) for count in (8, 64, 65, 128, 400)] == [8, 64, 64, 64, 200]


def test_own_files_are_replayed_up_to_a_limit_unless_the_limit_is_given() -> None:
    sizes = {"long": 900, "short": 300, "one": 1}
    prompts = [Prompt(name, str(n), ("?",)) for name, size in sizes.items() for n in range(size)]
    kept = Counter(prompt.prompt_set for prompt in replayed_prompts(prompts, settings()))
    assert kept == {"long": 383, "short": 127, "one": 1}
    for words in (("prompts.limit=null",), ("until=all",)):
        assert replayed_prompts(prompts, settings(*words)) == tuple(prompts)
    assert replayed_prompts(prompts[:500], settings()) == tuple(prompts[:500])


def test_the_looks_measure_every_prompt_once_and_leaders_alternate() -> None:
    order = in_random_order(entries(easy=32, hard=10), 1)
    config = settings("temperature=[0,1]")
    of_look = [look_groups(order, config, CHOSEN, number + 1) for number in range(LOOKS)]
    assert [len(groups) / 2 for groups in of_look] == [11, 10, 11, 10]
    groups = [group for each in of_look for group in each]
    of_prompt = Counter(
        (g.entry.prompt.prompt_set, g.entry.prompt.id, g.temperature) for g in groups
    )
    assert len(of_prompt) == 2 * 42
    assert set(of_prompt.values()) == {1}
    for (name, temperature), of_cell in grouped(
        groups, lambda g: (g.entry.prompt.prompt_set, g.temperature)
    ).items():
        chosen = CHOSEN.k_at(temperature)
        leaders = [group.ks[0] for group in of_cell]
        for length in range(1, len(leaders) + 1):
            assert abs(leaders[:length].count(0) - length / 2) <= 0.5, name
        assert all(set(group.ks[:2]) == {0, chosen} for group in of_cell), "next to each other"
        every = [group for group in of_cell if len(group.ks) > 2]
        assert of_cell[:PROMPTS_OF_EVERY_K] == every
        assert {tuple(sorted(group.ks)) for group in every} == {(0, 1, 2, 4)}
        assert len({group.ks[2:] for group in every}) == 2, "others take turns as well"


def test_a_temperature_that_is_decided_is_measured_no_more() -> None:
    closed = LooksMade((ChosenK(0.0, 2, looks=1), ChosenK(1.0, 4)), made=2)
    assert (closed.made_at(0.0), closed.made_at(1.0)) == (1, 2)
    order, config = in_random_order(entries(easy=16), 1), settings("temperature=[0,1]")
    of_look = [look_groups(order, config, closed, number + 1) for number in range(LOOKS)]
    temperatures = [{group.temperature for group in groups} for groups in of_look]
    assert temperatures == [{0.0, 1.0}, {1.0}, {1.0}, {1.0}]


def test_where_nothing_can_choose_every_k_is_measured() -> None:
    nothing = LooksMade((ChosenK(0.0, None), ChosenK(1.0, 4)))
    order = in_random_order(entries(easy=16), 1)
    groups = look_groups(order, settings("temperature=[0,1]"), nothing, 2)
    assert {tuple(sorted(g.ks)) for g in groups if g.temperature == 0.0} == {(0, 1, 2, 4)}
    leaders = Counter(g.ks[0] for g in groups if g.temperature == 0.0)
    assert set(leaders.values()) == {1}


def test_fewer_prompts_than_looks_are_all_measured() -> None:
    order = in_random_order(entries(easy=1, hard=1), 1)
    config = settings("temperature=[0]")
    sizes = [len(look_groups(order, config, CHOSEN, number + 1)) for number in range(LOOKS)]
    assert sizes == [1, 0, 1, 0]


# ---- long enough ---------------------------------------------------------------------------------


def measured(k: int, scatter: float, number: int, name: str = "easy") -> Iterator[Trial]:
    rng = np.random.default_rng(k)
    for repetition in range(number):
        seconds = 0.1 * math.exp(scatter * rng.normal())
        yield Trial(
            "cell", name, "one", repetition, k, 0.0, "ratio" if k else None, "ok",
            new_tokens=20, rounds=10 if k else None, decode_s=seconds,
        )  # fmt: skip


def test_a_cell_is_measured_until_its_ratio_is_precise_or_its_time_is_spent() -> None:
    plain, precise, noisy = ([*measured(*each, 9)] for each in ((0, 0.001), (1, 0.001), (2, 0.2)))
    assert imprecise_cells([*plain, *precise, *noisy], 10.0) == {Cell("easy", 0.0, 2)}
    assert imprecise_cells([*plain, *precise, *noisy], 0.5) == set()
    assert imprecise_cells([*plain, precise[0]], 10.0) == {Cell("easy", 0.0, 1)}, "one has no error"
    # What failed, what was not timed and what has no partner say nothing
    useless = [
        replace(noisy[0], status="failed"),
        replace(noisy[1], decode_s=None),
        replace(noisy[2], repetition=99),
    ]
    assert imprecise_cells([*plain, *useless], 10.0) == set()


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture
def choosing() -> Iterator[SimpleNamespace]:
    """K = 2 is chosen, and everything is decided at the look that a test wants."""
    with pytest.MonkeyPatch.context() as patch:
        yield chosen_by(patch)


def chosen_by(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    asked = SimpleNamespace(choices=0, looks=[], decided_at=2)

    def choice(run: StoredRun, temperature: float) -> ChosenK:
        assert {trace.temperature for trace in run.traces} == set(TEMPERATURES)
        assert {line.k for line in run.rounds} == {0, 1, 2}
        assert temperature in TEMPERATURES
        asked.choices += 1
        return ChosenK(temperature, 2)

    def decided(run: StoredRun, look: int) -> set[float]:
        assert run.checks, "greedy texts are judged before anything is decided on them"
        asked.looks.append(look)
        return set(TEMPERATURES) if look == asked.decided_at else set()

    patch.setattr(sweep, "choice", choice)
    patch.setattr(sweep, "decided", decided)
    return asked


@pytest.fixture(scope="module")
def whole(few_samples: None, tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """A run that nothing interrupts, decided at its second look."""
    del few_samples
    with pytest.MonkeyPatch.context() as patch:
        asked = chosen_by(patch)
        run = ran("sweep", tmp_path_factory.mktemp("whole"), *SMALL)
    assert (asked.choices, asked.looks) == (2, [1, 2])
    return run


def kinds(run: StoredRun) -> Counter[tuple[int, float, int]]:
    return Counter((trial.k, trial.temperature, trial.repetition) for trial in run.trials)


def test_a_sweep_generates_every_text_in_batches_and_measures_one_k_until_it_is_decided(
    whole: StoredRun,
) -> None:
    run = whole
    assert run.config["until"] == "decided"
    made = run.manifest.looks
    assert made is not None
    assert [(each.temperature, each.k) for each in made.chosen] == [(0.0, 2), (1.0, 2)]
    assert (made.made, made.most, made.ended) == (2, LOOKS, "decided")
    assert made.measured_s > 0
    few = 2 * min(PROMPTS_OF_EVERY_K, 3)
    assert kinds(run) == {
        (k, temperature, repetition): number
        for temperature in TEMPERATURES
        for k, repetition, number in ((0, 0, 12), (0, 1, 6), (2, 1, 6), (1, 1, few))
    }
    texts = [trial for trial in run.trials if trial.repetition == 0]
    assert all(trial.decode_s is None for trial in texts)
    assert all(trial.decode_s for trial in run.trials if trial.repetition)
    greedy = {t.prompt: t.tokens for t in texts if t.temperature == 0.0}
    assert all(t.tokens == greedy[t.prompt] for t in run.trials if t.temperature == 0.0)
    assert len(run.traces) == 24
    summary = analyse(run)
    rows = [(row.k, row.prompts, row.source) for row in summary.results if row.prompt_set == "easy"]
    assert set(rows) == {
        *((k, 3, "measured") for k in (0, 1, 2)),
        *((k, 6, "replayed") for k in (0, 1, 2)),
    }
    assert all(row.ms_per_token for row in summary.results)
    # Of a set's prompts, not of those that a K was measured on by design
    few = [each.values["prompts"] for each in summary.caveats if each.code == "few_prompts"]
    assert few == [6]


@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [
        (requests, "run_trial", 9),
        pytest.param(requests, "run_trial", 40, marks=pytest.mark.exhaustive),
        pytest.param(target_texts, "stop_reason", 3, marks=pytest.mark.exhaustive),
        pytest.param(sweep, "score_pair", 0, marks=pytest.mark.exhaustive),
        (sweep, "choice", 1),
        pytest.param(sweep, "decided", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupted_run_continues_the_same_looks(
    module: Any,
    name: str,
    calls: int,
    choosing: SimpleNamespace,
    whole: StoredRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rendering in ("render", "show"):
        monkeypatch.setattr(reporting, rendering, lambda *_, **__: None)
    left, function = calls, getattr(module, name)

    def stopping(*words: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            raise KeyboardInterrupt
        return function(*words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, stopping)
        with pytest.raises(KeyboardInterrupt):
            outcome_of("sweep", tmp_path, *SMALL)
    (folder,) = tmp_path.iterdir()
    before = load(folder)
    chosen = before.manifest.looks is not None
    choosing.choices = 0
    monkeypatch.setattr(sys, "argv", ["sweep.py", f"resume={folder}"])
    run = ran("sweep", f"resume={folder}", tmp_path)
    assert choosing.choices == (0 if chosen else 2), "what is chosen stays"
    assert Counter(trial.cell for trial in run.trials) == Counter(t.cell for t in whole.trials)
    assert run.trials[: len(before.trials)] == before.trials
    assert kinds(run) == kinds(whole)
    visits = [Counter(line.visit for line in each.rounds) for each in (whole, run)]
    assert len(visits[1]) - len(visits[0]) in (0, 1), "a visit that was stopped is made again"
    assert run.manifest.looks is not None
    assert run.manifest.looks.ended == "decided"
    begun_by = before.manifest.environment.command
    assert run.manifest.environment.command == begun_by, "printed lines name what was typed"


def test_short_texts_are_measured_again_next_to_plain_decoding_until_they_are_precise(
    choosing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def imprecise(trials: list[Trial], cell_s: float) -> set[Cell]:
        nonlocal asked
        assert trials
        assert cell_s >= 1.0
        asked += 1
        return {Cell("easy", 1.0, 1)} if asked in (1, 2) else set()

    monkeypatch.setattr(sweep, "imprecise_cells", imprecise)
    monkeypatch.setattr(sweep, "CELL_S", 1.0)
    choosing.decided_at = 1
    run = ran("sweep", tmp_path, *SMALL)
    repeated = [trial for trial in run.trials if trial.repetition > 1]
    assert Counter((t.prompt_set, t.k, t.temperature, t.repetition) for t in repeated) == {
        ("easy", k, 1.0, repetition): 2 for k in (0, 1) for repetition in (2, 3)
    }


@pytest.mark.usefixtures("choosing")
def test_the_budget_counts_what_passes_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = sweep.open_pair

    def slow(*asked: Any) -> Any:
        for module in (sweep, run_time):  # opening takes 1000 s
            monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + 1000.0)
        return opened(*asked)

    monkeypatch.setattr(sweep, "open_pair", slow)
    with pytest.raises(UserError, match="budget_s=900: one look takes about"):
        outcome_of("sweep", tmp_path, *SMALL, "budget_s=900")
    (folder,) = tmp_path.iterdir()
    looks = load(folder).manifest.looks
    assert looks is not None
    assert looks.measured_s > 1000.0


@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("precise", [True, False])
def test_rounds_whose_ratios_are_known_precisely_are_visited_no_more(
    precise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "timed_precisely", lambda *_: precise)
    monkeypatch.setattr(timing, "visits_for", lambda _: LEAST_VISITS + 2)
    monkeypatch.setattr(sweep, "REQUESTS_PER_VISIT", 1)
    run = ran("sweep", tmp_path, *SMALL)
    assert len({line.visit for line in run.rounds}) == LEAST_VISITS + (0 if precise else 2)


def test_a_budget_ends_the_looks_and_a_larger_one_continues_them(
    choosing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing.decided_at = LOOKS
    monkeypatch.setattr(sweep, "CELLS_SHARE", 0.0)
    for rendering in ("render", "show"):
        monkeypatch.setattr(reporting, rendering, lambda *_, **__: None)
    with pytest.raises(UserError) as refused:
        outcome_of("sweep", tmp_path, *SMALL, "budget_s=0.01")
    (folder,) = tmp_path.iterdir()
    says = str(refused.value)
    numbers = re.search(r"about (\d+) s, after (\d+) s for the texts .* give budget_s=(\d+)", says)
    assert numbers
    look_s, before_s, enough_s = map(int, numbers.groups())
    assert 1 <= look_s <= enough_s
    assert before_s <= enough_s <= 2 * (look_s + before_s)
    assert says.startswith("budget_s=0.01: one look takes about ")
    assert says.endswith(f"what was measured is stored, resume={folder} continues the run")
    before = load(folder)
    assert len([t for t in before.trials if t.k == 0]) == len(before.trials) == 24
    assert before.traces
    # After one look the budget is spent
    spend = sweep.Stopwatch.left_s
    monkeypatch.setattr(
        sweep.Stopwatch,
        "left_s",
        property(lambda self: 0.0 if choosing.looks else spend.fget(self)),  # type: ignore[attr-defined]
    )
    run = ran("sweep", f"resume={folder}", "budget_s=1000", tmp_path)
    made = run.manifest.looks
    assert made is not None
    assert (made.made, made.ended) == (1, "budget")
    assert run.trials[:24] == before.trials
    monkeypatch.setattr(sweep.Stopwatch, "left_s", spend)
    run = ran("sweep", f"resume={folder}", "budget_s=1000", tmp_path)
    made = run.manifest.looks
    assert made is not None
    assert (made.made, made.ended) == (LOOKS, "prompts")
    assert choosing.looks == [1, 2, 3], "nothing is left to measure after the last"


# ---- the keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "until", "limit"),
    [
        ((), "decided", 64),
        (("until=all",), "all", 8),
        (("mode=replay",), "all", 8),
        (("decode.acceptance=0.7",), "all", 8),
        (("p_min=[0,0.5]",), "decided", 64),
        (("p_min=[0.5]", "decode.repetition_penalty=1.2"), "all", 8),
        (("prompts.limit=5",), "decided", 5),
        (("prompts.limit=null",), "decided", None),
        (("until=all", "prompts.limit=5"), "all", 5),
    ],
)
def test_every_cell_is_measured_where_replay_cannot_choose(
    words: tuple[str, ...], until: str, limit: int | None
) -> None:
    config = compose("sweep", words)
    assert (config.until, config.prompts.limit) == (until, limit)
    assert compose("audition").prompts.limit == 16
    assert compose("snapshot").prompts.limit == 8


@pytest.mark.parametrize("command", ["sweep", "audition"])
def test_the_processors_time_is_refused_of_a_card(command: str) -> None:
    config = compose(command, ["clock=cpu"])
    pair.check_clock(config, config.model, torch.device("cpu"))
    with pytest.raises(UserError, match="clock=cpu: tiny is not on the processor"):
        pair.check_clock(config, config.model, torch.device("cuda"))
    pair.check_clock(compose(command), config.model, torch.device("cuda"))


def test_generations_and_rounds_are_timed_by_the_processors_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []
    clock = generations.Clock

    def noting(*timed: Any, kind: str = "wall") -> Any:
        kinds.append(kind)
        return clock(*timed, kind=kind)  # type: ignore[arg-type]

    monkeypatch.setattr(generations, "Clock", noting)
    words = ("k=[2]", "temperature=[0]", "new_tokens=8", "threads=1", "prompts.limit=1")
    run = ran("sweep", tmp_path, *words, "until=all", "clock=cpu")
    assert set(kinds) == {"cpu"}
    other = stored(outcome_of("sweep", tmp_path, *words, "until=all"))
    cells = [{trial.cell for trial in each.trials} for each in (run, other)]
    assert not cells[0] & cells[1], "the clock is part of what a generation is known by"
