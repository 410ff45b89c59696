"""What an engine returned, for the loaded pair to score: the input of replay.

An engine's uniforms are its own, so its texts above temperature 0 are not ours. They need not be:
replay asks for the expected rounds of a given text, whoever drew it. What is scored is what rounds
emitted (`ReturnedText.decoded`), from the position at which the engine's rounds begin and with the
drafts that it proposes near the budget (`harness.serving.counting`). At temperature 0, and where
the draft proposes its argmax, rounds and drafted tokens are then equal to the engine's counts;
where it samples they are expectations.

`likelihood_test` asks whether the texts are the target's at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from harness.decoding.sampling import sampler_for
from harness.engines.protocol import Completion, EngineFacts
from harness.measurement.generations import Request
from harness.measurement.target_texts import GeneratedText
from harness.models.cached import CachedModel
from harness.summary import TextLikelihood


@dataclass(frozen=True)
class ReturnedText:
    """What an engine returned to a request."""

    request: Request
    completion: Completion

    def decoded(self, facts: EngineFacts) -> GeneratedText:
        """The part that rounds emitted, after a prompt that holds the rest."""
        assert facts.counting is not None
        request, tokens = self.request, self.completion.tokens
        rounds_emitted = tuple(facts.counting.decoded(tokens))
        before = tokens[: len(tokens) - len(rounds_emitted)]
        after_prefill = replace(
            request, tokens=(*request.tokens, *before), budget=request.budget - len(before)
        )
        return GeneratedText(after_prefill, rounds_emitted, self.completion.stop_reason)


@torch.inference_mode()
def likelihood_test(texts: Sequence[ReturnedText], target: CachedModel) -> TextLikelihood:
    """Test texts of one K and temperature above 0, the prefill's token included."""
    first = texts[0].request
    tokens, sums = 0, np.zeros(3)
    for text in texts:
        request, returned = text.request, torch.tensor(text.completion.tokens)
        target.prefill(request.tokens[:-1])
        fed = torch.tensor([request.tokens[-1], *text.completion.tokens[:-1]])
        probs = sampler_for(request.sampling)(target.forward(fed.to(target.device))).double().cpu()
        logs = probs.clamp_min(torch.finfo(torch.float32).tiny).log()
        drawn = logs.gather(-1, returned[:, None]).squeeze(-1)
        mean = (probs * logs).sum(-1)
        variance = (probs * logs.square()).sum(-1) - mean.square()
        sums += [float(part.sum()) for part in (drawn - mean, variance, drawn)]
        tokens += len(returned)
    return TextLikelihood(
        first.sampling.temperature, first.k, tokens, *(float(each) for each in sums)
    )
