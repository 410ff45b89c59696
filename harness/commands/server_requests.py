"""What servers are asked for: a pair's prompts, and which request goes to which server when.

Each server has a role: it drafts K tokens per round, or decodes plainly at K = 0. A *visit* asks
each of them for every prompt at every temperature, in an order drawn anew for each prompt.

What rounds cost comes from the same visits: from servers that are told to reject every draft
(rounds.jsonl) where the engine can do that, else from requests for a part of the budget
(starts.jsonl).

A run that measures one K alone (`until=decided`) asks few K for few prompts first (probes.jsonl),
which price their rounds, and the plain server for every text, until the fastest K is found by
replay (`harness.analysis.looks.to_start`); that one is visited with plain decoding.

Weights are in memory while they are needed, and not while servers are timed (`Workload.weights`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Literal, cast

import numpy as np
import torch

from harness.commands.checks import check_lengths, encoded_conversations
from harness.commands.completions import with_turns
from harness.commands.opening import open_pair
from harness.commands.pair import (
    PROMPTS_OF_EVERY_K,
    EncodedPrompt,
    Pair,
    described,
    in_random_order,
)
from harness.commands.progress import progress
from harness.commands.requests import completion, hash_of, sampling_of
from harness.commands.run_lifecycle import Described
from harness.config import ServerConfig
from harness.engines.adapters import kind_of
from harness.engines.protocol import Completion
from harness.measurement.generations import Request
from harness.measurement.server_request import ReturnedText, shorter
from harness.models.load import Vocabulary, load_vocabulary
from harness.records import Prompt, Rule, ServerClock, TextKey, Trial, UserError, Varying, grouped
from harness.serving.drafts import DRAFTS
from harness.serving.engines import ENGINES, OWN
from harness.storage import RunFolder
from harness.storage.manifest import AskedLess, Manifest, ServedKs

# Requests that a server decodes side by side where they arrive at random, and no closed loop of
# several is measured
ARRIVING_SLOTS = 8
VARYING: Mapping[Varying, str] = {"schedule": "by the schedule", "adaptive": "adaptive"}


@dataclass(frozen=True)
class Workload:
    """What the servers are asked for.

    Attributes:
        conversations, prompts: as of `harness.commands.opening.Target`.
        pair: the target with what drafts for it, where the harness's loop serves them.
        of_each_set: prompts of each set by which the K to measure is chosen.
    """

    config: ServerConfig
    conversations: tuple[Prompt, ...]
    prompts: tuple[EncodedPrompt, ...]
    vocabulary: Vocabulary
    pair: Pair | None
    of_each_set: int = PROMPTS_OF_EVERY_K

    @property
    def device(self) -> torch.device:
        """Of the models that are loaded here."""
        return torch.device("cpu") if self.pair is None else self.pair.target_model.device

    @contextmanager
    def weights(self) -> Iterator[Pair]:
        """The pair, in memory while the block runs; not with score=false.

        Whoever holds it longer holds its memory.
        """
        if self.pair is not None:
            yield self.pair
            return
        yield replace(open_pair(self.config, self.conversations), prompts=self.prompts)

    def asking(self, less: AskedLess) -> "Workload":
        """The same for less: fewer or shorter requests."""
        config = replace(
            self.config,
            new_tokens=less.new_tokens,
            repetitions=less.repetitions,
            temperature=[*less.temperature],
            k=[*less.k],
        )
        kept = in_random_order(self.prompts, config.seed)[: less.prompts]
        turns = {id(entry) for conversation in kept for entry in conversation.turns}
        prompts = tuple(entry for entry in self.prompts if id(entry) in turns)
        return replace(self, config=config, prompts=prompts, of_each_set=less.of_each_set)

    @property
    def measured_on(self) -> torch.device:
        """Where what is timed runs: the models' device, or the card of servers started here."""
        servers_here = self.pair is None and self.config.url is None
        on_card = servers_here and torch.cuda.is_available()
        return torch.device("cuda", 0) if on_card else self.device

    @property
    def clock(self) -> ServerClock:
        """By which requests are timed."""
        return cast("ServerClock", self.config.clock)

    @property
    def ks(self) -> list[int]:
        """Every K, plain decoding first."""
        return [0, *self.config.speculative_ks]

    def describe(self, known: Manifest | None) -> Described:
        """What a run with it notes of itself; of models that are `known`, and not here, nothing."""
        if self.pair is not None:
            return self.pair.describe()
        names = {"target": self.vocabulary.name, "draft": self.config.draft.name}
        models = {role: {"name": name} for role, name in names.items()}
        return described(self.device, {} if known and known.models else models, self.conversations)

    def with_turns(self, folder: RunFolder) -> "Workload":
        """The same with every turn of every conversation, which the target answers."""
        if not self.config.score or all(len(each.turns) == 1 for each in self.conversations):
            return self
        with self.weights() as pair:
            answered = with_turns(folder, pair, self.config)
            answered.check_lengths()
        kept = None if self.pair is None else answered
        return replace(self, pair=kept, prompts=answered.prompts)

    def request(self, entry: EncodedPrompt, temperature: float, k: int, visit: int) -> Request:
        """One request; each has a seed of its own, for equal seeds correlate their texts."""
        config, prompt = self.config, entry.prompt
        sampling = sampling_of(config.decode, temperature)
        identity = {
            "model": [config.model.id, config.model.revision, config.model.gguf],
            "draft": [config.draft.id, config.draft.revision, config.draft.gguf] if k else None,
            "prompt": [prompt.prompt_set, prompt.id, list(entry.tokens)],
            "k": k,
            "sampling": asdict(sampling),
            "new_tokens": config.new_tokens,
            "visit": visit,
            "seed": config.seed,
        }
        text = [config.seed, prompt.prompt_set, prompt.id, sampling.temperature, visit, k]
        return replace(
            completion(self.vocabulary, config, entry, temperature, visit),
            cell=hash_of(identity),
            seed=int(hash_of(text)[:8], 16),
            draft=config.draft.name if k else None,
            k=k,
            rule=cast("Rule", config.decode.rule or "ratio"),
        )

    def returned(self, trial: Trial) -> ReturnedText:
        """A stored text, with the request that it answers."""
        entry = next(
            entry
            for entry in self.prompts
            if (entry.prompt.prompt_set, entry.prompt.id) == (trial.prompt_set, trial.prompt)
        )
        request = self.request(entry, trial.temperature, trial.k, trial.repetition)
        request_s = (trial.prefill_s or 0.0) + (trial.decode_s or 0.0)
        completion = Completion(trial.tokens or (), trial.stop_reason or "budget", request_s)
        return ReturnedText(request, completion)


def check_turns(config: ServerConfig, prompts: Sequence[Prompt]) -> None:
    """Refuse later turns where the weights that answer the earlier ones are not loaded."""
    if not config.score and any(len(prompt.turns) > 1 for prompt in prompts):
        raise UserError(
            "score=false: later turns continue the target's answers, which need its weights here;"
            " give prompts.max_turns=1"
        )


def open_workload(config: ServerConfig, prompts: Sequence[Prompt]) -> Workload:
    """Read the target's tokenizer, or load the pair that the harness's loop is to serve."""
    if config.engine == OWN.name:
        pair = open_pair(config, prompts)
        return Workload(config, pair.conversations, pair.prompts, pair.target, pair)
    with progress(f"loading the tokenizer of {config.model.name}"):
        vocabulary = load_vocabulary(config.model)
    encoded = encoded_conversations(vocabulary.tokenizer, prompts, config)
    check_lengths(encoded, config, [vocabulary])
    return Workload(config, tuple(prompts), encoded, vocabulary, None)


def load_slots(config: ServerConfig) -> int:
    """Requests that the servers of a load have room for; 1 where no load is measured.

    Loads at a rate get those of the largest closed loop, whose costs then say what they wait.
    """
    most = max(config.concurrency)
    return ARRIVING_SLOTS if config.rate and most == 1 else most


@dataclass(frozen=True, order=True)
class Role:
    """What a server is for.

    Attributes:
        k: tokens that it drafts per round; 0 decodes plainly.
        rejects: whether it is told to reject every draft, so that each round emits one token.
        varying: how its K changes while it serves; `k` is the largest then.
    """

    k: int
    rejects: bool = False
    varying: Varying = ""

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


@dataclass(frozen=True)
class Task:
    """One request to one server, and where its answer is stored."""

    role: Role
    visit: int
    request: Request
    file: Literal["trials", "starts", "rounds", "probes"]

    @property
    def of_rounds(self) -> tuple[int, int, float, int]:
        """What a line of rounds.jsonl says of the request that it is from."""
        request = self.request
        return self.visit, self.role.k, request.sampling.temperature, len(request.tokens)

    @property
    def compared(self) -> tuple[bool, TextKey]:
        """What it has in common with the tasks of other K that its time is compared with."""
        return self.file == "rounds", self.request.key


def tasks_of(work: Workload, *, synthetic: bool) -> Iterator[Task]:
    """Every request of a run that measures every K, in the order it is sent.

    Prompts are in random order in each visit, and the rounds that are timed among them: a machine
    whose pace drifts would else favour one prompt set, and the costs that predict it come from the
    others. All K of a prompt follow each other.
    """
    rejecting: list[EncodedPrompt] = []
    if synthetic:  # one prompt of each set, of a middle length, the same in each visit
        for entries in grouped(work.prompts, lambda entry: entry.prompt.prompt_set).values():
            rejecting.append(sorted(entries, key=lambda each: len(each.tokens))[len(entries) // 2])
    ks = dict.fromkeys(work.config.temperature, work.ks)
    return _tasks(work, work.prompts, ks, shorts=not synthetic, rejecting=rejecting)


def plain_tasks(work: Workload) -> Iterator[Task]:
    """The texts by which replay chooses a K: every prompt, decoded plainly once."""
    return _tasks(work, work.prompts, dict.fromkeys(work.config.temperature, (0,)), visits=1)


def probe_tasks(
    work: Workload, ks: Sequence[int], temperatures: Sequence[float] | None = None
) -> Iterator[Task]:
    """The requests that price the rounds of some K next to plain tokens, on a few prompts."""
    order = in_random_order(work.prompts, work.config.seed)
    few = [entry for each in order if each.rank < work.of_each_set for entry in each.turns]
    of_each = dict.fromkeys(temperatures or work.config.temperature, (0, *ks))
    return _tasks(work, few, of_each, file="probes", shorts=True)


def chosen_tasks(work: Workload, chosen: ServedKs) -> Iterator[Task]:
    """Every prompt, plainly and at the K that was chosen for its temperature."""
    ks = {value: (0, chosen.k_at(value) or 0) for value in work.config.temperature}
    return _tasks(work, work.prompts, ks)


def _tasks(
    work: Workload,
    prompts: Sequence[EncodedPrompt],
    ks: Mapping[float, Sequence[int]],
    *,
    file: Literal["trials", "probes"] = "trials",
    visits: int | None = None,
    shorts: bool = False,
    rejecting: Sequence[EncodedPrompt] = (),
) -> Iterator[Task]:
    """Requests in the order they are sent.

    Args:
        ks: by temperature.
        visits: None for as many as the run asks for.
        shorts: whether each is asked for a part of its budget too, straight after the whole.
            Not where drafts are not replayed: nothing prices their rounds, and what remembers
            requests (ngram_mod) would know the text.
        rejecting: prompts that servers are asked, too, which reject every draft.
    """
    config = work.config
    shorts = shorts and DRAFTS[kind_of(config)].replayed
    blocks = [(entry, t, False) for entry in prompts for t in ks]
    blocks += [(entry, t, True) for entry in rejecting for t in ks]
    for visit in range(visits or config.repetitions):
        order = np.random.default_rng((config.seed, visit))
        for place in order.permutation(len(blocks)):
            entry, temperature, rejects = blocks[place]
            asked = [
                work.request(entry, temperature, k, visit)
                for k in map(int, order.permutation(ks[temperature]))
            ]
            if rejects:
                for each in (*map(shorter, asked), *asked):
                    yield Task(Role(each.k, rejects=each.k > 0), visit, each, "rounds")
                continue
            yield from (Task(Role(request.k), visit, request, file) for request in asked)
            for request in asked if shorts else ():
                short = replace(shorter(request), cell=f"{request.cell}-short")
                yield Task(Role(request.k), visit, short, "starts")


def waiting_of(folder: RunFolder, tasks: Sequence[Task]) -> list[Task]:
    """The tasks whose answers the folder lacks, and those that these are compared with.

    A time is compared with plain decoding's next to it. So where a K lacks a request, plain
    decoding is asked it again just before; where plain decoding lacks one, every K is asked again.
    """
    # One that was asked again, next to another K, and failed then is a failure of the run
    last = {
        name: {trial.cell: trial.status for trial in getattr(folder, name).read()}
        for name in ("trials", "starts", "probes")
    }
    rounds = Counter(
        (timing.visit, timing.k, timing.temperature, timing.context_tokens)
        for timing in folder.rounds.read()
    )

    def lacks(task: Task) -> bool:
        if task.file != "rounds":
            return last[task.file].get(task.request.cell) != "ok"
        stored = rounds[task.of_rounds] > 0
        rounds[task.of_rounds] -= stored
        return not stored

    waiting: list[Task] = []
    for compared in grouped(tasks, lambda task: task.compared).values():
        lacking = [task for task in compared if lacks(task)]
        plain = [task for task in compared if task.role.k == 0]
        if any(task.role.k == 0 for task in lacking):
            waiting += compared
        elif lacking:
            waiting += [*plain, *lacking]
    return waiting
