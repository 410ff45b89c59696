"""What a decoding step must read, and so how fast it can be: bytes, memory floors, experts.

Plain decoding of one sequence reads every weight once per token and computes little with it, so the
memory bandwidth sets a floor under the step time. A step far above its floor is bound by something
else (launching kernels, usually), and then the ratio c of two steps says more about the engine than
about the models. A verify forward reads the same weights for more positions, which is why it costs
little more than a step; in a mixture of experts it touches more experts and does read more.

Architecture: Qwen3 ("Qwen3 Technical Report", 2025) and its mixture-of-experts variant,
which cover Llama-like models closely: grouped-query attention, gated feed-forward, RMS norms.
"""

from dataclasses import dataclass

from harness.records import UserError


def experts_touched(experts: int, experts_per_token: int, tokens: int) -> float:
    """Expected number of experts that `tokens` positions use together: E (1 - (1 - k/E)^n).

    Assumes uniform and independent routing; real routing is less even, so this is a ceiling.

    Args:
        experts: in one layer, E.
        experts_per_token: how many each token is routed to, k.
        tokens: positions in the forward, n.
    """
    return experts * (1.0 - (1.0 - experts_per_token / experts) ** tokens)


@dataclass(frozen=True)
class Architecture:
    """The sizes that determine a decoder's parameters and what a step reads.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim: of the transformer.
        ffn: width of the dense feed-forward; not used where there are experts.
        vocab: rows of the embedding table, padding included.
        tied: whether the output head is the embedding table.
        experts, experts_per_token, moe_ffn: of a mixture of experts in every layer; 0 if dense.

    Raises:
        UserError: a size that cannot be.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
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
        """Entries of one vocabulary table."""
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
        """Weight bytes that one forward must read.

        The output head is read whole, the input embedding only in its looked-up rows, which are
        left out; so a tied table counts once, and of two tables one.

        Args:
            tokens: positions in the forward; matters only where there are experts.
            bytes_per_parameter: 2 for bf16.
        """
        used = 1.0
        if self.experts:
            used = experts_touched(self.experts, self.experts_per_token, tokens)
        layer = self.shared_layer_parameters + used * self.expert_parameters
        read = self.layers * layer + self.embedding_parameters + self.hidden
        return read * bytes_per_parameter

    def kv_bytes_read(self, context_tokens: int, bytes_per_value: float = 2.0) -> float:
        """Bytes of cached keys and values that a forward reads for one sequence.

        Args:
            context_tokens: positions in the cache.
            bytes_per_value: 2 for bf16.
        """
        values = 2 * self.layers * self.kv_heads * self.head_dim * context_tokens
        return values * bytes_per_value

    def bytes_read(
        self,
        *,
        tokens: int = 1,
        context_tokens: int = 0,
        batch: int = 1,
        bytes_per_parameter: float = 2.0,
        bytes_per_value: float = 2.0,
    ) -> float:
        """Bytes that one forward must read: the weights once, the cache of every sequence.

        Args:
            tokens: new positions per sequence.
            context_tokens: positions in each sequence's cache.
            batch: sequences side by side.
            bytes_per_parameter: 2 for bf16 weights.
            bytes_per_value: 2 for a bf16 cache.
        """
        weights = self.weight_bytes_read(tokens * batch, bytes_per_parameter)
        return weights + batch * self.kv_bytes_read(context_tokens, bytes_per_value)


def memory_floor_ms(bytes_read: float, bandwidth_gb_s: float) -> float:
    """The shortest time in which that much can be read, milliseconds.

    Args:
        bytes_read: per step.
        bandwidth_gb_s: of the memory, in 10^9 bytes per second, as data sheets give it.

    Raises:
        UserError: a bandwidth that is not above 0.
    """
    if not bandwidth_gb_s > 0.0:
        raise UserError(f"bandwidth_gb_s={bandwidth_gb_s}: must be above 0")
    return bytes_read / bandwidth_gb_s / 1e6


def model_bandwidth_utilisation(bytes_read: float, step_ms: float, bandwidth_gb_s: float) -> float:
    """MBU: the memory floor of a step / the time it took; 1 is the ceiling.

    Raises:
        UserError: a time or bandwidth that is not above 0.
    """
    if not step_ms > 0.0:
        raise UserError(f"step_ms={step_ms}: must be above 0")
    return memory_floor_ms(bytes_read, bandwidth_gb_s) / step_ms
