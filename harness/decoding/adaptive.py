"""Adaptive drafting: stop a round's draft when the draft itself has become unsure.

Whether a later position is drafted depends on what was drafted before it alone, the unsure token
included, which is still proposed. So every proposed token is kept or corrected by the same rule as
ever, and the emitted text has the target's law. (Dropping the unsure token instead would keep only
draws that the draft was sure of, and bias the law.)
"""

import torch
from torch import Tensor

from harness.decoding.drafters import ModelDrafter
from harness.decoding.protocols import CausalModel, Proposal
from harness.decoding.sampling import SamplingParameters, inverse_cdf, penalised
from harness.records import Rule


class ThresholdDrafter(ModelDrafter):
    """A model that drafts up to K tokens, and no more after one that it gave little probability.

    The rule of transformers' `assistant_confidence_threshold`
    (generation/stopping_criteria.py, `ConfidenceCriteria`). It costs one host read per draft step,
    where a draft of fixed length needs none.
    """

    def __init__(
        self,
        model: CausalModel,
        sampling: SamplingParameters,
        rule: Rule = "ratio",
        threshold: float = 0.4,
    ) -> None:
        """Wrap `model`; `threshold` is in [0, 1], and 0 never stops."""
        super().__init__(model, sampling, rule)
        self._threshold = threshold

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        """Propose 1 to `count` tokens."""
        feed, draws, seen = self._pending, uniforms.to(self._model.device), self._seen
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        checks: list[Tensor] = []
        for index in range(count):
            logits = penalised(self._model.forward(feed)[-1:], seen, self._penalty)
            if self._probabilities is None:
                law = torch.softmax(logits.float(), dim=-1)
                feed = logits.argmax(-1)
            else:
                law = self._probabilities(logits)
                feed = inverse_cdf(law, draws[index : index + 1])
                laws.append(law)
            if seen is not None:
                seen = seen.index_fill(0, feed, True)
            tokens.append(feed)
            checks.append(law[:, 0])
            if index + 1 < count and float(law[0, feed].item()) < self._threshold:
                break
        home = uniforms.device
        return Proposal(
            torch.cat(tokens).to(home),
            torch.cat(laws).to(home) if laws else None,
            torch.cat(checks).to(home),
        )
