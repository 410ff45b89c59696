"""Score and time many drafts on one target's texts, one draft in memory at a time.

With `until=decided` a draft is measured in four looks: each scores a quarter of the prompts, in a
random order that is balanced over their sets, and makes a quarter of the visits that time rounds.
A draft that loses to one before it (`harness.analysis.looks.slower_than`) is dropped at a look, and
keeps what it has. So a draft is loaded once, and it is of use to name the likeliest one first. A
model draft that loses whatever its rounds cost (`harness.analysis.looks.cannot_pay`) has its texts
scored and its steps timed, and none of its rounds. With
`budget_s` each draft has an equal part of what is left, and one look at least; drafts are ranked on
the prompts that all have scored.

Drafts are so timed one after the other, minutes apart. Those that may be served are then visited in
turn, so that a machine whose pace drifts favours none: each turn visits every one of them, every
second turn in reverse order. Their round times are those of the turns then, and the target's plain
token next to each is compared turn by turn. That needs all of them in memory at once. On a card,
where other work is rare and recorded work is large, and where they do not fit, each has all of its
visits while it is the only one.

Everything is stored as it is made: a text is a line of trials.jsonl, a draft's scores and step
times are written when it is done, and the manifest notes which drafts could not be used, or were
dropped. A resumed audition continues with the first draft that lacks something.
"""

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from harness.analysis.looks import cannot_pay, slower_than
from harness.analysis.round_costs import can_pay, timed_precisely
from harness.commands.eligible_drafts import draft_size
from harness.commands.other_runs import check_draft_of
from harness.commands.pair import (
    CACHES_SHARE,
    HeadPair,
    ModelPair,
    Pair,
    Scoring,
    Target,
    with_draft,
)
from harness.commands.progress import progress
from harness.commands.requests import completions
from harness.commands.run_lifecycle import resumable
from harness.commands.run_time import RunTime, Stopwatch, say_left
from harness.commands.tasks import in_random_order, prompts_at
from harness.commands.timing import enough_memory, timed_steps, visits_of_draft
from harness.config import AuditionConfig, ModelConf, check_ks
from harness.measurement.round_times import LEAST_VISITS, RoundVisits, timed_ks
from harness.measurement.target_texts import GeneratedText
from harness.models.load import NotEligible
from harness.models.memory import free_bytes, shape_of
from harness.models.probe import check_length
from harness.records import DraftConfidence, Failure, TextTrace, UserError, in_one_line
from harness.stats.verdict_interval import LOOKS
from harness.storage import RunFolder, StoredRun, load
from harness.storage.manifest import AuditionCosts, AuditionNotes, IneligibleDraft, ModelEntry
from harness.summary import Dropped


@dataclass
class DraftResult:
    """The results of one draft, as far as it is measured."""

    traces: list[TextTrace] = field(default_factory=list[TextTrace])
    scoring_s: float = 0.0
    described: ModelEntry | None = None  # of the manifest; None where no model is here
    # Where a threshold is replayed, of a draft that has them
    confidences: list[DraftConfidence] = field(default_factory=list[DraftConfidence])
    dropped: Dropped | None = None  # where it lost, and nothing more is measured
    untimed: bool = False  # whether no rounds were timed, since it loses whatever they cost


def score_drafts(
    folder: RunFolder,
    target: Target,
    drafts: Sequence[ModelConf],
    config: AuditionConfig,
    expected: RunTime | None,
) -> None:
    """Generate the texts, then score and time every draft; one that fails stops no other.

    Args:
        expected: what the run was said to take, which is corrected by what the texts took.

    Raises:
        UserError: no draft is left.
    """
    watch = Stopwatch(folder, config.budget_s)
    begin = time.perf_counter()
    texts = completions(folder, target, config)
    generation_s = time.perf_counter() - begin
    lengths = [len(text.tokens) for text in texts]
    say_left(expected, generation_s, lengths, budget_s=watch.left_s)
    if watch.left_s <= 0.0:
        with resumable(folder):
            raise UserError(
                f"budget_s={config.budget_s:g}: the target's completions took"
                f" {math.ceil(watch.spent_s)} s of it, which leaves nothing for the drafts; give"
                f" budget_s={math.ceil(2.0 * watch.spent_s)} or more"
            )

    elsewhere = config.latency.target_ms is not None or folder.manifest.engine_costs is not None
    takes_turns = not elsewhere and fit_together(target, drafts, config)

    def measure(conf: ModelConf, waiting: Sequence[GeneratedText]) -> DraftResult | None:
        timed = elsewhere or any(
            t.role == "draft" and t.model == conf.name for t in folder.timings()
        )
        visits = visits_of_draft(folder, target, conf, None, config, takes_turns=takes_turns)
        missing = visits.missing
        if conf.name in folder.manifest.audition.untimed:
            missing = 0
        # Another run's scores may be here without times
        if timed and not waiting and not missing:
            return None
        # Half of the budget is for visits in turn
        left = len(drafts) - drafts.index(conf)
        share_s = watch.left_s / (left + len(drafts) if takes_turns else left)
        how = {"timed": timed, "share_s": share_s, "takes_turns": takes_turns}
        return _measure_draft(folder, target, texts, conf, config, **how)

    each_draft(folder, texts, drafts, measure, generation_s, watch=watch, debug=config.debug)
    if takes_turns:
        visit_in_turn(folder, target, drafts, config, watch)
    # The target again: how its texts are batched is known only now
    folder.note(models={**folder.manifest.models, **target.describe().models})


def each_draft(
    folder: RunFolder,
    texts: Sequence[GeneratedText],
    drafts: Sequence[ModelConf],
    measure: Callable[[ModelConf, Sequence[GeneratedText]], DraftResult | None],
    generation_s: float,
    *,
    watch: Stopwatch,
    debug: bool,
) -> None:
    """Measure and store every draft, with notes on those that lost, cannot be used or broke down.

    Args:
        measure: gives what the folder lacks of one draft, whose scores of these texts are missing;
            None where it lacks nothing.
        generation_s: what the texts took, in this process.

    Raises:
        UserError: none could be measured, now or before a resume.
    """
    before = folder.manifest.audition
    dropped, untimed, scoring_s = {**before.dropped}, [*before.untimed], before.costs.scoring_s
    generation_s += before.costs.generation_s or 0.0
    not_eligible: list[IneligibleDraft] = []
    failures: list[Failure] = []

    def note() -> None:
        costs = AuditionCosts(generation_s, scoring_s, watch.spent_s)
        notes = AuditionNotes(tuple(not_eligible), tuple(failures), dropped, costs, tuple(untimed))
        folder.note(audition=notes)

    for conf in drafts:
        if conf.name in before.dropped:
            continue
        scored = {trace.key for trace in folder.traces() if trace.draft == conf.name}
        waiting = [text for text in texts if text.request.key not in scored]
        result: DraftResult | None = None
        try:
            result = measure(conf, waiting)
        except NotEligible as reason:
            not_eligible.append(IneligibleDraft(conf.name, str(reason)))
        except Exception as error:  # a draft's own code and files may raise anything
            if debug:
                traceback.print_exception(error)
            failures.append(Failure(f"draft {conf.name}", _reason(error), conf.name))
        finally:  # one draft in memory at a time
            gc.collect()
            torch.cuda.empty_cache()
        if result is not None:
            scoring_s = (scoring_s or 0.0) + result.scoring_s
            _store(folder, conf.name, result)
            dropped |= {conf.name: result.dropped} if result.dropped else {}
            untimed += [conf.name] if result.untimed else []
            if result.dropped or result.untimed:
                note()
    note()
    if len(not_eligible) + len(failures) == sum(conf.name not in before.dropped for conf in drafts):
        reasons = [f"{entry.draft}: {entry.reason}" for entry in not_eligible]
        reasons += [f"{entry.where}: {entry.error}" for entry in failures]
        raise UserError("drafts: none could be auditioned; " + "; ".join(reasons))


def _store(folder: RunFolder, name: str, result: DraftResult) -> None:
    """Store a draft's results; its traces last, since they say that it is done."""
    if result.described is not None:
        folder.note(models={**folder.manifest.models, name: result.described})
    if result.confidences:
        folder.add_confidences(result.confidences)
    folder.add_traces(result.traces)


def _measure_draft(
    folder: RunFolder,
    target: Target,
    texts: Sequence[GeneratedText],
    conf: ModelConf,
    config: AuditionConfig,
    *,
    timed: bool,
    share_s: float = math.inf,
    takes_turns: bool = False,
) -> DraftResult:
    """One draft's scores, look after look, and its step times, which are stored, unless `timed`.

    Of the visits that time its rounds half of a look's come before its scores, half after. Those of
    a model draft wait for its first scores, and as long as it loses whatever its rounds cost.

    Args:
        timed: whether the folder has its step times; what it has is not made again.
        share_s: seconds after which no further look is begun.
        takes_turns: as of `visits_of_draft`; then all of these visits come early.
    """
    begun = time.monotonic()
    check_ks(config.k, conf)
    pair = with_draft(target, conf, config)
    if isinstance(pair, ModelPair):
        check_length(pair.draft_model, pair.positions, pair.draft.shown)
    try:
        costs, entry = folder.manifest.engine_costs, described_draft(conf, pair.draft_entry)
        check_draft_of(costs, conf.name, conf.kind, entry, config.temperature)
        result = DraftResult(described=entry)
        draft = _Draft(folder, pair, conf, config, result, folder.traces())
        drafting = (pair.timed_drafting, config, pair.most)
        visits = visits_of_draft(folder, pair, conf, *drafting, takes_turns=takes_turns)
        looks = _looks(target, texts, config)
        pace = visits.most * (2 if takes_turns else 1) / len(looks)
        waits = bool(visits.most and not visits.complete and texts)
        waits = waits and config.until == "decided" and isinstance(pair, ModelPair)
        for look, names in enumerate(looks, start=1):
            if look > 1 and (time.monotonic() - begun) * look / (look - 1) > share_s:
                break
            if not waits:
                visits.reach(min(visits.most, math.ceil(pace * (look - 0.5))))
            draft.score([text for text in texts if text.request.text_name in names])
            if look == 1 and not timed:
                draft.time_steps()
            waits = waits and draft.cannot_pay(surely=False)
            if not waits:
                visits.reach(min(visits.most, math.ceil(pace * look)))
            if texts and look < len(looks) and (dropped := draft.loses(look)):
                result.dropped = dropped
                break
        result.untimed = waits and (result.dropped is not None or draft.cannot_pay(surely=True))
        if waits and not result.untimed:
            visits.reach(visits.most)
        result.described = described_draft(conf, pair.draft_entry)  # how texts were batched, too
        return result
    finally:
        pair.target_model.keep_states(())


@dataclass
class _Draft:
    """A draft that is being measured."""

    folder: RunFolder
    pair: Pair
    conf: ModelConf
    config: AuditionConfig
    result: DraftResult  # that the folder gets when the draft is done
    before: list[TextTrace]  # that the folder had

    @property
    def all_traces(self) -> list[TextTrace]:
        """Stored ones and those that were made since."""
        return [*self.before, *self.result.traces]

    @property
    def run(self) -> StoredRun:
        """The run so far, with the draft's entry and confidences."""
        run, entry = load(self.folder.path), self.result.described
        known = [*run.confidences, *self.result.confidences]
        models = {**run.manifest.models, **({self.conf.name: entry} if entry else {})}
        run = replace(run, manifest=run.manifest.updated(models=models))
        vars(run)["confidences"] = known
        return run

    def loses(self, look: int) -> Dropped | None:
        """The place where it is dropped, and what it loses to; None where it is not."""
        slower = slower_than(self.run, self.all_traces, self.conf.name, look)
        prompts = len(self.pair.conversations)
        return Dropped(prompts_at(prompts, look), prompts, slower) if slower else None

    def cannot_pay(self, *, surely: bool) -> bool:
        """True where it loses whatever its rounds cost."""
        return cannot_pay(self.run, self.all_traces, self.conf.name, surely=surely)

    def score(self, texts: Sequence[GeneratedText]) -> None:
        """Score those of some texts that the folder has no scores of."""
        scored = {trace.key for trace in self.before if trace.draft == self.conf.name}
        texts = [text for text in texts if text.request.key not in scored]
        if not texts:
            return
        begin = time.perf_counter()
        with progress(f"{self.conf.name} scores", len(texts)) as tick:
            how = Scoring(max(self.config.k), batch=self.config.batch, tick=tick)
            self.result.traces += self.pair.score(texts, how)
        self.result.confidences += self.pair.confidences(texts, self.config)
        self.result.scoring_s += time.perf_counter() - begin

    def time_steps(self) -> None:
        """Time and store its steps, interleaved with the target's, which each draft times again."""
        name = self.conf.name
        steps = timed_steps(
            self.folder, self.pair, self.config, paired_with=name, doing=f"timing {name}"
        )
        self.folder.write_timings([*self.folder.timings(), *steps])


def _looks(
    target: Target, texts: Sequence[GeneratedText], config: AuditionConfig
) -> list[set[str]]:
    """The prompts that each look adds, all of them where there is one."""
    if config.until == "all":
        return [{text.request.text_name for text in texts}]
    order = in_random_order(target.prompts, config.seed)
    ends = [prompts_at(len(order), look) for look in range(LOOKS + 1)]
    return [
        {f"{each.prompt_set}/{e.prompt.id}" for each in order[begin:end] for e in each.turns}
        for begin, end in pairwise(ends)
    ]


def described_draft(conf: ModelConf, entry: dict[str, Any] | None) -> ModelEntry | None:
    """The manifest's entry of an auditioned draft; None for one without weights."""
    if entry is None:
        return None
    return ModelEntry.of({"id": conf.id, "kind": conf.kind, **entry})


def _reason(error: Exception) -> str:
    """One line; of a bug, with the way to its traceback."""
    text = in_one_line(error)
    if isinstance(error, UserError):
        return text
    return f"{text[:300]} (run again with debug=true for the traceback)"


# ---- visits in turn ------------------------------------------------------------------------------


def fit_together(target: Target, drafts: Sequence[ModelConf], config: AuditionConfig) -> bool:
    """True for several drafts on processors whose memory holds all of them with their caches.

    One of unknown size counts as large as the target.
    """
    network, device = target.target.network, target.target_model.device
    if len(drafts) < 2 or device.type != "cpu":
        return False
    target_bytes = sum(each.numel() * each.element_size() for each in network.parameters())
    sizes = [draft_size(conf, config.model) for conf in drafts if not conf.spec.looks_up]
    weights = sum(float(target_bytes) if size is None else size.weight_bytes for size in sizes)
    shape = shape_of(network.config)
    per_token = shape.kv_bytes_read(1, network.dtype.itemsize) if shape else 0.0
    # Of target and draft, grown to twice what they hold, for every K and plain decoding twice
    at_once = len(timed_ks(config.k)) + 2
    caches = len(drafts) * at_once * 2.0 * target.positions * 2.0 * per_token
    free = free_bytes(device)
    return free is None or weights + caches < CACHES_SHARE * free


def visit_in_turn(
    folder: RunFolder,
    target: Target,
    drafts: Sequence[ModelConf],
    config: AuditionConfig,
    watch: Stopwatch,
) -> None:
    """Visit the drafts that may be served in turn, until their round times are known precisely.

    No turn is begun that the budget is not likely to hold.
    """
    drafts = [conf for conf in drafts if _may_be_served(folder, conf)]
    before = [visits_of_draft(folder, target, conf, None, config, in_turn=True) for conf in drafts]
    if not drafts or _are_enough(folder, before):
        return
    longest_s, missing = 0.0, max(each.missing for each in before)
    with progress("timing the drafts in turn", missing) as tick, enough_memory("drafts in turn"):
        turns = [_Turn(folder, target, conf, config) for conf in drafts]
        visits = [turn.visits for turn in turns]
        while longest_s < watch.left_s and not _are_enough(folder, visits):
            begun, number = time.monotonic(), min(each.complete for each in visits) + 1
            for turn in turns if number % 2 else turns[::-1]:
                turn.reach(number)
            longest_s = max(longest_s, time.monotonic() - begun)
            tick()


def _are_enough(folder: RunFolder, visits: Sequence[RoundVisits]) -> bool:
    """True where every draft has all of its visits, or is timed precisely by those in turn."""
    complete = min(each.complete for each in visits)
    if complete >= max(each.most for each in visits):
        return True
    timings = [timing for timing in folder.rounds.read() if timing.turn is not None]
    drafts = {timing.draft for timing in timings}
    return complete >= LEAST_VISITS and all(timed_precisely(timings, each) for each in drafts)


def _may_be_served(folder: RunFolder, conf: ModelConf) -> bool:
    """False for one that failed, was dropped, or loses whatever it accepts."""
    notes = folder.manifest.audition
    out = {*notes.dropped, *notes.untimed}
    out |= {each.draft for each in (*notes.not_eligible, *notes.failures)}
    return conf.name not in out and (conf.spec.looks_up or can_pay(folder.rounds.read(), conf.name))


class _Turn:
    """One draft, loaded, with its visits in turn."""

    def __init__(
        self, folder: RunFolder, target: Target, conf: ModelConf, config: AuditionConfig
    ) -> None:
        pair = with_draft(target, conf, config)
        self._target = pair.target_model
        self._layers = pair.head.network.layers if isinstance(pair, HeadPair) else ()
        self.visits: RoundVisits = visits_of_draft(
            folder=folder,
            target=pair,
            conf=conf,
            draft=pair.timed_drafting,
            config=config,
            most=pair.most,
            in_turn=True,
            counted=lambda *_: nullcontext(lambda: None),  # as a part of the turn
        )

    def reach(self, visits: int) -> None:
        """Make visits until so many are complete; the target keeps a head's states meanwhile."""
        self._target.keep_states(self._layers)
        try:
            self.visits.reach(visits)
        finally:
            self._target.keep_states(())
