"""The counters of a server over all its requests: the page /metrics in Prometheus' text format.

The format is that of prometheus/docs, content/docs/instrumenting/exposition_formats.md: a sample a
line, `name{label="value",...} value [timestamp]`, and comments. A counter grows until its server is
restarted. In some servers a counter with labels has no line before its first count.

The names, and the flags that enable a page, were read in tools/server/server-context.cpp and
server-task.cpp of llama.cpp, srt/observability/metrics_collector.py of SGLang, and
v1/metrics/loggers.py and v1/spec_decode/metrics.py of vLLM. llama.cpp and vLLM were also run.
Earlier releases draft without a counter of rounds, so a page without its name does not say that
there were none.
"""

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from harness.engines.protocol import RefusedError
from harness.records import MOST_K, Scrape

# With OpenMetrics' fractions of seconds, and its exemplar after #, which is no value of the counter
_SAMPLE = re.compile(
    r'([A-Za-z_:][\w:]*)(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?'
    r"\s+(\S+)(?:\s+-?[\d.]+)?(?:\s+#.*)?\s*"
)
# vLLM's and SGLang's
MODEL_LABEL = "model_name"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Samples:
    """The samples of a page: the name, the labels and the value of each line."""

    lines: tuple[tuple[str, Mapping[str, str], float], ...]

    @classmethod
    def of(cls, page: str) -> "Samples":
        """The samples of a page's text; lines of another form are ignored."""
        lines: list[tuple[str, Mapping[str, str], float]] = []
        for match in filter(None, map(_SAMPLE.fullmatch, page.splitlines())):
            name, labels, value = match.groups()
            with suppress(ValueError):
                if math.isfinite(float(value)):
                    lines.append((name, dict(_LABEL.findall(labels or "")), float(value)))
        return cls(tuple(lines))

    @classmethod
    def shown(cls, page: Callable[[], object]) -> "Samples":
        """The samples of the page that a server answers with; none where it has no such page."""
        try:
            return cls.of(str(page()))
        except RefusedError:
            return cls(())

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The models whose counters these are, where they are labelled with a name."""
        named = (labels.get(MODEL_LABEL) for _, labels, _ in self.lines)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def of_model(self, name: str) -> "Samples":
        """Those of one model, and those of the whole server."""
        return Samples(tuple(line for line in self.lines if line[1].get(MODEL_LABEL, name) == name))

    @cached_property
    def sums(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for name, _, value in self.lines:
            sums[name] = sums.get(name, 0.0) + value
        return sums

    def at_positions(self, name: str) -> tuple[int, ...]:
        """The values of a name by its label `position`, from 0 on; empty where it has none."""
        at: dict[int, float] = {}
        for found, labels, value in self.lines:
            position = labels.get("position", "")
            if found == name and position.isdecimal() and int(position) < MOST_K:
                at[int(position)] = at.get(int(position), 0.0) + value
        return tuple(int(at.get(position, 0.0)) for position in range(max(at, default=-1) + 1))

    def largest(self, name: str) -> int | None:
        """The largest value of a gauge that every part of a server shows; None without a value."""
        values = (int(value) for found, _, value in self.lines if found == name)
        return max((value for value in values if value <= MOST_K), default=None)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release, as of 0.32.0 or b11549; empty for one that is not known."""
    release = re.search(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


@dataclass(frozen=True)
class CounterNames:
    """The names of an engine's counters of drafting; None for what is not counted."""

    tokens: str  # of answers; a page without this name has no counters
    rounds: str  # that drafted
    shown_with: str  # the flag with which, or without which, a server shows the counters
    drafts_with: str  # the flag that starts a server with a draft
    since: str  # the first release that is known to show the rounds of a server that drafts
    signs: tuple[str, ...]  # of earlier releases too: above 0 only where a server drafts
    requests: str | None = None  # that have their first token, or that ended
    drafted: str | None = None  # tokens
    accepted: str | None = None
    by_position: str | None = None  # rounds that accepted the token at the position of a label
    k: str | None = None  # tokens that a round drafts, a gauge
    at_end: bool = True  # whether a request is counted when it ends, and not step by step

    def unknown_rounds(self, samples: Samples, version: str) -> str | None:
        """Why a page without rounds does not say that there were none; None where it says so."""
        if self.rounds in samples.sums or samples.largest(self.k or ""):
            return None
        sign = next((name for name in self.signs if samples.sums.get(name)), None)
        if sign is not None:
            return f"it drafts ({sign} is {samples.sums[sign]:g})"
        earlier = _release(version) < _release(self.since)
        return "whether it drafts is not known" if earlier else None

    def read(self, samples: Samples, at_s: float) -> Scrape | None:
        """The counters of a page that was read at `at_s`; None where the page has none."""

        def count(name: str | None) -> int | None:
            return None if name is None else int(samples.sums.get(name, 0.0))

        if self.tokens not in samples.sums:
            return None
        return Scrape(
            at_s=at_s,
            tokens=count(self.tokens) or 0,
            rounds=count(self.rounds) or 0,
            requests=count(self.requests),
            drafted=count(self.drafted),
            accepted=count(self.accepted),
            accepted_at=samples.at_positions(self.by_position) if self.by_position else (),
            k=samples.largest(self.k) if self.k else None,
        )
