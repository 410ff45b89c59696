"""Caveats on what ran: the models, their engine, and the card."""

from collections.abc import Iterator

from harness import formatting as fmt
from harness.analysis.caveats.record import Quoted, caveat
from harness.analysis.setup import Setup, timed_apart
from harness.summary import Values

# Settings that mean nothing at temperature 0, where the likeliest token is taken
_SAMPLED_ONLY = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
)
_OFFERED = ("top_k", "top_p", "min_p", "repetition_penalty", "stop_strings")
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@caveat(
    "note",
    "the embedded models are toys that show how the harness works; nothing here says anything"
    " about a model you would serve",
)
def embedded_models(setup: Setup) -> Iterator[Values]:
    """That the target ships with the package."""
    if str(setup.conf("model").get("id") or "").startswith("embedded:"):
        yield {}


def _say_server_defaults(values: Quoted) -> str:
    with_them = f"; to measure with them: {values['overrides']}" if values["overrides"] else ""
    return (
        f"a server applies {values['settings']} unless a request says otherwise, and this run did"
        f" not{with_them}"
    )


@caveat("note", _say_server_defaults)
def server_defaults(setup: Setup) -> Iterator[Values]:
    """Settings that a server applies and this run did not, and the keys (overrides) that do."""
    prompts, decode, temperatures = (
        setup.conf("prompts"),
        setup.conf("decode"),
        setup.temperatures or (0.0,),
    )

    def differs(key: str, value: object) -> bool:
        if key == "do_sample" or (key in _SAMPLED_ONLY and not any(temperatures)):
            return False
        if key == "temperature":
            return value not in temperatures
        return value != (decode.get(key) or _NEUTRAL.get(key))

    config = setup.target.generation_config.items()
    unused = {key: value for key, value in config if differs(key, value)}
    settings = [f"{key}={value}" for key, value in unused.items()]
    overrides = [f"decode.{key}={unused[key]}" for key in _OFFERED if key in unused]
    if setup.target.chat_template and prompts.get("chat_template") == "never":
        settings.insert(0, "the chat template")
        overrides.insert(0, "prompts.chat_template=auto")
    elif setup.target.thinking_mode and not prompts.get("enable_thinking"):
        settings.insert(0, "thinking mode")
        overrides.insert(0, "prompts.enable_thinking=true")
    if settings:
        yield {"settings": ", ".join(settings), "overrides": " ".join(overrides)}


def _say_engine_fallback(values: Quoted) -> str:
    role, name = values["role"], values["name"]
    cause = f"{role if role == name else f'{role} {name}'}: {values['reason']}"
    if values["compiled"] is False:
        return f"{cause}; its steps launch more kernels than compiled ones, which takes longer"
    if not values["plain_too"]:
        return f"{cause}; it ran eagerly, so its times are largely those of this loop's Python"
    return (
        f"{cause}; its rounds ran eagerly and are compared with plain tokens as CUDA graphs: in an"
        " engine its rounds would be faster"
    )


@caveat("note", _say_engine_fallback)
def engine_fallback(setup: Setup) -> Iterator[Values]:
    """The models that did not run on the requested engine, or only on part of it.

    compiled: False where only compiling failed, None: ran eagerly; plain_too: whether the target
    ran eagerly for this draft alone.
    """
    reasons = {role: entry for role, entry in setup.described.items() if entry.engine_reason}
    by_role: list[tuple[str, bool | None]] = []
    by_role += [(role, False) for role, entry in reasons.items() if entry.compiled is False]
    if setup.run.config.get("backend") != "eager" and setup.environment.device == "cuda":
        by_role += [
            (role, None) for role, entry in reasons.items() if entry.engine != "cuda_graphs"
        ]
    for role, compiled in by_role:
        yield {
            "role": role,
            "name": reasons[role].name or role,
            "reason": reasons[role].engine_reason,
            "compiled": compiled,
            "plain_too": role in timed_apart(setup),
        }


def _say_other_card(values: Quoted) -> str:
    if values.get("unused"):
        return f"device=auto took the CPU: {values['unused']}"
    return (
        f"gpu={values['card']} is not the device whose steps were timed ({values['device']}), so"
        " no cost is given; type its step times in (latency.target_ms=...) or name a run on it"
        " (latency_from=)"
    )


@caveat("caution", _say_other_card)
def other_card(
    named: str | None, device: str | None, unused: str | None = None
) -> Iterator[Values]:
    """That another device ran than the named card; and why `device=auto` left a card unused."""
    if named is not None:
        yield {"card": named, "device": device or "another device"}
    if unused is not None:
        yield {"unused": unused}


def _say_spread_over_cards(values: Quoted) -> str:
    parts = (
        " and parts on no card, which are copied for each forward" if values["offloaded"] else ""
    )
    return (
        f"{values['role']}: its layers are spread over"
        f" {fmt.number_of(values['cards'], 'card', 'cards')}{parts}, and run one group after the"
        " other: an engine that splits every layer over the cards has other times; measure it with"
        " python -m harness.server"
    )


@caveat("note", _say_spread_over_cards)
def spread_over_cards(setup: Setup) -> Iterator[Values]:
    """Models whose layers transformers put on several devices."""
    for role, entry in setup.described.items():
        cards = [device for device in entry.devices if device.startswith("cuda")]
        if len(entry.devices) > 1:
            yield {"role": role, "cards": len(cards), "offloaded": len(cards) < len(entry.devices)}
