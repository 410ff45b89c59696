"""Which rounds of the running loop a command times, and where their times are stored.

`harness.measurement.round_times` makes the visits; the commands spread them over what they measure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from harness.commands.other_runs import Rates
from harness.commands.pair import EncodedPrompt, Pair, Target, completion, request
from harness.commands.progress import progress
from harness.commands.run_lifecycle import NOT_MEASURED
from harness.config import AuditionConfig, ModelConf, PairConfig
from harness.decoding.protocols import Drafter
from harness.measurement.generations import Draft, Request
from harness.measurement.round_times import (
    FullLookup,
    RoundVisits,
    TimedLoop,
    timed_ks,
    visits_for,
)
from harness.records import Cell
from harness.storage import RunFolder


def visits_of_pair(
    folder: RunFolder,
    pair: Pair,
    config: PairConfig,
    temperatures: Sequence[float],
    synthetic: Mapping[Cell, Rates] | None = None,
) -> RoundVisits:
    """The visits of a run of one pair, at every K of its list; `synthetic` as of its generations.

    Rounds of adaptive drafting have no fixed length, so there is nothing to time.
    """
    requests = {
        name: [
            request(pair, config, entries[0], k, temperature, 0, synthetic=synthetic)
            for k in (0, *sorted({k for k in config.k if k > 0}))
            for temperature in temperatures
        ]
        for name, entries in _by_set(pair.prompts).items()
    }
    visits = visits_for(len(pair.prompts) * config.repetitions)
    if config.decode.stop != "none":
        visits = 0
    return _visits(folder, pair, pair.draft_model, pair.draft.name, requests, visits)


def visits_of_draft(
    folder: RunFolder, target: Target, conf: ModelConf, draft: Draft | None, config: AuditionConfig
) -> RoundVisits:
    """The visits of one draft of an audition.

    Args:
        draft: the loaded model; None while it is not loaded, to see what is missing, and for a
            draft that looks its proposals up.
    """

    def drafter(_: Request) -> Drafter:
        return FullLookup(target.target.eos)

    ks = timed_ks(config.k)
    requests = {
        name: [
            replace(
                completion(target.target, config, entries[0], temperature, 0),
                k=k,
                draft=conf.name if k else None,
                rule=config.decode.rule,
            )
            for k in (0, *ks)
            for temperature in config.temperature
        ]
        for name, entries in _by_set(target.prompts).items()
    }
    visits = visits_for(len(target.prompts) * config.repetitions, among_many=True)
    if config.latency.target_ms is not None or config.latency_from is not None:
        visits = 0
    return _visits(folder, target, draft or drafter, conf.name, requests, visits)


def _visits(
    folder: RunFolder,
    target: Target,
    draft: Draft,
    name: str,
    requests: Mapping[str, Sequence[Request]],
    visits: int,
) -> RoundVisits:
    prompts = {
        prompt_set: [entry.tokens for entry in entries]
        for prompt_set, entries in _by_set(target.prompts).items()
    }
    loop = TimedLoop(target.target_model, draft, name, requests, prompts, target.positions)

    def refuse(what: str, reason: str) -> None:
        notes = folder.manifest.get(NOT_MEASURED) or {}
        folder.update_manifest({NOT_MEASURED: {**notes, what: reason}})

    return RoundVisits(
        loop,
        folder.rounds(),
        visits=visits,
        store=folder.append_round,
        refuse=refuse,
        refused=folder.manifest.get(NOT_MEASURED) or {},
        counted=lambda doing, number: progress(f"{doing} rounds of {name}", number),
    )


def _by_set(prompts: Iterable[EncodedPrompt]) -> dict[str, list[EncodedPrompt]]:
    by_set: dict[str, list[EncodedPrompt]] = {}
    for entry in prompts:
        by_set.setdefault(entry.prompt.prompt_set, []).append(entry)
    return by_set
