"""Score and time many drafts on one target's texts, one draft in memory at a time.

Everything is stored as it is made: a text is a line of trials.jsonl, a draft's scores and step
times are written when it is done, and the manifest notes which drafts could not be used. A resumed
audition continues with the first draft that lacks something.
"""

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.commands.completions import completions
from harness.commands.drafted import Drafted, EncodedPrompt, LookupPair, Pair, Scoring, Target
from harness.commands.other_runs import check_draft_of
from harness.commands.pair import check_clock, load_draft, opening, reserve, with_head
from harness.commands.progress import progress
from harness.commands.time_rounds import visits_of_draft
from harness.commands.time_steps import timed_steps
from harness.config import AuditionConfig, ModelConf, check_ks, named_in_drafts
from harness.measurement import step_times
from harness.measurement.target_texts import GeneratedText
from harness.models.cached import CachedModel
from harness.models.load import LoadedModel, Vocabulary
from harness.models.probe import cached_model, check_length
from harness.models.tokenizer import tokenizer_difference
from harness.records import (
    DraftConfidence,
    Failure,
    StepTiming,
    TextTrace,
    UserError,
    in_one_line,
)
from harness.storage import RunFolder
from harness.storage.manifest import AuditionCosts, AuditionNotes, IneligibleDraft, ModelEntry


class NotEligible(Exception):
    """A draft that cannot be used with this target; the text says why."""


@dataclass(frozen=True)
class DraftResult:
    """What one draft gave.

    Attributes:
        timings: empty where it had been timed before.
        scoring_s: what scoring took.
        described: the manifest's entry; None for a drafter without a model here.
        confidences: where adaptive drafting is replayed, of a draft that has them.
    """

    traces: list[TextTrace]
    timings: list[StepTiming]
    scoring_s: float
    described: ModelEntry | None = None
    confidences: Sequence[DraftConfidence] = ()


def score_drafts(
    folder: RunFolder, target: Target, drafts: Sequence[ModelConf], config: AuditionConfig
) -> None:
    """Generate the texts, then score and time every draft; one that fails stops no other.

    Raises:
        UserError: no draft is left.
    """
    begin = time.perf_counter()
    texts = completions(folder, target, config)
    generation_s = time.perf_counter() - begin

    def measure(conf: ModelConf, waiting: Sequence[GeneratedText]) -> DraftResult | None:
        elsewhere = config.latency.target_ms is not None or folder.manifest.engine_costs is not None
        timed = elsewhere or any(
            t.role == "draft" and t.model == conf.name for t in folder.timings()
        )
        missing = visits_of_draft(folder, target, conf, None, config).missing
        # Another run's scores may be here without times
        if timed and not waiting and not missing:
            return None
        return _measured(folder, target, waiting, conf, config, timed=timed)

    each_draft(folder, texts, drafts, measure, generation_s, debug=config.debug)
    # The target again: how its texts are batched is known only now
    folder.note(models={**folder.manifest.models, **target.describe().models})


def each_draft(
    folder: RunFolder,
    texts: Sequence[GeneratedText],
    drafts: Sequence[ModelConf],
    measure: Callable[[ModelConf, Sequence[GeneratedText]], DraftResult | None],
    generation_s: float,
    *,
    debug: bool,
) -> None:
    """Measure and store every draft, with notes on those that cannot be used or broke down.

    Args:
        folder: of the run.
        texts: that every draft scores.
        drafts: in the order in which they are measured.
        measure: gives what the folder lacks of one draft, whose scores of these texts are missing;
            None where it lacks nothing.
        generation_s: what the texts took, in this process.
        debug: whether the traceback of a draft's error is shown.

    Raises:
        UserError: none could be measured, now or before a resume.
    """
    costs = folder.manifest.audition.costs
    generation_s += costs.generation_s or 0.0
    scoring_s = costs.scoring_s
    not_eligible: list[IneligibleDraft] = []
    failures: list[Failure] = []
    finished = 0
    for conf in drafts:
        scored = {trace.key for trace in folder.traces() if trace.draft == conf.name}
        waiting = [text for text in texts if text.request.key not in scored]
        try:
            result = measure(conf, waiting)
        except NotEligible as reason:
            not_eligible.append(IneligibleDraft(conf.name, str(reason)))
            continue
        except Exception as error:  # a draft's own code and files may raise anything
            if debug:
                traceback.print_exception(error)
            failures.append(Failure(f"draft {conf.name}", _reason(error, conf), conf.name))
            continue
        finally:  # one draft in memory at a time
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if result is not None:
            scoring_s = (scoring_s or 0.0) + result.scoring_s
            _store(folder, conf.name, result)
        finished += 1
    costs = AuditionCosts(generation_s, scoring_s)
    folder.note(audition=AuditionNotes(tuple(not_eligible), tuple(failures), costs))
    if not finished:
        reasons = [f"{entry.draft}: {entry.reason}" for entry in not_eligible]
        reasons += [f"{entry.where}: {entry.error}" for entry in failures]
        raise UserError("drafts: none could be auditioned; " + "; ".join(reasons))


def _store(folder: RunFolder, name: str, result: DraftResult) -> None:
    """Store what was measured of a draft; its traces last, since they say that it is done."""
    if result.described is not None:
        folder.note(models={**folder.manifest.models, name: result.described})
    timings = [*folder.timings(), *result.timings]
    folder.write_timings(timings)
    if result.confidences:
        folder.add_confidences(result.confidences)
    folder.add_traces(result.traces)


def checked_draft(
    conf: ModelConf,
    target: Vocabulary,
    device: torch.device,
    prompts: Sequence[EncodedPrompt],
    config: AuditionConfig,
) -> tuple[LoadedModel, CachedModel]:
    """A draft model, loaded and with a cache for the longest text.

    Args:
        conf: the draft.
        target: whose texts it scores.
        device: where it goes.
        prompts: that the texts complete.
        config: of the audition.

    Raises:
        NotEligible: another tokenizer than the target's.
        UserError: it cannot be loaded or rewound, or runs out of memory.
    """
    check_clock(config, [conf], device)
    draft = load_draft(conf, "draft", device, target)
    difference = tokenizer_difference(target.tokenizer, draft.tokenizer)
    if difference:
        raise NotEligible(f"another tokenizer than the target's: {difference}")
    name, width = f"draft={draft.name}", draft.vocab_size
    if isinstance(target, LoadedModel):  # tokens that the target lacks are padding
        width = min(width, target.vocab_size)
    with opening(config.backend, device.type, f"draft {draft.name}"):
        model = cached_model(draft.network, width, name, config.backend)
    check_length(model, reserve(prompts, config, [(draft, model)]), name)
    return draft, model


def _with_draft(
    target: Target, conf: ModelConf, folder: RunFolder, config: AuditionConfig
) -> Drafted:
    """The target with one draft, loaded and checked.

    Raises:
        NotEligible: another tokenizer.
        UserError: a draft that cannot be loaded, rewound or read, is for another target, or drafts
            nothing at a K.
    """
    check_ks(config.k, conf)
    if conf.spec.looks_up:
        answers = [trial.tokens or () for trial in folder.trials.read()]
        return LookupPair(**vars(target), draft_name=conf.name, kind=conf.kind, answers=answers)
    if conf.spec.reads_states:
        return with_head(target, conf)
    device = target.target_model.device
    draft, model = checked_draft(conf, target.target, device, target.prompts, config)
    return Pair(**vars(target), draft_name=draft.name, draft=draft, draft_model=model)


def _measured(
    folder: RunFolder,
    target: Target,
    texts: Sequence[GeneratedText],
    conf: ModelConf,
    config: AuditionConfig,
    *,
    timed: bool,
) -> DraftResult:
    """One draft's scores, and its step times unless `timed`.

    Half of the visits that time its rounds, stored in the folder, come before that, half after.
    """
    pair = _with_draft(target, conf, folder, config)
    try:
        costs, entry = folder.manifest.engine_costs, described_draft(conf, pair.draft_entry)
        check_draft_of(costs, conf.name, conf.kind, entry, config.temperature)
        visits = visits_of_draft(folder, pair, conf, pair.timed_drafting, config, pair.most)
        visits.up_to(0.5)
        begin = time.perf_counter()
        with progress(f"{conf.name} scores", len(texts)) as tick:
            how = Scoring(max(config.k), batch=config.batch, tick=tick)
            traces = pair.score(texts, how)
        scoring_s = time.perf_counter() - begin
        timings: list[StepTiming] = []
        if not timed:
            # Interleaved; the target's are timed with every draft again
            timings = timed_steps(
                folder,
                pair,
                config,
                paired_with=conf.name,
                repetitions=math.ceil(step_times.REPETITIONS / 2),
                doing=f"timing {conf.name}",
            )
        visits.up_to(1.0)
        sure = pair.confidences(texts, config)
        described = described_draft(conf, pair.draft_entry)  # how its texts were batched, too
        return DraftResult(traces, timings, scoring_s, described, sure)
    finally:
        pair.target_model.keep_states(())


def described_draft(conf: ModelConf, entry: dict[str, Any] | None) -> ModelEntry | None:
    """The manifest's entry of an auditioned draft; None for one without weights."""
    if entry is None:
        return None
    return ModelEntry.of({"id": conf.id, "kind": conf.kind, **entry})


def _reason(error: Exception, draft: ModelConf) -> str:
    """One line that names the draft as `drafts` does; of a bug, with the way to its traceback."""
    text = named_in_drafts(in_one_line(error), draft)
    if isinstance(error, UserError):
        return text
    return f"{text[:300]} (run again with debug=true for the traceback)"
