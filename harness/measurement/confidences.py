"""Confidences of a draft in what it drafts, which a threshold needs besides its scores.

At a threshold (`p_min`) a round drafts no more after a token that the draft was unsure of. Along
the target's text its probabilities are those of the scores. Where a drafted token is not the
text's, the drafter goes on from its own: so the draft is let draft on, off the text, as far as the
least threshold and the largest K allow. At temperature 0 it leaves the text only where its argmax
is another token. Above, the first token is drawn from what the draft would have drawn, given that
the acceptance rule rejected it; the correction does not depend on it.

What a model drafts depends on the text before it alone. So it leaves the text once at every
position, for all starts: one step per token of the text, and up to K - 1 from each position where
it may leave. A head drafts from its own output within a round. So from every start one round is
drawn, given what the target emitted: up to K steps of the head per token of the text.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoding.drafters import HeadModel, StateModel
from harness.decoding.protocols import CausalModel
from harness.decoding.sampling import Uniforms, inverse_cdf, sampler_for
from harness.measurement.target_texts import GeneratedText
from harness.records import DraftConfidence, Rule
from harness.theory.acceptance_rules import ACCEPTANCE_RULES

# Text positions whose target distributions are in memory at a time
CHUNK = 64

Values = NDArray[np.float64]


@torch.inference_mode()
def draft_confidences(
    texts: Sequence[GeneratedText],
    target: CausalModel | None,
    draft: CausalModel | HeadModel,
    *,
    draft_name: str,
    rule: Rule,
    num_draft_tokens: int,
    least: float,
    tick: Callable[[], None] = lambda: None,
) -> list[DraftConfidence]:
    """Let a draft model leave each text at every position, or a head draft a round from there.

    Args:
        texts: sampled without a repetition penalty.
        target: the model that generated them, which keeps the states that a head reads; for a
            draft model, only a rule that rejects by `excess` above temperature 0 needs it.
        draft: distributions are over the narrower vocabulary of the two.
        rule: how its tokens are accepted; one whose rejected tokens are not `unknown`.
        num_draft_tokens: the largest K.
        least: no threshold below it is replayed.
    """
    assert ACCEPTANCE_RULES[rule].rejected != "unknown"
    width = draft.vocab_size
    if target is not None and not isinstance(draft, HeadModel):
        width = min(width, target.vocab_size)
    made: list[DraftConfidence] = []
    for text in texts:
        drafting = _Drafting(text, target, rule, width, num_draft_tokens, least)
        is_head = isinstance(draft, HeadModel)
        values = drafting.of_rounds(draft) if is_head else drafting.of_text(draft)
        made.append(confidence_of(text, draft_name, values))
        tick()
    return made


def confidence_of(text: GeneratedText, draft_name: str, values: Values) -> DraftConfidence:
    key = text.request.key
    names = (draft_name, key.prompt_set, key.prompt, key.repetition)
    return DraftConfidence(*names, key.temperature, values)


@dataclass(frozen=True)
class _Drafting:
    """Drafting along a text and off it, and the acceptance of its tokens.

    `width` is of the vocabulary that both models have; for the rest see `draft_confidences`.
    """

    text: GeneratedText
    target: CausalModel | None
    rule: Rule
    width: int
    count: int
    least: float

    def of_text(self, draft: CausalModel) -> Values:
        """[n + 1, K] of a model; see `DraftConfidence`."""
        request, tokens, count = self.text.request, self.text.tokens, self.count
        uniforms = self.uniforms((len(tokens) + 1) * count, draft.device).draft
        target_rows = self.target_rows()
        values = np.full((len(tokens) + 1, count), np.nan)
        draft.prefill(request.tokens[:-1])
        feed = torch.tensor(request.tokens[-1:], device=draft.device)
        for position in range(len(tokens) + 1):
            row = self.distribution(draft.forward(feed)[-1:, : self.width])
            draft.rewind(0)
            emitted = tokens[position] if position < len(tokens) else None
            draw = uniforms[position * count : (position + 1) * count]
            if self.chooses:
                first = row.argmax(-1)
                leaves = int(first) != emitted
            else:
                weights = self.rejected(row, next(target_rows, None), emitted)
                first = inverse_cdf(weights, draw[:1])
                leaves = float(weights.sum()) > 0.0
            if leaves or self.chooses:
                values[position, 0] = float(row[0, first])
            if leaves:
                values[position, 1:] = self.onwards(draft, first, values[position, 0], draw[1:])
            if emitted is not None:
                feed = torch.tensor([emitted], device=draft.device)
        return values

    def of_rounds(self, head: HeadModel) -> Values:
        """[n, K] of a head; see `DraftConfidence`. NaN where it drafts nothing."""
        request, tokens = self.text.request, self.text.tokens
        count, target = self.count, self.target
        assert isinstance(target, StateModel)
        uniforms = self.uniforms(len(tokens) * count, head.device)
        ids = torch.tensor([*request.tokens, *tokens])
        target.prefill(ids[:-1].tolist())
        states = target.states
        assert states is not None
        rows = self.target_rows()
        # The target's distributions from the start on
        ahead = deque(islice(rows, count))

        def token_of(row: Tensor, offset: int, emitted: int | None, draw: int) -> Tensor:
            if self.chooses:
                return row.argmax(-1)
            target_row = ahead[offset] if offset < len(ahead) else None
            if emitted is not None:
                chance = self.accepted(row, target_row, emitted)
                if float(uniforms.accept[draw]) <= chance:
                    return torch.tensor([emitted], device=row.device)
            weights = self.rejected(row, target_row, emitted)
            return inverse_cdf(weights, uniforms.draft[draw : draw + 1])

        # Row t takes the state at t and token t + 1, and predicts token t + 2
        first = max(0, len(request.tokens) - 2)
        most = count if head.drafts is None else min(count, head.drafts)
        head.start(ids[:1].tolist())
        if first:
            head.condition(states[:first])
            head.extend(ids[1 : first + 1])
        values = np.full((len(tokens), count), np.nan)
        for start in range(len(tokens)):
            row = len(request.tokens) + start - 2
            if row >= 0:
                head.condition(states[row : row + 1], most)
                feed, on_text, offset = ids[row + 1 : row + 2], True, 0
                for offset in range(most):
                    probs = self.distribution(head.forward(feed)[-1:])
                    on_text = on_text and start + offset < len(tokens)
                    emitted = tokens[start + offset] if on_text else None
                    feed = token_of(probs, offset, emitted, start * count + offset)
                    on_text = int(feed) == emitted
                    values[start, offset] = float(probs[0, feed])
                    if values[start, offset] < self.least:
                        values[start, offset + 1 :] = 0.0
                        break
                head.rewind(offset)
            if ahead:
                ahead.popleft()
                ahead.extend(islice(rows, 1))
        return values

    def onwards(
        self, draft: CausalModel, token: Tensor, confidence: float, draws: Tensor
    ) -> list[float]:
        """Confidences of what is drafted after a token; 0 where no threshold drafts so far."""
        values: list[float] = []
        while len(values) < len(draws) and not confidence < self.least:  # a NaN is kept as one
            row = self.distribution(draft.forward(token)[-1:, : self.width])
            draw = draws[len(values) : len(values) + 1]
            token = row.argmax(-1) if self.chooses else inverse_cdf(row, draw)
            confidence = float(row[0, token])
            values.append(confidence)
        draft.rewind(len(values))
        return values + [0.0] * (len(draws) - len(values))

    @cached_property
    def chooses(self) -> bool:
        """True where the draft chooses its tokens, and does not draw them."""
        return self.text.request.sampling.greedy or ACCEPTANCE_RULES[self.rule].draft_chooses

    @cached_property
    def distribution(self) -> Callable[[Tensor], Tensor]:
        """The function from logits to the distribution that the draft's confidence is of."""
        if self.chooses:  # as `ModelDrafter` reads the confidence of a token that it chooses
            return lambda logits: torch.softmax(logits.float(), dim=-1)
        return sampler_for(self.text.request.sampling)

    def uniforms(self, draws: int, device: torch.device) -> Uniforms:
        request = self.text.request
        name = f"{request.text_name}/confidence"
        return Uniforms.keyed(request.seed, name, request.repetition, draws, device)

    def accepted(self, row: Tensor, target_row: Tensor | None, emitted: int) -> float:
        """The chance that the draft's token was the emitted one, and accepted, given that one."""
        share = float(row[0, emitted])
        if ACCEPTANCE_RULES[self.rule].rejected == "excess":
            assert target_row is not None
            weight = float(target_row[0, emitted])
            return 1.0 if share >= weight else share / weight
        return share

    def rejected(self, row: Tensor, target_row: Tensor | None, emitted: int | None) -> Tensor:
        """The draft's distribution [1, vocab], not normalised, of a token that was rejected.

        Beyond the text's end nothing is judged, and it is the draft's own.
        """
        if emitted is None:
            return row
        if ACCEPTANCE_RULES[self.rule].rejected == "excess":
            assert target_row is not None
            return (row - target_row.to(row.device)).clamp_min(0.0)
        others = row.clone()
        others[0, emitted] = 0.0
        return others

    def target_rows(self) -> Iterator[Tensor]:
        """The target's distributions [1, width] at the text's tokens, if the rule compares them."""
        request, target = self.text.request, self.target
        if request.sampling.greedy or ACCEPTANCE_RULES[self.rule].rejected != "excess":
            return
        assert target is not None
        sampler = sampler_for(request.sampling)
        target.prefill(request.tokens[:-1])
        fed = torch.tensor([*request.tokens[-1:], *self.text.tokens[:-1]], device=target.device)
        for piece in fed.split(CHUNK):
            rows = sampler(target.forward(piece)[:, : self.width])
            target.rewind(0)
            yield from rows.split(1)
