"""Is a greedy text that differs from plain decoding's a tie? Judged by the engine's own noise.

Kernels round by the shape of their batch: one row in a plain step, K + 1 rows in a verify. So the
logits of one position differ a little, and where two tokens are nearly as likely, the other one is
taken. How little depends on the engine and on how its weights are stored: 1e-5 nats in float32, 0
or 0.1 nats in 4 bits. So it is measured, on the server that decodes plainly, which is asked for
its own text in two ways:

- step by step: the text is generated again, with log-probabilities;
- in batches: prompt and text up to a position are sent as a prompt, at every (K + 1)-th position.
  An engine with a prompt cache decodes K + 1 tokens in one batch then, as a verify does; one
  without decodes them all.

A margin is the difference of two tokens' log-probabilities: of their logits. The noise is the root
of the mean square by which the margin of the likeliest two tokens changes from one way to the
other, over WANTED_POSITIONS positions or more, without those at which texts differ.

The rule: a difference is a TIE where the margin there, of the plain text's token over the other
text's, is at most TIE_FACTOR times the noise in one of the two ways, whatever its sign; else it is
FAIL, a real one. Where the noise is above MOST_NOISE nothing is judged: a kernel that is wrong for
batches would make its own errors ties.

Its error rate. Noise d changes a token where it exceeds the margin m. Margins are even near 0 (they
are 100 times as wide as the noise), so of the texts that noise changes the share called FAIL is
E[max(|d| - TIE_FACTOR s, 0)] / E|d|, where s is the measured noise: 0.02 % for normal noise, 0.8 %
for Laplace's, 3.3 % for Student's t with 3 degrees of freedom, at 24 positions
(`tests/test_engine_noise.py`). Real differences of a wrong cache are nats wide. So a few FAIL are
expected of a lossless server, and a K is void where it has more than that
(`harness.analysis.lossless.voiding`).

Log-probabilities slow requests down, so none of these is timed. The speculating server is asked
nothing: llama.cpp lists no log-probabilities of tokens that a round emits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.engines.protocol import Asked, Likeliest, Server

# Tokens listed at each position; one that is not listed is less likely than all of them
LISTED = 10
# Positions by which noise is measured, and with fewer of which nothing is judged
WANTED_POSITIONS, LEAST_POSITIONS = 24, 8
TIE_FACTOR = 4.0
# Noise in nats above which texts are not judged: kernels that round by so much are wrong. In 4 bits
# it is 0.1 to 0.2
MOST_NOISE = 0.5
# To allow for where no noise shows: what is left of a log-probability in 32 bits
LEAST_NOISE = 1e-5


@dataclass(frozen=True)
class PlainText:
    """A greedy text of the server that decodes plainly."""

    asked: Asked  # the request that it answers
    tokens: tuple[int, ...]
    position: int | None = None  # of the first token that another text has not
    other: int | None = None  # the other text's token there


@dataclass(frozen=True)
class Margins:
    """Margins of one of the plain server's texts, nats."""

    # step, batch: at the difference, of the plain text's token over the other one; None where there
    # is none or one text ends there, and `step` where the text came out differently before it
    step: float | None
    batch: float | None
    changes: tuple[float, ...]  # of the margin of the likeliest two tokens from steps to batches

    def is_tie(self, noise: float) -> bool:
        """True where noise explains the difference, by the rule; it ends no text early."""
        margins = [abs(margin) for margin in (self.step, self.batch) if margin is not None]
        return min(margins, default=math.inf) <= TIE_FACTOR * max(noise, LEAST_NOISE)


def ask_margins(server: Server, text: PlainText, k: int, wanted: int) -> Margins | None:
    """Ask the plain server for a text step by step and in batches of k + 1 tokens.

    Args:
        wanted: positions at which to measure noise, as far as the text has them.

    Returns:
        Its margins; None where it lists no log-probabilities, of the difference's tokens for one.

    Raises:
        ServerDiedError, RequestFailedError, RefusedError: as of `Server.generate`.
    """
    width, difference = k + 1, text.position or 0
    length = min(len(text.tokens), max(difference + 1, wanted * width))
    steps = _steps(server, text, length)
    if not any(steps):
        return None
    prompt, first = len(text.asked.prompt), difference % width
    fed = (*text.asked.prompt, *text.tokens)
    if prompt + first > width:  # then the next one is a batch of `width`
        _after(server, text.asked, fed[: prompt + first - width])
    step, batch, changes = None, None, list[float]()
    for position in range(first, length, width):
        listed = _after(server, text.asked, fed[: prompt + position])
        token = text.tokens[position]
        before = steps[position] if position < len(steps) else {}
        at_difference = position == text.position
        other = text.other if at_difference else _second(before, token)
        if other is None:
            continue
        margins = _margin(before, token, other), _margin(listed, token, other)
        if at_difference:
            step, batch = margins
        elif position and margins[0] is not None and margins[1] is not None:
            changes.append(margins[1] - margins[0])
    if text.other is not None and step is None and batch is None:
        return None
    return Margins(step, batch, tuple(changes))


def noise_of(measured: Sequence[Margins]) -> tuple[float | None, int]:
    """The noise in nats, and over how many positions; None where these are too few."""
    changes = [change for margins in measured for change in margins.changes]
    if len(changes) < LEAST_POSITIONS:
        return None, len(changes)
    return math.sqrt(sum(change**2 for change in changes) / len(changes)), len(changes)


def _steps(server: Server, text: PlainText, length: int) -> Likeliest:
    """The likeliest tokens at each position of the text, generated again.

    It ends behind the first token that comes out differently, since engines need not repeat a text.
    """
    done = server.generate(text.asked._replace(budget=length, logprobs=LISTED, cached=False))
    pairs = zip(done.tokens, text.tokens, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), length - 1)
    return done.likeliest[: same + 1]


def _after(server: Server, asked: Asked, fed: Sequence[int]) -> Mapping[int, float]:
    """The likeliest tokens after some tokens that are read in a batch."""
    one = asked._replace(prompt=fed, budget=1, logprobs=LISTED, cached=True)
    return next(iter(server.generate(one).likeliest), {})


def _second(listed: Mapping[int, float], token: int) -> int | None:
    """The likeliest token besides one; None where none is listed."""
    return max((other for other in listed if other != token), key=listed.__getitem__, default=None)


def _margin(listed: Mapping[int, float], token: int, other: int) -> float | None:
    """The margin of one token over another; an unlisted one counts as the least likely listed."""
    if not listed:
        return None
    least = min(listed.values())
    return listed.get(token, least) - listed.get(other, least)
