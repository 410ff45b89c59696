"""Plain decoding: one target step per token. The baseline that speculation is compared with."""

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, Generation, recorded, seen_by
from harness.decoding.sampling import (
    host_tokens,
    inverse_cdf,
    most_likely,
    penalised,
    sampler_for,
    unless_broken,
)
from harness.records import BrokenLogitsError, Round


def autoregressive_rounds(target: CausalModel, generation: Generation) -> Iterator[Round]:
    """Yield one step per emitted token until an end of text or the budget.

    The target's cache must hold prompt[:-1].

    Raises:
        BrokenLogitsError: the target's logits are not finite.
    """
    sampling, resample = generation.sampling, generation.uniforms.resample
    probabilities = None if sampling.greedy else sampler_for(sampling)
    penalty = sampling.repetition_penalty
    seen = seen_by(target, generation.prompt, sampling)

    def step(last: Tensor, uniform: Tensor, seen: Tensor | None) -> tuple[Tensor]:
        logits = penalised(target.forward(last), seen, penalty)
        if probabilities is None:
            return (most_likely(logits),)
        probs = probabilities(logits)
        return (unless_broken(inverse_cdf(probs, uniform), probs[:, 0]),)

    last = torch.tensor(generation.prompt[-1:], device=target.device)
    text: list[int] = []
    while True:
        uniform = resample[len(text) : len(text) + 1]
        (last,) = recorded(target, ("step", probabilities, penalty), step, last, uniform, seen)
        assert last is not None
        if seen is not None:
            seen.index_fill_(0, last, True)
        # The step's one host read
        (token,) = host_tokens(last)
        if token < 0:
            raise BrokenLogitsError("target", len(text))
        target.rewind(0)
        yield Round((token,), 0, 0, "step")
        if generation.ends(text, (token,)):
            return
        text.append(token)
