"""An audition of GGUF files: every draft, K and threshold on the servers that would serve them.

Its steps, each of which leaves a report of what is known (`harness.analysis.served_audition`):

1. The plain server of the target decodes every prompt once. No draft has other texts.
2. For each draft its own server scores these texts, token by token, and servers that reject every
   draft time rounds of each K next to plain tokens. Of a look-up the texts say what it finds, and
   rounds are timed in requests for a few prompts.
3. The draft, K and threshold that replay and these costs find fastest are measured next to plain
   decoding, prompt by prompt, in looks, until the verdict is decided. Where it is not, and another
   draft is expected to be faster than that one was, that draft is measured, too.

A draft that fails is named and the others are ranked. Every answer is stored as it comes, so that a
run that was stopped continues with what it lacks.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from time import monotonic
from typing import Literal

from harness import formatting as fmt
from harness.analysis.cells import latest
from harness.analysis.served_audition import (
    FINALISTS,
    best_by_replay,
    next_finalist,
    served_audition_decided,
)
from harness.analysis.verdict import Candidate
from harness.commands.checks import Vocabularies
from harness.commands.pair import Scoring, described
from harness.commands.progress import progress, say
from harness.commands.run_lifecycle import answer_so_far, begin, measuring, resumable
from harness.commands.run_time import WORTH_SAYING_S, Stopwatch
from harness.commands.server_judging import judge_greedy_texts, scores_by_server
from harness.commands.server_plan import (
    LOOKUP_KS,
    LOOKUP_PROMPTS,
    VISITS,
    AuditionTime,
    audition_time,
    timed_lengths,
)
from harness.commands.server_requests import Task, Workload, entry_of, open_workload, waiting_of
from harness.commands.server_start import (
    check_vocabulary,
    note_engine,
    settle_threads,
    started,
    stored_facts,
    to_serve,
)
from harness.commands.tasks import (
    PLAIN,
    Conversation,
    EncodedPrompt,
    Role,
    ServerTask,
    in_random_order,
    prompts_at,
)
from harness.config import AuditionConfig, ModelConf, ServerConfig, check_ks
from harness.engines.protocol import RefusedError, RequestFailedError, Server
from harness.measurement.clock import undisturbed
from harness.measurement.draft_scores import lookup_traces
from harness.measurement.server_request import ask, decoded
from harness.measurement.target_texts import GeneratedText
from harness.records import (
    GREEDY,
    Failure,
    Prompt,
    RoundTiming,
    StepTiming,
    Trial,
    UserError,
    in_one_line,
    where,
)
from harness.stats.verdict_interval import LOOKS
from harness.storage import RunFolder, load
from harness.storage.manifest import AUDITION, ChosenK, Ended, IneligibleDraft, ServedKs

# Visits that time the rounds of a draft at most, and seconds after which none begins but the first
MOST_VISITS, ROUNDS_S = 12, 30.0
# Tokens of a draft by itself that are timed together, and how often
DRAFT_STEPS, STEP_SAMPLES = 16, 3
# Texts whose scores are stored together
STORED_TOGETHER = 8
UNFIT = "its tokenizer or its context does not fit the target, as the run's first lines say"


def pair_config(config: AuditionConfig, draft: ModelConf) -> ServerConfig:
    """A server run of one of the drafts, of which the audition makes the parts that it needs."""
    shared = ("model", "prompts", "device", "decode", "new_tokens", "threads", "resume", "dry_run")
    shared = (*shared, "results_root", "seed", "flags", "timeout_factor", "temperature")
    ks = [k for k in config.k if k >= draft.spec.least_k]
    check_ks(ks or config.k, draft)
    return ServerConfig(
        **{name: getattr(config, name) for name in shared},
        draft=draft,  # type: ignore[arg-type]
        k=ks,
        p_min=[0.0],
        engine=str(config.engine),
        until="decided",  # one engine for all of them: no pair notes servers of its own
        budget_s=config.budget_s,
        repetitions=1,
    )


@dataclass(frozen=True)
class _Run:
    """An audition while it is measured."""

    folder: RunFolder
    config: AuditionConfig
    works: Mapping[str, Workload]  # by draft
    watch: Stopwatch
    time: AuditionTime | None  # that it is expected to take

    @property
    def first(self) -> Workload:
        """The workload of the first draft, for what is the target's alone."""
        return next(iter(self.works.values()))


def measure_on_servers(
    config: AuditionConfig,
    drafts: Sequence[ModelConf],
    unfit: Sequence[str],
    prompts: Sequence[Prompt],
    read: Vocabularies,
    folder: RunFolder | None,
) -> RunFolder:
    """Measure what the folder lacks; a new one where there is none. `unfit` drafts are named.

    Raises:
        UserError: the plain server does not start, or is not what was asked for.
    """
    works = {conf.name: open_workload(pair_config(config, conf), prompts, read) for conf in drafts}
    first = next(iter(works.values()))
    models = {
        conf.name: {**entry_of(conf), "id": conf.id, "kind": conf.kind}
        for conf in drafts
        if conf.is_file
    }
    models = {"target": entry_of(config.model), **models}
    folder = begin(config, AUDITION, folder, described(first.device, models, prompts))
    notes = tuple(IneligibleDraft(name, UNFIT) for name in unfit)
    folder.note(audition=replace(folder.manifest.audition, not_eligible=notes))
    pairs = {name: work.config for name, work in works.items()}
    time = audition_time(config, pairs, first.prompts)
    run = _Run(folder, config, works, Stopwatch(folder, config.budget_s), time)
    with measuring(folder, first.measured_on):
        try:
            _measure(run)
        except KeyboardInterrupt:
            answer_so_far(folder, "interrupted", page=True)
            raise
        finally:
            notes = folder.manifest.audition
            costs = replace(notes.costs, measured_s=run.watch.spent_s)
            folder.note(audition=replace(notes, costs=costs))
    return folder


def _measure(run: _Run) -> None:
    folder, first = run.folder, run.first
    with resumable(folder):
        settle_threads(folder, first)
    with ExitStack() as stack:
        plain = _open(run, stack, first, PLAIN)
        _decode_plainly(run, plain)
        for number, (name, work) in enumerate(run.works.items(), start=1):
            if run.watch.left_s < 0 and number > 1:
                _note_failure(run, name, f"budget_s={run.config.budget_s:g} was spent before it")
                continue
            try:
                if not work.config.draft.spec.replayed:
                    _measure_alone(run, work, plain)
                else:
                    _score(run, work, plain)
                    _time_rounds(run, work, plain)
            except UserError as error:
                _check_alive(first, plain)
                _note_failure(run, name, in_one_line(error))
                continue
            _note_failure(run, name, None)
            answer_so_far(folder, f"after {number} of {len(run.works)} drafts")
        _measure_best(run, plain)


def _open(run: _Run, stack: ExitStack, work: Workload, role: Role) -> Server:
    """A server that answers, checked and warmed up."""
    with resumable(run.folder):
        servers = stack.enter_context(started(run.folder, work, [role], slots=1))
        server = servers[role]
        check_vocabulary(server, work.vocabulary.tokenizer, work.conversations)
        if not role.rejects:
            note_engine(run.folder, work, server)
        asked = work.request(work.shortest, GREEDY, role.k, 0).asked
        server.generate(asked._replace(budget=min(4, work.config.new_tokens)))
    return server


def _note_failure(run: _Run, name: str, error: str | None) -> None:
    """Note why a draft is not ranked; None where it is, in place of an earlier note."""
    notes = run.folder.manifest.audition
    failures = [each for each in notes.failures if each.where != name]
    if error is not None:
        failures.append(Failure(name, error))
        say(f"{name}: {error}; the other drafts are ranked without it")
    if tuple(failures) != notes.failures:
        run.folder.note(audition=replace(notes, failures=tuple(failures)))


def _check_alive(work: Workload, plain: Server) -> None:
    """Raise where the plain server does not answer: nothing can be compared any more."""
    plain.generate(work.request(work.shortest, GREEDY, 0, 0).asked._replace(budget=1))


# ---- the target's texts --------------------------------------------------------------------------


def _decode_plainly(run: _Run, plain: Server) -> None:
    """Every prompt once, in an order of which every beginning has its share of each set."""
    folder, work = run.folder, run.first
    order = in_random_order(work.prompts, work.config.seed)
    entries = [entry for conversation in order for entry in conversation.turns]
    tasks = work.tasks(ServerTask(PLAIN, 0, entry, GREEDY, "trials") for entry in entries)
    waiting = waiting_of(folder, tasks)
    sizes = [len(task.request.tokens) + task.request.budget for task in waiting]
    begun, time = monotonic(), run.time if len(waiting) == len(tasks) else None
    with progress("decoding the prompts plainly", len(waiting), sizes=sizes) as tick:
        for number, task in enumerate(waiting, start=1):
            folder.trials.append(_answer(work, plain, task))
            tick()
            took_s = monotonic() - begun
            if time is not None and (took_s > WORTH_SAYING_S or number == len(waiting)):
                left = time.left(took_s, sum(sizes[:number]) / sum(sizes))
                say(f"the first texts took {fmt.duration(took_s)}; left: {left.sentence()}")
                time = None  # said once


def _answer(work: Workload, server: Server, task: Task, *, cached: bool = False) -> Trial:
    """The line of a request's answer; one that has none is stored as failed."""
    try:
        served = ask(server, task.request, task.visit, work.clock, cached=cached)
    except (RequestFailedError, RefusedError) as error:
        return task.request.as_trial(status="failed", error=in_one_line(error))
    return served.trial(server.facts, work.clock)


def _texts(run: _Run, work: Workload) -> list[GeneratedText]:
    """The plain server's texts, as far as its rounds emitted them."""
    facts = stored_facts(run.folder)
    trials = where(latest(list(run.folder.trials.read())), status="ok", k=0, repetition=0)
    emitted = [trial for trial in trials if len(trial.tokens or ()) > facts.first_position]
    return [decoded(work.returned(trial), facts) for trial in emitted]


# ---- one draft -----------------------------------------------------------------------------------


def _score(run: _Run, work: Workload, plain: Server) -> None:
    """Score the texts that are not scored by the draft yet, and time steps of the draft."""
    folder, draft = run.folder, work.config.draft
    name = draft.name
    known = {trace.key for trace in folder.traces() if trace.draft == name}
    texts = [text for text in _texts(run, work) if text.request.key not in known]
    most = max(run.config.speculative_ks)
    if draft.spec.looks_up:
        if texts:
            traces = lookup_traces(texts, draft.kind, num_draft_tokens=most, draft_name=name)
            folder.add_traces(traces)
        return
    if not texts and any(timing.model == name for timing in folder.timings()):
        return
    # The threshold has its file asked for by `start_draft`
    least = min(run.config.thresholds, default=0.0)
    asked = replace(work, config=replace(work.config, p_min=[least]))
    engine = work.adapter.start_draft(to_serve(folder, asked, slots=1))
    assert engine is not None  # a file
    with engine.open(0) as server:
        _time_steps(run, work, {"draft": server, "target": plain})
        with progress(f"scoring the texts by {name}", len(texts)) as tick:
            for start in range(0, len(texts), STORED_TOGETHER):
                part = texts[start : start + STORED_TOGETHER]
                how = Scoring(most, tick=tick)
                folder.add_traces(scores_by_server(folder, asked, server, part, how))


def _time_steps(
    run: _Run, work: Workload, servers: Mapping[Literal["draft", "target"], Server]
) -> None:
    """Time tokens of the draft by itself, as one that a threshold drops, next to the target's."""
    entry = _of_long_text(run, work, 1 + DRAFT_STEPS)
    asked = work.request(entry, GREEDY, 0, 0).asked
    asked = asked._replace(budget=1 + DRAFT_STEPS, cached=True)
    samples: dict[Literal["draft", "target"], list[float]] = {role: [] for role in servers}
    for role, server in STEP_SAMPLES * [*servers.items()]:
        done = server.generate(asked)
        if done.decode_s is not None and done.returned > 1:
            samples[role].append(done.decode_s / (done.returned - 1))
    if not all(samples.values()):
        return
    name, length = work.config.draft.name, len(entry.tokens)
    models = {"draft": name, "target": work.config.model.name}
    made = [
        StepTiming(role, models[role], "step", 1, length, 1, tuple(some), beside=name)
        for role, some in samples.items()
    ]
    others = [each for each in run.folder.timings() if each.beside != name]
    run.folder.write_timings([*others, *made])


def _time_rounds(run: _Run, work: Workload, plain: Server) -> None:
    """Time rounds of every K of a draft next to plain tokens."""
    if work.config.draft.spec.looks_up:
        _time_requests(run, work, plain)
        return
    folder, k, name = run.folder, max(run.config.speculative_ks), work.config.draft.name
    first = stored_facts(folder).first_position
    lengths = timed_lengths(run.config.speculative_ks)
    longest = max((len(text.tokens) for text in _texts(run, work)), default=0)
    if longest < max(lengths):
        raise UserError(
            f"its rounds are timed on a text of {max(lengths)} tokens or more, and the longest has"
            f" {longest}; give prompts with longer answers, or a smaller k"
        )
    known = {timing.visit for timing in folder.rounds.read() if timing.draft == name}
    visits = [visit for visit in range(MOST_VISITS) if visit not in known]
    if len(known) >= VISITS:
        return
    entry = _of_long_text(run, work, first + max(lengths))
    with ExitStack() as stack:
        servers = {k: _open(run, stack, work, Role(k, rejects=True)), 0: plain}
        begun = monotonic()
        with progress(f"timing rounds of {name}", len(visits)) as tick, undisturbed():
            for visit in visits:
                if visit >= VISITS and monotonic() - begun > ROUNDS_S:
                    break
                made: list[RoundTiming] = []
                for count, (of_k, server) in product(lengths, servers.items()):
                    (task,) = work.tasks([ServerTask(Role(of_k), visit, entry, GREEDY, "rounds")])
                    request = replace(task.request, budget=count + first)
                    served = ask(server, request, visit, work.clock, cached=True)
                    if served.completion.stop_reason == "budget":  # else it drafted fewer tokens
                        made.append(served.rejected_rounds(server.facts, work.clock, name))
                folder.rounds.append(*made)  # a visit is stored whole
                tick()


def _measure_alone(run: _Run, work: Workload, plain: Server) -> None:
    """Measure a draft that learns from requests, at the largest K, next to plain decoding.

    Every prompt is asked once, for a second time it would know the answer.
    """
    k, visit = max(run.config.speculative_ks), FINALISTS + 1
    work = replace(work, config=replace(work.config, k=[k]))
    order = in_random_order(work.prompts, work.config.seed)
    with ExitStack() as stack:
        servers = {PLAIN: plain, Role(k): _open(run, stack, work, Role(k))}
        for conversation in order:
            if run.watch.left_s < 0.0:
                break
            _measure_part(run, work, conversation.turns, servers, visit)
        judge_greedy_texts(run.folder, work, servers)


def _of_long_text(run: _Run, work: Workload, enough: int) -> EncodedPrompt:
    """The shortest prompt of those whose text has so many tokens, else that of the longest text."""
    tokens = {
        (trial.prompt_set, trial.prompt): len(trial.tokens or ())
        for trial in where(run.folder.trials.read(), status="ok", k=0)
    }

    def place(entry: EncodedPrompt) -> tuple[int, int]:
        of_text = tokens.get((entry.prompt.prompt_set, entry.prompt.id), 0)
        return -min(of_text, enough), len(entry.tokens)

    return min(work.prompts, key=place)


def _time_requests(run: _Run, work: Workload, plain: Server) -> None:
    """Requests of a look-up for the prompts in whose texts it finds most, at a few K.

    Next to each are plain ones. The requests of a look-up are a visit of its own.
    """
    folder, name = run.folder, work.config.draft.name
    stored = where(latest(list(folder.probes.read())), status="ok", draft=name)
    known, visit = {trial.k for trial in stored}, [*run.works].index(name)
    ks = sorted(work.config.speculative_ks)
    few = sorted({ks[len(ks) // 2], ks[-1]})[-LOOKUP_KS:]
    if known >= {*few}:
        return
    found = sorted(
        where(folder.traces(), draft=name),
        key=lambda trace: -float((trace.draft_is_argmax[:, :1]).mean()),
    )
    most = [work.entry(trace.prompt_set, trace.prompt) for trace in found[: 3 * LOOKUP_PROMPTS]]
    entries = sorted(most, key=lambda entry: len(entry.tokens))[:LOOKUP_PROMPTS]
    with ExitStack() as stack:
        servers = {k: _open(run, stack, work, Role(k)) for k in few} | {0: plain}
        with progress(f"timing rounds of {name}", len(entries)) as tick, undisturbed():
            for entry in entries:
                for k, server in servers.items():
                    whole, part = work.tasks(
                        ServerTask(Role(k), visit, entry, GREEDY, file, file == "starts")
                        for file in ("probes", "starts")
                    )
                    folder.probes.append(_answer(work, server, whole))
                    folder.starts.append(_answer(work, server, part, cached=True))
                tick()


# ---- the best of them ----------------------------------------------------------------------------


def _measure_best(run: _Run, plain: Server) -> None:
    """Measure the best candidate next to plain decoding, and the next one where that is called for.

    A run that was stopped goes on with the finalist that it was at.
    """
    folder, ks = run.folder, run.folder.manifest.served_ks
    measured = any(trial.k for trial in folder.trials.read())
    if ks is None or not ks.chosen or not measured:
        best = best_by_replay(load(folder.path))
        if best is None:
            return
        ks = _with_finalist(run, ServedKs(()), best)
    while True:
        if ks.ended in (None, "budget") and not _measure_finalist(run, plain, ks):
            if len(ks.chosen) > 1:
                return  # the first one is measured
            find, ks = best_by_replay, replace(ks, chosen=())  # its draft is left out
        else:
            find, ks = next_finalist, folder.manifest.served_ks or ks
        if len(ks.chosen) == FINALISTS or run.watch.left_s < 0.0:
            return
        following = find(load(folder.path))
        if following is None or following.draft not in run.works:
            return
        ks = _with_finalist(run, ks, following)


def _with_finalist(run: _Run, ks: ServedKs, finalist: Candidate) -> ServedKs:
    """What is measured, noted with one finalist more."""
    before = tuple(replace(each, looks=each.looks or ks.made) for each in ks.chosen)
    draft, k, p_min = finalist
    ks = ServedKs((*ks.started, k), (*before, ChosenK(GREEDY, k, draft=draft, p_min=p_min)))
    run.folder.note(served_ks=ks)
    return ks


def _measure_finalist(run: _Run, plain: Server, ks: ServedKs) -> bool:
    """Measure the last of the finalists, in looks; False where its server fails."""
    from harness.reporting.sentences.verdict import pair

    chosen = ks.chosen[-1]
    work = run.works.get(str(chosen.draft))
    if work is None or not chosen.k:
        return False
    work = replace(work, config=replace(work.config, p_min=[chosen.p_min], k=[chosen.k]))
    order = in_random_order(work.prompts, work.config.seed)
    named = pair(chosen.draft, chosen.k, chosen.p_min or None)
    best = "fastest by replay" if len(ks.chosen) == 1 else "expected to be faster than that"
    say(f"{best}: {named}; it is measured next to plain decoding")
    with ExitStack() as stack:
        try:
            servers = {PLAIN: plain, Role(chosen.k): _open(run, stack, work, Role(chosen.k))}
            _look(run, work, order, servers, ks)
        except UserError as error:
            _check_alive(work, plain)
            _note_failure(run, str(chosen.draft), in_one_line(error))
            return False
    return True


def _look(
    run: _Run,
    work: Workload,
    order: Sequence[Conversation],
    servers: Mapping[Role, Server],
    ks: ServedKs,
) -> None:
    """Measure the prompts look by look, until they decide or the time is spent."""
    folder, begun, before, visit = run.folder, monotonic(), ks.made, len(ks.chosen)
    for look in range(before + 1, LOOKS + 1):
        first, last = (prompts_at(len(order), number) for number in (look - 1, look))
        entries = [entry for each in order[first:last] for entry in each.turns]
        _measure_part(run, work, entries, servers, visit)
        judge_greedy_texts(folder, work, servers)
        ended: Ended | None = None
        decided = run.config.until == "decided"
        if decided and served_audition_decided(load(folder.path), look):
            ended = "decided"
        elif look == LOOKS:
            ended = "prompts"
        elif (monotonic() - begun) / (look - before) > run.watch.left_s:
            ended = "budget"
        ks = replace(ks, made=look, ended=ended)
        folder.note(served_ks=ks)
        if ended is not None:
            break
        answer_so_far(folder, f"answer after look {look} of {LOOKS}")


def _measure_part(
    run: _Run,
    work: Workload,
    entries: Sequence[EncodedPrompt],
    servers: Mapping[Role, Server],
    visit: int,
) -> None:
    """Every prompt on both servers, one after the other; which is first alternates."""
    folder = run.folder
    done = {trial.cell for trial in where(folder.trials.read(), status="ok")}
    with progress("measuring", len(entries)) as tick, undisturbed():
        for number, entry in enumerate(entries):
            roles = [*servers] if number % 2 else [*servers][::-1]
            tasks = work.tasks(ServerTask(role, visit, entry, GREEDY, "trials") for role in roles)
            if any(task.request.cell not in done for task in tasks):
                for task in tasks:
                    folder.trials.append(_answer(work, servers[task.role], task))
            tick()
