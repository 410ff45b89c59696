"""A target, and what drafts for it: a model, a head or a look-up, ready to be timed and scored.

Models are loaded, checked, and given caches and threads. Each kind of draft answers for itself what
the commands ask of it: what the loop drafts with, what its rounds are timed with, and how it scores
the target's texts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch

from harness import prompts as prompt_sets
from harness.commands.checks import (
    GRAPHS_KEEP_NO_STATES,
    check_lengths,
    encoded_conversations,
    encoded_turn,
)
from harness.commands.progress import fetching, progress
from harness.commands.run_lifecycle import Described
from harness.commands.tasks import BATCH, Config, EncodedPrompt
from harness.config import AuditionConfig, ModelConf, PairConfig
from harness.decoding.drafters import HeadDrafter
from harness.decoding.lookups import LookupDrafter
from harness.decoding.protocols import recorder_of
from harness.engine_facts.draft_kinds import DRAFTS
from harness.measurement import environment
from harness.measurement.confidences import draft_confidences
from harness.measurement.draft_scores import (
    DraftSampling,
    as_target,
    lookup_traces,
    score_texts,
    score_with_head,
)
from harness.measurement.generations import Draft, Models, Request
from harness.measurement.round_times import FullLookup
from harness.measurement.step_times import TimedModel, time_lookups
from harness.measurement.target_texts import GeneratedText
from harness.models import load as models
from harness.models.cached import CachedModel
from harness.models.device import resolve_device
from harness.models.heads.base import Head, LoadedHead
from harness.models.heads.files import head_memory_need
from harness.models.load import LoadedModel, Vocabulary
from harness.models.memory import MemoryNeed, check_fits, free_bytes, shape_of
from harness.models.probe import cached_model, check_length, wants_graphs
from harness.records import DraftConfidence, LoopClock, Prompt, StepTiming, TextTrace, UserError
from harness.storage.manifest import Environment, ModelEntry

STEPS_READ_BACK = "p_min reads every draft step back, which a recorded graph cannot"
# Of the memory that is free, what caches of generations side by side may take
CACHES_SHARE = 0.5


@dataclass(frozen=True)
class Target:
    """A target that is ready to generate."""

    target: LoadedModel
    target_model: CachedModel  # the same with a cache, as the loop sees it
    conversations: tuple[Prompt, ...]  # in the order of their prompt sets
    # Their turns, encoded for the target; only the first turns until the answers to them are
    # generated (`harness.commands.requests.with_turns`)
    prompts: tuple[EncodedPrompt, ...]
    positions: int  # that the longest generation needs, the drafts of its last round included

    @property
    def opened(self) -> Mapping[str, tuple[LoadedModel, CachedModel]]:
        return {"target": (self.target, self.target_model)}

    @property
    def timed(self) -> tuple[TimedModel, ...]:
        return tuple(
            TimedModel("draft" if role == "draft" else "target", loaded.name, model)
            for role, (loaded, model) in self.opened.items()
        )

    @property
    def draft_entry(self) -> dict[str, Any] | None:
        """The manifest's entry of the draft; None where there is none, or it has no weights."""
        return None

    def describe(self) -> Described:
        entries = {
            "target": {**self.target.describe(), **self.target_model.describe()},
            "draft": self.draft_entry,
        }
        models = {role: entry for role, entry in entries.items() if entry is not None}
        return described(self.target_model.device, models, self.conversations)

    def check_lengths(self) -> None:
        """Refuse models whose texts, at the run's lengths, are not those of uncached forwards."""
        for opened, model in self.opened.values():
            with progress(f"checking the longest text of {opened.name}"):
                check_length(model, self.positions, opened.shown)

    def typical_context(self, new_tokens: int) -> list[int]:
        """Token ids of the length a typical step sees: the median prompt plus half the budget."""
        lengths = sorted(len(entry.tokens) for entry in self.prompts)
        length = max(1, lengths[len(lengths) // 2] + new_tokens // 2)
        ids = [token for entry in self.prompts for token in entry.tokens]
        return [ids[index % len(ids)] for index in range(length)]


def described(
    device: Any, models: Mapping[str, Mapping[str, Any]], prompts: Sequence[Prompt]
) -> Described:
    """Manifest entries of a run: its machine, models by role and prompts."""
    sets = [prompt.prompt_set for prompt in prompts]
    return Described(
        Environment.of(environment.describe(device)),
        {role: ModelEntry.of(entry) for role, entry in models.items()},
        {name: sets.count(name) for name in dict.fromkeys(sets)},
        prompt_sets.prompt_set_hash(prompts),
    )


@dataclass(frozen=True)
class Scoring:
    """Settings by which texts are scored; see `score_texts`."""

    largest_k: int  # that is replayed of a look-up or a head
    draft_sampling: DraftSampling = as_target
    batch: int = BATCH
    tick: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Pair(Target, ABC):
    """A target with what drafts for it, ready to be timed."""

    draft_name: str

    @property
    @abstractmethod
    def drafting(self) -> Draft:
        """The draft as the loop takes it: a model, or a function from a request to a drafter."""

    @property
    def timed_drafting(self) -> Draft:
        return self.drafting

    def with_own_caches(self) -> Self:
        """The same networks with caches of their own, for a generation beside others."""
        return replace(self, target_model=self.target_model.with_own_cache())

    @cached_property
    def copies(self) -> list["Pair"]:
        """Those with own caches that were made so far, by whatever runs generations at once."""
        return []

    @property
    def on_processors(self) -> bool:
        return all(timed.model.device.type == "cpu" for timed in self.timed)

    def fits(self, number: int) -> bool:
        """True where so many generations can be run at once: on processors with memory for caches.

        On a card recorded work is bound to one cache, and other work seldom shares a card. Caches
        grow to twice what they hold.
        """
        networks = [model.network for _, model in self.opened.values()]
        per_token = sum(
            shape.kv_bytes_read(1, network.dtype.itemsize)
            for network in networks
            if (shape := shape_of(network.config))
        )
        caches, free = 2.0 * self.positions * per_token, free_bytes(torch.device("cpu"))
        fits = free is None or (number - 1) * caches < CACHES_SHARE * free
        return self.on_processors and fits

    @property
    def most(self) -> int | None:
        """Tokens that it drafts a round at most; None: any number."""
        return None

    def time_proposals(
        self, max_k: int, context: Sequence[int], clock: LoopClock
    ) -> list[StepTiming]:
        del max_k, context, clock
        return []

    @abstractmethod
    def score(self, texts: Sequence[GeneratedText], how: Scoring) -> list[TextTrace]:
        """Texts of the target, in the order in which they are answered, as the draft sees them."""

    def confidences(self, texts: Sequence[GeneratedText], config: Config) -> list[DraftConfidence]:
        """Confidences of what is drafted off the texts; empty without a threshold."""
        models = [timed.model for timed in self.timed if timed.role == "draft"]
        if not config.thresholds or not texts or not models:
            return []
        with progress(f"{self.draft_name} drafts off the texts", len(texts)) as tick:
            return draft_confidences(
                texts,
                self.target_model,
                models[0],
                draft_name=self.draft_name,
                rule=config.decode.rule,  # type: ignore[arg-type]  # validated
                num_draft_tokens=max(config.k),
                least=min(config.thresholds),
                tick=tick,
            )


@dataclass(frozen=True)
class ModelPair(Pair):
    """A target and a draft model of the same tokenizer."""

    draft: LoadedModel
    draft_model: CachedModel

    @property
    def opened(self) -> Mapping[str, tuple[LoadedModel, CachedModel]]:
        return {**super().opened, "draft": (self.draft, self.draft_model)}

    @property
    def draft_entry(self) -> dict[str, Any]:
        return {**self.draft.describe(), **self.draft_model.describe()}

    @property
    def drafting(self) -> CachedModel:
        return self.draft_model

    def with_own_caches(self) -> Self:
        return replace(super().with_own_caches(), draft_model=self.draft_model.with_own_cache())

    def score(self, texts: Sequence[GeneratedText], how: Scoring) -> list[TextTrace]:
        """Texts as the model sees them, which serve every K."""
        return score_texts(
            texts,
            self.target_model,
            self.draft_model,
            draft_name=self.draft_name,
            draft_shown=self.draft.shown,
            target_shown=self.target.shown,
            draft_sampling=how.draft_sampling,
            batch=how.batch,
            tick=how.tick,
        )


@dataclass(frozen=True)
class LookupPair(Pair):
    """A target whose draft looks its tokens up: there is no second model."""

    kind: str  # of look-up

    @cached_property
    def drafter(self) -> LookupDrafter:
        """The look-up drafter, which begins anew with each generation."""
        return DRAFTS[self.kind].load(self.target.eos)

    @property
    def drafting(self) -> Draft:
        return lambda _: self.drafter

    @property
    def timed_drafting(self) -> Draft:
        """The look-up as rounds are timed with it: it proposes as many tokens as are asked for."""
        return lambda _: FullLookup(self.drafter)

    def time_proposals(
        self, max_k: int, context: Sequence[int], clock: LoopClock
    ) -> list[StepTiming]:
        return [time_lookups(self.drafter, self.draft_name, max_k, context, clock)]

    def score(self, texts: Sequence[GeneratedText], how: Scoring) -> list[TextTrace]:
        """Proposals along the texts, which are chosen and not sampled."""
        traces = lookup_traces(
            texts, self.kind, num_draft_tokens=how.largest_k, draft_name=self.draft_name
        )
        for _ in texts:
            how.tick()
        return traces


@dataclass(frozen=True)
class HeadPair(Pair):
    """A target that keeps its hidden states, and the head that drafts from them."""

    head: LoadedHead
    head_model: Head

    @property
    def timed(self) -> tuple[TimedModel, ...]:
        return (*super().timed, TimedModel("draft", self.head.name, self.head_model))

    @property
    def draft_entry(self) -> dict[str, Any]:
        """The manifest's entry of the head, which runs eagerly for its target's reason."""
        reason = self.target_model.engine_reason
        ran = {"engine_reason": reason} if reason else {}
        return {**self.head.describe(), **self.head_model.describe(), **ran}

    @property
    def drafting(self) -> Draft:
        def drafter(request: Request) -> HeadDrafter:
            head, target, stop_below = self.head_model, self.target_model, request.stop_below or 0.0
            return HeadDrafter(head, target, request.sampling, request.rule, stop_below)

        return drafter

    def with_own_caches(self) -> Self:
        head = self.head.network.with_cache(self.head_model.vocab_size)
        return replace(super().with_own_caches(), head_model=head)

    @property
    def most(self) -> int | None:
        return self.head_model.drafts

    def score(self, texts: Sequence[GeneratedText], how: Scoring) -> list[TextTrace]:
        return score_with_head(
            texts,
            self.target_model,
            self.head_model,
            num_draft_tokens=how.largest_k,
            draft_name=self.draft_name,
            draft_shown=self.head.shown,
            target_shown=self.target.shown,
            draft_sampling=how.draft_sampling,
            tick=how.tick,
        )


@dataclass(frozen=True)
class SideBySide:
    """The models of generations that take turns, of each with caches of its own."""

    pair: Pair
    timed: bool = False  # rounds are timed with them

    def models(self, number: int) -> list[Models]:
        copies = self.pair.copies
        while len(copies) < number - 1:
            copies.append(self.pair.with_own_caches())
        return [
            (pair.target_model, pair.timed_drafting if self.timed else pair.drafting)
            for pair in (self.pair, *copies[: number - 1])
        ]


# ---- opening -------------------------------------------------------------------------------------


def open_pair(config: PairConfig, prompts: Sequence[Prompt]) -> Pair:
    return with_draft(open_target(config, prompts, [config.draft]), config.draft, config)


def open_target(
    config: Config, prompts: Sequence[Prompt], drafts: Sequence[ModelConf] = ()
) -> Target:
    """The target with its first turns, a cache for the longest text, and the threads settled.

    It runs as recorded graphs, where it can, unless all of `drafts` are heads.
    """
    only_heads = bool(drafts) and all(conf.spec.reads_states for conf in drafts)
    eager_because = GRAPHS_KEEP_NO_STATES if only_heads else _read_back(config)
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
    opened = Target(target, model, tuple(prompts), first, positions)
    if isinstance(config, AuditionConfig):  # a pair's draft is checked with it
        opened.check_lengths()
    return opened


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
        UserError: one that cannot be loaded or rewound, or is made of weights that are not here.
    """
    device = resolve_device(config.device.name)
    check_clock(config, conf, device)
    if conf.spec.loader and not isinstance(target, LoadedModel):
        raise UserError(f"{conf.shown}: made of the target, whose weights are not here")
    draft = conf.spec.load(conf, target) if conf.spec.loader else load_model(conf, device)
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
    """A model with a cache, of `width` logits, checked, and run eagerly if there is a reason."""
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
