"""Engines behind one protocol: errors with a stand-in server, counts with llama.cpp itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from runs import needs_llamacpp
from served_pair import KS, Served, completed
from stubs import GREEDY

from harness.analysis.server_lossless import text_z
from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.spec import Counting
from harness.engines.http_server import AttachedEngine
from harness.engines.llamacpp import LlamaCpp, LlamaCppServer, request_body, rounds_at_eos
from harness.engines.own import OwnServer
from harness.engines.process import CpuReadings, ServerProcess
from harness.engines.protocol import Asked, Completion, Engine, ServerDiedError
from harness.measurement.generations import Request
from harness.measurement.server_request import accepted_tokens, ask, likelihood_test
from harness.records import UserError

# How long a test waits for a process, however busy the machine is
PATIENCE_S = 60.0


def wait_for(happened: Callable[[], object]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.01)


# ---- what is asked and counted ------------------------------------------------------------------


def test_where_nothing_listens_the_address_is_named() -> None:
    with pytest.raises(UserError, match=r"url=http://127\.0\.0\.1:9: not reachable"):
        AttachedEngine({0: "http://127.0.0.1:9"}, LlamaCppServer).open(0)
    with pytest.raises(UserError, match="write it as http://HOST:PORT"):
        AttachedEngine({0: "file:///etc/passwd"}, LlamaCppServer).open(0)


@pytest.mark.parametrize(
    ("of_the_target", "drafted", "left", "drafts", "rounds"),
    [
        (5, 20, 9, None, 5),  # the end of text is the target's own, or not counted as accepted
        (4, 20, 9, None, 5),  # it is an accepted draft
        (3, 20, 9, None, 5),  # so are tokens after it, which were not returned
        (5, 20, 3, None, None),  # shortened drafts are possible
        (5, 18, 9, None, None),  # a draft stopped early
        (5, 18, 3, 6, 6),
        (6, 20, 0, 5, 6),  # the last round had room for no draft
    ],
)
def test_rounds_of_a_text_that_ended_early_follow_from_counts_or_are_unknown(
    of_the_target: int, drafted: int, left: int, drafts: int | None, rounds: int | None
) -> None:
    assert rounds_at_eos(of_the_target, drafted, 4, left=left, drafts=drafts) == rounds


def test_a_request_switches_the_servers_samplers_off() -> None:
    asked = request_body(Asked([1], SamplingParameters(0.7), seed=2**32 - 1, budget=5))
    assert asked["temperature"] == 0.7
    assert (asked["top_k"], asked["top_p"], asked["min_p"]) == (0, 1.0, 0.0)
    assert asked["seed"] != 2**32 - 1  # which would ask for a random one
    with pytest.raises(UserError, match="repetition_penalty"):
        request_body(Asked([1], SamplingParameters(0.7, repetition_penalty=1.1), 1, 5))


# ---- processes -----------------------------------------------------------------------------------

KILLED = """
import sys, time
from pathlib import Path
from harness.engines.process import ServerProcess
server = ServerProcess(["sleep", "600"], Path(sys.argv[1]))
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_a_run_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    with run.stdout:
        server = psutil.Process(int(run.stdout.readline()))
        assert server.is_running()
        os.kill(run.pid, number)
        run.wait()
    assert server.wait(PATIENCE_S) is not None or not server.is_running()


# A child that outlives its server where nobody ends it, as vLLM's EngineCore on a busy card
LEFT_BEHIND = """
import os, signal, subprocess, sys, time
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE)
    child.stdout.readline()
    open("child", "w").write(str(child.pid))
    while not os.path.exists("ends"):
        time.sleep(0.01)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("by_itself", [True, False])
def test_nothing_that_a_server_started_runs_once_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_itself: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    script = tmp_path / "server.py"
    script.write_text(LEFT_BEHIND)
    server = ServerProcess([sys.executable, str(script)], tmp_path / "log")
    wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    child = psutil.Process(int((tmp_path / "child").read_text()))
    if by_itself:
        (tmp_path / "ends").touch()
        wait_for(lambda: not server.alive)
    else:
        server.stop()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    server.stop()


def test_a_server_that_ends_by_itself_is_reported_with_its_log_which_keeps_what_others_said(
    tmp_path: Path,
) -> None:
    """An error that a run ended with names the log; resuming the run starts the server again."""
    log = tmp_path / "log"
    for said in ("error: no such\tmodel", "error: the second"):
        server = ServerProcess([sys.executable, "-c", f"import sys; sys.exit({said!r})"], log)
        wait_for(lambda server=server: not server.alive)
        assert f"its log ends: {' '.join(said.split())} (" in server.last_words()
        server.stop()
    assert log.read_text().splitlines() == ["error: no such\tmodel", "error: the second"]


@pytest.mark.parametrize(
    ("told", "last"),
    [
        (  # of several processes, the cause is first
            [
                "(EngineCore pid=7) ERROR 11-22 14:16:42 [core.py:9] EngineCore failed to start.",
                "(EngineCore pid=7) ERROR 11-22 14:16:42 [core.py:9] Traceback (most recent call",
                '(EngineCore pid=7) ERROR 11-22 14:16:42 [core.py:9]   File "core.py", in error',
                "(EngineCore pid=7) ERROR 11-22 14:16:42 [core.py:9] ValueError: no memory for it",
                "(EngineCore pid=7) ValueError: no memory for it",
                "(APIServer pid=6)     raise RuntimeError(",
                "(APIServer pid=6) RuntimeError: initialization failed. See root cause above.",
                "nanobind: leaked 4 instances!",
            ],
            "EngineCore failed to start.; ValueError: no memory for it; RuntimeError:"
            " initialization failed. See root cause above.",
        ),
        (  # the reason of what pydantic refuses, and no warning
            [
                "WARNING 11-26 03:12:22 [system_utils.py:255] OSError: too many open files",
                '  File "dataclasses.py", line 121, in raise_error',
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
                "  Value error, Model Runner V1 does not support: dspark [type=value_error, input=",
                "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
            ],
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig;"
            " Value error, Model Runner V1 does not support: dspark [type=value_error, input=",
        ),
    ],
)
def test_the_error_of_a_server_has_its_cause(tmp_path: Path, told: list[str], last: str) -> None:
    log = tmp_path / "log"
    server = ServerProcess([sys.executable, "-c", ""], log)
    server.stop()
    log.write_text("\n".join(told))
    assert server.last_words() == f"its log ends: {last} ({log})"


def test_a_command_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere/server: does not start; its log ends: FileNot"):
        ServerProcess(["nowhere/server"], tmp_path / "log")


BUSY = """
import subprocess, sys
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"])
total = 0
while True:
    total += 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a clock of another process")
def test_a_servers_processor_time_counts_the_processes_that_it_started(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    server = ServerProcess([sys.executable, str(script)], tmp_path / "log")
    parent = psutil.Process(server.pid)
    wait_for(parent.children)
    before = server.cpu_s()
    used = sum(parent.cpu_times()[:2])
    assert before is not None
    wait_for(lambda: (server.cpu_s() or 0.0) - before > 0.05)
    used = sum(parent.cpu_times()[:2]) - used
    server.stop()
    assert used < 0.05  # the parent only waits
    assert server.cpu_s() is None


# ---- llama.cpp -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


def _three_of_each(served: Served) -> list[Request]:
    return [
        replace(request, seed=100 * repetition + request.seed, repetition=repetition)
        for repetition in range(3)
        for request in served.requests
    ]


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param("llamacpp", 1.0, marks=needs_llamacpp),
        pytest.param("own", 1.0, marks=pytest.mark.exhaustive),
        pytest.param("own", 0.0, marks=pytest.mark.exhaustive),
        pytest.param("llamacpp", 0.0, marks=[needs_llamacpp, pytest.mark.exhaustive]),
    ],
)
def test_replay_of_returned_texts_gives_the_engines_rounds_and_drafted_tokens(
    served: Served, name: str, temperature: float
) -> None:
    # Both engines propose the draft's argmax, so that a text has one way to be decoded
    engine: Engine = served.own() if name == "own" else served.llamacpp()
    sampling = SamplingParameters(temperature)
    ends = set()
    for k in KS[1::2]:
        texts, facts = completed(engine, k, served.requests, sampling)
        expected = served.replayed(texts, facts, k)
        done = [text.completion for text in texts]
        np.testing.assert_array_equal([each.rounds for each in done], expected.rounds)
        np.testing.assert_array_equal([each.drafted for each in done], expected.drafted)
        ends |= {each.stop_reason for each in done}
    assert ends == {"eos", "budget"}


@needs_llamacpp
@pytest.mark.parametrize(
    "sampling",
    [
        # A draft that is not cut, or not as warm, is told apart: |z| above 4
        pytest.param(SamplingParameters(1.5), marks=pytest.mark.exhaustive),
        # So is one that is cut to the request's top_p
        SamplingParameters(1.5, top_p=0.5),
    ],
)
def test_a_draft_that_samples_takes_the_rounds_of_the_ratio_rule_on_its_ten_likeliest_tokens(
    served: Served, sampling: SamplingParameters
) -> None:
    engine = replace(served.llamacpp(), rule="ratio")
    texts, facts = completed(engine, 4, _three_of_each(served), sampling)
    rounds = np.array([text.completion.rounds for text in texts], dtype=np.float64)
    gaps = rounds - served.replayed(texts, facts, 4).rounds
    assert abs(gaps.sum()) / np.sqrt((gaps**2).sum()) < 3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("own", marks=pytest.mark.exhaustive),
        pytest.param("llamacpp", marks=needs_llamacpp),
    ],
)
def test_texts_are_tested_against_the_targets_distribution(served: Served, name: str) -> None:
    engine: Engine = served.own() if name == "own" else served.llamacpp()
    texts, _ = completed(engine, 2, _three_of_each(served), SamplingParameters(1.5))
    assert abs(text_z(likelihood_test(texts, served.target_model))) < 3
    # The same texts, had the target been asked for another temperature
    others = [
        replace(text, request=replace(text.request, sampling=SamplingParameters(1.0)))
        for text in texts
    ]
    assert text_z(likelihood_test(others, served.target_model)) < -5


def test_texts_are_tested_with_every_sampling_parameter_of_the_request(served: Served) -> None:
    every = SamplingParameters(1.5, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    texts, _ = completed(served.own(), 2, served.requests, every)
    assert abs(text_z(likelihood_test(texts, served.target_model))) < 3


def test_a_token_at_the_edge_of_what_is_kept_is_as_unlikely_as_without_an_edge(
    served: Served,
) -> None:
    texts, _ = completed(served.own(), 0, served.requests, SamplingParameters(1.5))

    def tested(sampling: SamplingParameters) -> float:
        asked = [replace(t, request=replace(t.request, sampling=sampling)) for t in texts]
        return likelihood_test(asked, served.target_model).log_probability

    kept_all, kept_most = (tested(SamplingParameters(1.5, top_p=p)) for p in (1.0, 0.6))
    # What is kept is a little likelier for it, what is excluded costs what it did
    assert kept_all < kept_most < kept_all / 4


class OneClock(OwnServer):
    """Our loop, as a server whose processor time is not read apart from the prefill."""

    def generate(self, asked: Asked) -> Completion:
        return replace(super().generate(asked), decode_cpu_s=None)


def test_the_processor_time_of_decoding_is_read_apart_from_the_prefill(served: Served) -> None:
    server, request = served.own().open(2), replace(served.requests[0], k=2)
    by_cpu = ask(server, request, 0, "cpu")
    done = by_cpu.completion
    assert by_cpu.one_token is done
    assert done.cpu_s is not None
    assert 0 < by_cpu.decode_s("cpu") < done.cpu_s
    assert by_cpu.decode_s("cpu") == done.decode_cpu_s
    assert by_cpu.prefill_s("cpu") == pytest.approx(done.cpu_s - by_cpu.decode_s("cpu"))
    assert by_cpu.trial(server.facts, "cpu").one_token_s is None


def test_processor_time_of_decoding_follows_from_readings_and_the_engines_times() -> None:
    prefill_s, decode_s, begin = 0.4, 0.4, time.perf_counter()

    def read() -> float:  # other work takes half of the prefill's time, and none of decoding's
        since = time.perf_counter() - begin
        return 0.5 * min(since, prefill_s) + min(max(0.0, since - prefill_s), decode_s)

    with CpuReadings(read) as readings:
        time.sleep(prefill_s + decode_s)
    assert readings.decode_s(prefill_s, decode_s) == pytest.approx(decode_s, rel=0.1)
    assert readings.decode_s(None, decode_s) is None
    assert readings.decode_s(0.01, decode_s) is None, "a short prefill is taken off better"


def test_a_long_prefill_is_not_taken_off_a_server_that_tells_no_times(served: Served) -> None:
    class Slow(OneClock):
        def generate(self, asked: Asked) -> Completion:
            return replace(super().generate(asked), decode_s=None, cpu_s=8.0)

    server, request = Slow(served.own(), 0, None), replace(served.requests[0], k=0)
    with pytest.raises(
        UserError, match=r"clock=cpu: the harness's loop tells no times .* leave clock out"
    ):
        ask(server, request, 0, "cpu")


def test_a_clock_without_a_prefill_apart_is_read_for_one_token_too(served: Served) -> None:
    server, request = OneClock(served.own(), 2, None), replace(served.requests[0], k=2)
    by_engine = ask(server, request, 0, "engine")
    assert by_engine.one_token is by_engine.completion
    by_cpu = ask(server, request, 0, "cpu")
    assert len(by_cpu.one_token.tokens) == 1
    assert by_cpu.completion.cpu_s is not None
    assert 0 < by_cpu.decode_s("cpu") < by_cpu.completion.cpu_s
    facts = server.facts
    assert by_engine.trial(facts, "engine").one_token_s is None
    for stored in (by_cpu.trial(facts, "cpu"), by_cpu.rejected_rounds(facts, "cpu", "draft")):
        assert stored.one_token_s == by_cpu.one_token.cpu_s
    elsewhere = replace(by_cpu, completion=replace(by_cpu.completion, cpu_s=None))
    with pytest.raises(UserError, match="clock=cpu: this server's processor time is not known"):
        elsewhere.decode_s("cpu")
    untimed = replace(by_cpu, completion=replace(by_cpu.completion, decode_s=None))
    whole, one = untimed.completion.request_s, untimed.one_token.request_s
    assert untimed.decode_s("engine") == pytest.approx(whole - one)
    # What a user waits for is by the client's clock, whatever the run's
    trial, told = by_cpu.trial(facts, "cpu"), by_cpu.completion
    assert (trial.user_s, trial.user_decode_s) == (told.request_s, told.decode_s)
    assert trial.decode_s == pytest.approx(by_cpu.decode_s("cpu"))
    assert untimed.trial(facts, "cpu").user_decode_s == pytest.approx(max(0.0, whole - one))


@pytest.mark.parametrize(
    ("emitted", "rounds", "counted", "accepted"),
    [
        (20, 8, 12, 12),
        (20, 8, 13, 13),  # an accepted end of text: its round has no token of the target's own
        (20, 8, 15, 13),  # and others were counted behind it
        (20, 8, 11, 12),  # one that was not counted
        (20, 8, None, None),
    ],
)
def test_accepted_tokens_are_those_that_rounds_emitted(
    emitted: int, rounds: int, counted: int | None, accepted: int | None
) -> None:
    assert accepted_tokens(emitted, rounds, counted) == accepted


def test_where_rounds_begin_and_how_drafts_end_is_the_engines() -> None:
    assert Counting(1, shortens_last_draft=True).proposed(4, 8).tolist() == [4, 4, 4, 3, 2, 1, 0]
    assert Counting(0, shortens_last_draft=False).proposed(4, 3).tolist() == [4, 4, 4]


@needs_llamacpp
def test_llamacpp_decodes_the_text_of_our_own_loop(served: Served) -> None:
    theirs, _ = completed(served.llamacpp(), 4, served.requests, GREEDY)
    ours, _ = completed(served.own(), 0, served.requests, GREEDY)
    assert [text.completion.tokens for text in theirs] == [text.completion.tokens for text in ours]


@needs_llamacpp
def test_a_server_that_the_user_runs_is_attached_to_and_counts_the_same(served: Served) -> None:
    started, facts = completed(served.llamacpp(), 4, served.requests, GREEDY)
    with served.llamacpp().open(4) as server:
        assert isinstance(server, LlamaCppServer)
        running = AttachedEngine({4: server.url}, LlamaCppServer)
        attached, attached_facts = completed(running, 4, served.requests, GREEDY)
        # Attaching leaves the server running
        text = served.loaded.tokenizer.decode(served.requests[0].tokens)
        running.open(4).check_vocabulary(served.requests[0].tokens, text)
    assert attached_facts.spec.counting == facts.spec.counting
    for ours, theirs in zip(started, attached, strict=True):
        assert theirs.completion.tokens == ours.completion.tokens
        assert theirs.completion.rounds in (ours.completion.rounds, None)
    assert sum(text.completion.rounds is None for text in attached) <= 1


@needs_llamacpp
def test_llamacpps_clocks_and_version_are_read(served: Served) -> None:
    (first, *_), facts = completed(served.llamacpp(), 0, served.requests[:1], GREEDY)
    done = first.completion
    assert facts.version.startswith(("xllamacpp ", "b"))
    assert done.prefill_s is not None
    assert done.decode_s is not None
    assert 0 < done.prefill_s + done.decode_s < done.request_s
    if sys.platform == "linux":
        assert done.cpu_s is not None
        assert done.cpu_s > 0


@needs_llamacpp
def test_synthetic_rates_of_zero_make_every_round_emit_one_token(served: Served) -> None:
    with served.llamacpp().open(2, synthetic=[0.0, 0.0]) as server:
        done = server.generate(Asked(served.requests[0].tokens, GREEDY, 1, 20))
    assert done.rounds == len(done.tokens) - 1
    assert done.accepted == 0


@needs_llamacpp
def test_a_server_killed_between_requests_is_named_with_its_log(served: Served) -> None:
    with served.llamacpp().open(0) as server:
        server.generate(Asked(served.requests[0].tokens, GREEDY, 1, 4))
        assert server.process_id is not None
        os.kill(server.process_id, signal.SIGKILL)
        with pytest.raises(ServerDiedError, match=r"llama\.cpp at k=0: .*its log ends"):
            server.generate(Asked(served.requests[0].tokens, GREEDY, 1, 4))


@needs_llamacpp
def test_a_file_that_is_no_model_is_refused(served: Served) -> None:
    broken = served.folder / "broken.gguf"
    broken.write_bytes(b"no model")
    with pytest.raises(UserError, match=r"llama\.cpp at k=0 ended; its log ends"):
        replace(served.llamacpp(), target=broken).open(0)


@needs_llamacpp
def test_a_request_longer_than_the_context_is_refused(served: Served) -> None:
    with (
        replace(served.llamacpp(), context_tokens=8).open(0) as server,
        pytest.raises(UserError, match="context"),
    ):
        server.generate(Asked(list(range(2, 402)), GREEDY, 1, 400))


def test_requests_side_by_side_share_a_cache_unless_it_is_turned_off(tmp_path: Path) -> None:
    engine = LlamaCpp(tmp_path / "model.gguf", None, tmp_path, 120, 1)
    own = ("--no-kv-unified",)
    for slots, more, expected in ((1, (), False), (4, (), True), (4, own, False)):
        flags = replace(engine, slots=slots, more_flags=more).flags(0)
        assert ("--kv-unified" in flags) == expected
