"""Score the target's texts with a draft: all that replay needs to know, in one prefill.

Each text goes through the draft once, with its prompt, and through the output heads chunk by chunk:
of the vocabulary-wide distributions only a handful of numbers per token is kept, and never are more
than `chunk` of them in memory at a time. The target is not run again where its final hidden states
were kept (`harness.measurement.target_texts`).

At temperature 0 the distributions are points: the target's on the emitted token, the draft's on its
argmax. Then every rule's accept probability is 1 if the tokens match, else 0.

The acceptance rules need the target's log-probability of each token and no more of it. So where a
server told them with the text, no target is needed here.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoding.lookups import lookups
from harness.decoding.sampling import (
    SamplingParameters,
    penalised,
    sampler_for,
    seen_along,
    seen_tokens,
)
from harness.engine_facts.draft_kinds import DRAFTS
from harness.measurement.target_texts import GeneratedText, batch_refusal, broken_logits, in_batches
from harness.models.cached import CachedModel, SplitNetwork, split_network
from harness.models.heads.base import Head
from harness.models.probe import difference, probe_tokens, uncached_logits
from harness.records import TextTrace

# Positions of all rows that go through a body at once; longer texts are prefilled in pieces.
PREFILL_POSITIONS = 8192
# Of the logits of a model that are in memory at a time; sampling needs a few copies of them
LOGITS_BYTES = 64 * 1024**2
# Rows of the vocabulary that are marked at once for a repetition penalty
SEEN_AT_ONCE = 64

Numbers = NDArray[np.float64]
# How a draft is sampled, from how the target is
DraftSampling = Callable[[SamplingParameters], SamplingParameters]


def as_target(sampling: SamplingParameters) -> SamplingParameters:
    return sampling


class Scores(NamedTuple):
    """Per token of the texts: fields of a `TextTrace`, and whether logits are finite."""

    target_logprob: Numbers
    draft_logprob: Numbers
    draft_is_argmax: Numbers
    target_finite: Numbers
    draft_finite: Numbers


class ScoredModel(NamedTuple):
    """A model, its body and head (None: it cannot be split) and what errors call it."""

    model: CachedModel
    split: SplitNetwork | None
    name: str


@torch.inference_mode()
def score_texts(
    texts: Sequence[GeneratedText],
    target: CachedModel | None,
    draft: CachedModel,
    *,
    draft_name: str,
    draft_shown: str = "the draft",
    target_shown: str = "the target",
    draft_sampling: DraftSampling = as_target,
    batch: int = 32,
    chunk: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> list[TextTrace]:
    """Score texts of the target with one draft: a trace per text, in the order given.

    Args:
        target: the model that generated them; run again only for texts without hidden states. None
            where a server did, and told the log-probabilities of those above temperature 0.
        draft: distributions are over the narrower vocabulary of the two.
        draft_shown, target_shown: what errors call them.
        batch: texts in a batch at most; halved, and kept so, whenever memory runs out.
        chunk: tokens whose logits are in memory at a time; None for LOGITS_BYTES of them.

    Raises:
        BrokenLogitsError: logits that are not finite.
        UserError: one text alone runs out of memory.
    """
    if not texts:
        return []
    sample = texts[0].request.tokens
    drafts = scored_model(draft, draft_shown, sample)
    targets = None if target is None else scored_model(target, target_shown, sample)
    at_once = chunk or max(1, LOGITS_BYTES // (draft.vocab_size * torch.float32.itemsize))
    # A model that cannot be split into body and head, or batched, is run text by text
    whole = any(scored is not None and scored.split is None for scored in (drafts, targets))

    def work(some: Sequence[GeneratedText]) -> list[TextTrace]:
        scored = _score(some, targets, drafts, draft_name, draft_sampling, at_once)
        for _ in scored:
            tick()
        return scored

    return in_batches(
        texts,
        1 if whole else batch,
        lambda a, b: a.request.sampling == b.request.sampling,
        work,
        drafts.name,
        # Texts that are sampled alike together, the longest first
        key=lambda text: (
            repr(text.request.sampling),
            -len(text.request.tokens) - len(text.tokens),
        ),
    )


def lookup_traces(
    texts: Sequence[GeneratedText], kind: str, *, num_draft_tokens: int, draft_name: str
) -> list[TextTrace]:
    """The proposals of a look-up from every start of each text.

    Its tokens are chosen, not drawn, so under every rule a proposed token stands exactly where it
    is the text's; the target's fields are NaN. `num_draft_tokens` is the largest K to be replayed.
    """
    traces: list[TextTrace] = []
    for text in texts:
        drafter = DRAFTS[kind].load(text.request.eos)
        matches, proposed = lookups(drafter, text.request.tokens, text.tokens, num_draft_tokens)
        is_text, unknown = matches.astype(np.float64), np.full(len(text.tokens), np.nan)
        is_proposed = np.arange(is_text.shape[1]) < proposed[:, None]
        with np.errstate(divide="ignore"):
            logprob = np.log(np.where(is_proposed, is_text, np.nan))
        scores = Scores(unknown, logprob, is_text, unknown, unknown)
        traces.append(trace_of(text, draft_name, scores, proposed, chosen=True))
    return traces


def scored_model(model: CachedModel, name: str, sample: Sequence[int]) -> ScoredModel:
    """A model split, if rows padded on the right score as each does alone, tried once; or whole."""
    split = split_network(model, sample)
    known = model.text_batches.get("scoring")
    if known is None:
        reason = "its head on its final hidden states does not give its logits"
        if split is not None:
            reason = batch_refusal(model, lambda: _padding_error(model, split))
            reason = f"padded {reason}" if reason else None
        known = "padded" if reason is None else f"one by one: {reason}"
        model.text_batches["scoring"] = known
    return ScoredModel(model, split if known == "padded" else None, name)


def _padding_error(model: CachedModel, split: SplitNetwork) -> float:
    """The difference of logits of rows padded on the right from those of each row alone."""
    tokens = probe_tokens(model.network, model.vocab_size)
    rows = [tokens, tokens[: len(tokens) // 2]]
    alone = torch.cat([uncached_logits(model.network, row, model.vocab_size) for row in rows])
    errors: list[float] = []
    for positions in (PREFILL_POSITIONS, len(tokens)):
        states = _states(model, split, rows, positions)
        batched = [split.logits(row[: len(ids)]) for row, ids in zip(states, rows, strict=True)]
        errors.append(difference(torch.cat(batched), alone))
    return max(errors, key=lambda error: (error != error, error))  # NaN before any number


def _score(
    texts: Sequence[GeneratedText],
    target: ScoredModel | None,
    draft: ScoredModel,
    draft_name: str,
    draft_sampling: DraftSampling,
    chunk: int,
) -> list[TextTrace]:
    sampling = texts[0].request.sampling
    draft_as = draft_sampling(sampling)
    width = draft.model.vocab_size
    if target is not None:
        width = min(width, target.model.vocab_size)
    emitted = torch.tensor([token for text in texts for token in text.tokens])
    device = draft.model.device
    parts = [
        compared(
            tokens.to(device), of_target, Distribution(logits.to(device), draft_as, width, seen)
        )
        for tokens, logits, (seen, of_target) in zip(
            emitted.split(chunk),
            logit_chunks(draft, texts, chunk, kept=False),
            target_chunks(texts, target, width, chunk, device),
            strict=True,
        )
    ]
    scores = Scores(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    ends = np.cumsum([len(text.tokens) for text in texts])
    traces: list[TextTrace] = []
    for text, end in zip(texts, ends, strict=True):
        part = Scores(*(column[end - len(text.tokens) : end] for column in scores))
        refuse_broken(part, text, "the server" if target is None else target.name, draft.name)
        if text.logprobs is not None and not sampling.greedy:
            part = part._replace(target_logprob=np.array(text.logprobs))
        traces.append(trace_of(text, draft_name, part))
    return traces


class Distribution:
    """A model's distributions after some tokens, over the vocabulary that both models have.

    Attributes:
        probs: [n, vocab] as sampled; None where each is a point, on `best`.
        best: [n] the most likely token, before sampling parameters apply.
    """

    def __init__(
        self, logits: Tensor, sampling: SamplingParameters, width: int, seen: Tensor | None
    ) -> None:
        """Distributions of logits [n, width or more]; `seen` [n, width] is for a penalty."""
        seen = None if seen is None else seen.to(logits.device)
        logits = penalised(logits[:, :width], seen, sampling.repetition_penalty)
        peak, self.best = logits.max(-1)
        self.finite = peak.isfinite()
        self.probs = None if sampling.greedy else sampler_for(sampling)(logits)

    def of(self, tokens: Tensor) -> Tensor:
        if self.probs is None:
            return (self.best == tokens).float()
        return self.probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def part(self, rows: slice) -> "Distribution":
        other = copy.copy(self)
        other.best, other.finite = self.best[rows], self.finite[rows]
        other.probs = None if self.probs is None else self.probs[rows]
        return other


def compared(tokens: Tensor, target: Distribution | None, draft: Distribution) -> Scores:
    """Compare both distributions at the target's tokens [n], on the draft's device.

    A target is None where it is greedy, its distribution a point on the token, and where it is not
    here: its log-probability is then NaN.
    """
    match = (draft.best == tokens).float()
    one = torch.ones_like(match)
    if draft.probs is None:
        columns = [one, match, match, one, draft.finite]
    elif target is None or target.probs is None:
        unknown = torch.full_like(match, math.nan)
        columns = [unknown, draft.of(tokens), match, one, draft.finite]
    else:
        columns = [target.of(tokens), draft.of(tokens), match, target.finite, draft.finite]
    scores = Scores(*torch.stack([column.float() for column in columns]).cpu().double().numpy())
    # A token that was drawn has some mass, even where another order of the sums says it has none
    tiny = float(np.finfo(np.float32).tiny)
    with np.errstate(divide="ignore"):
        return scores._replace(
            target_logprob=np.log(np.maximum(scores.target_logprob, tiny)),
            draft_logprob=np.log(scores.draft_logprob),
        )


def target_chunks(
    texts: Sequence[GeneratedText],
    target: ScoredModel | None,
    width: int,
    chunk: int,
    device: torch.device,
) -> Iterator[tuple[Tensor | None, Distribution | None]]:
    """Per chunk of the texts' tokens: what was seen before each, and the target's distributions.

    None where there is no repetition penalty; where it is greedy, or not here.
    """
    sampling = texts[0].request.sampling
    chunks: Iterable[Tensor | None]
    if sampling.greedy or target is None:
        chunks = repeat(None, -(-sum(len(text.tokens) for text in texts) // chunk))
    else:
        chunks = logit_chunks(target, texts, chunk, kept=True)
    seen_rows = _seen_chunks(texts, width, chunk)
    for logits in chunks:
        seen, of_target = next(seen_rows, None), None
        if logits is not None:
            of_target = Distribution(logits.to(device), sampling, width, seen)
        yield seen, of_target


def _seen_chunks(texts: Sequence[GeneratedText], width: int, chunk: int) -> Iterator[Tensor]:
    """For a repetition penalty: the tokens seen before each token, [at most chunk, width] bool.

    Yields nothing where the texts are drawn without a penalty.
    """
    if texts[0].request.sampling.repetition_penalty is None:
        return
    waiting: list[Tensor] = []
    for text in texts:
        seen = seen_tokens(text.request.tokens, width, torch.device("cpu"))
        for piece in torch.tensor(text.tokens).split(SEEN_AT_ONCE):
            *rows, seen = seen_along(seen, piece)
            waiting += rows
            while len(waiting) >= chunk:
                yield torch.stack(waiting[:chunk])
                waiting = waiting[chunk:]
    if waiting:
        yield torch.stack(waiting)


def logit_chunks(
    scored: ScoredModel, texts: Sequence[GeneratedText], chunk: int, *, kept: bool
) -> Iterator[Tensor]:
    """Logits [at most chunk, vocab] that predict the texts' tokens, text after text.

    Without a split only a single text is possible. `kept`: the texts' stored hidden states are this
    model's.
    """
    if scored.split is None:
        (text,) = texts
        prompt = text.request.tokens
        scored.model.prefill(prompt[:-1])
        for piece in torch.tensor([prompt[-1], *text.tokens[:-1]]).split(chunk):
            yield scored.model.forward(piece)
        scored.model.prefill([])
        return
    stored = [text.hidden for text in texts if text.hidden is not None] if kept else []
    if len(stored) < len(texts):
        stored = _prefilled(scored.model, scored.split, texts)
    for rows in torch.cat(stored).split(chunk):
        yield scored.split.logits(rows)


def _prefilled(
    model: CachedModel, split: SplitNetwork, texts: Sequence[GeneratedText]
) -> list[Tensor]:
    """Hidden states [n, hidden] behind each text's tokens, from one prefill."""
    input_ids = [[*text.request.tokens, *text.tokens[:-1]] for text in texts]
    return [
        row[len(text.request.tokens) - 1 :][: len(text.tokens)]
        for row, text in zip(
            _states(model, split, input_ids, PREFILL_POSITIONS), texts, strict=True
        )
    ]


def _states(
    model: CachedModel, split: SplitNetwork, input_ids: Sequence[Sequence[int]], positions: int
) -> Tensor:
    """Final hidden states [rows, width, hidden] of rows that are padded on the right.

    A causal model never looks at what comes after a position, so no mask is needed. `positions` is
    how many, of all rows, go through the body at once.
    """
    width = max(len(row) for row in input_ids)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in input_ids])
    pieces = ids.to(model.network.device).split(max(1, positions // len(input_ids)), dim=1)
    if len(pieces) == 1:
        return split.hidden(input_ids=pieces[0], use_cache=False)
    cache, done = model.new_cache(), list[Tensor]()
    for piece in pieces:
        start = sum(states.shape[1] for states in done)
        places = torch.arange(start, start + piece.shape[1], device=piece.device)
        extra = {"position_ids": places.expand(piece.shape)} if model.positions else {}
        cached = {model.cache_argument: cache, "use_cache": True}
        done.append(split.hidden(input_ids=piece, **cached, **extra))
    return torch.cat(done, dim=1)


def refuse_broken(scores: Scores, text: GeneratedText, target_name: str, draft_name: str) -> None:
    """Refuse scores by token, or by start and offset, of logits that are not finite."""
    names = (scores.target_finite, target_name), (scores.draft_finite, draft_name)
    for column, name in names:
        places = np.argwhere(column == 0.0).sum(axis=1)
        if len(places):
            raise broken_logits(name, text.request, int(places.min()))


def trace_of(
    text: GeneratedText,
    draft_name: str,
    scores: Scores,
    proposed: NDArray[np.int64] | None = None,
    *,
    chosen: bool = False,
) -> TextTrace:
    request, sampling = text.request, text.request.sampling
    fields: dict[str, Any] = scores._asdict()
    del fields["target_finite"], fields["draft_finite"]
    fields["draft_is_argmax"] = scores.draft_is_argmax.astype(np.bool_)
    return TextTrace(
        draft=draft_name,
        draft_temperature=sampling.temperature,
        prompt_set=request.prompt_set,
        prompt=request.prompt,
        category=request.category,
        repetition=request.repetition,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        prompt_tokens=len(request.tokens),
        stop_reason=text.stop_reason,
        tokens=np.array(text.tokens, dtype=np.int64),
        **fields,
        proposed=proposed,
        chosen=chosen,
        turn=request.turn,
    )


# ---- heads ---------------------------------------------------------------------------------------


@torch.inference_mode()
def score_with_head(
    texts: Sequence[GeneratedText],
    target: CachedModel,
    head: Head,
    *,
    num_draft_tokens: int,
    draft_name: str,
    draft_shown: str = "the draft",
    target_shown: str = "the target",
    draft_sampling: DraftSampling = as_target,
    chunk: int = 512,
    tick: Callable[[], None] = lambda: None,
) -> list[TextTrace]:
    """Score texts with a head for their target, which keeps the states that the head reads.

    While drafted tokens are accepted they are the text's, so a head can be run on the text itself:
    the j-th drafts from all starts are one pass (`HeadNetwork.passes`). A text costs one prefill of
    the target, whose final states its logits are made of above temperature 0, and K of a head that
    drafts token by token; a block drafter gives all drafts from a start at once.
    `num_draft_tokens` is the largest K that is to be replayed; for the rest see `score_texts`.
    """
    if not texts:
        return []
    scored = scored_model(target, target_shown, texts[0].request.tokens)
    traces: list[TextTrace] = []
    for text in texts:
        scores, proposed = _head_score(text, scored, head, num_draft_tokens, draft_sampling, chunk)
        refuse_broken(scores, text, target_shown, draft_shown)
        traces.append(trace_of(text, draft_name, scores, proposed))
        tick()
    return traces


def _head_score(
    text: GeneratedText,
    target: ScoredModel,
    head: Head,
    depth: int,
    draft_sampling: DraftSampling,
    chunk: int,
) -> tuple[Scores, NDArray[np.int64] | None]:
    """Scores by start and offset, the target's log-probabilities aside, and the number proposed."""
    request, count = text.request, len(text.tokens)
    # Start s is row (prompt length) + s - 2; a prompt of one token has no row for start 0
    first_row = max(0, len(request.tokens) - 2)
    first_start = first_row + 2 - len(request.tokens)
    states, text = _head_prefilled(text, target, head)
    outputs = _outputs(text, states, head, depth, first_row)
    sampling, width = request.sampling, head.vocab_size
    draft_as = draft_sampling(sampling)
    tokens = torch.tensor(text.tokens, device=head.device)
    by_start = Scores(*(np.full((count, depth), np.nan) for _ in Scores._fields))
    target_logprobs = np.full(count, np.nan)
    chunks = target_chunks([text], target, width, chunk, head.device)
    for begin, (seen, of_target) in zip(range(0, count, chunk), chunks, strict=True):
        end = min(begin + chunk, count)
        for offset, rows in enumerate(outputs):
            low = max(begin - offset, first_start)
            if low >= end - offset:
                continue
            starts, at = slice(low, end - offset), slice(low + offset, end)
            in_chunk = slice(at.start - begin, at.stop - begin)
            logits = head.network.logits(
                rows[low - first_start : end - offset - first_start], width, offset
            )
            seen_there = None if seen is None else seen[in_chunk]
            draft = Distribution(logits, draft_as, width, seen_there)
            part = None if of_target is None else of_target.part(in_chunk)
            scores = compared(tokens[at], part, draft)
            for column, values in zip(by_start, scores, strict=True):
                column[starts, offset] = values
            target_logprobs[at] = scores.target_logprob
    proposed, most = None, depth if head.drafts is None else min(depth, head.drafts)
    if first_start or most < depth:
        proposed = np.full(count, most)
        proposed[:first_start] = 0
    is_argmax = by_start.draft_is_argmax == 1.0
    return by_start._replace(target_logprob=target_logprobs, draft_is_argmax=is_argmax), proposed


def _head_prefilled(
    text: GeneratedText, target: ScoredModel, head: Head
) -> tuple[Tensor, GeneratedText]:
    """The target's states [tokens but the last, width] that the head reads, from one prefill.

    A text whose logits can be made of final hidden states, and are needed, gets these.
    """
    needed = not text.request.sampling.greedy and text.hidden is None and target.split is not None
    model, layers = target.model, head.network.layers
    model.keep_states((*layers, model.layers) if needed else layers)
    model.prefill([*text.request.tokens, *text.tokens[:-1]])
    states = model.states
    assert states is not None
    model.prefill([])
    model.keep_states(layers)
    if not needed:
        return states, text
    read, final = states.split([head.network.width, states.shape[1] - head.network.width], dim=1)
    return read, replace(text, hidden=final[len(text.request.tokens) - 1 :])


def _outputs(
    text: GeneratedText, states: Tensor, head: Head, depth: int, first_row: int
) -> list[Tensor]:
    """Per offset, the head's outputs [starts, hidden] from every start that has the tokens."""
    ids = [*text.request.tokens, *text.tokens]
    # The last row that is read predicts the last token from the one before
    count = len(ids) - 2
    if count <= first_row:
        return []
    tokens = torch.tensor([ids[: count + 1]])
    outputs = head.network.passes(tokens, states[:count].unsqueeze(0), depth, first_row)
    return [rows[0] for rows in outputs]
