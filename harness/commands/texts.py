"""The target's texts as requests, as lines of trials.jsonl, and back again."""

from collections.abc import Collection, Sequence
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
from harness.decoding.protocols import StopRule
from harness.measurement.scoring import score_texts
from harness.measurement.snapshots import compare_texts
from harness.measurement.traces import GeneratedText, TextRequest, generate_texts
from harness.models.cached import CachedModel
from harness.models.load import LoadedModel
from harness.models.tokenizer import encode, stop_rule
from harness.records import Prompt, Trial
from harness.storage import RunFolder, load_traces

BATCH = 32


def text_requests(
    prompts: Sequence[EncodedPrompt],
    config: AuditionConfig | SweepConfig,
    eos: Collection[int],
    stop: StopRule | None,
) -> list[TextRequest]:
    """One request per (temperature, repetition, prompt)."""
    return [
        TextRequest(
            prompt_set=entry.prompt.prompt_set,
            prompt=entry.prompt.id,
            category=entry.prompt.category,
            tokens=entry.tokens,
            repetition=repetition,
            sampling=sampling_of(config.decode, temperature),
            budget=config.new_tokens,
            seed=config.seed,
            eos=frozenset(eos),
            stop=stop,
            turn=entry.turn,
        )
        for temperature in config.temperature
        # Greedy texts are all alike: once is enough
        for repetition in range(config.repetitions if temperature else 1)
        for entry in prompts
    ]


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
    stop = stop_rule(target.tokenizer, config.decode.stop_strings)
    requests = [
        TextRequest(
            prompt_set=entry.prompt.prompt_set,
            prompt=entry.prompt.id,
            category=entry.prompt.category,
            tokens=entry.tokens,
            repetition=0,
            sampling=sampling_of(config.decode, 0.0),
            budget=prompt_sets.answer_tokens(config),
            seed=0,
            eos=target.eos,
            stop=stop,
            turn=entry.turn,
        )
        for entry in entries
    ]
    stored = {trial.key: trial.tokens or () for trial in folder.answers()}
    waiting = [entry for entry in requests if entry.key not in stored]
    name = f"model={target.name}"
    with progress("the target answers earlier turns", len(waiting)) as tick:
        # Stored batch by batch, so that a stopped run goes on with the next
        for start in range(0, len(waiting), batch):
            part = waiting[start : start + batch]
            for text in generate_texts(model, part, name=name, batch=batch, tick=tick):
                folder.append_answer(_trial(text, target.name))
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
    requests: Sequence[TextRequest],
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
        folder.append_trial(_trial(text, name))
    return [fresh.get(entry.key) or from_trial(entry, stored[entry.key]) for entry in requests]


def write_pair_texts(folder: RunFolder, pair: Pair, config: SweepConfig) -> None:
    """The texts of a sweep that measures no generation."""
    stop = stop_rule(pair.target.tokenizer, config.decode.stop_strings)
    requests = text_requests(pair.prompts, config, pair.eos, stop)
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
    stop = stop_rule(pair.target.tokenizer, config.decode.stop_strings)
    requests = text_requests(pair.prompts, config, pair.eos, stop)
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


def _trial(text: GeneratedText, model: str) -> Trial:
    """A text as a line of trials.jsonl; made in a batch, so without times of its own."""
    request = text.request
    return Trial(
        cell=str(request.key),
        prompt_set=request.prompt_set,
        prompt=request.prompt,
        repetition=request.repetition,
        k=0,
        temperature=request.sampling.temperature,
        rule=None,
        status="ok",
        model=model,
        category=request.category,
        prompt_tokens=len(request.tokens),
        new_tokens=len(text.tokens),
        stop_reason=text.stop_reason,
        tokens=text.tokens,
        turn=request.turn,
    )


def from_trial(request: TextRequest, trial: Trial) -> GeneratedText:
    """A stored text, without the hidden states that a fresh one carries."""
    return GeneratedText(
        request=request,
        tokens=trial.tokens or (),
        stop_reason=trial.stop_reason or "budget",
        batch_s=0.0,
        batch_texts=0,
    )
