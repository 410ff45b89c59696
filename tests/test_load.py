"""Requests side by side: what is sent, and which K each load gets."""

import json
import shlex
import threading
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import workloads
from runs import needs_llamacpp
from served_pair import Served, answered
from stubs import REQUEST

from harness.analysis.batch_schedule import (
    Throughput,
    analyse_loads,
    closed_loads,
    full_loads,
    load_cells,
    over_groups,
    replayed_loads,
    schedule,
    spread,
    throughputs,
)
from harness.analysis.user_latency import under_load
from harness.cli import compose
from harness.commands.run_lifecycle import create, load_prompts
from harness.commands.server_requests import Failures, open_workload
from harness.commands.server_start import note_engine
from harness.commands.server_visits import measure_loads
from harness.commands.tasks import varying_roles
from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.llamacpp import SPEC
from harness.engine_facts.spec import Counting
from harness.engine_facts.vllm import SPEC as VLLM
from harness.engines.adapters import Adapter, adapter_of
from harness.engines.http_server import HttpServer
from harness.engines.protocol import (
    Completion,
    EngineFacts,
    RefusedError,
    RequestFailedError,
    ServerDiedError,
)
from harness.engines.sglang import Sglang
from harness.engines.vllm import Vllm
from harness.measurement.draft_scores import score_texts
from harness.measurement.generations import Request
from harness.measurement.load import (
    Load,
    LoadFailedError,
    groups_of,
    load_visit,
    requests_of_load,
    warm_up,
)
from harness.measurement.server_request import decoded
from harness.records import LoadTiming, ServerCommand, ServingEngine, UserError, where
from harness.reporting.serving_commands import schedule_snippets
from harness.reporting.tables.served import load_table
from harness.storage import RunFolder
from harness.storage import load as stored
from harness.summary import (
    LoadCell,
    ModelFacts,
    RunFacts,
    Schedule,
    ScheduleEntry,
    ServedSummary,
    Summary,
    Visits,
)

COUNTING = Counting(1, shortens_last_draft=True)
GREEDY = SamplingParameters(0.0)
ENGINE = ServingEngine(
    name="llamacpp",
    version="1",
    rule="greedy_draft",
    first_position=1,
    shortens_last_draft=True,
    draft_top_k=None,
    clock="engine",
    synthetic=False,
    started=True,
    urls=(),
)
BATCHES = (1, 2, 4)


class StandIn:
    """A server whose texts have a length each, and that notes how many requests it has.

    After the first `alone` ones its next `together` requests are answered when all have come.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Itself; it has of a server what loads need."""
        return super().__new__(cls)

    def __init__(self, k, lengths, together=1, dies_at=None, alone=0):
        self.k, self.lengths, self.together, self.dies_at = k, lengths, together, dies_at
        self.alone = alone
        self.facts = EngineFacts(SPEC, "1", "greedy_draft")
        self.lock, self.active, self.most, self.sent = threading.Lock(), 0, 0, []
        self.gathered = threading.Barrier(together, timeout=60.0)

    def generate(self, asked):
        with self.lock:
            self.active += 1
            self.most = max(self.most, self.active)
            self.sent.append((asked.prompt[0], asked.budget))
            waits = self.alone < len(self.sent) <= self.alone + self.together
            if self.dies_at is not None and len(self.sent) >= self.dies_at:
                raise ServerDiedError("the server ended")
        if waits:
            self.gathered.wait()
        with self.lock:
            self.active -= 1
        tokens = tuple(range(min(asked.budget, self.lengths[asked.prompt[0]])))
        return Completion(tokens, "budget", 0.1)

    def cpu_s(self):
        return float(len(self.sent))


def requests_of(texts, budget=40):
    one = replace(REQUEST, budget=budget, draft="draft")
    return [
        replace(one, prompt_set=prompt_set, prompt=prompt, tokens=(n,), seed=n)
        for n, (prompt_set, prompt) in enumerate(texts)
    ]


# ---- what is sent --------------------------------------------------------------------------------


def test_a_closed_loop_keeps_so_many_requests_in_flight_and_sends_each_budget_to_every_k():
    texts = [("easy", f"{n}") for n in range(3)] + [("hard", f"{n}") for n in range(3)]
    random = np.random.default_rng(0)
    groups = groups_of(requests_of(texts), 4)
    assert {name: len(group) for name, group in groups.items()} == {"easy": 18, "hard": 18}
    assert len({request.seed for group in groups.values() for request in group}) == 36
    assert all(20 <= request.budget <= 40 for group in groups.values() for request in group)
    servers = {k: StandIn(k, [30] * 6, together=4) for k in (0, 2)}
    done = list(load_visit(servers, groups, [Load(concurrency=4)], 3, random, "cpu"))
    assert [server.most for server in servers.values()] == [4, 4]
    assert {(each.group, each.k, each.visit) for each in done} == {
        (group, k, 3) for group in ("easy", "hard") for k in (0, 2)
    }
    assert len(done) == Load(concurrency=4).timings(2, 2) == 8
    for full, short in ((b, a) for a, b in zip(done[::2], done[1::2], strict=True)):
        assert full.texts == short.texts
        assert short.budgets == tuple(max(4, round(budget / 4)) for budget in full.budgets)
        assert full.returned == tuple(min(30, budget) for budget in full.budgets)
        assert full.seconds == 18


def test_a_warm_up_sends_every_prompt_alone_and_side_by_side_and_cuts_them_short():
    groups = groups_of(requests_of([("easy", "0"), ("easy", "1"), ("hard", "2"), ("hard", "3")]), 2)
    # Four of a set are sent one by one, and the eight after them two by two
    servers = {k: StandIn(k, [30] * 4, together=2, alone=4) for k in (0, 2)}
    for k, server in servers.items():
        warm_up(k, server, groups, 2)
    for server in servers.values():
        assert server.most == 2
        prompts = [prompt for prompt, _ in server.sent]
        assert prompts[:4] == [0, 1, 0, 1]
        assert {*prompts} == {0, 1, 2, 3}
        assert max(budget for _, budget in server.sent) <= 10
    with pytest.raises(LoadFailedError, match="the server ended") as failed:
        warm_up(2, StandIn(2, [30] * 4, dies_at=3), groups, 1)
    assert (failed.value.k, failed.value.died) == (2, True)


def test_one_prompt_set_is_sent_in_two_halves():
    groups = groups_of(requests_of([("mine", f"{n}") for n in range(5)]), 1)
    prompts = {name: {request.prompt for request in group} for name, group in groups.items()}
    assert prompts == {"mine, half 1": {"0", "2", "4"}, "mine, half 2": {"1", "3"}}


def test_requests_that_arrive_wait_for_no_other(monkeypatch):
    """By a clock that the pauses between requests move, and nothing else."""
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr("harness.measurement.load.sleep", sleep)
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(f"harness.measurement.load.{clock}", lambda: now)
    server = StandIn(0, [30] * 20, together=20, alone=1)
    groups = {"easy": requests_of([("easy", f"{n}") for n in range(20)])}
    (made,) = load_visit(
        {0: server}, groups, [Load(rate=100.0)], 0, np.random.default_rng(1), "engine"
    )
    assert server.most == 20
    assert 0.05 < made.due_s[-1] < 0.45
    assert np.std(np.diff(made.due_s)) > 0.002  # at random, not in step
    assert all(sent_s >= due_s for sent_s, due_s in zip(made.sent_s, made.due_s, strict=True))
    assert (made.concurrency, made.rate) == (None, 100.0)
    assert Load(rate=100.0).timings(1, 1) == 1
    assert made.seconds == pytest.approx(made.due_s[-1])


class Queueing(StandIn):
    """A server whose texts take 1 ms a token, after a wait that differs between requests."""

    def generate(self, asked):
        done = super().generate(asked)
        decode_s = 1e-3 * (len(done.tokens) - 1) * (1 + asked.prompt[0] / 100)
        waited_s = 0.01 * (1 + self.k + asked.prompt[0])
        return replace(done, request_s=waited_s + decode_s, decode_s=decode_s)


@pytest.mark.parametrize("load", [Load(concurrency=2), Load(rate=500.0)])
def test_what_users_wait_for_under_load_is_pooled_over_visits_and_says_over_how_many(load):
    groups = {
        name: requests_of([(name, f"{n}") for n in range(10)], budget=9)
        for name in ("easy", "hard")
    }
    servers = {k: Queueing(k, [30] * 10) for k in (0, 4)}
    visits = [
        [*load_visit(servers, groups, [load], number, np.random.default_rng(number), "engine")]
        for number in range(5)
    ]
    # As if each had been sent the moment it was due
    visits = [[replace(each, sent_s=each.due_s) for each in visit] for visit in visits]
    timings = [timing for visit in visits for timing in visit]

    def rows(made, weights=None) -> dict[int, Any]:
        return {row.k: row for row in under_load(made, ENGINE, weights)}

    of_one, pooled = rows(visits[0]), rows(timings)
    assert {k: row.requests for k, row in of_one.items()} == {0: 20, 4: 20}
    assert {k: row.requests for k, row in pooled.items()} == {0: 100, 4: 100}
    for k, row in pooled.items():
        assert (row.concurrency, row.rate) == (load.concurrency, load.rate)
        waits = row.first_token, row.per_token, row.request
        # Of 0 to 9, each ten times; nine tokens of which one is the prefill's
        expected = [
            (0.01 * (1 + k + n), 1e-3 * (1 + n / 100), 0.01 * (1 + k + n) + 8e-3 * (1 + n / 100))
            for n in (4, 9, 9)
        ]
        assert [(w.p50, w.p95, w.p99) for w in waits] == [
            pytest.approx(each) for each in zip(*expected, strict=True)
        ]
        # One request in twenty tells p95, and none p99
        assert [each.p99 for each in (of_one[k].first_token, of_one[k].request)] == [None, None]
        assert of_one[k].request.p95 == row.request.p95
    # A run that did not store decoding has the whole answer alone; prompt sets count by weight
    older = rows([replace(each, user_decode_s=()) for each in timings], {"easy": 1, "hard": 0})
    assert [row.requests for row in older.values()] == [50, 50]
    assert {row.first_token or row.per_token for row in older.values()} == {None}
    assert [row.request.p95 for row in older.values()] == [r.request.p95 for r in pooled.values()]


@pytest.mark.parametrize(
    ("error", "died"),
    [
        (ServerDiedError("the server ended"), True),
        (UserError("it drafted nothing"), True),
        (RefusedError("status 500", 500), False),
        (RequestFailedError("its answer is garbled"), False),
    ],
)
def test_what_a_server_cannot_do_under_load_ends_its_load_and_not_the_run(error, died):
    class Cannot(StandIn):
        def generate(self, asked):
            done = super().generate(asked)
            if len(self.sent) >= 3:
                raise error
            return done

    server = Cannot(4, [30] * 500)
    groups = {"easy": requests_of([("easy", f"{n}") for n in range(500)])}
    with pytest.raises(LoadFailedError, match=str(error)) as failed:
        list(load_visit({4: server}, groups, [Load(2)], 0, np.random.default_rng(1), "engine"))
    assert len(server.sent) < 500
    assert (failed.value.k, failed.value.died) == (4, died)


def test_a_load_with_a_repeated_request_is_sent_again_as_a_whole():
    groups = {"easy": requests_of([("easy", f"{n}") for n in range(4)])}

    class Repeats(StandIn):
        """A request of its first loads had to be repeated."""

        loads = 1

        def generate(self, asked):
            done = super().generate(asked)
            return replace(done, asked=1 + (len(self.sent) <= 4 * self.loads))

    for loads, fails in ((1, False), (99, True)):
        server = Repeats(0, [30] * 4)
        server.loads = loads
        visit = load_visit({0: server}, groups, [Load(2)], 0, np.random.default_rng(1), "cpu")
        if fails:
            with pytest.raises(LoadFailedError, match="k=0: a load was sent 3 times") as error:
                list(visit)
            assert not error.value.died
            continue
        short, full = visit
        assert [each.seconds for each in (short, full)] == [4, 4]
        assert len(server.sent) == 3 * 4


# ---- which K to serve ----------------------------------------------------------------------------


def iteration_s(k, batch):
    """R(K, B) of a verify that gets expensive with the batch, so that the best K falls."""
    return (1 + 0.2 * batch + 0.1 * k + 0.13 * k * batch) * 1e-3


def loads(noise=0.0, visits=3, ks=(1, 2, 4), counting=COUNTING):
    """Loads of two sets whose iterations take R(K, B), and the replay of their texts."""
    rng = np.random.default_rng(5)
    traces = []
    for prompt_set, chance in (("easy", 0.85), ("hard", 0.6)):
        for n in range(10):
            chances = (rng.random(rng.integers(20, 39)) < chance).astype(float)
            traces.append(workloads.trace("draft", prompt_set, f"{n}", chances))
    lengths = [1 + len(trace.tokens) for trace in traces]
    replays = replayed_loads(traces, "greedy_draft", counting)
    groups = groups_of(requests_of([(t.prompt_set, t.prompt) for t in traces]), 4)
    servers = {k: StandIn(k, lengths) for k in (0, *ks)}
    made = [
        timing
        for number in range(visits)
        for timing in load_visit(servers, groups, [Load(b) for b in BATCHES], number, rng, "cpu")
    ]
    priced = []
    for timing in made:
        rounds = replayed_by(replays, timing).expected * np.exp(noise * rng.standard_normal())
        seconds = rounds * iteration_s(timing.k, timing.concurrency) / timing.concurrency
        priced.append(replace(timing, seconds=seconds))
    return priced, replays


def compared(timings, replays=lambda _: None):
    return throughputs(closed_loads(full_loads(timings)), replays)


def replayed_by(replays, timing):
    replayed = replays(timing)
    assert replayed is not None
    return replayed


def sampled(timings):
    """The loads, had each returned texts of its own, in rounds of 1 to k + 1 tokens."""
    rng = np.random.default_rng(7)
    for timing in timings:
        returned = [int(rng.integers(2, budget + 1)) for budget in timing.budgets]
        rounds = [int(rng.integers(-(-(size - 1) // (timing.k + 1)), size)) for size in returned]
        counted = tuple(rounds) if timing.k else (None,) * len(rounds)
        yield replace(timing, returned=tuple(returned), rounds=counted)


@pytest.mark.parametrize("told", [True, False])
def test_a_predicted_ratio_is_the_replayed_tokens_per_round_over_what_an_iteration_took(told):
    timings, replays = loads(visits=1, counting=Counting(1, shortens_last_draft=False))
    priced = []
    for timing in sampled(timings):
        tokens = sum(timing.returned) - len(timing.texts)
        replayed = replayed_by(replays, replace(timing, rounds=(None,) * len(timing.texts)))
        rounds = sum(timing.rounds) if timing.k and told else replayed.taken
        assert rounds == pytest.approx(tokens) or timing.k
        seconds = rounds * iteration_s(timing.k, timing.concurrency) / timing.concurrency
        timing = timing if told else replace(timing, rounds=(None,) * len(timing.texts))
        priced.append(replace(timing, seconds=seconds))
    loops = closed_loads(full_loads(priced))
    rows = throughputs(loops, replays)
    assert len(rows) == 2 * 3 * 4
    for row in rows:
        (plain,) = (
            each.timings[0]
            for key, each in loops.items()
            if (key.group, key.concurrency, key.k) == (row.group, row.concurrency, 0)
        )
        rounds = replayed_by(replays, replace(plain, k=row.k)).expected
        tokens_per_round = replayed_by(replays, plain).expected / rounds
        costs = iteration_s(row.k, row.concurrency) / iteration_s(0, row.concurrency)
        assert row.predicted == pytest.approx(tokens_per_round / costs)
    # As drafted, the texts of some K were luckier
    off = [abs(row.predicted / row.measured - 1) for row in rows if row.predicted is not None]
    assert max(off) > 0.1 or not told


def test_sampled_texts_of_other_lengths_are_no_other_throughput():
    timings, replays = loads(visits=4)
    token_s = {0: 5e-3, 1: 4e-3, 2: 3e-3, 4: 6e-3}
    paced = [replace(t, seconds=token_s[t.k] * sum(t.returned)) for t in sampled(timings)]
    totals = over_groups(compared(paced, replays))
    assert len(totals) == len(BATCHES) * 4
    for row in totals:
        assert row.measured == pytest.approx(token_s[0] / token_s[row.k])
        assert spread(row.by_visit.values()) == pytest.approx(0.0, abs=1e-9)
    cells = load_cells(full_loads(paced), totals)
    rows = analyse_loads(paced, [], None, None, "llamacpp").rows
    assert cells
    for cell in cells:
        assert cell.tokens_per_second == pytest.approx(1 / token_s[cell.k])
    assert rows
    for row in rows:
        assert row.ms_per_token == pytest.approx(1e3 * (row.concurrency or 0) * token_s[row.k])
        assert (row.rounds is None) == (row.k == 0)


def test_greedy_loads_have_the_predicted_ratio_that_was_measured():
    timings, replays = loads()
    for row in compared(timings, replays):
        assert row.predicted == pytest.approx(row.measured)


def test_the_best_k_falls_as_the_load_grows_and_every_entry_is_a_measured_cell():
    timings, replays = loads()
    totals = over_groups(compared(timings, replays))
    chosen = schedule(0.0, totals)
    assert [(entry.low, entry.high) for entry in chosen.entries] == [(1, 1), (2, 2), (3, None)]
    ks = [entry.k for entry in chosen.entries]
    assert ks == sorted(ks, reverse=True)
    assert ks[0] > ks[-1]
    for entry in chosen.entries:
        measured = {r.k: r.measured for r in totals if r.concurrency == entry.concurrency}
        assert entry.measured_ratio == measured[entry.k]
        assert measured[entry.k] == pytest.approx(max(measured.values()), rel=0.01)
        assert not entry.tied
    cells = load_cells(full_loads(timings), totals)
    assert [(cell.concurrency, cell.k) for cell in cells] == [
        (batch, k) for batch in BATCHES for k in (0, 1, 2, 4)
    ]
    assert {cell.throughput_ratio for cell in cells if cell.k == 0} == {1.0}


def throughput(k, predicted, by_visit, measured=1.0):
    seconds, of_visits = np.array([1.0, measured]), {v: np.array(s) for v, s in by_visit.items()}
    predicted_s = None if predicted is None else np.array([1.0, predicted])
    return Throughput(1, "all", k, 1.0, seconds, predicted_s, of_visits)


STEADY = dict.fromkeys(range(4), (1.0, 1.0))
# K = 2 was not timed in visit 1: its visits are as steady as K = 4's
GAP = {0: (1.0, 1.0), 2: (3.0, 1.0), 3: (1.0, 1.0)}


UNSTEADY = {0: (1.0, 1.0), 1: (1.3, 1.0), 2: (1.0, 1.0), 3: (1.3, 1.0)}


@pytest.mark.parametrize(
    ("rows", "k", "tied"),
    [
        ([(4, 1.1, STEADY, 1.1), (2, 1.0, STEADY, 1.0)], 4, ()),
        ([(4, 1.1, STEADY, 0.9), (2, 1.0, STEADY, 1.0)], 4, ()),  # 2 was luckier
        ([(4, 1.1, UNSTEADY, 1.1), (2, 1.0, STEADY, 1.0)], 4, (2,)),
        ([(4, None, STEADY, 1.1), (2, None, STEADY, 1.0)], 4, ()),
        ([(4, 1.1, {**STEADY, 2: (3.0, 1.0)}, 1.1), (2, 1.0, GAP, 1.0)], 4, ()),
    ],
)
def test_a_lead_counts_beyond_the_spread_of_the_same_visits(rows, k, tied):
    (entry,) = schedule(0.0, [throughput(*row) for row in rows]).entries
    assert (entry.k, entry.tied) == (k, tied)


def test_loads_come_back_from_their_file_and_say_rows_of_results(tmp_path):
    timings, _ = loads(visits=1)
    folder = RunFolder.create(tmp_path, "server", ["target"], {"k": [1, 2, 4]})
    folder.loads.append(*timings)
    assert stored(folder.path).loads == tuple(timings) == tuple(folder.loads.read())
    results = analyse_loads(timings, [], None, None, "llamacpp")
    assert [schedule.temperature for schedule in results.schedules] == [0.0]
    assert {(row.prompt_set, row.concurrency, row.engine) for row in results.rows} == {
        (name, batch, "llamacpp") for name in ("easy", "hard") for batch in (2, 4)
    }
    one = next(row for row in results.rows if (row.k, row.concurrency) == (4, 2))
    assert one.tokens_per_second is not None
    assert one.ms_per_token == pytest.approx(2e3 / one.tokens_per_second)


def test_without_scored_texts_loads_are_compared_but_not_predicted():
    timings, _ = loads()
    totals = over_groups(compared(timings))
    assert {row.predicted for row in totals} == {None}
    for entry in schedule(0.0, totals).entries:
        measured = [row.measured for row in totals if row.concurrency == entry.concurrency]
        assert entry.measured_ratio == max(measured)


def test_a_k_that_was_timed_in_few_visits_is_compared_over_these_and_not_named():
    timings, replays = loads(visits=8)
    rng, found = np.random.default_rng(2), []
    for _ in range(2):
        # Others use the machine in most visits, both servers alike
        slow = 1.0 + rng.exponential(0.8, 8)
        noisy = [replace(t, seconds=t.seconds * slow[t.visit]) for t in timings]
        kept = [t for t in noisy if t.k != 4 or t.visit in (0, 1)]
        whole, few = (
            {(r.concurrency, r.k): r for r in over_groups(compared(t, replays))}
            for t in (timings, kept)
        )
        found += [few[cell].measured / whole[cell].measured for cell in few if cell[1] == 4]
        results = analyse_loads(kept, [], None, None, "llamacpp", 8)
        assert {(row.k, row.status) for row in results.rows} == {
            *((k, "complete") for k in (0, 1, 2)),
            (4, "partial"),
        }
        assert 4 not in {entry.k for chosen in results.schedules for entry in chosen.entries}
        assert results.schedules
        lacking = {cell.k: cell.visits for cell in results.cells}
        assert lacking == {0: None, 1: None, 2: None, 4: Visits(2, 8)}
    assert found == pytest.approx([1.0] * len(found), rel=0.05)


@pytest.mark.parametrize("slots", [None, 4, 2])
def test_requests_beyond_a_servers_slots_are_a_queue_and_get_no_k(slots):
    timings, _ = loads(visits=2)
    known = [replace(timing, slots=slots if timing.k == 2 else None) for timing in timings]
    results = analyse_loads(known, [], None, None, "llamacpp")
    (chosen,) = results.schedules
    queues = slots == 2
    # Where a larger load waits, nothing is known of more requests than the last one's
    assert chosen.entries[-1].high == (2 if queues else None)
    assert [e.concurrency for e in chosen.entries] == ([1, 2] if queues else [1, 2, 4])
    assert {cell.slots for cell in results.cells if cell.concurrency == 4} == {
        2 if queues else None
    }
    assert {cell.slots for cell in results.cells if cell.concurrency != 4} == {None}


@pytest.mark.parametrize(
    ("engine", "code", "note"),
    [
        (
            "vllm",
            "vllm serve TARGET --speculative-config"
            """ '{"method":"draft_model","model":"DRAFT","num_speculative_tokens":4,"""
            """"num_speculative_tokens_per_batch_size":[[1,2,4],[3,8,0]]}\'""",
            '"enable_adaptive_verification":true decides in every step how many drafts of each'
            " request are verified; at low load a fixed K is faster. At K=0 it still runs the"
            " draft in each step, which published measurements found 4 to 17 % slower; what was"
            " measured at K=0 is a server without one, so its throughput is not this line's.",
        ),
        (
            "sglang",
            "# concurrency 1 to 2\n"
            "python -m sglang.launch_server --model-path TARGET --speculative-algorithm STANDALONE"
            " --speculative-draft-model-path DRAFT --speculative-num-steps 4"
            " --speculative-eagle-topk 1 --speculative-num-draft-tokens 5\n"
            "# concurrency 3 and more\n# without a draft",
            "--speculative-num-steps 4 (one of the K) --speculative-adaptive-config FILE, and in it"
            ' {"1": {"candidate_steps": [4]}, "3": {"candidate_steps": [0]}}',
        ),
        (
            "llamacpp",
            "# concurrency 1 to 2\n"
            "llama-server -m TARGET.gguf -md DRAFT.gguf --spec-type draft-simple"
            " --spec-draft-n-max 4\n# concurrency 3 and more\n# without a draft",
            "At concurrency 2 the lead of K=4 over K=2 is within the spread of visits",
        ),
    ],
)
def test_a_schedule_is_written_as_the_engine_takes_it(engine, code, note):
    entries = tuple(
        ScheduleEntry(low, high, measured, k, tied, 1.2)
        for low, high, measured, k, tied in [
            (1, 1, 1, 4, ()),
            (2, 2, 2, 4, (2,)),
            (3, None, 8, 0, ()),
        ]
    )
    served = ServedSummary(engine, "1", None, "cpu", True, schedules=(Schedule(0.0, entries),))
    run = RunFacts("server", "results/run", "complete", None, "TARGET", "draft")
    (snippet,) = schedule_snippets(Summary(run, served=served))
    assert snippet.code == code
    assert note in " ".join(snippet.notes)


@pytest.mark.parametrize("prompts", [[5], [1], [3, 7], [4, 4, 9]])
@pytest.mark.parametrize("largest", [1, 2, 8])
def test_a_plan_counts_the_requests_of_a_load(prompts, largest):
    requests = [
        Request("", f"set{name}", str(n), None, (1,), GREEDY, 32, 0, n, frozenset(), "t", "d")
        for name, count in enumerate(prompts)
        for n in range(count)
    ]
    sent = sum(len(group) for group in groups_of(requests, largest).values())
    assert requests_of_load(prompts, largest) == sent


@pytest.mark.parametrize(
    ("engine", "high", "expected"),
    [
        (
            "vllm",
            None,
            """vllm serve T --speculative-config '{"model": "D", """
            """"num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 2, 0]]}'""",
        ),
        *(
            (
                "llamacpp",
                high,
                '# concurrency 1\nvllm serve T --speculative-config \'{"model": "D"}\'\n'
                f"# concurrency {load}\nvllm serve T",
            )
            for high, load in [(None, "2 and more"), (2, "2"), (4, "2 to 4")]
        ),
    ],
)
def test_a_schedule_of_servers_that_were_started_has_their_commands(engine, high, expected):
    entries = (ScheduleEntry(1, 1, 1, 2, (), 1.2), ScheduleEntry(2, high, 2, 0, (), 1.0))
    commands = (
        ServerCommand(2, 1, "", "alone"),
        ServerCommand(0, 2, "", "vllm serve T"),
        ServerCommand(2, 2, "", 'vllm serve T --speculative-config \'{"model": "D"}\''),
    )
    served = ServedSummary(
        engine, "7", None, "cpu", True, commands, schedules=(Schedule(0.0, entries),)
    )
    run = RunFacts("server", "results/run", "complete", None, "TARGET", "draft")
    (snippet,) = schedule_snippets(Summary(run, served=served))
    assert snippet.code == expected
    assert " 7)" in snippet.title


# ---- servers that run one after the other, and those whose K changes -----------------------------


class OneOfAKind(HttpServer):
    """A server of vLLM's that answers in this process."""

    def __init__(self, k):
        self.k, self.facts = k, EngineFacts(VLLM, "1", "greedy_draft")

    def complete(self, asked, deadline_s):
        raise NotImplementedError

    def generate(self, asked):
        budget = asked.budget
        rounds = budget - 1 if not self.k else (budget - 1) // 2
        return Completion(tuple(range(budget)), "budget", 0.01, rounds=rounds, decode_s=0.01)

    def check_vocabulary(self, tokens, text):
        pass

    def cpu_s(self):
        return 0.0

    def close(self):
        pass


@dataclass(frozen=True)
class InThisProcess:
    """An engine that starts them, and notes how."""

    serve: Any
    started: list

    def open(self, k, synthetic=None):  # noqa: ARG002
        self.started.append((k, self.serve.varying))
        return OneOfAKind(k)

    def command(self, k):
        return ServerCommand(k, 1, f"serve {k}", "")

    def log(self, k, synthetic=None):  # noqa: ARG002
        return None


def measured_under_load(tmp_path, *words):
    words = ["engine=vllm", "score=false", "new_tokens=8", "prompts.limit=2", *words]
    words += ["temperature=[0]", "repetitions=2", "concurrency=[1,2]", f"results_root={tmp_path}"]
    config = compose("server", words)
    folder, begun = create(config, "server"), []
    adapter = Adapter(VLLM, start=lambda serve: InThisProcess(serve, begun))
    work = replace(open_workload(config, load_prompts(config)), adapter=adapter)
    note_engine(folder, work, OneOfAKind(0))
    measure_loads(folder, work, Failures(folder, work))
    return stored(folder.path), begun


def test_servers_that_run_one_after_the_other_are_all_put_under_load(tmp_path):
    run, begun = measured_under_load(tmp_path, "k=[2,4]")
    assert begun == [(0, ""), (2, ""), (4, "")]
    made = {(t.k, t.concurrency, t.visit) for t in run.loads}
    assert made == {*product((0, 2, 4), (1, 2), (0, 1))}


def test_each_server_is_warmed_up_once_before_its_first_load(tmp_path, monkeypatch):
    warmed = []

    def note(k, _, groups, slots):
        warmed.append((k, [*groups], slots))

    monkeypatch.setattr("harness.commands.server_visits.warm_up", note)
    run, _ = measured_under_load(tmp_path, "k=[2]", "servers=2")
    assert {timing.visit for timing in run.loads} == {0, 1}
    assert warmed == [(k, ["easy", "hard"], 2) for k in (0, 2)]


def test_a_server_that_fails_in_its_warm_up_is_left_out_and_no_other_is_warmed_again(
    tmp_path, monkeypatch
):
    warmed = []

    def note(k, *_):
        warmed.append(k)
        if k == 4:
            raise LoadFailedError(4, ServerDiedError("the server ended"))

    monkeypatch.setattr("harness.commands.server_visits.warm_up", note)
    run, _ = measured_under_load(tmp_path, "k=[2,4]", "servers=3")
    assert {timing.k for timing in run.loads} == {0, 2}
    assert warmed == [0, 2, 4]


def test_a_server_whose_k_changes_is_one_more_candidate_under_load(tmp_path):
    run, begun = measured_under_load(tmp_path, "k=[4]", "schedule=[[1,1,4],[2,8,1]]")
    assert run.manifest.engine is not None
    assert begun == [(0, ""), (4, ""), (4, "schedule")]
    assert {(t.k, t.varying) for t in run.loads} == {(0, ""), (4, ""), (4, "schedule")}
    assert run.manifest.engine.varying == {"schedule": ServerCommand(4, 1, "serve 4", "")}
    results = analyse_loads(run.loads, (), "greedy_draft", Counting(1, False), "vllm", 2)
    without = analyse_loads(
        where(run.loads, varying=""), (), "greedy_draft", Counting(1, False), "vllm", 2
    )
    # What has one K is as it was: in its cells, in K by load and in results.csv
    assert results == replace(without, varying=results.varying)
    assert [(c.concurrency, c.k, c.varying) for c in results.varying] == [
        (1, 4, "schedule"),
        (2, 4, "schedule"),
    ]
    for cell in results.varying:
        assert cell.throughput_ratio is not None
    served = ServedSummary(
        "vllm", "1", None, "cpu", True, load=results.cells, varying=results.varying,
        varying_commands=run.manifest.engine.varying,
    )  # fmt: skip
    shown = Summary(RunFacts("server", "results/run", "complete", None, "T", "D"), served=served)
    table = load_table(shown)
    assert "Started with: serve 4" in table.notes
    assert len(table.rows) == len(results.cells) + 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["schedule=[[1,4,5],[4,16,2]]"], "schedule: [4, 16, 2] is not [lowest, highest, K] with"),
        (["schedule=[[1,4]]"], "schedule: [1, 4] is not [lowest, highest, K]"),
        (["schedule=[[2,4,1]]"], "give K from 1 request on"),
        (["schedule=[[1,4,0]]"], "and a K of 1 or more in it"),
        (["schedule=[[1,4,1]]", "concurrency=[1]"], "schedule: its K is measured under load; give"),
        (["k=[adaptive]"], "k=[adaptive]: give K to compare with, as k=[4,adaptive]"),
        (["k=[4,adaptive]", "url=[http://a,http://b]"], "k=adaptive: not with url="),
        (["engine=llamacpp", "schedule=[[1,4,1]]"], "schedule: a server of engine=llamacpp keeps"),
        (["k=[4,adaptive]"], "k=adaptive: engine=vllm does that (enable_adaptive_verification)"),
        (["k=[4,adaptive]", "engine=sglang"], "k=adaptive: engine=sglang does that"),
    ],
)
def test_a_k_that_cannot_change_so_is_refused_in_one_line(words, line):
    with pytest.raises(UserError) as error:
        adapter_of(compose("server", ["engine=vllm", "concurrency=[1,4]", *words]))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["draft=dspark", "k=[4,7,adaptive]"], "k=adaptive: needs full CUDA graphs (enable_adapt"),
        (["draft=dspark"], "draft=dspark: needs vLLM's V2 model runner, which builds for CUDA"),
        (["draft=eagle3", "decode.rule=block"], "decode.rule=block: needs vLLM's V2 model runner"),
        (["draft=eagle3"], None),
    ],
)
def test_what_a_build_of_vllm_for_cpus_lacks_is_refused_before_it_is_started(
    words, line, tmp_path, monkeypatch
):
    config = compose("server", ["engine=vllm", "draft.id=FOLDER", "concurrency=[1,4]", *words])
    adapter = adapter_of(config)
    program, packages = tmp_path / "bin/vllm", tmp_path / "lib/python3.11/site-packages"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    adapter.check(config)  # of an unknown build
    (packages / "vllm-0.33.0.dist-info").mkdir(parents=True)
    adapter.check(config)
    (packages / "vllm-0.33.0.dist-info").rename(packages / "vllm-0.32.0+cpu.dist-info")
    if line is None:
        adapter.check(config)
        return
    with pytest.raises(UserError) as error:
        adapter.check(config)
    assert line in str(error.value)
    assert "(`pip install vllm==0.33.0`, where there is a card)" in str(error.value)


def test_k_and_adaptive_are_two_candidates():
    words = ["engine=sglang", "draft=tiny_eagle3", "concurrency=[1,4]"]
    config = compose("server", [*words, "k=[4,7,adaptive]"])
    assert (config.k, config.varying) == ([4, 7], ("adaptive",))
    assert [(role.k, role.varying) for role in varying_roles(config)] == [(7, "adaptive")]
    assert compose("server", [*words, "k=[4,7]"]).varying == ()


def test_the_servers_whose_k_changes_are_started_as_the_engines_take_it(tmp_path):
    ranges = ((1, 4, 5), (5, 16, 2))
    vllm = Vllm("T", "D", tmp_path, 100, varying="schedule", schedule=ranges, slots=8)
    flags = vllm.flags(5)
    speculative = json.loads(flags[flags.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens"] == 5
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 16, 2]]
    assert vllm.log(5).name == "vllm_k5_schedule.log"
    assert "per_batch_size" in str(vllm.command(5).production)
    assert "per_batch_size" not in str(Vllm("T", "D", tmp_path, 100, schedule=ranges).flags(5))
    adaptive = Sglang("T", "D", tmp_path, 100, kind="eagle3", varying="adaptive").flags(7)
    assert "--speculative-adaptive" in adaptive
    assert "--speculative-num-steps" not in adaptive
    scheduled = replace(
        Sglang("T", "D", tmp_path, 100, kind="eagle3"), varying="schedule", schedule=ranges
    )
    flags = scheduled.flags(5)
    file = Path(flags[flags.index("--speculative-adaptive-config") + 1])
    with pytest.raises(UserError, match="no sglang on PATH"):
        scheduled.open(5)
    assert json.loads(file.read_text()) == {
        "1": {"candidate_steps": [5]},
        "5": {"candidate_steps": [2]},
    }


def test_a_printed_schedule_comes_with_the_command_that_measures_its_server():
    entries = tuple(
        ScheduleEntry(low, high, measured, k, (), 1.2)
        for low, high, measured, k in [(1, 1, 1, 4), (2, 4, 4, 4), (5, None, 16, 2)]
    )
    models = (
        ModelFacts("target", "tiny", "embedded:tiny"),
        ModelFacts("draft", "tiny_good", "embedded:tiny_good"),
    )
    run = RunFacts("server", "results/run", "complete", None, "tiny", "tiny_good", models=models)
    served = ServedSummary("vllm", "1", None, "cpu", True, schedules=(Schedule(0.0, entries),))
    (snippet,) = schedule_snippets(Summary(run, served=served))
    assert snippet.measure == (
        "python -m harness.server engine=vllm model=tiny draft=tiny_good k=4 temperature=0"
        " 'schedule=[[1,4,4],[5,16,2]]' 'concurrency=[1,4,16]'"
    )
    config = compose("server", shlex.split(snippet.measure)[3:])
    assert config.schedule == [[1, 4, 4], [5, 16, 2]]
    # Once it was measured the command is gone, as where an engine keeps one K
    cell = LoadCell(0.0, 4, 4, None, 100.0, 1.4, varying="schedule")
    for other in (replace(served, varying=(cell,)), replace(served, engine="llamacpp")):
        (snippet,) = schedule_snippets(Summary(run, served=other))
        assert snippet.measure == ""


# ---- llama.cpp -----------------------------------------------------------------------------------


@needs_llamacpp
def test_llamacpp_decodes_side_by_side_what_it_decodes_alone(tmp_path):
    pair, random = Served(tmp_path, prompts=3), np.random.default_rng(0)
    asked = [replace(each, budget=32, draft=pair.draft.name) for each in pair.requests]
    engine = replace(pair.llamacpp(), slots=2)
    with engine.open(0) as plain, engine.open(2) as speculating:
        texts = [answered(each, plain) for each in asked]
        servers = {0: plain, 2: speculating}
        groups = groups_of(asked, 2)
        timings = list(load_visit(servers, groups, [Load(1), Load(2)], 0, random, "cpu"))
        facts = plain.facts
    emitted = [decoded(text, facts) for text in texts]
    traces = score_texts(emitted, pair.target_model, pair.draft_model, draft_name=pair.draft.name)
    replays = replayed_loads(traces, facts.rule, facts.spec.counting)
    for timing in timings:
        replayed = replays(timing)
        assert replayed is not None
        assert timing.seconds > 0
        known = [rounds for rounds in timing.rounds if rounds is not None]
        if timing.k and len(known) == len(timing.rounds):
            assert sum(known) == pytest.approx(replayed.expected)
        for user_s, decode_s in zip(timing.user_s, timing.user_decode_s, strict=True):
            assert decode_s is not None
            assert 0 < decode_s < user_s
    assert {timing.concurrency for timing in timings} == {1, 2}


# ---- arrivals at random --------------------------------------------------------------------------


def arrived(user_s: Any, due_s: Any) -> LoadTiming:
    """Of requests of eleven tokens, of which all but the first took a second."""
    number = len(user_s)
    return LoadTiming(
        visit=0,
        model="target",
        draft="",
        k=0,
        temperature=0.0,
        group="easy",
        concurrency=None,
        rate=2.0,
        texts=tuple(f"easy/{n}" for n in range(number)),
        budgets=(11,) * number,
        returned=(11,) * number,
        rounds=(10,) * number,
        user_s=tuple(user_s),
        seconds=10.0,
        user_decode_s=(1.0,) * number,
        due_s=tuple(due_s),
        sent_s=tuple(np.add(due_s, 0.1).tolist()),
    )


def test_a_server_that_cannot_keep_up_with_a_rate_is_told_by_what_is_left_when_no_more_come():
    due_s = np.arange(1, 41) / 2
    (steady,) = under_load([arrived([1.5] * 40, due_s)], ENGINE, None)
    assert steady.behind is not None
    assert not steady.queue_grows
    # Each request waits 0.3 s longer than the one before it: 1.6 of them arrive for each that ends
    waiting = 1.5 + 0.3 * np.arange(40)
    (late,) = under_load([arrived(waiting.tolist(), due_s)], ENGINE, None)
    assert late.behind == pytest.approx((0.3 * 39 - 0.9 * 0.3 * 9 + 0.1) / 20)
    assert late.queue_grows
    closed = replace(
        arrived(waiting.tolist(), due_s), rate=None, concurrency=4, due_s=(), sent_s=()
    )
    (row,) = under_load([closed], ENGINE, None)
    assert (row.behind, row.queue_grows) == (None, False)


def test_waits_at_a_rate_are_from_when_each_request_was_due():
    timing = arrived([1.2, 1.3, 1.4, 1.5], [1.0, 2.0, 3.0, 4.0])
    # After 0.1 s in the client the first token comes 0.3 to 0.6 s after it was due; 0.1 s each
    (row,) = under_load([timing], ENGINE, None)
    assert row.first_token is not None
    assert row.per_token is not None
    assert (row.first_token.p50, row.per_token.p50) == pytest.approx((0.4, 0.1))
    assert [*under_load([timing], ENGINE, {"easy": 0.0})] == []
    unknown = replace(timing, user_decode_s=(None,) * 4)
    (row,) = under_load([unknown], ENGINE, None)
    assert row.first_token is None


def test_a_small_load_is_no_longer_than_it_needs_to_be():
    server = StandIn(0, [30] * 3)
    groups = groups_of(requests_of([("easy", f"{n}") for n in range(3)]), 6)
    loads = [Load(concurrency=1), Load(concurrency=6)]
    made = load_visit({0: server}, groups, loads, 0, np.random.default_rng(1), "engine")
    sent = {timing.concurrency: len(timing.texts) for timing in made}
    # Halves of two prompts and one: four requests for each in flight, all prompts equally often
    assert sent == {1: 4, 6: 24}
