"""Many drafts, one target: every (draft, K) on the same completions of the target, by replay.

The target's completions are generated once, each draft scores them once (`TextTrace`), and replay
gives the expected rounds of every K without running the loop (`harness.theory.replay`). So drafts
are compared prompt by prompt, on the same text. What these rounds cost is `predicted`'s.

The acceptance rule belongs to the engine, so each rule has its own `Replays`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from harness.analysis.cells import PromptId, completed, latest, new_tokens, per_prompt, prompts_of
from harness.analysis.verdict import Candidate
from harness.engine_facts.draft_kinds import DRAFTS
from harness.engine_facts.spec import Counting
from harness.records import (
    Cell,
    DraftConfidence,
    Rule,
    TextKey,
    TextTrace,
    Trial,
    UserError,
    grouped,
)
from harness.stats.jackknife import Array, Weights, token_weights, workload_ratio
from harness.summary import ReplayCheck
from harness.theory.acceptance import check_k
from harness.theory.acceptance_rules import ACCEPTANCE_RULES, accept_probabilities
from harness.theory.replay import (
    Counts,
    PaddedTexts,
    Replayed,
    by_start,
    drafted_by_accepted,
    padded_texts,
    replay,
    stacked,
    until_unlikely,
)

# Entries of one (texts, positions, offsets) array; some ten such arrays are alive in a replay.
CHUNK_ENTRIES = 4_000_000
# Of a text, [start] tokens that an engine drafts at most
Limits = Callable[[TextTrace], NDArray[np.intp]]


@dataclass(frozen=True, eq=False)
class Replays:
    """Replayed candidates on n prompts, repetitions (and turns) of a prompt added up."""

    rule: Rule
    temperature: float
    names: tuple[PromptId, ...]  # [n] each prompt with its set
    # prompt_tokens: of each prompt, the lengths of its texts' prompts (repetitions x turns), n.
    prompt_tokens: tuple[tuple[int, ...], ...]
    candidates: Mapping[Candidate, Replayed]  # by (draft, K), counts of each prompt
    # The drafts that cost one look-up per round, rather than a step per token.
    lookups: frozenset[str]

    @property
    def prompt_sets(self) -> tuple[str, ...]:
        """[n] the set of each prompt."""
        return tuple(prompt_set for prompt_set, _ in self.names)

    @property
    def new_tokens(self) -> Array:
        """[n] tokens of the texts, the same for every candidate."""
        return next(iter(self.candidates.values())).new_tokens

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts, in the order they were given."""
        return tuple(dict.fromkeys(name.draft for name in self.candidates))

    @property
    def ks(self) -> tuple[int, ...]:
        """The K of any draft, ascending."""
        return tuple(sorted({name.k for name in self.candidates}))

    def weighted(self, name: Candidate, weights: Weights) -> Replayed:
        """A candidate's counts per token of the workload, in which sets count by their weights."""
        factors = token_weights(self.prompt_sets, self.new_tokens, weights)
        return self.candidates[name].scaled(factors)

    def only(self, prompt_sets: Sequence[str]) -> "Replays":
        """The prompts of some prompt sets alone."""
        return self.rows([name in prompt_sets for name in self.prompt_sets])

    def rows(self, keep: Sequence[bool]) -> "Replays":
        """Some of the prompts, in order."""
        rows = np.flatnonzero(np.asarray(keep, dtype=bool))
        return replace(
            self,
            names=tuple(self.names[row] for row in rows),
            prompt_tokens=tuple(self.prompt_tokens[row] for row in rows),
            candidates={name: counts.rows(rows) for name, counts in self.candidates.items()},
        )


def replay_drafts(
    by_draft: Mapping[str, Sequence[TextTrace]],
    rule: Rule,
    ks: Sequence[int],
    temperature: float,
    thresholds: Sequence[float] = (0.0,),
    confidences: Mapping[str, Mapping[TextKey, DraftConfidence]] | None = None,
    limits: Limits | None = None,
) -> Replays:
    """Every draft, K and threshold on the prompts that all drafts scored, repetitions added up.

    At no threshold a draft without confidences (by draft and text); `limits` as `padded_traces`.
    """
    by_text = {draft: _by_text(draft, traces, temperature) for draft, traces in by_draft.items()}
    if not by_text:
        raise UserError("traces: no draft to score")
    first = next(iter(by_text.values()))
    keys = sorted(key for key in first if all(key in texts for texts in by_text.values()))
    if not keys:
        raise UserError(f"traces: no prompt that every draft scored at temperature {temperature:g}")
    for draft, texts in by_text.items():
        _check_same(draft, [texts[key] for key in keys], [first[key] for key in keys])
    counts: dict[Candidate, Replayed] = {}
    for draft, texts in by_text.items():
        traces, known = [texts[key] for key in keys], (confidences or {}).get(draft, {})
        above = [p_min for p_min in thresholds if p_min and all(key in known for key in keys)]
        if 0.0 in thresholds or not above:
            fixed = replayed(traces, rule, ks, limits)
            counts |= {Candidate(draft, k): each for k, each in fixed.items()}
        scored = ScoredTexts(traces, known, rule)
        for k, p_min in product(ks, above):
            counts[Candidate(draft, k, p_min)] = replayed_adaptively(scored, k, p_min)
    lookups = frozenset(draft for draft, t in by_text.items() if t[keys[0]].chosen)
    return by_prompt([first[key] for key in keys], rule, counts, lookups)


def _by_text(
    draft: str, traces: Sequence[TextTrace], temperature: float
) -> dict[TextKey, TextTrace]:
    """The traces of one draft by text; a look-up has no temperature of its own."""
    traces = [
        trace
        for trace in traces
        if trace.temperature == temperature
        and (trace.chosen or trace.draft_temperature == temperature)
    ]
    if not traces:
        raise UserError(f"traces: draft {draft!r} has no text at temperature {temperature:g}")
    texts = {trace.key: trace for trace in traces}
    if len(texts) < len(traces):
        raise UserError(f"traces: draft {draft!r} has a text twice; keep one")
    return texts


def _check_same(draft: str, traces: Sequence[TextTrace], others: Sequence[TextTrace]) -> None:
    """All drafts must have scored the same texts, drawn from one distribution."""
    for trace, other in zip(traces, others, strict=True):
        where = f"traces: draft {draft!r}, prompt {trace.prompt_set}/{trace.prompt}"
        if not np.array_equal(trace.tokens, other.tokens):
            raise UserError(f"{where}: not the text that {other.draft!r} scored; use one run")
        if (trace.top_k, trace.top_p) != (others[0].top_k, others[0].top_p):
            raise UserError(f"{where}: another top_k or top_p; audition each apart")


def by_prompt(
    texts: Sequence[TextTrace],
    rule: Rule,
    counts: Mapping[Candidate, Replayed],
    lookups: frozenset[str],
) -> Replays:
    """Add the counts of each prompt's texts; a conversation's turns are texts of one prompt."""
    names, groups = prompts_of(texts)
    by_name = grouped(texts, lambda text: (text.prompt_set, text.conversation))
    return Replays(
        rule=rule,
        temperature=texts[0].temperature,
        names=tuple(names),
        prompt_tokens=tuple(tuple(each.prompt_tokens for each in by_name[name]) for name in names),
        candidates={name: each.summed(groups, len(names)) for name, each in counts.items()},
        lookups=lookups,
    )


def replayed(
    traces: Sequence[TextTrace], rule: Rule, ks: Sequence[int], limits: Limits | None = None
) -> Mapping[int, Replayed]:
    """Replay one draft's traces at every K, cut by a text's end; `limits` as `padded_traces`."""
    if not traces or not ks:
        raise UserError("traces: nothing to replay; give at least one text and one k")
    depth = max(check_k(k) for k in ks)
    for trace in traces:
        _check(trace, traces[0], rule, depth)
    parts = [
        replay(texts.chances, texts.lengths, ks, proposed=texts.proposed)
        for part in in_chunks(traces, depth)
        for texts in [padded_traces(part, rule, depth, limits)]
    ]
    return {k: stacked([part[k] for part in parts]) for k in parts[0]}


def in_chunks(traces: Sequence[TextTrace], depth: int) -> Iterator[Sequence[TextTrace]]:
    """One draft's texts in pieces whose `padded_traces` fit the memory."""
    size = max(1, CHUNK_ENTRIES // (max(len(trace.tokens) for trace in traces) * (depth + 1)))
    return (traces[first : first + size] for first in range(0, len(traces), size))


def padded_traces(
    traces: Sequence[TextTrace], rule: Rule, depth: int, limits: Limits | None = None
) -> PaddedTexts:
    """One draft's texts side by side, up to K = `depth`; `limits`: [start] tokens at most."""
    if limits is not None:
        lengths = [len(trace.tokens) for trace in traces]
        most = [limits(trace) for trace in traces]
        return padded_texts(*as_served(traces, lengths, most, rule, depth))
    chances = [accept_chances(trace, rule, depth) for trace in traces]
    return padded_texts(chances, [proposed_at(trace, depth) for trace in traces], depth)


def _check(trace: TextTrace, first: TextTrace, rule: Rule, depth: int) -> None:
    """Refuse a trace that replay would misread."""
    where = f"draft {trace.draft!r}, prompt {trace.prompt_set}/{trace.prompt}"
    if len(trace.tokens) == 0:
        raise UserError(f"traces: {where} has no text; leave it out")
    if trace.chosen != first.chosen:
        raise UserError(f"traces: {where}: some texts were drafted by look-up and some were not")
    if trace.depth is not None and trace.depth < depth:
        raise UserError(f"k={depth}: {where} is scored for K up to {trace.depth}; lower k")
    starts, offsets = np.arange(len(trace.tokens))[:, None], np.arange(depth)
    bad = np.isnan(accept_chances(trace, rule, depth)) & (starts + offsets < len(trace.tokens))
    if trace.proposed is not None:  # which a round from a start judges no further than
        bad &= offsets < trace.proposed[:, None]
    if bad.any():
        position = np.sum(np.nonzero(bad), axis=0).min()
        raise UserError(
            f"traces: {where} has no log-probability at position {position}; score it"
            " again or leave the draft out"
        )


def accept_chances(trace: TextTrace, rule: Rule, depth: int) -> Array:
    """[n, depth] chance to accept at an offset of a round, NaN if unknown; beyond the text none."""
    if trace.chosen:
        return trace.draft_is_argmax[:, :depth].astype(np.float64)
    target, draft, is_argmax = trace.target_logprob, trace.draft_logprob, trace.draft_is_argmax
    if trace.depth is not None:
        draft, is_argmax = draft[:, :depth], is_argmax[:, :depth]
    elif ACCEPTANCE_RULES[rule].judges_together:  # of which a chance depends on the start as well
        draft = by_start(draft[None], depth)[0]
    if draft.ndim == 2:
        target = by_start(target[None], depth)[0]
    known = ~np.isnan(draft)
    if not ACCEPTANCE_RULES[rule].draft_chooses:  # else the target's probabilities decide nothing
        known &= np.isfinite(target)
    chances = accept_probabilities(rule, np.where(known, target, 0.0), draft, is_argmax)
    chances = np.where(known, chances, np.nan)
    return chances if chances.ndim == 2 else by_start(chances[None], depth)[0]


def decoded(trace: TextTrace, counting: Counting) -> TextTrace | None:
    """The part of a text that an engine's rounds emit; None where all is the prefill's."""
    first = counting.first_position
    if not first:
        return trace
    if len(trace.tokens) <= first:
        return None
    return _sliced(trace, slice(first, None))


def beginning(trace: TextTrace, size: int) -> TextTrace:
    """The first tokens of a text, with their scores."""
    return _sliced(trace, slice(size))


def _sliced(trace: TextTrace, part: slice) -> TextTrace:
    arrays = {
        each.name: value[part]
        for each in fields(trace)
        if isinstance(value := getattr(trace, each.name), np.ndarray)
    }
    return replace(trace, **arrays)


def as_served(
    traces: Sequence[TextTrace],
    lengths: Sequence[int],
    limits: Sequence[NDArray[np.intp]],
    rule: Rule,
    k: int,
) -> tuple[list[Array], list[NDArray[np.intp]], int]:
    """The beginnings of texts as an engine drafts them, as `replay_texts` takes them.

    Of each trace of what rounds emitted `lengths` tokens, of which `limits` [start] are drafted at
    most (`Counting.proposed`).
    """
    chances: list[Array] = []
    proposed: list[NDArray[np.intp]] = []
    for trace, size, most in zip(traces, lengths, limits, strict=True):
        drafted = proposed_at(trace, k)
        chances.append(accept_chances(trace, rule, k)[:size])
        proposed.append(most if drafted is None else np.minimum(most[:size], drafted[:size]))
    return chances, proposed, k


def proposed_at(trace: TextTrace, k: int) -> NDArray[np.int64] | None:
    """[n] tokens proposed from each start at K; None: always K. Some look-ups wait for text."""
    waits = DRAFTS[trace.draft].least_text if trace.chosen and trace.draft in DRAFTS else 0
    if trace.proposed is None or not waits:
        return trace.proposed
    text = trace.prompt_tokens + np.arange(len(trace.proposed))
    return np.where(text > k + waits, trace.proposed, 0)


def replay_check(
    cell: Cell, trials: Sequence[Trial], replays: Replays, name: Candidate
) -> ReplayCheck | None:
    """Are the loop's tokens per round those that replay expects, and what it drafted?

    Both are ratios of sums over prompts, so their difference has the standard error of a ratio
    estimator (linearised; Cochran, "Sampling Techniques", 1977, section 6.4), taken prompt by
    prompt, which cancels what the prompts have in common, whether or not the texts are the same.
    Prompts may have been generated a different number of times; each counts by the mean.

    None where no prompt is both measured and replayed.
    """
    values = [
        *(new_tokens, lambda trial: trial.rounds or 0, lambda trial: trial.drafted or 0),
        lambda _: 1.0,
    ]
    sums = per_prompt(completed(latest(trials)), values)
    counts = replays.candidates[name]
    rows = [(row, sums[each]) for row, each in enumerate(replays.names) if each in sums]
    if not rows:
        return None
    kept = [row for row, _ in rows]
    *measured_counts, generated = np.array([each for _, each in rows]).T
    tokens, rounds, drafted = np.array(measured_counts) / generated
    texts = np.array([len(replays.prompt_tokens[row]) for row in kept])

    def gap(measured: Array, expected: Array) -> float | None:
        replayed = workload_ratio(expected[kept] / texts, counts.rounds[kept] / texts)
        return (workload_ratio(measured, rounds) - replayed).in_standard_errors

    check = ReplayCheck(cell.prompt_set, cell.temperature, cell.k, gap(tokens, counts.new_tokens))
    alike = ((k, each) for (_, k, p), each in replays.candidates.items() if p == name.p_min)
    if not any(each.proposals[:, :k].any() for k, each in alike):
        return check  # every round drafts K
    return replace(check, drafted_gap_in_standard_errors=gap(drafted, counts.drafted))


# ---- drafts that end at a threshold --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ScoredTexts:
    """One draft's texts at one temperature, with its confidences, under one rule."""

    traces: Sequence[TextTrace]
    confidences: Mapping[TextKey, DraftConfidence]
    rule: Rule
    drops_unlikely: bool = False  # as of the engine that drafts (`EngineSpec`)
    limits: Limits | None = None  # as of `padded_traces`

    def drafting(self, most: Counts, k: int, threshold: float) -> tuple[Counts, Counts]:
        """Tokens drafted from each start: where all are the text's, and by how many stand.

        Shapes (texts, starts) and (texts, starts, K + 1), as `replay` takes them; `most` are
        drafted at most, (texts, starts).
        """
        along = np.full((*most.shape, k), np.nan)
        away = np.full((most.shape[0], most.shape[1] + 1, k), np.nan)
        for row, trace in enumerate(self.traces):
            count = len(trace.tokens)
            values = self.confidences[trace.key].values[: count + (trace.depth is None), :k]
            away[row, : len(values)] = values
            along[row, :count] = along_text(trace, values, k, self.rule)
        dropped = self.drops_unlikely
        proposed = np.minimum(until_unlikely(along, threshold, dropped=dropped), most)
        off_text = until_unlikely(away, threshold, dropped=dropped)
        if self.traces[0].depth is None:
            drafted = drafted_by_accepted(proposed, off_text, k)
            return proposed, np.minimum(drafted, most[:, :, None])
        drawn = np.minimum(off_text[:, :-1], most)
        return proposed, np.repeat(drawn[:, :, None], k + 1, axis=2)


def along_text(trace: TextTrace, values: Array, k: int, rule: Rule) -> Array:
    """[n, K] the draft's probability of each token of the text, by its `DraftConfidence` values."""
    drawn = trace.temperature > 0.0 and not ACCEPTANCE_RULES[rule].draft_chooses
    if trace.depth is not None:
        return np.exp(trace.draft_logprob[:, :k]) if drawn else values
    along = np.exp(trace.draft_logprob) if drawn else values[:-1, 0]
    padded = np.pad(along, (0, k - 1), constant_values=np.nan)
    return np.lib.stride_tricks.sliding_window_view(padded, k)


def replayed_adaptively(texts: ScoredTexts, k: int, threshold: float) -> Replayed:
    """Expected counts of each text where a token below the threshold ends a draft."""
    parts: list[Replayed] = []
    for part in in_chunks(texts.traces, k):
        padded = padded_traces(part, texts.rule, k, texts.limits)
        proposed, drafted = replace(texts, traces=part).drafting(padded.proposed, k, threshold)
        counts = replay(padded.chances, padded.lengths, [k], proposed=proposed, drafted=drafted)
        parts.append(counts[k])
    return stacked(parts)
