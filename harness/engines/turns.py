"""Requests to several servers of this machine in turns: one runs for a slice, others are paused.

Where other work comes and goes on a machine, two requests that follow each other meet different
conditions: the same request took 88 to 187 ms per token within an hour, and ratios of consecutive
requests scattered by 10 to 24 %. In turns of half a second all requests meet the same conditions. A
server is paused with its process group (SIGSTOP), and the pauses are subtracted from the seconds
that it reports.

Prefills run one after the other and without a pause; the first token that arrives ends a prefill.
From then on the request with the fewest tokens runs next, so that all are at the same place of the
text. With slices of several tokens the cost of switching is too small to measure.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.5
# A server that ran so long without a token, or read a prompt for so long, may hang: others go first
HANGS_S, PROMPT_HANGS_S = 60.0, 300.0
# Requests that take at least this long are sent in turns
LEAST_S = 4 * SLICE_S


class Turn:
    """One request that takes turns with others."""

    def __init__(self, group: int, servers: int) -> None:
        """A turn of the server whose process group is `group`, of `servers` with this one."""
        self.servers, self._group = servers, group
        self.tokens = 0  # that have arrived
        # Before the first token; 0 unless the request had to be sent again
        self.prefill_paused_s = self._paused_s = 0.0
        self._began = self._ended = self._paused_since = self._idle_s = 0.0
        self._moved, self._over = threading.Event(), threading.Event()

    # ---- the request's thread --------------------------------------------------------------------

    def arrived(self, tokens: int) -> None:
        """Count tokens that arrived; the first ones of an answer end its prefill."""
        if not self.tokens and tokens:
            self._began, self.prefill_paused_s, self._paused_s = perf_counter(), self._paused_s, 0.0
            self._moved.set()
        self.tokens += tokens

    def answered(self) -> None:
        """End the request's time: later pauses of its server are not counted."""
        self._ended = perf_counter()
        self._over.set()
        self._moved.set()

    def sent(self) -> None:
        """Start counting: the request is sent, for the first time or again."""
        self.tokens, self._paused_s = 0, 0.0

    @property
    def paused_s(self) -> float:
        """Seconds for which the server was paused while its answer was waited for."""
        return self.prefill_paused_s + self._paused_s

    def running_s(self, seconds: float) -> float:
        """The seconds of decoding by the server's clock, less its pauses.

        That clock stops at the last token, so a pause between it and the end of the answer is not
        subtracted; such a pause makes the end late.
        """
        late_s = self._ended - self._began - seconds
        return seconds - self._paused_s + (late_s if late_s > SLICE_S / 4 else 0.0)

    # ---- the scheduler's thread ------------------------------------------------------------------

    def read_prompt(self) -> None:
        """Wait for the first token, or a failure, and pause the server."""
        if not self._moved.wait(PROMPT_HANGS_S):
            self._idle_s = PROMPT_HANGS_S
        self._pause()

    def run(self, *, alone: bool) -> None:
        """Let the server run for a slice, or to the end of its answer if no other is left."""
        self.resume()
        begun, tokens = perf_counter(), self.tokens
        self._over.wait(None if alone else SLICE_S)
        self._pause()
        self._idle_s = self._idle_s + perf_counter() - begun if self.tokens == tokens else 0.0

    def end(self) -> None:
        self._over.set()
        self._moved.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def hangs(self) -> bool:
        return self._idle_s > HANGS_S

    def _pause(self) -> None:
        if self.over or self._paused_since:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGSTOP)
        self._paused_since = perf_counter()

    def resume(self) -> None:
        if not self._paused_since:
            return
        if not self.over:
            self._paused_s += perf_counter() - self._paused_since
        self._paused_since = 0.0
        with suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGCONT)


def in_turns(asks: Sequence[tuple[Turn, Callable[[], T]]]) -> list[Future[T]]:
    """Send requests to different servers in turns.

    Returns:
        A future for each, done: its answer, or the error that it ended with.
    """
    futures = [Future[T]() for _ in asks]

    def ask(turn: Turn, request: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(request())
        except BaseException as error:  # raised where the answer is read
            future.set_exception(error)
        finally:
            turn.end()

    # An abandoned request may take minutes to fail: its thread must not keep the process alive
    threads = [
        threading.Thread(target=ask, args=(*each, future), daemon=True)
        for each, future in zip(asks, futures, strict=True)
    ]
    turns = [turn for turn, _ in asks]
    try:
        for thread, turn in zip(threads, turns, strict=True):
            thread.start()
            turn.read_prompt()
        while left := [turn for turn in turns if not turn.over]:
            min(left, key=lambda turn: (turn.hangs, turn.tokens)).run(alone=len(left) == 1)
            for turn in turns:
                if turn.over:
                    turn.resume()
    finally:
        for turn in turns:
            turn.resume()
    for thread in threads:
        thread.join()
    return futures
