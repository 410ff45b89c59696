"""Times of a plain token and a round of the running loop, R(0) and R(K), measured in visits.

A visit times plain decoding and every K, at every temperature, within moments of one another and
where it can side by side (`harness.measurement.generations`), in an order that each visit permutes
anew. So its ratios R(K) / R(0) are free of the machine's drift, and of what happened to run before.
Visits are spread over the whole run: what a run measures and what it predicts from come from the
same minutes.

Each timing is one generation of the loop that the run measures (`harness.measurement.generations`):
the same acceptance, caches, sampling, ends and clock. Only its prompt is made for it, one of the
set's behind pieces of others, so that acceptance is typical but the text is no measured cell's. It
takes at least 16 rounds, fewer where these take long, of as many texts as that needs, around the
context of the run's own generations.

Other work on the machine slows plain decoding and rounds alike, side by side; a visit says how much
of the machine it took meanwhile.

A drafter that looks its proposal up is timed by the number of tokens it proposes, n = 1, ..., K: it
looks up as ever, but fills every proposal up to n tokens.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.decoding.lookups import LookupDrafter
from harness.decoding.protocols import CausalModel, Proposal
from harness.measurement.clock import undisturbed
from harness.measurement.generations import (
    Draft,
    Models,
    Request,
    run_side_by_side,
    run_trial,
)
from harness.records import NotMeasured, RoundTiming, Trial, grouped
from harness.storage import RunFolder

# Of a pair; each draft among many gets half of them
LEAST_VISITS, MOST_VISITS = 6, 24
# Of a draft among many that loses at every K by what these show
VISITS_THAT_LOSE = 3
VISITS_PER_TEXT = 1.5
# As many again for every further so many texts: about a sixth of a long run's time
TEXTS_PER_MOST_VISITS = 48
LEAST_ROUNDS = 16
# A timing that lasts so long, in turns with those of other K, needs no more rounds: what disturbs a
# machine for 50 to 200 ms disturbs all of them, and of a slow pair all else would take minutes
TIMING_S, LEAST_SLICE = 0.35, 2
# Plain tokens of a timing at most
MOST_TOKENS = 32
WARMUP_ROUNDS = 2
# Positions in front of a prompt that are worth adding
LEAST_CONTEXT = 32
# Of a draft among many, the numbers of tokens at which its rounds are timed at most
MOST_KS = 4

Counted = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True)
class TimedLoop:
    """The loop whose rounds are timed."""

    target: CausalModel
    draft: Draft
    draft_name: str  # in the records, also where k is 0
    # By prompt set, a generation per (k, temperature), plain decoding included; which prompt of the
    # set they generate from does not matter
    requests: Mapping[str, Sequence[Request]]
    prompts: Mapping[str, Sequence[tuple[int, ...]]]  # by prompt set, the run's token ids
    positions: int  # that the caches are sure to have
    # The models of so many generations at once; None where they are run one by one
    beside: Callable[[int], Sequence[Models]] | None = None

    @property
    def new_tokens(self) -> int:
        """The budget of the run's own generations."""
        return max(entry.budget for entries in self.requests.values() for entry in entries)

    def requests_of(self, visit: int) -> list[Request]:
        """The cells that a visit times, in its order; `generation` gives each its prompts."""
        names = list(self.requests)
        timed = list(self.requests[names[visit % len(names)]])
        # Plain decoding is in every ratio of the visit, so it is timed twice; side by side
        # once: the second of two finds the weights in the caches where it follows the first
        if self.beside is None:
            timed += [entry for entry in timed if entry.k == 0]
        self._random(visit).shuffle(timed)
        return timed

    def generation(self, request: Request, visit: int, number: int, rounds: int) -> Request:
        """The number-th generation of a timing; all that a visit times has the same prompts."""
        # So the timed text lies around the middle of a long text of the run
        before = (self.new_tokens - MOST_TOKENS) // 2
        prompts = self.prompts[request.prompt_set]
        tokens = made_prompt(prompts, before, self._random(visit, number))
        return replace(
            request,
            prompt=f"rounds/{visit}",
            tokens=tokens,
            repetition=number,
            budget=min(request.budget, self.positions - len(tokens) - request.k),
            rounds=rounds,
        )

    def _random(self, *key: int) -> random.Random:
        seed = next(iter(self.requests.values()))[0].seed
        return random.Random(f"{seed} {self.draft_name} {key}")


def rounds_timed(k: int, new_tokens: int, round_s: float = 0.0) -> int:
    """The least number of rounds of a timing; tokens, of plain decoding.

    `new_tokens` is the budget of the run's own generations, `round_s` about what a round takes.
    """
    rounds = LEAST_ROUNDS if k else max(LEAST_ROUNDS, min(new_tokens, MOST_TOKENS))
    if round_s * rounds <= TIMING_S:
        return rounds
    return min(rounds, max(LEAST_SLICE, math.ceil(TIMING_S / round_s)))


def made_prompt(
    prompts: Sequence[tuple[int, ...]], before: int, chosen: random.Random
) -> tuple[int, ...]:
    """A prompt that is none of `prompts`: one of them behind `before` tokens from others.

    The whole prompt at its end makes acceptance typical: a round that accepts everything costs its
    draft more than one that rejects. A few tokens more change no time, but what a small model says;
    so fewer than LEAST_CONTEXT are one token.
    """
    order = chosen.sample(range(len(prompts)), len(prompts))
    last = prompts[order[0]]
    wanted = before if before >= LEAST_CONTEXT else 1
    pieces: list[int] = []
    while len(pieces) < wanted or (*pieces, *last) in prompts:
        order.append(order.pop(0))
        pieces += prompts[order[0]][: max(1, wanted - len(pieces))]
    return (*pieces, *last)


def visits_for(texts: int, *, among_many: bool = False) -> int:
    """The number of visits of a run that generates so many texts at every K.

    A run of many texts, most often of many repetitions, makes more: else the error of the round
    times would be what is left of the prediction's.
    """
    most = (MOST_VISITS // 2 if among_many else MOST_VISITS) * max(
        1, texts // TEXTS_PER_MOST_VISITS
    )
    return min(most, max(LEAST_VISITS, round(VISITS_PER_TEXT * texts)))


def timed_ks(ks: Sequence[int], most: int | None = None) -> list[int]:
    """The K at which the rounds of one draft among many are timed; those between are interpolated.

    They are 1, the largest, and up to two of `ks` between, about equally far apart. Where `most`
    tokens are drafted however large K is, they end with that number, and with the largest K.
    """
    positive = sorted({1, *(k for k in ks if k > 0)})
    if most is not None and most < positive[-1]:
        return [*timed_ks([*(k for k in positive if k < most), most]), positive[-1]]
    if len(positive) <= MOST_KS:
        return positive
    ideal = [1 + (positive[-1] - 1) * step / (MOST_KS - 1) for step in range(MOST_KS)]
    return sorted({min(positive, key=lambda k: abs(k - place)) for place in ideal})


def pair_ks(ks: Sequence[int], most: int | None = None, *, shorter: bool = False) -> list[int]:
    """The K at which the rounds of a pair are timed: each, and what a larger one drafts at most.

    Args:
        most: tokens that the draft drafts a round at most; None: any number.
        shorter: whether a round may propose fewer tokens than K, so that one is timed, too.
    """
    ends = {most} if most is not None and most < max(ks, default=0) else set[int]()
    return sorted({*ks, *ends, *([1] if shorter else [])})


class FullLookup:
    """Looks up as another drafter does, but always proposes as many tokens as it is asked for."""

    def __init__(self, drafter: LookupDrafter) -> None:
        self._drafter, self.begin, self.advance = drafter, drafter.begin, drafter.advance

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        """The tokens that are looked up, then the text's last token up to `count`."""
        tokens = self._drafter.draft(count)
        tokens = tokens + [self._drafter.text[-1]] * (count - len(tokens))
        return Proposal(torch.tensor(tokens, device=uniforms.device), None)


class RoundVisits:
    """The visits of one loop, some of which an earlier process may have made.

    `most` are wanted of all processes, `missing` of this one; `complete` are made as a whole.
    """

    def __init__(
        self,
        loop: TimedLoop,
        folder: RunFolder,
        *,
        visits: int,
        counted: Counted,
        enough: Callable[[Sequence[RoundTiming]], bool] = lambda _: False,
        loses: Callable[[Sequence[RoundTiming]], bool] = lambda _: False,
        in_turn: bool = False,
    ) -> None:
        """Continue with what is missing of `visits`.

        A visit that was interrupted is made again as a whole, under another number.

        Args:
            folder: keeps the timings, and notes what cannot be timed, and why: memory, or logits
                that are not finite.
            counted: shows what is done how often; gives what counts one.
            enough: whether what was timed, in LEAST_VISITS or more, needs no more visits; asked
                before more are made.
            loses: the same of VISITS_THAT_LOSE: whether the draft cannot gain at any K.
            in_turn: whether these visits take turns with other drafts'; they count apart.
        """
        self._loop, self._folder, self._stored = loop, folder, folder.rounds
        self._counted, self._enough, self._loses = counted, enough, loses
        self._refused = set(folder.manifest.not_measured)
        of_draft = [line for line in folder.rounds.read() if line.draft == loop.draft_name]
        self._in_turn = in_turn
        self._lines = lines = [line for line in of_draft if (line.turn is not None) == in_turn]
        kinds = {
            (entry.k, entry.sampling.temperature)
            for entries in loop.requests.values()
            for entry in entries
            if self._measurement(entry) not in self._refused
        }
        by_visit = grouped(lines, lambda line: line.visit)
        self._next = max((line.visit for line in of_draft), default=-1) + 1
        self.complete = sum(
            kinds <= {(line.k, line.temperature) for line in made} for made in by_visit.values()
        )
        self.most = visits
        self.missing = 0 if self._settled else max(0, visits - self.complete)
        self._made = 0
        self._warm = False

    def begin(self) -> None:
        """Make the first visit, unless all are made."""
        self.up_to(1 / max(1, self.missing))

    def up_to(self, share: float) -> None:
        """Make visits until this share of those that this process is to make is made."""
        self._make(max(0, math.ceil(self.missing * share) - self._made))

    def reach(self, visits: int) -> None:
        """Make visits until so many are complete, those of an earlier process included."""
        while self.complete < visits and not self._settled:
            self._make(visits - self.complete)

    def _make(self, visits: int) -> None:
        if not visits or self._settled:
            return
        requests, draft = self._loop.requests_of(self._next), self._loop.draft_name
        if not self._warm:  # first calls allocate, compile and record
            cells = list(dict.fromkeys(requests))
            with self._counted(f"warming up rounds of {draft}", len(cells)) as tick:
                for entry in cells:
                    warm = self._loop.generation(entry, self._next, 0, WARMUP_ROUNDS)
                    run_trial(warm, self._loop.target, self._loop.draft)
                    tick()
            self._warm = True
        count = visits * len(requests)
        with self._counted(f"timing rounds of {draft}", count) as tick, undisturbed():
            for _ in range(visits):
                self._visit(self._next, tick)
                self._next += 1
                self._made += 1
                self.complete += 1

    @property
    def _settled(self) -> bool:
        return (self.complete >= LEAST_VISITS and self._enough(self._lines)) or (
            self.complete >= VISITS_THAT_LOSE and self._loses(self._lines)
        )

    def _round_s(self, request: Request) -> float:
        """About what a round of the same K took in the quickest visit so far; inf in the first."""
        lines = (line for line in self._lines if line.k == request.k)
        return min((line.seconds / line.rounds for line in lines), default=math.inf)

    def _visit(self, number: int, tick: Callable[[], None]) -> None:
        """Time everything once, and store it as a whole."""
        every = self._loop.requests_of(number)
        asked = [entry for entry in every if self._measurement(entry) not in self._refused]
        for _ in range(len(every) - len(asked)):
            tick()
        together = [[entry] for entry in asked]
        if self._loop.beside is not None:  # of one temperature, as caches for all take memory
            together = grouped(asked, lambda entry: entry.sampling.temperature).values()
        timings = [timing for group in together for timing in self._timed(group, number, tick)]
        turn = self.complete if self._in_turn else None
        timings = [replace(timing, turn=turn) for timing in timings]
        self._stored.append(*timings)
        self._lines += timings

    def _timed(
        self, requests: Sequence[Request], visit: int, tick: Callable[[], None]
    ) -> list[RoundTiming]:
        """Timings of requests that take turns; what cannot be timed is noted.

        Each is a generation, and further ones where it ends before it has enough rounds.
        """
        loop = self._loop
        models = loop.beside(len(requests)) if loop.beside else [(loop.target, loop.draft)]

        def least(entry: Request, round_s: float) -> int:
            # Of plain tokens the first of a slice is not timed
            more = entry.k == 0 and len(requests) > 1
            return rounds_timed(entry.k, loop.new_tokens, round_s) + more

        timings = [_Timing(each, least(each, self._round_s(each))) for each in requests]
        number = 0
        while short := [index for index, each in enumerate(timings) if each.lacking]:
            made = [
                loop.generation(requests[index], visit, number, timings[index].lacking)
                for index in short
            ]
            trials = run_side_by_side(made, [models[index] for index in short])
            for index, entry, trial in zip(short, made, trials, strict=True):
                timings[index].add(trial, len(entry.tokens))
                if not self._lines:  # how long a round takes is not known before
                    timings[index].least = least(entry, timings[index].round_s)
            number += 1
        for each in timings:
            if each.error is not None:
                failed = replace(self._measurement(each.request), error=each.error)
                self._refused.add(failed)
                self._folder.note_not_measured(failed)
            tick()
        return [each.timing(visit, loop.draft_name) for each in timings if each.error is None]

    def _measurement(self, request: Request) -> NotMeasured:
        temperature = request.sampling.temperature
        if request.k == 0:
            return NotMeasured("plain_tokens", temperature=temperature)
        draft = self._loop.draft_name
        return NotMeasured("rounds", draft=draft, k=request.k, temperature=temperature)


@dataclass
class _Timing:
    """The time of one request's generations so far; it needs `least` rounds (tokens)."""

    request: Request
    least: int
    rounds: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    contexts: list[int] = field(default_factory=list[int])
    error: str | None = None

    @property
    def lacking(self) -> int:
        """Rounds."""
        return 0 if self.error is not None else max(0, self.least - self.rounds)

    @property
    def round_s(self) -> float:
        return self.seconds / max(1, self.rounds)

    def add(self, trial: Trial, context: int) -> None:
        """Add a generation after a prompt of so many tokens."""
        self.error = trial.error
        self.rounds += trial.rounds or trial.new_tokens or 0
        self.new_tokens += trial.new_tokens or 0
        self.seconds += trial.decode_s or 0.0
        self.contexts.append(context)

    def timing(self, visit: int, draft: str) -> RoundTiming:
        """The line of rounds.jsonl."""
        return RoundTiming(
            visit=visit,
            model=self.request.model,
            draft=draft,
            k=self.request.k,
            temperature=self.request.sampling.temperature,
            context_tokens=round(sum(self.contexts) / len(self.contexts)),
            batch=1,
            rounds=self.rounds,
            new_tokens=self.new_tokens,
            seconds=self.seconds,
        )
