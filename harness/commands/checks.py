"""Checks of a run before any weights are read; all that is wrong is said at once.

A command asks before it loads a model, and a dry run asks the same, so that it refuses what cannot
run. A model's small files tell its tokenizer and how many positions it was made for. Of a model of
the hub a dry run reads only those that are on this machine; where there are none, it goes by the
`tokenizer_family` of the configurations.

Of an audition's drafts only a folder that is not there ends the run. One that is unfit for another
reason is named, and the others are ranked, unless none is left.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from harness import prompts as prompt_sets
from harness.commands.eligible_drafts import other_tokenizer
from harness.commands.progress import fetching, progress
from harness.commands.tasks import Config, EncodedPrompt
from harness.config import (
    AuditionConfig,
    ModelConf,
    PairConfig,
    ProfileConfig,
    ServerConfig,
    check_replayed,
)
from harness.engines.llamacpp import reading
from harness.models.gguf_file import GgufTokenizer
from harness.models.load import Vocabulary, check_tokenizers, load_vocabulary, source_of, token_note
from harness.models.tokenizer import check_thinking, encode
from harness.records import Prompt, UserError
from harness.storage import check_writable

GRAPHS_KEEP_NO_STATES = "a head reads hidden states, which recorded graphs do not keep"
SERVERS_RETURN_NO_STATES = "a head reads the target's hidden states, which servers do not return"
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Problems:
    """Reasons why a run cannot be made, a line each."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def of(self, check: Callable[..., T], *arguments: object) -> T | None:
        """The result of a check; None where it refuses the run, which is noted."""
        try:
            return check(*arguments)
        except UserError as error:
            self.lines += error.lines
            return None


class Vocabularies:
    """The tokenizers of a run's models, and the prompts encoded by the target's, each read once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._read: dict[str, Vocabulary | None] = {}
        self._encoded: dict[Prompt, EncodedPrompt] = {}

    def of(self, conf: ModelConf) -> Vocabulary | None:
        """A tokenizer; None of random weights, or where a dry run would have to fetch it."""
        if conf.shown not in self._read:
            self._read[conf.shown] = None if conf.weights == "dummy" else self._load(conf)
        return self._read[conf.shown]

    def _load(self, conf: ModelConf) -> Vocabulary | None:
        if conf.is_file:
            return load_vocabulary(conf)
        here, dry = os.path.exists(source_of(conf)), self._config.dry_run
        try:
            with fetching(f"reading the tokenizer of {conf.name}", None if here else conf.id):
                return load_vocabulary(conf, fetch=not dry)
        except UserError:
            if here or not dry:
                raise
            return None

    def encoded(self, target: Vocabulary, prompts: Sequence[Prompt]) -> tuple[EncodedPrompt, ...]:
        """The prompts, encoded; none of a file in a dry run, which starts no server to do so."""
        new, config = [prompt for prompt in prompts if prompt not in self._encoded], self._config
        of_file = isinstance(target.tokenizer, GgufTokenizer)
        if of_file and config.dry_run:
            return ()
        with ExitStack() as stack:
            if of_file and new:
                server = reading(Path(config.model.id), getattr(config, "flags", ()))
                with progress("starting a server that encodes the prompts"):
                    target.tokenizer.ask = stack.enter_context(server)
            encoded = encoded_conversations(target.tokenizer, new, config)
        self._encoded |= zip(new, encoded, strict=True)
        return tuple(self._encoded[prompt] for prompt in prompts)


def check_run(
    config: Config,
    prompts: Sequence[Prompt],
    drafts: Sequence[ModelConf],
    of_command: Problems | None = None,
    read: Vocabularies | None = None,
) -> Sequence[ModelConf]:
    """The drafts that nothing here shows to be unfit; a run that cannot be made here is refused.

    Raises:
        UserError: all that is wrong, a line each, with what else the command found.
    """
    problems = Problems()
    if config.resume is None:
        problems.of(check_writable, config.results_root)
    # A server whose texts are not scored here may draft as no loop here does
    if isinstance(config, PairConfig) and getattr(config, "score", True):
        problems.of(_check_kind, config)
    problems.lines += of_command.lines if of_command else []
    audition = isinstance(config, AuditionConfig)
    stored = audition and (config.traces_from is not None and not config.latency.measure)
    read = read or Vocabularies(config)
    fit = drafts if stored else _check_models(config, prompts, drafts, problems, read)
    if problems.lines:
        raise UserError(*problems.lines)
    return fit


def _check_kind(config: PairConfig) -> None:
    """Refuse a kind of draft that the command, or its backend, cannot draft with."""
    name, spec = config.draft.shown, config.draft.spec
    model_only = isinstance(config, ProfileConfig)
    if model_only and spec.reads_states:
        raise UserError(
            f"{name}: this command takes a draft model, and that is a head; sweep or audition it"
        )
    if model_only and spec.looks_up:
        raise UserError(
            f"{name}: this command times steps of a draft model, and a look-up has none; sweep it:"
            " python -m harness.sweep draft=ngram"
        )
    if spec.reads_states and config.backend == "cuda_graphs":
        raise UserError(f"backend=cuda_graphs: {GRAPHS_KEEP_NO_STATES}; use backend=eager")
    check_replayed(config.draft)


def _check_models(
    config: Config,
    prompts: Sequence[Prompt],
    drafts: Sequence[ModelConf],
    problems: Problems,
    read: Vocabularies,
) -> list[ModelConf]:
    """Note what ends the run; the drafts that are fit."""
    audition = isinstance(config, AuditionConfig)
    target = problems.of(read.of, config.model)
    encoded: Sequence[EncodedPrompt] = ()
    if target is not None:
        encoded = problems.of(read.encoded, target, prompts) or ()
        problems.of(check_lengths, encoded, config, [target])
    unfit: list[str] = []
    fit: list[ModelConf] = []
    for conf in drafts:
        of_draft, known = Problems(), len(problems.lines)
        problems.of(_check_source, config, conf)
        if len(problems.lines) == known:
            of_draft.of(_check_draft, config, conf, target, encoded, read)
        unfit += of_draft.lines[:1]
        fit += [] if of_draft.lines else [conf]
    if not audition or (unfit and len(unfit) == len(drafts)):
        problems.lines += unfit
        return fit
    for line in unfit:
        _log.warning("%s; the other drafts are ranked without it", line)
    return fit


def without_too_long(
    config: ServerConfig, prompts: Sequence[Prompt], read: Vocabularies
) -> tuple[Prompt, ...]:
    """The prompts that the models can read to the end of an answer; the others are named.

    All of them where none can be, or a tokenizer cannot be read, which is refused afterwards.
    """
    confs: list[ModelConf] = [config.model]
    if config.score and config.draft.spec.weights == "own" and not config.draft.spec.reads_states:
        confs.append(config.draft)
    try:
        models = [made for conf in confs if (made := read.of(conf)) is not None]
        encoded = read.encoded(models[0], prompts) if models else ()
    except UserError:
        return tuple(prompts)
    reasons = {entry.prompt: too_long(entry, config, models) for entry in encoded}
    fit = tuple(prompt for prompt in prompts if reasons.get(prompt) is None)
    if not fit or len(fit) == len(prompts):
        return tuple(prompts)
    first = next(reason for reason in reasons.values() if reason is not None)
    _log.warning("%d of %d prompts left out: %s", len(prompts) - len(fit), len(prompts), first)
    return fit


def _check_source(config: Config, draft: ModelConf) -> None:
    own = draft.spec.has_own_checkpoint(draft.id, config.model.id) and not draft.is_file
    if own and draft.weights != "dummy":
        source_of(draft)


def _check_draft(
    config: Config,
    draft: ModelConf,
    target: Vocabulary | None,
    prompts: Sequence[EncodedPrompt],
    read: Vocabularies,
) -> None:
    """Refuse a draft that is not for the target, or that no server's texts can be scored with."""
    if isinstance(config, AuditionConfig) and config.texts_from and draft.spec.reads_states:
        raise UserError(f"{draft.shown}: {SERVERS_RETURN_NO_STATES}")
    elsewhere = isinstance(config, ServerConfig) and config.url is not None and not config.score
    a_model = draft.spec.weights == "own" and not draft.spec.reads_states
    same = (draft.id, draft.revision) == (config.model.id, config.model.revision)
    random = "dummy" in (draft.weights, config.model.weights)
    if elsewhere or not a_model or same or random:
        return
    vocabulary = read.of(draft)
    if target is not None and vocabulary is not None:
        check_tokenizers(target, vocabulary)
        check_lengths(prompts, config, [vocabulary])
        if note := token_note(target, vocabulary):
            _log.warning("%s", note)
    elif other := other_tokenizer(config.model, draft):
        raise UserError(f"{draft.shown}: {other}; choose a draft of the target's own family")


# ---- lengths -------------------------------------------------------------------------------------


def encoded_conversations(
    tokenizer: Any, prompts: Sequence[Prompt], config: Config
) -> tuple[EncodedPrompt, ...]:
    """Whole conversations, with room for the answers that are still to be generated."""
    check_thinking(tokenizer, prompts, config.prompts)

    def encoded(prompt: Prompt) -> EncodedPrompt:
        # With empty text for answers still to be generated
        answered = replace(prompt, answers=tuple(answer or "" for answer in prompt.answers))
        pending = len(prompt_sets.missing_answers(prompt)) * config.new_tokens
        return EncodedPrompt(prompt, encode(tokenizer, answered, config.prompts), pending)

    return tuple(map(encoded, prompts))


def encoded_turn(
    tokenizer: Any, prompt: Prompt, turn: int, answers: Sequence[str | None], config: Config
) -> EncodedPrompt:
    """A turn of a conversation after the answers to those before it, empty where not known."""
    upto = prompt.up_to(turn, [answer or "" for answer in answers])
    return EncodedPrompt(upto, encode(tokenizer, upto, config.prompts))


def check_lengths(
    prompts: Sequence[EncodedPrompt], config: Config, models: Sequence[Vocabulary]
) -> None:
    """Refuse generations, and contexts of curves, that are longer than a model can read."""
    for entry in prompts:
        if reason := too_long(entry, config, models):
            turns = ", set prompts.max_turns" if len(entry.prompt.turns) > 1 else ""
            raise UserError(
                f"new_tokens={config.new_tokens}: {reason}; lower new_tokens{turns} or leave the"
                " prompt out"
            )
    contexts: Any = getattr(config, "contexts", "auto")  # of a profile's curves
    for context in contexts if contexts != "auto" else ():
        for model in models:
            if reason := beyond(model, context, max(config.k)):
                raise UserError(f"contexts: {reason}; give fewer")


def too_long(entry: EncodedPrompt, config: Config, models: Sequence[Vocabulary]) -> str | None:
    """The reason why a model cannot read a prompt and its generation; None where it can."""
    max_k = max(config.k)
    needed = entry.length + config.new_tokens + max_k
    for model in models:
        limit = model.context_tokens
        if limit is not None and needed > limit:
            return (
                f"prompt {entry.prompt.prompt_set}/{entry.prompt.id} has {entry.length} tokens,"
                f" with K={max_k} together {needed}, beyond the {limit} of {model.shown}"
            )
    return None


def beyond(model: Vocabulary, context: int, k: int) -> str | None:
    """The reason why a context and a round's K + 1 tokens are too many; None where they are not."""
    limit = model.context_tokens
    if limit is None or context + k + 1 <= limit:
        return None
    tokens = f"{context} tokens with K + 1 = {k + 1} more"
    return f"{tokens} are beyond the {limit:,} positions of {model.shown}"
