"""About how long a run of the harness's own loop takes on this machine, before anything is loaded.

A forward takes `step_s`, and `position_s` more for every position after its first: a step reads
each weight once, and a further position multiplies with each of them. Both follow from a model's
size and from how fast this machine copies memory and multiplies, timed for about a second. It is
an upper estimate: texts that end early, looks that decide and drafts that are dropped or need fewer
visits make a run shorter.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import psutil

from harness import prompts as prompt_sets
from harness.commands.drafted import PROMPTS_OF_EVERY_K
from harness.commands.eligible_drafts import draft_size
from harness.commands.progress import say
from harness.config import AuditionConfig, ModelConf, SweepConfig
from harness.records import Prompt
from harness.reporting import formatting as fmt
from harness.theory.acceptance import expected_tokens_per_round
from harness.theory.cost import ALPHA, ModelSize

# Rows and columns of the matrices by which multiplying is timed
MULTIPLIED = 1024
# What calling the kernels of one layer takes on a processor, however small it is: the embedded
# target's 8 layers take 3.7 ms a token on one core of an Intel Xeon
LAYER_S = 0.45e-3
# Below so many bytes of weights nothing is timed: calling the kernels takes the time
SMALL_BYTES = 100e6
# Seconds of decoding, the plain ones included, for which a cell of a sweep in looks is measured,
# unless it is precise before
CELL_S = 1.5
# Texts that took less say little of how long the rest takes
WORTH_SAYING_S = 5.0
# Texts of the target that are decoded side by side
BATCH = 32


@dataclass(frozen=True)
class Machine:
    """How fast this machine's processors are: a second's bytes read and operations multiplied."""

    bytes_s: float
    operations_s: float


def this_machine(threads: int | str) -> Machine:
    """Timed now, for about a second, with as many threads as the run has."""
    import torch

    from harness.measurement.environment import copy_bandwidth

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
        return Machine(1e9 * bandwidth.gb_s, 2 * MULTIPLIED**3 / min(seconds))
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class ForwardTime:
    """Seconds of a forward of one position, and of each further position."""

    step_s: float
    position_s: float

    @classmethod
    def of(cls, size: ModelSize | None, machine: Machine) -> "ForwardTime":
        """Of a model; of what drafts without one, nothing."""
        if size is None:
            return cls(0.0, 0.0)
        parameters = size.shape.parameters
        calls_s = size.shape.layers * LAYER_S
        read_s = parameters * size.bytes_per_parameter / machine.bytes_s
        return cls(calls_s + read_s, 2.0 * parameters / machine.operations_s)

    def __call__(self, positions: float) -> float:
        """Seconds of one forward over so many new positions, of all its sequences together."""
        return self.step_s + max(0.0, positions - 1) * self.position_s


@dataclass(frozen=True)
class RunTime:
    """Seconds of a run, part by part, and the bytes of its weights and caches.

    Attributes:
        texts_s: the target's texts.
        drafts_s: scores, round times and measured pairs, of all drafts.
    """

    texts_s: float
    drafts_s: float
    needed_bytes: float

    @property
    def total_s(self) -> float:
        """Of all parts."""
        return self.texts_s + self.drafts_s

    def __str__(self) -> str:
        free = fmt.memory(psutil.virtual_memory().available)
        return (
            f"at most about {fmt.duration(self.total_s)} on this machine, in"
            f" {fmt.memory(self.needed_bytes)} of {free}"
        )


@dataclass(frozen=True)
class _Plan:
    """What the parts of a run are counted from.

    Attributes:
        lengths: positions of each prompt, turn by turn.
        few: of these, the prompts that every K is measured on.
        texts: of the target, for each prompt.
        pairs: of plain decoding and a K, for each prompt.
    """

    lengths: Sequence[int]
    few: int
    new_tokens: int
    ks: Sequence[int]
    texts: int
    pairs: int

    @property
    def context(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def texts_s(self, target: ForwardTime) -> float:
        """Decoded plainly, in batches."""
        batch = min(BATCH, len(self.lengths) * self.texts)
        tokens = self.texts * len(self.lengths) * self.new_tokens
        return self.texts * sum(map(target, self.lengths)) + tokens / batch * target(batch)

    def generation_s(self, target: ForwardTime, draft: ForwardTime, k: int) -> float:
        """One text at one K, its prompt included."""
        prompt_s = target(self.context) + (draft(self.context) if k else 0.0)
        rounds = self.new_tokens / (expected_tokens_per_round(ALPHA, k) if k else 1.0)
        return prompt_s + rounds * _round_s(target, draft, k)

    def pairs_s(self, target: ForwardTime, draft: ForwardTime, *, in_looks: bool) -> float:
        """Every prompt at the K that costs most and plainly; with looks, few at the other K."""
        plain_s = self.generation_s(target, draft, 0)
        each = sorted((self.generation_s(target, draft, k) for k in self.ks), reverse=True)
        most = each[:1] if in_looks else each
        whole_s = len(self.lengths) * (plain_s + sum(most))
        return self.pairs * (whole_s + self.few * sum(each[len(most) :]))

    def scores_s(self, draft: ForwardTime) -> float:
        return self.texts * sum(draft(length + self.new_tokens) for length in self.lengths)

    def visits_s(
        self, target: ForwardTime, draft: ForwardTime, ks: Sequence[int], visits: int
    ) -> float:
        """Of round times: in each, plain decoding twice and every K once."""
        from harness.measurement.round_times import (
            LEAST_ROUNDS,
            LEAST_SLICE,
            MOST_TOKENS,
            TIMING_S,
        )

        context = self.context + max(0, self.new_tokens - MOST_TOKENS) / 2
        seconds = 0.0
        for k in (0, 0, *ks):
            each = _round_s(target, draft, k)
            rounds = LEAST_ROUNDS if k else min(MOST_TOKENS, max(LEAST_ROUNDS, self.new_tokens))
            seconds += target(context) + (draft(context) if k else 0.0)
            seconds += min(rounds * each, max(TIMING_S, LEAST_SLICE * each))
        return visits * seconds


def _round_s(target: ForwardTime, draft: ForwardTime, k: int) -> float:
    return target(k + 1) + k * draft(1)


def run_time(
    config: SweepConfig | AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> RunTime | None:
    """What a run of the loop takes on this machine's processors at most.

    None where sizes are not known, or a card computes; what another run or a server gives is not
    known either.
    """
    elsewhere = config.latency_from is not None or (
        isinstance(config, AuditionConfig)
        and (config.texts_from or config.traces_from or config.scores_from)
    )
    target = draft_size(config.model, config.model)
    if target is None or elsewhere or config.gpu is not None:
        return None
    import torch

    from harness.measurement.round_times import timed_ks, visits_for

    if torch.cuda.is_available():
        return None
    sizes = [None if d.spec.looks_up else draft_size(d, config.model) for d in drafts]
    if any(size is None and not d.spec.looks_up for size, d in zip(sizes, drafts, strict=True)):
        return None
    small = target.weight_bytes < SMALL_BYTES
    machine = Machine(float("inf"), float("inf")) if small else this_machine(config.threads)
    of_target = ForwardTime.of(target, machine)
    in_sets = Counter(prompt.prompt_set for prompt in prompts).values()
    temperatures = len(config.temperature) * config.repetitions
    plan = _Plan(
        lengths=prompt_sets.estimated_tokens(prompts, config),
        few=sum(min(count, PROMPTS_OF_EVERY_K) for count in in_sets),
        new_tokens=config.new_tokens,
        ks=config.speculative_ks,
        texts=temperatures,
        pairs=temperatures,
    )
    audition = isinstance(config, AuditionConfig)
    visits = visits_for(len(plan.lengths) * config.repetitions, among_many=audition)
    drafts_s = 0.0
    for size in sizes:
        draft = ForwardTime.of(size, machine)
        ks = timed_ks(plan.ks) if audition else plan.ks
        drafts_s += plan.scores_s(draft) + len(config.temperature) * plan.visits_s(
            of_target, draft, ks, visits
        )
        if isinstance(config, SweepConfig) and config.mode != "replay":
            in_looks = config.until == "decided"
            drafts_s += plan.pairs_s(of_target, draft, in_looks=in_looks)
            # Cells that are not precise are measured again
            cells = len(in_sets) * len(config.temperature) * len(plan.ks)
            drafts_s += cells * CELL_S if in_looks else 0.0
    texts_s = plan.texts_s(of_target)
    if isinstance(config, SweepConfig) and config.until == "all" and config.mode != "replay":
        texts_s = 0.0  # the measured plain ones are these
    of_drafts = [0.0, *(_bytes(size, plan) for size in sizes if size is not None)]
    return RunTime(texts_s, drafts_s, _bytes(target, plan) + max(of_drafts))


def said_beforehand(
    config: SweepConfig | AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> RunTime | None:
    """What a run takes, written to standard error; None where nothing is known, or of a resume."""
    expected = None if config.resume else run_time(config, drafts, prompts)
    if expected is not None:
        say(f"plan: {expected}")
    return expected


def say_again(expected: RunTime | None, texts_s: float) -> None:
    """How long the drafts will take, as much longer or shorter as the texts took than expected."""
    if expected is not None and expected.texts_s and texts_s >= WORTH_SAYING_S:
        left_s = expected.drafts_s * texts_s / expected.texts_s
        say(f"the texts took {fmt.duration(texts_s)}: at most about {fmt.duration(left_s)} left")


def _bytes(size: ModelSize, plan: _Plan) -> float:
    """Weights, and the caches of a batch of the longest text."""
    positions = max(plan.lengths) + plan.new_tokens
    return size.weight_bytes + BATCH * positions * size.memory.kv_per_token
