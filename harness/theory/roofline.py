"""How long a forward takes on a card that nobody has at hand: the roofline model.

A forward must read its bytes and do its arithmetic; on a card that overlaps the two perfectly it
takes the longer of both (Williams, Waterman, Patterson, "Roofline", CACM 2009). Decoding a few
sequences is under the memory's roof, where positions beside the first are free and speculation
lives off that; many sequences at once reach the arithmetic's roof, where every drafted token costs
its own time. Real engines stay below both roofs, so these times are floors, not forecasts.
"""

from dataclasses import dataclass
from typing import Literal

from harness.records import UserError
from harness.theory.hardware import Architecture, memory_floor_ms

Roof = Literal["memory", "arithmetic"]


@dataclass(frozen=True)
class Card:
    """What a card can do and what an hour of it costs.

    Attributes:
        name: short name.
        bandwidth_gb_s: memory bandwidth, 10^9 bytes per second.
        bf16_tflops: dense matrix rate, 10^12 operations per second.
        memory_gb: 10^9 bytes.
        price_per_hour_usd: on demand; None if unknown.

    Raises:
        UserError: a figure that is not above 0.
    """

    name: str
    bandwidth_gb_s: float
    bf16_tflops: float
    memory_gb: float
    price_per_hour_usd: float | None = None

    def __post_init__(self) -> None:
        """Refuse figures that cannot be."""
        for key in ("bandwidth_gb_s", "bf16_tflops", "memory_gb"):
            if not getattr(self, key) > 0.0:
                raise UserError(f"gpu.{key}={getattr(self, key)}: must be above 0")


@dataclass(frozen=True)
class Modelled:
    """A modelled time and the roof that sets it.

    Attributes:
        ms: the longer of reading and computing.
        roof: which of the two it is.
    """

    ms: float
    roof: Roof


def forward_flops(
    shape: Architecture, *, tokens: int = 1, context_tokens: int = 0, batch: int = 1
) -> float:
    """Operations of a forward: two per parameter that a position uses, four per attended value.

    Args:
        shape: sizes; of a mixture of experts each position uses experts_per_token of them.
        tokens: new positions per sequence.
        context_tokens: cached positions that each new one attends to.
        batch: sequences side by side.
    """
    experts = shape.experts_per_token if shape.experts else 1
    layer = shape.shared_layer_parameters + experts * shape.expert_parameters
    used = shape.layers * layer + shape.embedding_parameters
    attended = 4.0 * shape.layers * shape.heads * shape.head_dim * (context_tokens + tokens)
    return batch * tokens * (2.0 * used + attended)


def modelled_forward(
    shape: Architecture,
    card: Card,
    *,
    tokens: int = 1,
    context_tokens: int = 0,
    batch: int = 1,
    bytes_per_parameter: float = 2.0,
) -> Modelled:
    """The shortest time of a forward on `card`.

    Args:
        shape: of the model.
        card: its bandwidth and its arithmetic.
        tokens: new positions per sequence.
        context_tokens: positions in each sequence's cache.
        batch: sequences side by side.
        bytes_per_parameter: 2 for bf16, of weights and cache alike.
    """
    size = {"tokens": tokens, "context_tokens": context_tokens, "batch": batch}
    read = shape.bytes_read(
        **size, bytes_per_parameter=bytes_per_parameter, bytes_per_value=bytes_per_parameter
    )
    reading = memory_floor_ms(read, card.bandwidth_gb_s)
    computing = forward_flops(shape, **size) / card.bf16_tflops / 1e9
    return (
        Modelled(reading, "memory") if reading >= computing else Modelled(computing, "arithmetic")
    )
