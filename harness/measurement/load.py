"""Requests on a server side by side: what many users at once get.

Two kinds of load. In a *closed loop* B requests are in flight, and each is followed by the next as
it ends: the throughput at that concurrency. With a *rate*, requests arrive at random (a Poisson
process) whether or not others have ended: what a user waits for at that traffic.

A load is all of a group's requests, and its seconds are of all of them together: with several
requests in flight no clock tells theirs apart. Groups (the prompt sets, or two halves of a single
set) are sent one after the other, so that what iterations cost in one can predict another
(`harness.analysis.plan_simulation`). A closed loop is sent twice, with the full budget and with a
part of it: iterations of other contexts and other mixes of prompts, for a plan's costs. Budgets
differ between requests: requests of one length that begin together also end together, are prefilled
together, and cost less than those of a real load.

A visit puts every load on every server, the servers in a new order for each load and the requests
in a new order for each visit.

Machines that are shared change their speed for seconds or minutes, by others' use of memory too,
which no count of processor time shows. So the plain server decodes one request alone before and
after each load (`alone_s`): how fast the machine was in it, against the others
(`harness.analysis.planned_server.Server.pace`). What other processes kept busy is `others`; beyond
`MOST_OTHERS` (`harness.analysis.batch_schedule`) a load is disturbed, and not compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import monotonic, perf_counter, sleep

import numpy as np

from harness.engine_facts.spec import SHORTER, SHORTEST
from harness.engines.protocol import Completion, RefusedError, RequestFailedError, Server
from harness.measurement.environment import OtherLoad
from harness.measurement.generations import Request
from harness.records import HALF, LoadTiming, ServerClock, UserError

# Requests of a load for each that is in flight: fewer are mostly start and end
REQUESTS_PER_SLOT = 4
# The smallest budget of a load's requests, as a part of the budget asked for; multiples of the
# golden section, modulo 1, spread them evenly up to the whole
LEAST_BUDGET, GOLDEN = 0.5, 0.618034
# Tokens of the request by which the machine's speed is known around each load
REFERENCE_TOKENS = 32
# How often a load is sent of which a request had to be repeated: its seconds are not the load's
SENT_AT_MOST = 3


class LoadFailedError(UserError):
    """A load that a server did not answer."""

    def __init__(self, k: int, error: UserError) -> None:
        super().__init__(str(error))
        self.k = k
        # Whether it is of no use to ask again: the server ended, or is not what was asked for
        self.died = not isinstance(error, RequestFailedError | RefusedError)


@dataclass(frozen=True)
class Load:
    """The arrivals of a load: so many requests in flight, or so many per second."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate is not None:
            return f"requests at random, {self.rate:g} a second"
        return f"requests, {self.concurrency} side by side"

    def timings(self, groups: int, servers: int) -> int:
        """The number of measurements of a visit: one at random, two in a closed loop."""
        return groups * servers * (1 if self.rate else 2)


def groups_of(requests: Sequence[Request], largest: int) -> dict[str, list[Request]]:
    """The requests by prompt set, or the halves of a single set, each long enough for a load.

    Args:
        largest: the most requests that will be in flight; prompts are sent again, with another
            seed, until there are `REQUESTS_PER_SLOT` of them for each.

    Returns:
        The same in every visit, budgets and all.
    """
    sets = dict.fromkeys(request.prompt_set for request in requests)
    if len(sets) > 1:
        groups = {name: [each for each in requests if each.prompt_set == name] for name in sets}
    else:
        (name,) = sets
        groups = {f"{name}{HALF}{half + 1}": list(requests[half::2]) for half in (0, 1)}
    return {
        name: _repeated(group, REQUESTS_PER_SLOT * largest)
        for name, group in groups.items()
        if group
    }


def _enough(group: Sequence[Request], concurrency: int) -> Sequence[Request]:
    """The requests that a smaller load needs, of a group for the largest one.

    That is every prompt once at least, and all prompts equally often.
    """
    prompts = len({request.text_name for request in group})
    return group[: prompts * max(1, -(-REQUESTS_PER_SLOT * concurrency // prompts))]


def requests_of_load(prompts: Sequence[int], largest: int) -> int:
    """The number of requests of a load of so many side by side, where sets have so many prompts."""
    groups = prompts
    if len(prompts) == 1:
        groups = ((prompts[0] + 1) // 2, prompts[0] // 2)
    least = REQUESTS_PER_SLOT * largest
    return sum(size * max(1, -(-least // size)) for size in groups if size)


def _repeated(requests: Sequence[Request], least: int) -> list[Request]:
    times = max(1, -(-least // len(requests)))
    sent = [(time, request) for time in range(times) for request in requests]
    return [
        replace(
            request,
            seed=request.seed + 1_000_003 * time,
            budget=_part(request.budget, LEAST_BUDGET + (1 - LEAST_BUDGET) * (row * GOLDEN % 1)),
        )
        for row, (time, request) in enumerate(sent)
    ]


def _part(budget: int, part: float) -> int:
    return max(min(SHORTEST, budget), round(part * budget))


def load_visit(
    servers: Mapping[int, Server],
    groups: Mapping[str, Sequence[Request]],
    loads: Sequence[Load],
    number: int,
    random: np.random.Generator,
    clock: ServerClock,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[LoadTiming]:
    """Put every load on every server, and `say` which one is.

    Args:
        servers: by K; 0 decodes plainly. Each decodes at least the largest concurrency side by
            side.
        groups: by name; the requests' k is not read, their draft is the pair's.
        random: draws orders and arrivals.
        clock: `cpu` is the processor time of each server's process, in closed loops; requests that
            arrive are waited for by the client's clock, as they are with `engine`.

    Raises:
        LoadFailedError: a server ended, or a request of it has no answer that can be used.
    """
    reference = replace(next(iter(groups.values()))[0], budget=REFERENCE_TOKENS)
    alone_s = _alone_s(servers, reference, clock)
    for load in loads:
        for name, group in groups.items():
            sent = group if load.concurrency is None else _enough(group, load.concurrency)
            order = [sent[int(row)] for row in random.permutation(len(sent))]
            short = [replace(each, budget=_part(each.budget, 1 / SHORTER)) for each in order]
            due_s = np.cumsum(random.exponential(1.0, len(order)) / (load.rate or 1.0)).tolist()
            for k in random.permutation(sorted(servers)):
                for asked in (order,) if load.rate else (short, order):
                    say(str(load))
                    try:
                        timing = _timed(servers, int(k), name, asked, load, due_s, number, clock)
                    except UserError as error:
                        raise LoadFailedError(int(k), error) from error
                    before_s, alone_s = alone_s, _alone_s(servers, reference, clock)
                    known = before_s is not None and alone_s is not None
                    yield replace(timing, alone_s=(before_s, alone_s)) if known else timing


def warm_up(k: int, server: Server, groups: Mapping[str, Sequence[Request]], slots: int) -> None:
    """Send every prompt one at a time, then requests with `slots` in flight; nothing is timed.

    All have a part of their budgets. An engine may compile or allocate for a number of tokens when
    it first meets it: on vLLM for CPUs, prefills of a run's first load took 1.2 to 1.6 times as
    long as those of the next (docs/decisions/0014).

    Raises:
        LoadFailedError: as `load_visit`.
    """
    for group in groups.values():
        for in_flight in (1, slots):
            sent = _enough(group, in_flight)
            short = [replace(each, budget=_part(each.budget, 1 / SHORTER)) for each in sent]
            try:
                _sent(server, short, in_flight, None)
            except UserError as error:
                raise LoadFailedError(k, error) from error


def _alone_s(servers: Mapping[int, Server], reference: Request, clock: ServerClock) -> float | None:
    """Seconds a token of the plain server decoding a request alone, by its own clock.

    None where it does not tell, with processor time, without such a server, and where its text is
    one token, which the prefill makes.
    """
    if clock == "cpu" or 0 not in servers:
        return None
    try:
        done = servers[0].generate(reference.asked)
    except UserError as error:
        raise LoadFailedError(0, error) from error
    return done.decode_s / (done.returned - 1) if done.decode_s and done.returned > 1 else None


def _timed(
    servers: Mapping[int, Server],
    k: int,
    group: str,
    requests: Sequence[Request],
    load: Load,
    due_s: Sequence[float],
    number: int,
    clock: ServerClock,
) -> LoadTiming:
    server, in_flight = servers[k], load.concurrency or len(requests)
    # The run's other servers wait meanwhile, some by asking again and again
    idle = [each for each in servers.values() if each is not server]
    for _ in range(SENT_AT_MOST):
        other_load, idle_s = OtherLoad(), [each.cpu_s() for each in idle]
        cpu_s, begin = server.cpu_s(), perf_counter()
        done, sent_s = _sent(server, requests, in_flight, due_s if load.rate else None)
        elapsed_s, cpu_now_s = perf_counter() - begin, server.cpu_s()
        others = _of_others(
            other_load, [cpu_s, *idle_s], [cpu_now_s, *(each.cpu_s() for each in idle)], elapsed_s
        )
        if all(each.asked == 1 for each in done):
            break
    else:
        raise RequestFailedError(
            f"k={server.k}: a load was sent {SENT_AT_MOST} times, and each time a request of it had"
            " to be repeated"
        )
    seconds = elapsed_s
    if clock == "cpu" and load.rate is None:
        if cpu_s is None or cpu_now_s is None:
            raise UserError("clock=cpu: this server has none; use another")
        seconds = cpu_now_s - cpu_s
    first = requests[0]
    return LoadTiming(
        visit=number,
        model=first.model,
        draft=first.draft or "",
        k=server.k,
        temperature=first.sampling.temperature,
        group=group,
        concurrency=load.concurrency,
        rate=load.rate,
        texts=tuple(request.text_name for request in requests),
        budgets=tuple(request.budget for request in requests),
        returned=tuple(len(each.tokens) for each in done),
        rounds=tuple(each.rounds for each in done),
        user_s=tuple(each.request_s for each in done),
        seconds=seconds,
        user_decode_s=tuple(each.decode_s for each in done),
        slots=server.facts.slots,
        due_s=tuple(due_s) if load.rate else (),
        sent_s=tuple(sent_s) if load.rate else (),
        user_prefill_s=tuple(each.prefill_s for each in done),
        others=None if others is None else max(0.0, others),
    )


def _of_others(
    other_load: OtherLoad,
    begin_s: Sequence[float | None],
    end_s: Sequence[float | None],
    elapsed_s: float,
) -> float | None:
    """Processors that neither this process nor the servers kept busy, by their processor times.

    None of a server elsewhere, whose machine this is not.
    """
    own_s = 0.0
    for before_s, after_s in zip(begin_s, end_s, strict=True):
        if before_s is None or after_s is None:
            return None
        own_s += after_s - before_s
    return other_load.so_far().load - own_s / elapsed_s


def _sent(
    server: Server, requests: Sequence[Request], in_flight: int, due_s: Sequence[float] | None
) -> tuple[list[Completion], list[float]]:
    """The answer of each request, so many in flight, and when it was sent, after the begin.

    An error ends what is not yet sent. With `due_s` each is sent then, whatever became of those
    before it.
    """
    with ThreadPoolExecutor(in_flight) as pool:
        begin, sent, sent_s = monotonic(), list[Future[Completion]](), [0.0] * len(requests)

        def ask(row: int, request: Request) -> Completion:
            sent_s[row] = monotonic() - begin
            return server.generate(request.asked)

        try:
            for row, request in enumerate(requests):
                if due_s is not None:
                    sleep(max(0.0, begin + due_s[row] - monotonic()))
                sent.append(pool.submit(ask, row, request))
            return [future.result() for future in sent], sent_s
        except BaseException:  # raised again
            pool.shutdown(wait=False, cancel_futures=True)
            raise
