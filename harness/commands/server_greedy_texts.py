"""Greedy texts that differ from plain decoding's, judged while its server answers: checks.jsonl.

Which differences are ties is measured on that server (`harness.measurement.engine_noise`), in
requests that are not timed: where all texts are equal nothing is asked. Of an engine that lists no
log-probabilities the checkpoint judges, where it is loaded (`harness.commands.server`).
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from harness.analysis.lossless import greedy_pairs
from harness.commands.progress import progress
from harness.commands.server_requests import Workload
from harness.commands.server_start import started
from harness.commands.tasks import PLAIN, Role
from harness.engines.adapters import Adapter
from harness.engines.protocol import RefusedError, RequestFailedError, Server, ServerDiedError
from harness.measurement.engine_noise import (
    MOST_NOISE,
    WANTED_POSITIONS,
    Margins,
    PlainText,
    ask_margins,
    noise_of,
)
from harness.records import GREEDY, UserError, grouped, in_one_line
from harness.serving.engines import spec_of
from harness.storage import RunFolder
from harness.summary import TextCheck

_log = logging.getLogger(__name__)
# Texts that differ at one K, of which as many are judged: enough to tell a wrong cache from noise;
# and equal texts that are asked for where these do not tell the noise
MOST_JUDGED, MOST_EQUAL = 12, 4


def judge_greedy_texts(folder: RunFolder, work: Workload, servers: Mapping[Role, Server]) -> None:
    """Judge the stored texts that differ, each once, where the plain server is among these."""
    plain, waiting = servers.get(PLAIN), _waiting(folder, work)
    if plain is None or not waiting:
        return
    by_k = grouped(waiting, lambda entry: entry[0].k)
    judged: list[TextCheck] = []
    with progress("judging the greedy texts that differ", len(waiting)) as tick:
        for k, differing in sorted(by_k.items()):
            try:
                judged += judged_by(plain, k, differing, _equal_texts(folder, work, k))
            except ServerDiedError as error:
                _log.warning("texts that differ at K=%d are not judged: %s", k, in_one_line(error))
                break
            for _ in differing:
                tick()
    folder.write_checks([*folder.checks(), *judged])


def judge_the_rest(folder: RunFolder, work: Workload, adapter: Adapter) -> None:
    """The same of texts whose plain server was not up with theirs: it is started once more."""
    if not _waiting(folder, work):
        return
    try:
        with started(folder, work, adapter, [PLAIN], slots=1) as servers:
            judge_greedy_texts(folder, work, servers)
    except UserError as error:
        _log.warning("texts that differ are not judged: %s", in_one_line(error))


def judged_by(
    plain: Server,
    k: int,
    differing: Sequence[tuple[TextCheck, PlainText]],
    equal: Iterator[PlainText],
) -> list[TextCheck]:
    """The checks of one K that can be judged, with their results; OPEN where noise is too large."""
    # The same text in several visits is asked for once
    texts = list(dict.fromkeys(text for _, text in differing))[:MOST_JUDGED]
    margins: dict[PlainText, Margins] = {}
    try:
        for text in (*texts, *islice(equal, MOST_EQUAL)):
            lacking = WANTED_POSITIONS - noise_of([*margins.values()])[1]
            if text.position is None and (lacking <= 0 or not margins):
                break
            measured = ask_margins(plain, text, k, lacking)
            if measured is not None:
                margins[text] = measured
    except (RequestFailedError, RefusedError) as error:
        _log.warning("texts that differ at K=%d are not judged: %s", k, in_one_line(error))
    noise, positions = noise_of([*margins.values()])
    if noise is None:
        return []
    if noise > MOST_NOISE:
        _log.warning(
            "texts that differ at K=%d are not judged: from single tokens to batches of %d the"
            " plain server's log-probabilities change by %.2g nats, which is no rounding",
            k,
            k + 1,
            noise,
        )
    return [
        replace(
            check,
            result="OPEN"
            if noise > MOST_NOISE
            else "TIE"
            if margins[text].is_tie(noise)
            else "FAIL",
            target_margin=margins[text].step,
            verify_margin=margins[text].batch,
            noise=noise,
            noise_positions=positions,
        )
        for check, text in differing
        if text in margins
    ]


def _waiting(folder: RunFolder, work: Workload) -> list[tuple[TextCheck, PlainText]]:
    """The texts that differ and have no check, of an engine that can be asked."""
    if not spec_of(work.config.engine).lists_logprobs:
        return []
    checks = [check for check in folder.checks() if isinstance(check, TextCheck)]
    stored = {check.id for check in checks}
    judged = Counter(k for k, *_ in {(check.k, check.prompt_set, check.prompt) for check in checks})
    waiting: list[tuple[TextCheck, PlainText]] = []
    for check, trial, plain in greedy_pairs(folder.trials.read()):
        position = check.first_difference
        if position is None or check.id in stored or judged[check.k] >= MOST_JUDGED:
            continue
        other = (trial.tokens or ())[position : position + 1]
        text = _plain_text(work, plain.prompt_set, plain.prompt, plain.tokens or ())
        waiting.append((check, replace(text, position=position, other=other[0] if other else None)))
    return waiting


def _equal_texts(folder: RunFolder, work: Workload, k: int) -> Iterator[PlainText]:
    for check, _, plain in greedy_pairs(folder.trials.read()):
        if check.k == k and check.result == "PASS" and check.repetition == 0:
            yield _plain_text(work, plain.prompt_set, plain.prompt, plain.tokens or ())


def _plain_text(work: Workload, prompt_set: str, name: str, tokens: tuple[int, ...]) -> PlainText:
    entry = next(
        entry
        for entry in work.prompts
        if (entry.prompt.prompt_set, entry.prompt.id) == (prompt_set, name)
    )
    asked = work.request(entry, GREEDY, 0, 0).asked
    return PlainText(asked._replace(prompt=tuple(asked.prompt)), tokens)
