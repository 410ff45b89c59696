"""What a plain token and a round of the running loop cost, R(0) and R(K), timed in visits.

A visit times plain decoding and every K, at every temperature, within moments of one another, in an
order that each visit permutes anew. So its ratios R(K) / R(0) are free of the machine's drift, and
of what happened to run before. Visits are spread over the whole run: what a run measures and what
it predicts from come from the same minutes.

Each timing is one generation of the loop that the run measures (`harness.measurement.generations`):
the same acceptance, caches, sampling and clock. Only its prompt is made for it, from the head of
one prompt and the tail of another of the same set, so that acceptance is typical but the text is no
measured cell's; it goes on past ends of text, for at least 16 rounds, around the context of the
run's own generations.

A drafter that looks its proposal up is timed by the number of tokens it proposes, n = 1, ..., K: it
looks up as ever, but fills every proposal up to n tokens.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.decoding.ngram import NgramDrafter
from harness.decoding.protocols import CausalModel
from harness.measurement.clock import undisturbed
from harness.measurement.generations import Draft, Request, run_trial
from harness.records import RoundTiming

LEAST_VISITS, MOST_VISITS = 6, 12
LEAST_ROUNDS = 16
# Plain tokens of a timing at most
MOST_TOKENS = 32
WARMUP_ROUNDS = 2
# Of a draft among many, the numbers of tokens at which its rounds are timed at most
MOST_KS = 4


@dataclass(frozen=True)
class TimedLoop:
    """The loop whose rounds are timed.

    Attributes:
        target: the model that decodes.
        draft: the draft model, or what makes the drafter of a request.
        draft_name: the name in the records, also where k is 0.
        requests: by prompt set, a generation per (k, temperature), plain decoding included; which
            prompt of the set they generate from does not matter.
        prompts: by prompt set, the token ids of the run's prompts.
        positions: that the caches are sure to have.
    """

    target: CausalModel
    draft: Draft
    draft_name: str
    requests: Mapping[str, Sequence[Request]]
    prompts: Mapping[str, Sequence[tuple[int, ...]]]
    positions: int

    @property
    def new_tokens(self) -> int:
        """The budget of the run's own generations."""
        return max(entry.budget for entries in self.requests.values() for entry in entries)

    def requests_of(self, visit: int) -> list[Request]:
        """The generations of a visit, in the order in which it times them."""
        names = list(self.requests)
        name = names[visit % len(names)]
        lengths = sorted(len(tokens) for entries in self.prompts.values() for tokens in entries)
        plain = max(LEAST_ROUNDS, min(self.new_tokens, MOST_TOKENS))
        # The timed text lies around the middle of a text of the run
        length = lengths[len(lengths) // 2] + max(0, self.new_tokens - plain) // 2
        chosen = random.Random(f"{self.requests[name][0].seed} {self.draft_name} {visit}")
        tokens = made_prompt(self.prompts[name], length, chosen)
        timed: list[Request] = []
        for entry in self.requests[name]:
            rounds = LEAST_ROUNDS if entry.k else plain
            timed.append(
                replace(
                    entry,
                    prompt=f"rounds/{visit}",
                    tokens=tokens,
                    budget=min(rounds * (entry.k + 1), self.positions - len(tokens) - entry.k),
                    rounds=rounds,
                    eos=frozenset(),
                    stop=None,
                )
            )
        chosen.shuffle(timed)
        return timed


def made_prompt(
    prompts: Sequence[tuple[int, ...]], length: int, chosen: random.Random
) -> tuple[int, ...]:
    """A prompt of about `length` tokens that is none of `prompts`, made of pieces of them.

    It begins as one of them and ends as another; where these are too short, further ones lie in
    between.
    """
    order = chosen.sample(range(len(prompts)), len(prompts))
    first, last = prompts[order[0]], prompts[order[-1]]
    head, tail = first[: (length + 1) // 2], last[-(length // 2) :] if length > 1 else ()
    between: list[int] = []
    while len(head) + len(between) + len(tail) < length:
        order.append(order.pop(0))
        between += prompts[order[0]][: length - len(head) - len(between) - len(tail)]
    while (*head, *between, *tail) in prompts:
        between.append(head[0])
    return (*head, *between, *tail)


def visits_for(texts: int) -> int:
    """How many visits a run makes that generates so many texts at every K: fewer in a short one."""
    return min(MOST_VISITS, max(LEAST_VISITS, texts))


def timed_ks(ks: Sequence[int]) -> list[int]:
    """The K at which the rounds of one draft among many are timed; those between are interpolated.

    They are 1, the largest, and up to two of `ks` between, about equally far apart.
    """
    positive = sorted({1, *(k for k in ks if k > 0)})
    if len(positive) <= MOST_KS:
        return positive
    ideal = [1 + (positive[-1] - 1) * step / (MOST_KS - 1) for step in range(MOST_KS)]
    return sorted({min(positive, key=lambda k: abs(k - place)) for place in ideal})


class FullLookup(NgramDrafter):
    """Looks up as an `NgramDrafter` does, but always proposes as many tokens as it is asked for."""

    def draft(self, count: int) -> list[int]:
        """What is looked up, then the text's last token up to `count`."""
        found = super().draft(count)
        return found + [self._text[-1]] * (count - len(found))


class Visits:
    """The visits of one loop, some of which an earlier process may have made.

    Attributes:
        missing: how many this process has to make.
    """

    def __init__(
        self,
        loop: TimedLoop,
        stored: Sequence[RoundTiming],
        *,
        visits: int,
        store: Callable[[RoundTiming], None],
        refuse: Callable[[str, str], None],
        refused: Mapping[str, Any],
    ) -> None:
        """Continue with what is missing of `visits`.

        A visit that was interrupted is made again as a whole, under another number.

        Args:
            loop: what is timed.
            stored: every stored line, of other drafts too.
            visits: how many are wanted.
            store: keeps a timing as it is made.
            refuse: notes what cannot be timed, and why: memory, or logits that are not finite.
            refused: what was noted before.
        """
        self._loop, self._store, self._refuse = loop, store, refuse
        self._refused = set(refused)
        lines = [line for line in stored if line.draft == loop.draft_name]
        kinds = {
            (entry.k, entry.sampling.temperature)
            for entries in loop.requests.values()
            for entry in entries
            if self._name(entry) not in self._refused
        }
        numbers = {line.visit for line in lines}
        whole = [
            number
            for number in numbers
            if kinds <= {(line.k, line.temperature) for line in lines if line.visit == number}
        ]
        self._next = max(numbers, default=-1) + 1
        self.missing = max(0, visits - len(whole))
        self._made = 0
        self._warm = False

    def begin(self) -> None:
        """Make the first visit, unless all are made."""
        self.up_to(1 / max(1, self.missing))

    def up_to(self, share: float) -> None:
        """Make visits until this share of those that this process is to make is made."""
        while self._made < self.missing * share:
            with undisturbed():
                self._visit(self._next)
            self._next += 1
            self._made += 1

    def _visit(self, number: int) -> None:
        requests = self._loop.requests_of(number)
        if not self._warm:  # first calls allocate, compile and record
            for entry in requests:
                run_trial(replace(entry, rounds=WARMUP_ROUNDS), *self._models)
            self._warm = True
        for entry in requests:
            if self._name(entry) in self._refused:
                continue
            timing = self._timed(entry, number)
            if isinstance(timing, str):
                self._refused.add(self._name(entry))
                self._refuse(self._name(entry), timing)
            else:
                self._store(timing)

    def _timed(self, request: Request, visit: int) -> RoundTiming | str:
        """The timing of one generation, or of several where a context is too short for one."""
        rounds, new_tokens, seconds = 0, 0, 0.0
        while rounds < LEAST_ROUNDS:
            trial = run_trial(replace(request, repetition=rounds), *self._models)
            if trial.error is not None:
                return trial.error
            rounds += trial.rounds or trial.new_tokens or 0
            new_tokens += trial.new_tokens or 0
            seconds += trial.decode_s or 0.0
        return RoundTiming(
            visit=visit,
            model=request.model,
            draft=self._loop.draft_name,
            k=request.k,
            temperature=request.sampling.temperature,
            context_tokens=len(request.tokens),
            batch=1,
            rounds=rounds,
            new_tokens=new_tokens,
            seconds=seconds,
        )

    @property
    def _models(self) -> tuple[CausalModel, Draft]:
        return self._loop.target, self._loop.draft

    def _name(self, request: Request) -> str:
        """How a note calls what is timed."""
        where = f"temperature {request.sampling.temperature:g}"
        if request.k == 0:
            return f"plain tokens at {where}"
        return f"rounds of {self._loop.draft_name} at K={request.k}, {where}"
