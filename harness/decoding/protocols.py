"""Protocols of the loop: a model, a drafter, and a request.

`harness.models` satisfies these protocols without importing them. A new kind of draft is a look-up
or a head (`harness.serving.drafts`), and seldom one more `Drafter`. Proposals are chains, in which
each token follows the one before: a tree would need a `Proposal` with each token's parent, a
`forward` over such positions, a `rewind` to a branch instead of by a count, a verification
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

# (text so far, tokens that follow it) -> how many of these still belong to the text, if it ends
# within them; None where it does not end.
StopRule = Callable[[Sequence[int], Sequence[int]], int | None]

Recorded = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Generation:
    """A request: with the models, all that determines the emitted tokens.

    Attributes:
        prompt: token ids, at least one.
        budget: tokens to emit at most, at least 1.
        sampling: sampling parameters, alike for the target and the draft.
        uniforms: at least as many entries as `uniforms_needed`.
        num_draft_tokens: K, asked of the drafter in every round; plain decoding ignores it.
        eos: the ids that end a text; the one that does is emitted.
        stop: ends a text for other reasons than its last token's id.
        rule: which draft tokens are accepted; see `harness.theory.acceptance_rules`.
        synthetic: acceptance that is set instead of decided by the rule: the chance of each drafted
            position, given that those before it were accepted. The text is then not the target's.
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
        """The entry of the uniforms from which on a round reads that begins at a text position."""
        return position * _uniforms_per_position(self.num_draft_tokens, self.rule)

    def kept(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """The number of `tokens` after `text` that an end of text and the budget leave."""
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
    """Entries of the uniforms that a generation reads at most."""
    return budget * _uniforms_per_position(k, rule) + k + 1


def _uniforms_per_position(k: int, rule: Rule) -> int:
    """One where what lies behind a rejected token decided nothing, so that it can be drawn again.

    Where tokens are judged together, all that a round drafted decides how many stand. What is drawn
    again with the same uniforms then depends on that, so each start has its own for a whole round.
    """
    return k + 1 if ACCEPTANCE_RULES[rule].judges_together else 1


class CausalModel(Protocol):
    """A causal language model with a cache of one sequence."""

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its logits live."""
        ...

    def prefill(self, tokens: Sequence[int]) -> None:
        """Forget everything and fill the cache with `tokens` (which may be empty)."""
        ...

    def forward(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [n] to the cache; return the logits after each, [n, vocab]."""
        ...

    def rewind(self, count: int) -> None:
        """Forget the last `count` cached tokens. Called once a round, with 0 as well."""
        ...


class Proposal(NamedTuple):
    """The proposal of a drafter for one round.

    Attributes:
        tokens: [n] token ids on the target's device, n <= K.
        probs: [n, vocab] the distribution each token was drawn from, or None where a token was not
            drawn but chosen (an argmax, a looked-up n-gram): all mass is then on that token.
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
        """Learn how the round ended: the first `accepted` stand, then `next_token` [1] follows."""
        ...


class Recorder(Protocol):
    """A model that can record what is done with its logits, and replay it as one launch."""

    def knows(self, key: Hashable) -> bool:
        """True where work under this key has been recorded."""
        ...

    def recorded(
        self, key: Hashable, work: Callable[..., Recorded], *inputs: Tensor | None
    ) -> Recorded:
        """Do `work(*inputs)`, which may call `forward`, and return what it returns.

        Under one key the inputs' shapes and whatever else `work` knows must be the same.
        """
        ...


def recorded(
    model: CausalModel, key: Hashable, work: Callable[..., Recorded], *inputs: Tensor | None
) -> Recorded:
    """Do `work(*inputs)`, as one recorded launch where `model` is a Recorder.

    `work` must be a function of its inputs and of `model` alone: it asks the host nothing, and its
    shapes depend on nothing but the inputs' shapes.
    """
    recorder = recorder_of(model)
    return work(*inputs) if recorder is None else recorder.recorded(key, work, *inputs)


def recorder_of(model: CausalModel) -> Recorder | None:
    """The model as a Recorder, or None where it is not one.

    Not by isinstance: a runtime protocol is looked through anew at every call, 10 us of a round.
    """
    return getattr(model, "recorder", None)


def seen_by(
    model: CausalModel, tokens: Sequence[int], sampling: SamplingParameters
) -> Tensor | None:
    """The tokens that a penalty applies to after `tokens`, [vocab] bool; None without a penalty."""
    if sampling.repetition_penalty is None:
        return None
    return seen_tokens(tokens, model.vocab_size, model.device)
