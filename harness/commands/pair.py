"""A target, and what drafts for it: a model, a head or a look-up, ready to be timed and scored.

Each kind of draft answers for itself what the commands ask of it: what the loop drafts with, what
its rounds are timed with, and how it scores the target's texts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from harness import prompts as prompt_sets
from harness.commands.progress import progress
from harness.commands.run_lifecycle import Described
from harness.commands.tasks import BATCH, EncodedPrompt
from harness.config import AuditionConfig, PairConfig
from harness.decoding.drafters import HeadDrafter
from harness.decoding.lookups import LookupDrafter
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
from harness.models.cached import CachedModel
from harness.models.heads.base import Head, LoadedHead
from harness.models.load import LoadedModel
from harness.models.memory import free_bytes, shape_of
from harness.models.probe import check_length
from harness.records import (
    DraftConfidence,
    LoopClock,
    Prompt,
    StepTiming,
    TextTrace,
)
from harness.storage.manifest import Environment, ModelEntry

Config = PairConfig | AuditionConfig
# Of the memory that is free, what caches of generations side by side may take
CACHES_SHARE = 0.5


@dataclass(frozen=True)
class Target:
    """A target that is ready to generate.

    Attributes:
        target, target_model: the loaded model, and the same with a cache, as the loop sees it.
        conversations: in the order of their prompt sets.
        prompts: their turns, encoded for the target; only the first turns until the answers to
            them are generated (`harness.commands.completions.with_turns`).
        positions: that the longest generation needs, the drafts of its last round included.
    """

    target: LoadedModel
    target_model: CachedModel
    conversations: tuple[Prompt, ...]
    prompts: tuple[EncodedPrompt, ...]
    positions: int

    @property
    def opened(self) -> Mapping[str, tuple[LoadedModel, CachedModel]]:
        """The models by role."""
        return {"target": (self.target, self.target_model)}

    @property
    def timed(self) -> tuple[TimedModel, ...]:
        """The models, as the measurement of step times wants them."""
        return tuple(
            TimedModel("draft" if role == "draft" else "target", loaded.name, model)
            for role, (loaded, model) in self.opened.items()
        )

    @property
    def draft_entry(self) -> dict[str, Any] | None:
        """The manifest's entry of the draft; None where there is none, or it has no weights."""
        return None

    def describe(self) -> Described:
        """Manifest entries of a run with these models."""
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
    """Settings by which texts are scored.

    Attributes:
        largest_k: the largest K that is replayed of a look-up or a head.
        draft_sampling, batch: see `score_texts`.
    """

    largest_k: int
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
        """The draft as rounds are timed with it."""
        return self.drafting

    def with_own_caches(self) -> "Pair":
        """The same networks with caches of their own, for a generation beside others."""
        return replace(self, target_model=self.target_model.with_own_cache())

    @cached_property
    def copies(self) -> list["Pair"]:
        """Those with own caches that were made so far, by whatever runs generations at once."""
        return []

    @cached_property
    def cache_bytes(self) -> float:
        """Of the caches of one generation, which grow to twice what they hold; 0 if not known."""
        shapes = [
            (shape_of(model.network.config), model.network.dtype.itemsize)
            for _, model in self.opened.values()
        ]
        per_token = sum(shape.kv_bytes_read(1, size) for shape, size in shapes if shape)
        return 2.0 * self.positions * per_token

    @property
    def on_processors(self) -> bool:
        """True where no card computes."""
        return all(timed.model.device.type == "cpu" for timed in self.timed)

    def fits(self, number: int) -> bool:
        """True where so many generations can be run at once: on processors with memory for caches.

        On a card recorded work is bound to one cache, and other work seldom shares a card.
        """
        free = free_bytes(torch.device("cpu"))
        fits = free is None or (number - 1) * self.cache_bytes < CACHES_SHARE * free
        return self.on_processors and fits

    @property
    def most(self) -> int | None:
        """Tokens that it drafts a round at most; None: any number."""
        return None

    def time_proposals(
        self, max_k: int, context: Sequence[int], clock: LoopClock
    ) -> list[StepTiming]:
        """The times of a draft that has no steps."""
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
        """The models by role."""
        return {**super().opened, "draft": (self.draft, self.draft_model)}

    @property
    def draft_entry(self) -> dict[str, Any]:
        """The manifest's entry of the draft."""
        return {**self.draft.describe(), **self.draft_model.describe()}

    @property
    def drafting(self) -> CachedModel:
        """The draft as the loop takes it."""
        return self.draft_model

    def with_own_caches(self) -> "ModelPair":
        """The same networks with caches of their own, for a generation beside others."""
        target, draft = self.target_model.with_own_cache(), self.draft_model.with_own_cache()
        return replace(self, target_model=target, draft_model=draft)

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
    """A target whose draft looks its tokens up: there is no second model.

    Attributes:
        kind: of look-up.
    """

    kind: str

    @cached_property
    def drafter(self) -> LookupDrafter:
        """The look-up drafter, which begins anew with each generation."""
        return DRAFTS[self.kind].load(self.target.eos)

    @property
    def drafting(self) -> Draft:
        """The draft as the loop takes it."""
        return lambda _: self.drafter

    @property
    def timed_drafting(self) -> Draft:
        """The look-up as rounds are timed with it: it proposes as many tokens as are asked for."""
        return lambda _: FullLookup(self.drafter)

    def time_proposals(
        self, max_k: int, context: Sequence[int], clock: LoopClock
    ) -> list[StepTiming]:
        """The time of one proposal of max_k tokens."""
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
        """The target and the head, as the measurement of step times wants them."""
        return (*super().timed, TimedModel("draft", self.head.name, self.head_model))

    @property
    def draft_entry(self) -> dict[str, Any]:
        """The manifest's entry of the head, which runs eagerly for its target's reason."""
        reason = self.target_model.engine_reason
        ran = {"engine_reason": reason} if reason else {}
        return {**self.head.describe(), **self.head_model.describe(), **ran}

    @property
    def drafting(self) -> Draft:
        """The draft as the loop takes it."""

        def drafter(request: Request) -> HeadDrafter:
            head, target, stop_below = self.head_model, self.target_model, request.stop_below or 0.0
            return HeadDrafter(head, target, request.sampling, request.rule, stop_below)

        return drafter

    def with_own_caches(self) -> "HeadPair":
        """The same networks with caches of their own, for a generation beside others."""
        target = self.target_model.with_own_cache()
        head = self.head.network.with_cache(self.head_model.vocab_size)
        return replace(self, target_model=target, head_model=head)

    @property
    def most(self) -> int | None:
        """Tokens that it drafts a round at most; None: any number."""
        return self.head_model.drafts

    def score(self, texts: Sequence[GeneratedText], how: Scoring) -> list[TextTrace]:
        """The head's drafts from every start of each text."""
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


class SideBySide:
    """The models of generations that take turns, of each with caches of its own."""

    def __init__(self, pair: Pair, *, timed: bool = False) -> None:
        """Of a pair; `timed` where rounds are timed with it."""
        self._pair, self._timed = pair, timed

    def models(self, number: int) -> list[Models]:
        """Of so many generations at once."""
        copies = self._pair.copies
        while len(copies) < number - 1:
            copies.append(self._pair.with_own_caches())
        return [
            (pair.target_model, pair.timed_drafting if self._timed else pair.drafting)
            for pair in (self._pair, *copies[: number - 1])
        ]
