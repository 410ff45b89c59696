"""Run requests on servers that stand side by side, one per K, and time what their rounds took.

A *visit* sends every request to every server, the servers in a new order for each request, so that
a machine that drifts hits all of them alike. A request's time is the lower quartile of its visits:
whatever else runs on the machine only adds to a time, and adds much to some.

Two clocks measure a server. Its own, where it reports decoding apart from the prefill: the time
that a user waits. And the processor time of its process, which is steadier on a busy machine: it
has no prefill apart, so each visit asks for one token too, and that request's time is taken off.

What decoding costs is fitted as a start and so much per round (`RequestCost`). The first round of a
request costs more than the others: llama.cpp, for one, builds its graphs anew after the prefill,
which on a small model is worth some rounds. Requests of one length would hide that, and texts with
fewer rounds would be predicted too cheap; so each prompt is also sent with a quarter of its budget.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.engines.protocol import Completion, EngineFacts, Server
from harness.measurement.generations import Request
from harness.measurement.returned_texts import ReturnedText
from harness.records import TextKey, UserError

ServerClock = Literal["engine", "cpu"]
# The shorter budget of each prompt: this part of it, and no fewer tokens
SHORTER, SHORTEST = 4, 4
# The quantile of a request's visits that is taken as its time
UNDISTURBED = 0.25


@dataclass(frozen=True)
class ServedRequest:
    """One request on one server in one visit.

    Attributes:
        request: its k is the server's.
        completion: of the request.
        one_token: of the same prompt with a budget of one token: the prefill.
    """

    visit: int
    request: Request
    completion: Completion
    one_token: Completion

    def decode_s(self, clock: ServerClock) -> float:
        """Seconds that the rounds took."""
        if clock == "engine":
            seconds = self.completion.decode_s
        else:
            whole, prefill = self.completion.cpu_s, self.one_token.cpu_s
            seconds = None if whole is None or prefill is None else whole - prefill
        if seconds is None:
            raise UserError(f"clock={clock}: this server has none; use another")
        return seconds

    @property
    def text(self) -> ReturnedText:
        """What was returned."""
        return ReturnedText(self.request, self.completion)


def visit(
    servers: Mapping[int, Server],
    requests: Sequence[Request],
    number: int,
    random: np.random.Generator,
) -> Iterator[ServedRequest]:
    """Send every request to every server, with its budget and with a part of it.

    Args:
        servers: by K; 0 decodes plainly.
        requests: their k is not read.
        number: of the visit.
        random: draws the order of the servers, anew for each request.
    """
    ks = sorted(servers)
    for asked in requests:
        for k in random.permutation(ks):
            server, request = servers[int(k)], replace(asked, k=int(k))
            short = replace(request, budget=max(SHORTEST, request.budget // SHORTER))
            one, *answers = (
                server.generate(each.tokens, each.sampling, each.seed, each.budget)
                for each in (replace(request, budget=1), short, request)
            )
            for each, answer in zip((short, request), answers, strict=True):
                yield ServedRequest(number, each, answer, one)


@dataclass(frozen=True)
class RequestCost:
    """What decoding costs on a server at one K: seconds of a request, and of each round in it.

    At K = 0 a round is a token.
    """

    start_s: float
    round_s: float

    def seconds(self, requests: int, rounds: float) -> float:
        """Of some requests that take so many rounds together."""
        return requests * self.start_s + rounds * self.round_s

    def between(self, other: "RequestCost", share: float) -> "RequestCost":
        """On the line from this cost to another's; a share of 0 is this one."""
        return RequestCost(
            self.start_s + share * (other.start_s - self.start_s),
            self.round_s + share * (other.round_s - self.round_s),
        )


@dataclass(frozen=True, eq=False)
class ServedTimes:
    """What requests took at one K, [n] each: requests of full and of shorter budgets.

    Attributes:
        decode_s: seconds of the rounds, over the visits.
        tokens: that rounds emitted.
        rounds: of drafting and verifying; the tokens where nothing was drafted.
        full: whether the budget was the full one.
    """

    decode_s: NDArray[np.float64]
    tokens: NDArray[np.float64]
    rounds: NDArray[np.float64]
    full: NDArray[np.bool_]

    @property
    def seconds_per_token(self) -> float:
        """Over the requests of full budget."""
        return float(self.decode_s[self.full].sum() / self.tokens[self.full].sum())

    def cost(self) -> RequestCost:
        """Start and round by least squares, errors relative to a request's time."""
        columns = np.stack([np.ones_like(self.rounds), self.rounds], axis=1)
        weights = 1.0 / self.decode_s
        fitted, *_ = np.linalg.lstsq(columns * weights[:, None], np.ones_like(weights))
        return RequestCost(float(fitted[0]), float(fitted[1]))


def served_times(
    served: Sequence[ServedRequest], facts: EngineFacts, clock: ServerClock
) -> Mapping[int, ServedTimes]:
    """By K, the times of the requests whose rounds the engine told."""
    assert facts.counting is not None
    grouped: dict[int, dict[tuple[TextKey, int], list[ServedRequest]]] = {}
    for each in served:
        text = (each.request.key, each.request.budget)
        grouped.setdefault(each.request.k, {}).setdefault(text, []).append(each)
    full = max(each.request.budget for each in served)
    times: dict[int, ServedTimes] = {}
    for k, texts in sorted(grouped.items()):
        rows: list[tuple[float, int, int, bool]] = []
        for (_, budget), visits in texts.items():
            done = visits[-1].completion
            tokens = len(facts.counting.decoded(done.tokens))
            rounds = done.rounds if k else tokens
            if tokens and rounds is not None:
                seconds = [each.decode_s(clock) for each in visits]
                decode_s = float(np.quantile(seconds, UNDISTURBED))
                rows.append((decode_s, tokens, rounds, budget == full))
        decode_s, tokens, rounds, whole = (np.array(each) for each in zip(*rows, strict=True))
        times[k] = ServedTimes(decode_s, tokens.astype(float), rounds.astype(float), whole)
    return times
