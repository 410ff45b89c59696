"""What a reader must know before acting on a run: every caveat, one record each.

A record has a code, a severity, when it holds (a function of the evidence, whose name is the code)
and what it says (made from the values), in the module of its subject. The analysis asks a record
`of` the evidence and stores codes with values in summary.json; a report has the record `say` them.
To add one is to write a function under `caveat`: there are at most `MOST`, so that a new one
replaces another.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.analysis.caveats import comparisons, given, models, prompts, servers, texts, timing
from harness.analysis.caveats.record import CaveatRecord, Quoted
from harness.analysis.setup import Setup, card_of, ran_on
from harness.records import ResultRow
from harness.summary import Caveat

__all__ = ["MOST", "RECORDS", "CaveatRecord", "Quoted", "of_setup"]

MOST = 45
RECORDS: Mapping[str, CaveatRecord[Any]] = {
    record.code: record
    for module in (models, prompts, timing, texts, servers, given, comparisons)
    for record in vars(module).values()
    if isinstance(record, CaveatRecord)
}


def of_setup(
    setup: Setup, results: Sequence[ResultRow] = (), *, prompts_of_all: int | None = None
) -> Iterator[Caveat]:
    """Every caveat that the configuration, the manifest and the rows call for.

    The most important first. A snapshot measures no speed, so it has only those on texts.

    `prompts_of_all`, of the whole workload, is looked at in place of the rows' numbers.
    """
    machine, speed = setup.environment, setup.command != "snapshot"
    yield from prompts.prompts_left_out.of(setup)
    yield from prompts.sampled_log.of(setup)
    if speed:
        yield from models.embedded_models.of(setup)
        yield from _beyond_a_drafts_limit(setup)
    yield from prompts.few_prompts.of(setup, results, prompts_of_all)
    yield from models.server_defaults.of(setup)
    yield from prompts.other_budget.of(setup)
    yield from texts.texts_from.of(setup)
    if setup.typed_latency:
        verify = setup.conf("latency").get("verify_ms")
        yield from given.verify_assumed_equal_step.of("latency.verify_ms", verify)
    if setup.priced_by is None:
        yield from timing.latency_from.of(setup, None, {})
    auto = speed and setup.conf("device").get("name") == "auto"
    card = card_of(setup)
    yield from models.other_card.of(
        card.name if card and not ran_on(setup, card) else None,
        machine.device_name,
        machine.unused_card if auto else None,
    )
    if not setup.typed_latency and setup.latency_from is None:  # timed here
        yield from models.engine_fallback.of(setup)
        yield from timing.busy_machine.of(setup)
        yield from timing.throttled_card.of(setup)
        yield from models.spread_over_cards.of(setup)


def _beyond_a_drafts_limit(setup: Setup) -> Iterator[Caveat]:
    """The K beyond what a draft drafts a round at most."""
    for entry in setup.described.values():
        most = entry.drafts_at_most
        beyond = [k for k in setup.ks if most is not None and k > most]
        yield from prompts.k_left_out.of(beyond, "draft_limit", entry.name, most)
