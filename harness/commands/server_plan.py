"""The time of a run on servers of this machine, and what it leaves out to end within its budget.

A request of median length tells what a token of a prompt and an emitted one take on the plain
server. Before a K is timed its requests are taken to last `SLOWER` times as long as plain ones. A
run that would take longer than `budget_s` asks for less, in this order, until it fits: fewer
visits; texts of half the tokens, down to `SHORT_TEXT`; the first temperature alone; fewer prompts,
with a share of each set, down to `FEW_PROMPTS`; fewer K. A run that does not fit even so is made
until the time is spent, and refused where scoring its texts would take all of it.

An audition on servers is timed as `machine_pace` expects of the target and of each draft. The plain
server's texts then say how much slower or faster the machine is than that, for all that is left.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import psutil
import torch

from harness import formatting as fmt
from harness.analysis.looks import searched_next
from harness.analysis.served_audition import FINALISTS
from harness.commands.progress import progress, say
from harness.commands.run_lifecycle import resumable
from harness.commands.run_time import Stopwatch, about, this_machine
from harness.commands.server_requests import Workload
from harness.commands.server_start import check_card, is_synthetic, started
from harness.commands.tasks import (
    PLAIN,
    EncodedPrompt,
    Role,
    ServerTask,
    ServerTasks,
    everything,
    load_slots,
    server_tasks,
)
from harness.config import AuditionConfig, ModelConf, ServerConfig
from harness.engine_facts.spec import shorter_budget
from harness.measurement.load import requests_of_load
from harness.models.gguf_file import bytes_of, read_model
from harness.models.load import memory_need
from harness.records import UserError
from harness.stats.verdict_interval import LOOKS
from harness.storage import RunFolder
from harness.storage.manifest import AskedLess

# A speculating request's time / a plain one's, and an emitted token's there, before any is timed
SLOWER = 2.0
SHORT_TEXT, FEW_PROMPTS = 64, 12
# Tokens that a server is warmed up with, and that its pace is read off
WARM_TOKENS = 8
# Seconds that a server takes to start at least, an emitted token at least, and a request besides
LEAST_START_S, LEAST_TOKEN_S, REQUEST_S = 1.5, 4e-4, 0.006
# The operations a second of a token that is emitted by itself / those of a matrix product: 0.12 to
# 0.15 measured, a 1.5B in Q4_K_M on one and two processors with AVX-512
TOKEN_SHARE = 0.14
# Bytes a second of a disk
READ_FROM_DISK = 5e8
# Of the budget, what the requests that choose a K may take, and what is planned for of it, for a
# plan is not exact
CHOOSING_SHARE, SAFE_SHARE = 1 / 6, 0.8
# A draft's weights / the target's, before either is read
DRAFT_SHARE = 0.35
# Visits that time the rounds of a draft, at least, and rounds of its largest K in the longest
# request
VISITS, LARGEST = 2, 4
# Prompts whose requests time the rounds of a look-up, and K of it that are timed
LOOKUP_PROMPTS, LOOKUP_KS = 4, 2
# Tokens that a draft is asked for off the text / tokens of the text, where thresholds are replayed
OFF_TEXT = 0.5
# A server's memory / the bytes of its files
OVERHEAD = 1.2


@dataclass(frozen=True)
class Pace:
    """Seconds of a plain server."""

    start_s: float
    prompt_token_s: float
    token_s: float  # an emitted one
    asking_s: float = 0.0  # of a request, besides its tokens

    def request_s(self, prompt_tokens: float, new_tokens: float) -> float:
        return self.asking_s + prompt_tokens * self.prompt_token_s + new_tokens * self.token_s


@dataclass(frozen=True)
class Expected:
    """Seconds of a plan, part by part."""

    choosing: float  # the servers' start, and the requests that price the rounds of a few K
    plain: float  # every text once, by which replay compares K
    measuring: float  # the visits
    judging: float  # the forwards over what was returned, by the weights that score it
    loads: float = 0.0  # requests side by side and at random

    @property
    def total_s(self) -> float:
        return self.choosing + self.plain + self.measuring + self.judging + self.loads

    @property
    def first_look_s(self) -> float:
        return self.total_s - self.measuring * (LOOKS - 1) / LOOKS


def machine_pace(config: ServerConfig) -> Pace | None:
    """The pace of a plain server on this machine's processors, estimated before it is started.

    An emitted token reads every weight once, and a token of a prompt costs two operations each: the
    weights' bytes and number over what the machine reads and multiplies a second, timed for about a
    second. An emitted token takes these operations too, at `TOKEN_SHARE` of that rate. None where
    the servers run elsewhere or on a card, or sizes are not known.
    """
    if config.url is not None or torch.cuda.is_available():
        return None
    model = config.model
    if model.is_file:
        header = read_model(Path(model.id), model.where)
        read_bytes, parameters = header.weights_bytes, header.parameters
    else:
        need = None
        with suppress(UserError):  # of the hub, which a dry run asks for nothing
            need = memory_need(model, torch.device("cpu"))
        if need is None:
            return None
        read_bytes = need.weight_bytes if model.gguf is None else bytes_of(Path(model.gguf))
        parameters = need.weight_bytes / need.dtype.itemsize
    machine = this_machine(config.threads)
    prompt_token_s = 2 * parameters / (1e12 * machine.bf16_tflops)
    read_s = read_bytes / (1e9 * machine.bandwidth_gb_s)
    return Pace(
        max(LEAST_START_S, read_bytes / READ_FROM_DISK),
        prompt_token_s,
        max(LEAST_TOKEN_S, read_s, prompt_token_s / TOKEN_SHARE),
        REQUEST_S,
    )


def expected(
    asked: AskedLess, config: ServerConfig, prompts: Sequence[EncodedPrompt], pace: Pace
) -> Expected:
    """The seconds of a run's requests, one at a time (`harness.commands.tasks.server_tasks`)."""
    tasks = server_tasks(asked, config, prompts, synthetic=is_synthetic(config))

    def seconds(some: Sequence[ServerTask]) -> float:
        return sum(
            pace.request_s(len(task.entry.tokens), task.budget(asked.new_tokens))
            * (SLOWER if task.role.k else 1.0)
            for task in some
        )

    return Expected(
        (1 + SLOWER * tasks.started) * pace.start_s + seconds(tasks.choosing),
        seconds(tasks.plain),
        seconds(tasks.measured),
        _judging_s(config, tasks, asked.new_tokens, pace),
        _loads_s(replace(config, new_tokens=asked.new_tokens), prompts, pace),
    )


class LoadRequests(NamedTuple):
    """The number of requests of loads; half of those side by side are for a part of the budget."""

    side_by_side: int
    at_random: int
    warming: int  # for a part of the budget


def load_requests(config: ServerConfig, prompts: Sequence[EncodedPrompt]) -> LoadRequests:
    """The requests that every server gets side by side, and at random."""
    # Next to each server whose K changes the plain one is asked again
    by_set, slots = prompts_by_set(prompts), load_slots(config)
    servers = 1 + len(config.speculative_ks) + 2 * len(config.varying)
    visits = len(config.temperature) * servers
    each = config.repetitions * visits
    levels = config.concurrency if max(config.concurrency) > 1 else []
    side_by_side = 2 * each * sum(requests_of_load(by_set, level) for level in levels)
    at_random = each * len(config.rate or ()) * requests_of_load(by_set, slots)
    # Every prompt alone, then as many side by side as there are slots
    warming = visits * sum(requests_of_load(by_set, level) for level in (1, slots))
    return LoadRequests(side_by_side, at_random, warming if side_by_side or at_random else 0)


def prompts_by_set(prompts: Sequence[EncodedPrompt]) -> list[int]:
    return [*Counter(entry.prompt.prompt_set for entry in prompts).values()]


def _loads_s(config: ServerConfig, prompts: Sequence[EncodedPrompt], pace: Pace) -> float:
    """Seconds of requests side by side, taken to be as many as they last one after the other."""
    asked, part = load_requests(config, prompts), shorter_budget(config.new_tokens)
    length = sum(len(entry.tokens) for entry in prompts) / len(prompts)
    whole_s, part_s = (pace.request_s(length, tokens) for tokens in (config.new_tokens, part))
    halves = asked.side_by_side / 2
    seconds = halves * (whole_s + part_s) + asked.at_random * whole_s + asked.warming * part_s
    ks = len(config.speculative_ks)
    return seconds * (1.0 + SLOWER * ks) / (1.0 + ks)


def _judging_s(config: ServerConfig, tasks: ServerTasks, new_tokens: int, pace: Pace) -> float:
    """A token costs each model's forward what a prompt's token costs it on the server.

    Of greedy texts the draft reads the plain one, and is asked for a token at each of its positions
    where it is a file of the user's (`Adapter.start_draft`); of sampled ones both models read every
    text.
    """
    if not config.score:
        return 0.0
    texts = [task for task in tasks.measured if task.file == "trials"]
    greedy = [t for t in texts if not t.temperature and not t.role.k and not t.visit]
    sampled = [task for task in texts if task.temperature]
    read = sum(len(task.entry.tokens) + new_tokens for task in greedy) * DRAFT_SHARE
    read += sum(len(task.entry.tokens) + new_tokens for task in sampled) * (1.0 + DRAFT_SHARE)
    asked = config.draft.gguf is not None and config.url is None
    texts = greedy + (sampled if config.model.is_file else [])
    drafted = DRAFT_SHARE * pace.token_s * len(texts) * new_tokens if asked else 0.0
    return read * pace.prompt_token_s + drafted


def fitted(
    config: ServerConfig, prompts: Sequence[EncodedPrompt], pace: Pace, budget_s: float
) -> tuple[AskedLess, Expected]:
    """The most that fits into so many seconds, in the order of the module's docstring; its time."""
    whole = everything(config, prompts)
    asked, needs = whole, Expected(0.0, 0.0, 0.0, 0.0)
    for asked in _ever_less(whole):
        needs = expected(asked, config, prompts, pace)
        while needs.choosing > CHOOSING_SHARE * budget_s and asked.of_each_set > 1:
            asked = replace(asked, of_each_set=asked.of_each_set - 1)
            needs = expected(asked, config, prompts, pace)
        if needs.total_s <= SAFE_SHARE * budget_s:
            break
    return asked, needs


def _ever_less(asked: AskedLess) -> Iterator[AskedLess]:
    yield asked
    asked = replace(asked, everything=False)
    while asked.repetitions > 1:
        asked = replace(asked, repetitions=ceil(asked.repetitions / 2))
        yield asked
    while asked.new_tokens >= 2 * SHORT_TEXT:
        asked = replace(asked, new_tokens=asked.new_tokens // 2)
        yield asked
    if len(asked.temperature) > 1:
        asked = replace(asked, temperature=asked.temperature[:1])
        yield asked
    while asked.prompts > FEW_PROMPTS:
        asked = replace(asked, prompts=max(FEW_PROMPTS, asked.prompts - 4))
        yield asked
    if len(asked.k) > 2:
        ks = sorted(asked.k)
        yield replace(asked, k=tuple(sorted(searched_next(ks, {}))))


def left_out(asked: AskedLess, whole: AskedLess) -> str:
    """The parts of a run that are not asked for, in words; empty where everything is."""
    parts = (
        ("visits", whole.repetitions, asked.repetitions),
        ("tokens a text", whole.new_tokens, asked.new_tokens),
        ("temperatures", listed(whole.temperature), listed(asked.temperature)),
        ("prompts", whole.prompts, asked.prompts),
        ("K", listed(whole.k), listed(asked.k)),
    )
    return "; ".join(f"{name} {old} -> {new}" for name, old, new in parts if old != new)


def listed(values: Iterable[float]) -> str:
    """Numbers as "1, 2, 0.5"."""
    return ", ".join(f"{value:g}" for value in values)


# ---- the plan of a run --------------------------------------------------------------------------


def planned(folder: RunFolder, work: Workload, watch: Stopwatch) -> Workload:
    """The workload, or what fits into the budget of it, said with how long it will take."""
    if folder.manifest.asked_less is not None:
        return work.asking(folder.manifest.asked_less)
    config, prompts, budget_s = work.config, work.prompts, watch.budget_s
    if budget_s is None or any(trial.status == "ok" for trial in folder.trials.read()):
        return work
    with resumable(folder):
        check_card(folder, work, [Role(k) for k in work.ks])
        pace = _pace(folder, work)
    whole = everything(config, prompts)
    asked, needs = fitted(config, prompts, pace, watch.left_s)
    watch.budget_s = budget_s - needs.judging  # which follows the requests
    if watch.left_s <= 0.0:
        raise UserError(
            f"budget_s={budget_s:g}: scoring the texts alone would take about"
            f" {fmt.duration(needs.judging)} at this machine's pace; give"
            f" budget_s={ceil(watch.spent_s + needs.total_s)}, or fewer prompts"
        )
    if asked != whole:
        folder.note(asked_less=asked)
        work = work.asking(asked)
    if not asked.everything:
        longer = expected(whole, config, prompts, pace)
        say(
            f"everything would take about {fmt.duration(longer.total_s)}, and budget_s="
            f"{budget_s:g}; asked for is less: {left_out(asked, whole)}"
        )
    config = work.config
    texts = f"{len(work.prompts)} prompts of {config.new_tokens} tokens at most"
    free = psutil.virtual_memory().available
    # Beyond the budget nothing further is asked, but what was answered is judged
    most_s = min(needs.total_s, watch.left_s + needs.judging)
    took = f"at most about {fmt.duration(most_s)}"
    if config.until == "decided":
        took = about(min(needs.first_look_s, most_s), most_s)
    say(
        f"plan: {texts}, K = {', '.join(map(str, config.speculative_ks))}: {took} at the machine's"
        f" present pace; this process holds"
        f" {psutil.Process().memory_info().rss / 1e9:.1f} GB while servers are timed, and"
        f" {free / 1e9:.1f} GB are free"
    )
    return work


def _pace(folder: RunFolder, work: Workload) -> Pace:
    """The plain server's pace, by a request of median length for a few tokens."""
    begun, few = monotonic(), max(1, min(WARM_TOKENS, work.config.new_tokens - 1))
    with progress("timing the plain server"), started(folder, work, [PLAIN], slots=1) as servers:
        start_s, server = monotonic() - begun, servers[PLAIN]
        entry, temperature = work.median, work.config.temperature[0]
        if work.shortest is not entry:  # the first request is slow
            first = work.request(work.shortest, temperature, 0, 0).asked
            server.generate(first._replace(budget=1))
        asked = work.request(entry, temperature, 0, 0).asked
        done = server.generate(asked._replace(budget=1 + few))
        decode_s = done.decode_s
        if decode_s is None:  # a difference of two prefills, each with its noise
            one_s = server.generate(asked._replace(budget=1)).request_s
            decode_s = max(0.0, done.request_s - one_s)
    prefill_s = max(0.0, done.request_s - decode_s)
    return Pace(start_s, prefill_s / len(entry.tokens), decode_s / few)


# ---- an audition on servers ----------------------------------------------------------------------


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
    drafts: Mapping[str, float]  # by name, of the scores and the timed rounds of each
    measuring: float  # of all looks at a finalist, as if it were as fast as plain decoding
    finalists: int = 1  # that are measured at most

    @property
    def ranking_s(self) -> float:
        """Until every draft is ranked by replay."""
        return self.plain + sum(self.drafts.values())

    def sentence(self) -> str:
        ranked, look = self.ranking_s, self.measuring / LOOKS
        return (
            f"ranked by replay after about {fmt.duration(ranked)}, and the best one measured after"
            f" {about(ranked + look, ranked + self.finalists * self.measuring)}"
        )

    def left(self, took_s: float, share: float = 1.0) -> "AuditionTime":
        """What is left at the pace of the first plain texts, a share of them that took so long."""
        pace = took_s / (share * self.plain) if self.plain else 1.0
        plain = pace * (1.0 - share) * self.plain
        drafts = {name: pace * seconds for name, seconds in self.drafts.items()}
        return replace(self, plain=plain, drafts=drafts, measuring=pace * self.measuring)


def audition_time(
    config: AuditionConfig, pairs: Mapping[str, ServerConfig], prompts: Sequence[EncodedPrompt]
) -> AuditionTime | None:
    """The time of an audition with each draft's servers; None where these would run on a card."""
    target = machine_pace(next(iter(pairs.values())))
    if target is None:
        return None
    lengths, new = [len(entry.tokens) for entry in prompts], config.new_tokens
    start_s, texts_s = target.start_s, sum(target.request_s(length, new) for length in lengths)
    drafts: dict[str, float] = {}
    for name, pair in pairs.items():
        draft = pair.draft
        if not draft.spec.replayed:
            drafts[name] = start_s + 2.0 * texts_s
            continue
        if draft.spec.looks_up:
            few = sorted(lengths)[:LOOKUP_PROMPTS]
            each_s = sum(target.request_s(length, 1.5 * new) for length in few)
            drafts[name] = LOOKUP_KS * start_s + (1 + LOOKUP_KS) * each_s
            continue
        as_target = ModelConf(name=draft.name, id=draft.id, gguf=draft.gguf)
        pace = machine_pace(replace(pair, model=as_target))
        assert pace is not None
        steps = new * (1.0 + (OFF_TEXT if any(config.p_min or ()) else 0.0))
        scored = sum(pace.request_s(length, steps) + REQUEST_S * steps for length in lengths)
        timed = timed_lengths(config.speculative_ks)
        rounds = VISITS * sum(_rounds_s(target, pace, n, config) for n in timed)
        drafts[name] = 2.0 * pace.start_s + start_s + scored + rounds
    finalists = min(FINALISTS, sum(pair.draft.spec.replayed for pair in pairs.values()))
    return AuditionTime(start_s + texts_s, drafts, start_s + 2.0 * texts_s, finalists)


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
