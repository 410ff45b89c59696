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
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoding.lookups import Lookups, lookups
from harness.decoding.sampling import (
    SamplingParameters,
    penalised,
    sampler_for,
    seen_along,
    seen_tokens,
)
from harness.engine_facts.draft_kinds import DRAFTS
from harness.engines.protocol import Asked, Likeliest, Server
from harness.measurement.target_texts import (
    GeneratedText,
    batch_refusal,
    broken_logits,
    in_batches,
)
from harness.models.cached import CachedModel, SplitNetwork, split_network
from harness.models.probe import difference, probe_tokens, uncached_logits
from harness.records import DraftConfidence, TextTrace, UserError

# Positions of all rows that go through a body at once; longer texts are prefilled in pieces.
PREFILL_POSITIONS = 8192
# Of the logits of a model that are in memory at a time; sampling needs a few copies of them
LOGITS_BYTES = 64 * 1024**2
# Rows of the vocabulary that are marked at once for a repetition penalty
SEEN_AT_ONCE = 64
# Tokens that a draft's server is asked for at a time where it leaves the text: a draft ends soon
ONWARDS = 3

Numbers = NDArray[np.float64]
# How a draft is sampled, from how the target is
DraftSampling = Callable[[SamplingParameters], SamplingParameters]


def as_target(sampling: SamplingParameters) -> SamplingParameters:
    """A draft that is sampled as the target is, as our own loop does."""
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
        texts: of any temperatures.
        target: the model that generated them; run again only for texts without hidden states. None
            where a server did, and told the log-probabilities of those above temperature 0.
        draft: distributions are over the narrower vocabulary of the two.
        draft_shown, target_shown: what errors call them.
        draft_sampling: how an engine samples the draft, from how it samples the target.
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
    is the text's; the target's fields are NaN.

    Args:
        texts: of any temperatures.
        kind: of look-up.
        num_draft_tokens: the largest K that is to be replayed.
        draft_name: in the traces.
    """
    traces: list[TextTrace] = []
    for text in texts:
        drafter = DRAFTS[kind].load(text.request.eos)
        looked_up = lookups(drafter, text.request.tokens, text.tokens, num_draft_tokens)
        traces.append(_lookup_trace(text, looked_up, draft_name))
    return traces


def asked_traces(
    texts: Sequence[GeneratedText],
    draft: Server,
    *,
    draft_name: str,
    tick: Callable[[], None] = lambda: None,
) -> list[TextTrace]:
    """Score texts by asking a plain server of the draft for its likeliest token at every position.

    Its kernels compute in the weights' own bits, token by token behind a cached prefix, as they do
    when they draft. So they decide near ties as the speculating server's do; a checkpoint in other
    bits does not (in 5 of 15 texts of a 0.5B draft in 4 bits).

    Args:
        texts: of temperature 0; of others for a draft that proposes its likeliest token, where the
            target's probabilities are not asked for.
        draft: decodes plainly.

    Raises:
        ServerDiedError, RequestFailedError, RefusedError: it does not answer.
    """
    traces: list[TextTrace] = []
    for text in texts:
        prompt, tokens = text.request.tokens, text.tokens
        asked = Asked(prompt[:-1], SamplingParameters(0.0), 0, budget=1, cached=True)
        if len(prompt) > 1:  # its last token is decoded by itself, as a draft's first one is
            draft.generate(asked)
        best = [
            draft.generate(asked._replace(prompt=(*prompt, *tokens[:end]))).tokens[0]
            for end in range(len(tokens))
        ]
        traces.append(_asked_trace(text, draft_name, best))
        tick()
    return traces


def _asked_trace(text: GeneratedText, draft_name: str, best: Sequence[int]) -> TextTrace:
    tokens = text.tokens
    match, one = np.equal(best, tokens).astype(np.float64), np.ones(len(tokens))
    target = np.full(len(tokens), 0.0 if text.request.sampling.greedy else np.nan)
    with np.errstate(divide="ignore"):
        scores = Scores(target, np.log(match), match, one, one)
    return trace_of(text, draft_name, scores)


def asked_confidences(
    texts: Sequence[GeneratedText],
    draft: Server,
    *,
    draft_name: str,
    num_draft_tokens: int,
    least: float,
    among: int,
    tick: Callable[[], None] = lambda: None,
) -> list[tuple[TextTrace, DraftConfidence]]:
    """Ask a plain server of the draft for what `draft_confidences` computes, for greedy texts.

    The traces that `asked_traces` makes come with them.

    One request at each position of a text: of one token where the draft's is the text's, else of
    as many as a round may draft from there, off the text.

    Args:
        texts: of temperature 0.
        draft: decodes plainly.
        num_draft_tokens: the largest K.
        least: no threshold below it is replayed; 0 is no threshold.
        among: the number of likeliest tokens among which the engine takes a token's probability.

    Raises:
        ServerDiedError, RequestFailedError, RefusedError: it does not answer.
        UserError: it lists no log-probabilities.
    """
    made: list[tuple[TextTrace, DraftConfidence]] = []
    for text in texts:
        request, tokens = text.request, text.tokens
        asked = Asked((), SamplingParameters(0.0), 0, budget=1, logprobs=among, cached=True)
        if len(request.tokens) > 1:  # its last token is decoded by itself, as in `asked_traces`
            draft.generate(asked._replace(prompt=tuple(request.tokens[:-1])))
        values = np.zeros((len(tokens) + 1, num_draft_tokens))
        best: list[int] = []
        for end, row in enumerate(values):
            prefix = asked._replace(prompt=(*request.tokens, *tokens[:end]))
            one = draft.generate(prefix)
            row[0], own = _confidence(one.likeliest), one.tokens[0]
            best.append(own)
            leaves = end == len(tokens) or own != tokens[end]
            if not leaves or row[0] < least or num_draft_tokens == 1:
                continue
            more = prefix._replace(prompt=(*prefix.prompt, own))
            row[1:] = _onwards(draft, more, least, num_draft_tokens - 1)
        if np.isnan(values[:, 0]).all():
            raise UserError(
                "p_min: the draft's server lists no log-probabilities, which a threshold is"
                " compared with; leave p_min out"
            )
        key = request.key
        names = (draft_name, key.prompt_set, key.prompt, key.repetition)
        trace = _asked_trace(text, draft_name, best[:-1])
        made.append((trace, DraftConfidence(*names, key.temperature, values)))
        tick()
    return made


def _confidence(likeliest: Likeliest) -> float:
    """The probability of the likeliest token at the first position, among those that are listed.

    NaN where none is, as llama.cpp lists none of a token that leaves a character incomplete.
    """
    if not likeliest or not likeliest[0]:
        return math.nan
    listed = np.exp([*likeliest[0].values()])
    return float(listed.max() / listed.sum())


def _onwards(draft: Server, asked: Asked, least: float, count: int) -> NDArray[np.float64]:
    """[count] confidences of what is drafted on, up to the first below `least`; 0 after it.

    A draft goes on after an end of text, at which an answer stops.
    """
    values, place = np.zeros(count), 0
    while place < count:
        done = draft.generate(asked._replace(budget=min(ONWARDS, count - place)))
        for index in range(len(done.tokens)):
            values[place] = _confidence(done.likeliest[index:])
            place += 1
            if values[place - 1] < least:
                return values
        asked = asked._replace(prompt=(*asked.prompt, *done.tokens))
    return values


def _lookup_trace(text: GeneratedText, looked_up: Lookups, draft_name: str) -> TextTrace:
    is_text = looked_up.matches.astype(np.float64)
    is_proposed = np.arange(is_text.shape[1]) < looked_up.proposed[:, None]
    match = np.where(is_proposed, is_text, np.nan)
    unknown = np.full(len(text.tokens), np.nan)
    with np.errstate(divide="ignore"):
        logprob = np.log(match)
    scores = Scores(unknown, logprob, is_text, unknown, unknown)
    return trace_of(text, draft_name, scores, looked_up.proposed, chosen=True)


def scored_model(model: CachedModel, name: str, sample: Sequence[int]) -> ScoredModel:
    """A model split, if rows padded on the right then score as each does alone; else whole.

    That is tried once per model, with one prefill and with several, and stored on it for the
    manifest. `sample` is for `split_network`.
    """
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
        target_name = "the server" if target is None else target.name
        for finite, name in ((part.target_finite, target_name), (part.draft_finite, draft.name)):
            if not finite.all():
                raise broken_logits(name, text.request, int(finite.argmin()))
        if text.logprobs is not None and not sampling.greedy:
            part = part._replace(target_logprob=np.array(text.logprobs))
        traces.append(trace_of(text, draft_name, part))
    return traces


class Distribution:
    """A model's distributions after some tokens, over the vocabulary that both models have.

    Attributes:
        probs: [n, vocab] as sampled; None where each is a point, on `best`.
        best: [n] the most likely token, before sampling parameters apply.
        finite: [n] whether the logits are.
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
        """Probability of one token per row."""
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
