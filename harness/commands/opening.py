"""The models that a run measures: loaded, checked, and ready with caches and threads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness import prompts as prompt_sets
from harness.commands.checks import (
    GRAPHS_KEEP_NO_STATES,
    check_lengths,
    encoded_conversations,
    encoded_turn,
)
from harness.commands.pair import Config, HeadPair, LookupPair, ModelPair, Pair, Target
from harness.commands.progress import fetching, progress
from harness.commands.tasks import EncodedPrompt
from harness.config import AuditionConfig, ModelConf, PairConfig
from harness.decoding.protocols import recorder_of
from harness.measurement import environment
from harness.models import load as models
from harness.models.cached import CachedModel
from harness.models.device import resolve_device
from harness.models.heads.files import head_memory_need
from harness.models.load import LoadedModel, Vocabulary
from harness.models.memory import MemoryNeed, check_fits
from harness.models.probe import cached_model, wants_graphs
from harness.records import Prompt, UserError

STEPS_READ_BACK = "p_min reads every draft step back, which a recorded graph cannot"


def open_pair(config: PairConfig, prompts: Sequence[Prompt]) -> Pair:
    because = GRAPHS_KEEP_NO_STATES if config.draft.spec.reads_states else _read_back(config)
    return with_draft(_open_target(config, prompts, because), config.draft, config)


def open_target(
    config: AuditionConfig, prompts: Sequence[Prompt], drafts: Sequence[ModelConf] = ()
) -> Target:
    """The target alone, with the same checks, the longest text's included.

    It runs as recorded graphs, where it can, unless all of `drafts` are heads.
    """
    only_heads = bool(drafts) and all(conf.spec.reads_states for conf in drafts)
    because = GRAPHS_KEEP_NO_STATES if only_heads else _read_back(config)
    opened = _open_target(config, prompts, because)
    opened.check_lengths()
    return opened


def _open_target(config: Config, prompts: Sequence[Prompt], eager_because: str | None) -> Target:
    """The target with its first turns, a cache for the longest text, and the threads settled."""
    device, others = resolve_device(config.device.name), environment.OtherLoad()
    check_clock(config, config.model, device)
    check_memory(config, prompts)
    target = load_model(config.model, device)
    environment.settle_threads(config.threads, (), (), others=others)  # that check the models
    model = _cached(target, config, f"model {target.name}", eager_because)
    whole = encoded_conversations(target.tokenizer, prompts, config)
    positions = reserve(whole, config, [(target, model)])
    first = tuple(encoded_turn(target.tokenizer, prompt, 1, (), config) for prompt in prompts)
    context = max((entry.tokens for entry in first), key=len)
    with progress("choosing the number of threads") as bar:
        environment.settle_threads(
            config.threads, [model], context, others=others, expect=bar.expect, tick=bar
        )
    return Target(target, model, tuple(prompts), first, positions)


def with_draft(target: Target, conf: ModelConf, config: Config) -> Pair:
    """The target with one draft, loaded and checked.

    Raises:
        NotEligible: another tokenizer.
        UserError: a draft that cannot be loaded, rewound or read, or is for another target.
    """
    if conf.spec.looks_up:
        return LookupPair(**vars(target), draft_name=conf.name, kind=conf.kind)
    if conf.spec.reads_states:
        return _with_head(target, conf, config)
    draft, model = open_draft(conf, target.target, config)
    check_lengths(target.prompts, config, [draft])
    model.reserve(target.positions)
    return ModelPair(**vars(target), draft_name=draft.name, draft=draft, draft_model=model)


def open_draft(
    conf: ModelConf, target: Vocabulary, config: Config
) -> tuple[LoadedModel, CachedModel]:
    """A draft model; of its logits none that the target lacks, where that one is loaded too.

    Raises:
        NotEligible: another tokenizer than the target's.
        UserError: it cannot be loaded or rewound, or runs out of memory.
    """
    device = resolve_device(config.device.name)
    check_clock(config, conf, device)
    if not conf.spec.loader:
        draft = load_model(conf, device)
    elif isinstance(target, LoadedModel):
        draft = conf.spec.load(conf, target)
    else:
        raise UserError(f"{conf.shown}: made of the target, whose weights are not here")
    models.check_tokenizers(target, draft)
    width = draft.vocab_size
    if isinstance(target, LoadedModel):  # tokens that the target lacks are padding
        width = min(width, target.vocab_size)
    return draft, _cached(draft, config, f"draft {draft.name}", _read_back(config), width)


def _read_back(config: Config) -> str | None:
    """The reason to run eagerly, where a threshold ends drafts; None for a fixed K."""
    return STEPS_READ_BACK if config.thresholds else None


def _with_head(target: Target, conf: ModelConf, config: Config) -> HeadPair:
    """Load a head, and let the target keep the states that it reads.

    A target that runs as recorded graphs for other drafts is opened once more, eagerly, for this
    one. It has another name, under which its times are stored apart.
    """
    check_clock(config, conf, target.target_model.device)
    with fetching(f"loading {conf.name}", _hub_id(conf)):
        head = conf.spec.load(conf, target.target)
    if recorder_of(target.target_model) is not None:
        loaded = target.target
        what = f"model {loaded.name}, run eagerly,"
        eager = _cached(loaded, config, what, GRAPHS_KEEP_NO_STATES)
        named = replace(loaded, name=f"{loaded.name}, eager")
        target = replace(target, target=named, target_model=eager)
    target.target_model.keep_states(head.network.layers)
    model = head.network.with_cache(target.target_model.vocab_size)
    return HeadPair(**vars(target), draft_name=head.name, head=head, head_model=model)


def load_model(conf: ModelConf, device: Any) -> LoadedModel:
    dummy = conf.weights == "dummy"
    doing = f"filling {conf.name} with random weights" if dummy else f"loading {conf.name}"
    with fetching(doing, _hub_id(conf)) as bar:
        return models.load(conf, device, expect=bar.expect, tick=bar)


def _hub_id(conf: ModelConf) -> str | None:
    """The id that the hub is asked for; None for a model that is on this machine."""
    return None if conf.weights == "dummy" or conf.id.startswith("embedded:") else conf.id


def _cached(
    loaded: LoadedModel, config: Config, what: str, because: str | None, width: int | None = None
) -> CachedModel:
    """A model with a cache, checked, and run eagerly where `because` names a reason.

    `width` is the number of its logits; None: its vocabulary's.
    """
    graphs = because is None and wants_graphs(config.backend, loaded.network.device.type)
    checks = f"checking that {what} can be rewound"
    with progress(f"compiling {what}, the first time takes minutes" if graphs else checks):
        width = width or loaded.vocab_size
        return cached_model(loaded.network, width, loaded.shown, config.backend, because)


def check_clock(config: Config, conf: ModelConf, device: Any) -> None:
    """Refuse the processor's time of what a card computes."""
    where = resolve_device(conf.device) if conf.device else device
    if config.loop_clock == "cpu" and (where.type != "cpu" or conf.device_map is not None):
        raise UserError(
            f"clock=cpu: {conf.name} is not on the processor, whose time says nothing of a card's;"
            " leave clock out, or take device=cpu"
        )


def check_memory(config: Config, prompts: Sequence[Prompt], *, target: bool = True) -> None:
    """Refuse models that, with the caches of the longest generation, exceed the memory.

    They are a pair's, or an audition's target; without `target` the draft alone.
    """
    confs = [config.model] if target else []
    draft = config.draft if isinstance(config, PairConfig) else None
    if draft is not None and draft.spec.weights != "target_layers" and not draft.spec.looks_up:
        confs.append(draft)
    device, needs = resolve_device(config.device.name), list[MemoryNeed]()
    for conf in confs:
        with fetching(f"reading the sizes of {conf.name}", _hub_id(conf)):
            if conf.spec.reads_states:
                # Where its config.json does not say its sizes, they are known when it is read
                found = [head_memory_need(conf, target) for target in needs]
            else:
                found = [models.memory_need(conf, device)]
            needs += [need for need in found if need is not None]
    positions = max(prompt_sets.estimated_tokens(prompts, config))
    check_fits(needs, positions + config.new_tokens + max(config.k))


def reserve(
    prompts: Sequence[EncodedPrompt],
    config: Config,
    opened: Sequence[tuple[LoadedModel, CachedModel]],
) -> int:
    """Make the caches long enough for the longest generation; returns the positions it needs."""
    check_lengths(prompts, config, [loaded for loaded, _ in opened])
    positions = max(entry.length for entry in prompts) + config.new_tokens + max(config.k) + 1
    for _, model in opened:
        model.reserve(positions)
    return positions
