"""Medusa heads: each drafts one further token from the target's last hidden state alone.

Head j reads h[t], what enters the target's output head for token x[t], and predicts x[t + 2 + j];
the target itself predicts x[t + 1] from it. So no draft depends on another, nor on x[t + 1]. A head
is residual blocks, h + silu(W h + b), then a matrix onto the vocabulary (Cai et al. 2024, Medusa,
section 2.1; `medusa/model/medusa_model.py` of FasterDecoding/Medusa, where training shifts the
labels of head j by 2 + j: `medusa/train/train_legacy.py`). The paper verifies a tree of the heads'
best tokens; here, as in vLLM's `v1/spec_decode/medusa.py`, it is a chain of one token per head.
`harness.models.block_files` reads the published layouts.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models.heads import BlockHead, HeadNetwork, in_target_ids


class _Residual(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, hidden: int, depth: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias) for _ in range(depth))

    def forward(self, state: Tensor) -> Tensor:
        for layer in self.layers:
            state = state + F.silu(layer(state))
        return state


class MedusaNetwork(HeadNetwork):
    """The heads' weights and arithmetic; parameters are named as in vLLM's layout.

    Attributes:
        layers: of the target, whose inputs are read: the one after the last, which is what enters
            the output head (see `CachedModel.keep_states`).
        drafts: tokens that it drafts from a start at most, the number of heads.
        width: the target's hidden size.
        token_map: [draft vocabulary] the target's ids of the tokens that it can draft; None where
            that is all of them.
    """

    token_map: Tensor | None

    def __init__(
        self,
        *,
        heads: int,
        depth: int,
        hidden: int,
        target_layers: int,
        draft_vocabulary: int,
        token_map: Tensor | None = None,
        bias: bool = True,
        one_output: bool = False,
    ) -> None:
        """Heads of `depth` residual blocks; one vocabulary matrix for all, or one for each."""
        super().__init__()
        self.layers, self.drafts, self.width = (target_layers,), heads, hidden
        self.blocks = nn.ModuleList(_Residual(hidden, depth, bias=bias) for _ in range(heads))
        outputs = [nn.Linear(hidden, draft_vocabulary, bias=False)] * heads
        if not one_output:
            outputs = [nn.Linear(hidden, draft_vocabulary, bias=False) for _ in range(heads)]
        self.lm_heads = nn.ModuleList(outputs)
        self.register_buffer("token_map", token_map, persistent=False)

    def with_cache(self, vocab_size: int) -> "MedusaHead":
        """The heads for the loop."""
        return MedusaHead(self, vocab_size)

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """The outputs of `depth` drafts from every start of a text; see `HeadNetwork.passes`.

        The tokens do not matter.
        """
        del tokens
        features, count = self.features(states), states.shape[1]
        offsets = range(min(depth, self.drafts, count - first))
        return [self.blocks[offset](features[:, first : count - offset]) for offset in offsets]

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        """Logits [..., vocabulary] of a head's outputs [..., hidden], in the target's ids."""
        return in_target_ids(self.lm_heads[offset](outputs), self.token_map, vocabulary)


class MedusaHead(BlockHead):
    """The heads for the loop: the context that they keep is the state of one token."""

    engine = "medusa"
    network: MedusaNetwork

    def __init__(self, network: MedusaNetwork, vocab_size: int) -> None:
        super().__init__(network, vocab_size, network.drafts)
        self._state = network.features(torch.zeros(1, network.width))

    def _read(self, features: Tensor) -> None:
        self._state = features[-1:]

    def _draft(self, offset: int, token: Tensor) -> Tensor:
        del token
        outputs = self.network.blocks[offset](self._state)
        return self.network.logits(outputs, self.vocab_size, offset)
