"""Drafters: whoever proposes tokens, behind the one protocol of protocols.py.

A new way of drafting is one more class with `begin`, `propose` and `advance`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, Proposal, recorded, recorder_of
from harness.decoding.sampling import (
    SamplingParameters,
    inverse_cdf,
    penalised,
    sampler_for,
    seen_tokens,
)
from harness.records import Rule


class ModelDrafter:
    """A smaller causal model that proposes token by token.

    Its cache holds every token it has been fed. Between rounds it lags the text by one token (the
    correction), or by two after a full acceptance (the last draft token was never fed, then the
    bonus); these are `pending` and go in together as the next round's first forward.
    """

    def __init__(
        self, model: CausalModel, sampling: SamplingParameters, rule: Rule = "ratio"
    ) -> None:
        """Wrap `model`; `greedy_draft` proposes the argmax at any temperature."""
        self._model = model
        chooses = sampling.greedy or rule == "greedy_draft"
        self._probabilities = None if chooses else sampler_for(sampling)
        self._pending = torch.empty(0, dtype=torch.long, device=model.device)
        self._penalty = sampling.repetition_penalty
        # What a repetition penalty applies to; None where there is none
        self._seen: Tensor | None = None

    def prepare(self, count: int) -> None:
        """Let a recording model record `count` drafts, after a rejection and after a bonus.

        Otherwise the first round after a full acceptance would be recorded while it is timed.
        """
        recorder, home = recorder_of(self._model), self._model.device
        for length in (1, 2):
            if recorder is None or recorder.knows(self._key(length, count)):
                continue
            self._model.prefill([])
            self._note([])
            self._pending = torch.zeros(length, dtype=torch.long, device=home)
            self.propose(count, torch.full((count,), 0.5, dtype=torch.float64, device=home))

    def begin(self, prompt: Sequence[int]) -> None:
        """Fill the cache with prompt[:-1]; the last token is pending."""
        self._model.prefill(prompt[:-1])
        self._note(prompt)
        self._pending = torch.tensor(prompt[-1:], device=self._model.device)

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        """Propose exactly `count` tokens, on the uniforms' device; nothing is read to the host."""
        feed, draws = self._pending, uniforms.to(self._model.device)
        key = self._key(len(feed), count)
        tokens, laws, checks = recorded(self._model, key, self._steps, feed, draws, self._seen)
        assert tokens is not None
        assert checks is not None
        home = uniforms.device
        return Proposal(tokens.to(home), None if laws is None else laws.to(home), checks.to(home))

    def _key(self, pending: int, count: int) -> tuple[object, ...]:
        return ("propose", self._probabilities, self._penalty, pending, count)

    def _note(self, prompt: Sequence[int]) -> None:
        """Set the seen tokens to those of the prompt, for a repetition penalty."""
        if self._penalty is not None:
            self._seen = seen_tokens(prompt, self._model.vocab_size, self._model.device)

    def _steps(
        self, feed: Tensor, draws: Tensor, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """One forward per draw: the tokens [count], the laws [count, vocab] if drawn, the checks.

        Where logits are not finite the token is still a valid id, which can be fed.
        """
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        peaks: list[Tensor] = []
        for draw in draws.unsqueeze(1).unbind():
            logits = self._model.forward(feed)
            if len(feed) > 1:
                logits = logits[-1:]
            logits = penalised(logits, seen, self._penalty)
            if self._probabilities is None:
                peak, feed = logits.max(-1)
                peaks.append(peak)
            else:
                law = self._probabilities(logits)
                feed = inverse_cdf(law, draw)
                laws.append(law)
            if seen is not None:
                seen = seen.index_fill(0, feed, True)
            tokens.append(feed)
        if not laws:
            return torch.cat(tokens), None, torch.cat(peaks)
        drawn_from = torch.cat(laws)
        return torch.cat(tokens), drawn_from, drawn_from[:, 0]

    def advance(self, proposal: Proposal, accepted: int, next_token: Tensor) -> None:
        """Forget what was rejected and take note of what is to be fed next."""
        count = proposal.tokens.shape[0]
        home = self._model.device
        if self._seen is not None:
            emitted = torch.cat([proposal.tokens[:accepted], next_token]).to(home)
            self._seen.index_fill_(0, emitted, True)
        if accepted == count:
            self._model.rewind(0)
            self._pending = torch.cat([proposal.tokens[-1:], next_token]).to(home)
        else:
            self._model.rewind(count - 1 - accepted)
            self._pending = next_token.to(home)
