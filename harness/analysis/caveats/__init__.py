"""What a reader must know before acting on a run: every caveat, one record each.

A record has a code, a severity, when it holds (a function of the evidence) and what it says (made
from the values), in the module of its subject. The analysis asks a record `of` the evidence and
stores the codes with their values in summary.json; a report has the record `say` them. To add one
is to write a record and to name it in the module's `RECORDS`: there are at most `MOST`, so that a
new one replaces another.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.analysis.caveats import (
    comparisons,
    given,
    models,
    plans,
    prompts,
    servers,
    texts,
    timing,
)
from harness.analysis.caveats.record import CaveatRecord, Quoted
from harness.analysis.setup import Setup
from harness.records import ResultRow
from harness.summary import Caveat

__all__ = ["MOST", "RECORDS", "CaveatRecord", "Quoted", "of_setup"]

MOST = 45
RECORDS: Mapping[str, CaveatRecord[Any]] = {
    record.code: record
    for module in (models, prompts, timing, texts, servers, given, plans, comparisons)
    for record in module.RECORDS
}


def of_setup(
    setup: Setup, results: Sequence[ResultRow] = (), *, prompts_of_all: int | None = None
) -> Iterator[Caveat]:
    """Every caveat that the configuration, the manifest and the rows call for.

    The most important first. A snapshot measures no speed, so it has only those on texts.

    `prompts_of_all`, of the whole workload, is looked at in place of the rows' numbers.
    """
    machine, speed = setup.environment, setup.command != "snapshot"
    yield from prompts.PROMPTS_LEFT_OUT.of(setup)
    yield from prompts.SAMPLED_LOG.of(setup)
    if speed:
        yield from models.EMBEDDED_MODELS.of(setup)
        yield from _beyond_a_drafts_limit(setup)
    yield from prompts.FEW_PROMPTS.of(setup, results, prompts_of_all)
    yield from models.SERVER_DEFAULTS.of(setup)
    yield from prompts.OTHER_BUDGET.of(setup)
    yield from texts.TEXTS_FROM.of(setup)
    if setup.typed_latency:
        verify = setup.conf("latency").get("verify_ms")
        yield from given.VERIFY_ASSUMED_EQUAL_STEP.of("latency.verify_ms", verify)
    if setup.priced_by is None:
        yield from timing.LATENCY_FROM.of(setup, None, {})
    auto = speed and setup.conf("device").get("name") == "auto"
    own_times = timing.timed_here(setup)
    yield from models.OTHER_CARD.of(
        setup.gpu.name if own_times and setup.gpu and not setup.ran_on_gpu else None,
        machine.device_name,
        machine.unused_card if auto else None,
    )
    if own_times:
        yield from models.ENGINE_FALLBACK.of(setup)
        yield from timing.BUSY_MACHINE.of(setup)
        yield from timing.THROTTLED_CARD.of(setup)
        yield from models.SPREAD_OVER_CARDS.of(setup)


def _beyond_a_drafts_limit(setup: Setup) -> Iterator[Caveat]:
    """The K beyond what a draft drafts a round at most."""
    for entry in setup.described.values():
        most = entry.drafts_at_most
        beyond = [k for k in setup.ks if most is not None and k > most]
        yield from prompts.K_LEFT_OUT.of(beyond, "draft_limit", entry.name, most)
