"""The forwards of a run of the harness's own loop, and about how long they take on this machine.

A sweep or an audition is a list of forwards (`harness.theory.cost`), which a dry run prices on
cards. This machine is one more card: how fast it copies memory and multiplies is timed for about a
second, before anything is loaded. It is an upper estimate: texts that end early and drafts that are
dropped or need fewer visits make a run shorter. Of a run in looks there are two: where the first
look decides, and where none does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from time import monotonic, perf_counter

import psutil
import torch

from harness import formatting as fmt
from harness import prompts as prompt_sets
from harness.commands.eligible_drafts import draft_size
from harness.commands.progress import say
from harness.commands.tasks import (
    BATCH,
    Config,
    EncodedPrompt,
    Task,
    missing_answers,
    planned_turns,
    prompts_at,
    sweep_tasks,
    text_tasks,
)
from harness.config import AuditionConfig, ModelConf, SweepConfig
from harness.measurement.environment import copy_bandwidth
from harness.measurement.round_times import (
    LEAST_VISITS,
    MOST_TOKENS,
    pair_ks,
    rounds_timed,
    timed_ks,
    visits_for,
)
from harness.records import Prompt, grouped
from harness.stats.verdict_interval import LOOKS
from harness.storage import RunFolder
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
# Of a buffer by which reading is timed for a plan, which next to weights takes little memory
PLAN_BYTES = 32 * 1024**2
# Below so many bytes of weights nothing is timed: calling the kernels takes the time
SMALL_BYTES = 100e6
# Seconds of decoding, the plain ones included, for which a cell of a sweep in looks is measured,
# unless it is precise before
CELL_S = 1.0
# Texts that took less say little of how long the rest takes
WORTH_SAYING_S = 5.0

# Seconds of some forwards
Price = Callable[[Sequence[Forwards]], float]


@cache
def this_machine(threads: int | str) -> Card:
    """Its processors with as many threads as the run has, timed once for about a second."""
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
        bandwidth = copy_bandwidth(torch.device("cpu"), PLAN_BYTES)
    finally:
        torch.set_num_threads(before)
    memory = psutil.virtual_memory().total
    return Card("cpu", bandwidth.gb_s, 2e-12 * MULTIPLIED**3 / min(seconds), memory / 1e9)


@dataclass(frozen=True)
class Work:
    """The forwards of a run."""

    texts: Sequence[Forwards]  # that generate the target's texts
    rest: Sequence[Forwards]  # scores, measured generations, and what is timed

    @property
    def all(self) -> list[Forwards]:
        return [*self.texts, *self.rest]


def model_sizes(config: Config, drafts: Sequence[ModelConf]) -> dict[str, ModelSize | None]:
    """Sizes of the target and drafts with weights, by the name of forwards; None: not known."""
    named = {"target": config.model}
    named |= {name_of(config, conf): conf for conf in drafts if not conf.spec.looks_up}
    return {name: draft_size(conf, config.model) for name, conf in named.items()}


def name_of(config: Config, draft: ModelConf) -> str:
    return draft.name if isinstance(config, AuditionConfig) else "draft"


def work_of(
    config: SweepConfig | AuditionConfig,
    drafts: Sequence[ModelConf],
    prompts: Sequence[Prompt],
    price: Price = lambda _: 0.0,
    looks: int = LOOKS,
) -> Work:
    """The forwards of a run's tasks, each of the whole budget.

    Args:
        price: seconds of forwards where the run takes place, by which slow rounds are timed less.
        looks: that are made of a sweep; of an audition those after which all drafts but the first
            are dropped.
    """
    turns, rest = planned_turns(prompts, config), list[Forwards]()
    scored, missing = text_tasks(turns, config), missing_answers(prompts)
    if isinstance(config, SweepConfig):
        tasks, batch, timed = sweep_tasks(turns, config, looks), BATCH, True
        count, measured = len(tasks.texts) + missing, tasks.measured
    else:
        batch, timed = config.batch, config.latency.target_ms is None
        count, measured = 0 if config.traces_from else len(scored) + missing, ()
    first_look, among = looks < LOOKS, len(drafts)
    for conf in drafts:
        most = LEAST_VISITS if first_look else None
        part = len(scored)
        if isinstance(config, AuditionConfig) and first_look:
            among, dropped = 1, conf is not drafts[0]
            part = prompts_at(part, looks) if dropped else part
            most = prompts_at(LEAST_VISITS, looks) if dropped else None
        rest += scores(scored[:part], conf, config)
        if timed and config.latency_from is None:
            rest += _timed(turns, config, conf, price, most, among)
    for k, some in sorted(grouped(measured, lambda task: task.k).items()):
        length = _mean_length([task.entry for task in some])
        rest.append(Forwards("target", len(some), length))
        if k:
            rest.append(Forwards("draft", len(some), length))
        rest += pair_forwards([k], len(some), config.new_tokens)
    prefills = Forwards("target", count, _mean_length(turns))
    texts = [prefills, *text_forwards(count, config.new_tokens, batch)] if count else []
    return Work(texts, rest)


def _mean_length(turns: Sequence[EncodedPrompt]) -> int:
    return sum(len(turn.tokens) for turn in turns) // len(turns)


def scores(
    texts: Sequence[Task], draft: ModelConf, config: SweepConfig | AuditionConfig
) -> list[Forwards]:
    """A prefill of each text; of a head the target's too, and one for each token it chains."""
    if draft.spec.looks_up:
        return []
    whole = _mean_length([task.entry for task in texts]) + config.new_tokens
    passes = max(config.k) if draft.spec.chained else 1
    made = [Forwards(name_of(config, draft), len(texts) * passes, whole)]
    if any(config.p_min or ()):  # how sure it is of each token, step by step
        made.append(Forwards(name_of(config, draft), len(texts) * config.new_tokens))
    return [*made, Forwards("target", len(texts), whole)] if draft.spec.reads_states else made


def _timed(
    turns: Sequence[EncodedPrompt],
    config: SweepConfig | AuditionConfig,
    draft: ModelConf,
    price: Price,
    most: int | None,
    among: int,
) -> list[Forwards]:
    """Single steps; and rounds, in visits that time plain decoding twice at most, each K once.

    A visit reads its prompt once, and a draft's for each K. There are `most` visits at most, and
    of a draft `among` several some more, before these take turns.
    """
    name, among_many = name_of(config, draft), isinstance(config, AuditionConfig)
    ks = timed_ks(config.k)
    if not among_many:
        ks = pair_ks(config.speculative_ks, shorter=bool(config.thresholds))
    visits = visits_for(len(turns) * config.repetitions, among_many=among_many)
    visits = min(visits, most or visits) + (min(visits, LEAST_VISITS) if among > 1 else 0)
    visits *= len(config.temperature)
    context = _mean_length(turns) + max(0, config.new_tokens - MOST_TOKENS) // 2
    work = [*timing_forwards(max(ks, default=0), name), Forwards("target", visits, context)]
    for k in (0, 0, *ks):
        a_round = [Forwards("target", 1, k + 1), Forwards(name, k)]
        rounds = rounds_timed(k, config.new_tokens, price(a_round))
        of_rounds = [replace(each, count=rounds * each.count) for each in a_round]
        once = [Forwards(name, min(k, 1), context), *of_rounds]
        work += [replace(each, count=visits * each.count) for each in once]
    return work


# ---- on this machine -----------------------------------------------------------------------------


def about(least_s: float, most_s: float) -> str:
    """The time of a run in looks: "about 40 s if the first look decides, at most about 3 min"."""
    least, most = fmt.duration(least_s), fmt.duration(most_s)
    if least == most:
        return f"about {most}"
    return f"about {least} if the first look decides, at most about {most}"


@dataclass(frozen=True)
class RunTime:
    """The time that a run takes at most, and the bytes of its weights and caches."""

    work: Callable[[int, Price], Work]  # by the tokens of a text and by the price of a forward
    price: Price  # on this machine
    new_tokens: int  # the budget of a text
    needed_bytes: float
    again_s: float = 0.0  # in which short texts are measured again, whatever the machine's pace
    budget_s: float | None = None  # after which nothing more is measured; None: any number
    decided: "RunTime | None" = None  # of the same run where its first look decides

    def seconds(self, new_tokens: int | None = None, pace: float = 1.0) -> tuple[float, float]:
        """Seconds of the texts, of so many tokens each, and of all else.

        A forward takes `pace` times as long as expected. What is timed for a while, as rounds are,
        takes no longer for it.
        """

        def slower(work: Sequence[Forwards]) -> float:
            return pace * self.price(work)

        work = self.work(new_tokens or self.new_tokens, slower)
        return slower(work.texts), slower(work.rest) + self.again_s

    def __str__(self) -> str:
        free, needed = psutil.virtual_memory().available, fmt.memory(self.needed_bytes)
        took = self.left(self.budget_s or math.inf, self.new_tokens, 1.0, texts=True)
        if self.needed_bytes > free:
            return f"{took}; needs {needed} of memory, and only {fmt.memory(free)} are free"
        return f"{took}, in {needed} of {fmt.memory(free)}"

    def left(self, budget_s: float, new_tokens: int, pace: float, *, texts: bool = False) -> str:
        """The time in words; without that of the texts, unless `texts`."""
        texts_s, most_s = self.seconds(new_tokens, pace)
        texts_s = texts_s if texts else 0.0
        most_s = min(most_s + texts_s, budget_s)
        if self.decided is None:
            return f"at most about {fmt.duration(most_s)}"
        _, least_s = self.decided.seconds(new_tokens, pace)
        return about(min(least_s + texts_s, budget_s), most_s)


def run_time(
    config: SweepConfig | AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> RunTime | None:
    """The most time that a run of the loop takes on this machine's processors.

    None where sizes are not known, a card computes, or texts or times are made elsewhere.
    """
    elsewhere = config.latency_from is not None or (
        isinstance(config, AuditionConfig) and (config.texts_from or config.traces_from)
    )
    found = model_sizes(config, drafts)
    sizes = {name: size for name, size in found.items() if size is not None}
    on_a_card = config.gpu is not None or torch.cuda.is_available()
    if len(sizes) < len(found) or elsewhere or on_a_card:
        return None
    # Kernels of a small model take no time but that of calling them
    small = sizes["target"].weight_bytes < SMALL_BYTES
    machine = Card("cpu", 1e9, 1e9, 1.0) if small else this_machine(config.threads)
    lengths = prompt_sets.estimated_tokens(prompts, config)
    context = sum(lengths) // len(lengths) + config.new_tokens // 2

    def price(work: Sequence[Forwards]) -> float:
        return forwards_s(work, sizes, machine, context)[1]

    def work(new_tokens: int, price: Price, looks: int = LOOKS) -> Work:
        return work_of(replace(config, new_tokens=new_tokens), drafts, prompts, price, looks)

    # Weights, and the caches of a batch of the longest text; one draft is loaded at a time
    texts = BATCH * (max(lengths) + config.new_tokens)
    bytes_of = {n: s.weight_bytes + texts * s.memory.kv_per_token for n, s in sizes.items()}
    needed = bytes_of.pop("target") + max(bytes_of.values(), default=0.0)
    most = RunTime(work, price, config.new_tokens, needed, budget_s=config.budget_s)
    looks = len(drafts) > 1 if isinstance(config, AuditionConfig) else config.mode != "replay"
    if config.until == "all" or not looks:
        return most
    again_s = 0.0
    if isinstance(config, SweepConfig):  # cells that are not precise are measured again
        cells = len({prompt.prompt_set for prompt in prompts}) * len(config.temperature)
        again_s = CELL_S * cells * len(config.speculative_ks)
    return replace(most, again_s=again_s, decided=replace(most, work=partial(work, looks=1)))


def said_beforehand(
    config: SweepConfig | AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> RunTime | None:
    """The expected time of a run, written to standard error; None where not known, or resumed."""
    expected = run_time(config, drafts, prompts)
    if expected is not None:
        less = ", less what is stored" if config.resume else ""
        say(f"plan: {expected}, at the machine's present pace{less}")
    return None if config.resume else expected


def say_left(
    expected: RunTime | None,
    texts_s: float,
    lengths: Sequence[int],
    *,
    budget_s: float,
    token_s: float | None = None,
) -> None:
    """Say how long the rest takes at most, by the texts, of `lengths`, that took `texts_s`.

    A batch of texts tells less of the machine's pace than a plain token: it is further from what a
    forward is expected to take, and as long as its longest text. So `token_s` tells it, where a
    plain token was timed. Of less than `WORTH_SAYING_S` nothing is said.
    """
    if expected is None or texts_s < WORTH_SAYING_S or not lengths:
        return
    if token_s is None:
        before_s, _ = expected.seconds(max(lengths))
        pace = texts_s / before_s if before_s else 1.0
    else:
        pace = token_s / expected.price([Forwards("target", 1)])
    typical = math.ceil(sum(lengths) / len(lengths))
    left = expected.left(budget_s, typical, pace)
    say(f"the texts took {fmt.duration(texts_s)}; left: {left}")


class Stopwatch:
    """Seconds of a run from `begun`, those of earlier processes of it included.

    Loading and checking the models takes its part of the budget, too.
    """

    def __init__(
        self, folder: RunFolder, budget_s: float | None, begun: float | None = None
    ) -> None:
        looks, costs = folder.manifest.looks, folder.manifest.audition.costs
        self._before_s = looks.measured_s if looks else costs.measured_s or 0.0
        self._begun = monotonic() if begun is None else begun
        self.budget_s = budget_s

    @property
    def spent_s(self) -> float:
        return self._before_s + monotonic() - self._begun

    @property
    def left_s(self) -> float:
        """Seconds left of the budget; infinite without one."""
        return math.inf if self.budget_s is None else self.budget_s - self.spent_s
