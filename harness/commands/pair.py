"""Open a target-draft pair: load, check, encode the prompts, settle the threads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness import prompts as prompt_sets
from harness.commands.progress import opening
from harness.config import AuditionConfig, ModelConf, PairConfig
from harness.measurement import environment
from harness.measurement.step_times import TimedModel
from harness.models.cached import CachedModel
from harness.models.device import resolve_device
from harness.models.load import LoadedModel, load, memory_need, open_pair
from harness.models.memory import cached_tokens, check_fits
from harness.models.probe import check_length
from harness.models.tokenizer import check_thinking, encode
from harness.records import NGRAM, Prompt, UserError


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with its token ids.

    Attributes:
        prompt: the conversation up to the turn to answer.
        tokens: at least one id.
        pending: tokens that the target's answers may add, where they are not generated yet.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    pending: int = 0

    @property
    def turn(self) -> int:
        """The number of the turn to answer, from 1."""
        return len(self.prompt.turns)

    @property
    def length(self) -> int:
        """Tokens at most, with the answers that are not generated yet."""
        return len(self.tokens) + self.pending


@dataclass(frozen=True)
class Pair:
    """A target and a draft that may play together, ready to be timed.

    Attributes:
        target, draft: the loaded models.
        target_model, draft_model: the same with caches, as the loop sees them.
        conversations: in the order of their prompt sets.
        prompts: their turns, encoded for the target; only the first turns until the answers to
            them are generated (`harness.commands.texts.with_turns`).
        device: where the target lives.
        threads: CPU threads in force.
    """

    target: LoadedModel
    draft: LoadedModel
    target_model: CachedModel
    draft_model: CachedModel
    conversations: tuple[Prompt, ...]
    prompts: tuple[EncodedPrompt, ...]
    device: torch.device
    threads: int

    @property
    def timed(self) -> tuple[TimedModel, TimedModel]:
        """Both, as the latency measurement wants them."""
        return (
            TimedModel("target", self.target.name, self.target_model),
            TimedModel("draft", self.draft.name, self.draft_model),
        )

    @property
    def eos(self) -> frozenset[int]:
        """Ids that end a text: the target's."""
        return self.target.eos

    def describe(self) -> dict[str, Any]:
        """The manifest's entries about models, prompts and machine."""
        return {
            "environment": environment.describe(self.device),
            "models": {
                "target": {**self.target.describe(), **self.target_model.describe()},
                "draft": {**self.draft.describe(), **self.draft_model.describe()},
            },
            **describe_prompts(self.conversations),
        }


def open_configured(config: PairConfig) -> Pair:
    """Load what the configuration names and check all that can be checked before measuring.

    Raises:
        UserError: a model cannot be loaded, the pair does not fit together, or a prompt with its
            budget does not fit the context.
    """
    if config.draft.id == NGRAM:
        raise UserError(
            "draft=ngram: a look-up has no draft steps to time beside the target's; audition it: "
            "python -m harness.audition drafts=[ngram]"
        )
    prompts = prompt_sets.load(config.prompts)
    device = resolve_device(config.device.name)
    roles = {"model": config.model, "draft": config.draft}
    check_memory(roles, prompts, config, device)
    target = load(config.model, "model", device)
    draft = load(config.draft, "draft", device)
    # Adaptive drafting reads every draft step back, which a recorded graph cannot
    backend = "eager" if config.decode.stop != "none" else config.backend
    with opening(backend, device.type, f"model {target.name}", f"draft {draft.name}"):
        target_model, draft_model = open_pair(target, draft, backend)
    conversations = encode_whole(target.tokenizer, prompts, config)
    check_context(conversations, config.new_tokens, max(config.k), (target, draft))
    for model in (target_model, draft_model):
        model.reserve(longest_generation(conversations, config.new_tokens, max(config.k)))
    first = encode_first(target.tokenizer, prompts, config)
    threads = environment.settle_threads(
        config.threads, (target_model, draft_model), longest(first)
    )
    return Pair(
        target, draft, target_model, draft_model, prompts, first, target_model.device, threads
    )


def encode_first(
    tokenizer: Any, prompts: Sequence[Prompt], config: PairConfig | AuditionConfig
) -> tuple[EncodedPrompt, ...]:
    """The first turn of every conversation."""
    first = [prompt.up_to(1, ()) for prompt in prompts]
    return tuple(
        EncodedPrompt(prompt, encode(tokenizer, prompt, config.prompts)) for prompt in first
    )


def encode_whole(
    tokenizer: Any, prompts: Sequence[Prompt], config: PairConfig | AuditionConfig
) -> tuple[EncodedPrompt, ...]:
    """Every conversation up to its last turn, with empty text for answers still to be generated.

    Raises:
        UserError: a conversation cannot be encoded, or the thinking mode makes no difference.
    """
    check_thinking(tokenizer, prompts, config.prompts)
    encoded: list[EncodedPrompt] = []
    for prompt in prompts:
        given = [answer or "" for answer in prompt.answers]
        tokens = encode(tokenizer, replace(prompt, answers=tuple(given)), config.prompts)
        pending = len(prompt_sets.missing_answers(prompt)) * prompt_sets.answer_tokens(config)
        encoded.append(EncodedPrompt(prompt, tokens, pending))
    return tuple(encoded)


def check_memory(
    confs: Mapping[str, ModelConf],
    prompts: Sequence[Prompt],
    config: PairConfig | AuditionConfig,
    device: torch.device,
) -> None:
    """Refuse models that, with the caches of the longest generation, exceed the memory.

    Args:
        confs: the models by their group on the command line.
        prompts: what is generated from.
        config: the budget of a generation, and the largest number of draft tokens.
        device: where models go that name none themselves.

    Raises:
        UserError: with what is needed and what there is; or a config cannot be read.
    """
    wanted = [memory_need(conf, role, device) for role, conf in confs.items()]
    budget = prompt_sets.answer_tokens(config)
    positions = max(
        cached_tokens(
            [prompt_sets.given_text(prompt)],
            config.new_tokens + len(prompt_sets.missing_answers(prompt)) * budget,
            max(config.k),
        )
        for prompt in prompts
    )
    check_fits([entry for entry in wanted if entry is not None], positions)


def longest(prompts: Sequence[EncodedPrompt]) -> list[int]:
    """Token ids of the longest prompt."""
    return list(max((entry.tokens for entry in prompts), key=len))


def longest_generation(prompts: Sequence[EncodedPrompt], new_tokens: int, max_k: int) -> int:
    """Positions that the longest generation needs, the drafts of its last round included."""
    return max(entry.length for entry in prompts) + new_tokens + max_k + 1


def check_lengths(pair: Pair, config: PairConfig) -> None:
    """Refuse a pair whose texts, at the run's lengths, are not those of uncached forwards.

    Raises:
        UserError: see `check_length`.
    """
    longest_text = longest_generation(pair.prompts, config.new_tokens, max(config.k))
    check_length(pair.target_model, longest_text, f"model={pair.target.name}")
    check_length(pair.draft_model, longest_text, f"draft={pair.draft.name}")


def typical_context(prompts: Sequence[EncodedPrompt], new_tokens: int) -> list[int]:
    """Token ids of the length a typical step sees: the median prompt plus half the budget."""
    lengths = sorted(len(entry.tokens) for entry in prompts)
    length = max(1, lengths[len(lengths) // 2] + new_tokens // 2)
    ids = [token for entry in prompts for token in entry.tokens]
    return [ids[index % len(ids)] for index in range(length)]


def describe_prompts(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The manifest's entries about the prompts: how many of each set, and a hash of all."""
    sets = [prompt.prompt_set for prompt in prompts]
    return {
        "prompts": {name: sets.count(name) for name in dict.fromkeys(sets)},
        "prompts_sha256": prompt_sets.prompt_set_hash(prompts),
    }


def check_context(
    prompts: Sequence[EncodedPrompt],
    new_tokens: int,
    max_k: int,
    models: Sequence[LoadedModel],
) -> None:
    """Refuse a prompt whose budget, or the drafts of its last round, reach beyond a context.

    Raises:
        UserError: the first such prompt is named with the numbers.
    """
    for entry in prompts:
        for model in models:
            needed, limit = entry.length + new_tokens + max_k, model.context_tokens
            if limit is not None and needed > limit:
                turns = ", set prompts.max_turns" if len(entry.prompt.turns) > 1 else ""
                raise UserError(
                    f"new_tokens={new_tokens}: prompt {entry.prompt.prompt_set}/{entry.prompt.id} "
                    f"has {entry.length} tokens, with K={max_k} together {needed}, beyond the "
                    f"{limit} of "
                    f"{model.key}={model.name}; lower new_tokens{turns} or leave the prompt out"
                )
