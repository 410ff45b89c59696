"""One pair, measured: step times, then K x temperature x prompt sets, then the verdict.

Greedy texts of speculation are compared with those of plain decoding: a pair that changes them gets
no verdict. The texts of plain decoding are the target's own, so the draft scores them too, and
every cell is replayed next to its measurement, early stops included. With `mode=replay` only the
texts are generated, in batches, and no speculative generation is run. With `latency_from` rounds
are those of another engine, and nothing is timed here.

With `until=all` every K is measured on every prompt. With `until=decided` one K is, next to plain
decoding, in a few looks: every prompt is decoded plainly, in batches, and replayed at every K. The
K that is best by replay and round times is chosen, at each temperature, and measured on the prompts
in a random order that is balanced over their sets. After every quarter of them
`harness.analysis.looks` says at which temperatures every question is decided; the rest is measured
only where one is not. The other K are measured on the first prompts of each set, next to the same
plain generations: points of the picture, and the check of what is predicted.

What is measured together runs within moments: plain decoding and the chosen K alternate in who
leads. Texts of a few milliseconds say little of a round's time, so a look measures its prompts
again, as further repetitions, until each cell's ratio to plain decoding is known precisely, or its
share of the time is spent.

All of this follows from the seed and from what is stored, so that a resumed run continues the same
looks.
"""

import math
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from harness.analysis.looks import choice, decided
from harness.analysis.round_costs import PRECISE
from harness.commands.checks import Problems, check_run
from harness.commands.dry_run import print_sweep
from harness.commands.other_runs import check_draft_of, check_target_of, costs_of_sweep
from harness.commands.pair import Pair, open_pair
from harness.commands.requests import (
    ModelsOf,
    check_texts,
    completions,
    models_of,
    request,
    run_requests,
    score_pair,
    with_turns,
)
from harness.commands.run_lifecycle import (
    Outcome,
    begin,
    concluded,
    load_prompts,
    measuring,
    resumable,
    resumed,
)
from harness.commands.run_time import CELL_S, RunTime, Stopwatch, said_beforehand, say_left
from harness.commands.tasks import (
    MOST_REPETITIONS,
    Group,
    group_tasks,
    in_random_order,
    look_groups,
    replayed_prompts,
    sweep_tasks,
)
from harness.commands.timing import measure_steps, visits_of_pair
from harness.config import SweepConfig, rates_for
from harness.measurement.round_times import LEAST_VISITS, RoundVisits
from harness.records import Cell, Trial, UserError, grouped
from harness.stats.verdict_interval import LOOKS
from harness.storage import RunFolder, load
from harness.storage.manifest import Ended, Looks, SyntheticAcceptance

# Measured generations between two visits that time rounds, so that both are from the same minutes
REQUESTS_PER_VISIT = 40
# With a budget all cells together take this share of it, if that is more than CELL_S of each
CELLS_SHARE = 0.25


def run(config: SweepConfig) -> Outcome:
    """Measure the grid; status 1 where a generation failed or speculation changed a greedy text."""
    begun = monotonic()
    prompts = replayed_prompts(load_prompts(config), config)
    problems = Problems()
    costs = problems.of(costs_of_sweep, config)
    check_run(config, prompts, [config.draft], problems)
    if config.dry_run:
        print_sweep(config, prompts)
        return Outcome(None)
    folder = resumed(config, "sweep")
    pair = open_pair(config, prompts)
    described = pair.describe()
    check_target_of(costs, config.model, described.models["target"])
    entry = described.models.get("draft")
    check_draft_of(costs, config.draft.name, config.draft.kind, entry, config.temperature)
    folder = begin(config, "sweep", folder, described)
    if costs is not None:
        folder.note(engine_costs=costs)
    if (acceptance := config.decode.acceptance) is not None:
        folder.note(
            synthetic_acceptance=[
                SyntheticAcceptance(name, float(temperature), k, rates_for(acceptance, k))
                for name in dict.fromkeys(prompt.prompt_set for prompt in prompts)
                for temperature in config.temperature
                for k in config.speculative_ks
            ]
        )
    said = said_beforehand(config, [config.draft], prompts)
    with measuring(folder, pair.target_model.device):
        pair = with_turns(folder, pair, config)
        if config.mode == "replay" or 0.0 not in config.temperature:  # no greedy texts to compare
            pair.check_lengths()
        if costs is None:
            _measure(folder, pair, config, said, begun)
        else:  # nothing is timed here
            completions(folder, pair, config)
            score_pair(folder, pair, config)
    return concluded(folder, verbose=config.verbose)


def _measure(
    folder: RunFolder, pair: Pair, config: SweepConfig, said: RunTime | None, begun: float
) -> None:
    """Time rounds and steps, and measure the cells among them; with mode=replay the texts alone."""
    in_looks, watch = config.until == "decided", Stopwatch(folder, config.budget_s, begun)
    visits = visits_of_pair(folder, pair, config, config.temperature, in_looks=in_looks)
    visits.begin()
    measure_steps(folder, pair, config)
    if in_looks:
        _measure_in_looks(folder, pair, config, visits, watch, said)
        return
    synthetic = config.decode.acceptance is not None
    if config.mode == "replay":
        visits.up_to(0.5)
        completions(folder, pair, config)
    else:
        tasks = sweep_tasks(pair.prompts, config).measured
        requests = [request(pair, config, task) for task in tasks]
        models = models_of(folder, pair, config)
        trials = run_requests(folder, requests, models, "generating", visits.up_to)
        if not synthetic:  # else the texts are not the target's
            check_texts(folder, trials, pair, config)
    # How far a draft drafts off the text is not replayed with a penalty
    if not synthetic and not (config.decode.penalises and config.thresholds):
        score_pair(folder, pair, config)
    visits.up_to(1.0)


# ---- looks ---------------------------------------------------------------------------------------


def _measure_in_looks(
    folder: RunFolder,
    pair: Pair,
    config: SweepConfig,
    visits: RoundVisits,
    watch: Stopwatch,
    expected: RunTime | None,
) -> None:
    """Generate and score every text, choose K, and measure look after look what the folder lacks.

    Args:
        expected: what the run was said to take, which is corrected by what the texts took.

    Raises:
        UserError: `budget_s` is too little for the first look.
    """
    # Where a text meets logits that are not finite, so do its measured pairs, which say so
    begun = monotonic()
    texts = completions(folder, pair, config, skip_broken=True)
    texts_s, lengths = monotonic() - begun, [len(text.tokens) for text in texts]
    token_s = _plain_token_s(folder)
    say_left(expected, texts_s, lengths, budget_s=watch.left_s, token_s=token_s)
    score_pair(folder, pair, config)
    visits.reach(LEAST_VISITS)
    looks = folder.manifest.looks
    if looks is None:
        run = load(folder.path)
        looks = Looks(tuple(choice(run, float(t)) for t in config.temperature), most=LOOKS)
        folder.note(looks=looks)
    order = in_random_order(pair.prompts, config.seed)
    measured = _Measured(folder, pair, config, visits, watch, models_of(folder, pair, config))
    ks = ", ".join(sorted({each.shown for each in looks.chosen}))
    for number in range(1, looks.made + 1):  # what is stored no more is measured again
        measured.once(look_groups(order, config, looks, number), f"look {number}, K = {ks}")
    while looks.made < LOOKS and looks.ended != "decided":
        number = looks.made + 1
        groups = look_groups(order, config, looks, number)
        needed_s = sum(len(group.ks) for group in groups) * measured.generation_s
        if needed_s > watch.left_s:
            looks = replace(looks, measured_s=watch.spent_s, ended="budget")
            folder.note(looks=looks)
            if number == 1:
                with resumable(folder):
                    raise _too_little(watch, needed_s)
            break
        measured.look(groups, f"look {number} of {LOOKS}, K = {ks}")
        check_texts(folder, folder.trials.read(), pair, config)
        ended: Ended | None = "prompts" if number == LOOKS else None
        if ended is None:
            closed = looks.closed(decided(load(folder.path), number), number)
            ended = "decided" if all(each.looks for each in closed) else None
            looks = replace(looks, chosen=closed)
        looks = replace(looks, made=number, measured_s=watch.spent_s, ended=ended)
        folder.note(looks=looks)


def _plain_token_s(folder: RunFolder) -> float | None:
    """Seconds of a plain token, by the rounds that are timed so far; None where none is."""
    timings = [line for line in folder.rounds.read() if line.k == 0]
    seconds = [line.seconds / line.new_tokens for line in timings]
    return float(np.median(seconds)) if seconds else None


def _too_little(watch: Stopwatch, needed_s: float) -> UserError:
    enough = math.ceil(1.1 * (watch.spent_s + needed_s))
    return UserError(
        f"budget_s={watch.budget_s:g}: one look takes about {math.ceil(needed_s)} s, after"
        f" {math.ceil(watch.spent_s)} s for the texts and the round times; give"
        f" budget_s={enough} or more"
    )


@dataclass
class _Measured:
    """Runs the generations of looks that the folder lacks."""

    folder: RunFolder
    pair: Pair
    config: SweepConfig
    visits: RoundVisits
    watch: Stopwatch
    models: ModelsOf
    warmed: set[Hashable] = field(default_factory=set[Hashable])
    measured: int = 0

    @property
    def generation_s(self) -> float:
        """About what one takes: the tokens of a typical text, each as a plain one."""
        token_s = _plain_token_s(self.folder)
        texts = [trial.new_tokens for trial in self.folder.trials.read() if trial.new_tokens]
        return token_s * float(np.mean(texts)) if token_s and texts else 0.0

    def look(self, groups: Sequence[Group], label: str) -> None:
        """Measure every group, then again those of cells that are not precise yet."""
        self.once(groups, label)
        for number in range(self.config.repetitions, MOST_REPETITIONS):
            cells = self._imprecise() if self.watch.left_s > 0 else set[Cell]()
            due = [*_of_cells(groups, cells)]
            if not due:
                break
            self._run(due, number, f"{label}, short texts again")

    def once(self, groups: Sequence[Group], label: str) -> None:
        for number in range(self.config.repetitions):
            self._run(groups, number, label)

    def _run(self, groups: Sequence[Group], number: int, label: str) -> None:
        tasks = group_tasks(groups, self.config, number)
        requests = [request(self.pair, self.config, task) for task in tasks]
        if requests:
            run_requests(
                self.folder,
                requests,
                self.models,
                label,
                self._visit_at_times,
                warmed=self.warmed,
            )

    def _visit_at_times(self, _: float) -> None:
        self.measured += 1
        if self.measured % REQUESTS_PER_VISIT == 0:
            self.visits.reach(min(self.visits.most, self.visits.complete + 1))

    def _imprecise(self) -> set[Cell]:
        budget_s = self.watch.budget_s or 0.0
        sets = {entry.prompt.prompt_set for entry in self.pair.prompts}
        cells = len(sets) * len(self.config.temperature) * len(self.config.k)
        return imprecise_cells(
            self.folder.trials.read(), max(CELL_S, CELLS_SHARE * budget_s / cells)
        )


def imprecise_cells(trials: Sequence[Trial], cell_s: float) -> set[Cell]:
    """The cells to measure longer: a K's ratio to plain decoding is not known precisely.

    What is timed is a round next to a plain token, generation by generation, so that it does not
    matter how many tokens a text's rounds accept.

    Args:
        trials: those without times are passed over.
        cell_s: seconds of a cell, its plain generations included, after which it is measured no
            more.
    """
    done = [trial for trial in trials if trial.status == "ok" and trial.decode_s]
    plain = {trial.key: trial for trial in done if trial.k == 0 and trial.new_tokens}
    paired = [trial for trial in done if trial.k and trial.rounds and trial.key in plain]
    imprecise: set[Cell] = set()
    for cell, measured in grouped(paired, lambda trial: trial.cell_key).items():
        seconds = np.array([trial.decode_s for trial in measured])
        rounds = np.array([trial.rounds for trial in measured])
        plain_s = np.array([plain[trial.key].decode_s for trial in measured])
        tokens = np.array([plain[trial.key].new_tokens for trial in measured])
        logs = np.log(seconds / rounds) - np.log(plain_s / tokens)
        error = logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
        if error > PRECISE and seconds.sum() + plain_s.sum() < cell_s:
            imprecise.add(cell)
    return imprecise


def _of_cells(groups: Sequence[Group], cells: Set[Cell]) -> Iterator[Group]:
    """The groups that measure any of these cells, with the K of these alone."""
    for group in groups:
        ks = tuple(k for k in group.ks if k == 0 or group.cell(k) in cells)
        if len(ks) > 1:
            yield replace(group, ks=ks)
