"""What limits a measured step: the memory floor under every timed forward, and what is above it.

A step takes the time of reading its bytes, of its arithmetic, and of everything else: launching
kernels, Python, synchronising. Only the first two are the model's. Three numbers part them:

- MBU, the memory floor / the time, is the share that reading explains;
- what a further position adds to a forward, beyond the bytes that it adds, / the step is the share
  that arithmetic explains (a step computes one position), the largest over the forwards timed;
- the rest is overhead.

A step is called launch-bound where reading explains less than 40 % of it and overhead more than
half. A flat verify curve alone does not show that: a step that waits for memory is as flat.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.records import LatencyRow
from harness.theory.hardware import Architecture, memory_floor_ms, model_bandwidth_utilisation

LAUNCH_BOUND_MBU = 0.4
LAUNCH_BOUND_OVERHEAD = 0.5
DECODING = ("step", "verify")

Bound = Literal["launches", "memory", "arithmetic"]


@dataclass(frozen=True)
class Reader:
    """A model that reads its bytes at some bandwidth.

    Attributes:
        shape: its sizes.
        bytes_per_parameter: of weights and cache alike.
        bandwidth_gb_s: of the memory that they are read from.
        source: how that is known.
    """

    shape: Architecture
    bytes_per_parameter: float
    bandwidth_gb_s: float
    source: Literal["measured", "datasheet"]

    def bytes_read(self, row: LatencyRow) -> float:
        """Bytes that a timed forward must read."""
        return self.shape.bytes_read(
            tokens=row.tokens,
            context_tokens=row.context_tokens,
            batch=row.batch,
            bytes_per_parameter=self.bytes_per_parameter,
            bytes_per_value=self.bytes_per_parameter,
        )


def with_floors(rows: Iterable[LatencyRow], readers: Mapping[str, Reader]) -> list[LatencyRow]:
    """The rows with floor, MBU and the bandwidth's source, where they apply.

    Args:
        rows: of latency.csv.
        readers: by role; a role without one keeps its empty fields. A prefill is bound by its
            arithmetic, so it gets none either.
    """
    filled: list[LatencyRow] = []
    for row in rows:
        reader = readers.get(row.role)
        if reader is None or row.kind not in DECODING:
            filled.append(row)
            continue
        read = reader.bytes_read(row)
        filled.append(
            replace(
                row,
                floor_ms=memory_floor_ms(read, reader.bandwidth_gb_s),
                mbu=model_bandwidth_utilisation(read, row.median_ms, reader.bandwidth_gb_s),
                bandwidth_source=reader.source,
            )
        )
    return filled


@dataclass(frozen=True)
class StepBound:
    """What a step's time goes to.

    Attributes:
        role, model, context_tokens, batch: which step.
        step_ms, floor_ms, mbu: as in latency.csv.
        positions: the most positions in one forward that were timed.
        positions_ratio: that forward / the step: how little the time depends on the work.
        arithmetic_share: of the step, by what a further position adds at most.
        overhead_share: what neither reading nor arithmetic explains.
        bound: the largest of the three.
        launch_bound: MBU below 0.4 and overhead above one half.
    """

    role: str
    model: str
    context_tokens: int
    batch: int
    step_ms: float
    floor_ms: float
    mbu: float
    positions: int
    positions_ratio: float
    arithmetic_share: float
    overhead_share: float
    bound: Bound
    launch_bound: bool


def step_bounds(rows: Sequence[LatencyRow]) -> list[StepBound]:
    """One entry per model, context and batch of which the step and a longer forward were timed."""
    bounds: list[StepBound] = []
    for step in (row for row in rows if row.kind == "step" and row.batch == 1):
        longer = [row for row in rows if row.kind == "verify" and _place(row) == _place(step)]
        several = sorted((row for row in longer if row.tokens > 1), key=lambda row: row.tokens)
        if several:
            bound = _bound(step, several)
            if bound is not None:
                bounds.append(bound)
    return bounds


def first_bounds(bounds: Sequence[StepBound]) -> list[StepBound]:
    """Each model's at its shortest context: what is said of the model in one line."""
    ordered = sorted(bounds, key=lambda bound: bound.context_tokens)
    first = {bound.role: bound for bound in reversed(ordered)}
    return [first[role] for role in ("target", "draft") if role in first]


def _place(row: LatencyRow) -> tuple[str, str, int, int]:
    return (row.role, row.model, row.context_tokens, row.batch)


def _bound(step: LatencyRow, longer: Sequence[LatencyRow]) -> StepBound | None:
    if step.mbu is None or step.floor_ms is None:
        return None
    widest = longer[-1]
    # The largest over n: kernels change with n, and a step is not to be called overhead by a luck
    further = [
        (row.median_ms - step.median_ms - ((row.floor_ms or 0.0) - step.floor_ms))
        / (row.tokens - 1)
        for row in longer
    ]
    arithmetic = max(0.0, max(further) / step.median_ms)
    overhead = max(0.0, 1.0 - step.mbu - arithmetic)
    shares: dict[Bound, float] = {
        "launches": overhead,
        "memory": step.mbu,
        "arithmetic": arithmetic,
    }
    return StepBound(
        role=step.role,
        model=step.model,
        context_tokens=step.context_tokens,
        batch=step.batch,
        step_ms=step.median_ms,
        floor_ms=step.floor_ms,
        mbu=step.mbu,
        positions=widest.tokens,
        positions_ratio=widest.median_ms / step.median_ms,
        arithmetic_share=arithmetic,
        overhead_share=overhead,
        bound=max(shares, key=shares.__getitem__),
        launch_bound=step.mbu < LAUNCH_BOUND_MBU and overhead > LAUNCH_BOUND_OVERHEAD,
    )
