"""What training has brought a head: its checkpoints, and the accuracies that its trainer logged.

Checkpoints of one head have one architecture, so what their rounds are measured to cost differs by
chance alone: all are priced by the last one's times, and compared on the same texts, prompt by
prompt.

Teacher-forced accuracies count every position, whatever the drafts before it were. A round begins
where the last one ended, more often at tokens that are hard to draft, and goes on only where all
before it was accepted. The steps from one to the other are taken one at a time: other texts and
inputs, the drafts' dependence on each other, where rounds start.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

import numpy as np

from harness.analysis.leaderboard import Ranking
from harness.analysis.predicted import evidence_of
from harness.analysis.scored import Array, Scored
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import Audition, PairAnalysis
from harness.analysis.verdict import Candidate
from harness.records import GREEDY, UserError
from harness.serving.drafts import DRAFTS
from harness.stats.crossfit import Workload
from harness.stats.jackknife import CONFIDENCE, enough_prompts, half_width
from harness.storage.training_log import TrainingLog

# Of a speedup: what further training must bring to be worth it
WORTH = 0.03
# SpecForge's RUN-step1000 and epoch_0_step_1000, whose steps go on over epochs, and others'
CHECKPOINT = re.compile(r"(?:epoch_\d+_)?(?:step|checkpoint|ckpt|iter)[-_]?(\d+)$", re.IGNORECASE)
LEAST_CHECKPOINTS = 3
# Accuracy that the first draft token lacks, beyond what other texts may explain
LACKS = 0.1
# The part of the second token's accuracy that is lost besides the first one's
DROPS = 0.15
# Of an acceptance length, a part that is worth naming
DIFFERS = 0.05


@dataclass(frozen=True)
class Checkpoint:
    """A training step of one head, at its best K."""

    temperature: float
    step: int
    draft: str
    k: int
    alpha: float
    speedup: float
    speedup_lo: float | None
    speedup_hi: float | None
    # The last one's speedup / this one's, on the same texts
    left: float
    left_lo: float | None
    left_hi: float | None


@dataclass(frozen=True)
class Training:
    """The checkpoints of one head, by step."""

    head: str  # what their names have in common
    temperature: float
    checkpoints: tuple[Checkpoint, ...]
    # Steps from which on no checkpoint is more than `WORTH` faster; None where there is no such, or
    # where prompts are too few to tell
    enough: int | None


Cause = Literal[
    "layers", "template", "embedding", "norm", "rotary", "inputs", "own_states", "dependence",
    "starts", "none",
]  # fmt: skip


@dataclass(frozen=True)
class AccuracyRow:
    """A draft token's accuracy: logged, and on the texts of the run at temperature 0."""

    offset: int
    logged: float  # by the trainer, on its texts
    everywhere: float  # from every position, fed with the text's tokens as in training
    given: float  # from every position, where the drafts before it were right
    in_rounds: float  # in the rounds that are run, where the drafts before it were accepted


@dataclass(frozen=True)
class AccuracyGap:
    """What a trainer's accuracies promise of a head, and what its rounds accept."""

    draft: str
    log: TrainingLog
    k: int  # draft tokens that are compared: those that were logged and scored
    rows: tuple[AccuracyRow, ...]
    logged_length: float  # 1 + accepted / rounds, were the logged accuracies independent
    everywhere_length: float  # likewise, of those on the run's texts
    # With the drafts of a round as they depend on each other, from every position
    joint_length: float
    replayed_length: float  # in the rounds that are run
    cause: Cause  # the first of the known causes that holds, in the order of `Cause`
    # now, fixed: of a cause in what the head reads, its first token's accuracy on the texts that it
    # was tried on, and without that cause
    now: float | None = None
    fixed: float | None = None
    unchecked: str | None = None  # why what the head reads could not be tried; None where it was


# ---- checkpoints of one head ---------------------------------------------------------------------


def checkpoint_groups(setup: Setup, drafts: Sequence[str]) -> dict[str, dict[int, str]]:
    """By head, its drafts by training step: at least LEAST_CHECKPOINTS, known by their ids.

    Raises:
        UserError: two of them are not of one head.
    """
    groups: dict[str, dict[int, str]] = {}
    for name in drafts:
        entry = setup.described_draft(name)
        place = str(entry.id or name).rstrip("/")
        found = CHECKPOINT.search(place) or CHECKPOINT.search(name)
        if found:
            head = (place if found.string == place else name)[: found.start()].rstrip("/-_ ")
            groups.setdefault(head, {})[int(found[1])] = name
    kept = {
        head: dict(sorted(steps.items()))
        for head, steps in groups.items()
        if len(steps) >= LEAST_CHECKPOINTS
    }
    for steps in kept.values():
        first = setup.described_draft(next(iter(steps.values())))
        for name in steps.values():
            entry = setup.described_draft(name)
            for what in ("kind", "parameters", "layers", "layers_read"):
                one, other = getattr(first, what, None), getattr(entry, what, None)
                if one != other:
                    raise UserError(
                        f"losses: {first.name} and {name} are not checkpoints of one head: {what}"
                        f" {one} and {other}; give the steps of one head, or folders of other names"
                    )
    return kept


def training(
    ranking: Ranking, analysis: PairAnalysis, head: str, steps: Mapping[int, str]
) -> Training | None:
    """The speedup by training step, all priced as the last one is; None where too few ran."""
    ranked = {name.draft for name in ranking.best}
    ran = {step: name for step, name in steps.items() if name in ranked}
    if len(ran) < LEAST_CHECKPOINTS:
        return None
    replays, weights = ranking.replays, analysis.setup.weights
    latency = analysis.latencies[replays.temperature][ran[max(ran)]]
    kept = {c: counts for c, counts in replays.candidates.items() if c.draft in ran.values()}
    of_last = dict.fromkeys(ran.values(), latency)
    evidence = evidence_of(replace(replays, candidates=kept), of_last)
    speedups = evidence.speedups(weights)
    chosen = [
        max((c for c in kept if c.draft == name), key=lambda c: (speedups[c], -c.k))
        for name in ran.values()
    ]
    # One set of times: what visits say of it moves all checkpoints alike
    timed = {candidate: evidence.candidates[candidate] for candidate in chosen}
    workload = replace(evidence, candidates=timed, visit_costs={}).workload(weights)
    logs, intervals = workload.log_speedups(), workload.intervals()
    ratios, variance = workload.log_ratios(len(chosen) - 1)
    bounds: list[tuple[float | None, float | None]] = [(None, None)] * len(chosen)
    if enough_prompts(workload.prompt_sets):
        half = half_width(variance, CONFIDENCE)
        bounds = np.exp([-ratios - half, -ratios + half]).T.tolist()
    checkpoints = tuple(
        Checkpoint(
            replays.temperature,
            step,
            candidate.draft,
            candidate.k,
            replays.weighted(candidate, weights).alpha,
            float(np.exp(logs[n])),
            *(intervals[n] if intervals else (None, None)),
            float(np.exp(-ratios[n])),
            *bounds[n],
        )
        for n, (step, candidate) in enumerate(zip(ran, chosen, strict=True))
    )
    enough = _enough(workload, [*ran])
    return Training(PurePath(head).name, replays.temperature, checkpoints, enough)


def _enough(workload: Workload, steps: Sequence[int]) -> int | None:
    """The first step that no later one is more than `WORTH` faster than; not the last.

    All later ones together are compared at `CONFIDENCE` (Bonferroni). None where that is true of
    none, or where prompts are too few to tell.
    """
    if not enough_prompts(workload.prompt_sets):
        return None
    for n, step in enumerate(steps[:-1]):
        ratios, variance = workload.log_ratios(n)
        later = len(steps) - n - 1
        upper = ratios + half_width(variance, 1.0 - (1.0 - CONFIDENCE) / later)
        if (upper[n + 1 :] < math.log1p(WORTH)).all():
            return step
    return None


# ---- what a trainer logged, and what is accepted -------------------------------------------------


def accuracy_gap(setup: Setup, log: TrainingLog, name: str | None) -> AccuracyGap:
    """A trainer's accuracies next to those of the same head on the run's greedy texts.

    `name` is the head's; None for the best one.

    Raises:
        UserError: the run has no such head at temperature 0.
    """
    analysis = Audition(setup) if setup.command == "audition" else PairAnalysis(setup)
    rankings = [r for r in analysis.own_rankings if r.replays.temperature == GREEDY]
    ranked = rankings[0].best if rankings else ()
    heads = [c for c in ranked if DRAFTS.get(setup.kind_of(c.draft), DRAFTS["model"]).reads_states]
    chosen = next((c for c in heads if name in (None, c.draft)), None)
    if chosen is None:
        known = ", ".join(c.draft for c in heads) or "none"
        raise UserError(
            f"training_log: {name or 'it'} is of no head that this run scored at temperature 0"
            f" (heads: {known}); give an audition of the head with temperature=[0]"
        )
    scored = Scored.of(analysis, rankings[0], chosen)
    k = min(len(log.accuracies), max(scored.ks))
    starts, right, together, reached, judged, rejected = np.zeros((6, k))
    for part, factors, ended in scored.endings(k):
        left = np.subtract.outer(part.lengths, np.arange(part.chances.shape[1]))
        in_text = np.greater.outer(left, np.arange(k)) & (part.proposed > 0)[:, :, None]
        chances = np.where(in_text, part.chances[:, :, :k], 0.0)
        before = np.cumprod(np.concatenate([np.ones_like(chances[:, :, :1]), chances], 2), 2)
        counted = in_text * factors
        starts += counted.sum(axis=(0, 1))
        right += (counted * chances).sum(axis=(0, 1))
        reached += (counted * before[:, :, :-1]).sum(axis=(0, 1))
        together += (counted * before[:, :, 1:]).sum(axis=(0, 1))
        judged += (ended.judged * factors).sum(axis=(0, 1))
        rejected += (ended.rejected * factors).sum(axis=(0, 1))
    everywhere, given = right / starts, together / np.maximum(reached, 1e-300)
    in_rounds = 1.0 - rejected / np.maximum(judged, 1e-300)
    logged = np.array(log.accuracies[:k])
    counts = scored.replays(ks=[k]).weighted(Candidate(chosen.draft, k), scored.weights)
    columns = zip(logged, everywhere, given, in_rounds, strict=True)
    gap = AccuracyGap(
        draft=chosen.draft,
        log=log,
        k=k,
        rows=tuple(AccuracyRow(n, *map(float, row)) for n, row in enumerate(columns, start=1)),
        logged_length=_length(logged),
        everywhere_length=_length(everywhere),
        joint_length=_length(given),
        replayed_length=counts.mean_acceptance_length,
        cause="none",
    )
    return replace(gap, cause=_cause(gap, logged, given if log.given else everywhere))


def _length(accuracies: Array) -> float:
    """1 + accepted / rounds, from the accuracy of each draft token given those before it."""
    return 1.0 + float(np.cumprod(accuracies).sum())


def _cause(gap: AccuracyGap, logged: Array, counted: Array) -> Cause:
    """The first that holds, of accuracies of the run's texts that are counted as the log's are.

    What the head reads differently only a second scoring tells.
    """
    if logged[0] - counted[0] > LACKS:
        return "inputs"
    if gap.k > 1 and logged[1] > 0.0:
        kept = counted[1] / max(float(counted[0]), 1e-9)
        if 1.0 - kept / (logged[1] / logged[0]) > DROPS:
            return "own_states"
    if not gap.log.given and abs(gap.joint_length / gap.everywhere_length - 1.0) > DIFFERS:
        return "dependence"
    # Rounds that ends of texts cut short say nothing of where others start
    in_rounds = _length(np.array([row.in_rounds for row in gap.rows]))
    return "starts" if abs(in_rounds / gap.joint_length - 1.0) > DIFFERS else "none"
