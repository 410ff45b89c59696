"""Plain decoding: one target step per token. The baseline that speculation is compared with."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, StopRule, recorded
from harness.decoding.sampling import (
    SamplingParameters,
    Uniforms,
    host_tokens,
    inverse_cdf,
    most_likely,
    penalised,
    sampler_for,
    unless_broken,
)
from harness.records import BrokenLogitsError, Round


def autoregressive_rounds(
    target: CausalModel,
    last_token: int,
    *,
    budget: int,
    eos: Collection[int],
    sampling: SamplingParameters,
    uniforms: Uniforms,
    seen: Tensor | None = None,
    stop: StopRule | None = None,
) -> Iterator[Round]:
    """Yield one step per emitted token until end-of-text or the budget.

    Args:
        target: its cache holds prompt[:-1].
        last_token: prompt[-1].
        budget: tokens to emit at most.
        eos: the ids that end the text; the one that does is emitted.
        sampling: temperature, top-k, top-p, min-p, repetition penalty.
        uniforms: at least `budget` positions.
        seen: [vocab] which tokens the prompt holds; needed for a repetition penalty, and changed.
        stop: ends a text for other reasons than its last token's id.

    Raises:
        BrokenLogitsError: the target's logits are not finite.
    """
    probabilities = None if sampling.greedy else sampler_for(sampling)
    penalty = sampling.repetition_penalty

    def step(last: Tensor, uniform: Tensor, seen: Tensor | None) -> tuple[Tensor]:
        logits = penalised(target.forward(last), seen, penalty)
        if probabilities is None:
            return (most_likely(logits),)
        probs = probabilities(logits)
        return (unless_broken(inverse_cdf(probs, uniform), probs[:, 0]),)

    last = torch.tensor([last_token], device=target.device)
    text: list[int] = []
    for position in range(budget):
        uniform = uniforms.resample[position : position + 1]
        (last,) = recorded(target, ("step", probabilities, penalty), step, last, uniform, seen)
        assert last is not None
        if seen is not None:
            seen.index_fill_(0, last, True)
        # The step's one host read
        (token,) = host_tokens(last)
        if token < 0:
            raise BrokenLogitsError("target", position)
        target.rewind(0)
        yield Round((token,), 0, 0, "step")
        if token in eos or (stop is not None and stop(text, (token,)) is not None):
            return
        text.append(token)
