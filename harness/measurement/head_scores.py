"""Score the target's texts with a head: its drafts from every start of each text.

While drafted tokens are accepted they are the text's, so a head can be run on the text itself: the
j-th drafts from all starts are one pass (`HeadNetwork.passes`). The target's states that it reads
come from one prefill of the target, and above temperature 0 its final ones, which its logits are
made of. So a text costs one prefill of the target and K of a head that drafts token by token; a
block drafter gives all drafts from a start at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.measurement.draft_scores import (
    Distribution,
    DraftSampling,
    ScoredModel,
    Scores,
    as_target,
    compared,
    scored_model,
    target_chunks,
    trace_of,
)
from harness.measurement.target_texts import GeneratedText, broken_logits
from harness.models.cached import CachedModel
from harness.models.heads.base import Head
from harness.records import TextTrace


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

    `num_draft_tokens` is the largest K that is to be replayed; for the rest see `score_texts`.
    """
    if not texts:
        return []
    scored = scored_model(target, target_shown, texts[0].request.tokens)
    traces: list[TextTrace] = []
    for text in texts:
        scores, proposed = _score(text, scored, head, num_draft_tokens, draft_sampling, chunk)
        for column, name in (
            (scores.target_finite, target_shown),
            (scores.draft_finite, draft_shown),
        ):
            starts, offsets = np.nonzero(column == 0.0)
            if len(starts):
                raise broken_logits(name, text.request, int((starts + offsets).min()))
        traces.append(trace_of(text, draft_name, scores, proposed))
        tick()
    return traces


def _score(
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
    states, text = _prefilled(text, target, head)
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


def _prefilled(
    text: GeneratedText, target: ScoredModel, head: Head
) -> tuple[Tensor, GeneratedText]:
    """The target's states [tokens but the last, width] that the head reads, from one prefill.

    Where the text's logits are needed, and can be made of final hidden states, it is returned with
    these.
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
