"""Many drafts, one target: every (draft, K) on the same texts of the target, by replay.

The target's texts are generated once, each draft scores them once (`TextTrace`), and replay gives
the expected rounds of every K without running the loop (`harness.theory.replay`). With the step
times that is the predicted time of every candidate on every prompt, so that drafts are compared
prompt by prompt, on the same text, and a verdict can be cross-fitted as for measured runs.

The acceptance rule belongs to the engine, so each rule has its own `Replays`, its own ranking and
its own verdict: ENGINES says which engine uses which.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.analysis.evidence import Evidence
from harness.analysis.latency import Latency
from harness.analysis.predicted import evidence_of
from harness.analysis.replays import Replays
from harness.records import Rule, TextTrace, UserError
from harness.stats.intervals import Array
from harness.theory.acceptance import check_k
from harness.theory.replay import Replayed, accept_probabilities, by_start, replay, stacked
from harness.theory.speedup import StepTimes

__all__ = ["ENGINES", "Replays", "candidates_evidence", "replay_drafts", "replayed"]

ENGINES: Mapping[Rule, tuple[str, ...]] = {
    "ratio": ("transformers", "vLLM with draft_sample_method=probabilistic"),
    "greedy_draft": ("vLLM (default)", "SGLang STANDALONE at topk 1", "llama.cpp"),
    "exact_match": ("mlx-lm",),
}

# Entries of one (texts, positions, offsets) array; some ten such arrays are alive in a replay.
CHUNK_ENTRIES = 4_000_000

TextKey = tuple[str, str, int]


def replayed(
    traces: Sequence[TextTrace], rule: Rule, ks: Sequence[int], *, smooth: bool = False
) -> Mapping[int, Replayed]:
    """Replay one draft's traces at every K.

    Args:
        traces: of one draft, texts of any length; a K beyond a text's length is cut by its end.
        rule: the acceptance rule; a drafter whose proposals depend on the start chooses its tokens,
            so all rules are the same for it.
        ks: the K to replay.
        smooth: the variance-reduced form, for means over a workload only (not for a drafter whose
            proposals depend on the start, which has no such form and is replayed plainly).

    Returns:
        By K, expected counts of each text, in the order of the traces.

    Raises:
        UserError: no traces, a trace that cannot be replayed, or a K that it does not reach.
    """
    if not traces or not ks:
        raise UserError("traces: nothing to replay; give at least one text and one k")
    depth = max(check_k(k) for k in ks)
    for trace in traces:
        _check(trace, traces[0], depth)
    longest = max(len(trace.tokens) for trace in traces)
    texts = max(1, CHUNK_ENTRIES // (longest * (depth + 1)))
    parts = [
        _replay_some(traces[first : first + texts], rule, ks, depth, smooth)
        for first in range(0, len(traces), texts)
    ]
    return {k: stacked([part[k] for part in parts]) for k in parts[0]}


def _check(trace: TextTrace, first: TextTrace, depth: int) -> None:
    """Refuse a trace that replay would misread."""
    where = f"draft {trace.draft!r}, prompt {trace.prompt_set}/{trace.prompt}"
    if len(trace.tokens) == 0:
        raise UserError(f"traces: {where} has no text; leave it out")
    if (trace.matches is None) != (first.matches is None):
        raise UserError(f"traces: {where}: some texts say what was proposed and some do not")
    if trace.matches is not None:
        if trace.proposed is None or trace.matches.shape[1] < depth:
            raise UserError(f"k={depth}: {where} proposes {trace.matches.shape[1]}; lower k")
        return
    bad = np.isnan(trace.draft_logprob) | ~np.isfinite(trace.target_logprob)
    if bad.any():
        raise UserError(
            f"traces: {where} has no log-probability at position {int(bad.argmax())}; score it"
            " again or leave the draft out"
        )


def _replay_some(
    traces: Sequence[TextTrace], rule: Rule, ks: Sequence[int], depth: int, smooth: bool
) -> Mapping[int, Replayed]:
    """Replay a chunk of texts, padded to its longest."""
    sizes = [len(trace.tokens) for trace in traces]
    shape = (len(traces), max(sizes))
    if traces[0].matches is not None:
        matches = np.zeros((*shape, depth))
        proposed = np.zeros(shape, dtype=np.intp)
        for row, trace in enumerate(traces):
            assert trace.matches is not None
            assert trace.proposed is not None
            matches[row, : sizes[row]] = trace.matches[:, :depth]
            proposed[row, : sizes[row]] = trace.proposed
        return replay(matches, sizes, ks, proposed=proposed)
    chances, means = np.zeros((2, *shape))
    for row, trace in enumerate(traces):
        chances[row, : sizes[row]] = accept_probabilities(
            rule, trace.target_logprob, trace.draft_logprob, trace.draft_is_argmax
        )
        means[row, : sizes[row]] = _last_factor(trace, rule) if smooth else 0.0
    last = by_start(np.clip(means, 0.0, 1.0), depth) if smooth else None
    return replay(by_start(chances, depth), sizes, ks, last_factor=last)


def _last_factor(trace: TextTrace, rule: Rule) -> NDArray[np.float64]:
    """The mean of the last factor over the next token under this rule."""
    if rule == "ratio":
        return trace.last_ratio
    return trace.last_exact_match if rule == "exact_match" else trace.last_greedy_draft


def replay_drafts(
    by_draft: Mapping[str, Sequence[TextTrace]],
    rule: Rule,
    ks: Sequence[int],
    temperature: float,
    *,
    any_draft_temperature: bool = False,
) -> Replays:
    """Every (draft, K) on the prompts that all drafts scored, repetitions added up.

    Args:
        by_draft: traces of each draft; other temperatures, and draft temperatures other than the
            target's, are passed over.
        rule: the acceptance rule.
        ks: the K to replay.
        temperature: of the target's texts.
        any_draft_temperature: take each draft's traces whatever their draft temperature.

    Raises:
        UserError: a draft without a text at this temperature, texts that differ between drafts or
            were drawn under different top-k or top-p, no text in common, or as `replayed`.
    """
    chosen = {
        draft: _by_text(
            draft,
            [t for t in traces if _belongs(t, temperature, any_draft_temperature)],
            temperature,
        )
        for draft, traces in by_draft.items()
    }
    if not chosen:
        raise UserError("traces: no draft to audition")
    keys = sorted(
        key for key in next(iter(chosen.values())) if all(key in t for t in chosen.values())
    )
    if not keys:
        raise UserError(f"traces: no prompt that every draft scored at temperature {temperature:g}")
    first = next(iter(chosen.values()))
    for draft, own in chosen.items():
        _check_same(draft, [own[key] for key in keys], [first[key] for key in keys])
    counts = {
        draft: replayed([own[key] for key in keys], rule, ks) for draft, own in chosen.items()
    }
    lookups = frozenset(d for d, own in chosen.items() if own[keys[0]].matches is not None)
    return _by_prompt([first[key] for key in keys], rule, counts, lookups)


def _by_prompt(
    texts: Sequence[TextTrace],
    rule: Rule,
    counts: Mapping[str, Mapping[int, Replayed]],
    lookups: frozenset[str],
) -> Replays:
    """Add the counts of each prompt's texts; a conversation's turns are texts of one prompt."""
    prompt_of_text = [(text.prompt_set, text.conversation) for text in texts]
    names = sorted(set(prompt_of_text))
    place = {name: index for index, name in enumerate(names)}
    groups = [place[name] for name in prompt_of_text]
    size = len(names)
    category = {name: text.category for name, text in zip(prompt_of_text, texts, strict=True)}
    return Replays(
        rule=rule,
        temperature=texts[0].temperature,
        prompts=tuple(prompt for _, prompt in names),
        prompt_sets=tuple(prompt_set for prompt_set, _ in names),
        categories=tuple(category[name] for name in names),
        texts=_added([1 for _ in texts], groups, size),
        prompt_tokens=_added([text.prompt_tokens for text in texts], groups, size),
        candidates={
            (draft, k): found.summed(groups, size)
            for draft, by_k in counts.items()
            for k, found in by_k.items()
        },
        lookups=lookups,
    )


def _belongs(trace: TextTrace, temperature: float, any_own: bool) -> bool:
    """Whether target and draft have this temperature; a looked-up n-gram has none of its own."""
    own = any_own or trace.matches is not None or trace.draft_temperature == temperature
    return own and trace.temperature == temperature


def _by_text(
    draft: str, traces: Sequence[TextTrace], temperature: float
) -> dict[TextKey, TextTrace]:
    """The traces of one draft by text."""
    if not traces:
        raise UserError(f"traces: draft {draft!r} has no text at temperature {temperature:g}")
    texts = {(t.prompt_set, t.prompt, t.repetition): t for t in traces}
    if len(texts) < len(traces):
        raise UserError(f"traces: draft {draft!r} has a text twice; keep one")
    return texts


def _check_same(draft: str, own: Sequence[TextTrace], texts: Sequence[TextTrace]) -> None:
    """All drafts must have scored the same texts, drawn from one law."""
    for trace, other in zip(own, texts, strict=True):
        where = f"traces: draft {draft!r}, prompt {trace.prompt_set}/{trace.prompt}"
        if not np.array_equal(trace.tokens, other.tokens):
            raise UserError(f"{where}: not the text that {other.draft!r} scored; use one run")
        if (trace.top_k, trace.top_p) != (texts[0].top_k, texts[0].top_p):
            raise UserError(f"{where}: another top_k or top_p; audition each apart")


def _added(values: Sequence[float], groups: Sequence[int], size: int) -> Array:
    total = np.zeros(size)
    np.add.at(total, np.asarray(groups, dtype=np.intp), np.asarray(values, dtype=np.float64))
    return total


def candidates_evidence(
    by_draft: Mapping[str, Sequence[TextTrace]],
    times_by_draft: Mapping[str, Latency | StepTimes],
    rule: Rule,
    ks: Sequence[int],
    temperature: float,
) -> Evidence:
    """All (draft, K) candidates with their predicted seconds: what `verdict.decide` rests on.

    Args:
        by_draft: traces of each draft.
        times_by_draft: of each draft with the target; StepTimes are taken as exact, the scatter of
            a Latency's samples goes into the verdict.
        rule: the acceptance rule.
        ks: the K to choose from.
        temperature: of the target's texts.

    Raises:
        UserError: a draft without step times, a K that they do not cover, or as `replay_drafts`.
    """
    return evidence_of(replay_drafts(by_draft, rule, ks, temperature), times_by_draft)
