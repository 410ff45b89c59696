"""A continuously batching server, simulated from stored texts: what users wait for at a rate.

Everything is seeded, and knows no wall clock, no model and no file.

Requests. The flag "this drafted token was accepted" is a Bernoulli draw for each text position,
independent of the others (`harness.theory.replay`), and each position is judged at most once, by
the round that reaches it. So one uniform per position decides every K: flag = uniform < chance. At
temperature 0 chances are 0 or 1, and a text is one request whatever is drawn.

Arrivals are in units of the mean time between two requests, so that one draw serves every rate.

The clock. State: a clock, a queue (first in, first out), and slots with the requests in them. An
iteration begins with what has arrived: as long as a slot is free the first of the queue enters.
Every active request takes one round, which drafts as many tokens as is set for this number of
active requests, or emits one plain token. Who has emitted all leaves its slot.

An engine that mixes (llama.cpp, vLLM) puts the prompts that enter into the iteration of those that
decode: all get longer by them, and the first tokens are there when it ends. Where nobody decodes,
the prompts are an iteration of their own. Other engines (SGLang) stop decoding for each prompt.

K depends on the number of active requests alone, so that nothing changes until one of them ends or
another enters: all iterations up to there are one step. That makes it fast.

A closed loop of B requests is the special case in which all have arrived at 0 and B are in flight.

Assumed: all active requests share a forward; a prompt fits into one iteration; nobody is put out to
make room in the caches, as what a request needs there is kept for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.intp]

# Between two requests that a client sends at once
JUST_AFTER_S = 1e-6
# Step between the quantiles of neighbouring requests; shares no factor with their number
SPREAD = 7
# Longer than a client takes for its next request
IDLE_S = 0.02


# ---- requests, and when they arrive --------------------------------------------------------------


class Rounds(NamedTuple):
    """The rounds of a request where up to k tokens are drafted, by the start of each, [n]."""

    after: list[int]  # where the next round begins; n where the text has ended
    drafted: list[int]  # tokens that the round drafts
    alike: list[int]  # how many rounds from here on, one after the other, draft k tokens


class _RoundsByK(dict[int, Rounds]):
    """Rounds by k, each made when it is first asked for.

    A dict, as simulations ask several times for each round.
    """

    def __init__(self, runs: Counts, most: Counts) -> None:
        super().__init__()
        self._runs, self._most = runs, most

    def __missing__(self, k: int) -> Rounds:
        size, drafted = len(self._runs), np.minimum(self._most, k)
        accepted = np.minimum(self._runs, drafted)
        ends = np.minimum(np.arange(1, size + 1) + accepted, size).tolist()
        alike = [0] * (size + 1)
        for start in np.flatnonzero(drafted == k)[::-1].tolist():
            alike[start] = 1 + alike[ends[start]]
        made = self[k] = Rounds(ends, drafted.tolist(), alike)
        return made


@dataclass(frozen=True, eq=False)
class Request:
    """A request whose rounds emit n tokens."""

    prompt_tokens: int
    runs: Counts  # [n] draft tokens in a row that would be accepted from each start
    most: Counts  # [n] tokens that the engine drafts at most from each start

    @property
    def tokens(self) -> int:
        """The tokens that rounds emit; 0 where all come from the prefill."""
        return len(self.runs)

    @cached_property
    def rounds(self) -> Mapping[int, Rounds]:
        """The rounds by k, where up to k tokens are drafted."""
        return _RoundsByK(self.runs, self.most)


@dataclass(frozen=True, eq=False)
class Text:
    """A text of the target, of which requests are made."""

    # prompt_set, prompt: that it answers
    prompt_set: str
    prompt: str
    prompt_tokens: int  # of that prompt
    # [n, K] the chance that a round from a start accepts at an offset, given that it got there.
    # What is NaN, or beyond the text, is not accepted.
    chances: Array
    most: Counts  # [n] tokens that the engine drafts at most from each start

    @cached_property
    def certain(self) -> Request | None:
        """The request where nothing is left to chance, as at temperature 0."""
        chances = np.nan_to_num(self.chances)
        if ((chances > 0.0) & (chances < 1.0)).any():
            return None
        return self._request(chances > 0.0)

    def drawn(self, uniforms: Array) -> Request:
        """One request, its flags drawn by uniforms in [0, 1), one per text position at least."""
        if self.certain is not None:
            return self.certain
        size, depth = self.chances.shape
        # Beyond the text nothing is accepted
        padded = np.pad(uniforms[:size], (0, depth - 1), constant_values=1.0)
        return self._request(np.lib.stride_tricks.sliding_window_view(padded, depth) < self.chances)

    def _request(self, flags: NDArray[np.bool_]) -> Request:
        """The request whose flags [n, K] say which tokens would be accepted."""
        rejected = np.pad(~flags, ((0, 0), (0, 1)), constant_values=True)
        runs = np.argmax(rejected, axis=1).astype(np.intp)
        return Request(self.prompt_tokens, runs, self.most)


@dataclass(frozen=True, eq=False)
class Stream:
    """Requests of texts, each drawn when it is asked for and not kept."""

    texts: Sequence[Text]
    rows: Sequence[int]  # places in the texts
    uniforms: Callable[[int], Array]  # of a place, as `Text.drawn` takes them

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Request:
        text = self.texts[self.rows[place]]
        return text.certain or text.drawn(self.uniforms(place))

    def __iter__(self) -> Iterator[Request]:
        return map(self.__getitem__, range(len(self)))


# ---- when they come ------------------------------------------------------------------------------


def at_random(number: int, random: np.random.Generator) -> Array:
    """[number] arrivals of a Poisson process of requests."""
    return np.cumsum(random.exponential(1.0, number))


def as_recorded(times: Sequence[float], number: int, random: np.random.Generator) -> Array:
    """[number] arrivals with the gaps of a record, from a random place in it on, round and round.

    Its times ascend, and at least two differ.
    """
    gaps = np.diff(np.asarray(times, dtype=np.float64))
    # Between the last and the first of the next round lies a mean gap
    gaps = np.append(gaps, gaps.mean()) / gaps.mean()
    return np.cumsum(np.resize(np.roll(gaps, -int(random.integers(len(gaps)))), number))


# ---- the server ----------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Slot:
    """A slot of the server while a request is in it."""

    place: int  # of the request, among all, in the order of arrival
    request: Request
    position: int = 0  # in its text, at which the next round begins
    end: int = field(init=False)  # of its text

    def __post_init__(self) -> None:
        self.end = self.request.tokens


@dataclass(frozen=True, eq=False)
class Costs:
    """Times of a server, in seconds."""

    # [slots + 1][K + 1] of an iteration by how many requests are active and how many tokens each
    # drafts, 0 being a plain token; the first row is not read
    iteration_s: Sequence[Sequence[float]]
    start_s: float = 0.0  # of prompts that enter while nobody decodes, their tokens left out
    prompt_token_s: float = 0.0  # of each of these
    # [slots] as `start_s`, by how many requests decode in the same iteration; empty where the
    # engine does not mix
    mixed_start_s: Sequence[float] = ()
    # Of a request, from when the client sends it to when the server has it, and from its end to
    # when the client knows of that
    client_s: float = 0.0
    # [slots + 1] of a step of the draft by how many requests are active. In an iteration whose
    # requests draft different numbers of tokens the draft makes as many steps as the longest needs,
    # and the target verifies the mean of them.
    draft_step_s: Sequence[float] = ()
    # More, where nobody was in the server for `IDLE_S` before: caches have gone cold
    idle_s: float = 0.0
    # context_tokens, context_token_s: how many tokens are in the cache of each active request in
    # iterations that cost `iteration_s`, and what each token more takes
    context_tokens: float = 0.0
    context_token_s: float = 0.0
    # That caches of all requests hold together, next to the draft's; a request enters when its
    # prompt and its whole text have room, or alone
    cache_tokens: float = inf
    # What prefills took more than they cost, or less, all equally likely; the clock goes by costs
    prefill_scatter_s: Sequence[float] = (0.0,)

    @property
    def slots(self) -> int:
        """Requests that are decoded side by side at most."""
        return len(self.iteration_s) - 1

    def start_of(self, requests: Sequence[Request], decoding: int = 0) -> float:
        """Seconds that prompts take of an iteration in which so many requests decode."""
        fixed_s = self.mixed_start_s[decoding] if decoding else self.start_s
        tokens = sum(request.prompt_tokens for request in requests)
        return max(0.0, fixed_s + self.prompt_token_s * tokens)

    def iteration_of(self, drafts: Sequence[int]) -> float:
        """Seconds of one iteration, by the draft tokens of each active request."""
        batch = len(drafts)
        seconds = sum(map(self.iteration_s[batch].__getitem__, drafts)) / batch
        return seconds + self.more_steps_s(drafts) if self.draft_step_s else seconds

    def more_steps_s(self, drafts: Sequence[int]) -> float:
        """Seconds of the draft's steps beyond the mean, where drafts are unequal."""
        if not self.draft_step_s:
            return 0.0
        return (max(drafts) - sum(drafts) / len(drafts)) * self.draft_step_s[len(drafts)]


class Iteration(NamedTuple):
    """Iterations that were alike, one after the other."""

    number: int  # of them
    active: Sequence[Slot]  # slots whose requests took a round in each
    drafts: Sequence[int]  # of these
    entered: Sequence[int]  # places of the requests whose prompts were in it
    context: float  # tokens in the caches of all active ones, the mean over these iterations
    idle: bool  # whether nobody was in the server for `IDLE_S` before


@dataclass(frozen=True, eq=False)
class Served:
    """The results of n requests, in the order of arrival; times are on the server's clock."""

    # arrived_s, entered_s, first_s, ended_s: [n] when each came, got a slot, had its first token,
    # and had its last
    arrived_s: Array
    entered_s: Array
    first_s: Array
    ended_s: Array
    tokens: NDArray[np.intp]  # [n] that its rounds emitted, all after its first
    rounds: NDArray[np.intp]  # [n] that it took
    client_s: float = 0.0  # between the clients and the server, of each
    prefill_scatter_s: Array = field(default_factory=lambda: np.zeros(1))  # [m] as that of `Costs`

    @property
    def first_token_s(self) -> Array:
        """[n, m] from when it was sent to when the client had its first token, in m draws.

        In each draw the scatter of prefills falls on other requests; over all of them each request
        has all of it once.
        """
        most = len(self.prefill_scatter_s)
        of_draw = (SPREAD * np.arange(len(self.first_s))[:, None] + np.arange(most)) % most
        waited_s = self.entered_s - self.arrived_s + self.client_s
        prefill_s = (self.first_s - self.entered_s)[:, None] + self.prefill_scatter_s[of_draw]
        return waited_s[:, None] + np.maximum(0.0, prefill_s)

    @property
    def per_token_s(self) -> Array:
        """[n] of each token after the first; NaN where there is none."""
        tokens = np.where(self.tokens > 0, self.tokens, np.nan)
        return (self.ended_s - self.first_s) / tokens


class _State:
    """A server while it serves n requests, in the order of arrival."""

    def __init__(
        self,
        requests: Sequence[Request] | Stream,
        arrived_s: Sequence[float] | Array,
        costs: Costs,
        in_flight: int | None,
    ) -> None:
        number = len(requests)
        self.requests, self.costs, self.number = requests, costs, number
        self.most, self.mixes = in_flight or costs.slots, len(costs.mixed_start_s) > 0
        self.sent = number if in_flight is None else min(in_flight, number)
        self.arrivals: list[float] = np.asarray(arrived_s, dtype=np.float64).tolist()
        # Sent when another has ended; the last stands for those that never come
        self.arrivals[self.sent :] = [inf] * (number - self.sent + 1)
        self.entered_s, self.first_s, self.ended_s = ([0.0] * number for _ in range(3))
        self.rounds, self.tokens = [0] * number, [0] * number
        self.room = costs.cache_tokens
        fits_all = self.room == inf
        self.needs = [0] * number if fits_all else [r.prompt_tokens + r.tokens for r in requests]
        self.active: list[Slot] = []
        self.clock, self.due = 0.0, 0

    def wait(self) -> bool:
        """Go on to the next arrival where nobody is active; True where the server was idle."""
        if self.active:
            return False
        arrives = self.arrivals[self.due]
        idle = self.due == 0 or arrives - self.clock > IDLE_S
        self.clock = max(self.clock, arrives)
        return idle

    def enter(self) -> list[Slot]:
        """The slots of the requests that enter now."""
        entering: list[Slot] = []
        due = self.due
        while self.arrivals[due] <= self.clock and len(self.active) + len(entering) < self.most:
            if self.needs[due] > self.room and (self.active or entering):
                break
            self.room -= self.needs[due]
            self.entered_s[due] = self.clock
            entering.append(Slot(due, self.requests[due]))
            self.tokens[due] = entering[-1].end
            due += 1
            if not self.mixes:
                break
        self.due = due
        return entering

    def steps(self, paths: Sequence[Rounds], seconds: float) -> int:
        """Iterations of these seconds that are alike: until a text ends or a request enters."""
        active = self.active
        pairs = zip(active, paths, strict=True)
        steps = max(1, min([path.alike[slot.position] for slot, path in pairs]))
        if steps > 1 and len(active) < self.most and self.due < self.number:
            # Contexts grow, so that none of the iterations until then takes longer in the mean
            token_s = self.costs.context_token_s
            if token_s:
                context = _context(active, paths, steps) - len(active) * self.costs.context_tokens
                seconds += token_s * context
            steps = max(1, ceil(min(steps, (self.arrivals[self.due] - self.clock) / seconds)))
        return steps

    def end(
        self, decoding: Sequence[Slot], paths: Sequence[Rounds], steps: int, entering: list[Slot]
    ) -> None:
        """Take what so many iterations emitted; who has all leaves, and the next ones are sent."""
        ended: list[Slot] = []
        for slot, path in zip(decoding, paths, strict=True):
            after = path.after
            position = after[slot.position]
            if steps > 1:
                for _ in range(steps - 1):
                    position = after[position]
            slot.position = position
            self.rounds[slot.place] += steps
            if position == slot.end:
                ended.append(slot)
        if ended:
            self.active = [slot for slot in self.active if slot.position < slot.end]
        for slot in entering:
            self.first_s[slot.place] = self.clock
            (self.active if slot.end else ended).append(slot)
        for slot in ended:
            self.ended_s[slot.place] = self.clock
            self.room += self.needs[slot.place]
        for place in range(self.sent, min(self.sent + len(ended), self.number)):
            self.arrivals[place] = self.clock + self.costs.client_s
        self.sent += len(ended)


def simulate(
    requests: Sequence[Request] | Stream,
    arrived_s: Sequence[float] | Array,
    costs: Costs,
    ks: Sequence[int],
    in_flight: int | None = None,
    journal: list[Iteration] | None = None,
) -> Served:
    """Serve requests until all have ended.

    Args:
        requests: in the order of arrival; each is asked for when it enters.
        arrived_s: when each does, ascending; all 0 for a closed loop.
        costs: of the server; their table has a row for each of its slots.
        ks: draft tokens of a round at most, by how many requests are active, from 0 on; the last of
            them for more. One K is `[k]`, and plain decoding `[0]`.
        in_flight: of a closed loop, whose clients send the next request when they have the answer
            of the one before; None where requests come whatever becomes of others.
        journal: gets every iteration.
    """
    server = _State(requests, arrived_s, costs, in_flight)
    while server.due < server.number or server.active:
        idle, entering = server.wait(), server.enter()
        decoding = server.active if server.mixes or not entering else []
        k = ks[min(len(decoding), len(ks) - 1)]
        paths = [slot.request.rounds[k] for slot in decoding]
        drafts = [path.drafted[slot.position] for slot, path in zip(decoding, paths, strict=True)]
        steps, seconds = 1, costs.iteration_of(drafts) if decoding else 0.0
        if entering:
            prompts = [slot.request for slot in entering]
            seconds += costs.start_of(prompts, len(decoding)) + idle * costs.idle_s
        else:
            steps = server.steps(paths, seconds)
        if journal is not None or costs.context_token_s:
            context = _context(decoding, paths, steps)
            seconds += costs.context_token_s * (context - len(decoding) * costs.context_tokens)
            if journal is not None:
                entered = [slot.place for slot in entering]
                journal.append(Iteration(steps, [*decoding], drafts, entered, context, idle))
        server.clock += steps * seconds
        server.end(decoding, paths, steps, entering)
    times = (server.arrivals[: server.number], server.entered_s, server.first_s, server.ended_s)
    return Served(
        *map(np.array, times),
        tokens=np.array(server.tokens, dtype=np.intp),
        rounds=np.array(server.rounds, dtype=np.intp),
        client_s=costs.client_s,
        prefill_scatter_s=np.array(costs.prefill_scatter_s),
    )


def _context(active: Sequence[Slot], paths: Sequence[Rounds], steps: int) -> float:
    """Tokens in the caches of all, the mean over so many iterations of equal steps."""
    total = 0.0
    for slot, path in zip(active, paths, strict=True):
        position = slot.position
        for _ in range(steps - 1):
            position = path.after[position]
        total += slot.request.prompt_tokens + (slot.position + position) / 2.0
    return total


def sent_at_once(number: int, in_flight: int | None) -> Array:
    """[number] arrivals of a closed loop: the first requests are sent at once, one by one.

    So the server has the first of them alone; the others come while its prompt is read.
    """
    return np.where(
        np.arange(number) < (in_flight or number), np.arange(number) * JUST_AFTER_S, 0.0
    )
