"""Servers of a run: how many stand side by side, with how many threads, and which engine they are.

Servers, one per K and one that decodes plainly, stand side by side where the memory allows it.
"""

import gc
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import pairwise, product, takewhile
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import psutil
import torch

from harness.analysis.cells import latest
from harness.analysis.looks import most_started
from harness.commands.pair import Pair
from harness.commands.progress import progress
from harness.commands.requests import sampling_of
from harness.commands.server_requests import Workload
from harness.commands.tasks import PLAIN, Role, load_slots, priced_by_other_sets, varying_roles
from harness.config import ServerConfig
from harness.decoding.protocols import Drafter
from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.draft_kinds import DRAFTS
from harness.engine_facts.engines import ENGINES, OWN, spec_of
from harness.engines.adapters import Adapter, ToServe, attached, served_kind
from harness.engines.http_server import CardMemory, StartedEngine
from harness.engines.own import OwnLoop
from harness.engines.protocol import Asked, EngineFacts, Server, ServerDiedError
from harness.measurement.clock import Clock
from harness.measurement.environment import fewest_threads
from harness.measurement.generations import drafter_of
from harness.measurement.server_request import check_drafts, unlikely_share
from harness.models.device import resolve_device
from harness.models.gguf_file import GgufTokenizer, bytes_of
from harness.models.load import memory_need
from harness.records import (
    GREEDY,
    Prompt,
    Rule,
    ServerCommand,
    ServerMemory,
    ServingEngine,
    UserError,
    Varying,
    in_one_line,
)
from harness.storage import RunFolder
from harness.storage.resume import check_engine

_log = logging.getLogger(__name__)
# The user's flags of servers that take several cards; a number follows
SPREAD_FLAGS = re.compile(r"--?(tp|pp|dp|(tensor|pipeline|data)-parallel)(-size)?")
# Tokens of a text by which an address is tried, or a number of threads judged
TRIED_TOKENS = 32
# Texts by which a model is told from another, and the share of tokens that no rounding explains
TRIED_TEXTS, OTHER_MODEL = 4, 0.1
# Of the greedy tokens of two servers of one model, so many at least are the same up to where a text
# parts: rounding parts one now and then, another model most of them after a few tokens
ALIKE = 0.75
# Of the memory that is free, what servers may take; of a model's file, what its server takes
USABLE, OVERHEAD = 0.8, 1.2
# Ids that a server is asked to decode, to see whether it has the target's tokenizer
CHECKED_TOKENS = 64
T = TypeVar("T")


def try_addresses(
    config: ServerConfig, adapter: Adapter, prompts: Sequence[Prompt], tokenizer: Any
) -> None:
    """Attach to every address once: refused ones are the user's to fix before anything begins."""
    if config.not_with_url:
        _log.warning("not used with url=, whose servers run: %s", ", ".join(config.not_with_url))
    engine, plain = attached(config, adapter, tokenizer), None
    with progress("trying the addresses", len(engine.urls)) as tick:
        for k in engine.urls:
            with engine.open(k) as server:
                if room := _too_few_slots(config, server):
                    _log.warning("url=%s%s", engine.urls[k], room)
                ids = check_vocabulary(server, tokenizer, prompts)
                check_drafts(server, server.generate(_tried(config, ids, config.temperature[0])))
                if plain is None:
                    plain = server
                    _refuse_the_drafts_model(server, config)
                else:
                    _refuse_two_models(plain, server, config, tokenizer, prompts)
            tick()


def _refuse_the_drafts_model(plain: Server, config: ServerConfig) -> None:
    served, (target, draft) = plain.model_name, (config.model, config.draft)
    if _names(served) & _names(draft.id, draft.gguf) - _names(target.id, target.gguf):
        raise UserError(
            f"{plain.where}: it serves {served}, which is the draft's model; the first address is"
            " that of a server that decodes with the target alone"
        )


def _refuse_two_models(
    plain: Server, server: Server, config: ServerConfig, tokenizer: Any, prompts: Sequence[Prompt]
) -> None:
    """Refuse a server whose model has another name than the plain one's, and writes other texts.

    By themselves neither means much: names can be chosen, and a server that is not lossless, or
    ties in 16 bits, change texts.
    """
    names = plain.model_name, server.model_name
    if None in names or names[0] == names[1]:
        return
    alike, tokens = 0, 0
    for prompt in evenly_spaced(prompts, TRIED_TEXTS):
        ids = tokenizer(prompt.turns[0], add_special_tokens=False)["input_ids"][:CHECKED_TOKENS]
        asked = _tried(config, ids, GREEDY)
        texts = [each.generate(asked).tokens for each in (plain, server)]
        tokens += len(texts[1])
        pairs = zip(*texts, strict=False)
        alike += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if alike < ALIKE * tokens:
        raise UserError(
            f"{plain.where}: another model than that of k={server.k}: it serves {names[0]}, the"
            f" other {names[1]}, and of {tokens} greedy tokens {alike} are the same; the first"
            " address is that of a server that decodes with the target alone"
        )


def evenly_spaced(items: Sequence[T], count: int) -> Sequence[T]:
    """At most `count` items, evenly spaced over the list."""
    return items[:: max(1, len(items) // count)][:count]


def _tried(config: ServerConfig, ids: Sequence[int], temperature: float) -> Asked:
    """The request by which an address is tried."""
    sampling = sampling_of(config.decode, temperature)
    return Asked(ids, sampling, config.seed, min(TRIED_TOKENS, config.new_tokens))


def _names(*names: str | None) -> set[str]:
    """Hub ids or paths as they are written, and last parts, which servers are often named by."""
    known = [name.casefold() for name in names if name is not None]
    return {*known, *(name.rstrip("/").rpartition("/")[2] for name in known)}


def states_of_servers(config: ServerConfig, adapter: Adapter) -> dict[str, str]:
    """The state of each server by its address: who answers, or why nobody does or none can start.

    No request is sent.
    """
    states: dict[str, str] = {}
    if config.url is None:
        try:
            adapter.check(config)
        except UserError as error:  # the plan may be for another machine
            states["not on this machine"] = in_one_line(error)
        return states
    engine = attached(config, adapter, None)
    for k, url in engine.urls.items():
        try:
            with engine.open(k) as server:
                room = _too_few_slots(config, server)
                states[url] = f"answers, {server.facts.spec.name} {server.facts.version}{room}"
        except UserError as error:
            states[url] = in_one_line(error).removeprefix(f"url={url}: ")
    return states


def _too_few_slots(config: ServerConfig, server: Server) -> str:
    """A warning where more requests are in flight than it decodes side by side; else empty."""
    slots, most = server.facts.slots, max(config.concurrency)
    if slots is None or slots >= most:
        return ""
    return f": it decodes {slots} side by side, so that of concurrency={most} the others wait"


def check_vocabulary(server: Server, tokenizer: Any, prompts: Sequence[Prompt]) -> list[int]:
    """Refuse a server that decodes ids as another text than the target's tokenizer; those ids.

    Not where a server of the same file has encoded the prompts.
    """
    if isinstance(tokenizer, GgufTokenizer):
        return []
    ids = tokenizer(prompts[0].turns[0], add_special_tokens=False)["input_ids"][:CHECKED_TOKENS]
    server.check_vocabulary(ids, tokenizer.decode(ids))
    return ids


def check_target(folder: RunFolder, work: Workload, pair: Pair) -> None:
    """Refuse servers whose greedy texts are another model's than the target that is loaded."""
    if work.config.engine == OWN.name:
        return
    stored = latest([*folder.trials.read(), *folder.probes.read()])
    plain = [t for t in stored if t.k == 0 and t.tokens and t.temperature == GREEDY]
    returned = map(work.returned, evenly_spaced(plain, TRIED_TEXTS))
    texts = [replace(text, tokens=text.tokens[:TRIED_TOKENS]) for text in returned]
    share, url = unlikely_share(texts, pair.target_model), work.config.url
    if share <= OTHER_MODEL:
        return
    where = f"url={url[0]}" if url is not None else f"engine={work.config.engine}"
    raise UserError(
        f"{where}: its greedy texts are not those of model={work.config.model.name}: {share:.0%} of"
        " their tokens are far from its likeliest ones. Is it another model? score=false measures"
        " without the weights"
    )


def to_serve(folder: RunFolder, work: Workload, *, slots: int) -> ToServe:
    """The models that the engine is to serve, with room for `slots` requests side by side."""
    loop = None
    if (pair := work.pair) is not None:

        def drafter(sampling: SamplingParameters, k: int) -> Drafter:
            request = work.request(work.prompts[0], sampling.temperature, k, 0)
            return drafter_of(request, pair.drafting)

        loop = OwnLoop(
            pair.target_model,
            drafter,
            pair.target.eos,
            cast("Rule", work.config.decode.rule),
            Clock(*(timed.model for timed in pair.timed)).now,
            drafts_fewer=DRAFTS[served_kind(work.config)].looks_up,
        )
    longest = max(len(entry.tokens) for entry in work.prompts)
    return ToServe(
        config=work.config,
        folder=folder.path,
        context_tokens=longest + work.config.new_tokens,
        slots=slots,
        threads=folder.manifest.server_threads,
        scored_in=_scored_in(work),
        loop=loop,
    )


def _scored_in(work: Workload) -> str | None:
    """The dtype that the target is loaded in to score texts, or will be; None if not known."""
    config = work.config
    if not ENGINES[config.engine].one_dtype:
        return None
    if work.pair is not None:
        return str(work.pair.target.network.dtype).removeprefix("torch.")
    if not config.score or config.model.dtype != "auto":
        return None
    need = memory_need(config.model, resolve_device(config.device.name))
    return None if need is None else str(need.dtype).removeprefix("torch.")


def settle_threads(folder: RunFolder, work: Workload) -> None:
    """Note how many threads each server gets: as asked for, else the fewest that are fast enough.

    An engine's own default is all processors, which for a small model, or next to other work, is
    many times slower than one. A resumed run keeps what it began with. Threads that wait for each
    other take processor time meanwhile, so with `clock=cpu` there is one.
    """
    if work.config.threads != "auto" or work.clock == "cpu":
        asked = 1 if work.config.threads == "auto" else int(work.config.threads)
        folder.note(server_threads=asked)
    tries = work.config.url is None and work.adapter.spec.tries_threads
    start = work.adapter.start if tries else None
    if folder.manifest.server_threads is not None or start is None:
        return
    cores = psutil.cpu_count(logical=False) or 1
    counts = sorted({1, max(1, cores // 2), cores})
    # What it reads hardly matters for what each token takes, and long prompts take long
    asked = work.request(work.shortest, GREEDY, 0, 0).asked._replace(seed=0, budget=TRIED_TOKENS)
    seconds: dict[int, float] = {}
    with progress("choosing the servers' threads", len(counts)) as tick:
        for count in counts:
            serve = replace(to_serve(folder, work, slots=1), threads=count)
            try:
                with start(serve).open(0) as server:
                    for _ in range(2):  # the second is the one that counts
                        done = server.generate(asked)
                        seconds[count] = done.decode_s or done.request_s
            except ServerDiedError as error:
                # More threads than processors are free can take minutes where fewer take a second
                seconds.pop(count, None)
                if count == counts[-1] and not seconds:
                    raise
                _log.warning("threads=%d is not tried further: %s", count, in_one_line(error))
            tick()
    folder.note(server_threads=fewest_threads(seconds))


def is_synthetic(config: ServerConfig) -> bool:
    """True where servers can be told to reject every draft, so that their rounds are timed."""
    known = {"everywhere": True, "on CUDA": torch.cuda.is_available(), "nowhere": False}
    # Look-ups draft as much as they find
    if config.url is not None or DRAFTS[served_kind(config)].looks_up:
        return False
    return known[spec_of(config.engine).synthetic]


def asks_everything(folder: RunFolder) -> bool:
    """True where a run has time for all that it was configured to ask."""
    less = folder.manifest.asked_less
    return less is None or less.everything


def times_rejecting(folder: RunFolder, work: Workload) -> bool:
    """True where a run that measures every K also times servers that reject every draft."""
    config, less = work.config, not asks_everything(folder)
    by_others = priced_by_other_sets(config, work.prompts, less=less)
    return is_synthetic(config) and not by_others


def every_k(folder: RunFolder, config: ServerConfig) -> bool:
    """True where every K is measured: it was asked for, or nothing could choose one."""
    chosen = folder.manifest.served_ks
    return config.until == "all" or (chosen is not None and chosen.why_all is not None)


def side_by_side(roles: Sequence[Role], work: Workload) -> list[list[Role]]:
    """Roles that run side by side, plain decoding in each group where there is room for two."""
    most = _at_a_time(work)
    if len(roles) <= most or most == 1 or PLAIN not in roles:
        return [list(roles[start : start + most]) for start in range(0, len(roles), most)]
    others, most = [role for role in roles if role != PLAIN], most - 1
    return [[PLAIN, *others[start : start + most]] for start in range(0, len(others), most)]


def all_stay(work: Workload) -> bool:
    """True where the plain server fits side by side with all that are started to choose a K."""
    most = most_started(len(work.ks) - 1, len(work.config.temperature))
    return stay(work) and _at_a_time(work) > most


def stay(work: Workload) -> bool:
    """True where servers stay while texts are scored: not on a card, whose memory that takes."""
    started_on_card = torch.cuda.is_available() and work.config.url is None
    return not (work.adapter.spec.alone or (started_on_card and work.pair is None))


def _at_a_time(work: Workload) -> int:
    config = work.config
    if config.servers != "auto":
        return int(config.servers)
    if config.url is not None or config.engine == OWN.name:
        return len(work.ks) * 2
    if work.adapter.spec.alone:
        return 1
    needed = sum(_weight_bytes(work).values())
    free = psutil.virtual_memory().available
    if torch.cuda.is_available():
        free = min(free, torch.cuda.mem_get_info()[0])
    return max(1, int(USABLE * free / (OVERHEAD * needed))) if needed else 1


def _weight_bytes(work: Workload) -> dict[str, int]:
    """Bytes of "model" and "draft", as far as they are known: of files, or of what is loaded."""
    pair, known = work.pair, dict[str, int]()
    if pair is not None:
        entries = {"model": pair.target.describe(), "draft": pair.draft_entry or {}}
        known = {key: entry.get("weights_bytes", 0) for key, entry in entries.items()}
    for conf in (work.config.model, work.config.draft):
        key = conf.keys.group
        if conf.gguf is not None:
            known[key] = bytes_of(Path(conf.gguf))
        elif pair is None and conf.kind == "model" and work.config.url is None:
            # On the CPU, so that no card is asked whether it computes in the dtype
            need = memory_need(conf, torch.device("cpu"))
            known[key] = 0 if need is None else int(need.weight_bytes)
    return known


def _card_memory(work: Workload, k: int, servers: int) -> CardMemory | None:
    """The card's free memory for the next of so many servers; None without a card.

    Servers start on the first card, or with flags of the user's own on the first few, of which the
    fullest counts then, and what it has to hold of the weights is not known.
    """
    if not torch.cuda.is_available():
        return None
    gc.collect()
    torch.cuda.empty_cache()
    words = [word for flag in work.config.flags for word in flag.split("=", 1)]
    wanted = math.prod(
        int(number)
        for name, number in pairwise(words)
        if SPREAD_FLAGS.fullmatch(name.replace("_", "-")) and number.isdecimal()
    )
    cards = range(min(wanted, torch.cuda.device_count()) if wanted > 1 else 1)
    free, total = min(torch.cuda.mem_get_info(card) for card in cards)
    weights = {} if wanted > 1 else _weight_bytes(work)
    loaded = weights.get("model", 0) + (weights.get("draft", 0) if k else 0)
    return CardMemory(free, total, loaded, servers)


@contextmanager
def started(
    folder: RunFolder,
    work: Workload,
    roles: Sequence[Role],
    *,
    slots: int,
    left_out: Callable[[Role, UserError], bool] = lambda *_: False,
) -> Iterator[dict[Role, Server]]:
    """Servers that answer, with room for so many requests side by side; closed at the end.

    `left_out` says whether to go on without a server that does not start or answer.
    """
    config, adapter, serve = work.config, work.adapter, to_serve(folder, work, slots=slots)
    servers: dict[Role, Server] = {}
    with ExitStack() as stack:
        with progress(f"starting {config.engine}", len(roles)) as tick:
            for number, role in enumerate(roles):
                rates = [0.0] * role.k if role.rejects else None
                try:
                    if config.url is not None:
                        engine = attached(config, adapter, work.vocabulary.tokenizer)
                    else:
                        assert adapter.start is not None
                        # Read anew for each: those before it have taken their part
                        memory = None
                        if adapter.spec.alone:
                            memory = _card_memory(work, role.k, len(roles) - number)
                        engine = adapter.start(replace(serve, memory=memory, varying=role.varying))
                        _note_memory(folder, engine, role, slots)
                        if (log := engine.log(role.k, rates)) is not None:
                            tick.say(f"starting {config.engine} at {role} (log: {log})", soon=True)
                    servers[role] = stack.enter_context(engine.open(role.k, rates))
                except UserError as error:
                    if not left_out(role, error):
                        raise
                tick()
        yield servers


def check_card(folder: RunFolder, work: Workload, roles: Sequence[Role]) -> None:
    """Refuse a card with too little free for the largest of these servers, before any is started.

    Raises:
        UserError: what is needed, and what is free.
    """
    start, alone = work.adapter.start, work.adapter.spec.alone
    if work.config.url is not None or start is None or not alone:
        return
    k = max(role.k for role in roles)
    memory = _card_memory(work, k, min(len(roles), _at_a_time(work)))
    serve = replace(to_serve(folder, work, slots=load_slots(work.config)), memory=memory)
    engine = start(serve)
    if isinstance(engine, StartedEngine):
        engine.memory_flags(k)


def _note_memory(folder: RunFolder, engine: Any, role: Role, slots: int) -> None:
    if not isinstance(engine, StartedEngine) or engine.memory is None:
        return
    flags = engine.memory_flags(role.k)
    if flags:
        memory = asdict(engine.memory)
        entry = ServerMemory(role.k, slots, **memory, flags=flags, rejects=role.rejects)
        folder.note(server_memory=(*folder.manifest.server_memory, entry))


def note_engine(folder: RunFolder, work: Workload, server: Server) -> None:
    """Write the manifest's entry; refuse to resume a run on another engine or version."""
    config, facts = work.config, server.facts
    counting, most = facts.spec.counting, load_slots(config)
    alone = () if config.url is not None else product(sorted({1, most}), map(Role, work.ks))
    commands = [_command(folder, work, role, slots) for slots, role in alone]
    varying: dict[Varying, ServerCommand] = {}
    for role in varying_roles(config):
        command = _command(folder, work, role, most)
        if command is not None:
            varying[role.varying] = command
    entry = ServingEngine(
        name=facts.spec.name,
        version=facts.version,
        rule=facts.rule,
        first_position=None if counting is None else counting.first_position,
        shortens_last_draft=None if counting is None else counting.shortens_last_draft,
        draft_top_k=facts.spec.draft_top_k,
        draft_by_temperature=facts.spec.draft_by_temperature,
        clock=work.clock,
        synthetic=every_k(folder, config) and times_rejecting(folder, work),
        started=config.url is None,
        urls=tuple(urlsplit(url).netloc for url in config.url or ()),
        commands=tuple(each for each in commands if each is not None),
        varying=varying,
        dtype=to_serve(folder, work, slots=1).dtype if work.adapter.spec.one_dtype else None,
    )
    if folder.manifest.engine is None:
        folder.note(engine=entry)
    else:
        check_engine(folder.path, folder.manifest.engine, entry)


def stored_facts(folder: RunFolder) -> EngineFacts:
    """The engine that the run began with, which `note_engine` has found to be this one."""
    entry = folder.manifest.engine
    assert entry is not None  # the servers answered
    return EngineFacts(spec_of(entry.name), entry.version, entry.rule)


def _command(folder: RunFolder, work: Workload, role: Role, slots: int) -> ServerCommand | None:
    """How a server is started, with paths below the current folder that start there."""
    assert work.adapter.start is not None
    serve = replace(to_serve(folder, work, slots=slots), varying=role.varying)
    command = work.adapter.start(serve).command(role.k)
    if command is None:
        return None
    below = rf"(?<![\w./-]){re.escape(f'{Path.cwd()}/')}"
    lines = (re.sub(below, "", line) for line in (command.line, command.production))
    return replace(command, **dict(zip(("line", "production"), lines, strict=True)))
