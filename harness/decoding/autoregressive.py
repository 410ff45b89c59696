"""Plain decoding: one target step per token. The baseline that speculation is compared with."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, recorded
from harness.decoding.sampling import Noise, Warping, host_tokens, inverse_cdf, sampler_for
from harness.records import Round


def autoregressive_rounds(
    target: CausalModel,
    last_token: int,
    *,
    budget: int,
    eos: Collection[int],
    warping: Warping,
    noise: Noise,
) -> Iterator[Round]:
    """Yield one step per emitted token until end-of-text or the budget.

    Args:
        target: its cache holds prompt[:-1].
        last_token: prompt[-1].
        budget: tokens to emit at most.
        eos: the ids that end the text; the one that does is emitted.
        warping: temperature, top-k, top-p.
        noise: at least `budget` positions.
    """
    probabilities = None if warping.greedy else sampler_for(warping)

    def step(last: Tensor, uniform: Tensor) -> tuple[Tensor]:
        logits = target.forward(last)
        if probabilities is None:
            return (logits.argmax(-1),)
        return (inverse_cdf(probabilities(logits), uniform),)

    last = torch.tensor([last_token], device=target.device)
    for position in range(budget):
        uniform = noise.resample[position : position + 1]
        (last,) = recorded(target, ("step", probabilities), step, last, uniform)
        assert last is not None
        # The step's one host read
        (token,) = host_tokens(last)
        target.rewind(0)
        yield Round((token,), 0, 0, "step")
        if token in eos:
            return
