"""Roofline: the least time of a forward, and the limit of a measured one.

A forward must read its bytes and do its arithmetic; a card that overlaps the two perfectly takes
the longer of both (the roofline model: Williams, Waterman, Patterson, "Roofline", CACM 2009). With
few sequences it waits for memory and further positions take no time, which is why speculation pays.
With many sequences the arithmetic decides, and every drafted token takes its own time. Real engines
are slower than both, so these times are floors, not forecasts.

A measured step takes the time of reading, of arithmetic, and of everything else: launching kernels,
Python, synchronising. It is split into three shares (`step_bounds`):

- the share of reading is MBU (model bandwidth utilisation), the memory floor / the time;
- the share of arithmetic is the time that a further position adds to a forward, beyond the bytes
  that it adds, / the step (which computes one position): the largest over the timed forwards, and
  at most 1 - MBU;
- the rest is overhead.

A step is launch-bound where reading is less than 40 % of it and overhead more than half. A flat
verify curve alone does not show that, since that of a step that waits for memory is as flat.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.records import LatencyRow, UserError
from harness.summary import StepBound
from harness.theory.architecture import Architecture

LAUNCH_BOUND_MBU = 0.4
LAUNCH_BOUND_OVERHEAD = 0.5
DECODING = ("step", "verify")
# A card's usable memory is up to some percent below its nominal size
MEMORY_TOLERANCE = 0.15


@dataclass(frozen=True)
class Card:
    """A card: its speeds, its memory and the price of an hour."""

    name: str
    bandwidth_gb_s: float  # memory bandwidth, 10^9 bytes per second, as data sheets give it
    bf16_tflops: float  # dense matrix rate, 10^12 operations per second
    memory_gb: float  # 10^9 bytes
    price_per_hour_usd: float | None = None  # on demand; None if unknown

    def __post_init__(self) -> None:
        for key in ("bandwidth_gb_s", "bf16_tflops", "memory_gb"):
            if not getattr(self, key) > 0.0:
                raise UserError(f"gpu.{key}={getattr(self, key)}: must be above 0")


def is_card(
    card: str, memory_gb: float, device_name: str | None, memory_bytes: float | None
) -> bool:
    """True where a device can be the card of this name in conf/gpu.

    It is compared by the device's name ("NVIDIA A100-SXM4-80GB" for a100_80) and, where it is
    known, by its memory: cards of one name are sold with different amounts.
    """
    wanted = card.lower().split("_")[0]
    words = set(re.split(r"[^a-z0-9]+", (device_name or "").lower()))
    # The A10G is also sold as an A10, and its driver reports either name
    if not words & {wanted, wanted.removesuffix("g")}:
        return False
    if memory_bytes is None:
        return True
    return abs(memory_bytes / 1e9 / memory_gb - 1.0) <= MEMORY_TOLERANCE


def memory_floor_s(bytes_read: float, bandwidth_gb_s: float) -> float:
    """The shortest time in seconds in which so many bytes can be read."""
    if not bandwidth_gb_s > 0.0:
        raise UserError(f"bandwidth_gb_s={bandwidth_gb_s}: must be above 0")
    return bytes_read / bandwidth_gb_s / 1e9


def bandwidth_utilisation(bytes_read: float, step_s: float, bandwidth_gb_s: float) -> float:
    """MBU: the memory floor of a step / the time it took; 1 is the ceiling."""
    if not step_s > 0.0:
        raise UserError(f"step_s={step_s}: must be above 0")
    return memory_floor_s(bytes_read, bandwidth_gb_s) / step_s


def forward_floor(
    shape: Architecture,
    card: Card,
    *,
    tokens: int = 1,
    context_tokens: int = 0,
    batch: int = 1,
    bytes_per_parameter: float = 2.0,
) -> float:
    """The shortest time of a forward on `card`, seconds; arguments as `Architecture.bytes_read`."""
    size = {"tokens": tokens, "context_tokens": context_tokens, "batch": batch}
    read = shape.bytes_read(**size, bytes_per_parameter=bytes_per_parameter)
    reading = memory_floor_s(read, card.bandwidth_gb_s)
    computing = shape.flops(**size) / card.bf16_tflops / 1e12
    return max(reading, computing)


@dataclass(frozen=True)
class ReadingModel:
    """A model that is read from a memory of known bandwidth."""

    shape: Architecture
    bytes_per_parameter: float  # of weights and cache
    bandwidth_gb_s: float
    source: Literal["measured", "datasheet"]  # of the bandwidth

    def bytes_read(self, row: LatencyRow) -> float:
        return self.shape.bytes_read(
            tokens=row.tokens,
            context_tokens=row.context_tokens,
            batch=row.batch,
            bytes_per_parameter=self.bytes_per_parameter,
        )


def with_floors(rows: Iterable[LatencyRow], models: Mapping[str, ReadingModel]) -> list[LatencyRow]:
    """The rows of latency.csv with memory floor, MBU and the bandwidth's source, where they apply.

    A role without a model keeps its empty fields. A prefill is bound by its arithmetic, so it gets
    none either.
    """
    filled: list[LatencyRow] = []
    for row in rows:
        model = models.get(row.role)
        if model is not None and row.kind in DECODING:
            read, bandwidth = model.bytes_read(row), model.bandwidth_gb_s
            row = replace(
                row,
                floor_ms=memory_floor_s(read, bandwidth) * 1e3,
                mbu=bandwidth_utilisation(read, row.median_ms / 1e3, bandwidth),
                bandwidth_source=model.source,
            )
        filled.append(row)
    return filled


def step_bounds(rows: Sequence[LatencyRow]) -> list[StepBound]:
    """The shares of steps at batch 1, for each model and context with a timed longer forward.

    Rows without a floor have no entry.
    """

    def place(row: LatencyRow) -> tuple[str, str, int, int]:
        return (row.role, row.model, row.context_tokens, row.batch)

    bounds: list[StepBound] = []
    for step in (row for row in rows if row.kind == "step" and row.batch == 1):
        longer = [
            row
            for row in rows
            if row.kind == "verify" and row.tokens > 1 and place(row) == place(step)
        ]
        if longer and step.mbu is not None and step.floor_ms is not None:
            bounds.append(_bound(step, longer, step.mbu, step.floor_ms))
    return bounds


def shortest_context(bounds: Sequence[StepBound]) -> list[StepBound]:
    """The target's and the draft's bound at the shortest context of each."""
    ordered = sorted(bounds, key=lambda bound: bound.context_tokens)
    first = {bound.role: bound for bound in reversed(ordered)}
    return [first[role] for role in ("target", "draft") if role in first]


def _bound(
    step: LatencyRow, longer: Sequence[LatencyRow], mbu: float, floor_ms: float
) -> StepBound:
    # The maximum over n, so that one fast kernel does not make arithmetic look like overhead
    per_position_ms = max(
        (row.median_ms - step.median_ms - ((row.floor_ms or 0.0) - floor_ms)) / (row.tokens - 1)
        for row in longer
    )
    widest = max(longer, key=lambda row: row.tokens)
    # A step computes one position, so arithmetic takes at most 1 - MBU of it; a position of a
    # longer forward may take longer, where other kernels compute it
    at_most = max(0.0, 1.0 - mbu)
    arithmetic = min(max(0.0, per_position_ms / step.median_ms), at_most)
    overhead = at_most - arithmetic
    shares: dict[Literal["overhead", "memory", "arithmetic"], float] = {
        "overhead": overhead,
        "memory": mbu,
        "arithmetic": arithmetic,
    }
    return StepBound(
        role=step.role,
        model=step.model,
        context_tokens=step.context_tokens,
        batch=step.batch,
        step_s=step.median_ms / 1e3,
        floor_s=floor_ms / 1e3,
        mbu=mbu,
        positions=widest.tokens,
        positions_ratio=widest.median_ms / step.median_ms,
        arithmetic_share=arithmetic,
        overhead_share=overhead,
        bound=max(shares, key=shares.__getitem__),
        launch_bound=mbu < LAUNCH_BOUND_MBU and overhead > LAUNCH_BOUND_OVERHEAD,
    )
