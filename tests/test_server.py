"""The command server: the embedded pair on llama.cpp for real, and what can go wrong with it."""

import json
import os
import re
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from runs import EXACT_FLAGS, needs_llamacpp, outcome_of, ran, stored
from served_pair import DRAFT, Served
from server_answers import TIMES, completion, vllm_answers
from stand_in_server import StandIn

from harness.analysis import analyse
from harness.analysis.server_lossless import text_z
from harness.cli import compose
from harness.commands import report, server_judging, server_plan, server_start, server_visits
from harness.commands import server as command
from harness.commands.checks import Vocabularies, without_too_long
from harness.commands.run_lifecycle import create, load_prompts
from harness.commands.server_requests import open_workload
from harness.config import ModelConf, ReportConfig
from harness.engines import turns
from harness.engines.llamacpp import LlamaCppServer
from harness.engines.protocol import Asked, Completion, ServerDiedError, TokensLostError
from harness.models.embedded import EMBEDDED, gguf_of
from harness.models.load import load_vocabulary
from harness.records import Trial, UserError
from harness.reporting.content import content_of
from harness.storage import StoredRun
from harness.summary import TextCheck, TextLikelihood

pytestmark = pytest.mark.usefixtures("few_samples")
KS, TEMPERATURES, VISITS = (1, 4), (0.0, 1.0), 2
MORE_DRAFTS = (("tiny_eagle3", 4), ("ngram_simple_1", 2))
GRID = ["k=[1,4]", "temperature=[0,1]", "repetitions=2", "new_tokens=24", "prompts.limit=3"]


def asked(root: Path, *words: str) -> Any:
    flags = [] if any(word.startswith("engine=") for word in words) else [EXACT_FLAGS]
    settings = [f"results_root={root}", "threads=1", *GRID, *flags, *words]
    return compose("server", settings)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    outcome = command.run(asked(tmp_path_factory.mktemp("results")))
    assert outcome.status == 0
    return stored(outcome)


def cells(trials: Any) -> Counter[tuple[int, float, int]]:
    return Counter((trial.k, trial.temperature, trial.repetition) for trial in trials)


# ---- llama.cpp -----------------------------------------------------------------------------------


@needs_llamacpp
def test_every_request_is_a_trial_that_counts_what_rounds_emitted(served: StoredRun) -> None:
    grid = [(k, t, visit) for k in (0, *KS) for t in TEMPERATURES for visit in range(VISITS)]
    assert cells(served.trials) == dict.fromkeys(grid, 6)
    for trial in served.trials:
        assert (trial.status, trial.first_token_s) == ("ok", 0.0)
        assert trial.tokens is not None
        assert trial.new_tokens == len(trial.tokens) - 1  # the first came from the prefill
        assert trial.user_decode_s == trial.decode_s
        assert trial.user_s is not None
        assert trial.user_s > (trial.prefill_s or 0.0) + (trial.decode_s or 0.0)
        if trial.k:
            assert trial.rule == "greedy_draft"
            assert trial.rounds is not None
            assert trial.accepted is not None
            assert trial.new_tokens is not None
            assert trial.rounds + trial.accepted - trial.new_tokens in (0, 1)
        else:
            assert (trial.rule, trial.rounds, trial.drafted) == (None, None, None)
    seeds = {each.cell for each in served.trials}
    assert len(seeds) == len(served.trials)


@needs_llamacpp
@pytest.mark.parametrize(
    ("draft", "k"),
    [
        ("ngram_simple", 4),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE_DRAFTS),
    ],
)
def test_a_head_and_a_look_up_of_llamacpp_draft_as_replayed(
    draft: str, k: int, tmp_path: Path
) -> None:
    words = (f"draft={draft}", f"k=[{k}]", "temperature=0", "repetitions=1", "prompts.limit=1")
    run = ran("server", tmp_path, *words, "engine=llamacpp", "threads=1",
              "new_tokens=48", EXACT_FLAGS)  # fmt: skip
    served = analyse(run).served
    assert served is not None
    (gate,) = served.gates
    assert (gate.k, gate.texts) == (k, 2)
    assert gate.equal_rounds == gate.equal_drafted == gate.equal_texts == gate.texts
    assert gate.lossless


@pytest.mark.exhaustive
@needs_llamacpp
def test_a_look_up_of_llamacpp_that_is_not_replayed_is_measured_without_the_weights(
    tmp_path: Path,
) -> None:
    words = (
        "model=tiny",
        "draft=ngram_mod",
        "k=[4]",
        "temperature=0",
        "repetitions=2",  # it drafts what it remembers from the first visit
        "prompts.limit=2",
    )
    run = ran("server", tmp_path, *words, "engine=llamacpp", "threads=1",
              EXACT_FLAGS, "score=false")  # fmt: skip
    summary = analyse(run)
    assert summary.served is not None
    assert summary.served.not_predicted == "no_weights"
    assert [(gate.k, gate.equal_texts, gate.texts) for gate in summary.served.gates] == [(4, 4, 4)]
    assert {row.k for row in summary.results if row.k and row.speedup} == {4}
    assert sum(trial.drafted or 0 for trial in run.trials) > 0
    assert run.manifest.engine is not None
    lines = [each.line for each in run.manifest.engine.commands if each.k == 4]
    assert "--spec-type ngram-mod " in lines[0]
    assert "--spec-ngram-mod-n-max 4" in lines[0]


@needs_llamacpp
def test_prompts_are_asked_in_another_order_in_each_visit(served: StoredRun) -> None:
    """A machine that becomes slower would else make the last prompt set's rounds look dear."""
    orders = [
        [key for key, _ in groupby((t.prompt_set, t.prompt, t.temperature) for t in of_visit)]
        for _, of_visit in groupby(served.trials, lambda trial: trial.repetition)
    ]
    assert [len(order) for order in orders] == [12, 12]  # all K of a prompt follow each other
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


@needs_llamacpp
@pytest.mark.skipif(sys.platform != "linux", reason="servers are paused on Linux alone")
def test_long_requests_take_turns_and_give_the_same_texts(
    served: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []

    def counted(asks: Sequence[tuple[turns.Turn, Callable[[], Any]]]) -> list[Future[Any]]:
        together.append(len(asks))
        return in_turns(asks)

    def losing(self: LlamaCppServer, *words: Any) -> Any:
        answer = streamed(self, *words)
        if len(together) == 1 and self.k == 4:  # in the first turns
            raise TokensLostError("lost")
        return answer

    in_turns, streamed = turns.in_turns, LlamaCppServer.streamed
    monkeypatch.setattr(LlamaCppServer, "streamed", losing)
    monkeypatch.setattr(turns, "LEAST_S", 0.0)
    monkeypatch.setattr(turns, "SLICE_S", 0.005)
    monkeypatch.setattr(turns, "in_turns", counted)
    outcome = command.run(asked(tmp_path, "repetitions=1", "temperature=[0]"))
    assert outcome.status == 0
    run = stored(outcome)
    # A request of every K for each prompt, and one for a part of its budget
    assert Counter(together) == {3: 2 * 6}
    texts = {trial.cell: (trial.tokens, trial.rounds) for trial in run.trials}
    before = {trial.cell: (trial.tokens, trial.rounds) for trial in served.trials}
    assert texts.items() <= before.items()
    assert all((trial.decode_s or 0.0) > 0 for trial in run.trials)


@needs_llamacpp
def test_a_plan_counts_what_a_run_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dry_run=true", "verbose=true", "concurrency=[1,2]"]
    assert command.run(asked(tmp_path, *words)).folder is None
    plan = " ".join(capsys.readouterr().out.split())
    # 6 prompts of two sets, 3 servers, 2 temperatures and visits
    assert "requests, one at a time 72, of up to 24 tokens" in plan
    assert "48 more requests, to plain servers" in plan
    # Each with the whole budget and a part of it; groups of 3 prompts, 6 and 9 requests of each
    assert f"1, 2: {2 * 12 * 2 * (6 + 9)}" in plan
    # As many of each group to each of 3 servers at both temperatures, once
    assert f"to warm up for them {3 * 2 * 2 * (6 + 9)}, cut short" in plan
    assert "CUDA graphs" not in plan
    urls = "url=[http://127.0.0.1:9,http://127.0.0.1:9,http://127.0.0.1:9]"
    assert command.run(asked(tmp_path, *words, urls)).folder is None
    plan = " ".join(capsys.readouterr().out.split())
    assert "http://127.0.0.1:9 not reachable" in plan
    assert "not used with url= threads, flags" in plan
    assert "modelled" not in plan  # the servers may run anywhere
    assert not any(tmp_path.iterdir())


def test_an_engine_that_is_not_installed_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    words = ["engine=vllm", "threads=auto"]
    missing = "engine=vllm: no vllm on PATH"
    # A plan may be of another machine, whether that is named or not
    for card in ([], ["gpu=h100"]):
        command.run(asked(tmp_path / "results", "dry_run=true", *card, *words))
        assert f"not on this machine {missing}" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("harness.commands.server.open_workload", pytest.fail)
    with pytest.raises(UserError, match=missing):
        command.run(asked(tmp_path / "results", *words))
    assert not (tmp_path / "results").exists()


class Hanging:
    """An engine of servers that hang with some numbers of threads, and else take half a second."""

    def __init__(self, threads: int | None, hangs_with: set[int]) -> None:
        self.hangs = threads in hangs_with

    def open(self, k: int) -> Any:
        assert k == 0
        return nullcontext(self)

    def generate(self, asked: Asked) -> Completion:
        if self.hangs:
            raise ServerDiedError("no answer within 120 s")
        return Completion(tuple(range(asked.budget)), "budget", 0.5)


def test_a_number_of_threads_that_hangs_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More threads than processors that are free may take minutes for a token."""
    monkeypatch.setattr(psutil, "cpu_count", lambda **_: 2)
    monkeypatch.setattr(server_start, "fewest_threads", lambda seconds: max(seconds))
    config = asked(tmp_path, "threads=auto", "k=[1]", "prompts.limit=1", "score=false")
    work = open_workload(config, load_prompts(config))

    def settled(*hangs_with: int) -> int | None:
        folder = create(config, "server")
        starts: Any = lambda serve: Hanging(serve.threads, {*hangs_with})  # noqa: E731
        starting = replace(work, adapter=replace(work.adapter, start=starts))
        server_start.settle_threads(folder, starting)
        return folder.manifest.server_threads

    assert settled() == 2
    assert settled(2) == 1
    with pytest.raises(UserError, match="no answer within 120 s"):
        settled(1, 2)


def test_a_plan_estimates_time_and_cost_by_all_of_its_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.vllm.on_path", str)

    def most_usd(*words: str) -> float:
        models = ["model=qwen3_4b", "draft=qwen3_0_6b", "gpu=h100", "verbose=true"]
        command.run(asked(tmp_path, "dry_run=true", "engine=vllm", *models, *words))
        out = capsys.readouterr().out
        (row,) = [line for line in out.splitlines() if line.startswith("h100 ")]
        return float(re.findall(r"to \$([\d.]+)", row)[0])

    few = most_usd("new_tokens=400")
    words = ["engine=vllm", "model=qwen3_4b", "draft=qwen3_0_6b"]
    command.run(asked(tmp_path, "dry_run=true", "verbose=true", *words))
    assert "$" not in capsys.readouterr().out  # of this machine's servers, which cost nothing
    assert most_usd("new_tokens=400", "repetitions=20") > 4 * few
    assert most_usd("new_tokens=400", "concurrency=[1,4]") > few


STATES = [{"effective_max_running_requests_per_dp": 2}] * 2


@pytest.mark.parametrize(
    ("engine", "answers", "slots"),
    [
        ("llamacpp", {"/props": {"build_info": "b11549-c0ffee", "total_slots": 4}}, 4),
        ("llamacpp", {"/props": {"build_info": "b11549-c0ffee", "total_slots": 8}}, None),
        ("llamacpp", {"/props": {"build_info": "b11549-c0ffee"}}, None),
        ("sglang", {"/server_info": {"version": "0.5.23", "internal_states": STATES}}, 4),
        ("sglang", {"/server_info": {"version": "0.5.23"}}, None),
        ("vllm", vllm_answers(), None),
        ("openai", vllm_answers(), None),
    ],
)
def test_a_plan_says_which_addresses_decode_fewer_requests_side_by_side_than_are_asked(
    stand_in: Callable[..., StandIn],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    answers: dict[str, Any],
    slots: int | None,
) -> None:
    url = stand_in({"/health": {}, **answers}).url
    words = ["dry_run=true", "verbose=true", f"engine={engine}", "concurrency=[1,8]", "k=[4]"]
    command.run(asked(tmp_path, *words, f"url=[{url},{url}]"))
    plan = " ".join(capsys.readouterr().out.split())
    assert f"{url} answers, {engine}" in plan
    room = f"it decodes {slots} side by side, so that of concurrency=8 the others wait"
    assert (room in plan) == (slots is not None)


def test_a_server_that_takes_long_or_fails_is_shown_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'ValueError: no memory for its cache'\nsleep 1\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("harness.commands.progress.SOON_S", 0.1)
    with pytest.raises(UserError, match="at k=0 ended; its log ends: ValueError: no memory for"):
        command.run(asked(tmp_path / "results", "engine=vllm", "score=false"))
    assert re.search(r"starting vllm at K=0 \(log: .*vllm_k0\.log\)", capsys.readouterr().err)
    # What it leaves behind is a failed run like any other
    (folder,) = (tmp_path / "results").iterdir()
    assert report.run(ReportConfig(run=str(folder))).status == 0
    assert "FAILED RUN" in (folder / "report.md").read_text()
    report.run(ReportConfig(index=str(folder.parent)))
    page = (folder.parent / "index.html").read_text()
    assert "No verdict: the run stopped before there was enough to decide on" in page
    assert "unreadable" not in page


@needs_llamacpp
def test_the_manifest_says_which_engine_it_was(served: StoredRun) -> None:
    entry = served.manifest.engine
    assert entry is not None
    assert (entry.name, entry.rule, entry.clock) == ("llamacpp", "greedy_draft", "engine")
    assert (entry.first_position, entry.shortens_last_draft) == (1, True)
    assert entry.started
    assert entry.synthetic
    assert [(each.k, each.slots) for each in entry.commands] == [(0, 1), (1, 1), (4, 1)]
    for each in entry.commands:
        words = shlex.split(each.line)
        assert words[0] in ("llama-server", "python")
        model = Path(words[words.index("--model") + 1])
        assert model.is_file()
        assert ("--spec-draft-n-max" in words) == (each.k > 0)
        assert not {"--host", "--port"} & set(words)
        assert {"--ctx-size", "--parallel", "--threads", "--metrics"} <= set(words)
        production = shlex.split(each.production or "")
        assert production[:2] == ["llama-server", "--model"]
        assert not {"--ctx-size", "--parallel", "--threads", "--metrics"} & set(production)
        assert ("--spec-draft-n-max" in production) == (each.k > 0)
        assert (each.weights_bytes or 0) > model.stat().st_size - 1
    earlier = {**served.manifest.entries["engine"], "flags": ["--parallel", "1"]}
    del earlier["commands"]
    read = served.manifest.updated(engine=earlier).engine
    assert read is not None
    assert read.commands == ()
    logs = {path.name for path in (served.folder / "logs").iterdir()}
    assert {"llamacpp_k0.log", "llamacpp_k4.log", "llamacpp_k4_synthetic.log"} <= logs


@needs_llamacpp
def test_rounds_are_timed_on_servers_that_reject_every_draft_at_two_budgets(
    served: StoredRun,
) -> None:
    timed = Counter((each.k, each.temperature, each.visit) for each in served.rounds)
    grid = [(k, t, visit) for k in (0, *KS) for t in TEMPERATURES for visit in range(VISITS)]
    assert timed == dict.fromkeys(grid, 4)  # a prompt of each set, at two budgets
    for timing in served.rounds:
        assert timing.rounds == timing.new_tokens
        assert timing.seconds > 0
    greedy = {each.new_tokens for each in served.rounds if each.temperature == 0 and each.k == 4}
    assert max(greedy) > 3 * min(greedy)


@needs_llamacpp
def test_returned_texts_are_scored_and_tested(served: StoredRun) -> None:
    texts = Counter((trace.k, trace.temperature, trace.repetition) for trace in served.traces)
    sampled = [(k, 1.0, visit) for k in (0, *KS) for visit in range(VISITS)]
    assert texts == dict.fromkeys([(0, 0.0, 0), *sampled], 6)
    by_key = {(trial.key, trial.k): trial for trial in served.trials}
    for trace in served.traces:
        returned = by_key[trace.key, trace.k].tokens
        assert returned is not None
        np.testing.assert_array_equal(trace.tokens, returned[1:])
    checks = [check for check in served.checks if isinstance(check, TextLikelihood)]
    assert [(check.temperature, check.k) for check in checks] == [(1.0, 0), (1.0, 1), (1.0, 4)]
    assert all(abs(text_z(check)) < 4 for check in checks)
    compared = [check for check in served.checks if not isinstance(check, TextLikelihood)]
    assert len(compared) == len(KS) * VISITS * 6
    assert {check.result for check in compared} == {"PASS"}


@pytest.mark.exhaustive
@needs_llamacpp
def test_a_run_that_is_complete_is_resumed_without_a_server(
    served: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> Any:
        raise AssertionError("a server was started")

    monkeypatch.setattr(server_visits, "started", started)
    assert ran("server", f"resume={served.folder}").trials == served.trials
    with pytest.raises(UserError, match=r"its configuration differs in engine=own"):
        outcome_of("server", f"resume={served.folder}", "engine=own")


class Killed:
    """Kills the server of one K after so many of its requests."""

    def __init__(self, k: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._k, self._left, self._ask = k, after, server_visits._ask
        monkeypatch.setattr(server_visits, "_ask", self)

    def __call__(self, work: Any, server: Any, task: Any, turn: Any) -> Any:
        if server.k == self._k and not task.role.rejects:
            self._left -= 1
            if self._left == 0:
                process = psutil.Process(server.process_id)
                process.kill()
                psutil.wait_procs([process], 5)
        return self._ask(work, server, task, turn)


@needs_llamacpp
def test_a_server_that_dies_costs_its_own_cells_and_resume_asks_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        Killed(4, 6, patched)
        outcome = command.run(asked(tmp_path, "prompts.limit=2", "temperature=[0]"))
    run = stored(outcome)
    assert outcome.status == 1
    ok, failed = (
        [trial for trial in run.trials if trial.status == status] for status in ("ok", "failed")
    )
    assert cells(ok)[0, 0.0, 1] == cells(ok)[1, 0.0, 1] == 4
    assert sum(trial.k == 4 for trial in ok) == 5
    assert {trial.k for trial in failed} == {4}
    assert "llama.cpp at k=4" in str(failed[0].error)
    cells_of_4 = run.results[run.results.k == 4]
    assert len(cells_of_4) == 2 * 2  # measured and predicted
    assert set(cells_of_4.status) == {"partial"}
    assert set(run.results[run.results.k == 1].status) == {"complete"}
    again = ran("server", f"resume={run.folder}")
    done: Mapping[Any, Trial] = {trial.cell: trial for trial in again.trials}
    assert all(trial.status == "ok" for trial in done.values())
    assert len(done) == 4 * 3 * VISITS
    assert set(again.results.status) == {"complete"}
    # What K=4 lacked has a plain request of the same visit next to it, for it is compared with that
    sent = [(trial.k, trial.key) for trial in again.trials[len(run.trials) :]]
    lacked = {trial.key for trial in done.values()} - {t.key for t in ok if t.k == 4}
    assert sent == [(k, key) for _, key in sent[::2] for k in (0, 4)]
    assert {key for _, key in sent} == lacked


# One at a time, the plain server is started once more
@needs_llamacpp
@pytest.mark.exhaustive
@pytest.mark.parametrize("servers", ["1", "auto"])
def test_texts_that_differ_are_judged_by_the_plain_servers_log_probabilities(
    servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text of K=4, and one of K=1, is changed on its way here."""
    ask, timing, judging = server_visits._ask, list[Any](), list[bool]()
    generate = LlamaCppServer.generate

    def changed(work: Any, server: Any, task: Any, turn: Any) -> Any:
        timing.append(task)
        line: Any = ask(work, server, task, turn)
        timing.clear()
        if task.file == "trials" and (server.k == 4 or (server.k, line.prompt) == (1, "easy-01")):
            token = max(set(line.tokens) - {line.tokens[7]})
            return replace(line, tokens=(*line.tokens[:7], token, *line.tokens[8:]))
        return line

    def noted(self: LlamaCppServer, asked: Asked) -> Any:
        judging.append(asked.logprobs > 0)
        assert not asked.logprobs or (self.k == 0 and not timing)
        return generate(self, asked)

    monkeypatch.setattr(server_visits, "_ask", changed)
    monkeypatch.setattr(LlamaCppServer, "generate", noted)
    words = ["temperature=[0]", "repetitions=1", f"servers={servers}", "until=all"]
    run = stored(command.run(asked(tmp_path, *words)))
    assert any(judging)
    checks = {(c.k, c.prompt, c.repetition): c for c in run.checks if isinstance(c, TextCheck)}
    failed = {(k, prompt) for (k, prompt, _), check in checks.items() if check.result == "FAIL"}
    assert failed == {(1, "easy-01"), *((4, prompt) for _, prompt, _ in checks)}
    for check in checks.values():
        if check.result == "FAIL":
            assert check.first_difference == 7
            assert check.noise == pytest.approx(0.0, abs=1e-3)
            assert (check.target_margin or 0) > 0.1
            assert check.verify_margin == pytest.approx(check.target_margin, abs=1e-3)
    summary = analyse(run)
    assert summary.served is not None
    gates = {gate.k: gate for gate in summary.served.gates}
    assert (gates[1].lossless, gates[4].lossless) == (None, False)
    assert (gates[1].equal_texts, gates[1].differing_texts, gates[1].texts) == (5, 1, 6)
    assert {trial.k for trial in run.trials} == {0, 1, 4}
    assert {row.status for row in summary.results if row.k == 1} == {"complete"}
    text = " ".join(content_of(summary).reasons)
    assert "5 of 12 greedy texts, one for each prompt and K, equal plain decoding's" in text
    assert re.search(r"0 ties, 7 real differences.*; not lossless: K=4\.", text)
    (verdict,) = content_of(summary).verdicts
    assert "7 of 12 greedy texts" not in verdict
    assert "6 of 12 greedy texts are not plain decoding's" in verdict
    # They are judged once
    monkeypatch.setattr(server_judging, "started", lambda *_: pytest.fail("again"))
    assert ran("server", f"resume={run.folder}", status=1).checks == run.checks


# The rounds of a visit, which follow its six requests to each server, are of no trial
@needs_llamacpp
@pytest.mark.exhaustive
@pytest.mark.parametrize(("after", "visits"), [(8, 2), (4, 1), (8, 1)])
def test_without_the_server_that_decodes_plainly_the_visits_end_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, visits: int
) -> None:
    settings = asked(tmp_path, "k=[1]", "temperature=[0]", f"repetitions={visits}")
    with monkeypatch.context() as patched:
        Killed(0, after, patched)
        outcome = command.run(settings)
    run = stored(outcome)
    assert outcome.status == 1
    ok = [trial for trial in run.trials if trial.status == "ok"]
    assert {trial.k for trial in ok} == {0, 1}
    page = (run.folder / "report.md").read_text()
    assert "FAILED RUN: what follows is what was stored (resume=" in page
    assert run.manifest.status == "failed"
    assert not _servers()
    again = ran("server", f"resume={run.folder}")
    assert again.trials[: len(run.trials)] == run.trials
    assert set(again.results.status) == {"complete"}


def _servers() -> list[str]:
    lines = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    return [line for line in lines if "xllamacpp_server" in line]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Servers as a user runs them: by name, the address."""
    pair = Served(tmp_path_factory.mktemp("running"))
    with ExitStack() as stack:

        def opened(k: int) -> str:
            server: Any = stack.enter_context(pair.llamacpp().open(k))
            return server.url

        long = pair.folder / "long.txt"
        long.write_text("What is the capital of France? " * 80)  # more than a server takes
        other = replace(pair.llamacpp(), target=gguf_of(EMBEDDED / DRAFT), draft=None)
        draft: Any = stack.enter_context(other.open(0))
        yield {"plain": opened(0), "k4": opened(4), "long": str(long), "draft": draft.url}


@pytest.mark.exhaustive
@needs_llamacpp
def test_the_file_of_a_draft_scores_texts_itself_and_its_checkpoint_is_not_loaded(
    served: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, good = EMBEDDED / "tiny", EMBEDDED / DRAFT
    files = ["model=hf", f"model.id={tiny}", f"model.gguf={gguf_of(tiny)}"]
    files += ["draft=hf", f"draft.id={good}", f"draft.gguf={gguf_of(good)}"]
    words = ["temperature=[0]", "repetitions=1", "prompts.limit=2"]
    monkeypatch.setattr("harness.commands.server_judging.open_draft", pytest.fail)
    outcome = command.run(asked(tmp_path, *files, *words))
    assert outcome.status == 0
    run = stored(outcome)
    speculating = run.results[run.results.k > 0]
    measured, replayed = (
        speculating[speculating.source == source].set_index(["prompt_set", "k"])
        for source in ("measured", "replayed")
    )
    for name in ("rounds", "drafted", "accepted"):
        assert measured[name].to_dict() == replayed[name].to_dict()
    known = {trace.key: trace for trace in served.traces if trace.temperature == 0.0}
    assert len(run.traces) == 4
    for trace in run.traces:
        scored = known[trace.key]
        assert trace.tokens.tolist() == scored.tokens.tolist()
        assert trace.draft_is_argmax.tolist() == scored.draft_is_argmax.tolist()
        assert trace.draft_logprob.tolist() == scored.draft_logprob.tolist()
        assert trace.target_logprob.tolist() == scored.target_logprob.tolist()
    assert (run.folder / "logs" / "draft" / "llamacpp_k0.log").is_file()


@needs_llamacpp
def test_servers_that_the_user_runs_are_measured_without_weights(
    served: StoredRun, running: Mapping[str, str], tmp_path: Path
) -> None:
    urls = f"url=[{running['plain']},{running['k4']}]"
    run = stored(command.run(asked(tmp_path, "k=[4]", "score=false", urls)))
    entry = run.manifest.engine
    assert entry is not None
    assert not entry.started
    assert not entry.commands
    assert not entry.synthetic
    assert [f"http://{url}" for url in entry.urls] == [running["plain"], running["k4"]]
    texts = {(trial.key, trial.k): trial.tokens for trial in served.trials}
    assert run.trials
    assert {(t.key, t.k): t.tokens for t in run.trials}.items() <= texts.items()
    assert not run.traces
    # Their rounds are told from their starts by requests for a part of the budget
    assert cells(run.starts) == cells(run.trials)
    assert max(trial.new_tokens or 0 for trial in run.starts) == 24 // 4 - 1


@needs_llamacpp
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["url=[{plain},{plain}]"], "it drafted nothing; k=4 needs --spec-type draft-simple"),
        (["url=[{k4},{k4}]"], "it drafts, and was given as the server that decodes plainly"),
        (["url=[{plain},{k4}]", "prompts.files=[{long}]"], "context"),
        (["url=[{plain},{k4}]", "k=[2]"], r"k=2: its server drafts another number of tokens, \d+"),
        (["url=[{plain},{k4}]", "k=[8]"], r"k=8: its server drafts another number of tokens, \d+"),
        (["url=[{plain},{k4}]", "decode.repetition_penalty=1.2"], "decode.repetition_penalty: not"),
        (["url=[{draft},{k4}]"], r"another model than that of k=4: it serves \S+tiny_good\.gguf"),
    ],
)
def test_what_a_running_server_cannot_do_is_one_line(
    running: Mapping[str, str], tmp_path: Path, words: list[str], message: str
) -> None:
    words = [word.format(**running) for word in words]
    with pytest.raises(UserError, match=message) as error:
        command.run(asked(tmp_path, "k=[4]", "temperature=[0]", "score=false", *words))
    assert "\n" not in str(error.value)


@needs_llamacpp
def test_a_server_whose_greedy_texts_are_another_models_is_refused(
    running: Mapping[str, str], tmp_path: Path
) -> None:
    url = "url=[{plain},{k4}]".format(**running)
    message = rf"{running['plain']}: its greedy texts are not those of model=tiny_small: \d+%"
    with pytest.raises(UserError, match=message):
        command.run(asked(tmp_path, "k=[4]", "temperature=[0]", "model=tiny_small", url))


# ---- input that cannot be used -------------------------------------------------------------------

TINY = ModelConf(name="tiny", id="embedded:tiny")
LLAMACPP = {"/health": {}, "/props": {"build_info": "b11549-c0ffee"}}


def test_another_model_behind_an_address_is_refused_before_there_is_a_run(
    stand_in: Callable[..., StandIn], tmp_path: Path
) -> None:
    url = stand_in({**LLAMACPP, "/detokenize": {"content": "other words"}}).url
    with pytest.raises(UserError, match=f"url={url}: another model than model="):
        command.run(asked(tmp_path, "k=[4]", "score=false", f"url=[{url},{url}]"))
    nothing = stand_in({"/props": {"model": "other"}}).url
    with pytest.raises(UserError, match=r"not llama\.cpp's server"):
        command.run(asked(tmp_path, "k=[4]", "score=false", f"url=[{nothing},{nothing}]"))
    assert not list(tmp_path.iterdir())


VLLM_PLAIN = vllm_answers(**{"/v1/completions": completion(TIMES)})


def test_the_drafts_model_behind_the_plain_address_is_refused_by_its_name(
    stand_in: Callable[..., StandIn], tmp_path: Path
) -> None:
    tokenizer = load_vocabulary(TINY).tokenizer
    answers = {
        **VLLM_PLAIN,
        "/detokenize": lambda body: {"prompt": tokenizer.decode(body["tokens"])},
        "/v1/models": {"data": [{"id": "some/folder/tiny-draft"}]},
    }
    url = stand_in(answers).url
    draft = ["draft=hf", "draft.id=ORG/Tiny-Draft", "draft.name=small"]
    words = ["engine=vllm", f"url=[{url},{url}]", "k=[4]", "score=false", *draft]
    message = f"url={url}: it serves some/folder/tiny-draft, which is the draft's model; the first"
    with pytest.raises(UserError, match=message):
        command.run(asked(tmp_path, *words))
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_tell_what_it_drafts_is_refused_before_there_is_a_run(
    stand_in: Callable[..., StandIn], tmp_path: Path
) -> None:
    tokenizer = load_vocabulary(TINY).tokenizer

    def detokenize(body: dict[str, Any]) -> dict[str, str]:
        return {"prompt": tokenizer.decode(body["tokens"])}

    answers = {**VLLM_PLAIN, "/detokenize": detokenize}
    urls = [stand_in(each).url for each in (answers, {**answers, "/metrics": 404})]
    words = ["engine=vllm", f"url=[{','.join(urls)}]", "k=[2]", "score=false"]
    with pytest.raises(UserError, match="no counters in its answers or at") as error:
        command.run(asked(tmp_path, *words))
    assert "\n" not in str(error.value)
    assert "use engine=openai, which only times" in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["url=[http://127.0.0.1:9,http://127.0.0.1:9]"], "url=http://127.0.0.1:9: not reachable"),
        (["url=[http://127.0.0.1:9]"], "url: 2 servers are needed, and 1 given; first the one"),
        (["url=[ftp://x,y]"], "url: 'ftp://x' is not an address; write http://HOST:PORT"),
        (["url=[http://me:secret@h:1,http://h:2]"], "the address at h holds more than host"),
        (["url=[http://h:1,http://h:2]", "api_key_env=NO_SUCH"], "api_key_env=NO_SUCH: no such"),
        (["decode.rule=exact_match"], "decode.rule=exact_match: engine=llamacpp accepts by greedy"),
        (["draft=medusa", "draft.id=x"], "draft=medusa: engine=llamacpp does not draft with"),
        (["draft=ngram"], "draft=ngram: engine=llamacpp does not draft with an n-gram look-up"),
        (["draft=ngram_simple", "k=[1,2,4,8]"], r"k: llama.cpp's n-gram look-up drafts 2 tokens"),
        (["draft=ngram_mod"], "draft=ngram_mod: what llama.cpp's hashed n-grams drafts depends"),
        (["engine=vllm", "draft=ngram_simple_1"], "draft=ngram_simple_1: engine=vllm does not"),
        (["engine=sglang", "draft=early_exit"], "engine=sglang does not draft with early exit of"),
        (["engine=vllm", "model.quantization=int8"], "model.quantization=int8: engine=vllm"),
        (["engine=vllm", "draft=bf16"], "engine=vllm does not draft with a copy of the target"),
        (["engine=mlx"], r"engine=mlx: its servers are not started here; give url=\[\.\.\.\]"),
        (["engine=openai", "decode.rule=ratio"], "engine=openai accepts by a rule that it does"),
        (["engine=own", "url=[http://h:1,http://h:2]"], "url: engine=own decodes in this process"),
        (["engine=own", "concurrency=[1,2]"], "concurrency: engine=own decodes one request"),
        (["engine=own", "score=false"], "score=false: engine=own decodes with the weights"),
        (["draft=tiny_good", f"draft.gguf={__file__}"], "not a GGUF file, whose first bytes are"),
        (["draft=tiny_good", "draft.gguf=/nowhere.gguf"], r"draft\.gguf=/nowhere\.gguf: no such"),
        (["model.gguf=a.gguf"], r"model\.gguf: of which model\? give model=ORG/NAME_OR_FOLDER"),
        (["draft.gguf=a.gguf"], r"draft\.gguf: of which model\? give draft=ORG/NAME_OR_FOLDER"),
        (["model.dtype=bfloat16"], r"model\.gguf: not given; llama\.cpp's convert_hf_to_gguf\.py"),
        (["prompts.sets=[]", "prompts.hub=null"], "give at least one"),
        (["url=[http://h:1,http://h:2]", "clock=cpu"], "clock=cpu: not with url=, since the proc"),
        (["clock=cpu", "threads=2"], "clock=cpu: not with threads=2, since threads that wait"),
        (["url=[http://h:1,http://h:2]", "api_key_env=BAD_KEY"], "api_key_env=BAD_KEY: the key"),
        (["timeout_factor=0"], "timeout_factor"),
        (["new_tokens=1"], "new_tokens=1: the first token of engine=llamacpp comes from the pref"),
        (["new_tokens=1030"], "beyond the 1024 of model=tiny; lower new_tokens or leave the prom"),
    ],
)
def test_input_that_cannot_be_used_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setenv("BAD_KEY", "sk-\r\nsecret")
    with pytest.raises(UserError, match=message) as error:
        command.run(asked(tmp_path, "k=[4]", *words))
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


class Seconds:
    """The clock of requests; it moves as servers answer, however busy the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now, self._lock = 0.0, threading.Lock()
        for module in ("engines.http_server", "measurement.load"):
            monkeypatch.setattr(f"harness.{module}.perf_counter", lambda: self._now)

    def pass_by(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


def completing(stand_in: Callable[..., StandIn], clock: Seconds, token_s: float) -> StandIn:
    """A server that completes texts alone, each token in so long."""
    tokenizer = load_vocabulary(TINY).tokenizer

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        clock.pass_by(0.02 + token_s * body["max_tokens"])
        counts = {
            "prompt_tokens": len(tokenizer(body["prompt"])["input_ids"]),
            "completion_tokens": body["max_tokens"],
        }
        choices = [{"text": "the sea and the sky", "finish_reason": "length"}]
        return {"choices": choices, "usage": counts}

    models = {"data": [{"id": "tiny"}]}
    return stand_in({"/v1/models": models, "/v1/completions": answer})


def test_a_prompt_that_a_server_refuses_is_a_failure_of_its_own(
    stand_in: Callable[..., StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Seconds(monkeypatch)
    servers = [completing(stand_in, clock, token_s) for token_s in (8e-3, 2e-3)]
    urls = f"url=[{','.join(server.url for server in servers)}]"
    words = ["engine=openai", urls, "k=[4]", "temperature=[0]", "score=false", "repetitions=4"]
    config = asked(tmp_path, *words)
    longest = max((prompt.turns[0] for prompt in load_prompts(config)), key=len)
    for server in servers:
        answer = server.answers["/v1/completions"]
        server.answers["/v1/completions"] = lambda body, answer=answer: (
            400 if longest in body["prompt"] else answer(body)
        )
    run = stored(command.run(config))
    status = {(trial.prompt, trial.status) for trial in run.trials}
    failed = {prompt for prompt, how in status if how == "failed"}
    assert len(failed) == 1, "refused in every visit, and the server is asked on"
    assert {prompt for prompt, how in status if how == "ok"}.isdisjoint(failed)
    assert len({trial.prompt for trial in run.trials}) > 1
    assert all("status 400" in (t.error or "") for t in run.trials if t.status == "failed")


def test_a_prompt_that_no_model_can_read_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.jsonl"
    texts = {"short": "A word.", "long": "the cat sat on a mat and " * 200}
    lines = (json.dumps({"id": name, "prompt": text}) for name, text in texts.items())
    file.write_text("\n".join(lines))
    config = asked(tmp_path, "k=[4]", f"prompts.files=[{file}]", "prompts.sets=[]")
    (left,) = without_too_long(config, load_prompts(config), Vocabularies(config))
    assert left.id == "short"
    (record,) = caplog.records
    line = record.getMessage()
    assert "1 of 2 prompts left out: prompt mine/long has" in line
    assert "beyond the 1024 of model=tiny" in line


@pytest.mark.parametrize(("engine", "rule"), [("openai", None), ("tensorrt_llm", "greedy_draft")])
def test_an_endpoint_that_only_completes_texts_is_timed_and_nothing_is_predicted(
    engine: str,
    rule: str | None,
    stand_in: Callable[..., StandIn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_KEY", "secret\n")  # as a variable that a file was read into
    clock = Seconds(monkeypatch)
    servers = [completing(stand_in, clock, token_s) for token_s in (8e-3, 2e-3)]
    urls = f"url=[{','.join(server.url for server in servers)}]"
    words = [f"engine={engine}", urls, "api_key_env=A_KEY", "k=[4]", "temperature=[0]"]
    run = stored(command.run(asked(tmp_path, "score=false", "repetitions=1", *words)))
    assert [server.keys for server in servers] == [{"Bearer secret"}] * 2
    assert run.trials
    for trial in run.trials:
        assert (trial.rule, trial.rounds, trial.new_tokens) == (rule if trial.k else None, None, 23)
        assert trial.decode_s is not None
        assert trial.decode_s > 0.02
    assert cells(run.starts) == cells(run.trials)
    assert run.summary is not None
    assert run.summary.served is not None
    assert run.summary.served.not_predicted == "no_counting"
    assert "no rounds" in (run.folder / "report.md").read_text()
    measured = run.results[(run.results.source == "measured") & (run.results.k == 4)]
    assert (measured.speedup > 1.3).all()
    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert not any(b"secret" in path.read_bytes() for path in written)


@pytest.mark.parametrize(
    ("k", "lost", "path"),
    [
        (2, {2}, "/v1/completions"),
        pytest.param(0, {2, 4}, "/v1/models", marks=pytest.mark.exhaustive),
        pytest.param(0, {2, 4}, "/v1/completions", marks=pytest.mark.exhaustive),
        pytest.param(2, {2}, "/v1/models", marks=pytest.mark.exhaustive),
    ],
)
def test_a_server_that_fails_in_a_later_group_costs_its_cells_and_resume_asks_for_them(
    stand_in: Callable[..., StandIn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    k: int,
    lost: set[int],
    path: str,
) -> None:
    clock, begun = Seconds(monkeypatch), list[Any]()
    # Groups of K=1, of K=2 and of K=4, each with plain decoding
    servers = {each: completing(stand_in, clock, 4e-3) for each in (0, 1, 2, 4)}
    sound = {**servers[k].answers}

    def started(*asked_for: Any, **how: Any) -> Any:
        begun.append(asked_for)
        if len(begun) == 3:  # the first one reads the plain server's pace
            servers[k].answers[path] = 401
        return server_start.started(*asked_for, **how)

    urls = f"url=[{','.join(server.url for server in servers.values())}]"
    words = ["engine=openai", urls, "servers=2", "k=[1,2,4]", "temperature=[0]", "score=false"]
    with monkeypatch.context() as patched:
        for module in (server_plan, server_visits):
            patched.setattr(module, "started", started)
        outcome = command.run(asked(tmp_path, *words))
    run = stored(outcome)
    assert (outcome.status, run.manifest.status) == (1, "failed")
    assert len(begun) == (3 if k == 0 else 4)
    statuses = {row.k: row.status for row in run.results.itertuples() if row.k}
    assert statuses == {each: "failed" if each in lost else "complete" for each in (1, 2, 4)}
    servers[k].answers.update(sound)
    again = ran("server", f"resume={run.folder}")
    assert set(again.results.status) == {"complete"}
    assert again.trials[: len(run.trials)] == run.trials


# ---- our own loop --------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft", ["tiny_good", "tiny_eagle3", "ngram"])
def test_our_own_loop_through_the_same_door_decodes_what_a_snapshot_does(
    tmp_path: Path, draft: str
) -> None:
    words = ["k=[4]", "temperature=[0]", "repetitions=1", "prompts.limit=1", f"draft={draft}"]
    run = stored(command.run(asked(tmp_path, "engine=own", *words)))
    settings = [f"results_root={tmp_path}", "new_tokens=24", *words, "threads=1"]
    shot = ran("snapshot", *settings)
    counted = ("tokens", "new_tokens", "rounds", "drafted", "accepted", "rejected")

    def counts(each: StoredRun) -> dict[Any, list[Any]]:
        return {(t.key, t.k): [getattr(t, name) for name in counted] for t in each.trials}

    assert counts(run) == counts(shot)
    assert run.manifest.engine is not None
    assert run.manifest.engine.first_position == 0
    # Each request is sent once, so the other prompt set's requests price its rounds
    assert not run.rounds
    assert {start.k for start in run.starts} == {0, 4}
    served = analyse(run).served
    assert served is not None
    (gate,) = served.gates
    assert gate.texts == 2
    assert gate.equal_texts == gate.equal_rounds == gate.equal_drafted == gate.texts
