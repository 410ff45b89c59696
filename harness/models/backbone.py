"""A network as backbone and output head, so that vocabulary-wide logits are made only where needed.

A final hidden state is some thousand numbers, a row of logits some hundred thousand: texts can be
kept as hidden states and turned into logits a few rows at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from harness.models.cached import CachedModel
from harness.models.memory import is_out_of_memory

# The head on the same hidden states repeats the same sums; soft caps and scales are far from that.
SAME_LOGITS = {torch.float32: 1e-5, torch.float64: 1e-10}
COARSE_SAME_LOGITS = 1e-3
# Enough to compare, and never the logits of a long prompt.
SAMPLE_TOKENS = 16


class SplitNetwork:
    """A network as backbone and output head; `split_network` checks that they are the network."""

    def __init__(self, model: CachedModel) -> None:
        """Take the backbone and the head of `model`'s network."""
        self._backbone: Any = model.network.base_model
        self._head: Any = model.network.get_output_embeddings()
        self._vocab = model.vocab_size
        self.device = model.device

    def hidden(self, **inputs: Any) -> Tensor:
        """Final hidden states [rows, positions, hidden]."""
        return self._backbone(**inputs).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden states from anywhere."""
        return self._head(hidden.to(self.device))[..., : self._vocab]


@torch.inference_mode()
def split_network(model: CachedModel, sample: Sequence[int]) -> SplitNetwork | None:
    """Backbone and head of a network, or None where together they are not the network.

    Soft-capped or scaled logits (Gemma 2, Granite, Cohere) are such a case, and backbones that
    cannot run alone or take other arguments. Both ways are computed once, on the last tokens of
    `sample`, and compared.
    """
    network: Any = model.network
    ids = torch.tensor([list(sample)[-SAMPLE_TOKENS:]], device=network.device)
    try:
        split = SplitNetwork(model)
        logits = split.logits(split.hidden(input_ids=ids, use_cache=False))
    except Exception as problem:  # whatever a model's code raises when its backbone is used alone
        if is_out_of_memory(problem):
            raise
        return None
    expected = network(input_ids=ids, use_cache=False).logits[..., : model.vocab_size]
    if logits.shape != expected.shape:
        return None
    allowed = SAME_LOGITS.get(network.dtype, COARSE_SAME_LOGITS) * expected.abs().amax()
    # With NaN logits the comparison is false: the network itself is used, and its error says where
    return split if bool((logits - expected).abs().amax() <= allowed) else None


def new_cache(model: CachedModel) -> Any:
    """An empty cache of the kind that `model` uses."""
    if model.rewinding == "crop":
        return DynamicCache()
    return DynamicCache(config=model.network.config)
