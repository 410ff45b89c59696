"""A log of served requests, and a stratified sample that represents it.

A line is one request to an OpenAI-compatible server, by itself or under `body` or `request` (as in
batch files and gateways' logs), with a time stamp where there is one. A request is one generation:
its last turn is answered, and the turns before it are context.

Strata are formed by the properties that influence acceptance and are known beforehand: category,
number of turns, temperature, and length of the prompt. A split is kept where every part has at
least LEAST_SAMPLED sampled requests, after merging its smallest parts. Each stratum gets its share
of the sample (proportional allocation, largest remainders; Cochran, "Sampling Techniques", 1977,
chapter 5), drawn at random, and is a prompt set of the run.

The log is read line by line, twice; only the properties of each request stay in memory.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.prompts.entries import Entry, Source, decoded, prompt_of, request_in
from harness.prompts.readers import file_lines, reading, stem_of
from harness.records import Prompt, SampledLog, UserError, grouped

# The size and the seed of a sample by default
SAMPLE, SAMPLE_SEED = 200, 0
# Sampled requests of a stratum at least, so that its own error can be estimated
LEAST_SAMPLED = 20
STAMPS = ("timestamp", "ts", "time", "arrival_time", "request_time", "created_at", "created")
# (least time stamp, units per second) of nano-, micro- and milliseconds
UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
LENGTHS = ("short", "medium", "long")
# A higher temperature is taken as not set
MOST_TEMPERATURE = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogSample:
    """The sample of a log."""

    facts: SampledLog  # the sizes of log and sample
    sizes: Mapping[str, int]  # requests of each stratum
    prompts: tuple[Prompt, ...]  # the sample, stratum by stratum, in the order of the log


class _Logged(NamedTuple):
    """The properties of a request by which strata are formed."""

    line: int
    category: str
    turns: str
    temperature: str
    size: int
    stamp: float | None


class RequestLog:
    """A log of requests, read once.

    `bytes` has the length of each request's prompt.
    """

    def __init__(self, path: Path) -> None:
        """Read the properties of all requests.

        Raises:
            UserError: the log cannot be read, or most of its lines are no usable requests.
        """
        self._path = path
        self._source = Source(f"prompts.log={path}", stem_of(path), "line")
        self._logged: list[_Logged] = []
        self._unusable, because = 0, "the file is empty"
        unread: list[str] = []
        for number, entry in _entries(path):
            try:
                prompt, stamp = _request(entry, number, self._source), None
                try:
                    stamp = _stamp(entry, prompt.origin)
                except UserError as error:
                    unread.append(str(error) if not unread else "")
                self._logged.append(_logged(prompt, entry, stamp))
            except UserError as error:
                because = str(error) if not self._unusable else because
                self._unusable += 1
        if self._unusable > len(self._logged) or not self._logged:
            raise UserError(
                f"{self._source.name}: {self._unusable:,} of {self._unusable + len(self._logged):,}"
                f" lines are no requests to generate from; the first: {because}"
            )
        if unread:
            _log.warning("%d time stamps are not read; the first: %s", len(unread), unread[0])
        self.bytes = np.array([each.size for each in self._logged])

    def strata(self, size: int) -> list[str]:
        """The stratum of each request, for a sample of this size."""
        logged = self._logged
        least = LEAST_SAMPLED / min(size, len(logged)) * len(logged)
        cuts = np.quantile(self.bytes, [1 / 3, 2 / 3])
        lengths = np.array(LENGTHS)[np.searchsorted(cuts, self.bytes)].tolist()
        known = zip(
            *((each.category, each.turns, each.temperature) for each in logged), strict=True
        )
        strata = [("", [*range(len(logged))])]
        for feature in (*known, lengths):
            split: list[tuple[str, list[int]]] = []
            for name, rows in strata:
                groups = _merged_values(Counter(feature[row] for row in rows), least)
                parts = dict.fromkeys(groups.values())
                for part in parts:
                    members = [row for row in rows if groups[feature[row]] == part]
                    split.append((f"{name}, {part}" if len(parts) > 1 else name, members))
            strata = split
        names = [self._source.label] * len(logged)
        for name, rows in strata:
            for row in rows if name else ():
                names[row] = name.removeprefix(", ")
        return names

    def sample(self, size: int, seed: int) -> LogSample:
        names = self.strata(size)
        rows = drawn(names, size, seed)
        stratum = {self._logged[row].line: names[row] for row in rows}
        prompts = [
            replace(_request(entry, number, self._source), prompt_set=stratum[number])
            for number, entry in _entries(self._path)
            if number in stratum
        ]
        sizes, taken = Counter(names), Counter(stratum.values())
        worth = {name: sizes[name] / taken[name] / len(names) for name in sizes}
        stamps = [each.stamp for each in self._logged if each.stamp is not None]
        facts = SampledLog(
            requests=len(names),
            sampled=len(rows),
            unusable=self._unusable,
            mean_bytes=float(self.bytes.mean()),
            sampled_bytes=sum(float(self.bytes[row]) * worth[names[row]] for row in rows),
            span_s=max(stamps) - min(stamps) if len(stamps) == len(names) else None,
        )
        in_order = tuple(sorted(prompts, key=lambda prompt: prompt.prompt_set))
        return LogSample(facts, {name: sizes[name] for name in sorted(sizes)}, in_order)


def time_stamps(path: Path, where: str) -> Iterator[tuple[int, float]]:
    """The line and time stamp, in seconds, of each request of a log.

    Raises:
        UserError: a request has no time stamp or one of another form, or the log cannot be read.
    """
    for number, entry in _entries(path):
        stamp = _stamp(entry, f"{where}, line {number}")
        if stamp is None:
            raise UserError(
                f"{where}, line {number}: no time stamp; read are {', '.join(STAMPS)}, in seconds,"
                " milliseconds or ISO 8601"
            )
        yield number, stamp


def _entries(path: Path) -> Iterator[tuple[int, Entry]]:
    """The lines of a log with their numbers; a line that is no JSON object is an empty entry."""
    with reading(path, "prompts.log"):
        for number, line in enumerate(file_lines(path, bounded=False), start=1):
            if line.strip():
                try:
                    entry: Any = decoded(line, f"{path}, line {number}")
                except UserError:
                    entry = {}
                yield number, entry if isinstance(entry, Mapping) else {}


def _request(entry: Entry, number: int, source: Source) -> Prompt:
    """The prompt of a logged request: its last turn is answered, its id is the line's number."""
    if not entry:
        raise UserError(f"{source.name}, line {number}: not a JSON object; give a request a line")
    request = request_in(entry)
    category = entry.get("category", request.get("category"))
    prompt = prompt_of({"body": request, "category": category, "id": number}, number, source)
    return replace(prompt, first_turn=len(prompt.turns))


def _logged(prompt: Prompt, entry: Entry, stamp: float | None) -> _Logged:
    temperature = request_in(entry).get("temperature")
    known = "T unset"
    if isinstance(temperature, int | float) and not isinstance(temperature, bool):
        known = f"T={temperature:g}" if 0 <= temperature <= MOST_TEMPERATURE else known
    texts = (prompt.system or "", *prompt.turns, *(answer or "" for answer in prompt.answers))
    return _Logged(
        line=int(prompt.id),
        category=prompt.category or "no category",
        turns="one turn" if len(prompt.turns) == 1 else "several turns",
        temperature=known,
        size=sum(len(text.encode()) for text in texts),
        stamp=stamp,
    )


def _stamp(entry: Entry, where: str) -> float | None:
    """The time stamp of a request in seconds; None where its line has none."""
    key = next((key for key in STAMPS if entry.get(key) is not None), None)
    if key is None:
        return None
    value, seconds = entry[key], math.nan
    with suppress(ValueError, TypeError, OverflowError):
        seconds = float(value)
    if isinstance(value, str) and math.isnan(seconds):
        with suppress(ValueError, OverflowError):
            moment = datetime.fromisoformat(value)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not math.isfinite(seconds):
        shown = ascii(value)[:40]
        raise UserError(
            f"{where}: the time stamp {key}={shown} is not read; read are seconds, milliseconds or"
            " ISO 8601"
        )
    return seconds / next((per for least, per in UNITS if abs(seconds) > least), 1.0)


# ---- strata --------------------------------------------------------------------------------------


def _merged_values(counts: Mapping[str, int], least: float) -> dict[str, str]:
    """The group of each value, with the rarest merged so that every group has `least` requests.

    All values are in one group where no two groups would have that many.
    """
    by_size = sorted(counts, key=lambda value: (counts[value], value))
    rare: list[str] = []
    for value in by_size:
        merged = sum(counts[each] for each in rare)
        if merged >= least or (not rare and counts[value] >= least):
            break
        rare.append(value)
    if len(rare) == len(by_size):
        return dict.fromkeys(counts, "")
    joined = " or ".join(sorted(rare)) if len(rare) <= 2 else "other"
    return {value: joined if value in rare else value for value in counts}


def drawn(names: Sequence[str], size: int, seed: int) -> list[int]:
    """The indices of the sampled requests, in order: each stratum's share of them, at random.

    `names` has the stratum of each request. Where there are fewer than `size`, all are drawn.
    """
    size = min(size, len(names))
    members = grouped(range(len(names)), names.__getitem__)
    exact = {name: size * len(rows) / len(names) for name, rows in members.items()}
    taken = {name: math.floor(value) for name, value in exact.items()}
    remainders = sorted(exact, key=lambda name: (taken[name] - exact[name], name))
    for name in remainders[: size - sum(taken.values())]:
        taken[name] += 1
    random = np.random.default_rng(seed)
    chosen: list[NDArray[np.int64]] = [
        random.choice(members[name], taken[name], replace=False) for name in sorted(members)
    ]
    return sorted(int(row) for row in np.concatenate(chosen))
