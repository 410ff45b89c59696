"""A transformers model as the loop sees it: `forward` appends to a cache, `rewind` forgets.

How a cache is rewound depends on what it holds. Keys and values of attention can be cropped. A
recurrent state (Mamba2, gated delta rule) cannot: transformers' `crop` rewinds only the convolution
there, raises nothing, and the text is wrong from then on. Such models are rewound by going back to
a copy taken at the start of the round and feeding the kept tokens again. Which of the two a model
needs is not believed but probed (`harness.models.probe`).
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

# Positions per chunk while a cache is filled for timing, all sequences together
FILL_POSITIONS = 4096


def output_weight(network: PreTrainedModel) -> Tensor:
    """The output head's weight, [vocab with padding, hidden]."""
    head: Any = network.get_output_embeddings()
    return head.weight


class CachedModel:
    """A causal model with a cache of one sequence, rewound by cropping.

    Attributes:
        network: transformers' model.
        vocab_size: width of the logits.
        rewinding: how the cache is rewound; the manifest says it.
        engine: whose forward runs, transformers' or the lean one.
        engine_reason: why not a faster engine, or None.
        recording_s: seconds spent so far on recording its work, compiling included.

    The cache is transformers' DynamicCache without a config: sliding-window layers then keep every
    key and mask the old ones, which is identical in result and can be cropped past the window.
    """

    rewinding = "crop"
    engine = "transformers"

    def __init__(self, network: PreTrainedModel, vocab_size: int) -> None:
        """Wrap `network`; logits are cut to `vocab_size`, the width target and draft share."""
        self.engine_reason: str | None = None
        self.recording_s = 0.0
        self.network = network
        self.vocab_size = vocab_size
        self._cache: Any = self._new_cache()

    @property
    def device(self) -> torch.device:
        """Where the logits live: the output head's device."""
        return output_weight(self.network).device

    @property
    def cached_tokens(self) -> int:
        """How many tokens the cache holds."""
        return int(self._cache.get_seq_length())

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        """Forget everything and fill the cache with `tokens` (which may be empty)."""
        self._cache = self._new_cache()
        if tokens:
            self._run(torch.tensor(tokens), logits_to_keep=1)

    def describe(self) -> dict[str, Any]:
        """What the manifest says of how it runs."""
        reason = {"engine_reason": self.engine_reason} if self.engine_reason else {}
        return {"rewinding": self.rewinding, "engine": self.engine, **reason}

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [n]; return the logits after each, [n, vocab]."""
        return self._run(tokens)

    def reserve(self, tokens: int) -> None:
        """Learn how long a generation gets, the drafts of its last round included.

        Caches of a fixed size are allocated here; this one grows by itself.
        """

    @torch.inference_mode()
    def fill(self, batch: int, context_tokens: int) -> None:
        """Make the cache one of `batch` sequences with `context_tokens` each, for timing.

        What they hold is arbitrary: a step's time does not depend on the values.
        """
        self._cache = self._new_cache()
        chunk = max(1, FILL_POSITIONS // batch)
        for start in range(0, context_tokens, chunk):
            count = min(chunk, context_tokens - start)
            tokens = torch.arange(start, start + count) % min(self.vocab_size, 997)
            self._run_batch(tokens.repeat(batch, 1), logits_to_keep=1)

    @torch.inference_mode()
    def forward_batch(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [batch, n]; return the logits after each, [batch, n, vocab]."""
        return self._run_batch(tokens)

    def rewind(self, count: int) -> None:
        """Forget the last `count` cached tokens."""
        if count:
            self._cache.crop(-count)

    def _new_cache(self) -> Any:
        return DynamicCache()

    def _run(self, tokens: Tensor, logits_to_keep: int = 0) -> Tensor:
        return self._run_batch(tokens.unsqueeze(0), logits_to_keep)[0]

    def _run_batch(self, tokens: Tensor, logits_to_keep: int = 0) -> Tensor:
        output = self.network(
            input_ids=tokens.to(self.network.device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        return output.logits[..., : self.vocab_size]


class SnapshotModel(CachedModel):
    """A causal model whose cache holds recurrent states: rewound by restoring a copy.

    The copy is taken before the first forward after a rewind, so once per round for the target and
    once per round for the draft; the tokens that stand are fed again.
    """

    rewinding = "snapshot"

    def __init__(self, network: PreTrainedModel, vocab_size: int) -> None:
        """Wrap `network`, with no copy taken yet."""
        super().__init__(network, vocab_size)
        self._saved: Any = None
        self._fed: list[Tensor] = []

    def prefill(self, tokens: Sequence[int]) -> None:
        """Forget everything and fill the cache with `tokens`."""
        self._saved, self._fed = None, []
        super().prefill(tokens)

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [n], remembering what it takes to undo that."""
        if self._saved is None:
            self._saved = copy.deepcopy(self._cache)
        self._fed.append(tokens)
        return self._run(tokens)

    @torch.inference_mode()
    def rewind(self, count: int) -> None:
        """Forget the last `count` tokens, which must lie after the previous rewind."""
        if count:
            fed = torch.cat(self._fed)
            self._cache = self._saved
            if count < len(fed):
                self._run(fed[: len(fed) - count], logits_to_keep=1)
        self._saved, self._fed = None, []

    def _new_cache(self) -> Any:
        return DynamicCache(config=self.network.config)
