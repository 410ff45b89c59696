"""Two kinds of draft as CONTRIBUTING tells to add them, each a spec and what its loader names."""

from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from harness.config import ModelConf
from harness.decoding.lookups import LookupDrafter
from harness.engine_facts.draft_kinds import DraftSpec
from harness.models.heads.base import BlockHead, HeadNetwork, LoadedHead
from harness.models.load import LoadedModel

LOOKUP = DraftSpec("a recent look-up", "none", loader="toy_drafts:RecentDrafter")
HEAD = DraftSpec("a guessing head", loader="toy_drafts:guessing_head", reads_states=True)
GUESSES = 3


class RecentDrafter(LookupDrafter):
    """Proposes what followed the last token the last time that it occurred."""

    def draft(self, count: int) -> list[int]:
        *before, last = self.text
        place = max((n for n, token in enumerate(before) if token == last), default=len(before))
        again = self.text[place + 1 :][:count]
        return list(takewhile(lambda token: token not in self.eos, again))


class GuessingNetwork(HeadNetwork):
    """A matrix per offset, from the target's last state to its vocabulary."""

    def __init__(self, hidden: int, target_layers: int, vocabulary: int) -> None:
        super().__init__()
        self.layers, self.width = (target_layers,), hidden
        self.outputs = nn.ModuleList(nn.Linear(hidden, vocabulary) for _ in range(GUESSES))

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        del tokens
        features, count = self.features(states), states.shape[1]
        offsets = range(min(depth, GUESSES, count - first))
        return [features[:, first : count - offset] for offset in offsets]

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        return self.outputs[offset](outputs)[..., :vocabulary]

    def with_cache(self, vocab_size: int) -> "GuessingHead":
        return GuessingHead(self, vocab_size, GUESSES)


class GuessingHead(BlockHead):
    """The same for the loop."""

    _state: Tensor

    def _read(self, features: Tensor) -> None:
        self._state = features[-1:]

    def _draft(self, offset: int, token: Tensor) -> Tensor:
        del token
        return self.network.logits(self._state, self.vocab_size, offset)


def guessing_head(conf: ModelConf, target: LoadedModel) -> LoadedHead:
    """The head with random weights, from no file."""
    config: Any = target.network.config.get_text_config()
    torch.manual_seed(0)
    network = GuessingNetwork(config.hidden_size, config.num_hidden_layers, target.vocab_size)
    network = network.to(target.network.device, target.network.dtype).eval()
    facts = {"architecture": "guess"}
    return LoadedHead.of(conf, target, network, facts, target.context_tokens)
