"""Run requests on servers that stand side by side, one per K, and time what their rounds took.

A *visit* sends every request to every server, the servers in a new order for each request, so that
a machine that drifts hits all of them alike. A request's time is the lower quartile of its visits:
whatever else runs on the machine only adds to a time, and adds much to some.

Two clocks measure a server. Its own, where it reports decoding apart from the prefill: the time
that a user waits. And the processor time of its process, which is steadier on a busy machine: it
has no prefill apart, so each visit asks for one token too, and that request's time is taken off.

What decoding costs (`ServerCosts`) is fitted from the requests: a start, and what a round of n
drafted tokens takes. Both matter where texts are short. The first round after a prefill costs more
than the others: llama.cpp, for one, builds its graphs anew. And near the budget it drafts fewer
tokens than K, so a set whose texts fill their budgets has cheaper rounds. Each prompt is therefore
also sent with a part of its budget, and replay says how many tokens each round drafted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.engines.protocol import Completion, EngineFacts, Server
from harness.measurement.generations import Request
from harness.measurement.returned_texts import ReturnedText
from harness.records import TextKey, UserError
from harness.theory.replay import Replayed
from harness.theory.speedup import RoundTimes

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


@dataclass(frozen=True, eq=False)
class ServedTexts:
    """What requests at one K returned, each once, and how long its rounds took.

    Attributes:
        texts: n, of full and of shorter budgets.
        decode_s: [n] seconds, over the visits.
    """

    texts: tuple[ReturnedText, ...]
    decode_s: NDArray[np.float64]

    def only(self, keep: Callable[[Request], bool]) -> "ServedTexts":
        """Some of the requests."""
        rows = [row for row, text in enumerate(self.texts) if keep(text.request)]
        return ServedTexts(tuple(self.texts[row] for row in rows), self.decode_s[rows])

    def tokens(self, facts: EngineFacts) -> NDArray[np.float64]:
        """[n] tokens that rounds emitted."""
        assert facts.counting is not None
        counts = [len(facts.counting.decoded(text.completion.tokens)) for text in self.texts]
        return np.array(counts, dtype=np.float64)


def served_texts(
    served: Sequence[ServedRequest], facts: EngineFacts, clock: ServerClock
) -> Mapping[int, ServedTexts]:
    """By K, the requests whose texts have more than the prefill's token."""
    assert facts.counting is not None
    grouped: dict[int, dict[tuple[TextKey, int], list[ServedRequest]]] = {}
    for each in served:
        text = (each.request.key, each.request.budget)
        grouped.setdefault(each.request.k, {}).setdefault(text, []).append(each)
    result: dict[int, ServedTexts] = {}
    for k, texts in sorted(grouped.items()):
        kept = [
            visits
            for visits in texts.values()
            if facts.counting.decoded(visits[-1].completion.tokens)
        ]
        seconds = [
            np.quantile([each.decode_s(clock) for each in visits], UNDISTURBED) for visits in kept
        ]
        result[k] = ServedTexts(tuple(visits[-1].text for visits in kept), np.array(seconds))
    return result


@dataclass(frozen=True)
class ServerCosts:
    """What decoding costs on an engine.

    Attributes:
        plain_start_s, start_s: of a request beside its rounds, plain and speculative.
        times: of a plain token, and of a round that drafts n tokens.
    """

    plain_start_s: float
    start_s: float
    times: RoundTimes

    def plain_s(self, requests: int, tokens: float) -> float:
        """Seconds of some requests that are decoded plainly."""
        return requests * self.plain_start_s + tokens * self.times.plain_s

    def speculative_s(self, replayed: Replayed) -> float:
        """Seconds of the rounds of some requests, one per text."""
        proposals = replayed.proposals.sum(axis=0)
        rounds_s = sum(count * self.times.at(n) for n, count in enumerate(proposals))
        return len(replayed.rounds) * self.start_s + float(rounds_s)

    def speedup(self, replayed: Replayed) -> float:
        """Predicted for some requests, from their replayed rounds."""
        plain_s = self.plain_s(len(replayed.rounds), float(replayed.new_tokens.sum()))
        return plain_s / self.speculative_s(replayed)


def fit_costs(
    plain: ServedTexts,
    speculative: Mapping[int, tuple[ServedTexts, Replayed]],
    facts: EngineFacts,
) -> ServerCosts:
    """Fit costs by least squares, errors relative to a request's time.

    Args:
        plain: requests decoded plainly, of two budgets.
        speculative: by K, requests with their replayed counts. Rounds that drafted another number
            of tokens than any K lie on the line between.
        facts: of the engine.
    """
    tokens = plain.tokens(facts)
    plain_start_s, plain_s = _least_squares(
        np.stack([np.ones_like(tokens), tokens], axis=1), plain.decode_s
    )
    ks = np.array(sorted(speculative), dtype=np.float64)
    columns: list[NDArray[np.float64]] = []
    seconds: list[NDArray[np.float64]] = []
    for k, (texts, replayed) in sorted(speculative.items()):
        # [n, ks] how much of each K's round a round of n = 1..k drafted tokens is
        share = np.stack([np.interp(np.arange(1, k + 1), ks, unit) for unit in np.eye(len(ks))], 1)
        rounds = replayed.proposals[:, 1:] @ share
        columns.append(np.concatenate([np.ones((len(rounds), 1)), rounds], axis=1))
        # A round that drafted nothing is a plain step
        seconds.append(texts.decode_s - replayed.proposals[:, 0] * plain_s)
    start_s, *rounds_s = _least_squares(np.concatenate(columns), np.concatenate(seconds))
    known = tuple((int(k), float(cost)) for k, cost in zip(ks, rounds_s, strict=True))
    return ServerCosts(float(plain_start_s), float(start_s), RoundTimes(float(plain_s), known))


def _least_squares(
    columns: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    fitted, *_ = np.linalg.lstsq(columns / seconds[:, None], np.ones_like(seconds))
    return fitted.astype(np.float64)
