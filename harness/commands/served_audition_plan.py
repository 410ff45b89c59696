"""The time of an audition on servers on this machine, and its memory, before one is started.

A token that is emitted reads every weight once, and a token of a prompt costs two operations for
each (`harness.commands.server_plan.machine_pace`), of the target and of each draft. The plain
server's texts then say how much slower or faster the machine is than that, for all that is left.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from harness import formatting as fmt
from harness.analysis.served_audition import FINALISTS
from harness.commands.run_time import about
from harness.commands.server_plan import REQUEST_S, Pace, machine_pace
from harness.commands.tasks import EncodedPrompt
from harness.config import AuditionConfig, ModelConf, ServerConfig
from harness.models.gguf_file import read_model
from harness.records import UserError
from harness.stats.two_phase import LOOKS

# Visits that time the rounds of a draft, at least, and rounds of its largest K in the longest
# request
VISITS, LARGEST = 2, 4
# Prompts whose requests time the rounds of a look-up, and K of it that are timed
LOOKUP_PROMPTS, LOOKUP_KS = 4, 2
# Tokens that a draft is asked for off the text / tokens of the text, where thresholds are replayed
OFF_TEXT = 0.5
# A server's memory / the bytes of its files
OVERHEAD = 1.2


def timed_lengths(ks: Sequence[int]) -> list[int]:
    """Rounds of the requests that time a draft's rounds, by a server of the largest K.

    With n tokens left of its budget a server drafts n - 1 at most, so that a request of K + 1
    rounds has one of each number of tokens from K to 0.
    """
    return [1, *(1 + k for k in sorted({1, *ks})), max(ks) + LARGEST]


@dataclass(frozen=True)
class AuditionTime:
    """Seconds of the parts of an audition."""

    plain: float  # of the target's texts
    drafts: Mapping[str, float]  # of the scores and the timed rounds of each, by name
    measuring: float  # of all looks at a finalist, as if it were as fast as plain decoding
    finalists: int = 1  # that are measured at most

    @property
    def ranking_s(self) -> float:
        """Until every draft is ranked by replay."""
        return self.plain + sum(self.drafts.values())

    def sentence(self) -> str:
        """About how long it takes: until the ranking, if one look decides, and at most."""
        ranked, look = self.ranking_s, self.measuring / LOOKS
        return (
            f"ranked by replay after about {fmt.duration(ranked)}, and the best one measured after"
            f" {about(ranked + look, ranked + self.finalists * self.measuring)}"
        )

    def left(self, plain_s: float) -> "AuditionTime":
        """What is left after the plain texts, which took so long."""
        pace = plain_s / self.plain if self.plain else 1.0
        drafts = {name: pace * seconds for name, seconds in self.drafts.items()}
        return replace(self, plain=0.0, drafts=drafts, measuring=pace * self.measuring)


def audition_time(
    config: AuditionConfig, pairs: Mapping[str, ServerConfig], prompts: Sequence[EncodedPrompt]
) -> AuditionTime | None:
    """The time of an audition; None where servers would run on a card.

    Args:
        pairs: by draft, the configuration of its servers.
        prompts: with about as many tokens as each has.
    """
    first = next(iter(pairs.values()))
    target = machine_pace(first)
    if target is None:
        return None
    lengths, new = [len(entry.tokens) for entry in prompts], config.new_tokens

    def texts_s(pace: Pace) -> float:
        return sum(pace.request_s(length, new) for length in lengths)

    drafts: dict[str, float] = {}
    for name, pair in pairs.items():
        if not pair.draft.spec.replayed:
            drafts[name] = target.start_s + 2.0 * texts_s(target)
            continue
        if pair.draft.spec.looks_up:
            few = sorted(lengths)[:LOOKUP_PROMPTS]
            each_s = sum(target.request_s(length, 1.5 * new) for length in few)
            started = LOOKUP_KS * target.start_s
            drafts[name] = started + (1 + LOOKUP_KS) * each_s
            continue
        pace = machine_pace(replace(pair, model=_as_target(pair.draft)))
        assert pace is not None
        steps = new * (1.0 + (OFF_TEXT if any(config.p_min or ()) else 0.0))
        scored = sum(pace.request_s(length, steps) for length in lengths)
        timed = timed_lengths(config.speculative_ks)
        rounds = VISITS * sum(_rounds_s(target, pace, n, config) for n in timed)
        starts = pace.start_s + target.start_s
        asked = REQUEST_S * steps * len(lengths)
        drafts[name] = pace.start_s + starts + scored + asked + rounds
    started = target.start_s
    measuring = started + 2.0 * texts_s(target)
    replayed = sum(pair.draft.spec.replayed for pair in pairs.values())
    finalists = min(FINALISTS, replayed)
    return AuditionTime(started + texts_s(target), drafts, measuring, finalists)


def _as_target(draft: ModelConf) -> ModelConf:
    return ModelConf(name=draft.name, id=draft.id, gguf=draft.gguf)


def _rounds_s(target: Pace, draft: Pace, rounds: int, config: AuditionConfig) -> float:
    """A request of so many rounds at the largest K, and of as many plain tokens."""
    most = max(config.speculative_ks)
    drafted = [min(most, left) for left in range(rounds)]
    verified = sum(target.token_s + n * target.prompt_token_s for n in drafted)
    read = sum(n * draft.token_s + (n + 1) * draft.prompt_token_s for n in drafted)
    return verified + read + rounds * target.token_s


def memory_line(config: AuditionConfig, drafts: Iterable[ModelConf]) -> str:
    """The memory that the servers take at a time, and what is free.

    Raises:
        UserError: the plain server does not fit side by side with a speculating one.
    """
    sizes = [read_model(Path(c.id), c.where).weights_bytes for c in drafts if c.is_file]
    target = read_model(Path(config.model.id), config.model.where).weights_bytes
    needed = OVERHEAD * (2 * target + max(sizes, default=0))
    free = psutil.virtual_memory().available
    line = f"two servers side by side take about {fmt.memory(needed)}"
    if needed > free and not torch.cuda.is_available():
        raise UserError(
            f"{config.model.where}: {line}, and {fmt.memory(free)} are free; take files of fewer"
            " bits, or harness.server with servers=1 for one draft"
        )
    return f"{line}, and {fmt.memory(free)} are free"
