"""The measuring half of an audition: the target's texts once, then each draft in its turn.

Everything is stored as it is made: a text is a line of trials.jsonl, a draft's scores and step
times are written when it is done. A resumed audition goes on with the first draft that lacks them.
"""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.analysis.candidates import replay_drafts
from harness.analysis.evidence import Evidence
from harness.analysis.predicted import evidence_of
from harness.analysis.sequential import Race, batches, look, start_race
from harness.analysis.steps import latency_rows
from harness.commands.pair import (
    EncodedPrompt,
)
from harness.commands.sources import by_draft, latencies
from harness.commands.stage import NotEligible, Stage, take_turn
from harness.commands.texts import Key, request_key, text_requests, write_texts
from harness.config import AuditionConfig, ModelConf
from harness.measurement.traces import GeneratedText
from harness.models.tokenizer import stop_rule
from harness.records import Failure, TextTrace, UserError, in_one_line
from harness.storage import RunFolder, load_traces


@dataclass
class Cast:
    """Who took part: what the finishing half needs besides what is stored.

    Attributes:
        finished: drafts that were scored and timed, now or before a resume.
        not_eligible: drafts that may not play with this target, and why.
        failures: drafts that broke down.
        described: the manifest's entry of each draft that was loaded.
        seconds: what generating and scoring took.
        race: where a sequential audition ended.
    """

    finished: list[str] = field(default_factory=list)
    not_eligible: list[Failure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    described: dict[str, dict[str, object]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    race: Race | None = None

    @property
    def ranked(self) -> list[str]:
        """The drafts to rank: all of them, or those that the race did not stop.

        Where it stopped every one, the ones that it took longest over.
        """
        if self.race is None:
            return self.finished
        left = [name for name in self.race.running if name is not None]
        if left or not self.race.scored:
            return left
        most = max(self.race.scored.values())
        return [name for name, count in self.race.scored.items() if count == most]

    def count(self, what: str, seconds: float) -> None:
        """Add to what generating or scoring took."""
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def extra(self, prompts: int) -> dict[str, Any]:
        """What goes into summary.json beside the ranking."""
        return {
            "not_eligible": [
                {"draft": entry.where, "reason": entry.error} for entry in self.not_eligible
            ],
            "costs": dict(self.seconds),
            "sequential": _said(self.race, prompts) if self.race else None,
        }


def _said(race: Race, prompts: int) -> dict[str, Any]:
    """What the race saved, and whom it stopped."""
    savings = race.savings(prompts)
    return {
        "scorings_done": savings.done,
        "scorings_all": savings.full,
        "dropped": [
            {
                "draft": entry.draft,
                "after_prompts": entry.prompts,
                "reason": (
                    f"{entry.leader or 'plain decoding'}"
                    f"{f' at K={entry.leader_k}' if entry.leader else ''} is "
                    f"{entry.behind:.2f}x as fast, at least {entry.behind_at_least:.2f}x"
                ),
            }
            for entry in race.stopped
        ],
    }


def audition_drafts(
    folder: RunFolder, stage: Stage, drafts: Sequence[ModelConf], config: AuditionConfig
) -> Cast:
    """Generate the texts, then score and time every draft; one that fails stops no other."""
    cast = Cast()
    texts = _write(folder, stage, stage.prompts, config, cast)
    for conf in drafts:
        _take(folder, stage, texts, conf, config, cast)
    return cast


def race_drafts(
    folder: RunFolder, stage: Stage, drafts: Sequence[ModelConf], config: AuditionConfig
) -> Cast:
    """The same in batches of prompts, without the drafts that are dominated already.

    Every draft still in the race is loaded again for every batch: what this saves is scoring and
    the target's text, so it pays where prompts are many and texts are long.
    """
    cast = Cast()
    groups = batches([prompt.prompt_set for prompt in stage.conversations], seed=config.seed)
    turns = _by_conversation(stage.prompts)
    race: Race | None = None
    for group in groups:
        prompts = [entry for index in group for entry in turns[index]]
        texts = _write(folder, stage, prompts, config, cast)
        for conf in drafts:
            if race is None or conf.name in race.to_score:
                _take(folder, stage, texts, conf, config, cast)
                if race is not None and conf.name not in cast.finished:
                    race = race.without(conf.name)
        if not cast.finished or (race is not None and not race.to_score):
            break  # no draft is left
        race = race or start_race(cast.finished, len(groups))
        race = look(race, _evidence(folder, race.to_score, config), config.prompts.weights)
        if not race.to_score:
            break
    cast.race = race
    return cast


def _by_conversation(prompts: Sequence[EncodedPrompt]) -> list[list[EncodedPrompt]]:
    """The turns of each conversation, which are scored together; a first turn begins one."""
    groups: list[list[EncodedPrompt]] = []
    for entry in prompts:
        if entry.turn == 1:
            groups.append([])
        groups[-1].append(entry)
    return groups


def _evidence(folder: RunFolder, names: Sequence[str], config: AuditionConfig) -> Evidence:
    """What the race is judged by: the first temperature, the verdict's rule, all prompts so far."""
    groups = by_draft(load_traces(folder.path))
    traces = {name: groups[name] for name in names}
    latency = latencies(config, names, folder.timings())
    rule = config.decode.rule
    ks = [k for k in config.k if k > 0]
    replays = replay_drafts(traces, rule, ks, config.temperature[0])  # type: ignore[arg-type]
    return evidence_of(replays, latency)


def _write(
    folder: RunFolder,
    stage: Stage,
    prompts: Sequence[EncodedPrompt],
    config: AuditionConfig,
    cast: Cast,
) -> list[GeneratedText]:
    begin = time.perf_counter()
    stop = stop_rule(stage.loaded.tokenizer, config.decode.stop_strings)
    requests = text_requests(prompts, config, stage.loaded.eos, stop)
    texts = write_texts(folder, requests, stage.model, stage.loaded.name, config.batch)
    cast.count("generation_s", time.perf_counter() - begin)
    return texts


def _take(
    folder: RunFolder,
    stage: Stage,
    texts: Sequence[GeneratedText],
    conf: ModelConf,
    config: AuditionConfig,
    cast: Cast,
) -> None:
    """Score and time one draft, and store the result before the next draft is loaded.

    An error of one draft does not stop the others: it is recorded as that draft's failure.
    """
    traces, timings = load_traces(folder.path), folder.timings()
    done = {_trace_key(trace) for trace in traces if trace.draft == conf.name}
    waiting = [text for text in texts if request_key(text.request) not in done]
    timed = any(t.role == "draft" and t.model == conf.name for t in timings)
    if waiting or not timed:  # another run's scores may be here without step times
        try:
            turn = take_turn(stage, waiting, conf, config, timed=timed)
        except NotEligible as reason:
            cast.not_eligible.append(Failure(conf.name, str(reason)))
            return
        except Exception as error:  # a draft's own code and files may raise anything
            if config.debug:
                traceback.print_exception(error)
            cast.failures.append(Failure(f"draft {conf.name}", _reason(error)))
            cast.finished = [name for name in cast.finished if name != conf.name]
            return
        cast.count("scoring_s", turn.scoring_s)
        if turn.described is not None:
            cast.described[conf.name] = {"id": conf.id, **turn.described}
        timings += turn.timings
        folder.write_latency(latency_rows(timings), timings)
        folder.write_traces([*traces, *turn.traces])
    if conf.name not in cast.finished:
        cast.finished.append(conf.name)


def _reason(error: Exception) -> str:
    """One line; where the error was not written for the user, with the way to its traceback."""
    text = in_one_line(error)
    if isinstance(error, UserError):
        return text
    return f"{text[:300]} (run again with debug=true for the traceback)"


def _trace_key(trace: TextTrace) -> Key:
    return (trace.prompt_set, trace.prompt, trace.repetition, trace.temperature)
