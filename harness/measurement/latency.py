"""Time the forwards that a round is made of: the draft's step, the target's step, the verify.

A verify of n positions is timed for every n = 1..K + 1, because v(n) = verify(n) / step is what
peers take for 1 and what a mixture of experts or a slow attention makes of it. Kinds are
interleaved within each repetition and their order rotates, so that drift hits all alike; every raw
sample is kept.

A round waits only for the target: its K draft steps run one after the other, as one launch where
the model records graphs. So the draft's steps are timed K in a row, and a sample is their mean.
Plain decoding reads every token back to the host, so the target's step is timed alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, Drafter, recorded
from harness.measurement.clock import Clock
from harness.records import StepTiming

WARMUP = 3


@dataclass(frozen=True)
class Forward:
    """One kind of forward to be timed.

    Attributes:
        role, model: whose it is.
        kind: step, verify or prefill.
        tokens: positions computed; for a prefill the whole context.
        context_tokens: positions in the cache before it (0 for a prefill).
    """

    role: Literal["target", "draft"]
    model: str
    kind: Literal["step", "verify", "prefill"]
    tokens: int
    context_tokens: int


@dataclass(frozen=True)
class Player:
    """A model with the name and the part it plays."""

    role: Literal["target", "draft"]
    name: str
    model: CausalModel


def plan_forwards(players: Sequence[Player], max_k: int, context_tokens: int) -> list[Forward]:
    """List what is to be timed: steps and prefills of each, verifies of the target."""
    forwards: list[Forward] = []
    for player in players:
        forwards.append(Forward(player.role, player.name, "prefill", context_tokens, 0))
        forwards.append(Forward(player.role, player.name, "step", 1, context_tokens))
        if player.role == "target":
            forwards += [
                Forward(player.role, player.name, "verify", count, context_tokens)
                for count in range(1, max_k + 2)
            ]
    return forwards


def time_forwards(
    players: Sequence[Player],
    max_k: int,
    *,
    context: Sequence[int],
    repetitions: int,
    beside: str | None = None,
    tick: Callable[[], None] = lambda: None,
) -> list[StepTiming]:
    """Time every forward `repetitions` times, interleaved.

    Args:
        players: the target and, if any, the draft.
        max_k: the largest K; verifies go up to max_k + 1 positions, and as many of the draft's
            steps are timed in a row.
        context: token ids that fill the cache; its length is context_tokens.
        repetitions: samples of each, after warm-up.
        beside: the draft's name, where several are timed one after the other.
        tick: called after each repetition, for progress.

    Returns:
        One StepTiming per forward, raw samples in seconds.
    """
    forwards = plan_forwards(players, max_k, len(context))
    by_role = {player.role: player.model for player in players}
    clock = Clock(*by_role.values())
    samples: dict[Forward, list[float]] = {forward: [] for forward in forwards}
    for repetition in range(-WARMUP, repetitions):
        turn = repetition % len(forwards)
        prefills = [forward for forward in forwards if forward.kind == "prefill"]
        others = [forward for forward in forwards if forward.kind != "prefill"]
        # Prefills go first: they leave the context in the cache for the rest.
        for forward in prefills + others[turn:] + others[:turn]:
            times = times_in_a_row(forward.role, forward.kind, max_k)
            seconds = _time_one(by_role[forward.role], forward, context, clock, times)
            if repetition >= 0:
                samples[forward].append(seconds)
        tick()
    return [
        StepTiming(
            forward.role,
            forward.model,
            forward.kind,
            forward.tokens,
            forward.context_tokens,
            1,
            tuple(durations),
            beside,
        )
        for forward, durations in samples.items()
    ]


def time_lookups(
    drafter: Drafter, name: str, max_k: int, context: Sequence[int], repetitions: int
) -> StepTiming:
    """Time a drafter that has no model: one proposal of max_k tokens after `context`.

    It stands where a model's draft step does, but costs its time once a round.
    """
    clock, seconds = Clock(), []
    uniforms = torch.empty(max_k)
    drafter.begin(context)
    for repetition in range(-WARMUP, repetitions):
        start = clock.now()
        drafter.propose(max_k, uniforms)
        if repetition >= 0:
            seconds.append(clock.now() - start)
    return StepTiming("draft", name, "step", 1, len(context), 1, tuple(seconds), name)


def _time_one(
    model: CausalModel, forward: Forward, context: Sequence[int], clock: Clock, times: int
) -> float:
    """Seconds of one forward, the mean of `times` in a row."""
    if forward.kind == "prefill":
        start = clock.now()
        model.prefill(context)
        return clock.now() - start
    tokens = torch.tensor(
        [context[index % len(context)] for index in range(forward.tokens)], device=model.device
    )
    model.rewind(0)
    start = clock.now()
    in_a_row(model, model.forward, tokens, times)
    seconds = clock.now() - start
    model.rewind(forward.tokens * times)
    return seconds / times


def times_in_a_row(role: str, kind: str, max_k: int) -> int:
    """How many forwards of a kind a round runs without waiting in between: K for draft steps."""
    return max(1, max_k) if (role, kind) == ("draft", "step") else 1


def in_a_row(
    model: CausalModel, forward: Callable[[Tensor], Tensor], tokens: Tensor, times: int
) -> None:
    """Run `times` forwards of a model, as one launch where the model records graphs."""
    if times == 1:
        forward(tokens)
        return

    def work(ids: Tensor) -> tuple[Tensor]:
        for _ in range(times - 1):
            forward(ids)
        return (forward(ids),)

    recorded(model, ("in a row", *tokens.shape, times), work, tokens)
