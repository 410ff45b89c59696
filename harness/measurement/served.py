"""Run requests on servers that stand side by side, one per K, and time what their rounds took.

A *visit* sends every request to every server, the servers in a new order for each request, so that
a machine that drifts hits all of them alike. A request's time is the lower quartile of its visits:
whatever else runs on the machine only adds to a time, and adds much to some.

Two clocks measure a server. Its own, where it reports decoding apart from the prefill: the time
that a user waits. And the processor time of its process, which is steadier on a busy machine. That
clock has no prefill apart, nor has the client's, which stands in for a server that reports no
times: there each request is also made for one token, and that request's time is taken off.

What decoding costs (`ServerCosts`) is fitted from the requests: a start, and what a round of n
drafted tokens takes. Both matter where texts are short. The first round after a prefill costs more
than the others: llama.cpp, for one, builds its graphs anew. And near the budget it drafts fewer
tokens than K, so a set whose texts fill their budgets has cheaper rounds. Each prompt is therefore
also sent with a part of its budget, and replay says how many tokens each round drafted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.engines.protocol import Completion, EngineFacts, Server
from harness.measurement.generations import Request, round_counts
from harness.measurement.returned_texts import ReturnedText
from harness.records import RoundTiming, ServerClock, TextKey, Trial, UserError
from harness.serving.counting import shorter_budget
from harness.theory.replay import Replayed
from harness.theory.speedup import RoundTimes

# The quantile of a request's visits that is taken as its time
UNDISTURBED = 0.25


@dataclass(frozen=True)
class ServedRequest:
    """One request on one server in one visit.

    Attributes:
        request: its k is the server's.
        completion: of the request.
        one_token: of the same prompt with a budget of one token, the prefill; the completion itself
            where the clock tells them apart.
    """

    visit: int
    request: Request
    completion: Completion
    one_token: Completion

    def decode_s(self, clock: ServerClock) -> float:
        """Seconds that the rounds took."""
        if clock == "engine" and self.completion.decode_s is not None:
            return self.completion.decode_s
        return self._request_s(self.completion, clock) - self._request_s(self.one_token, clock)

    def prefill_s(self, clock: ServerClock) -> float:
        """Seconds until the first token was there."""
        if clock == "engine" and self.completion.prefill_s is not None:
            return self.completion.prefill_s
        return self._request_s(self.one_token, clock)

    @staticmethod
    def _request_s(completion: Completion, clock: ServerClock) -> float:
        if clock == "engine":
            return completion.request_s
        if completion.cpu_s is None:
            raise UserError(
                "clock=cpu: this server's processor time is not known; leave clock out, or let the"
                " run start the server"
            )
        return completion.cpu_s

    @property
    def text(self) -> ReturnedText:
        """What was returned."""
        return ReturnedText(self.request, self.completion)

    def trial(self, facts: EngineFacts, clock: ServerClock) -> Trial:
        """The line of trials.jsonl: counts of what rounds emitted, by the run's clock."""
        done = self.completion
        emitted = done.returned - facts.first_position
        counts: dict[str, Any] = {}
        if done.steps is not None:
            counts = round_counts(done.steps, self.request.k)
        elif done.rounds is not None:
            counts = {
                "rounds": done.rounds,
                "drafted": done.drafted,
                "accepted": accepted_tokens(emitted, done.rounds, done.accepted),
            }
        trial = self.request.as_trial(
            status="ok",
            new_tokens=emitted,
            tokens=done.tokens,
            stop_reason=done.stop_reason,
            prefill_s=self.prefill_s(clock),
            # Of a text that the prefill ended, what a difference of two requests leaves is noise
            decode_s=max(0.0, self.decode_s(clock)) if emitted else 0.0,
            first_token_s=0.0 if facts.first_position else None,
            **counts,
        )
        return replace(trial, rule=facts.rule if self.request.k else None)

    def rejected_rounds(self, facts: EngineFacts, clock: ServerClock, draft: str) -> RoundTiming:
        """The line of rounds.jsonl of a server that rejects every draft, or decodes plainly."""
        done, request = self.completion, self.request
        emitted = done.returned - facts.first_position
        return RoundTiming(
            visit=self.visit,
            model=request.model,
            draft=draft,
            k=request.k,
            temperature=request.sampling.temperature,
            context_tokens=len(request.tokens),
            batch=1,
            rounds=emitted,
            new_tokens=emitted,
            seconds=self.decode_s(clock),
            drafted=done.drafted,
        )


def accepted_tokens(emitted: int, rounds: int, counted: int | None) -> int | None:
    """Drafted tokens among those that rounds emitted.

    Each round emits one token of the target's own, but for a last one that an accepted
    end-of-text token, or the budget, cut short. What engines count may be more: drafts that were
    accepted behind an end of text.
    """
    least = emitted - rounds
    return None if counted is None else min(max(counted, least), least + 1)


def ask(server: Server, request: Request, number: int, clock: ServerClock) -> ServedRequest:
    """Send a request, and where the clock has no prefill apart, one for the prefill alone."""

    def generate(budget: int) -> Completion:
        return server.generate(request.tokens, request.sampling, request.seed, budget)

    completion = generate(request.budget)
    apart = clock == "engine" and completion.decode_s is not None
    return ServedRequest(number, request, completion, completion if apart else generate(1))


def shorter(request: Request) -> Request:
    """The same request with a part of its budget."""
    return replace(request, budget=shorter_budget(request.budget))


def visit(
    servers: Mapping[int, Server],
    requests: Sequence[Request],
    number: int,
    random: np.random.Generator,
    clock: ServerClock,
) -> Iterator[ServedRequest]:
    """Send every request to every server, with its budget and with a part of it.

    Args:
        servers: by K; 0 decodes plainly.
        requests: their k is not read.
        number: of the visit.
        random: draws the order of the servers, anew for each request.
        clock: that times them.
    """
    ks = sorted(servers)
    for asked in requests:
        for k in random.permutation(ks):
            server, request = servers[int(k)], replace(asked, k=int(k))
            for each in (shorter(request), request):
                yield ask(server, each, number, clock)


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
