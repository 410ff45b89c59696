"""The target's texts as requests, as lines of trials.jsonl, and back again."""

from collections.abc import Collection, Sequence

from harness.config import AuditionConfig, SweepConfig
from harness.decoding.protocols import StopRule
from harness.experiments.greedy import GreedyText, with_plain
from harness.experiments.pair import EncodedPrompt, Pair
from harness.experiments.progress import progress
from harness.experiments.requests import warping_of
from harness.measurement.scoring import score_texts
from harness.measurement.snapshots import compare_texts
from harness.measurement.traces import GeneratedText, TextRequest, generate_texts
from harness.models.cached import CachedModel
from harness.models.text import stop_rule
from harness.records import Trial
from harness.storage import RunFolder, load_traces

Key = tuple[str, str, int, float]
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
            warping=warping_of(config.decode, temperature),
            budget=config.new_tokens,
            seed=config.seed,
            eos=frozenset(eos),
            stop=stop,
        )
        for temperature in config.temperature
        # Greedy texts are all alike: once is enough
        for repetition in range(config.repetitions if temperature else 1)
        for entry in prompts
    ]


def write_texts(
    folder: RunFolder,
    requests: Sequence[TextRequest],
    model: CachedModel,
    name: str,
    batch: int = BATCH,
) -> list[GeneratedText]:
    """Texts of the requests, generated where the folder lacks them, in the requests' order."""
    stored = {trial_key(trial): trial for trial in folder.trials()}
    waiting = [entry for entry in requests if request_key(entry) not in stored]
    with progress("the target writes", len(waiting)) as tick:
        texts = generate_texts(model, waiting, name=f"model={name}", batch=batch, tick=tick)
    fresh = {request_key(text.request): text for text in texts}
    for text in texts:
        folder.append_trial(_trial(text, name))
    return [
        fresh.get(request_key(entry)) or from_trial(entry, stored[request_key(entry)])
        for entry in requests
    ]


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
        trial_key(trial): trial
        for trial in folder.trials()
        if trial.k == 0 and trial.status == "ok" and trial.tokens
    }
    stop = stop_rule(pair.target.tokenizer, config.decode.stop_strings)
    requests = text_requests(pair.prompts, config, pair.eos, stop)
    texts = [
        from_trial(entry, plain[request_key(entry)])
        for entry in requests
        if request_key(entry) in plain
    ]
    with progress("the draft scores", len(texts)) as tick:
        traces = score_texts(
            texts, pair.target_model, pair.draft_model, draft_name=pair.draft.name, tick=tick
        )
    folder.write_traces(traces)


def compare_greedy(
    trials: Sequence[Trial], pair: Pair, repetition_penalty: float | None = None
) -> list[GreedyText]:
    """Hold every speculative greedy text against the plain one of its prompt."""
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


def request_key(request: TextRequest) -> Key:
    """What a text is known by within one run."""
    return (request.prompt_set, request.prompt, request.repetition, request.warping.temperature)


def trial_key(trial: Trial) -> Key:
    """The same of a stored trial."""
    return (trial.prompt_set, trial.prompt, trial.repetition, trial.temperature)


def _trial(text: GeneratedText, model: str) -> Trial:
    """A text as a line of trials.jsonl; made in a batch, so without times of its own."""
    request = text.request
    return Trial(
        cell="/".join(str(part) for part in request_key(request)),
        prompt_set=request.prompt_set,
        prompt=request.prompt,
        repetition=request.repetition,
        k=0,
        temperature=request.warping.temperature,
        rule=None,
        status="ok",
        model=model,
        category=request.category,
        prompt_tokens=len(request.tokens),
        new_tokens=len(text.tokens),
        stop_reason=text.stop_reason,
        tokens=text.tokens,
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
