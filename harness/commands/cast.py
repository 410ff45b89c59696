"""The measuring half of an audition: the target's texts once, then each draft in its turn.

Everything is stored as it is made: a text is a line of trials.jsonl, a draft's scores and step
times are written when it is done. A resumed audition goes on with the first draft that lacks them.
"""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.analysis.latency import latency_rows
from harness.commands.stage import NotEligible, Stage, take_turn
from harness.commands.texts import text_requests, write_texts
from harness.config import AuditionConfig, ModelConf
from harness.measurement.target_texts import GeneratedText
from harness.records import Failure, UserError, in_one_line
from harness.storage import RunFolder


@dataclass
class Cast:
    """Who took part: what the finishing half needs besides what is stored.

    Attributes:
        finished: drafts that were scored and timed, now or before a resume.
        not_eligible: drafts that may not play with this target, and why.
        failures: drafts that broke down.
        described: the manifest's entry of each draft that was loaded.
        seconds: what generating and scoring took.
    """

    finished: list[str] = field(default_factory=list)
    not_eligible: list[Failure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    described: dict[str, dict[str, object]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, what: str, seconds: float) -> None:
        """Add to what generating or scoring took."""
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def extra(self) -> dict[str, Any]:
        """What goes into summary.json beside the ranking."""
        return {
            "not_eligible": [
                {"draft": entry.where, "reason": entry.error} for entry in self.not_eligible
            ],
            "costs": dict(self.seconds),
        }


def audition_drafts(
    folder: RunFolder, stage: Stage, drafts: Sequence[ModelConf], config: AuditionConfig
) -> Cast:
    """Generate the texts, then score and time every draft; one that fails stops no other."""
    cast = Cast()
    texts = _write(folder, stage, config, cast)
    for conf in drafts:
        _take(folder, stage, texts, conf, config, cast)
    return cast


def _write(
    folder: RunFolder,
    stage: Stage,
    config: AuditionConfig,
    cast: Cast,
) -> list[GeneratedText]:
    begin = time.perf_counter()
    requests = text_requests(stage.prompts, config, stage.loaded)
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
    timings = folder.timings()
    scored = {trace.key for trace in folder.traces() if trace.draft == conf.name}
    waiting = [text for text in texts if text.request.key not in scored]
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
        folder.add_traces(turn.traces)
    if conf.name not in cast.finished:
        cast.finished.append(conf.name)


def _reason(error: Exception) -> str:
    """One line; where the error was not written for the user, with the way to its traceback."""
    text = in_one_line(error)
    if isinstance(error, UserError):
        return text
    return f"{text[:300]} (run again with debug=true for the traceback)"
