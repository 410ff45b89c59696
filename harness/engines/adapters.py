"""The adapter of each engine, by which the command `server` starts servers or attaches to them.

The function `adapter` of an engine is in the module that its record names (`EngineSpec.client`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from harness.config import ServerConfig
from harness.engine_facts.draft_kinds import DRAFTS, DraftKind
from harness.engine_facts.engines import ENGINES, OWN, measurable
from harness.engine_facts.spec import EngineSpec
from harness.engines.http_client import WantedModel
from harness.engines.http_server import AttachedEngine, CardMemory, HttpServer, Running
from harness.engines.protocol import Engine
from harness.records import Rule, UserError, Varying


@dataclass(frozen=True)
class ToServe:
    """The pair and the settings that an engine is to serve."""

    config: ServerConfig
    folder: Path  # of the run; servers' logs go into a folder of it
    context_tokens: int  # of the longest request, prompt and budget
    slots: int  # requests side by side at most
    threads: int | None  # of each server; None leaves them to the engine
    memory: CardMemory | None = None  # of the card that the next server starts on, if any
    varying: Varying = ""  # how the K of the next server changes while it serves
    # The dtype in which the target is loaded to score texts, or will be; None where it will not be
    # loaded, or the configuration names the dtype
    scored_in: str | None = None
    loop: Engine | None = None  # the harness's loop with the loaded pair, where it is loaded

    @property
    def dtype(self) -> str | None:
        """The dtype to serve both models in; None where it is not known or servers are running.

        It is the dtype in which the target is loaded, since the `auto` of a server may be another
        dtype than the one in which its texts are scored and replayed.
        """
        if self.config.url is not None:
            return None
        asked = self.config.model.dtype
        return self.scored_in or (None if asked == "auto" else asked)


@dataclass(frozen=True)
class Adapter:
    """The functions by which an engine is used."""

    spec: EngineSpec
    # Takes the configuration and the target's tokenizer, and returns the function that makes the
    # client of a running server; None where the engine has no servers
    attach: Callable[[ServerConfig, Any], Callable[[Running, int], HttpServer]] | None = None
    # Returns the engine that starts servers; None where they cannot be started here
    start: Callable[[ToServe], Engine] | None = None
    # Returns the engine that serves the draft model alone, without speculation, with the kernels
    # that draft on a speculating server; None on other engines, and where the draft is not a file
    # of the user's
    start_draft: Callable[[ToServe], Engine | None] = lambda _: None
    # Checks before the run that servers can be started; raises UserError
    check: Callable[[ServerConfig], object] = lambda _: None


def served_kind(config: ServerConfig) -> DraftKind:
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
    spec, name = ENGINES[config.engine], config.engine
    adapter, kind, draft = _adapter(spec), served_kind(config), f"draft={config.draft.name}"
    if kind not in spec.drafts:
        able = [other for other, each in measurable().items() if kind in each.drafts]
        able = [other for other in able if _adapter(ENGINES[other]).start is not None]
        instead = f"; engine={' or '.join(able)} does" if able else ""
        lookups = [each for each in spec.drafts if DRAFTS[each].looks_up]
        if DRAFTS[kind].looks_up and lookups:
            instead = f"; its own look-up is draft={' or '.join(lookups)}"
        phrase = DRAFTS[kind].phrase
        raise UserError(f"{draft}: engine={name} does not draft with {phrase} here{instead}")
    rule = config.decode.rule
    if rule is not None and rule not in spec.rules:
        known = " or ".join(spec.rules) or "a rule that it does not tell"
        raise UserError(f"decode.rule={rule}: engine={name} accepts by {known}")
    variants = (each for each in ENGINES.values() if each.variant_of == name and each.rule == rule)
    variant = next(variants, None)
    if variant is not None and kind not in variant.lines:
        able = " or ".join(DRAFTS[each].phrase for each in variant.lines if each in spec.drafts)
        raise UserError(
            f"decode.rule={rule}: engine={name} accepts the drafts of {able} by it, and {draft} is"
            f" {DRAFTS[kind].phrase}; leave decode.rule out"
        )
    for varying in config.varying:
        _check_varying(config, spec, varying)
    for role, conf in (("model", config.model), ("draft", config.draft)):
        if conf.quantization is not None and name != OWN.name and config.url is None:
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


def _check_varying(config: ServerConfig, spec: EngineSpec, varying: Varying) -> None:
    """Refuse a K that changes, where the engine, or the draft on it, does not have that."""
    asked = "schedule" if varying == "schedule" else f"k={varying}"
    known = spec.varying.get(varying)
    if known is None:
        having = (other for other in measurable().values() if varying in other.varying)
        listed = " and ".join(
            f"engine={other.name} ({other.varying[varying].flag})" for other in having
        )
        raise UserError(
            f"{asked}: a server of engine={spec.name} keeps one K; {listed} change it while they"
            " serve"
        )
    if served_kind(config) not in known.kinds:
        raise UserError(
            f"{asked}: engine={spec.name} does that ({known.flag}) with {known.takes} alone, and"
            f" draft={config.draft.name} is {DRAFTS[served_kind(config)].phrase}"
        )


def _adapter(spec: EngineSpec) -> Adapter:
    assert spec.client is not None
    return import_module(spec.client).adapter(spec)


def addresses(config: ServerConfig, adapter: Adapter) -> dict[int, str]:
    """The addresses of `url=` by K: first plain decoding, then each K in the order of `k`."""
    urls, ks = config.url or [], [0, *config.speculative_ks]
    if len(urls) == 2 and adapter.spec.completions.k is not None:  # one address serves every K
        urls = [urls[0], *[urls[1]] * (len(ks) - 1)]
    if len(urls) != len(ks):
        raise UserError(
            f"url: {len(ks)} servers are needed, and {len(urls)} given; first the one that decodes"
            f" plainly, then those with k={','.join(map(str, ks[1:]))}, in this order"
        )
    return dict(zip(ks, urls, strict=True))


def attached(config: ServerConfig, adapter: Adapter, tokenizer: Any) -> AttachedEngine:
    """The servers of `url=` as an engine; the tokenizer is None where the engine needs none."""
    assert adapter.attach is not None
    server = adapter.attach(config, tokenizer)
    key = api_key(config.api_key_env)
    wanted = WantedModel(config.served_name, config.model.served_names)
    return AttachedEngine(addresses(config, adapter), server, key, config.timeout_factor, wanted)


def api_key(name: str | None) -> str | None:
    """The servers' API key, from the environment variable of that name; None without a name."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()  # a value read from a file may end with a line break
    if not key:
        raise UserError(f"api_key_env={name}: no such variable is set")
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"api_key_env={name}: the key has characters that no header can hold; give it in"
            " printable ASCII"
        )
    return key


def started_with(serve: ToServe) -> dict[str, Any]:
    """The arguments of every `StartedEngine` besides its models."""
    config, kind, logs = serve.config, served_kind(serve.config), serve.folder / "logs"
    logs.mkdir(exist_ok=True)
    shared = ("context_tokens", "threads", "slots", "memory", "varying")
    return {
        **{name: getattr(serve, name) for name in shared},
        "logs": logs,
        "revision": config.model.revision,
        "draft_revision": None if DRAFTS[kind].looks_up else config.draft.revision,
        "kind": kind,
        "rule": config.decode.rule,
        "more_flags": tuple(config.flags),
        "timeout_factor": config.timeout_factor,
        "p_min": config.threshold,
        "schedule": tuple((low, high, k) for low, high, k in config.schedule or ()),
        "dtype": serve.dtype or "auto",
    }


def checkpoints(serve: ToServe) -> tuple[str, str | None]:
    """The hub ids or folders of target and draft; None for a draft without its own checkpoint."""
    from harness.models.load import source_of

    target, draft = serve.config.model, serve.config.draft
    own = DRAFTS[served_kind(serve.config)].has_own_checkpoint(draft.id, target.id)
    return source_of(target), source_of(draft) if own else None


def rule_of(config: ServerConfig) -> Rule:
    """The acceptance rule of running servers: the configured one, else the engine's default."""
    return cast("Rule", config.decode.rule or ENGINES[config.engine].rule)
