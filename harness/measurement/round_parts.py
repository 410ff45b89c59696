"""Parts of a round, timed on their own next to whole rounds of the real loop.

For each prompt the loop generates a few rounds with nothing but a clock around each; then the same
rounds (same tokens, same caches) are gone through once more part by part, with the clock read, and
the device waited for, between one part and the next. Both come from the same public functions of
`harness.decoding`, so what the parts leave unexplained is what the loop itself costs, or what the
waits between them cost or hide. Plain decoding and a bare target step are timed with them: the unit
and the baseline of every ratio. All are interleaved prompt by prompt, in an order that each visit
permutes anew.

Each (K, part) is one record: `harness.records.PartTiming`, as `StepTiming` is of a forward alone.
Where the model records a verify and its accept step as one launch, the two cannot be separated, and
their common part is called "verify + accept".
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from harness.decoding.loops import (
    Verifier,
    autoregressive_rounds,
    check_logits,
    emitted_round,
    outcome_of,
    speculative_rounds,
    verified,
)
from harness.decoding.model_drafter import ModelDrafter
from harness.decoding.protocols import CausalModel, Generation
from harness.decoding.sampling import SamplingParameters, Uniforms, host_tokens
from harness.measurement.clock import Clock, undisturbed
from harness.records import VERIFY_AND_ACCEPT, PartTiming

# Few rounds a visit: a round and its parts are to be timed within moments of one another
MOST_ROUNDS = 2
LEAST_VISITS, MOST_VISITS = 2, 60
# Visits are as many as this time allows, within those bounds
BUDGET_S = 20.0


@dataclass(frozen=True)
class TimedPair:
    """The pair whose rounds are timed, with how it draws its tokens.

    Attributes:
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


@torch.inference_mode()
def time_rounds(
    pair: TimedPair,
    prompts: Sequence[Sequence[int]],
    ks: Sequence[int],
    *,
    positions: int,
    expect: Callable[[int], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> list[PartTiming]:
    """Time whole rounds and their parts at every K, plain rounds and bare steps, interleaved.

    Args:
        prompts: token ids; each visit takes the next.
        ks: numbers of draft tokens, each 1 or more.
        positions: that the caches are sure to have after any of the prompts, at least max(ks) + 1.
        expect, tick: called with the number of visits once it is known, and after each.

    Returns:
        One PartTiming per (K, part), raw samples; the i-th sample of every part of a K and of its
        whole rounds is of the same round of the same text.

    Raises:
        BrokenLogitsError: logits of the target or the draft are not finite.
    """
    for k in ks:  # a round after a full acceptance may come late, and must not be recorded then
        ModelDrafter(pair.draft, pair.sampling).prepare(k)
    warm_up = RoundTimer(pair)  # twice: the first visit compiles and fills caches
    visit_s = min(warm_up.visit(prompts[0], ks, positions, 0) for _ in range(2))
    timer, visits = RoundTimer(pair), min(MOST_VISITS, max(LEAST_VISITS, int(BUDGET_S / visit_s)))
    expect(visits)
    with undisturbed():
        for number in range(visits):
            timer.visit(prompts[number % len(prompts)], ks, positions, number)
            tick()
    return [
        PartTiming(k, part, tuple(seconds), tuple(timer.tokens.get((k, part), ())))
        for (k, part), seconds in sorted(timer.seconds.items())
    ]


class RoundTimer:
    """Times rounds of a pair and keeps every sample, by (K, part)."""

    def __init__(self, pair: TimedPair) -> None:
        self.seconds: dict[tuple[int, str], list[float]] = {}
        self.tokens: dict[tuple[int, str], list[int]] = {}
        self._pair, self._clock = pair, Clock(pair.target, pair.draft)
        self._since = 0.0

    def _start(self) -> None:
        self._since = self._clock.now()

    def _stop(self, k: int, part: str) -> None:
        now = self._clock.now()
        self.seconds.setdefault((k, part), []).append(now - self._since)
        self._since = now

    def visit(self, prompt: Sequence[int], ks: Sequence[int], positions: int, number: int) -> float:
        """Everything once on one prompt; returns the seconds it took."""
        begin = perf_counter()
        for k in random.Random(number).sample([0, *ks], len(ks) + 1):
            if k == 0:
                self.plain_rounds(prompt, min(MOST_ROUNDS, positions - 1))
                continue
            rounds = max(1, min(MOST_ROUNDS, positions // (k + 1)))
            both = (self.whole_rounds, self.parts)
            # Which goes first alternates, so that what warms up or drifts hits both alike
            for timed in both if number % 2 else both[::-1]:
                timed(prompt, k, rounds)
        return perf_counter() - begin

    def plain_rounds(self, prompt: Sequence[int], rounds: int) -> None:
        """Steps of the plain loop, each followed by a bare forward at the same place."""
        target = self._pair.target
        target.prefill(prompt[:-1])
        token = torch.tensor(prompt[-1:], device=target.device)
        loop = autoregressive_rounds(target, self._pair.generation(prompt, 0, rounds))
        for _ in range(rounds):
            self._start()
            next(loop)
            self._stop(0, "round")
            self.tokens.setdefault((0, "round"), []).append(1)
            target.rewind(0)
            self._start()
            target.forward(token)
            self._stop(0, "step")
            target.rewind(1)

    def whole_rounds(self, prompt: Sequence[int], k: int, rounds: int) -> None:
        """Rounds of the real loop, a clock around each."""
        pair = self._pair
        drafter = ModelDrafter(pair.draft, pair.sampling)
        pair.target.prefill(prompt[:-1])
        drafter.begin(prompt)
        loop = speculative_rounds(pair.target, drafter, pair.generation(prompt, k, rounds))
        for _ in range(rounds):
            self._start()
            done = next(loop)
            self._stop(k, "round")
            self.tokens.setdefault((k, "round"), []).append(len(done.tokens))

    def parts(self, prompt: Sequence[int], k: int, rounds: int) -> None:
        """The same rounds part by part."""
        pair, target = self._pair, self._pair.target
        generation = pair.generation(prompt, k, rounds)
        drafter = ModelDrafter(pair.draft, pair.sampling)
        verifier = Verifier(target, generation)
        one_launch = getattr(target, "recorder", None) is not None
        target.prefill(prompt[:-1])
        drafter.begin(prompt)
        last = torch.tensor(prompt[-1:], device=target.device)
        text: list[int] = []
        for _ in range(rounds):
            position = len(text)
            self._start()
            proposal = drafter.propose(k, generation.uniforms.draft[position : position + k])
            self._stop(k, "draft")
            if one_launch:
                outcome = verified(target, last, proposal, verifier, position)
                self._stop(k, VERIFY_AND_ACCEPT)
            else:
                logits = target.forward(torch.cat([last, proposal.tokens]))
                self._stop(k, "verify")
                outcome = outcome_of(
                    proposal, verifier.decide(logits, proposal, *verifier.uniforms(position, k))
                )
                self._stop(k, "accept")
            kept, *tokens = host_tokens(outcome)
            check_logits(tokens, kept, position)
            last = outcome[-1:]
            text += emitted_round(generation, text, tokens, kept).tokens
            self._stop(k, "host")
            target.rewind(len(tokens) - 1 - kept)
            drafter.advance(proposal, kept, last)
            self._stop(k, "rewind")
