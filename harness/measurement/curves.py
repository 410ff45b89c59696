"""Step and verify curves: how a forward's time grows with positions, context and batch.

The forwards of one (context, batch) share a cache that takes a while to fill, and with CUDA graphs
a fill drops what was recorded. So samples are taken in a few visits: each fills the caches, warms
up, and times every forward in turn, interleaved and rotating as in `latency`; a second visit, with
every other cell between the two, shows the drift of the machine as scatter.

New work is compiled and recorded first, which can take longer than all the timing, so the two have
separate budgets.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from harness.decoding.protocols import recorder_of
from harness.measurement.clock import Clock
from harness.measurement.latency import Player, in_a_row, times_in_a_row
from harness.models.cached import CachedModel
from harness.models.memory import is_out_of_memory
from harness.records import SkippedCell, StepTiming

VISITS = 2
WARMUP = 2
# Rounds over all forwards of a cell, per visit: as many as this time allows
SECONDS_PER_VISIT = 1.0
LEAST_ROUNDS, MOST_ROUNDS = 3, 10
TIMING = "timing curves"

Cell = tuple[int, int]


@dataclass(frozen=True)
class CurveForward:
    """One forward of a cell: `tokens` new positions for every sequence, `times` in a row."""

    player: Player
    kind: Literal["step", "verify"]
    tokens: int
    times: int = 1


def curve_forwards(players: Sequence[Player], max_k: int) -> list[CurveForward]:
    """Steps of both, verifies of the target, and of the draft the widest one.

    The draft never verifies; how little its time depends on positions tells what bounds its step.
    """
    forwards: list[CurveForward] = []
    for player in players:
        widths = range(1, max_k + 2) if player.role == "target" else (max_k + 1,)
        times = times_in_a_row(player.role, "step", max_k)
        forwards.append(CurveForward(player, "step", 1, times))
        forwards += [CurveForward(player, "verify", width) for width in widths]
    return forwards


@torch.inference_mode()
def time_curves(
    players: Sequence[Player],
    max_k: int,
    cells: Sequence[Cell],
    *,
    refused: Callable[[int, int], str | None] = lambda _context, _batch: None,
    budget_s: float | None = None,
    recording_budget_s: float | None = None,
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _label: None,
) -> tuple[list[StepTiming], list[SkippedCell]]:
    """Time every forward of every (context_tokens, batch).

    Args:
        players: target and draft, whose models fill caches by themselves.
        max_k: the largest K; verifies go up to max_k + 1 positions.
        cells: (context_tokens, batch), cheapest first.
        refused: why a cell must not be tried, or None.
        budget_s: seconds after which no further cell is begun, recording and compiling not
            counted; None sets no limit.
        recording_budget_s: the same for recording and compiling alone.
        tick: called after each visit of a cell, for progress.
        say: called with what is being done, for progress.

    Returns:
        The timings with raw samples, and the cells that were left out: refused, out of memory, or
        beyond the budget. What a cell had given before it failed is dropped.
    """
    samples: dict[Cell, dict[CurveForward, list[float]]] = {cell: {} for cell in cells}
    skipped: dict[Cell, str] = {}
    spent = _Spent(players)
    for visit in range(VISITS):
        for cell in [*cells[visit:], *cells[:visit]]:
            late = spent.beyond(budget_s, recording_budget_s)
            if late and not samples[cell] and cell not in skipped:
                skipped[cell] = f"{late}; name it in contexts= and batches= to time it"
            elif reason := refused(*cell):
                skipped[cell] = reason
            if cell not in skipped and not late:
                reason = _visit(players, max_k, cell, visit, samples[cell], say)
                if reason:
                    skipped[cell] = reason
            tick()
    _release(players)
    kept = {cell: own for cell, own in samples.items() if cell not in skipped}
    return _timings(kept), [SkippedCell(*cell, reason) for cell, reason in skipped.items()]


class _Spent:
    """Time since this was made, split into recording and compiling, and everything else."""

    def __init__(self, players: Sequence[Player]) -> None:
        self._models = {id(player.model): _model(player) for player in players}
        self._recorded_before = self._recorded_s()
        self._begin = time.perf_counter()

    def beyond(self, measuring_s: float | None, recording_s: float | None) -> str | None:
        """Which of the two budgets is used up, in words; None where neither is."""
        recorded = self._recorded_s() - self._recorded_before
        measured = time.perf_counter() - self._begin - recorded
        if measuring_s is not None and measured > measuring_s:
            return f"no time left of the {measuring_s:g} s for timing"
        if recording_s is not None and recorded > recording_s:
            return f"no time left of the {recording_s:g} s for recording and compiling"
        return None

    def _recorded_s(self) -> float:
        return sum(model.recording_s for model in self._models.values())


def _visit(
    players: Sequence[Player],
    max_k: int,
    cell: Cell,
    visit: int,
    samples: dict[CurveForward, list[float]],
    say: Callable[[str], None],
) -> str | None:
    """Fill, warm up, and time a cell's forwards in turn; the reason if memory ran out."""
    context, batch = cell
    try:
        for player in players:
            _model(player).fill(batch, context)
        forwards = curve_forwards(players, max_k)
        inputs = {forward: _tokens(forward, batch) for forward in forwards}
        clock = Clock(*(player.model for player in players))
        once = SECONDS_PER_VISIT
        if any(recorder_of(player.model) is not None for player in players):
            say(f"compiling for batch {batch} after {context} tokens, the first time takes minutes")
        for _ in range(WARMUP):
            once = sum(_time_one(forward, tokens, clock) for forward, tokens in inputs.items())
            say(TIMING)
        rounds = int(min(MOST_ROUNDS, max(LEAST_ROUNDS, SECONDS_PER_VISIT / once)))
        for number in range(rounds):
            turn = (number + visit) % len(forwards)
            for forward in forwards[turn:] + forwards[:turn]:
                seconds = _time_one(forward, inputs[forward], clock)
                samples.setdefault(forward, []).append(seconds)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _release(players)
        return "out of memory"
    return None


def _time_one(forward: CurveForward, tokens: torch.Tensor, clock: Clock) -> float:
    model = _model(forward.player)
    start = clock.now()
    in_a_row(model, model.forward_batch, tokens, forward.times)
    seconds = clock.now() - start
    model.rewind(forward.tokens * forward.times)
    return seconds / forward.times


def _tokens(forward: CurveForward, batch: int) -> torch.Tensor:
    """Token ids, which ones does not matter, [batch, n] on the model's device."""
    model = _model(forward.player)
    ids = torch.arange(batch * forward.tokens, device=model.device) % model.vocab_size
    return ids.view(batch, forward.tokens)


def _model(player: Player) -> CachedModel:
    assert isinstance(player.model, CachedModel)  # only those fill a cache of several sequences
    return player.model


def _release(players: Iterable[Player]) -> None:
    """Let go of large caches; the next prefill makes its own."""
    for player in players:
        _model(player).prefill([])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _timings(
    samples: Mapping[Cell, Mapping[CurveForward, Sequence[float]]],
) -> list[StepTiming]:
    return [
        StepTiming(
            forward.player.role,
            forward.player.name,
            forward.kind,
            forward.tokens,
            context,
            batch,
            tuple(seconds),
        )
        for (context, batch), own in samples.items()
        for forward, seconds in own.items()
    ]
