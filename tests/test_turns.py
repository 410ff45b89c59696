"""Requests that take turns: `harness.engines.turns`."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from time import perf_counter, sleep

import psutil
import pytest
from runs import needs_llamacpp
from served_pair import Served

from harness.engines import turns
from harness.engines.http_client import HttpClient
from harness.engines.process import ServerProcess
from harness.engines.protocol import (
    Asked,
    RefusedError,
    RequestFailedError,
    Server,
    TokensLostError,
)
from harness.engines.turns import Turn, in_turns
from harness.records import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers are paused on Linux alone")


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The process group of a program that waits."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process.pid
        os.killpg(process.pid, signal.SIGKILL)


def becomes(process: int, *, stopped: bool) -> bool:
    """Whether a process is stopped, or runs, within moments."""
    for _ in range(1000):
        if (psutil.Process(process).status() == psutil.STATUS_STOPPED) == stopped:
            return True
        sleep(0.01)
    return False


def test_a_pause_before_the_end_of_an_answer_is_taken_off_and_none_after_it(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([10.0, 11.0, 15.0, 15.0, 17.0, 17.0, 17.5, 30.0])
    monkeypatch.setattr(turns, "perf_counter", lambda: next(times))
    monkeypatch.setattr(turns, "SLICE_S", 0.4)
    turn = Turn(sleeper, 2)
    turn.sent()
    turn.arrived(1)  # at 10
    turn.read_prompt()  # paused at 11
    assert becomes(sleeper, stopped=True)
    turn.run(alone=False)  # from 15 to 17
    turn.arrived(3)
    turn.answered()  # at 17.5, while it was paused: its last bytes were on their way
    turn.resume()
    assert becomes(sleeper, stopped=False)
    assert turn.tokens == 4
    assert turn.paused_s == 4.0
    assert turn.running_s(7.45) == pytest.approx(3.45)
    # Its last token came before the pause of four seconds, and its answer after it
    assert turn.running_s(3.5) == pytest.approx(3.5)


def test_pauses_before_the_first_token_of_a_repeated_request_are_its_prefill_s(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, 3.0, 4.0, 8.0, 9.0])
    monkeypatch.setattr(turns, "perf_counter", lambda: next(times))
    turn = Turn(sleeper, 2)
    turn.sent()
    turn.arrived(1)
    turn.read_prompt()
    turn.resume()  # paused from 1 to 3
    turn.sent()  # it failed
    turn._pause()
    turn.resume()  # from 4 to 8
    turn.arrived(1)
    assert (turn.tokens, turn.prefill_paused_s) == (1, 4.0)


def test_a_server_that_hangs_takes_the_turns_of_no_other(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SLICE_S", 0.01)
    monkeypatch.setattr(turns, "HANGS_S", 0.05)
    one, two, done = Turn(sleeper, 2), Turn(sleeper, 2), threading.Event()

    def answers() -> None:
        one.sent()
        for _ in range(30):
            while one._paused_since:
                sleep(0.001)
            one.arrived(1)
            sleep(0.002)
        one.answered()
        done.set()

    def hangs() -> None:
        two.sent()
        two.arrived(1)
        assert done.wait(30)
        raise RequestFailedError("no whole answer")

    first, second = in_turns([(one, answers), (two, hangs)])
    assert first.exception() is None
    assert isinstance(second.exception(), RequestFailedError)


def test_a_prompt_that_is_read_for_long_lets_others_go_first(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PROMPT_HANGS_S", 0.05)
    turn = Turn(sleeper, 2)
    turn.sent()
    monkeypatch.setattr(turns, "HANGS_S", 0.01)
    turn.read_prompt()
    assert turn.hangs
    turn.resume()
    turn.arrived(1)
    assert turn.prefill_paused_s > 0


@needs_llamacpp
def test_a_stream_that_leaves_out_tokens_of_a_character_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Served(tmp_path, prompts=1)
    request = pair.requests[0]
    with pair.llamacpp().open(0) as server:
        asked = Asked(request.tokens, request.sampling, 1, 4, turn=server.turn(2))
        events = [{"tokens": [5]}, {"tokens": [7]}, {"tokens": [], "timings": {"predicted_n": 3}}]
        monkeypatch.setattr(HttpClient, "streamed", lambda *_: events)
        with pytest.raises(TokensLostError):
            server.generate(asked)


def test_a_paused_server_ends_by_the_polite_signal(tmp_path: Path) -> None:
    process = ServerProcess(["sleep", "60"], tmp_path / "log")
    os.killpg(process.pid, signal.SIGSTOP)
    assert becomes(process.pid, stopped=True)
    process.stop()
    assert process._supervisor.returncode == 128 + signal.SIGTERM
    assert not psutil.pid_exists(process.pid)


@needs_llamacpp
def test_texts_in_turns_are_those_of_requests_alone_and_their_times_exclude_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SLICE_S", 0.01)
    pair = Served(tmp_path, prompts=1)
    request = pair.requests[0]
    asked = Asked(request.tokens, request.sampling, 1, request.budget)
    with ExitStack() as stack:
        servers: list[Server] = [stack.enter_context(pair.llamacpp().open(k)) for k in (0, 2, 4)]
        alone = [server.generate(asked) for server in servers]

        def turn_of(server: Server) -> Turn:
            turn = server.turn(len(servers))
            assert turn is not None
            return turn

        given = [turn_of(server) for server in servers]
        begin = perf_counter()
        done = in_turns(
            [
                (turn, lambda server=server, turn=turn: server.generate(asked._replace(turn=turn)))
                for server, turn in zip(servers, given, strict=True)
            ]
        )
        elapsed_s = perf_counter() - begin
        answers = [each.result() for each in done]
        assert [each.tokens for each in answers] == [each.tokens for each in alone]
        assert [(each.rounds, each.drafted, each.accepted) for each in answers] == [
            (each.rounds, each.drafted, each.accepted) for each in alone
        ]
        assert all((each.decode_s or 0.0) > 0 and (each.prefill_s or 0.0) > 0 for each in answers)
        # One of them runs at a time. With their pauses they would add up to almost three times as
        # much; slices as short as these are not exact where the machine is busy
        seconds = [(each.prefill_s or 0.0) + (each.decode_s or 0.0) for each in answers]
        assert sum(seconds) < 1.5 * elapsed_s
        assert all(
            turn.tokens == len(each.tokens) for turn, each in zip(given, answers, strict=True)
        )

        too_long = asked._replace(prompt=[*request.tokens] * 40)
        wanted = [asked, too_long, asked]
        given = [turn_of(server) for server in servers]
        done = in_turns(
            [
                (turn, lambda s=server, a=each, t=turn: s.generate(a._replace(turn=t)))
                for server, each, turn in zip(servers, wanted, given, strict=True)
            ]
        )
        with pytest.raises(RefusedError):
            done[1].result()
        assert done[0].result().tokens == done[2].result().tokens == alone[0].tokens


@needs_llamacpp
def test_a_server_that_dies_in_its_turn_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SLICE_S", 0.002)
    pair = Served(tmp_path, prompts=1)
    asked = Asked(pair.requests[0].tokens, pair.requests[0].sampling, 1, 48)
    with pair.llamacpp().open(0) as plain, pair.llamacpp().open(2) as dying:
        one, two = plain.turn(2), dying.turn(2)
        assert one is not None
        assert two is not None
        arrived = two.arrived

        def die(tokens: int) -> None:
            arrived(tokens)
            if two.tokens > 5:
                with suppress(ProcessLookupError):  # more of its tokens are on their way
                    os.killpg(two._group, signal.SIGKILL)

        monkeypatch.setattr(two, "arrived", die)
        done = in_turns(
            [
                (one, lambda: plain.generate(asked._replace(turn=one))),
                (two, lambda: dying.generate(asked._replace(turn=two))),
            ]
        )
        assert len(done[0].result().tokens) == 48
        with pytest.raises(UserError):
            done[1].result()
