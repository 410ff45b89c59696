"""Plain decoding: one target step per token. The baseline that speculation is compared with."""

from collections.abc import Collection, Iterator

import torch

from harness.decoding.protocols import CausalModel
from harness.decoding.sampling import Noise, Warping, inverse_cdf, sampler_for
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
    last = torch.tensor([last_token], device=target.device)
    for position in range(budget):
        logits = target.forward(last)
        if probabilities is None:
            last = logits.argmax(-1)
        else:
            last = inverse_cdf(probabilities(logits), noise.resample[position : position + 1])
        token = int(last.item())
        target.rewind(0)
        yield Round((token,), 0, 0, "step")
        if token in eos:
            return
