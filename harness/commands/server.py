"""A pair on the engine that will serve it: every K on live servers, then the verdict.

Servers, one per K and one that decodes plainly, stand side by side where the memory allows it. A
*visit* asks each of them for every prompt at every temperature, in an order drawn anew for each
prompt. A request is a line of trials.jsonl as soon as its answer is there, so a run that is stopped
continues where it was; a server that dies costs its own cells, and `resume=` asks it again.

What rounds cost comes from the same visits: from servers that are told to reject every draft
(rounds.jsonl) where the engine can do that, else from requests for a part of the budget
(starts.jsonl). The texts are scored by the pair afterwards, for replay (traces.parquet), and held
against plain decoding's and against the target's distribution (checks.jsonl). Where only a
tokenizer is here (score=false) there is nothing of that.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch

from harness.commands.completions import with_turns
from harness.commands.dry_run import print_server_plan
from harness.commands.other_runs import stored_own_rounds
from harness.commands.pair import EncodedPrompt, Pair, described, open_pair, sampling_of
from harness.commands.progress import progress
from harness.commands.run_lifecycle import (
    NOT_MEASURED,
    Outcome,
    concluded,
    create,
    load_prompts,
    measuring,
    note_or_check,
    resumed,
    unless_broken,
)
from harness.commands.snapshot import check_texts
from harness.commands.time_rounds import time_own_loop
from harness.config import ServerConfig
from harness.engines.adapters import Adapter, OpenedPair, ToServe, adapter_of, addresses
from harness.engines.protocol import Completion, EngineFacts, Server, ServerDiedError
from harness.measurement.clock import Clock, undisturbed
from harness.measurement.generations import Request
from harness.measurement.load import Load, groups_of, load_visit
from harness.measurement.returned_texts import ReturnedText, likelihood_test, score_returned
from harness.measurement.served import ask, shorter
from harness.models.load import Vocabulary, load_vocabulary
from harness.models.tokenizer import check_thinking, encode
from harness.records import (
    GREEDY,
    Prompt,
    Rule,
    ServerClock,
    ServingEngine,
    TextTrace,
    Trial,
    UserError,
    in_one_line,
)
from harness.serving.counting import Counting
from harness.storage import RunFolder
from harness.storage.contents import plain
from harness.summary import TextLikelihood

COMMAND = "server"
# The manifest's entries of the engine, and of the threads that each server gets
ENGINE, THREADS = "engine", "server_threads"
# Tokens of a text by which a number of threads is judged
TRIED_TOKENS = 32
# Of the memory that is free, what servers may take; of a model's file, what its server takes
USABLE, OVERHEAD = 0.8, 1.2
# Ids that a server is asked to decode, to see whether it has the target's tokenizer
CHECKED_TOKENS = 64
# Requests that a server decodes side by side where they arrive at random
ARRIVING_SLOTS = 8


def run(config: ServerConfig) -> Outcome:
    """Measure the grid on the engine; status 1 where a server failed or changed a greedy text."""
    prompts = load_prompts(config)
    adapter = adapter_of(config)
    if config.dry_run:
        print_server_plan(config, prompts)
        return Outcome(None)
    folder = resumed(config, COMMAND)
    own_rounds = stored_own_rounds(config)
    # Before weights are loaded and a folder is made
    if config.url is not None:
        _try_addresses(config, adapter, prompts)
    else:
        adapter.check(config)
    work = _open(config, prompts)
    folder = folder or create(config, COMMAND)
    note_or_check(folder, work.describe(), config.seed)
    with measuring(folder, work.device):
        work = work.with_turns(folder)
        _measure(folder, work, adapter)
        _load(folder, work, adapter)
        if work.pair is not None:
            _judge(folder, work, work.pair)
            if config.engine != "own":
                time_own_loop(folder, work.pair, config, own_rounds)
    return concluded(folder, verbose=config.verbose)


# ---- what is asked for ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """What the servers are asked for.

    Attributes:
        config: the command's.
        conversations, prompts: as of `harness.commands.pair.Target`.
        vocabulary: the target's tokenizer.
        pair: both models, where they are loaded here.
    """

    config: ServerConfig
    conversations: tuple[Prompt, ...]
    prompts: tuple[EncodedPrompt, ...]
    vocabulary: Vocabulary
    pair: Pair | None

    @property
    def device(self) -> torch.device:
        """Of the models that are loaded here."""
        return torch.device("cpu") if self.pair is None else self.pair.target_model.device

    @property
    def ks(self) -> list[int]:
        """Every K, plain decoding first."""
        return [0, *(k for k in self.config.k if k)]

    def describe(self) -> dict[str, Any]:
        """The manifest's entries about models, prompts and machine."""
        if self.pair is not None:
            return self.pair.describe()
        names = {"target": self.vocabulary.name, "draft": self.config.draft.name}
        models = {role: {"name": name} for role, name in names.items()}
        return described(self.device, models, self.conversations)

    def with_turns(self, folder: RunFolder) -> "Workload":
        """The same with every turn of every conversation."""
        if self.pair is None:
            return self
        pair = with_turns(folder, self.pair, self.config)
        pair.check_lengths()
        return replace(self, pair=pair, prompts=pair.prompts)

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
        return Request(
            cell=_hash(identity),
            prompt_set=prompt.prompt_set,
            prompt=prompt.id,
            category=prompt.category,
            tokens=entry.tokens,
            sampling=sampling,
            budget=config.new_tokens,
            repetition=visit,
            seed=int(_hash(text)[:8], 16),
            eos=self.vocabulary.eos,
            model=self.vocabulary.name,
            draft=config.draft.name if k else None,
            k=k,
            rule=cast("Rule", config.decode.rule or "ratio"),
            turn=entry.turn,
        )


def _hash(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _open(config: ServerConfig, prompts: Sequence[Prompt]) -> Workload:
    """Load the pair, or the target's tokenizer alone."""
    if config.score:
        pair = open_pair(config, prompts)
        return Workload(config, pair.conversations, pair.prompts, pair.target, pair)
    if any(len(prompt.turns) > 1 for prompt in prompts):
        raise UserError(
            "score=false: later turns continue the target's answers, which need its weights here;"
            " give prompts.max_turns=1"
        )
    with progress(f"loading the tokenizer of {config.model.name}"):
        vocabulary = load_vocabulary(config.model, "model")
    check_thinking(vocabulary.tokenizer, prompts, config.prompts)
    encoded = tuple(
        EncodedPrompt(prompt, encode(vocabulary.tokenizer, prompt, config.prompts))
        for prompt in prompts
    )
    longest = max(len(entry.tokens) for entry in encoded) + config.new_tokens + max(config.k)
    if vocabulary.context_tokens is not None and longest > vocabulary.context_tokens:
        raise UserError(
            f"new_tokens={config.new_tokens}: with the longest prompt and K={max(config.k)} that is"
            f" {longest} tokens, beyond the {vocabulary.context_tokens} of"
            f" model={vocabulary.name}; lower new_tokens or leave the prompt out"
        )
    return Workload(config, tuple(prompts), encoded, vocabulary, None)


@dataclass(frozen=True, order=True)
class Role:
    """What a server is for.

    Attributes:
        k: tokens that it drafts per round; 0 decodes plainly.
        rejects: whether it is told to reject every draft, so that each round emits one token.
    """

    k: int
    rejects: bool = False

    def __str__(self) -> str:
        return f"K={self.k}{', rejecting every draft' if self.rejects else ''}"


@dataclass(frozen=True)
class Task:
    """One request to one server, and where its answer is stored."""

    role: Role
    visit: int
    request: Request
    file: Literal["trials", "starts", "rounds"]

    @property
    def of_rounds(self) -> tuple[int, int, float, int]:
        """What a line of rounds.jsonl says of the request that it is from."""
        request = self.request
        return self.visit, self.role.k, request.sampling.temperature, len(request.tokens)


def _tasks(work: Workload, *, synthetic: bool) -> Iterator[Task]:
    """Every request of a run, in the order it is sent."""
    config, ks = work.config, work.ks
    by_set: dict[str, list[EncodedPrompt]] = {}
    for entry in work.prompts:
        by_set.setdefault(entry.prompt.prompt_set, []).append(entry)
    for visit in range(config.repetitions):
        order = np.random.default_rng((config.seed, visit))
        for entry in work.prompts:
            for temperature in config.temperature:
                for k in map(int, order.permutation(ks)):
                    request = work.request(entry, temperature, k, visit)
                    if not synthetic:
                        short = replace(shorter(request), cell=f"{request.cell}-short")
                        yield Task(Role(k), visit, short, "starts")
                    yield Task(Role(k), visit, request, "trials")
        if not synthetic:
            continue
        # One prompt of each set, of a middle length, the same in each visit
        for entries in by_set.values():
            entry = sorted(entries, key=lambda each: len(each.tokens))[len(entries) // 2]
            for temperature in config.temperature:
                for k in map(int, order.permutation(ks)):
                    request = work.request(entry, temperature, k, visit)
                    for each in (shorter(request), request):
                        yield Task(Role(k, rejects=k > 0), visit, each, "rounds")


def _waiting(folder: RunFolder, tasks: Sequence[Task]) -> list[Task]:
    """The tasks whose answers the folder lacks."""
    finished = {
        "trials": {trial.cell for trial in folder.trials() if trial.status == "ok"},
        "starts": {trial.cell for trial in folder.starts()},
    }
    rounds = Counter(
        (timing.visit, timing.k, timing.temperature, timing.context_tokens)
        for timing in folder.rounds()
    )
    waiting: list[Task] = []
    for task in tasks:
        if task.file != "rounds":
            stored = task.request.cell in finished[task.file]
        else:
            stored = rounds[task.of_rounds] > 0
            rounds[task.of_rounds] -= stored
        if not stored:
            waiting.append(task)
    return waiting


# ---- servers -------------------------------------------------------------------------------------


def _try_addresses(config: ServerConfig, adapter: Adapter, prompts: Sequence[Prompt]) -> None:
    """Attach to every address once: refused ones are the user's to fix before anything begins."""
    assert adapter.attach is not None
    tokenizer = load_vocabulary(config.model, "model").tokenizer
    running = addresses(config, adapter)
    engine = adapter.attach(running, tokenizer)
    with progress("trying the addresses", len(running.urls)) as tick:
        for k in running.urls:
            with engine.open(k) as server:
                _check_vocabulary(server, tokenizer, prompts)
            tick()


def _check_vocabulary(server: Server, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    ids = tokenizer(prompts[0].turns[0], add_special_tokens=False)["input_ids"][:CHECKED_TOKENS]
    server.check_vocabulary(ids, tokenizer.decode(ids))


def _measure(folder: RunFolder, work: Workload, adapter: Adapter) -> None:
    """Ask the servers for what the folder lacks."""
    tasks = list(_tasks(work, synthetic=_is_synthetic(work.config, adapter)))
    waiting = _waiting(folder, tasks)
    roles = sorted({task.role for task in waiting}, key=lambda role: (role.rejects, role.k))
    _forget_failures(folder)
    if not roles:
        return
    _settle_threads(folder, work, adapter)
    serve = _to_serve(folder, work, slots=1)
    for group in _groups(roles, _at_a_time(work, adapter)):
        with ExitStack() as stack:
            servers = _started(stack, group, serve, adapter, work.vocabulary.tokenizer)
            for role, server in servers.items():
                _check_vocabulary(server, work.vocabulary.tokenizer, work.conversations)
                if not role.rejects:
                    _note_engine(folder, server, serve, adapter)
            _visit(folder, work, servers, [task for task in waiting if task.role in servers])


def _to_serve(folder: RunFolder, work: Workload, *, slots: int) -> ToServe:
    """What the engine is asked to serve, with room for so many requests side by side."""
    pair, opened = work.pair, None
    if pair is not None:
        models = (pair.target_model, pair.draft_model)
        opened = OpenedPair(pair.target, pair.draft, *models, Clock(*models).now)
    longest = max(len(entry.tokens) for entry in work.prompts)
    return ToServe(
        config=work.config,
        folder=folder.path,
        context_tokens=longest + work.config.new_tokens,
        slots=slots,
        threads=folder.manifest.get(THREADS),
        pair=opened,
    )


def _settle_threads(folder: RunFolder, work: Workload, adapter: Adapter) -> None:
    """Note how many threads each server gets: as asked for, else the fastest that was tried.

    An engine's own default is all processors, which for a small model, or next to other work, is
    many times slower than one. A resumed run keeps what it began with.
    """
    if work.config.threads != "auto":
        folder.update_manifest({THREADS: int(work.config.threads)})
    start = adapter.start if work.config.url is None and adapter.tries_threads else None
    if THREADS in folder.manifest or start is None:
        return
    cores = psutil.cpu_count(logical=False) or 1
    counts = sorted({1, max(1, cores // 2), cores})
    longest = max(work.prompts, key=lambda entry: len(entry.tokens))
    request = work.request(longest, GREEDY, 0, 0)
    seconds: dict[int, float] = {}
    with progress("choosing the servers' threads", len(counts)) as tick:
        for count in counts:
            serve = replace(_to_serve(folder, work, slots=1), threads=count)
            with start(serve, None).open(0) as server:
                for _ in range(2):  # the second is the one that counts
                    done = server.generate(request.tokens, request.sampling, 0, TRIED_TOKENS)
                    seconds[count] = done.decode_s or done.request_s
            tick()
    folder.update_manifest({THREADS: min(counts, key=lambda count: seconds[count])})


def _load(folder: RunFolder, work: Workload, adapter: Adapter) -> None:
    """Put requests side by side on servers that have room for them, visit by visit."""
    config = work.config
    loads = [Load(rate=config.rate)] if config.rate else []
    if max(config.concurrency) > 1:
        loads += [Load(concurrency=level) for level in config.concurrency]
    stored = {(timing.visit, timing.temperature, timing.k) for timing in folder.loads()}
    visits = [
        (visit, temperature)
        for visit in range(config.repetitions)
        for temperature in config.temperature
    ]
    if not loads:
        return
    slots = max(*config.concurrency, ARRIVING_SLOTS if config.rate else 1)
    serve = _to_serve(folder, work, slots=slots)
    roles = [Role(k) for k in work.ks]
    for group in _groups(roles, _at_a_time(work, adapter)):
        # Plain decoding stands in each group, to be compared with within moments
        compared = [role.k for role in group if role.k] or [0]
        waiting = [each for each in visits if any((*each, k) not in stored for k in compared)]
        if not waiting:
            continue
        with ExitStack() as stack:
            started = _started(stack, group, serve, adapter, work.vocabulary.tokenizer)
            servers = {role.k: server for role, server in started.items()}
            with progress("requests side by side", len(waiting)) as tick, undisturbed():
                for visit, temperature in waiting:
                    random = np.random.default_rng((config.seed, visit))
                    requests = [work.request(e, temperature, 0, visit) for e in work.prompts]
                    requests = [replace(each, draft=config.draft.name) for each in requests]
                    groups = groups_of(requests, slots)
                    # Stored together: half a visit compares nothing
                    clock = _clock(config)
                    done = [*load_visit(servers, groups, loads, visit, random, clock)]
                    for timing in done:
                        folder.append_load(timing)
                    tick()


def _is_synthetic(config: ServerConfig, adapter: Adapter) -> bool:
    """Whether servers can be told to reject every draft, so that their rounds are timed."""
    known = {"everywhere": True, "on CUDA": torch.cuda.is_available(), "nowhere": False}
    return config.url is None and known[adapter.synthetic]


def _clock(config: ServerConfig) -> ServerClock:
    return "cpu" if config.clock == "cpu" else "engine"


def _groups(roles: Sequence[Role], most: int) -> Iterator[list[Role]]:
    """Roles that run side by side, plain decoding in each group where there is room for two."""
    plain_role = Role(0)
    if len(roles) <= most or most == 1 or plain_role not in roles:
        for start in range(0, len(roles), most):
            yield list(roles[start : start + most])
        return
    others = [role for role in roles if role != plain_role]
    for start in range(0, len(others), most - 1):
        yield [plain_role, *others[start : start + most - 1]]


def _at_a_time(work: Workload, adapter: Adapter) -> int:
    """How many servers run side by side."""
    config = work.config
    if config.servers != "auto":
        return int(config.servers)
    if config.url is not None or config.engine == "own":
        return len(work.ks) * 2
    if adapter.alone:
        return 1
    pair = work.pair
    loaded = {} if pair is None else {"model": pair.target, "draft": pair.draft}
    needed = 0
    for key, conf in (("model", config.model), ("draft", config.draft)):
        if conf.gguf is not None:
            needed += Path(conf.gguf).stat().st_size if Path(conf.gguf).is_file() else 0
        elif key in loaded:
            weights = loaded[key].network.parameters()
            needed += sum(tensor.numel() * tensor.element_size() for tensor in weights)
    free = psutil.virtual_memory().available
    if torch.cuda.is_available():
        free = min(free, torch.cuda.mem_get_info()[0])
    return max(1, int(USABLE * free / (OVERHEAD * needed))) if needed else 1


def _started(
    stack: ExitStack, roles: Sequence[Role], serve: ToServe, adapter: Adapter, tokenizer: Any
) -> dict[Role, Server]:
    """Servers that answer, closed with the stack."""
    config = serve.config
    servers: dict[Role, Server] = {}
    with progress(f"starting {config.engine}", len(roles)) as tick:
        for number, role in enumerate(roles):
            if config.url is not None:
                assert adapter.attach is not None
                engine = adapter.attach(addresses(config, adapter), tokenizer)
            else:
                assert adapter.start is not None
                engine = adapter.start(serve, None if config.port is None else config.port + number)
            rates = [0.0] * role.k if role.rejects else None
            servers[role] = stack.enter_context(engine.open(role.k, rates))
            tick()
    return servers


def _note_engine(folder: RunFolder, server: Server, serve: ToServe, adapter: Adapter) -> None:
    """Write the manifest's entry; refuse to resume a run on another engine or version."""
    config, facts = serve.config, server.facts
    counting = facts.counting
    flags: tuple[str, ...] = ()
    if config.url is None:
        assert adapter.start is not None
        engine = adapter.start(serve, None)
        largest = max(config.k)
        flags = tuple(_common(engine.flags(largest), engine.flags(largest + 1)))
    entry = ServingEngine(
        name=facts.name,
        version=facts.version,
        rule=facts.rule,
        first_position=None if counting is None else counting.first_position,
        shortens_last_draft=None if counting is None else counting.shortens_last_draft,
        draft_top_k=facts.draft_top_k,
        clock=_clock(config),
        synthetic=_is_synthetic(config, adapter),
        started=config.url is None,
        urls=tuple(urlsplit(url).netloc for url in config.url or ()),
        flags=flags,
    )
    described, known = plain(asdict(entry)), folder.manifest.get(ENGINE)
    if known is not None and known != described:
        changed = [name for name in described if known.get(name) != described[name]]
        raise UserError(
            f"resume={folder.path}: the engine's {' and '.join(changed)} changed since; one run"
            " cannot mix the two, start a new one without resume="
        )
    if known is None:
        folder.update_manifest({ENGINE: described})


def _common(flags: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    """The flags, with their values, that two command lines share."""
    shared = {*_options(others)}
    for option in _options(flags):
        if option in shared:
            yield from option


def _options(flags: Sequence[str]) -> Iterator[tuple[str, ...]]:
    starts = [index for index, word in enumerate(flags) if word.startswith("--")]
    for start, end in pairwise([*starts, len(flags)]):
        yield tuple(flags[start:end])


def _facts(folder: RunFolder) -> EngineFacts:
    """What the manifest says of the engine."""
    entry = ServingEngine(**folder.manifest[ENGINE])
    counting = None
    if entry.first_position is not None and entry.shortens_last_draft is not None:
        counting = Counting(entry.first_position, entry.shortens_last_draft)
    return EngineFacts(entry.name, entry.version, entry.rule, counting, entry.draft_top_k)


# ---- visits --------------------------------------------------------------------------------------


def _visit(
    folder: RunFolder, work: Workload, servers: Mapping[Role, Server], tasks: Sequence[Task]
) -> None:
    """Send every request, store each answer; a server that dies is asked no more.

    Raises:
        ServerDiedError: the one that decodes plainly, without which nothing can be compared.
    """
    dead: dict[Role, str] = {}

    def died(role: Role, error: ServerDiedError, left: Sequence[Task]) -> None:
        dead[role] = in_one_line(error)
        _note_death(folder, role, dead[role], left)
        if role == Role(0):
            raise ServerDiedError(f"{error}; what was measured is stored, resume={folder.path}")

    longest = max(work.prompts, key=lambda entry: len(entry.tokens))
    with progress("warming the servers up", len(servers)) as tick:
        for role, server in servers.items():
            try:
                for temperature in work.config.temperature:
                    _warm_up(server, work.request(longest, temperature, role.k, 0), work)
            except ServerDiedError as error:
                died(role, error, [task for task in tasks if task.role == role])
            tick()
    with progress("asking the servers", len(tasks)) as tick, undisturbed():
        for number, task in enumerate(tasks):
            if task.role not in dead:
                try:
                    _ask(folder, work, servers[task.role], task)
                except ServerDiedError as error:
                    died(task.role, error, [t for t in tasks[number:] if t.role == task.role])
            tick()


def _warm_up(server: Server, longest: Request, work: Workload) -> None:
    """Send the longest request, so that what a server cannot do shows before anything is stored."""

    def generate(request: Request, budget: int) -> Completion:
        return server.generate(request.tokens, request.sampling, request.seed, budget)

    if generate(longest, longest.budget).decode_s is None:
        # Its prefills are timed by requests for one token, and it may keep those that it has seen
        for entry in work.prompts:
            generate(replace(longest, tokens=entry.tokens), 1)


def _ask(folder: RunFolder, work: Workload, server: Server, task: Task) -> None:
    """Send one request and store what came of it."""
    clock = _clock(work.config)
    served = ask(server, task.request, task.visit, clock)
    facts = server.facts
    if task.file == "trials":
        folder.append_trial(served.trial(facts, clock))
    elif task.file == "starts":
        folder.append_start(served.trial(facts, clock))
    elif served.completion.returned > facts.first_position:  # else there was no round
        folder.append_round(served.rejected_rounds(facts, clock, work.config.draft.name))


def _note_death(folder: RunFolder, role: Role, error: str, left: Sequence[Task]) -> None:
    """Store that a server's remaining requests of this visit failed, so that its cells say so."""
    if role.rejects:
        notes = folder.manifest.get(NOT_MEASURED) or {}
        folder.update_manifest({NOT_MEASURED: {**notes, _rounds_of(role): error}})
        return
    for task in left:
        if task.file == "trials" and task.visit == left[0].visit:
            folder.append_trial(task.request.as_trial(status="failed", error=error))


def _forget_failures(folder: RunFolder) -> None:
    """Forget the rejecting servers that died in the attempt that this one resumes."""
    notes = folder.manifest.get(NOT_MEASURED) or {}
    kept = {what: why for what, why in notes.items() if not what.startswith("rounds at ")}
    if kept != notes:
        folder.update_manifest({NOT_MEASURED: kept})


def _rounds_of(role: Role) -> str:
    return f"rounds at {role}"


# ---- what was returned ---------------------------------------------------------------------------


def _judge(folder: RunFolder, work: Workload, pair: Pair) -> None:
    """Score the returned texts for replay, and hold them against the target's own."""
    facts = _facts(folder)
    trials = [trial for trial in folder.trials() if trial.status == "ok" and trial.tokens]
    prompts = {(entry.prompt.prompt_set, entry.prompt.id): entry for entry in work.prompts}

    def returned(trial: Trial) -> ReturnedText:
        entry = prompts[trial.prompt_set, trial.prompt]
        request = work.request(entry, trial.temperature, trial.k, trial.repetition)
        completion = Completion(
            tokens=trial.tokens or (),
            stop_reason=trial.stop_reason or "budget",
            rounds=trial.rounds,
            drafted=trial.drafted,
            accepted=trial.accepted,
            prefill_s=trial.prefill_s,
            decode_s=trial.decode_s,
            request_s=(trial.prefill_s or 0.0) + (trial.decode_s or 0.0),
            cpu_s=None,
        )
        return ReturnedText(request, completion)

    with unless_broken(folder, "the scores of the returned texts"):
        check_texts(folder, trials, pair, work.config, _likelihoods(trials, returned, pair))
        if facts.counting is not None:
            _score(folder, trials, returned, facts, pair)


def _likelihoods(
    trials: Sequence[Trial], returned: Callable[[Trial], ReturnedText], pair: Pair
) -> list[TextLikelihood]:
    """A test of each temperature above 0 and K."""
    cells: dict[tuple[float, int], list[Trial]] = {}
    for trial in trials:
        if trial.temperature != GREEDY:
            cells.setdefault((trial.temperature, trial.k), []).append(trial)
    with progress("testing the returned texts", len(cells)) as tick:
        tests: list[TextLikelihood] = []
        for _, cell in sorted(cells.items()):
            tests.append(likelihood_test([returned(trial) for trial in cell], pair.target_model))
            tick()
    return tests


def _score(
    folder: RunFolder,
    trials: Sequence[Trial],
    returned: Callable[[Trial], ReturnedText],
    facts: EngineFacts,
    pair: Pair,
) -> None:
    """Score plain decoding's greedy texts, which are every K's, and every sampled text."""
    wanted: dict[tuple[Any, int], Trial] = {}
    for trial in trials:
        if not trial.new_tokens:
            continue
        if trial.temperature != GREEDY:
            wanted[trial.key, trial.k] = trial
        elif trial.k == 0:
            wanted.setdefault((replace(trial.key, repetition=0), 0), replace(trial, repetition=0))
    if wanted.keys() == {(trace.key, trace.k) for trace in folder.traces()}:
        return
    by_k: dict[int, list[Trial]] = {}
    for trial in wanted.values():
        by_k.setdefault(trial.k, []).append(trial)
    traces: list[TextTrace] = []
    with progress("scoring the returned texts", len(by_k)) as tick:
        for k, texts in sorted(by_k.items()):
            scored = score_returned(
                [returned(trial) for trial in texts],
                facts,
                pair.target_model,
                pair.draft_model,
                pair.draft.name,
            )
            traces += [replace(trace, k=k) for trace in scored]
            tick()
    folder.write_traces(traces)
