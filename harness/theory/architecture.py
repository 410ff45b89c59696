"""A decoder's sizes, its number of parameters, the bytes that a step reads, and its memory.

Plain decoding of one sequence reads every weight once per token and computes little with it. A
verify forward reads the same weights for more positions, which is why it costs little more than a
step; in a mixture of experts it touches more experts and does read more.

Whether models fit a memory follows from the same sizes. A draft's weights and KV cache are on the
card of the target's, and the memory that both models' weights leave holds cached tokens, each with
the bytes of both. So a draft costs context or concurrency (`memory_view`).

The sizes come from `conf/model/*.yaml` (`architecture_of`) or from a model's own configuration
(`harness.models.memory`). Layout: Qwen3 ("Qwen3 Technical Report", 2025) and its
mixture-of-experts variant, which cover Llama-like models closely: grouped-query attention, gated
feed-forward, RMS norms.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.records import UserError
from harness.summary import DraftMemory

FAMILIES = ("qwen3", "qwen3_moe", "llama", "qwen2")
# Families whose parameters are counted correctly, by transformers' names, and their classes
COUNTED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Families with their own head_dim; in the others it is the hidden size / heads
HEAD_DIM = {"qwen3": 128, "qwen3_moe": 128}
NUMBERS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
NUMBERS_OF_EXPERTS = ("experts", "experts_per_token", "moe_ffn")
# Entries that only a built network needs; harness.models.dummy has their defaults
BUILDING = ("rope_theta", "rope_scaling", "norm_eps", "max_positions")
KNOWN = frozenset({"family", "tied_embeddings", *NUMBERS, *NUMBERS_OF_EXPERTS, *BUILDING})
# Servers leave a part of the memory to activations and the allocator; vLLM's default is 0.9
USABLE_SHARE = 0.9


def experts_touched(experts: int, experts_per_token: int, tokens: int) -> float:
    """Expected number of experts that `tokens` positions use together: E (1 - (1 - k/E)^n).

    Assumes uniform and independent routing; real routing is less even, so this is a ceiling.
    """
    return experts * (1.0 - (1.0 - experts_per_token / experts) ** tokens)


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder, which determine its parameters and the bytes that a step reads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of the dense feed-forward; not used where there are experts
    vocab: int  # rows of the embedding table, padding included
    tied: bool  # whether the output head is the embedding table
    # experts, experts_per_token, moe_ffn: of a mixture of experts in every layer; 0 if dense
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")
        routed = ("experts_per_token", "moe_ffn") if self.experts else ("ffn",)
        for name in sizes + routed:
            if getattr(self, name) < 1:
                raise UserError(f"architecture.{name}={getattr(self, name)}: must be 1 or more")
        if self.experts_per_token > self.experts:
            raise UserError(
                f"architecture.experts_per_token={self.experts_per_token}: must not exceed"
                f" experts={self.experts}"
            )

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def shared_layer_parameters(self) -> int:
        """Parameters of a layer that every token uses: attention, norms, router."""
        queries = self.heads * self.head_dim
        keys_values = 2 * self.kv_heads * self.head_dim
        attention = self.hidden * (queries + keys_values) + queries * self.hidden
        norms = 2 * self.hidden + 2 * self.head_dim
        return attention + norms + self.hidden * self.experts

    @property
    def expert_parameters(self) -> int:
        """Parameters of one feed-forward: gate, up and down projections."""
        return 3 * self.hidden * (self.moe_ffn if self.experts else self.ffn)

    @property
    def parameters(self) -> int:
        """All parameters; a tied table counts once."""
        layer = self.shared_layer_parameters + max(1, self.experts) * self.expert_parameters
        tables = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * layer + tables + self.hidden

    def weight_bytes_read(self, tokens: int = 1, bytes_per_parameter: float = 2.0) -> float:
        """Weight bytes that one forward must read; `tokens` matters only where there are experts.

        The output head is read whole, the input embedding only in its looked-up rows, which are
        left out; so a tied table counts once, and of two tables one.
        """
        used = 1.0
        if self.experts:
            used = experts_touched(self.experts, self.experts_per_token, tokens)
        layer = self.shared_layer_parameters + used * self.expert_parameters
        read = self.layers * layer + self.embedding_parameters + self.hidden
        return read * bytes_per_parameter

    def kv_bytes_read(self, context_tokens: int, bytes_per_value: float = 2.0) -> float:
        """Bytes of cached keys and values that a forward reads for one sequence."""
        values = 2 * self.layers * self.kv_heads * self.head_dim * context_tokens
        return values * bytes_per_value

    def bytes_read(
        self,
        *,
        tokens: int = 1,
        context_tokens: int = 0,
        batch: int = 1,
        bytes_per_parameter: float = 2.0,
    ) -> float:
        """Bytes that one forward must read: the weights once, the cache of every sequence.

        `tokens` are new positions per sequence, `context_tokens` those in its cache, and the bytes
        of a parameter are those of a cached value, too.
        """
        weights = self.weight_bytes_read(tokens * batch, bytes_per_parameter)
        return weights + batch * self.kv_bytes_read(context_tokens, bytes_per_parameter)

    def flops(self, *, tokens: int = 1, context_tokens: int = 0, batch: int = 1) -> float:
        """Operations of a forward: two per parameter that a position uses, four per attended value.

        Arguments as those of `bytes_read`.
        """
        experts = self.experts_per_token if self.experts else 1
        layer = self.shared_layer_parameters + experts * self.expert_parameters
        used = self.layers * layer + self.embedding_parameters
        positions = context_tokens + (tokens + 1) / 2.0  # that one of the new ones attends to
        attended = 4.0 * self.layers * self.heads * self.head_dim * positions
        return batch * tokens * (2.0 * used + attended)


@dataclass(frozen=True)
class HeadArchitecture(Architecture):
    """The sizes of an EAGLE-3 head (Li et al. 2025): one layer, whose attention reads two rows.

    Its output matrix is over the tokens that it can draft (`vocab`); the embedding is its target's,
    so `tied` is true.
    """

    states: int = 0  # width of the target's states that it reads at a position, of all layers

    @property
    def shared_layer_parameters(self) -> int:
        """Parameters of the layer without its feed-forward, and of the projection of the states."""
        queries = self.heads * self.head_dim
        keys_values = 2 * self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (queries + keys_values) + queries * self.hidden
        return attention + 3 * self.hidden + self.states * self.hidden


def architecture_from(sizes: Mapping[str, Any], *, counted: bool) -> Architecture | None:
    """The sizes of a model as its config or a manifest has them; None where one is missing.

    Args:
        sizes: by the fields of `Architecture`, None where not known.
        counted: whether it is of a family in `COUNTED`, whose heads are as wide as the hidden size
            / their number where no width is stated.
    """
    known = {name: value for name, value in sizes.items() if value is not None}
    if counted and {"hidden", "heads"} <= known.keys():
        known.setdefault("head_dim", known["hidden"] // known["heads"])
    wanted = {*NUMBERS, "tied"}
    if known.get("experts"):
        # Mixtral's and gpt-oss's configs call the width of an expert that of the feed-forward
        known["moe_ffn"] = known.get("moe_ffn") or known.get("ffn")
        wanted.add("experts_per_token")
    return Architecture(**known) if wanted <= known.keys() else None


def architecture_of(conf: Mapping[str, Any], key: str = "model.architecture") -> Architecture:
    """The sizes in a configuration's `architecture`, which stands at `key`.

    `ffn` of a mixture of experts is one expert's, unless `moe_ffn` is given.
    """
    family = conf.get("family")
    if family not in FAMILIES:
        raise UserError(f"{key}.family={family}: use one of {', '.join(FAMILIES)}")
    unknown = sorted(str(name) for name in conf if name not in KNOWN)
    if unknown:
        raise UserError(f"{key}.{unknown[0]}: no such entry; there are {', '.join(sorted(KNOWN))}")
    if family != "qwen3_moe" and conf.get("experts"):
        raise UserError(f"{key}.experts: family={family} has none; use family=qwen3_moe")
    wanted = [name for name in NUMBERS if name != "head_dim" or "head_dim" in conf]
    sizes = {name: _whole(conf, name, key) for name in wanted}
    if "head_dim" not in sizes:
        sizes["head_dim"] = HEAD_DIM.get(family, sizes["hidden"] // max(1, sizes["heads"]))
    if family == "qwen3_moe":
        sizes |= {name: _whole(conf, name, key) for name in NUMBERS_OF_EXPERTS[:2]}
        sizes["moe_ffn"] = _whole(conf, "moe_ffn" if "moe_ffn" in conf else "ffn", key)
    try:
        shape = Architecture(tied=bool(conf.get("tied_embeddings", False)), **sizes)
    except UserError as error:
        raise UserError(str(error).replace("architecture", key, 1)) from error
    if shape.heads % shape.kv_heads:
        raise UserError(f"{key}.kv_heads={shape.kv_heads}: must divide heads={shape.heads}")
    return shape


def _whole(conf: Mapping[str, Any], name: str, key: str) -> int:
    value = conf.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        problem = ": missing;" if value is None else f"={value}:"
        raise UserError(f"{key}.{name}{problem} give a whole number of at least 1")
    return value


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelBytes:
    """The bytes of a model in memory: its own weights, and KV cache for every token of a text."""

    weights: float = 0.0
    kv_per_token: float = 0.0


@dataclass(frozen=True)
class MemoryFit:
    """Models that share a memory."""

    room_bytes: float  # the memory that they may fill
    models: tuple[ModelBytes, ...]  # each with a KV cache
    context_tokens: int = 0  # of each sequence
    sequences: int = 1  # side by side

    @property
    def weights_bytes(self) -> float:
        return sum(model.weights for model in self.models)

    @property
    def cache_bytes(self) -> float:
        per_token = sum(model.kv_per_token for model in self.models)
        return self.sequences * self.context_tokens * per_token

    @property
    def needed_bytes(self) -> float:
        return self.weights_bytes + self.cache_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.room_bytes

    @property
    def most_tokens(self) -> int:
        """Tokens that the caches can hold in the memory that the weights leave."""
        left = self.room_bytes - self.weights_bytes
        return max(0, math.floor(left / sum(model.kv_per_token for model in self.models)))


def usable_bytes(memory_gb: float) -> float:
    """The part of a card's memory that models may fill."""
    return USABLE_SHARE * memory_gb * 1e9


def memory_view(
    name: str, draft: ModelBytes, target: ModelBytes, memory_bytes: float, *, context_tokens: int
) -> DraftMemory:
    """The memory of a draft, and the context and sequences lost compared with no draft.

    USABLE_SHARE of `memory_bytes` may be filled. `context_tokens` are those of each concurrent
    sequence, prompt and answer.
    """
    if not (math.isfinite(memory_bytes) and memory_bytes > 0.0):
        raise UserError(f"memory_bytes={memory_bytes}: must be above 0")
    if context_tokens < 1:
        raise UserError(f"context_tokens={context_tokens}: must be 1 or more")
    room = memory_bytes * USABLE_SHARE
    alone, both = (MemoryFit(room, each).most_tokens for each in ((target,), (target, draft)))
    return DraftMemory(
        draft=name,
        weights_bytes=draft.weights,
        context_tokens_lost=alone - both,
        sequences_lost=alone // context_tokens - both // context_tokens,
    )
