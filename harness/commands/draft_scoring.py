"""Score and time many drafts on one target's texts, one draft in memory at a time.

With `until=decided` a draft is measured in four looks: each scores a quarter of the prompts, in a
random order that is balanced over their sets, and makes a quarter of the visits that time rounds.
A draft that loses to one before it (`harness.analysis.looks.slower_than`) is dropped at a look, and
keeps what it has. So a draft is loaded once, and it is of use to name the likeliest one first. A
model draft that loses whatever its rounds cost (`harness.analysis.looks.cannot_pay`) has its texts
scored and its steps timed, and none of its rounds. With
`budget_s` each draft has an equal part of what is left, and one look at least; drafts are ranked on
the prompts that all have scored. Once all are measured so, those that may still be served are
visited in turn, where they fit in memory together (`harness.commands.draft_turns`).

Everything is stored as it is made: a text is a line of trials.jsonl, a draft's scores and step
times are written when it is done, and the manifest notes which drafts could not be used, or were
dropped. A resumed audition continues with the first draft that lacks something.
"""

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from harness.analysis.looks import cannot_pay, slower_than
from harness.commands.completions import completions
from harness.commands.draft_turns import fit_together, visit_in_turn
from harness.commands.other_runs import check_draft_of
from harness.commands.pair import ModelPair, Pair, Scoring, Target, with_draft
from harness.commands.progress import progress
from harness.commands.run_lifecycle import resumable
from harness.commands.run_time import RunTime, Stopwatch, say_left
from harness.commands.tasks import in_random_order, prompts_at
from harness.commands.timing import timed_steps, visits_of_draft
from harness.config import AuditionConfig, ModelConf, check_ks
from harness.measurement.target_texts import GeneratedText
from harness.models.load import NotEligible
from harness.models.probe import check_length
from harness.records import DraftConfidence, Failure, TextTrace, UserError, in_one_line
from harness.stats.two_phase import LOOKS
from harness.storage import RunFolder, StoredRun, load
from harness.storage.manifest import AuditionCosts, AuditionNotes, IneligibleDraft, ModelEntry
from harness.summary import Dropped


@dataclass(frozen=True)
class DraftResult:
    """The results of one draft.

    Attributes:
        described: the manifest's entry; None for a drafter without a model here.
        confidences: where a threshold is replayed, of a draft that has them.
        dropped: where it lost, and nothing more is measured.
        untimed: whether its rounds were not timed, since it loses whatever they cost.
    """

    traces: list[TextTrace]
    scoring_s: float
    described: ModelEntry | None = None
    confidences: Sequence[DraftConfidence] = ()
    dropped: Dropped | None = None
    untimed: bool = False


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
        drafts: in the order in which they are measured.
        measure: gives what the folder lacks of one draft, whose scores of these texts are missing;
            None where it lacks nothing.
        generation_s: what the texts took, in this process.
        debug: whether the traceback of a draft's error is shown.

    Raises:
        UserError: none could be measured, now or before a resume.
    """
    before = folder.manifest.audition
    costs, dropped, untimed = before.costs, {**before.dropped}, [*before.untimed]
    generation_s += costs.generation_s or 0.0
    scoring_s = costs.scoring_s
    not_eligible: list[IneligibleDraft] = []
    failures: list[Failure] = []

    def note() -> None:
        costs = AuditionCosts(generation_s, scoring_s, watch.spent_s)
        notes = AuditionNotes(tuple(not_eligible), tuple(failures), dropped, costs, tuple(untimed))
        folder.note(audition=notes)

    finished = 0
    for conf in drafts:
        if conf.name in dropped:
            continue
        scored = {trace.key for trace in folder.traces() if trace.draft == conf.name}
        waiting = [text for text in texts if text.request.key not in scored]
        result = _tried(measure, conf, waiting, debug=debug)
        if isinstance(result, IneligibleDraft):
            not_eligible.append(result)
            continue
        if isinstance(result, Failure):
            failures.append(result)
            continue
        if result is not None:
            scoring_s = (scoring_s or 0.0) + result.scoring_s
            _store(folder, conf.name, result)
            if result.dropped is not None:
                dropped[conf.name] = result.dropped
            if result.untimed:
                untimed.append(conf.name)
            if result.dropped is not None or result.untimed:
                note()
        finished += 1
    note()
    if not finished:
        raise UserError(_why_none(not_eligible, failures))


def _why_none(not_eligible: Sequence[IneligibleDraft], failures: Sequence[Failure]) -> str:
    """The line that gives the reason of each draft where none could be measured."""
    reasons = [f"{entry.draft}: {entry.reason}" for entry in not_eligible]
    reasons += [f"{entry.where}: {entry.error}" for entry in failures]
    return "drafts: none could be auditioned; " + "; ".join(reasons)


def _tried(
    measure: Callable[[ModelConf, Sequence[GeneratedText]], DraftResult | None],
    conf: ModelConf,
    waiting: Sequence[GeneratedText],
    *,
    debug: bool,
) -> DraftResult | IneligibleDraft | Failure | None:
    """The result of a draft, or the reason why it has none; its memory is free afterwards."""
    try:
        return measure(conf, waiting)
    except NotEligible as reason:
        return IneligibleDraft(conf.name, str(reason))
    except Exception as error:  # a draft's own code and files may raise anything
        if debug:
            traceback.print_exception(error)
        return Failure(f"draft {conf.name}", _reason(error), conf.name)
    finally:  # one draft in memory at a time
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _store(folder: RunFolder, name: str, result: DraftResult) -> None:
    """Store what was measured of a draft; its traces last, since they say that it is done."""
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
        draft = _Draft(folder, pair, conf, config, entry, folder.traces())
        drafting = (pair.timed_drafting, config, pair.most)
        visits = visits_of_draft(folder, pair, conf, *drafting, takes_turns=takes_turns)
        dropped: Dropped | None = None
        looks = _looks(target, texts, config)
        pace = visits.most * (2 if takes_turns else 1) / len(looks)
        waits = bool(visits.most and not visits.complete and texts)
        waits = waits and config.until == "decided" and isinstance(pair, ModelPair)
        for look, names in enumerate(looks, start=1):
            if look > 1 and (time.monotonic() - begun) * look / (look - 1) > share_s:
                break
            if not waits:
                visits.reach(min(visits.most, math.ceil(pace * (look - 0.5))))
            draft.score([text for text in texts if _name(text) in names])
            if look == 1 and not timed:
                draft.time_steps()
            waits = waits and draft.cannot_pay(surely=False)
            if not waits:
                visits.reach(min(visits.most, math.ceil(pace * look)))
            if not texts or look == len(looks):
                continue
            if dropped := draft.loses(look):
                break
        untimed = waits and (dropped is not None or draft.cannot_pay(surely=True))
        if waits and not untimed:
            visits.reach(visits.most)
        entry = described_draft(conf, pair.draft_entry)  # how its texts were batched, too
        scored = (draft.traces, draft.scoring_s, entry, draft.confidences)
        return DraftResult(*scored, dropped, untimed)
    finally:
        pair.target_model.keep_states(())


@dataclass
class _Draft:
    """A draft that is being measured.

    Attributes:
        entry: of the manifest, which gets it when the draft is done.
        before: traces that the folder had; `traces`, `confidences` are those that were made since.
    """

    folder: RunFolder
    pair: Pair
    conf: ModelConf
    config: AuditionConfig
    entry: ModelEntry | None
    before: list[TextTrace]
    traces: list[TextTrace] = field(default_factory=list[TextTrace])
    confidences: list[DraftConfidence] = field(default_factory=list[DraftConfidence])
    scoring_s: float = 0.0

    @property
    def all_traces(self) -> list[TextTrace]:
        """Stored ones and those that were made since."""
        return [*self.before, *self.traces]

    @property
    def run(self) -> StoredRun:
        """The run so far, with the draft's entry and confidences."""
        run = load(self.folder.path)
        known = [*run.confidences, *self.confidences]
        own = {} if self.entry is None else {self.conf.name: self.entry}
        models = {**run.manifest.models, **own}
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
            self.traces += self.pair.score(texts, how)
        self.confidences += self.pair.confidences(texts, self.config)
        self.scoring_s += time.perf_counter() - begin

    def time_steps(self) -> None:
        """Time and store its steps, interleaved with the target's, which each draft times again."""
        name = self.conf.name
        steps = timed_steps(
            *(self.folder, self.pair, self.config),
            paired_with=name,
            doing=f"timing {name}",
        )
        self.folder.write_timings([*self.folder.timings(), *steps])


def _name(text: GeneratedText) -> tuple[str, str]:
    return text.request.prompt_set, text.request.prompt


def _looks(
    target: Target, texts: Sequence[GeneratedText], config: AuditionConfig
) -> list[set[tuple[str, str]]]:
    """The prompts that each look adds, all of them where there is one."""
    if config.until == "all":
        return [{_name(text) for text in texts}]
    order = in_random_order(target.prompts, config.seed)
    ends = [prompts_at(len(order), look) for look in range(LOOKS + 1)]
    return [
        {(each.prompt_set, entry.prompt.id) for each in order[begin:end] for entry in each.turns}
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
