"""llama.cpp's HTTP server: started here from a binary or the Python wheel, or running elsewhere.

Facts from tools/server of the release (build 11549), also tried with a server:

- `POST /completion` takes token ids and, with `return_tokens`, returns them. Its sampler defaults
  (top_k 40, top_p .95, min_p .05) are switched off in every request, and so is its prompt cache in
  every timed one.
- `n_probs` lists the likeliest tokens of each position. A server that drafts lists none for the
  tokens of a round and gives them a log-probability of 0, so log-probabilities are requested from
  the plain server.
- `timings` has the counters. `draft_n` and `draft_n_accepted` are missing where nothing was
  drafted. `predicted_ms` starts after the first token, which the prefill gives, so it is the time
  of `predicted_n` - 1 tokens; some builds divide by `predicted_n`.
- `timings` has no number of rounds. A text that fills its budget has tokens - 1 - accepted rounds:
  each round emits its accepted tokens and one of the target's own. After an end of text the number
  is `spec_decode_num_drafts_total` of `/metrics` (rounds that drafted anything) where the server
  decodes this request alone, else `draft_n` / K.
- The rounds of a look-up are counted in the same way: one that found nothing emits the target's
  token. After an end of text they are known where that token is not in the prompt, since the
  look-up cannot have found it.
- `/props` has `total_slots`, the requests that are decoded side by side; others wait for a slot.
- MTP layers (`draft-mtp`) are in the target's file or in a file given as the draft's, both made by
  convert_hf_to_gguf.py. No server was run with them here.
- A DFlash drafter (`draft-dflash`) fills K + 1 positions of its block, a DSpark drafter
  (`draft-dspark`) K, or K + 1 where the first position of its block does not draft.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from harness import PACKAGE
from harness.config import ModelConf, ServerConfig
from harness.engine_facts.draft_kinds import DRAFTS, DraftKind, looks_up
from harness.engine_facts.llamacpp import COUNTING, ENUM, SPEC, SPEC_TYPES, drafting_flags
from harness.engine_facts.spec import EngineSpec
from harness.engines.adapters import Adapter, ToServe, rule_of, served_kind, started_with
from harness.engines.counters import CounterNames, Samples
from harness.engines.http_server import (
    HttpServer,
    Interface,
    Running,
    StartedEngine,
    TimedAnswer,
    field_of,
)
from harness.engines.process import ServerProcess
from harness.engines.protocol import (
    Asked,
    Completion,
    EngineFacts,
    Likeliest,
    RefusedError,
    RequestFailedError,
    TokensLostError,
    seconds,
    stop_reason,
    token_ids,
)
from harness.engines.turns import Turn
from harness.models.embedded import folder_of, gguf_of
from harness.models.gguf_file import bytes_of, read_model
from harness.records import NotInstalledError, Rule, UserError

BINARY = "llama-server"
DRAFTED = "llamacpp:spec_decode_num_draft_tokens_total"
ACCEPTED = "llamacpp:spec_decode_num_accepted_tokens_total"
# A round that drafts nothing, as on the budget's last position, is not counted
COUNTERS = CounterNames(
    tokens="llamacpp:tokens_predicted_total",
    rounds="llamacpp:spec_decode_num_drafts_total",
    shown_with="with --metrics",
    drafts_with="--spec-type",
    since="b11368",
    signs=(DRAFTED, ACCEPTED),
    drafted=DRAFTED,
    accepted=ACCEPTED,
    by_position="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
)
SERVER = "llama.cpp's server, build 11368 or later"
ABOUT = ("/props", "build_info")
REPLAYED_LOOKUPS = {kind for kind, spec in DRAFTS.items() if spec.looks_up and spec.replayed}
# The status of a request that is longer than the context
BAD_REQUEST = 400
# Positions of a server that only encodes texts
READ_TOKENS = 64
# Seconds within which a binary must print its help
HELP_S = 60.0


@dataclass(frozen=True)
class LlamaCpp(StartedEngine):
    """A pair that llama.cpp serves on this machine, from GGUF files."""

    spec = SPEC
    ready_s = 300.0  # large models take minutes from a slow disk
    binary = BINARY
    measuring = frozenset(("--spec-draft-threads", "--metrics"))
    variables = ("LLAMA_ARG_", "GGML_")

    def program(self) -> list[str]:
        return program()

    def started_as(self) -> list[str]:
        """The binary, or the module that serves with the wheel and takes the same flags."""
        _, *module = program()
        return ["python", *module] if module else [BINARY]

    def weights_bytes(self, k: int) -> int:
        files = (self.target, self.draft if k else None)
        return sum(bytes_of(Path(file)) for file in files if file is not None)

    def server(self, running: Running, k: int) -> "LlamaCppServer":
        return LlamaCppServer(running, k, self.rule, self.kind, self.p_min)

    def flags(self, k: int, synthetic: Sequence[float] | None = None) -> list[str]:
        flags = {
            "--model": self.target,
            "--ctx-size": self.positions(k) * self.slots,
            "--parallel": self.slots,
        }
        if self.threads is not None:
            flags["--threads"] = self.threads
        if k:
            p_min = 0.0 if synthetic is not None else self.p_min
            flags |= drafting_flags(self.kind, k, p_min, self.rule)
            if not looks_up(self.kind):
                if self.draft is not None:
                    flags["--spec-draft-model"] = self.draft
                if self.threads is not None:
                    flags["--spec-draft-threads"] = self.threads
            if synthetic is not None:
                flags["--spec-synth-rates"] = ",".join(f"{rate:g}" for rate in synthetic)
        options = (str(part) for flag in flags.items() for part in flag)
        # With a unified KV cache all slots share a forward; else only neighbouring slots do
        separate = self.slots == 1 or self._given("--no-kv-unified")
        shared = [] if separate else ["--kv-unified"]
        return [*options, *shared, "--metrics", *self.more_flags]


def program() -> list[str]:
    """The program that starts a server: a binary on PATH, else the wheel's module."""
    binary = shutil.which(BINARY)
    if binary is not None:
        return [binary]
    if find_spec(SPEC.wheel) is not None:
        return [sys.executable, "-m", "harness.engines.xllamacpp_server"]
    raise NotInstalledError(
        f"engine=llamacpp: no {BINARY} on PATH and no wheel of it; `pip install"
        f" {PACKAGE}[llamacpp]`, or give url= of a server that runs"
    )


class LlamaCppServer(HttpServer):
    """One running server of llama.cpp."""

    decoded_field = "content"
    streams = True

    def __init__(
        self,
        running: Running,
        k: int,
        rule: Rule = "greedy_draft",
        kind: DraftKind = "model",
        p_min: float = 0.0,
    ) -> None:
        super().__init__(f"llama.cpp at k={k}", k, running)
        facts = running.client.about(*ABOUT, SERVER)
        self.facts = EngineFacts(
            SPEC,
            _version(str(facts["build_info"]), running.process),
            rule,
            drafts_fewer=looks_up(kind) or p_min > 0.0,
            slots=facts.get("total_slots"),
        )
        self._kind = kind

    def complete(self, asked: Asked, deadline_s: float) -> Completion:
        drafts = self._drafting_rounds(deadline_s)
        answer = self.ask(INTERFACE.path, request_body(asked), deadline_s, asked)
        drafts_now = self._drafting_rounds(deadline_s)
        drafted = None if drafts is None or drafts_now is None else drafts_now - drafts
        return self._completion(answer, asked, drafts=drafted)

    def streamed(self, path: str, body: Mapping[str, Any], deadline_s: float, turn: Turn) -> Any:
        """The whole answer: its last event, with the tokens of all events."""
        turn.sent()
        stream = {**body, "stream": True}
        events = self._client.streamed(
            path, stream, deadline_s, lambda event: turn.arrived(len(event["tokens"]))
        )
        turn.answered()
        tokens = [token for event in events for token in event["tokens"]]
        if events[-1]["timings"]["predicted_n"] != len(tokens):
            # `process_token` in its server-context.cpp sends none of an incomplete character
            raise TokensLostError(f"{self.where}: its stream leaves out tokens", repeatable=False)
        return {**events[-1], "tokens": tokens}

    def posted(self, path: str, body: Mapping[str, Any]) -> Any:
        answer, _ = self._client.repeated(lambda: self._client.post(path, body))
        return answer

    def _drafting_rounds(self, deadline_s: float) -> int | None:
        """The rounds that drafted since the server started; None if plain, or not alone."""
        if not self._alone or self.k == 0:
            return None
        page = str(self._client.get("/metrics", deadline_s))
        counted = Samples.of(page).sums.get(COUNTERS.rounds)
        return None if counted is None else int(counted)

    def _completion(self, answer: TimedAnswer, asked: Asked, *, drafts: int | None) -> Completion:
        where, budget = self.where, asked.budget
        for name in ("tokens", "timings"):
            field_of(answer.body, name, where, SERVER)
        record = parse(answer.body)
        if record.truncated:
            line = f"{where}: its context is too small for prompt and {budget} tokens"
            raise RefusedError(line, BAD_REQUEST)
        if not record.tokens:
            raise RequestFailedError(f"{where}: an answer without tokens", repeatable=False)
        # Both fields are missing where nothing was drafted
        drafted, accepted = record.drafted or 0, record.accepted or 0
        returned = len(record.tokens)
        self.check_drafts(drafted, returned, f"--spec-type {SPEC_TYPES[self._kind]}")
        rounds = None
        if self.k:
            own = returned - COUNTING.first_position - accepted
            if record.stop_reason == "budget":
                rounds = own
            elif not self.facts.drafts_fewer:
                # Not where drafts may be shorter than K, or empty
                left = budget - returned
                rounds = rounds_at_eos(own, drafted, self.k, left=left, drafts=drafts)
            elif self._kind in REPLAYED_LOOKUPS and record.tokens[-1] not in asked.prompt:
                # The end of text was not found in the prompt. A look-up that is not replayed may
                # have found it in other requests.
                rounds = own
        counted = replace(record, rounds=rounds, drafted=drafted, accepted=accepted)
        return self.completion(answer, counted)


def parse(answer: Mapping[str, Any]) -> Completion:
    """The record of an answer of `/completion` or of an OpenAI-compatible path.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is not an answer of llama.cpp.
    """
    timings = answer["timings"]
    (choice, *_) = answer.get("choices") or [{}]
    drafted = timings.get("draft_n")
    tokens = token_ids(answer.get("tokens"))
    entries = answer.get("completion_probabilities") or ()
    return Completion(
        engine="llamacpp",
        counted=int(timings["predicted_n"]),
        k=None if drafted else 0,
        drafted=drafted,
        accepted=timings.get("draft_n_accepted"),
        prefill_s=seconds(timings.get("prompt_ms")),
        decode_s=seconds(timings["predicted_ms"]),
        stop_reason=stop_reason(answer.get("stop_type") or choice.get("finish_reason")),
        tokens=tokens,
        text=answer.get("content"),
        logprobs=tuple(entry.get("logprob") for entry in entries),
        likeliest=_likeliest(tokens, entries),
        truncated=bool(answer.get("truncated")),
        model=answer.get("model"),
        temperature=(answer.get("generation_settings") or {}).get("temperature"),
    )


def _likeliest(tokens: Sequence[int], entries: Sequence[Mapping[str, Any]]) -> Likeliest:
    """The likeliest ids at each token, from llama.cpp's list of log-probabilities.

    A token that leaves a character incomplete has no entry in that list (`process_token` in
    llama.cpp's server-context.cpp), so entries are matched by their ids.
    """
    made, left = list[Mapping[int, float]](), list(entries)
    for token in tokens if entries else ():
        entry = left.pop(0) if left and left[0].get("id") == token else {}
        listed = entry.get("top_logprobs") or ()
        made.append({int(each["id"]): float(each["logprob"]) for each in listed})
    return tuple(made)


def rounds_at_eos(own: int, drafted: int, k: int, *, left: int, drafts: int | None) -> int | None:
    """The rounds of a text that an end-of-text token ended; None if drafts may be shortened.

    That token may be the target's own or an accepted draft token, and builds differ in whether they
    count it, and the tokens drafted after it, as accepted.

    Args:
        own: tokens that rounds emitted, less those counted as accepted.
        drafted: tokens; a full draft has `k`.
        k: tokens of a full draft.
        left: tokens that the budget would still have allowed.
        drafts: rounds that drafted anything, where they were counted.
    """
    if drafts is not None:
        # Only the round at the last position of the budget drafts nothing
        return drafts if left else max(own, drafts)
    full, rest = divmod(drafted, k)
    return full if left >= k and not rest and own <= full <= own + k else None


def request_body(asked: Asked) -> dict[str, Any]:
    """The body of a request with the sampling parameters of the harness, and no others."""
    sampling = asked.sampling
    if sampling.repetition_penalty is not None:
        raise UserError(
            "decode.repetition_penalty: not comparable on llama.cpp, which counts it over another"
            " window; leave it out"
        )
    return {
        "prompt": list(asked.prompt),
        "n_predict": asked.budget,
        "temperature": sampling.temperature,
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "top_k": sampling.top_k or 0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "min_p": sampling.min_p or 0.0,
        "seed": asked.seed % (2**32 - 1),  # the largest of 32 bits asks for a random one
        "cache_prompt": asked.cached,
        "return_tokens": True,
        "n_probs": asked.logprobs,
    }


INTERFACE = Interface("llamacpp", ABOUT, ABOUT, "/completion", request_body, parse, COUNTERS)


def _version(build: str, process: ServerProcess | None) -> str:
    """The version of a server's build, or of the wheel where that has no build number."""
    if process is not None and build.startswith("b0-"):
        with suppress(metadata.PackageNotFoundError):
            return f"{SPEC.wheel} {metadata.version(SPEC.wheel)}"
    return build


# ---- the adapter ---------------------------------------------------------------------------------


def adapter(spec: EngineSpec) -> Adapter:
    return Adapter(
        spec,
        attach=lambda config, _: partial(
            LlamaCppServer, rule=rule_of(config), kind=served_kind(config)
        ),
        start=lambda serve: LlamaCpp(*_files(serve.config), **started_with(serve)),
        start_draft=_started_draft,
        check=_check,
    )


def _files(config: ServerConfig) -> tuple[Path, Path | None]:
    """The target's file and the draft's; none for a look-up and for MTP layers of the target's."""
    in_target = config.draft.kind == "mtp" and config.draft.gguf is None
    if in_target and config.model.gguf is None:
        raise UserError("draft=mtp: give model.gguf, a conversion that has the MTP layers")
    alone = in_target or config.draft.spec.looks_up
    return _file_of(config.model), None if alone else _file_of(config.draft)


def _started_draft(serve: ToServe) -> LlamaCpp | None:
    """The engine that serves the user's draft file alone; None where the draft is no such file.

    With a threshold also a file that ships with the harness.
    """
    given = started_with(serve)
    if given["kind"] != "model" or not (serve.config.draft.gguf or serve.config.threshold):
        return None
    logs = given["logs"] / "draft"
    logs.mkdir(exist_ok=True)
    given |= {"logs": logs, "varying": "", "schedule": ()}
    return LlamaCpp(_file_of(serve.config.draft), None, **given)


def _check(config: ServerConfig) -> None:
    """Refuse a missing GGUF file, a missing llama-server, or one without the kind of draft."""
    kind, draft = config.draft.kind, f"draft={config.draft.name}"
    positions = {"dflash": {"K+1": 1}, "dspark": {"K": 0, "K+1": 1}}.get(kind)
    if positions and config.score:
        filled = [[k + more for k in config.speculative_ks] for more in positions.values()]
        if [config.draft.block] not in filled:
            either = " or ".join(positions)
            raise UserError(
                f"{draft}: llama.cpp fills {either} positions of a block, and replay draft.block of"
                f" them; give one K, and draft.block={either}"
            )
    _files(config)
    files = [conf for conf in (config.model, config.draft) if conf.is_file]
    of_file = {conf.id: conf.where for conf in reversed(files)}  # both may be in one
    sizes = {where: read_model(Path(file), where).weights_bytes for file, where in of_file.items()}
    total, needed = psutil.virtual_memory().total, sum(sizes.values())
    if needed > total and not torch.cuda.is_available():  # a card takes a part of them
        raise UserError(
            f"{' and '.join(sizes)}: {needed / 1e9:,.3g} GB of weights, and this machine has"
            f" {total / 1e9:,.3g} GB of memory; take files of fewer bits"
        )
    _check_build(kind, draft)


@contextmanager
def reading(file: Path, flags: Sequence[str]) -> Iterator[Callable[[str, Mapping[str, Any]], Any]]:
    """A server of a file, while it encodes texts; yields what sends a body to one of its paths."""
    with TemporaryDirectory() as logs:
        engine = LlamaCpp(file, None, Path(logs), READ_TOKENS, more_flags=tuple(flags))
        with engine.open(0) as server:
            assert isinstance(server, LlamaCppServer)
            yield server.posted


def _check_build(kind: DraftKind, where: str) -> None:
    """Refuse a build without this kind of draft; a build that does not list its kinds is tried."""
    start, wanted = program(), SPEC_TYPES.get(kind)
    if len(start) == 1:
        help_text = subprocess.run(
            [*start, "--help"], capture_output=True, text=True, timeout=HELP_S, check=False
        ).stdout
        listed = re.search(r"--spec-type\s+(\S+)", help_text)
        names = set(re.findall(r"[a-z0-9-]+", listed[1])) if listed else set[str]()
    else:
        enum = vars(import_module(SPEC.wheel).common_speculative_type)
        values = (name.removeprefix(ENUM) for name in enum if name.startswith(ENUM))
        names = {name.lower().replace("_", "-") for name in values}
    has = sorted(name for name in names if name.startswith(("draft", "ngram")))
    if has and wanted is not None and wanted not in has:
        raise UserError(
            f"{where}: {start[0]} is a build without --spec-type {wanted}; it has"
            f" {', '.join(has)}: take a newer one"
        )


def _file_of(conf: ModelConf) -> Path:
    """The user's GGUF file of a model, else the one that ships with it."""
    shipped = folder_of(conf.id)
    # Not resolved: files of the hub's cache are links, and a split model's parts go by their names
    if conf.gguf is not None:
        where, file = conf.keys.of("gguf", conf.gguf), Path(conf.gguf).absolute()
    elif shipped is not None and conf.dtype in ("auto", "float32") and conf.weights != "dummy":
        where, file = conf.where, gguf_of(shipped)
    else:
        raise UserError(
            f"{conf.keys.of('gguf')}: not given; llama.cpp's convert_hf_to_gguf.py makes the file"
            f" of a checkpoint: {conf.keys.of('gguf', 'FILE')}"
        )
    if conf.is_file:
        return read_model(file, conf.where).path
    if not file.is_file():
        raise UserError(f"{where}: no such file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{where}: not a GGUF file, whose first bytes are GGUF")
    return file
