"""The target's completions: generated where the folder lacks them, scored, and compared.

Also the target's answers to the earlier turns of a conversation, which later turns continue.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TypeVar

from harness import formatting as fmt
from harness.analysis.lossless import greedy_pairs
from harness.commands.checks import encoded_turn
from harness.commands.opening import reserve
from harness.commands.pair import Config, Pair, Scoring, Target
from harness.commands.progress import Bar, progress
from harness.commands.requests import completion
from harness.commands.run_lifecycle import unless_broken
from harness.commands.tasks import BATCH, EncodedPrompt, text_tasks
from harness.config import (
    AuditionConfig,
    ServerConfig,
    SnapshotConfig,
    SweepConfig,
)
from harness.measurement.generations import Request
from harness.measurement.lossless import compare_texts
from harness.measurement.target_texts import GeneratedText, generate_texts
from harness.models.load import Vocabulary
from harness.records import BrokenLogitsError, NotMeasured, TextKey, Trial
from harness.storage import RunFolder
from harness.summary import DistributionTest, TextCheck, TextLikelihood

Opened = TypeVar("Opened", bound=Target)


def with_turns(folder: RunFolder, opened: Opened, config: Config) -> Opened:
    """The models with every turn of every conversation, encoded after the answers before it.

    Answers that the conversation does not give are the plain greedy target's. They are generated
    once, turn by turn, and stored in the run's answers.jsonl, so that every cell, every draft and
    a resumed run continue the same conversation.
    """
    tokenizer, conversations = opened.target.tokenizer, opened.conversations
    if all(len(prompt.turns) == 1 for prompt in conversations):
        return opened  # with their only turns
    answers = [list(prompt.answers) for prompt in conversations]
    for prompt, given in zip(conversations, answers, strict=True):
        given += [None] * (len(prompt.turns) - 1 - len(given))

    def turn_of(index: int, turn: int) -> EncodedPrompt:
        return encoded_turn(tokenizer, conversations[index], turn, answers[index], config)

    for turn in range(1, max(len(prompt.turns) for prompt in conversations)):
        waiting = [i for i, given in enumerate(answers) if given[turn - 1 : turn] == [None]]
        texts = _answers(folder, opened, [turn_of(index, turn) for index in waiting], config)
        for index, tokens in zip(waiting, texts, strict=True):
            answers[index][turn - 1] = tokenizer.decode(list(tokens), skip_special_tokens=True)
    prompts = tuple(
        turn_of(index, turn)
        for index, prompt in enumerate(conversations)
        for turn in prompt.answered
    )
    positions = reserve(prompts, config, list(opened.opened.values()))
    return replace(opened, prompts=prompts, positions=positions)


def _answers(
    folder: RunFolder, opened: Target, prompts: Sequence[EncodedPrompt], config: Config
) -> list[tuple[int, ...]]:
    """The greedy answers to one turn of several conversations, generated where not stored."""
    batch = _batch(config)
    budget = config.new_tokens
    requests = [
        replace(completion(opened.target, config, entry, 0.0, 0), budget=budget, seed=0)
        for entry in prompts
    ]
    stored = {trial.key: trial.tokens or () for trial in folder.answers.read()}
    waiting = [entry for entry in requests if entry.key not in stored]
    name = opened.target.shown
    with _generating("the target answers earlier turns", waiting) as tick:
        # Stored batch by batch, so that a stopped run continues with the next
        for start in range(0, len(waiting), batch):
            part = waiting[start : start + batch]
            for text in generate_texts(
                opened.target_model, part, name=name, batch=batch, tick=tick
            ):
                folder.answers.append(trial_of(text))
                stored[text.request.key] = text.tokens
    return [stored[entry.key] for entry in requests]


def completions(
    folder: RunFolder,
    opened: Target,
    config: AuditionConfig | SweepConfig,
    *,
    skip_broken: bool = False,
) -> list[GeneratedText]:
    """The completion of every prompt at every temperature, generated where the folder lacks it.

    Raises:
        BrokenLogitsError: the target's are not finite; with `skip_broken` only such texts lack.
    """
    requests = text_requests(opened.target, opened.prompts, config)
    stored = {trial.key: trial for trial in folder.trials.read()}
    waiting = [entry for entry in requests if entry.key not in stored]
    fresh: dict[TextKey, GeneratedText] = {}

    def keep(text: GeneratedText) -> None:
        folder.trials.append(trial_of(text))
        fresh[text.request.key] = text

    with _generating("the target generates", waiting) as tick:

        def generate(some: Sequence[Request]) -> None:
            name, batch = opened.target.shown, _batch(config)
            generate_texts(opened.target_model, some, name=name, batch=batch, tick=tick, keep=keep)

        try:
            generate(waiting)
        except BrokenLogitsError:
            if not skip_broken:
                raise
            for entry in waiting:  # a batch breaks with one of its texts
                if entry.key not in fresh:
                    with suppress(BrokenLogitsError):
                        generate([entry])
    return [
        fresh.get(entry.key) or stored_text(entry, stored[entry.key])
        for entry in requests
        if entry.key in fresh or entry.key in stored
    ]


def score_pair(folder: RunFolder, pair: Pair, config: SweepConfig) -> None:
    """Score the texts that the target decoded plainly, and store the traces.

    At a threshold the draft's confidences are stored too.
    """
    if folder.traces():
        return
    plain = {
        trial.key: trial
        for trial in folder.trials.read()
        if trial.k == 0
        and trial.model == pair.target.name
        and trial.status == "ok"
        and trial.tokens
    }
    requests = text_requests(pair.target, pair.prompts, config)
    texts = [stored_text(entry, plain[entry.key]) for entry in requests if entry.key in plain]
    with (
        unless_broken(folder, NotMeasured("draft_scores")),
        progress("the draft scores", len(texts)) as tick,
    ):
        traces = pair.score(texts, Scoring(max(config.k), tick=tick))
        if sure := pair.confidences(texts, config):
            folder.add_confidences(sure)
        folder.write_traces(traces)


def check_texts(
    folder: RunFolder,
    trials: Sequence[Trial],
    pair: Pair,
    config: SweepConfig | SnapshotConfig | ServerConfig,
    tests: Sequence[DistributionTest | TextLikelihood] = (),
    judged: Sequence[TextCheck] = (),
    noise: float | None = None,
) -> list[TextCheck]:
    """Compare every speculative greedy text with the plain one of its prompt: checks.jsonl.

    Where they differ, only the models can tell whether that is a tie within rounding
    (`harness.measurement.lossless`), but for those that an engine has `judged`. `tests` of
    distributions are stored after them. `noise` is as of `compare_texts`.
    """
    prompts = {(e.prompt.prompt_set, e.prompt.id): e.tokens for e in pair.prompts}
    known = {check.id: check for check in judged}
    checks: list[TextCheck] = []
    for by_tokens, trial, plain in greedy_pairs(trials):
        if by_tokens.id in known or by_tokens.result == "PASS":
            checks.append(known.get(by_tokens.id, by_tokens))
            continue
        check = compare_texts(
            pair.target_model,
            prompts[trial.prompt_set, trial.prompt],
            plain.tokens or (),
            trial.tokens or (),
            by_tokens,
            pair.target.network.dtype,
            config.decode.repetition_penalty,
            pair.target.network,
            noise,
        )
        checks.append(check)
    folder.write_checks([*checks, *tests])
    return checks


def text_requests(
    target: Vocabulary, prompts: Sequence[EncodedPrompt], config: AuditionConfig | SweepConfig
) -> list[Request]:
    """The requests of `text_tasks`."""
    return [
        completion(target, config, task.entry, task.temperature, task.repetition)
        for task in text_tasks(prompts, config)
    ]


def _generating(doing: str, requests: Sequence[Request]) -> AbstractContextManager[Bar]:
    """Show what is generated, token by token: a batch of texts takes minutes on a processor."""
    texts = fmt.number_of(len(requests), "text", "texts")
    return progress(f"{doing}, {texts}, tokens", sum(request.budget for request in requests))


def _batch(config: Config) -> int:
    return config.batch if isinstance(config, AuditionConfig) else BATCH


def trial_of(text: GeneratedText) -> Trial:
    """A text as a line of trials.jsonl; without times, as it is made in a batch or elsewhere."""
    return text.request.as_trial(
        status="ok",
        new_tokens=len(text.tokens),
        stop_reason=text.stop_reason,
        tokens=text.tokens,
        logprobs=text.logprobs,
    )


def stored_text(request: Request, trial: Trial) -> GeneratedText:
    """A stored text, without the hidden states that a fresh one carries."""
    reason = trial.stop_reason or "budget"
    return GeneratedText(request, trial.tokens or (), reason, logprobs=trial.logprobs)
