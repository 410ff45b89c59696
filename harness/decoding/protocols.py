"""Protocols of the loop: a model, a drafter, and a request.

`harness.models` satisfies these protocols without importing them. A new kind of draft is a look-up
or a head (`harness.engine_facts.draft_kinds`), and seldom one more `Drafter`. Proposals are chains,
in which each token follows the one before: a tree would need a `Proposal` with each token's parent,
a `forward` over such positions, a `rewind` to a branch instead of by a count, a verification
(`harness.decoding.verification`) of branches, and a replay (`harness.theory.replay`) of them.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.decoding.sampling import SamplingParameters, Uniforms, seen_tokens
from harness.records import Rule
from harness.theory.acceptance_rules import ACCEPTANCE_RULES

# (text so far, tokens that follow it) -> the number of these that belong to the text, if it ends
# within them; None where it does not end
StopRule = Callable[[Sequence[int], Sequence[int]], int | None]

Recorded = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Generation:
    """A request; together with the models it determines the emitted tokens.

    Attributes:
        prompt: token ids, at least one.
        budget: tokens to emit at most, at least 1.
        sampling: sampling parameters, the same for the target and the draft.
        uniforms: at least as many entries as `uniforms_needed`.
        num_draft_tokens: K, the tokens to draft in every round; plain decoding ignores it.
        eos: the ids that end a text; that id is emitted.
        stop: ends a text for other reasons than its last token's id.
        rule: the acceptance rule; see `harness.theory.acceptance_rules`.
        synthetic: synthetic acceptance in place of the rule: the chance of each drafted position,
            given that those before it were accepted. The text is then not the target's.
    """

    prompt: Sequence[int]
    budget: int
    sampling: SamplingParameters
    uniforms: Uniforms
    num_draft_tokens: int = 0
    eos: Collection[int] = frozenset()
    stop: StopRule | None = None
    rule: Rule = "ratio"
    synthetic: Sequence[float] | None = None

    def first_uniform(self, position: int) -> int:
        """The first entry of the uniforms of a round that begins at a text position."""
        return position * _uniforms_per_position(self.num_draft_tokens, self.rule)

    def kept(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """The number of `tokens` after `text` up to an end of text and within the budget."""
        end = next((n for n, token in enumerate(tokens, 1) if token in self.eos), len(tokens))
        end = min(end, self.budget - len(text))
        stopped = self.stop(text, tokens[:end]) if self.stop is not None else None
        return end if stopped is None else stopped

    def ends(self, text: Sequence[int], tokens: Sequence[int]) -> bool:
        """True where the generation ends with `tokens`, all of them kept."""
        if tokens[-1] in self.eos or len(text) + len(tokens) >= self.budget:
            return True
        return self.stop is not None and self.stop(text, tokens) is not None


def uniforms_needed(budget: int, k: int, rule: Rule) -> int:
    """The most entries of the uniforms that a generation reads."""
    return budget * _uniforms_per_position(k, rule) + k + 1


def _uniforms_per_position(k: int, rule: Rule) -> int:
    """The entries of the uniforms for each text position.

    One where tokens are judged one by one: the tokens behind a rejected one decided nothing, so
    their uniforms can be used again. Where a round's tokens are judged together, all of them decide
    how many are accepted, so every start has its own uniforms for a whole round.
    """
    return k + 1 if ACCEPTANCE_RULES[rule].judges_together else 1


class CausalModel(Protocol):
    """A causal language model with a cache of one sequence."""

    @property
    def vocab_size(self) -> int:
        """The width of its logits."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its logits."""
        ...

    def prefill(self, tokens: Sequence[int]) -> None:
        """Clear the cache and fill it with `tokens`, which may be empty."""
        ...

    def forward(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [n] to the cache; return the logits after each, [n, vocab]."""
        ...

    def rewind(self, count: int) -> None:
        """Remove the last `count` cached tokens. It is called once a round, also with 0."""
        ...


class Proposal(NamedTuple):
    """The proposal of a drafter for one round.

    Attributes:
        tokens: [n] token ids on the target's device, n <= K.
        probs: [n, vocab] the distribution each token was sampled from; None where tokens were not
            sampled (an argmax, a looked-up n-gram), so that each has all mass.
        checks: [n] numbers that are finite exactly where the logits behind the token were, for
            `sampling.unless_broken`; None where no model proposes.
    """

    tokens: Tensor
    probs: Tensor | None
    checks: Tensor | None = None


class Drafter(Protocol):
    """A drafter: it proposes the tokens that the target verifies."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation: prefill with prompt[:-1]; the last token is pending."""
        ...

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        """Propose up to `count` tokens; `uniforms` [count] in (0, 1] decide the draws."""
        ...

    def advance(self, proposal: Proposal, accepted: int, next_token: Tensor) -> None:
        """End the round: the first `accepted` tokens are emitted, then `next_token` [1]."""
        ...


class Recorder(Protocol):
    """A model that can record forwards with the work on their logits, and replay these at once."""

    def knows(self, key: Hashable) -> bool:
        """True where work under this key has been recorded."""
        ...

    def recorded(
        self, key: Hashable, work: Callable[..., Recorded], *inputs: Tensor | None
    ) -> Recorded:
        """The result of `work(*inputs)`, which may call `forward`.

        All calls with one key must have the same input shapes, and the same `work`.
        """
        ...


def recorded(
    model: CausalModel, key: Hashable, work: Callable[..., Recorded], *inputs: Tensor | None
) -> Recorded:
    """The result of `work(*inputs)`, as one recorded launch where `model` is a Recorder.

    `work` must be a function of its inputs and of `model` alone, without host reads, and its shapes
    must depend only on the inputs' shapes.
    """
    recorder = recorder_of(model)
    return work(*inputs) if recorder is None else recorder.recorded(key, work, *inputs)


def recorder_of(model: CausalModel) -> Recorder | None:
    """The model as a Recorder, or None where it is not one.

    It does not use isinstance, which takes 10 us of a round with a runtime protocol.
    """
    return getattr(model, "recorder", None)


def seen_by(
    model: CausalModel, tokens: Sequence[int], sampling: SamplingParameters
) -> Tensor | None:
    """The tokens that a repetition penalty applies to, [vocab] bool; None without a penalty."""
    if sampling.repetition_penalty is None:
        return None
    return seen_tokens(tokens, model.vocab_size, model.device)
