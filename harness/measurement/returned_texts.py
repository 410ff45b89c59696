"""What an engine returned, for the loaded pair to score: the input of replay.

An engine's uniforms are its own, so its texts above temperature 0 are not ours. They need not be:
replay asks for the expected rounds of a given text, whoever drew it. What is scored is what rounds
emitted (`ReturnedText.decoded`), from the position at which the engine's rounds begin and with the
drafts that it proposes near the budget (`harness.serving.round_counting`). At temperature 0, and
where the draft proposes its argmax, rounds and drafted tokens are then equal to the engine's
counts; where it samples they are expectations.

`likelihood_test` asks whether the texts are the target's at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harness.decoding.sampling import penalised_along, sampler_for
from harness.engines.protocol import Completion, EngineFacts
from harness.measurement.generations import Request
from harness.measurement.target_texts import GeneratedText
from harness.models.cached import CachedModel
from harness.summary import TextLikelihood

# A greedy token whose log-probability is further below the best is not the target's
FAR_NATS = 0.25


@dataclass(frozen=True)
class ReturnedText:
    """What an engine returned to a request."""

    request: Request
    completion: Completion

    def decoded(self, facts: EngineFacts) -> GeneratedText:
        """The part that rounds emitted, after a prompt that holds the rest."""
        assert facts.spec.counting is not None
        request, tokens = self.request, self.completion.tokens
        rounds_emitted = tuple(facts.spec.counting.decoded(tokens))
        before = tokens[: len(tokens) - len(rounds_emitted)]
        after_prefill = replace(
            request, tokens=(*request.tokens, *before), budget=request.budget - len(before)
        )
        return GeneratedText(after_prefill, rounds_emitted, self.completion.stop_reason)


@torch.inference_mode()
def likelihood_test(texts: Sequence[ReturnedText], target: CachedModel) -> TextLikelihood:
    """Test texts of one K and temperature above 0, the prefill's token included.

    A token that top-k, top-p or min-p exclude counts with its probability before they apply: which
    of two tokens at the edge they exclude is a matter of rounding in 16 bits.
    """
    first = texts[0].request
    tokens, sums = 0, np.zeros(4)
    for text in texts:
        sampling, returned = text.request.sampling, torch.tensor(text.completion.tokens)
        logits = _logits_along(text, target)
        probs = sampler_for(sampling)(logits).double().cpu()
        unfiltered = (logits.double() / sampling.temperature).log_softmax(-1).cpu()
        logs = torch.where(probs > 0, probs.log(), unfiltered)
        drawn = logs.gather(-1, returned[:, None]).squeeze(-1)
        # Of excluded tokens an infinite logarithm (a token that a model suppresses) counts nothing
        surprise = torch.where(probs > 0, logs, 0.0)
        mean = (probs * surprise).sum(-1)
        centred = surprise - mean[:, None]
        variance, third = ((probs * centred**power).sum(-1) for power in (2, 3))
        sums += [float(part.sum()) for part in (drawn - mean, variance, drawn, third)]
        tokens += len(returned)
    return TextLikelihood(
        first.sampling.temperature, first.k, tokens, *(float(each) for each in sums)
    )


@torch.inference_mode()
def unlikely_share(texts: Sequence[ReturnedText], target: CachedModel) -> float:
    """The share of greedy texts' tokens that are far from the target's likeliest one.

    Rounding, and weights in fewer bits, move a token past one that is nearly as likely. The share
    of the embedded target's own texts is 0, of those of its weights in 3 bits 4 %, and of texts of
    the models that were trained on the same answers 15 to 50 %.
    """
    far, tokens = 0, 0
    for text in texts:
        logits = _logits_along(text, target).float()
        returned = torch.tensor(text.completion.tokens, device=logits.device)
        behind = logits.max(-1).values - logits.gather(-1, returned[:, None]).squeeze(-1)
        far += int((behind > FAR_NATS).sum())
        tokens += len(returned)
    return far / tokens if tokens else 0.0


def _logits_along(text: ReturnedText, target: CachedModel) -> Tensor:
    """The logits that decide each returned token, [n, vocab], with the repetition penalty."""
    request, returned = text.request, text.completion.tokens
    target.prefill(request.tokens[:-1])
    fed = torch.tensor([request.tokens[-1], *returned[:-1]], device=target.device)
    penalty = request.sampling.repetition_penalty
    return penalised_along(target.forward(fed), request.tokens, fed[1:], penalty)
