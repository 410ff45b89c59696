"""What a round is made of: its parts timed on their own, next to whole rounds of the real loop.

For each prompt the loop generates a few rounds with nothing but a clock around each; then the same
rounds (same tokens, same caches) are gone through once more in pieces, with the clock read, and the
device waited for, between one piece and the next. Both come from the same public pieces of
`harness.decoding`, so what the pieces leave unexplained is the loop's own doing, or what the waits
between them cost or hide. Plain decoding and a bare target step are timed with them: the unit and
the baseline of every ratio. All are interleaved prompt by prompt, and their order rotates.

Where the model records a verify and its accept step as one launch, the two cannot be separated,
and their common part is called "verify + accept".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import (
    Verifier,
    autoregressive_rounds,
    check_logits,
    emitted_round,
    outcome_of,
    speculative_rounds,
    verified,
)
from harness.decoding.protocols import CausalModel, Generation
from harness.decoding.sampling import SamplingParameters, Uniforms, host_tokens
from harness.measurement.step_times import Clock
from harness.records import VERIFY_AND_ACCEPT, PartTiming

# Few rounds a visit: a round and its parts are to be timed within moments of one another
MOST_ROUNDS = 2
LEAST_VISITS, MOST_VISITS = 2, 60
# Visits are as many as this time allows, within those bounds
BUDGET_S = 20.0


@dataclass(frozen=True)
class TimedPair:
    """The pair whose rounds are timed.

    Attributes:
        target, draft: with caches.
        sampling: how tokens are drawn.
        seed: of the uniforms.
        synthetic: synthetic acceptance by K, chances given what came before; else empty.
    """

    target: CausalModel
    draft: CausalModel
    sampling: SamplingParameters
    seed: int = 0
    synthetic: Mapping[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])

    def generation(self, prompt: Sequence[int], k: int, rounds: int) -> Generation:
        """Long enough that none of the timed rounds is cut."""
        positions = (rounds + 1) * (k + 1)
        return Generation(
            prompt=prompt,
            budget=rounds * (k + 1) + 1,
            sampling=self.sampling,
            uniforms=Uniforms.keyed(self.seed, "parts", 0, positions, self.target.device),
            num_draft_tokens=k,
            synthetic=self.synthetic.get(k),
        )


class _Samples:
    """What has been timed so far, by (K, part)."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], list[float]] = {}
        self.tokens: dict[tuple[int, str], list[int]] = {}

    def add(self, k: int, part: str, seconds: float, tokens: int | None = None) -> None:
        self.seconds.setdefault((k, part), []).append(seconds)
        if tokens is not None:
            self.tokens.setdefault((k, part), []).append(tokens)


@torch.inference_mode()
def time_rounds(
    pair: TimedPair,
    prompts: Sequence[Sequence[int]],
    ks: Sequence[int],
    *,
    positions: int,
    tick: Callable[[], None] = lambda: None,
) -> list[PartTiming]:
    """Time whole rounds and their parts at every K, plain rounds and bare steps, interleaved.

    Args:
        pair: the two models.
        prompts: token ids; each visit takes the next.
        ks: numbers of draft tokens, each 1 or more.
        positions: that the caches are sure to have after any of the prompts, at least max(ks) + 1.
        tick: called after each visit, for progress.

    Returns:
        One PartTiming per (K, part), raw samples; the i-th sample of every part of a K and of its
        whole rounds is of the same round of the same text.

    Raises:
        BrokenLogitsError: logits of the target or the draft are not finite.
    """
    clock = Clock(pair.target, pair.draft)
    for k in ks:  # a round after a full acceptance may come late, and must not be recorded then
        ModelDrafter(pair.draft, pair.sampling).prepare(k)
    visit_s = min(  # of two: the first warms up
        _visit(pair, prompts[0], ks, positions, 0, clock, _Samples()) for _ in range(2)
    )
    samples = _Samples()
    for number in range(min(MOST_VISITS, max(LEAST_VISITS, int(BUDGET_S / visit_s)))):
        _visit(pair, prompts[number % len(prompts)], ks, positions, number, clock, samples)
        tick()
    return [
        PartTiming(k, part, tuple(seconds), tuple(samples.tokens.get((k, part), ())))
        for (k, part), seconds in sorted(samples.seconds.items())
    ]


def _visit(
    pair: TimedPair,
    prompt: Sequence[int],
    ks: Sequence[int],
    positions: int,
    number: int,
    clock: Clock,
    samples: _Samples,
) -> float:
    """Everything once on one prompt; returns the seconds it took."""
    begin = perf_counter()
    first = number % (len(ks) + 1)
    order = [0, *ks]
    for k in order[first:] + order[:first]:
        if k == 0:
            _plain(pair, prompt, min(MOST_ROUNDS, positions - 1), clock, samples)
            continue
        rounds = max(1, min(MOST_ROUNDS, positions // (k + 1)))
        # Which of the two goes first alternates, so that what warms up or drifts hits both alike
        for timed in (_whole, _pieces) if number % 2 else (_pieces, _whole):
            timed(pair, prompt, k, rounds, clock, samples)
    return perf_counter() - begin


def _plain(
    pair: TimedPair, prompt: Sequence[int], rounds: int, clock: Clock, samples: _Samples
) -> None:
    """Steps of the plain loop, each followed by a bare forward at the same place."""
    target = pair.target
    target.prefill(prompt[:-1])
    token = torch.tensor(prompt[-1:], device=target.device)
    loop = autoregressive_rounds(target, pair.generation(prompt, 0, rounds))
    for _ in range(rounds):
        start = clock.now()
        next(loop)
        samples.add(0, "round", clock.now() - start, 1)
        target.rewind(0)
        start = clock.now()
        target.forward(token)
        samples.add(0, "step", clock.now() - start)
        target.rewind(1)


def _whole(
    pair: TimedPair, prompt: Sequence[int], k: int, rounds: int, clock: Clock, samples: _Samples
) -> None:
    """Rounds of the real loop, a clock around each."""
    drafter = ModelDrafter(pair.draft, pair.sampling)
    pair.target.prefill(prompt[:-1])
    drafter.begin(prompt)
    loop = speculative_rounds(pair.target, drafter, pair.generation(prompt, k, rounds))
    for _ in range(rounds):
        start = clock.now()
        done = next(loop)
        samples.add(k, "round", clock.now() - start, len(done.tokens))


def _pieces(
    pair: TimedPair, prompt: Sequence[int], k: int, rounds: int, clock: Clock, samples: _Samples
) -> None:
    """The same rounds piece by piece."""
    target, generation = pair.target, pair.generation(prompt, k, rounds)
    drafter = ModelDrafter(pair.draft, pair.sampling)
    verifier = Verifier(target, generation)
    together = getattr(target, "recorder", None) is not None
    target.prefill(prompt[:-1])
    drafter.begin(prompt)
    last = torch.tensor(prompt[-1:], device=target.device)
    text: list[int] = []
    for _ in range(rounds):
        position = len(text)
        start = clock.now()
        proposal = drafter.propose(k, generation.uniforms.draft[position : position + k])
        drafted = clock.now()
        samples.add(k, "draft", drafted - start)
        if together:
            outcome = verified(target, last, proposal, verifier, position)
            decided = clock.now()
            samples.add(k, VERIFY_AND_ACCEPT, decided - drafted)
        else:
            logits = target.forward(torch.cat([last, proposal.tokens]))
            forwarded = clock.now()
            outcome = outcome_of(
                proposal, verifier.decide(logits, proposal, *verifier.uniforms(position, k))
            )
            decided = clock.now()
            samples.add(k, "verify", forwarded - drafted)
            samples.add(k, "accept", decided - forwarded)
        kept, *tokens = host_tokens(outcome)
        check_logits(tokens, kept, position)
        last = outcome[-1:]
        text += emitted_round(generation, text, tokens, kept).tokens
        read = clock.now()
        samples.add(k, "host", read - decided)
        target.rewind(len(tokens) - 1 - kept)
        drafter.advance(proposal, kept, last)
        samples.add(k, "rewind", clock.now() - read)
