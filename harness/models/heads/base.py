"""The base classes of heads for speculative decoding.

EAGLE and EAGLE-3 heads and a model's own MTP layer draft token by token (`ChainHead`); Medusa
heads, DFlash and DSpark drafters draft a block from the same states (`BlockHead`); P-EAGLE heads
and PARD drafts read mask tokens (`MaskHead`).

Row t of a `ChainHead` takes token x[t + 1] of a text x and a feature, and predicts x[t + 2]. The
feature of the first row of a chain is made of the target's hidden states at t; that of each further
row is the head's own output of the row before. `harness.decoding.drafters` runs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.config import ModelConf
from harness.models.load import Vocabulary, sampled_hash


class HeadNetwork(nn.Module, ABC):
    """A head's weights, and its drafts from every start of a given text.

    Attributes:
        layers: the target's states that it reads; see `CachedModel.keep_states`.
        width: numbers per token in the states that it reads.
        cached_numbers: numbers per token in its cache.
    """

    layers: tuple[int, ...]
    width: int
    cached_numbers: int = 0

    @property
    def weights(self) -> list[Tensor]:
        """The head's own weights, without those that it shares with the target."""
        return list(self.parameters())

    @property
    def kv_bytes_per_token(self) -> int:
        return self.cached_numbers * self.weights[0].element_size()

    def features(self, states: Tensor) -> Tensor:
        """The features [..., hidden] of the target's states [..., width], on any device."""
        weight = self.weights[0]
        return states.to(weight.device, weight.dtype)

    @abstractmethod
    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """The outputs of `depth` = K drafts, all accepted, from every start of a text [B, n + 1].

        Args:
            states: [B, n, width] the target's states of all tokens but the last.
            first: the first row that is a start.

        Returns:
            Per pass j = 0 .. depth - 1 the outputs [B, n - first - j, hidden]: entry i is from
            start row t = first + i, fed with tokens t + 1 .. t + 1 + j.
        """

    @abstractmethod
    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        """Logits [..., vocabulary] of outputs [..., hidden] of a pass, in the target's ids."""

    @abstractmethod
    def with_cache(self, vocab_size: int) -> "Head":
        """The head for the loop, with logits of the target's width."""


class Head(ABC):
    """A head for the loop; it drafts at most `drafts` tokens in a round, or any number."""

    drafts: int | None = None

    def __init__(self, network: HeadNetwork, vocab_size: int) -> None:
        self.network, self.vocab_size = network, vocab_size

    @property
    def device(self) -> torch.device:
        return self.network.weights[0].device

    def describe(self) -> dict[str, Any]:
        most = {} if self.drafts is None else {"drafts_at_most": self.drafts}
        return {"layers_read": list(self.network.layers), **most}

    def prefill(self, tokens: Sequence[int]) -> None:
        """Clear the head and, for timing, run rows of `tokens` with states of zero."""
        self._clear()
        if tokens:
            self.condition(torch.zeros(len(tokens), self.network.width))
            self.extend(torch.tensor(tokens))

    def start(self, first: Sequence[int]) -> None:
        """Clear the head before a text; `first` is its first token, which has no row."""
        del first
        self.prefill([])

    @torch.inference_mode()
    def condition(self, states: Tensor, drafts: int | None = None) -> None:
        """Take the target's states [n, width] for the next forward, and a round's drafts."""
        del drafts
        self._read(self.network.features(states))

    @abstractmethod
    def forward(self, tokens: Tensor) -> Tensor:
        """Append the rows of `tokens` [n]; return the logits after each, [n, vocab]."""

    @abstractmethod
    def extend(self, tokens: Tensor) -> None:
        """As `forward`, where the logits are not needed."""

    @abstractmethod
    def rewind(self, count: int) -> None:
        """Remove the last `count` rows."""

    @abstractmethod
    def _read(self, features: Tensor) -> None:
        """Take features [n, hidden] of the target's states."""

    @abstractmethod
    def _clear(self) -> None:
        """Remove all rows and states."""


class ChainHead(Head):
    """A head with a cache of rows, in which each row takes the output of the one before."""

    # What the next forward takes as its rows' features; the head's last output where None
    _features: Tensor | None = None
    _output: Tensor | None = None

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        return self.network.logits(self._run(tokens), self.vocab_size, 0)[0]

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> None:
        self._run(tokens)

    def _run(self, tokens: Tensor) -> Tensor:
        features = self._output if self._features is None else self._features
        assert features is not None
        outputs = self._append(tokens.to(self.device).unsqueeze(0), features)
        self._features, self._output = None, outputs[:, -1:]
        return outputs

    def _read(self, features: Tensor) -> None:
        self._features = features.unsqueeze(0)

    def _clear(self) -> None:
        self._features = self._output = None
        self._forget_rows()

    @abstractmethod
    def _forget_rows(self) -> None:
        """Empty the cache."""

    @abstractmethod
    def _append(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Run rows of tokens [1, n] and features [1, n, hidden]; the outputs [1, n, hidden]."""


class RoundHead(Head):
    """A head that drafts a whole round from its start; `forward` returns its rows one by one."""

    # Rows of the round that `forward` has given
    _given = 0

    def rewind(self, count: int) -> None:
        """End the round; none of its rows is kept, for any `count`."""
        del count
        self._given = 0

    def _clear(self) -> None:
        self._given = 0


class BlockHead(RoundHead):
    """A head that drafts a whole block from the start of a round.

    One pass drafts it; only a DSpark drafter's logits also depend on the token drafted before. K
    successive steps, by which a draft is timed, cost as much as the drafting of a round of K.
    """

    def __init__(self, network: HeadNetwork, vocab_size: int, drafts: int) -> None:
        super().__init__(network, vocab_size)
        self.drafts = self._size = drafts

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        """The logits [1, vocab] of the round's next draft; in timing a block may start again.

        In the first call of a round `tokens` [n] end with the last token of the text.
        """
        offset = self._given % self._size
        self._given = offset + 1
        return self._draft(offset, tokens[-1:])

    def extend(self, tokens: Tensor) -> None:
        """Do nothing: the head knows the earlier text from the target's states."""
        del tokens

    @abstractmethod
    def _draft(self, offset: int, token: Tensor) -> Tensor:
        """The logits [1, vocab] at an offset after a token [1], the text's last at offset 0."""


# Rows of a pass outside of a round, in timing
ROWS_ALONE = 8


class MaskHead(RoundHead):
    """A head that reads mask tokens behind the text: a round of K runs K rows in one pass.

    Attention is causal, so no row depends on the number of rows after it. K successive steps, by
    which a draft is timed, cost as much as a round of `ROWS_ALONE`.
    """

    # Rows of the round's pass, and their logits
    _rows, _logits = ROWS_ALONE, torch.empty(0)

    @torch.inference_mode()
    def condition(self, states: Tensor, drafts: int | None = None) -> None:
        super().condition(states, drafts)
        self._rows = drafts or self.drafts or ROWS_ALONE

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        """The logits [1, vocab] of the next draft; rows of `tokens` are kept, of masks not."""
        offset = self._given % self._rows
        self._given = offset + 1
        if offset == 0:
            self._logits = self._round(tokens, self._rows)
        return self._logits[offset : offset + 1]

    @abstractmethod
    def _round(self, tokens: Tensor, rows: int) -> Tensor:
        """The logits [rows, vocab] after tokens [n], which are kept, and `rows` - 1 masks."""


def in_target_ids(logits: Tensor, ids: Tensor | None, vocabulary: int) -> Tensor:
    """Logits [..., vocabulary] in the target's ids; -inf of tokens that cannot be drafted.

    `ids` [draft vocabulary] are the target's of logits [..., draft vocabulary]; None: the same,
    where padded embeddings may be wider or narrower.
    """
    lacking = vocabulary - logits.shape[-1]
    if ids is None and lacking > 0:
        return F.pad(logits, (0, lacking), value=-torch.inf)
    if ids is None:
        return logits[..., :vocabulary]
    full = logits.new_full((*logits.shape[:-1], vocabulary), float("-inf"))
    return full.index_copy_(-1, ids, logits)


@dataclass(frozen=True)
class LoadedHead(Vocabulary):
    """A head on its target's device, with the target's tokenizer, and facts for the manifest."""

    network: HeadNetwork
    facts: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        conf: ModelConf,
        target: Vocabulary,
        network: HeadNetwork,
        facts: Mapping[str, Any],
        context_tokens: int | None,
    ) -> "LoadedHead":
        eos, facts = target.eos, {**facts, "engine": conf.kind}
        return cls(conf.keys, conf.name, target.tokenizer, eos, context_tokens, network, facts)

    def describe(self) -> dict[str, Any]:
        weights = self.network.weights
        return {
            "name": self.name,
            **self.facts,
            "dtype": str(weights[0].dtype).removeprefix("torch."),
            "parameters": sum(weight.numel() for weight in weights),
            "weights_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
            "kv_bytes_per_token": self.network.kv_bytes_per_token,
            "weights_sample_sha256": sampled_hash(weights),
        }
