"""The workload of a server run: a pair's prompts, the request of each task, and what failed.

Weights are in memory while they are needed, and not while servers are timed (`Workload.weights`).
Failed requests are stored, so that cells say so (`Failures`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from harness.commands.checks import Vocabularies, check_lengths
from harness.commands.pair import Pair, described, open_pair
from harness.commands.requests import completion, hash_of, sampling_of, stored_text, with_turns
from harness.commands.run_lifecycle import Described
from harness.commands.tasks import (
    PLAIN,
    PROMPTS_OF_EVERY_K,
    EncodedPrompt,
    Role,
    ServerTask,
    asking,
    varying_roles,
)
from harness.config import ModelConf, ServerConfig
from harness.engine_facts.engines import OWN
from harness.engines.adapters import Adapter, adapter_of
from harness.measurement.generations import Request
from harness.measurement.target_texts import GeneratedText
from harness.models.gguf_file import read_model
from harness.models.load import Vocabulary, load_vocabulary
from harness.records import (
    Measurement,
    NotMeasured,
    Prompt,
    Rule,
    ServerClock,
    TextKey,
    Trial,
    UserError,
    grouped,
    in_one_line,
)
from harness.storage import RunFolder
from harness.storage.manifest import AskedLess, Manifest

# How what a server did not answer is noted: tasks that are no trials, by their file, and loads
NOTES: Mapping[str, Measurement] = {
    "rounds": "server_rounds",
    "starts": "server_starts",
    "probes": "server_rounds",
}
LOADS: Measurement = "server_loads"


@dataclass(frozen=True)
class Task(ServerTask):
    """A task with its request."""

    request: Request = field(kw_only=True)

    @property
    def of_rounds(self) -> tuple[int, int, float, int]:
        """Visit, K, temperature and prompt length, by which its line of rounds.jsonl is found."""
        request = self.request
        return self.visit, self.role.k, request.sampling.temperature, len(request.tokens)

    @property
    def compared(self) -> tuple[bool, TextKey]:
        """The key of the tasks that its time is compared with, those of other K."""
        return self.file == "rounds", self.request.key


@dataclass(frozen=True)
class Workload:
    """The prompts and settings of the requests to servers."""

    config: ServerConfig
    conversations: tuple[Prompt, ...]  # and `prompts`, as of `harness.commands.pair.Target`
    prompts: tuple[EncodedPrompt, ...]
    vocabulary: Vocabulary
    pair: Pair | None  # where the harness's own loop serves it
    adapter: Adapter
    of_each_set: int = PROMPTS_OF_EVERY_K  # prompts by which the K to measure is chosen

    @property
    def device(self) -> torch.device:
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
        config, prompts = asking(less, self.config, self.prompts)
        return replace(self, config=config, prompts=prompts, of_each_set=less.of_each_set)

    def tasks(self, tasks: Iterable[ServerTask]) -> list[Task]:
        """The same tasks with their requests."""

        def asked(task: ServerTask) -> Request:
            request = self.request(task.entry, task.temperature, task.role.k, task.visit)
            cell = f"{request.cell}-short" if task.file == "starts" else request.cell
            return replace(request, cell=cell, budget=task.budget(request.budget))

        return [Task(**vars(task), request=asked(task)) for task in tasks]

    @property
    def measured_on(self) -> torch.device:
        """The device that is timed: that of the models, or the card of servers started here."""
        servers_here = self.pair is None and self.config.url is None
        on_card = servers_here and torch.cuda.is_available()
        return torch.device("cuda", 0) if on_card else self.device

    @property
    def clock(self) -> ServerClock:
        return cast("ServerClock", self.config.clock)

    @property
    def ks(self) -> list[int]:
        """Every K, plain decoding first."""
        return [0, *self.config.speculative_ks]

    @property
    def median(self) -> EncodedPrompt:
        return sorted(self.prompts, key=lambda entry: len(entry.tokens))[len(self.prompts) // 2]

    @property
    def shortest(self) -> EncodedPrompt:
        return min(self.prompts, key=lambda entry: len(entry.tokens))

    def describe(self, known: Manifest | None) -> Described:
        """The manifest's entries of a run; models that are `known`, and not here, are left out."""
        if self.pair is not None:
            return self.pair.describe()
        models = {"target": entry_of(self.config.model), "draft": entry_of(self.config.draft)}
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
            **({"p_min": config.threshold} if k and config.threshold else {}),
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

    def entry(self, prompt_set: str, prompt: str) -> EncodedPrompt:
        at = prompt_set, prompt
        return next(e for e in self.prompts if (e.prompt.prompt_set, e.prompt.id) == at)

    def returned(self, trial: Trial) -> GeneratedText:
        """A stored text, with the request that it answers."""
        entry = self.entry(trial.prompt_set, trial.prompt)
        request = self.request(entry, trial.temperature, trial.k, trial.repetition)
        return stored_text(request, trial)


def entry_of(conf: ModelConf) -> dict[str, Any]:
    """The manifest's entry of a model that is not loaded: of a GGUF file all that it says."""
    if conf.is_file:
        return read_model(Path(conf.id), conf.where).describe(conf.name)
    return {"name": conf.name}


def check_turns(config: ServerConfig, prompts: Sequence[Prompt]) -> None:
    """Refuse later turns where the weights that answer the earlier ones are not loaded."""
    if any(len(prompt.turns) > 1 for prompt in prompts) and (
        config.model.is_file or not config.score
    ):
        why = config.model.where if config.model.is_file else "score=false"
        raise UserError(
            f"{why}: later turns continue the target's answers, which need its weights here;"
            " give prompts.max_turns=1"
        )


def open_workload(
    config: ServerConfig, prompts: Sequence[Prompt], read: Vocabularies | None = None
) -> Workload:
    """Read the target's tokenizer, or load the pair that the harness's loop is to serve."""
    adapter = adapter_of(config)
    if config.engine == OWN.name:
        pair = open_pair(config, prompts)
        return Workload(config, pair.conversations, pair.prompts, pair.target, pair, adapter)
    read = read or Vocabularies(config)
    vocabulary = read.of(config.model) or load_vocabulary(config.model)  # which refuses random ones
    encoded = read.encoded(vocabulary, prompts)
    check_lengths(encoded, config, [vocabulary])
    return Workload(config, tuple(prompts), encoded, vocabulary, None, adapter)


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


class Failures:
    """Failed requests to servers, and servers that are asked no more."""

    def __init__(self, folder: RunFolder, work: Workload) -> None:
        self._folder = folder
        self.dead: set[Role] = set()
        roles = [Role(k, rejects) for k in work.ks for rejects in (False, True)]
        roles += varying_roles(work.config)
        retried = [_missing(role, what) for role in roles for what in (*NOTES.values(), LOADS)]
        folder.note_not_measured(retried=retried)

    def of_task(self, task: Task, error: UserError) -> None:
        line = in_one_line(error)
        if task.file == "trials":
            self._folder.trials.append(task.request.as_trial(status="failed", error=line))
        else:
            self._folder.note_not_measured(_missing(task.role, NOTES[task.file], line))

    def of_server(self, role: Role, error: UserError, left: Sequence[Task]) -> None:
        """A server is asked no more: what is lost with it is marked as failed.

        Its own tasks are, and all with the one that decodes plainly, for they are not compared with
        anything any more: of each K the trials of one visit, and notes.
        """
        line = in_one_line(error)
        lost = [
            task
            for task in left
            if task.role == role or (role == PLAIN and task.role not in self.dead)
        ]
        self.dead.add(role)
        visits: dict[Role, int] = {}
        for task in lost:
            if task.file == "trials" and task.visit == visits.setdefault(task.role, task.visit):
                self._folder.trials.append(task.request.as_trial(status="failed", error=line))
        notes = (_missing(task.role, NOTES[task.file], line) for task in lost if task.file in NOTES)
        self._folder.note_not_measured(*dict.fromkeys(notes))

    def of_load(self, role: Role, error: UserError) -> None:
        self._folder.note_not_measured(_missing(role, LOADS, in_one_line(error)))


def _missing(role: Role, what: Measurement, error: str = "") -> NotMeasured:
    return NotMeasured(what, error, k=role.k, rejects=role.rejects, varying=role.varying)
