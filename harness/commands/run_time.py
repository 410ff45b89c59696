"""The forwards of a run of the harness's own loop, and about how long they take on this machine.

A sweep or an audition is a list of forwards (`harness.theory.cost`), which a dry run prices on
cards. This machine is one more card: how fast it copies memory and multiplies is timed for about a
second, before anything is loaded. It is an upper estimate: texts that end early, looks that decide
and drafts that are dropped or need fewer visits make a run shorter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import psutil
import torch

from harness import formatting as fmt
from harness import prompts as prompt_sets
from harness.commands.eligible_drafts import draft_size
from harness.commands.pair import BATCH, few_share
from harness.commands.progress import say
from harness.config import AuditionConfig, ModelConf, PairConfig, SweepConfig
from harness.measurement.environment import copy_bandwidth
from harness.measurement.round_times import MOST_TOKENS, rounds_timed, timed_ks, visits_for
from harness.records import Prompt
from harness.theory.cost import (
    Forwards,
    ModelSize,
    forwards_s,
    pair_forwards,
    text_forwards,
    timing_forwards,
)
from harness.theory.roofline import Card

# Rows and columns of the matrices by which multiplying is timed
MULTIPLIED = 1024
# Below so many bytes of weights nothing is timed: calling the kernels takes the time
SMALL_BYTES = 100e6
# Seconds of decoding, the plain ones included, for which a cell of a sweep in looks is measured,
# unless it is precise before
CELL_S = 1.5
# Texts that took less say little of how long the rest takes
WORTH_SAYING_S = 5.0

# Seconds of some forwards
Price = Callable[[Sequence[Forwards]], float]


def this_machine(threads: int | str) -> Card:
    """Its processors with as many threads as the run has, timed now for about a second."""
    before = torch.get_num_threads()
    if threads != "auto":
        torch.set_num_threads(int(threads))
    try:
        matrix = torch.ones(MULTIPLIED, MULTIPLIED)
        seconds: list[float] = []
        for _ in range(3):
            begun = perf_counter()
            torch.mm(matrix, matrix)
            seconds.append(perf_counter() - begun)
        bandwidth = copy_bandwidth(torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    memory = psutil.virtual_memory().total
    return Card("cpu", bandwidth.gb_s, 2e-12 * MULTIPLIED**3 / min(seconds), memory / 1e9)


@dataclass(frozen=True)
class Work:
    """The forwards of a run.

    Attributes:
        texts: that generate the target's texts.
        rest: scores, measured generations, and what is timed.
    """

    texts: Sequence[Forwards]
    rest: Sequence[Forwards]

    @property
    def all(self) -> list[Forwards]:
        """Forwards of the texts and of all else."""
        return [*self.texts, *self.rest]


def model_sizes(
    config: PairConfig | AuditionConfig, drafts: Sequence[ModelConf]
) -> dict[str, ModelSize | None]:
    """Sizes of the target and drafts with weights, by the name of forwards; None: not known."""
    named = {"target": config.model}
    named |= {name_of(config, conf): conf for conf in drafts if not conf.spec.looks_up}
    return {name: draft_size(conf, config.model) for name, conf in named.items()}


def name_of(config: PairConfig | AuditionConfig, draft: ModelConf) -> str:
    """The name of a draft's forwards."""
    return draft.name if isinstance(config, AuditionConfig) else "draft"


def sweep_work(
    config: SweepConfig, prompts: Sequence[Prompt], price: Price = lambda _: 0.0
) -> Work:
    """The forwards of a sweep; of one in looks the largest K stands for the one that is chosen.

    Args:
        price: seconds of forwards where the run takes place, by which slow rounds are timed less.
    """
    parts, ks = _Parts(config, prompts), config.speculative_ks
    every = parts.measured_texts
    texts, rest = parts.generated(BATCH), parts.scores(config.draft)
    if config.mode == "replay":
        pairs: list[Forwards] = []
    elif config.until == "decided":
        pairs = [
            *parts.measured([0, *ks[-1:]], every),
            *parts.measured(ks[:-1], every * few_share(prompts)),
        ]
    else:
        texts, pairs = [], parts.measured([0, *ks], every)  # the plain ones are the texts
    timed: list[Forwards] = []
    if config.latency_from is None:
        timed = parts.timed(config.draft, ks, price, among_many=False)
    return Work(texts, [*rest, *pairs, *timed])


def audition_work(
    config: AuditionConfig,
    drafts: Sequence[ModelConf],
    prompts: Sequence[Prompt],
    price: Price = lambda _: 0.0,
) -> Work:
    """The forwards of an audition in which no draft is dropped; `price` as in `sweep_work`."""
    parts, rest = _Parts(config, prompts), list[Forwards]()
    for conf in drafts:
        rest += parts.scores(conf)
        if config.latency_from is None and config.latency.target_ms is None:
            rest += parts.timed(conf, timed_ks(config.k), price, among_many=True)
    return Work(parts.generated(config.batch), rest)


class _Parts:
    """The forwards of each part of a run."""

    def __init__(self, config: SweepConfig | AuditionConfig, prompts: Sequence[Prompt]) -> None:
        self._config = config
        lengths = prompt_sets.estimated_tokens(prompts, config)
        self._prompts, self._length = len(lengths), sum(lengths) // len(lengths)
        # Greedy texts are all alike: once is enough
        once = sum(config.repetitions if value else 1 for value in config.temperature)
        self.texts = len(lengths) * once
        self.measured_texts = len(lengths) * len(config.temperature) * config.repetitions
        self._waiting = sum(len(prompt_sets.missing_answers(prompt)) for prompt in prompts)

    def generated(self, batch: int) -> list[Forwards]:
        """The target's texts, and its answers to earlier turns, in batches."""
        texts = self.texts + self._waiting
        prefills = Forwards("target", texts, self._length)
        return [prefills, *text_forwards(texts, self._config.new_tokens, batch)]

    def scores(self, draft: ModelConf) -> list[Forwards]:
        """A prefill of each text; of a head the target's too, and one for each token it chains."""
        if draft.spec.looks_up:
            return []
        whole = self._length + self._config.new_tokens
        passes = max(self._config.k) if draft.spec.chained else 1
        made = [Forwards(name_of(self._config, draft), self.texts * passes, whole)]
        return [*made, Forwards("target", self.texts, whole)] if draft.spec.reads_states else made

    def measured(self, ks: Sequence[int], generations: float) -> list[Forwards]:
        """So many generations at each K, 0 among them for plain decoding, with their prompts."""
        drafting = sum(k > 0 for k in ks)
        return [
            Forwards("target", generations * len(ks), self._length),
            Forwards("draft", generations * drafting, self._length),
            *pair_forwards(ks, generations, self._config.new_tokens),
        ]

    def timed(
        self, draft: ModelConf, ks: Sequence[int], price: Price, *, among_many: bool
    ) -> list[Forwards]:
        """Single steps; and rounds, in visits that time plain decoding twice and each K once."""
        config, name = self._config, name_of(self._config, draft)
        visits = visits_for(self._prompts * config.repetitions, among_many=among_many)
        visits *= len(config.temperature)
        context = self._length + max(0, config.new_tokens - MOST_TOKENS) // 2
        work = timing_forwards(max(ks, default=0), name)
        for k in (0, 0, *ks):
            a_round = [Forwards("target", 1, k + 1), Forwards(name, k)]
            rounds = rounds_timed(k, config.new_tokens, price(a_round))
            prompts = [Forwards("target", 1, context), Forwards(name, min(k, 1), context)]
            of_rounds = [replace(each, count=rounds * each.count) for each in a_round]
            work += [replace(each, count=visits * each.count) for each in prompts + of_rounds]
        return work


# ---- on this machine -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RunTime:
    """Seconds of a run, part by part, and the bytes of its weights and caches.

    Attributes:
        texts_s: the target's texts.
        rest_s: all else.
    """

    texts_s: float
    rest_s: float
    needed_bytes: float

    def __str__(self) -> str:
        free = fmt.memory(psutil.virtual_memory().available)
        return (
            f"at most about {fmt.duration(self.texts_s + self.rest_s)}, in"
            f" {fmt.memory(self.needed_bytes)} of {free}"
        )


def run_time(
    config: SweepConfig | AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> RunTime | None:
    """The most time that a run of the loop takes on this machine's processors.

    None where sizes are not known, a card computes, or texts or times are made elsewhere.
    """
    elsewhere = config.latency_from is not None or (
        isinstance(config, AuditionConfig)
        and (config.texts_from or config.traces_from or config.scores_from)
    )
    found = model_sizes(config, drafts)
    sizes = {name: size for name, size in found.items() if size is not None}
    if len(sizes) < len(found) or elsewhere or config.gpu is not None:
        return None
    if torch.cuda.is_available():
        return None
    # Kernels of a small model take no time but that of calling them
    small = sizes["target"].weight_bytes < SMALL_BYTES
    machine = Card("cpu", 1e9, 1e9, 1.0) if small else this_machine(config.threads)
    lengths = prompt_sets.estimated_tokens(prompts, config)
    context = sum(lengths) // len(lengths) + config.new_tokens // 2

    def price(work: Sequence[Forwards]) -> float:
        return forwards_s(work, sizes, machine, context)[1]

    if isinstance(config, AuditionConfig):
        work, again_s = audition_work(config, drafts, prompts, price), 0.0
    else:
        work = sweep_work(config, prompts, price)
        in_looks = config.until == "decided" and config.mode != "replay"
        sets = len({prompt.prompt_set for prompt in prompts})
        cells = sets * len(config.temperature) * len(config.speculative_ks)
        again_s = CELL_S * cells if in_looks else 0.0  # cells that are not precise
    needed = _needed_bytes(sizes, max(lengths) + config.new_tokens)
    return RunTime(price(work.texts), price(work.rest) + again_s, needed)


def _needed_bytes(sizes: Mapping[str, ModelSize], positions: int) -> float:
    """Weights, and the caches of a batch of the longest text; one draft is loaded at a time."""
    each = {
        name: size.weight_bytes + BATCH * positions * size.memory.kv_per_token
        for name, size in sizes.items()
    }
    return each.pop("target") + max(each.values(), default=0.0)


def said_beforehand(
    config: SweepConfig | AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> RunTime | None:
    """The expected time of a run, written to standard error; None where not known, or resumed."""
    expected = None if config.resume else run_time(config, drafts, prompts)
    if expected is not None:
        say(f"plan: {expected} on this machine")
    return expected


def say_left(expected: RunTime | None, texts_s: float) -> None:
    """Say the time of the rest, scaled by how long the texts took next to what was expected."""
    if expected is not None and expected.texts_s and texts_s >= WORTH_SAYING_S:
        left_s = expected.rest_s * texts_s / expected.texts_s
        say(f"the texts took {fmt.duration(texts_s)}: at most about {fmt.duration(left_s)} left")
