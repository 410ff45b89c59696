"""What a round is made of: its parts timed on their own, beside whole rounds of the real loop.

For each prompt the loop generates a few rounds with nothing but a clock around each; then the same
rounds (same tokens, same caches) are gone through once more in pieces, with the clock read, and the
device waited for, between one piece and the next. Both come from the same public pieces of
`harness.decoding`, so what the pieces leave unexplained is the loop's own doing, or what the waits
between them cost or hide. Plain decoding and a bare target step stand beside them: the unit and the
baseline of every ratio. All are interleaved prompt by prompt, and their order rotates.

Where the model records a verify and its accept step as one launch, the two cannot be told apart,
and their common part is called "verify + accept".
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.decoding.autoregressive import autoregressive_rounds
from harness.decoding.drafters import ModelDrafter
from harness.decoding.protocols import CausalModel, Generation
from harness.decoding.sampling import SamplingParameters, Uniforms, host_tokens
from harness.decoding.speculative import (
    Verifier,
    check_logits,
    emitted_round,
    outcome_of,
    speculative_rounds,
    verified,
)
from harness.measurement.clock import Clock
from harness.records import PartTiming

TOGETHER = "verify + accept"
# Few rounds a visit: a round and its parts are to be timed within moments of one another
MOST_ROUNDS = 2
LEAST_VISITS, MOST_VISITS = 2, 60
# Visits are as many as this time allows, within those bounds
BUDGET_S = 20.0


@dataclass(frozen=True)
class Bench:
    """The pair whose rounds are timed.

    Attributes:
        target, draft: with caches.
        sampling: how tokens are drawn.
        seed: of the uniforms.
        synthetic: synthetic acceptance by K, chances given what came before; None where it is real.
    """

    target: CausalModel
    draft: CausalModel
    sampling: SamplingParameters
    seed: int = 0
    synthetic: Mapping[int, tuple[float, ...]] | None = None

    def rates(self, k: int) -> tuple[float, ...] | None:
        """The synthetic chances at one K."""
        return (self.synthetic or {}).get(k)


Samples = dict[tuple[int, str], list[float]]
Tokens = dict[tuple[int, str], list[int]]


@dataclass
class _Book:
    """What has been timed so far."""

    seconds: Samples
    tokens: Tokens

    def note(self, k: int, part: str, seconds: float, tokens: int | None = None) -> None:
        self.seconds.setdefault((k, part), []).append(seconds)
        if tokens is not None:
            self.tokens.setdefault((k, part), []).append(tokens)


@torch.inference_mode()
def time_rounds(
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    ks: Sequence[int],
    *,
    room: int,
    tick: Callable[[], None] = lambda: None,
) -> list[PartTiming]:
    """Time whole rounds and their parts at every K, plain rounds and bare steps, interleaved.

    Args:
        bench: the pair.
        prompts: token ids; each visit takes the next.
        ks: numbers of draft tokens, each 1 or more.
        room: positions that the caches are sure to have after any of the prompts, at least
            max(ks) + 1.
        tick: called after each visit, for progress.

    Returns:
        One PartTiming per (K, part), raw samples; the i-th sample of every part of a K and of its
        whole rounds is of the same round of the same text.

    Raises:
        BrokenLogitsError: logits of the target or the draft are not finite.
    """
    clock = Clock(bench.target, bench.draft)
    for k in ks:  # a round after a full acceptance may come late, and must not be recorded then
        ModelDrafter(bench.draft, bench.sampling).prepare(k)
    visit_s = _visit(bench, prompts[0], ks, room, 0, clock, _Book({}, {}))  # warm-up
    visit_s = min(visit_s, _visit(bench, prompts[0], ks, room, 0, clock, _Book({}, {})))
    most = min(MOST_VISITS, max(LEAST_VISITS, int(BUDGET_S / visit_s)))
    book = _Book({}, {})
    for number in range(most):
        _visit(bench, prompts[number % len(prompts)], ks, room, number, clock, book)
        tick()
    return [
        PartTiming(k, part, tuple(seconds), tuple(book.tokens.get((k, part), ())))
        for (k, part), seconds in sorted(book.seconds.items())
    ]


def _visit(
    bench: Bench,
    prompt: Sequence[int],
    ks: Sequence[int],
    room: int,
    number: int,
    clock: Clock,
    book: _Book,
) -> float:
    """Everything once on one prompt; returns the seconds it took."""
    begin = time.perf_counter()
    turn = number % (len(ks) + 1)
    order = [0, *ks]
    for k in order[turn:] + order[:turn]:
        if k == 0:
            _plain(bench, prompt, room, clock, book)
            continue
        rounds = max(1, min(MOST_ROUNDS, room // (k + 1)))
        # Which of the two goes first alternates, so that what warms up or drifts hits both alike
        for arm in (_whole, _pieces) if number % 2 else (_pieces, _whole):
            arm(bench, prompt, k, rounds, clock, book)
    return time.perf_counter() - begin


def _generation(bench: Bench, prompt: Sequence[int], k: int, rounds: int) -> Generation:
    """Long enough that none of the timed rounds is cut."""
    positions = (rounds + 1) * (k + 1)
    return Generation(
        prompt=prompt,
        budget=rounds * (k + 1) + 1,
        sampling=bench.sampling,
        uniforms=Uniforms.keyed(bench.seed, "parts", 0, positions, bench.target.device),
        num_draft_tokens=k,
        synthetic=bench.rates(k),
    )


def _plain(bench: Bench, prompt: Sequence[int], room: int, clock: Clock, book: _Book) -> None:
    """Turns of the plain loop, each followed by a bare step at the same place."""
    target, rounds = bench.target, min(MOST_ROUNDS, room - 1)
    target.prefill(prompt[:-1])
    token = torch.tensor(prompt[-1:], device=target.device)
    turns = autoregressive_rounds(target, _generation(bench, prompt, 0, rounds))
    for _ in range(rounds):
        start = clock.now()
        next(turns)
        book.note(0, "round", clock.now() - start, 1)
        target.rewind(0)
        start = clock.now()
        target.forward(token)
        book.note(0, "step", clock.now() - start)
        target.rewind(1)


def _whole(
    bench: Bench, prompt: Sequence[int], k: int, rounds: int, clock: Clock, book: _Book
) -> None:
    """Rounds of the real loop, a clock around each."""
    drafter = ModelDrafter(bench.draft, bench.sampling)
    bench.target.prefill(prompt[:-1])
    drafter.begin(prompt)
    turns = speculative_rounds(bench.target, drafter, _generation(bench, prompt, k, rounds))
    for _ in range(rounds):
        start = clock.now()
        done = next(turns)
        book.note(k, "round", clock.now() - start, len(done.tokens))


def _pieces(
    bench: Bench, prompt: Sequence[int], k: int, rounds: int, clock: Clock, book: _Book
) -> None:
    """The same rounds piece by piece."""
    target, generation = bench.target, _generation(bench, prompt, k, rounds)
    drafter = ModelDrafter(bench.draft, bench.sampling)
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
        book.note(k, "draft", drafted - start)
        if together:
            outcome = verified(target, last, proposal, verifier, position)
            decided = clock.now()
            book.note(k, TOGETHER, decided - drafted)
        else:
            logits = target.forward(torch.cat([last, proposal.tokens]))
            forwarded = clock.now()
            outcome = outcome_of(
                proposal, verifier.decide(logits, proposal, *verifier.uniforms(position, k))
            )
            decided = clock.now()
            book.note(k, "verify", forwarded - drafted)
            book.note(k, "accept", decided - forwarded)
        kept, *tokens = host_tokens(outcome)
        check_logits(tokens, kept, position)
        last = outcome[-1:]
        text += emitted_round(generation, text, tokens, kept).tokens
        read = clock.now()
        book.note(k, "host", read - decided)
        target.rewind(len(tokens) - 1 - kept)
        drafter.advance(proposal, kept, last)
        book.note(k, "rewind", clock.now() - read)
