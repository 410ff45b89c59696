"""What a draft thinks of the target's texts: all that replay needs to know, in one prefill.

Each text goes through the draft once, with its prompt, and through the output heads chunk by chunk:
of the vocabulary-wide laws only a handful of numbers per token is kept, and never are more than
`chunk` of them held at a time. The target is not run again where its final hidden states were kept
(`harness.measurement.traces`).

At temperature 0 the laws are points: the target's on the emitted token, the draft's on its argmax.
Then every rule's accept probability is the match bit.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoding.ngram import Lookups, lookups
from harness.decoding.sampling import penalised, seen_along, seen_tokens
from harness.measurement.batches import in_batches
from harness.measurement.laws import NUMBERS, Law, compare
from harness.measurement.traces import GeneratedText, broken_logits
from harness.models.backbone import SplitNetwork, new_cache, split_network
from harness.models.cached import CachedModel
from harness.models.probe import allowed_error, difference, probe_tokens, uncached_logits
from harness.records import TextTrace, first_line

# Positions of all rows that go through a body at once; longer texts are prefilled in pieces.
PREFILL_POSITIONS = 8192
# Rows of the vocabulary that are marked at once for a repetition penalty
SEEN_AT_ONCE = 64

Columns = dict[str, NDArray[np.float64]]


class _Model(NamedTuple):
    """A model with its halves (None: it cannot be taken apart) and what errors call it."""

    model: CachedModel
    halves: SplitNetwork | None
    name: str


@torch.inference_mode()
def score_texts(
    texts: Sequence[GeneratedText],
    target: CachedModel,
    draft: CachedModel,
    *,
    draft_name: str,
    target_name: str = "the target",
    batch: int = 32,
    chunk: int = 512,
    tick: Callable[[], None] = lambda: None,
) -> list[TextTrace]:
    """Score texts of the target with one draft.

    Args:
        texts: of any temperatures.
        target: the model that wrote them; run again only for texts without hidden states.
        draft: the draft. Laws are over the narrower vocabulary of the two.
        draft_name: the draft's name in the traces, and in errors.
        target_name: what errors call the target.
        batch: texts side by side at most; halved for good whenever memory runs out.
        chunk: tokens whose logits are held at a time.
        tick: called once per scored text.

    Returns:
        A trace per text, in the order given.

    Raises:
        BrokenLogitsError: logits that are not finite.
        UserError: one text alone runs out of memory.
    """
    if not texts:
        return []
    sample = texts[0].request.tokens
    ours = _Model(target, _batched(target, split_network(target, sample)), target_name)
    theirs = _Model(draft, _batched(draft, split_network(draft, sample)), f"draft={draft_name}")
    # A model that cannot be taken apart or batched is run text by text through its own cache.
    size = batch if ours.halves is not None and theirs.halves is not None else 1

    def work(some: Sequence[GeneratedText]) -> list[TextTrace]:
        scored = _score(some, ours, theirs, draft_name, chunk)
        for _ in scored:
            tick()
        return scored

    order = sorted(range(len(texts)), key=lambda index: _batch_key(texts[index]))
    done = in_batches(
        [texts[index] for index in order],
        size,
        lambda a, b: a.request.sampling == b.request.sampling,
        work,
        theirs.name,
    )
    placed = dict(zip(order, done, strict=True))
    return [placed[index] for index in range(len(texts))]


def ngram_trace(
    text: GeneratedText, *, num_draft_tokens: int, draft_name: str = "ngram"
) -> TextTrace:
    """What the n-gram drafter would propose from every start of a text.

    Its tokens are chosen, not drawn, so under every rule a proposed token stands exactly where it
    is the text's. The [n] fields describe offset 0 of each start; the target's are NaN.

    Args:
        text: the target's text.
        num_draft_tokens: the largest K that is to be replayed.
        draft_name: the draft's name in the trace.
    """
    request = text.request
    found = lookups(request.tokens, text.tokens, num_draft_tokens=num_draft_tokens, eos=request.eos)
    match = found.matches[:, 0].astype(np.float64)
    unknown = np.full(len(match), np.nan)
    with np.errstate(divide="ignore"):
        logprob = np.log(match)
    columns: Columns = {
        "target_logprob": unknown,
        "draft_logprob": logprob,
        "draft_is_argmax": match,
        "last_ratio": match,
        "last_exact_match": match,
        "last_greedy_draft": match,
        "target_entropy": unknown,
        "draft_entropy": np.zeros(len(match)),
    }
    return _trace(text, draft_name, columns, found)


def _batched(model: CachedModel, halves: SplitNetwork | None) -> SplitNetwork | None:
    """The halves, if rows padded on the right have the scores that each has alone; None if not.

    Tried once per model, with one prefill and with several, and stored on it for the manifest.
    """
    known = model.text_batches.get("scoring")
    if known is None:
        reason = _refusal(model, halves)
        known = "padded" if reason is None else f"one by one: {reason}"
        model.text_batches["scoring"] = known
    return halves if known == "padded" else None


def _refusal(model: CachedModel, halves: SplitNetwork | None) -> str | None:
    """Why texts may not be scored in one padded batch; None if they may."""
    if halves is None:
        return "its head on its final hidden states does not give its logits"
    if model.makes_state:
        return "needs a cache that can be batched"
    tokens = probe_tokens(model.network, model.vocab_size)
    rows = [tokens, tokens[: len(tokens) // 2]]
    try:
        alone = [uncached_logits(model.network, row, model.vocab_size) for row in rows]
        for positions in (PREFILL_POSITIONS, len(tokens)):
            states = _states(model, halves, rows, positions)
            batched = [
                halves.logits(row[: len(ids)]) for row, ids in zip(states, rows, strict=True)
            ]
            error = difference(torch.cat(batched), torch.cat(alone))
            if not error <= allowed_error(model.network):
                return f"padded is off by {error:.2g} of the logits' range"
    except Exception as problem:  # whatever a model's own code raises when it is used like this
        return f"padded fails ({type(problem).__name__}: {first_line(problem, 120)})"
    return None


def _batch_key(text: GeneratedText) -> tuple[str, int]:
    """Texts of one law together, the longest first."""
    return repr(text.request.sampling), -len(text.request.tokens) - len(text.tokens)


def _score(
    texts: Sequence[GeneratedText],
    target: _Model,
    draft: _Model,
    draft_name: str,
    chunk: int,
) -> list[TextTrace]:
    """Score one batch of texts of one law."""
    sampling = texts[0].request.sampling
    width = min(target.model.vocab_size, draft.model.vocab_size)
    tokens = torch.tensor([token for text in texts for token in text.tokens])
    draft_chunks = _logit_chunks(draft, texts, chunk, kept=False)
    target_chunks = (
        [None] * -(-len(tokens) // chunk)
        if sampling.greedy
        else _logit_chunks(target, texts, chunk, kept=True)
    )
    parts: list[Tensor] = []
    seen_chunks = _seen_chunks(texts, width, chunk)
    for part, (theirs, ours) in enumerate(zip(draft_chunks, target_chunks, strict=True)):
        here = tokens[part * chunk : (part + 1) * chunk].to(theirs.device)
        seen = next(seen_chunks, None)
        penalty = sampling.repetition_penalty
        seen = None if seen is None else seen.to(theirs.device)
        theirs = penalised(theirs[:, :width], seen, penalty)
        law = None
        if ours is not None:
            law = Law(penalised(ours[:, :width].to(theirs.device), seen, penalty), sampling)
        parts.append(compare(here, law, theirs, sampling))
    lengths = [len(text.tokens) for text in texts]
    per_text = zip(texts, torch.cat(parts, dim=1).split(lengths, dim=1), strict=True)
    return [
        _trace(text, draft_name, _columns(numbers, text, target, draft))
        for text, numbers in per_text
    ]


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


def _logit_chunks(
    player: _Model, texts: Sequence[GeneratedText], chunk: int, *, kept: bool
) -> Iterator[Tensor]:
    """Logits [at most chunk, vocab] that predict the texts' tokens, text after text.

    Args:
        player: whose logits; without halves only a single text is possible.
        texts: the texts.
        chunk: rows at a time.
        kept: whether the texts' stored hidden states are this model's.
    """
    if player.halves is None:
        (text,) = texts
        prompt = text.request.tokens
        player.model.prefill(prompt[:-1])
        for piece in torch.tensor([prompt[-1], *text.tokens[:-1]]).split(chunk):
            yield player.model.forward(piece)
        player.model.prefill([])
        return
    stored = [text.hidden for text in texts if text.hidden is not None] if kept else []
    if len(stored) < len(texts):
        stored = _prefilled(player.model, player.halves, texts)
    for rows in torch.cat(stored).split(chunk):
        yield player.halves.logits(rows)


def _prefilled(
    model: CachedModel, halves: SplitNetwork, texts: Sequence[GeneratedText]
) -> list[Tensor]:
    """Hidden states [n, hidden] behind each text's tokens, from one prefill."""
    fed = [[*text.request.tokens, *text.tokens[:-1]] for text in texts]
    return [
        row[len(text.request.tokens) - 1 :][: len(text.tokens)]
        for row, text in zip(_states(model, halves, fed, PREFILL_POSITIONS), texts, strict=True)
    ]


def _states(
    model: CachedModel, halves: SplitNetwork, fed: Sequence[Sequence[int]], positions: int
) -> Tensor:
    """Final hidden states [rows, width, hidden] of rows that are padded on the right.

    A causal model never looks at what comes after a position, so no mask is needed.

    Args:
        model: whose states.
        halves: it, taken apart.
        fed: token ids of each row.
        positions: of all rows that go through the body at once.
    """
    width = max(len(row) for row in fed)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in fed])
    pieces = ids.to(model.network.device).split(max(1, positions // len(fed)), dim=1)
    if len(pieces) == 1:
        return halves.hidden(input_ids=pieces[0], use_cache=False)
    cache, done = new_cache(model), list[Tensor]()
    for piece in pieces:
        start = sum(states.shape[1] for states in done)
        places = torch.arange(start, start + piece.shape[1], device=piece.device)
        extra = {"position_ids": places.expand(piece.shape)} if model.positions else {}
        done.append(halves.hidden(input_ids=piece, past_key_values=cache, use_cache=True, **extra))
    return torch.cat(done, dim=1)


def _columns(numbers: Tensor, text: GeneratedText, target: _Model, draft: _Model) -> Columns:
    """Name the numbers of one text, refuse what is not finite, take the logarithms."""
    values = numbers.numpy()
    for row, player in zip(values[len(NUMBERS) :], (target, draft), strict=True):
        if not row.all():
            raise broken_logits(player.name, text.request, int(row.argmin()))
    columns: Columns = dict(zip(NUMBERS, values, strict=False))
    with np.errstate(divide="ignore"):
        columns["draft_logprob"] = np.log(columns["draft_logprob"])
    # A token that was drawn has some mass, even where another order of the sums says it has none.
    tiny = float(np.finfo(np.float32).tiny)
    columns["target_logprob"] = np.log(np.maximum(columns["target_logprob"], tiny))
    return columns


def _trace(
    text: GeneratedText,
    draft_name: str,
    columns: Columns,
    proposals: Lookups | None = None,
) -> TextTrace:
    request = text.request
    return TextTrace(
        draft=draft_name,
        draft_temperature=request.sampling.temperature,
        prompt_set=request.prompt_set,
        prompt=request.prompt,
        category=request.category,
        repetition=request.repetition,
        temperature=request.sampling.temperature,
        top_k=request.sampling.top_k,
        top_p=request.sampling.top_p,
        prompt_tokens=len(request.tokens),
        stop_reason=text.stop_reason,
        tokens=np.array(text.tokens, dtype=np.int64),
        target_logprob=columns["target_logprob"],
        draft_logprob=columns["draft_logprob"],
        draft_is_argmax=columns["draft_is_argmax"].astype(np.bool_),
        last_ratio=columns["last_ratio"],
        last_exact_match=columns["last_exact_match"],
        last_greedy_draft=columns["last_greedy_draft"],
        target_entropy=columns["target_entropy"],
        draft_entropy=columns["draft_entropy"],
        matches=proposals.matches if proposals else None,
        proposed=proposals.proposed if proposals else None,
        turn=request.turn,
    )
