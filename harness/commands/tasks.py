"""The generations of a run, as lists: which prompt, at which K and temperature, in which order.

A run makes its requests of these lists, and a dry run counts and prices the same ones
(`harness.commands.run_time`, `harness.commands.server_plan`). Which K a run with `until=decided`
measures is not known beforehand, but not how many generations that is: the largest K stands for
it. Nothing here imports torch.

On servers each task has a role: its server drafts K tokens per round, or decodes plainly at K = 0.
A *visit* asks each server for every prompt at every temperature, in an order drawn anew for each
prompt. What rounds cost comes from the same visits: from servers that are told to reject every
draft (rounds.jsonl) where the engine can do that, else from requests for a part of the budget
(starts.jsonl).

A server run that measures one K alone (`until=decided`) asks few K for few prompts first
(probes.jsonl), which price their rounds, and the plain server for every text, until the fastest K
is found by replay (`harness.analysis.looks.to_start`); that one is visited with plain decoding.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harness import prompts as prompt_sets
from harness.analysis.looks import most_started, searched_next
from harness.config import (
    AuditionConfig,
    ModelsConfig,
    PairConfig,
    ProfileConfig,
    ServerConfig,
    SnapshotConfig,
    SweepConfig,
)
from harness.engine_facts.engines import ENGINES
from harness.engine_facts.spec import shorter_budget
from harness.records import GREEDY, Cell, Prompt, Varying, conversation_of, grouped
from harness.stats.verdict_interval import LOOKS, most_measured
from harness.storage.manifest import AskedLess, ChosenK, Looks, ServedKs

Config = PairConfig | AuditionConfig
# Texts that are generated or scored at the same time
BATCH = 64
# Prompts of the user's own that a sweep in looks replays at most, unless prompts.limit says
# otherwise: beyond these texts take longer than pairs, and pairs err more than texts
MOST_REPLAYED = 512
# Prompts of each set on which K are measured that replay does not choose
PROMPTS_OF_EVERY_K = 4
# Repetitions of a look at most: of generations of a few milliseconds all else takes longer
MOST_REPETITIONS = 16
# Requests that a server decodes side by side where they arrive at random, and no closed loop of
# several is measured
ARRIVING_SLOTS = 8
VARYING: Mapping[Varying, str] = {"schedule": "by the schedule", "adaptive": "adaptive"}


# ---- prompts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with its token ids."""

    prompt: Prompt  # the conversation up to the turn to answer
    tokens: tuple[int, ...]  # at least one id
    pending: int = 0  # tokens that the target's answers may add, where they are not generated yet

    @property
    def turn(self) -> int:
        return len(self.prompt.turns)

    @property
    def length(self) -> int:
        """Tokens at most, with the answers that are not generated yet."""
        return len(self.tokens) + self.pending


@dataclass(frozen=True)
class Conversation:
    """The turns of a conversation, and how many of its set come before it."""

    prompt_set: str
    turns: tuple[EncodedPrompt, ...]
    rank: int


def planned_turns(prompts: Sequence[Prompt], config: Config) -> tuple[EncodedPrompt, ...]:
    """The turns that a run answers, with about as many ids as each will have."""
    turns = [prompt.up_to(turn, ()) for prompt in prompts for turn in prompt.answered]
    lengths = prompt_sets.estimated_tokens(prompts, config)
    return tuple(EncodedPrompt(turn, (0,) * n) for turn, n in zip(turns, lengths, strict=True))


def replayed_prompts(prompts: Sequence[Prompt], config: SweepConfig) -> tuple[Prompt, ...]:
    """The prompts that a sweep decodes plainly and replays: all, but in looks `MOST_REPLAYED`.

    Of each prompt set they are its share, and all where prompts.limit is given.
    """
    if config.until != "decided" or config.prompts.limit_files or len(prompts) <= MOST_REPLAYED:
        return tuple(prompts)
    share = MOST_REPLAYED / len(prompts)
    return tuple(
        prompt
        for some in grouped(prompts, lambda prompt: prompt.prompt_set).values()
        for prompt in prompt_sets.spread(some, max(1, math.floor(share * len(some))))
    )


def missing_answers(prompts: Sequence[Prompt]) -> int:
    """The number of answers to earlier turns that the target generates beforehand, in batches."""
    return sum(len(prompt_sets.missing_answers(prompt)) for prompt in prompts)


def in_random_order(prompts: Sequence[EncodedPrompt], seed: int) -> list[Conversation]:
    """The conversations in an order of which every beginning has its share of each prompt set."""
    of_set = grouped(prompts, lambda entry: entry.prompt.prompt_set)
    random_order = random.Random(f"{seed} looks")
    placed: list[tuple[float, int, Conversation]] = []
    for number, (name, entries) in enumerate(of_set.items()):
        turns = grouped(entries, lambda entry: conversation_of(entry.prompt.id, entry.turn))
        shuffled = random_order.sample([*turns.values()], len(turns))
        placed += [
            ((rank + 0.5) / len(shuffled), number, Conversation(name, tuple(each), rank))
            for rank, each in enumerate(shuffled)
        ]
    return [conversation for *_, conversation in sorted(placed, key=lambda entry: entry[:2])]


# ---- the harness's own loop ----------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One generation of the loop; k = 0 decodes plainly."""

    entry: EncodedPrompt
    temperature: float
    k: int
    repetition: int
    p_min: float = 0.0  # of its drafts


def text_tasks(
    prompts: Sequence[EncodedPrompt], config: AuditionConfig | SweepConfig
) -> list[Task]:
    """The target's texts, generated in batches: one per temperature, repetition and prompt."""
    return [
        Task(entry, float(temperature), 0, repetition)
        for temperature in config.temperature
        # Greedy texts are all alike: once is enough
        for repetition in range(config.repetitions if temperature else 1)
        for entry in prompts
    ]


def grid_tasks(
    prompts: Sequence[EncodedPrompt],
    config: ModelsConfig,
    ks: Sequence[int],
    temperatures: Sequence[float],
    p_min: float = 0.0,
) -> list[Task]:
    """Every generation of a grid, in the order it is run, at one threshold.

    Plain decoding and every K follow each other within one prompt, and which goes first rotates, so
    that a machine that drifts hits all of them alike.
    """
    grid = (0, *(k for k in ks if k > 0))
    return [
        Task(entry, temperature, k, repetition, p_min)
        for repetition in range(config.repetitions)
        for index, entry in enumerate(prompts)
        for number, temperature in enumerate(temperatures)
        # Of each temperature, so that every K leads equally often in each of its cells
        for k in rotated(grid, index + number + repetition)
    ]


def snapshot_tasks(prompts: Sequence[EncodedPrompt], config: SnapshotConfig) -> list[Task]:
    greedy = [GREEDY] if GREEDY in config.temperature else []
    return grid_tasks(prompts, config, config.k, greedy)


def profile_tasks(prompts: Sequence[EncodedPrompt], config: ProfileConfig) -> list[Task]:
    return grid_tasks(prompts, config, (), [GREEDY])


@dataclass(frozen=True)
class LoopTasks:
    """The generations of a sweep at most."""

    texts: Sequence[Task]  # in batches
    measured: Sequence[Task]  # one at a time
    repeats: int = 0  # generations that repeat one whose text is short

    @property
    def count(self) -> int:
        return len(self.texts) + len(self.measured)


def sweep_tasks(
    prompts: Sequence[EncodedPrompt], config: SweepConfig, most_looks: int = LOOKS
) -> LoopTasks:
    """The generations of a sweep; with `until=decided` those of so many looks, of all at most."""
    if config.mode == "replay":
        return LoopTasks(text_tasks(prompts, config), ())
    if config.until == "all":
        grid = grid_tasks(prompts, config, config.k, config.temperature, config.p_min[0])
        return LoopTasks((), grid)
    largest, order = max(config.speculative_ks), in_random_order(prompts, config.seed)
    looks = Looks(tuple(ChosenK(float(value), largest) for value in config.temperature))
    measured = [
        task
        for look in range(1, most_looks + 1)
        for repetition in range(config.repetitions)
        for task in group_tasks(look_groups(order, config, looks, look), config, repetition)
    ]
    again = max(0, MOST_REPETITIONS - config.repetitions)
    return LoopTasks(text_tasks(prompts, config), measured, again * len(measured))


# ---- looks ---------------------------------------------------------------------------------------


def prompts_at(prompts: int, look: int) -> int:
    """The number of so many prompts that are measured, or scored, when look 1 to LOOKS is made."""
    return math.ceil(prompts * look / LOOKS)


@dataclass(frozen=True)
class Group:
    """Generations measured together: a prompt at a temperature, plainly and with some K."""

    entry: EncodedPrompt
    temperature: float
    ks: tuple[int, ...]  # in the order in which they run first; 0 is plain decoding
    p_min: float = 0.0  # of every K

    def cell(self, k: int) -> Cell:
        return Cell(self.entry.prompt.prompt_set, self.temperature, k)


def look_groups(
    order: Sequence[Conversation], config: SweepConfig, looks: Looks, look: int
) -> list[Group]:
    """The groups of a look, in their order; none where there are fewer prompts than looks."""
    measured = most_measured(len(order))
    begin, end = (prompts_at(measured, number) for number in (look - 1, look))
    closed = {each.temperature for each in looks.chosen if (each.looks or LOOKS) < look}
    return [
        Group(
            entry,
            float(value),
            _ks(config, looks.k_at(value), conversation.rank, turn + number),
            looks.p_min_at(value),
        )
        for conversation in order[begin:end]
        for turn, entry in enumerate(conversation.turns)
        for number, value in enumerate(config.temperature)
        if value not in closed
    ]


def _ks(config: SweepConfig, chosen: int | None, rank: int, number: int) -> tuple[int, ...]:
    """Plain decoding and the chosen K alternate in who leads; others follow in rotation.

    So do conversations, by their `rank` in a prompt set, and the `number` of turn and temperature.
    Every K is measured on every prompt where none is chosen.
    """
    ks, place = config.speculative_ks, rank + number
    if chosen is None:
        return rotated((0, *ks), place)
    others = [k for k in ks if k != chosen] if rank < PROMPTS_OF_EVERY_K else []
    return (*rotated((0, chosen), place), *rotated(others, place))


def rotated(ks: Sequence[int], by: int) -> tuple[int, ...]:
    """The list, begun so many places later."""
    start = by % len(ks) if ks else 0
    return (*ks[start:], *ks[:start])


def group_tasks(groups: Sequence[Group], config: SweepConfig, repetition: int) -> list[Task]:
    """A repetition of some groups, numbered after those of the texts; every other one reversed."""
    return [
        Task(group.entry, group.temperature, k, config.repetitions + repetition, group.p_min)
        for group in groups
        for k in (group.ks if repetition % 2 == 0 else group.ks[::-1])
    ]


# ---- servers -------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Role:
    """The kind of a server: how it drafts."""

    k: int  # tokens that it drafts per round, at most; 0 decodes plainly
    rejects: bool = False  # told to reject every draft, so that each round emits one token
    varying: Varying = ""  # how its K changes while it serves

    def __str__(self) -> str:
        if self.varying:
            return f"K up to {self.k}, {VARYING[self.varying]}"
        return f"K={self.k}{', rejecting every draft' if self.rejects else ''}"


PLAIN = Role(0)


def varying_roles(config: ServerConfig) -> list[Role]:
    """The servers whose K changes while they serve, which are measured under load alone."""
    by_engine = ENGINES[config.engine].varying
    roles: list[Role] = []
    for varying in config.varying:
        largest = by_engine[varying].largest_k or max(config.k)
        if varying == "schedule":
            largest = max(k for *_, k in config.schedule)
        roles.append(Role(largest, varying=varying))
    return roles


def load_slots(config: ServerConfig) -> int:
    """Requests that the servers of a load have room for; 1 where no load is measured."""
    # Loads at a rate get those of the largest closed loop, whose costs then say what they wait
    most = max(config.concurrency)
    return ARRIVING_SLOTS if config.rate and most == 1 else most


TaskFile = Literal["trials", "starts", "rounds", "probes"]


@dataclass(frozen=True)
class ServerTask:
    """One request to one server."""

    role: Role
    visit: int
    entry: EncodedPrompt
    temperature: float
    file: TaskFile  # where its answer is stored
    part: bool = False  # for a part of the budget

    def budget(self, new_tokens: int) -> int:
        return shorter_budget(new_tokens) if self.part else new_tokens


def every_k_tasks(
    config: ServerConfig, prompts: Sequence[EncodedPrompt], *, rejecting: bool
) -> Iterator[ServerTask]:
    """Every request of a run that measures every K, in the order it is sent.

    Prompts are in random order in each visit, and the rounds that are timed among them: a machine
    whose pace drifts would else favour one prompt set, and the costs that predict it come from the
    others. All K of a prompt follow each other.
    """
    by_set = grouped(prompts, lambda entry: entry.prompt.prompt_set).values()
    asked = [  # one prompt of each set, of a middle length, the same in each visit
        sorted(entries, key=lambda each: len(each.tokens))[len(entries) // 2] for entries in by_set
    ]
    ks = dict.fromkeys(config.temperature, (0, *config.speculative_ks))
    return _tasks(config, prompts, ks, parts=not rejecting, rejecting=asked if rejecting else ())


def plain_tasks(config: ServerConfig, prompts: Sequence[EncodedPrompt]) -> Iterator[ServerTask]:
    """The texts by which replay chooses a K: every prompt, decoded plainly once."""
    return _tasks(config, prompts, dict.fromkeys(config.temperature, (0,)), visits=1)


def probe_tasks(
    config: ServerConfig,
    prompts: Sequence[EncodedPrompt],
    ks: Sequence[int],
    of_each_set: int,
    temperatures: Sequence[float] | None = None,
) -> Iterator[ServerTask]:
    """The requests that price the rounds of some K next to plain tokens, on a few prompts."""
    order = in_random_order(prompts, config.seed)
    few = [entry for each in order if each.rank < of_each_set for entry in each.turns]
    of_each = dict.fromkeys(temperatures or config.temperature, (0, *ks))
    return _tasks(config, few, of_each, file="probes", parts=True)


def chosen_tasks(
    config: ServerConfig, prompts: Sequence[EncodedPrompt], chosen: ServedKs
) -> Iterator[ServerTask]:
    """Every prompt, plainly and at the K that was chosen for its temperature."""
    ks = {value: (0, chosen.k_at(value) or 0) for value in config.temperature}
    return _tasks(config, prompts, ks)


def _tasks(
    config: ServerConfig,
    prompts: Sequence[EncodedPrompt],
    ks: Mapping[float, Sequence[int]],
    *,
    file: TaskFile = "trials",
    visits: int | None = None,
    parts: bool = False,
    rejecting: Sequence[EncodedPrompt] = (),
) -> Iterator[ServerTask]:
    """Requests in the order they are sent.

    Args:
        ks: by temperature.
        visits: None for as many as the run asks for.
        parts: whether each is asked for a part of its budget too, after the whole one at every K.
        rejecting: prompts that servers are asked, too, which reject every draft.
    """
    # Nothing prices rounds of drafts that are not replayed, and what remembers requests (ngram_mod)
    # would know the text
    parts = parts and config.draft.spec.replayed
    blocks = [(entry, t, False) for entry in prompts for t in ks]
    blocks += [(entry, t, True) for entry in rejecting for t in ks]
    for visit in range(visits or config.repetitions):
        order = np.random.default_rng((config.seed, visit))
        for place in order.permutation(len(blocks)):
            entry, temperature, rejects = blocks[place]
            shuffled = [int(k) for k in order.permutation(ks[temperature])]
            kinds: list[tuple[TaskFile, bool]] = [(file, False)]
            if rejects:
                kinds = [("rounds", True), ("rounds", False)]
            elif parts:
                kinds.append(("starts", True))
            for stored, part in kinds:
                for k in shuffled:
                    role = Role(k, rejects=rejects and k > 0)
                    yield ServerTask(role, visit, entry, temperature, stored, part)


def priced_by_other_sets(
    config: ServerConfig, prompts: Sequence[EncodedPrompt], *, less: bool
) -> bool:
    """True where no server has to reject every draft, since the other prompt sets price rounds.

    So it is where `less` than everything is asked, for one rejecting request of a real model can
    take a minute, and where each is sent once: a disturbed one would price a K on its own.
    """
    sets = {entry.prompt.prompt_set for entry in prompts}
    return len(sets) > 1 and (config.repetitions == 1 or less)


@dataclass(frozen=True)
class ServerTasks:
    """The requests of a server run, one at a time, at most."""

    started: int  # speculating servers
    choosing: Sequence[ServerTask]  # of few K on few prompts, which price their rounds
    # Every text once, by which replay compares K; none if less is asked
    plain: Sequence[ServerTask]
    measured: Sequence[ServerTask]  # the visits


def server_tasks(
    asked: AskedLess,
    config: ServerConfig,
    prompts: Sequence[EncodedPrompt],
    *,
    synthetic: bool = False,
) -> ServerTasks:
    """The requests of a server run; `synthetic` servers can be told to reject every draft."""
    config, prompts = asking(asked, config, prompts)
    ks = sorted(config.speculative_ks)
    if config.until != "decided":
        less = not asked.everything
        rejecting = synthetic and not priced_by_other_sets(config, prompts, less=less)
        tasks = [*every_k_tasks(config, prompts, rejecting=rejecting)]
        return ServerTasks(len(ks), (), (), tasks)
    first = searched_next(ks, {}) or tuple(ks)
    started = max(len(first), most_started(len(ks), len(config.temperature)))
    choosing = [*probe_tasks(config, prompts, first, asked.of_each_set)]
    for _ in range(started - len(first)):
        choosing += probe_tasks(config, prompts, ks[-1:], asked.of_each_set)
    largest = ServedKs((), tuple(ChosenK(value, ks[-1]) for value in config.temperature))
    plain = [*plain_tasks(config, prompts)] if asked.everything else []
    return ServerTasks(started, choosing, plain, [*chosen_tasks(config, prompts, largest)])


def everything(config: ServerConfig, prompts: Sequence[EncodedPrompt]) -> AskedLess:
    """The requests of the configuration, none left out."""
    return AskedLess(
        prompts=len(in_random_order(prompts, config.seed)),
        new_tokens=config.new_tokens,
        repetitions=config.repetitions,
        temperature=tuple(config.temperature),
        k=tuple(config.speculative_ks),
        of_each_set=PROMPTS_OF_EVERY_K,
        everything=True,
    )


def asking(
    asked: AskedLess, config: ServerConfig, prompts: Sequence[EncodedPrompt]
) -> tuple[ServerConfig, tuple[EncodedPrompt, ...]]:
    """The configuration and the prompts of a run that asks for so much."""
    kept = in_random_order(prompts, config.seed)[: asked.prompts]
    turns = {id(entry) for conversation in kept for entry in conversation.turns}
    config = replace(config, new_tokens=asked.new_tokens, repetitions=asked.repetitions)
    config = replace(config, temperature=[*asked.temperature], k=[*asked.k])
    return config, tuple(entry for entry in prompts if id(entry) in turns)
