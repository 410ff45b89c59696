"""Which engines there are: one table, engine to adapter, read by the command `server`.

An engine is added here: the rules that it can accept by, whether synthetic acceptance times its
rounds, and the functions that start its servers or attach to those that run.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from harness.config import ModelConf, ServerConfig
from harness.decoding.protocols import Drafter
from harness.decoding.sampling import SamplingParameters
from harness.engines.http_server import AttachedEngine, CardMemory, HttpServer, Running
from harness.engines.llamacpp import LlamaCpp, LlamaCppServer, program
from harness.engines.openai import OpenAiServer
from harness.engines.protocol import StartableEngine
from harness.engines.sglang import Sglang, SglangServer
from harness.engines.vllm import Vllm, VllmServer
from harness.records import RULES, Rule, UserError
from harness.serving.drafts import DRAFTS, DraftKind

if TYPE_CHECKING:
    from harness.models.cached import CachedModel
    from harness.models.load import LoadedModel


@dataclass(frozen=True)
class OpenedPair:
    """A target whose weights are here, with what drafts for it.

    Attributes:
        target, draft: as they were loaded; no draft where it is no model of its own.
        target_model: the target with a cache.
        drafter: makes the drafter of a request from how it is sampled and its K.
        now: seconds, read after the models' devices have finished.
    """

    target: "LoadedModel"
    draft: "LoadedModel | None"
    target_model: "CachedModel"
    drafter: Callable[[SamplingParameters, int], Drafter]
    now: Callable[[], float]


@dataclass(frozen=True)
class ToServe:
    """What an engine is to serve.

    Attributes:
        config: the command's.
        folder: the run's; servers' logs and converted models go into folders of it.
        context_tokens: of the longest request, prompt and budget.
        slots: requests side by side at most.
        threads: of each server; None leaves them to the engine.
        pair: the models, where they are loaded here.
        memory: of the card that the next server starts on; None where there is none.
    """

    config: ServerConfig
    folder: Path
    context_tokens: int
    slots: int
    threads: int | None
    pair: OpenedPair | None
    memory: CardMemory | None = None

    @property
    def rule(self) -> Rule:
        """By which the servers are to accept."""
        return cast("Rule", self.config.decode.rule)

    @property
    def kind(self) -> DraftKind:
        """Of the draft."""
        return kind_of(self.config)

    @property
    def dtype(self) -> str | None:
        """What both models are to be served in, where servers are started and that is known.

        What the target was loaded in: a server's own `auto` may be another dtype than what its
        texts are scored and replayed in.
        """
        if self.config.url is not None:
            return None
        if self.pair is not None:
            return str(self.pair.target.network.dtype).removeprefix("torch.")
        asked = self.config.model.dtype
        return None if asked == "auto" else asked

    @property
    def logs(self) -> Path:
        """The folder of the servers' logs."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        return logs


@dataclass(frozen=True)
class Adapter:
    """How an engine is used.

    Attributes:
        rules: that its servers can accept by; empty where it cannot be chosen or known.
        attach: what takes over a server that runs, by the configuration and with the target's
            tokenizer; None where there are none.
        start: one server after another, each at the port given, or at a free one for None; None
            where servers are not started here.
        check: what starting needs, before there is a run; raises UserError.
        synthetic: where a server that is started can be told which drafts to accept.
        k_per_request: whether one server drafts any number of tokens, so that one address serves
            every K.
        tries_threads: whether servers with different numbers of threads are tried, where none is
            asked for.
        one_dtype: whether its servers are told one dtype, and hold both models in it.
        alone: whether a server takes all of its device, so that servers run one after the other.
        kinds: of drafts that it serves.
    """

    rules: tuple[Rule, ...]
    attach: Callable[[ServerConfig, Any], Callable[[Running, int], HttpServer]] | None = None
    start: Callable[[ToServe, int | None], StartableEngine] | None = None
    check: Callable[[ServerConfig], None] = lambda _: None
    synthetic: Literal["everywhere", "on CUDA", "nowhere"] = "nowhere"
    k_per_request: bool = False
    tries_threads: bool = False
    one_dtype: bool = False
    alone: bool = False
    kinds: tuple[DraftKind, ...] = ("model",)


def kind_of(config: ServerConfig) -> DraftKind:
    """What kind of draft is to be served."""
    target, draft = config.model, config.draft
    same = (draft.id, draft.gguf) == (target.id, target.gguf)
    if same and (draft.quantization or draft.dtype not in ("auto", target.dtype)):
        return "copy"
    return draft.kind


def adapter_of(config: ServerConfig) -> Adapter:
    """The adapter of `engine=`.

    Raises:
        UserError: a draft that it cannot serve, a rule that it cannot accept by, addresses where it
            takes none or lacks some, or an environment variable that is not set.
    """
    adapter, name = ADAPTERS[config.engine], config.engine
    kind = kind_of(config)
    if kind not in adapter.kinds:
        able = [other for other, each in ADAPTERS.items() if each.start and kind in each.kinds]
        instead = f"; engine={' or '.join(able)} does" if able else ""
        raise UserError(
            f"draft={config.draft.name}: engine={name} does not draft with {DRAFTS[kind].phrase}"
            f" here{instead}"
        )
    rule = config.decode.rule
    if rule is not None and rule not in adapter.rules:
        known = " or ".join(adapter.rules) or "a rule that it does not tell"
        raise UserError(f"decode.rule={rule}: engine={name} accepts by {known}")
    for role, conf in (("model", config.model), ("draft", config.draft)):
        if conf.quantization is not None and name != "own" and config.url is None:
            raise UserError(
                f"{role}.quantization={conf.quantization}: engine={name} serves the weights as they"
                f" are stored; leave it out, or give a quantized checkpoint as {role}.id"
            )
    if config.url is None and adapter.start is None:
        raise UserError(
            f"engine={name}: its servers are not started here; give url=[...] of ones that run"
        )
    if config.url is not None:
        addresses(config, adapter)
        api_key(config.api_key_env)
    return adapter


def addresses(config: ServerConfig, adapter: Adapter) -> dict[int, str]:
    """The servers of `url=` by K: the plain one, then one per K in the order of `k`."""
    urls, ks = config.url or [], [0, *(k for k in config.k if k)]
    if len(urls) == 2 and adapter.k_per_request:
        urls = [urls[0], *[urls[1]] * (len(ks) - 1)]
    if len(urls) != len(ks):
        raise UserError(
            f"url: {len(ks)} servers are needed, and {len(urls)} given; first the one that decodes"
            f" plainly, then those with k={','.join(map(str, ks[1:]))}, in this order"
        )
    return dict(zip(ks, urls, strict=True))


def attached(config: ServerConfig, adapter: Adapter, tokenizer: Any) -> AttachedEngine:
    """The servers of `url=` as an engine; the target's tokenizer is None where none is asked."""
    assert adapter.attach is not None
    server = adapter.attach(config, tokenizer)
    key = api_key(config.api_key_env)
    return AttachedEngine(addresses(config, adapter), server, key, config.timeout_factor)


def api_key(name: str | None) -> str | None:
    """The servers' API key, from the environment variable of that name; None for none."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()  # what a file is read into ends with a line's end
    if not key:
        raise UserError(f"api_key_env={name}: no such variable is set")
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"api_key_env={name}: the key has characters that no header can hold; give it in"
            " printable ASCII"
        )
    return key


# ---- the engines ---------------------------------------------------------------------------------


def _own(serve: ToServe, _: int | None) -> StartableEngine:
    from harness.engines.own import OwnLoop

    pair = serve.pair
    assert pair is not None  # refused with score=false
    return OwnLoop(
        pair.target_model,
        pair.drafter,
        pair.target.eos,
        serve.rule,
        pair.now,
        drafts_fewer=DRAFTS[serve.kind].looks_up,
    )


def _started(serve: ToServe, port: int | None) -> dict[str, Any]:
    """What every engine is started with beside the models."""
    return {
        "logs": serve.logs,
        "context_tokens": serve.context_tokens,
        "threads": serve.threads,
        "revision": serve.config.model.revision,
        "draft_revision": serve.config.draft.revision if not DRAFTS[serve.kind].looks_up else None,
        "kind": serve.kind,
        "rule": serve.rule,
        "slots": serve.slots,
        "port": port,
        "memory": serve.memory,
        "more_flags": tuple(serve.config.flags),
        "timeout_factor": serve.config.timeout_factor,
    }


def _llamacpp(serve: ToServe, port: int | None) -> StartableEngine:
    config = serve.config
    return LlamaCpp(
        _gguf(serve, config.model, "model"),
        _gguf(serve, config.draft, "draft"),
        **_started(serve, port),
        kv_type=config.kv_type,
        flash_attention=cast("Any", config.flash_attention),
    )


def _check_llamacpp(config: ServerConfig) -> None:
    """Refuse files that are not there, none where none can be written, and no program."""
    from harness.engines.gguf_file import gguf_package

    models = {"model": config.model, "draft": config.draft}
    for key, conf in models.items():
        if conf.gguf is not None:
            _check_gguf(Path(conf.gguf), f"{key}.gguf={conf.gguf}")
        elif not config.score:
            raise UserError(f"{key}.gguf: not given, and score=false leaves no weights to convert")
    for key, conf in models.items():
        if conf.gguf is None:
            gguf_package(key)
    program()


def _check_gguf(file: Path, where: str) -> None:
    if not file.is_file():
        raise UserError(f"{where}: no such file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{where}: not a GGUF file, whose first bytes are GGUF")


def _gguf(serve: ToServe, conf: ModelConf, key: str) -> Path:
    """The user's file of a model, else one that is written in the run folder once."""
    from harness.engines.gguf_file import write_gguf

    if conf.gguf is not None:
        return Path(conf.gguf).resolve()
    assert serve.pair is not None  # refused with score=false
    folder = serve.folder / "gguf"
    folder.mkdir(exist_ok=True)
    file = folder / f"{key}.gguf"
    return file if file.exists() else write_gguf(getattr(serve.pair, _ROLES[key]), file)


def _vllm(serve: ToServe, port: int | None) -> StartableEngine:
    return Vllm(*_checkpoints(serve), **_started(serve, port), dtype=serve.dtype or "auto")


def _sglang(serve: ToServe, port: int | None) -> StartableEngine:
    return Sglang(*_checkpoints(serve), **_started(serve, port), dtype=serve.dtype or "auto")


def _checkpoints(serve: ToServe) -> tuple[str, str | None]:
    """The target's and the draft's hub ids or folders; no draft where it has no weights there."""
    from harness.models.load import source_of

    target, draft = serve.config.model, serve.config.draft
    own = DRAFTS[serve.kind].has_own_checkpoint(draft.id, target.id)
    return source_of(target, "model"), source_of(draft, "draft") if own else None


def _rule(config: ServerConfig) -> Rule:
    """By which servers that run accept: as the user says, else as they do by default."""
    return cast("Rule", config.decode.rule or "greedy_draft")


_ROLES = {"model": "target", "draft": "draft"}
ADAPTERS: Mapping[str, Adapter] = {
    "own": Adapter(
        RULES,
        start=_own,
        synthetic="everywhere",
        kinds=(*("model", "eagle3", "mtp", "medusa", "dflash"), *("ngram", "early_exit", "copy")),
    ),
    "llamacpp": Adapter(
        ("greedy_draft", "ratio"),
        attach=lambda config, _: partial(LlamaCppServer, rule=_rule(config)),
        start=_llamacpp,
        check=_check_llamacpp,
        synthetic="everywhere",
        tries_threads=True,
    ),
    "vllm": Adapter(
        ("greedy_draft", "ratio"),
        attach=lambda config, _: partial(VllmServer, rule=_rule(config), kind=kind_of(config)),
        start=_vllm,
        one_dtype=True,
        synthetic="on CUDA",  # its builds for a CPU refuse it
        alone=True,
        kinds=("model", "eagle3", "mtp", "ngram"),
    ),
    "sglang": Adapter(
        ("greedy_draft",),
        attach=lambda *_: SglangServer,
        start=_sglang,
        one_dtype=True,
        alone=True,
        kinds=("model", "eagle3", "mtp"),
    ),
    "mlx": Adapter(
        ("exact_match",),
        attach=lambda _, tokenizer: partial(OpenAiServer, tokenizer=tokenizer, name="mlx"),
        k_per_request=True,
    ),
    "openai": Adapter(
        (),
        attach=lambda _, tokenizer: partial(OpenAiServer, tokenizer=tokenizer),
        kinds=("model", "eagle3", "mtp", "ngram"),
    ),
}
