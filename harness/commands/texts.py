"""The target's texts as requests, as lines of trials.jsonl, and back again."""

from collections.abc import Sequence
from dataclasses import replace

from harness import prompts as prompt_sets
from harness.commands.greedy import GreedyText, with_plain
from harness.commands.pair import (
    EncodedPrompt,
    Pair,
    check_context,
    longest_generation,
)
from harness.commands.progress import progress
from harness.commands.requests import sampling_of
from harness.config import AuditionConfig, PairConfig, SweepConfig
from harness.measurement.draft_scores import score_texts
from harness.measurement.generations import Request
from harness.measurement.lossless import compare_texts
from harness.measurement.target_texts import GeneratedText, generate_texts
from harness.models.cached import CachedModel
from harness.models.load import LoadedModel
from harness.models.tokenizer import encode, stop_rule
from harness.records import Prompt, TextKey, Trial
from harness.storage import RunFolder, load_traces

BATCH = 32


def text_requests(
    prompts: Sequence[EncodedPrompt], config: AuditionConfig | SweepConfig, target: LoadedModel
) -> list[Request]:
    """One request per (temperature, repetition, prompt)."""
    return [
        _request(entry, config, target, temperature, repetition)
        for temperature in config.temperature
        # Greedy texts are all alike: once is enough
        for repetition in range(config.repetitions if temperature else 1)
        for entry in prompts
    ]


def _request(
    entry: EncodedPrompt,
    config: AuditionConfig | PairConfig,
    target: LoadedModel,
    temperature: float,
    repetition: int,
) -> Request:
    """A completion by the target alone."""
    sampling = sampling_of(config.decode, temperature)
    key = TextKey(entry.prompt.prompt_set, entry.prompt.id, repetition, sampling.temperature)
    return Request(
        cell=str(key),
        prompt_set=key.prompt_set,
        prompt=key.prompt,
        category=entry.prompt.category,
        tokens=entry.tokens,
        sampling=sampling,
        budget=config.new_tokens,
        repetition=repetition,
        seed=config.seed,
        eos=target.eos,
        model=target.name,
        stop=stop_rule(target.tokenizer, config.decode.stop_strings),
        turn=entry.turn,
    )


def with_turns(
    folder: RunFolder,
    conversations: Sequence[Prompt],
    target: LoadedModel,
    model: CachedModel,
    config: PairConfig | AuditionConfig,
    models: Sequence[LoadedModel] = (),
    batch: int = BATCH,
) -> tuple[EncodedPrompt, ...]:
    """Every turn of every conversation, encoded after the answers to the turns before it.

    Answers that the conversation does not give are the plain greedy target's. They are generated
    once, turn by turn, and stored in the run's answers.jsonl, so that every cell, every draft and
    a resumed run continue the same conversation.

    Args:
        folder: of the run.
        conversations: all of them, with all their turns.
        target: the model that answers.
        model: the same with a cache.
        config: budgets, and how prompts are encoded.
        models: every turn must fit the context of each.
        batch: answers generated at the same time.

    Raises:
        UserError: a turn cannot be encoded, or does not fit a context.
    """
    answers = [list(prompt.answers) for prompt in conversations]
    for prompt, given in zip(conversations, answers, strict=True):
        given += [None] * (len(prompt.turns) - 1 - len(given))

    def turn_of(index: int, turn: int) -> EncodedPrompt:
        before = [text or "" for text in answers[index][: turn - 1]]
        prompt = conversations[index].up_to(turn, before)
        return EncodedPrompt(prompt, encode(target.tokenizer, prompt, config.prompts))

    for turn in range(1, max(len(prompt.turns) for prompt in conversations)):
        waiting = [i for i, given in enumerate(answers) if given[turn - 1 : turn] == [None]]
        entries = [turn_of(index, turn) for index in waiting]
        texts = _answers(folder, entries, target, model, config, batch)
        for index, tokens in zip(waiting, texts, strict=True):
            text = target.tokenizer.decode(list(tokens), skip_special_tokens=True)
            answers[index][turn - 1] = text
    encoded = tuple(
        turn_of(index, turn)
        for index, prompt in enumerate(conversations)
        for turn in range(1, len(prompt.turns) + 1)
    )
    check_context(encoded, config.new_tokens, max(config.k), models)
    model.reserve(longest_generation(encoded, config.new_tokens, max(config.k)))
    return encoded


def _answers(
    folder: RunFolder,
    entries: Sequence[EncodedPrompt],
    target: LoadedModel,
    model: CachedModel,
    config: PairConfig | AuditionConfig,
    batch: int,
) -> list[tuple[int, ...]]:
    """The greedy answers to one turn of several conversations, generated where not stored."""
    budget = prompt_sets.answer_tokens(config)
    requests = [
        replace(_request(entry, config, target, 0.0, 0), budget=budget, seed=0) for entry in entries
    ]
    stored = {trial.key: trial.tokens or () for trial in folder.answers()}
    waiting = [entry for entry in requests if entry.key not in stored]
    name = f"model={target.name}"
    with progress("the target answers earlier turns", len(waiting)) as tick:
        # Stored batch by batch, so that a stopped run goes on with the next
        for start in range(0, len(waiting), batch):
            part = waiting[start : start + batch]
            for text in generate_texts(model, part, name=name, batch=batch, tick=tick):
                folder.append_answer(_trial(text))
                stored[text.request.key] = text.tokens
    return [stored[entry.key] for entry in requests]


def with_pair_turns(folder: RunFolder, pair: Pair, config: PairConfig) -> Pair:
    """The pair with every turn of its conversations."""
    models = (pair.target, pair.draft)
    prompts = with_turns(folder, pair.conversations, pair.target, pair.target_model, config, models)
    pair.draft_model.reserve(longest_generation(prompts, config.new_tokens, max(config.k)))
    return replace(pair, prompts=prompts)


def write_texts(
    folder: RunFolder,
    requests: Sequence[Request],
    model: CachedModel,
    name: str,
    batch: int = BATCH,
) -> list[GeneratedText]:
    """Texts of the requests, generated where the folder lacks them, in the requests' order."""
    stored = {trial.key: trial for trial in folder.trials()}
    waiting = [entry for entry in requests if entry.key not in stored]
    with progress("the target writes", len(waiting)) as tick:
        texts = generate_texts(model, waiting, name=f"model={name}", batch=batch, tick=tick)
    fresh = {text.request.key: text for text in texts}
    for text in texts:
        folder.append_trial(_trial(text))
    return [fresh.get(entry.key) or from_trial(entry, stored[entry.key]) for entry in requests]


def write_pair_texts(folder: RunFolder, pair: Pair, config: SweepConfig) -> None:
    """The texts of a sweep that measures no generation."""
    requests = text_requests(pair.prompts, config, pair.target)
    write_texts(folder, requests, pair.target_model, pair.target.name)


def score_pair(folder: RunFolder, pair: Pair, config: SweepConfig) -> None:
    """Score the texts of plain decoding with the pair's draft, and store the traces."""
    if load_traces(folder.path):
        return
    plain = {
        trial.key: trial
        for trial in folder.trials()
        if trial.k == 0 and trial.status == "ok" and trial.tokens
    }
    requests = text_requests(pair.prompts, config, pair.target)
    texts = [from_trial(entry, plain[entry.key]) for entry in requests if entry.key in plain]
    with progress("the draft scores", len(texts)) as tick:
        traces = score_texts(
            texts, pair.target_model, pair.draft_model, draft_name=pair.draft.name, tick=tick
        )
    folder.write_traces(traces)


def compare_greedy(
    trials: Sequence[Trial], pair: Pair, repetition_penalty: float | None = None
) -> list[GreedyText]:
    """Compare every speculative greedy text with the plain one of its prompt."""
    encoded = {(e.prompt.prompt_set, e.prompt.id): e.tokens for e in pair.prompts}
    texts: list[GreedyText] = []
    for trial, plain in with_plain(trials):
        comparison = compare_texts(
            pair.target_model,
            encoded[trial.prompt_set, trial.prompt],
            plain.tokens or (),
            trial.tokens or (),
            trial.k,
            pair.target.network.dtype,
            repetition_penalty,
        )
        names = (trial.prompt_set, trial.prompt, trial.repetition, trial.k)
        texts.append(GreedyText(*names, **comparison._asdict()))
    return texts


def _trial(text: GeneratedText) -> Trial:
    """A text as a line of trials.jsonl; made in a batch, so without times of its own."""
    return text.request.as_trial(
        status="ok",
        new_tokens=len(text.tokens),
        stop_reason=text.stop_reason,
        tokens=text.tokens,
    )


def from_trial(request: Request, trial: Trial) -> GeneratedText:
    """A stored text, without the hidden states that a fresh one carries."""
    return GeneratedText(
        request=request,
        tokens=trial.tokens or (),
        stop_reason=trial.stop_reason or "budget",
    )
