"""The requests of a run's tasks, run where the folder lacks them: timed ones, and completions.

A timed generation is known by a hash of all that determines it, so that a resumed run does only
what is missing. The target's completions are generated in batches, as are its answers to the
earlier turns of a conversation, which later turns continue. They are scored by the draft, and
speculative texts are compared with them.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, TypeVar

from harness import formatting as fmt
from harness.analysis.lossless import greedy_pairs
from harness.commands.checks import encoded_turn
from harness.commands.pair import Pair, Scoring, SideBySide, Target, reserve
from harness.commands.progress import progress, say
from harness.commands.run_lifecycle import unless_broken
from harness.commands.tasks import BATCH, Config, EncodedPrompt, Task, text_tasks
from harness.config import (
    AuditionConfig,
    DecodeConf,
    ModelConf,
    PairConfig,
    ServerConfig,
    SnapshotConfig,
    SweepConfig,
    rates_for,
)
from harness.decoding.sampling import SamplingParameters
from harness.measurement.clock import undisturbed
from harness.measurement.generations import Models, Request, run_side_by_side, run_trial
from harness.measurement.lossless import compare_texts
from harness.measurement.target_texts import GeneratedText, generate_texts
from harness.models.load import LoadedModel, Vocabulary
from harness.models.tokenizer import stop_rule
from harness.records import BrokenLogitsError, NotMeasured, TextKey, Trial
from harness.storage import RunFolder
from harness.summary import DistributionTest, TextCheck, TextLikelihood
from harness.theory.acceptance import conditional

WARMUP_TOKENS = 8

# The models of each request, or of several that are run side by side
ModelsOf = Callable[[Request], Models] | SideBySide


def completion(
    target: Vocabulary, config: Config, entry: EncodedPrompt, temperature: float, repetition: int
) -> Request:
    """A text by one model alone, known by its key."""
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
        clock=config.loop_clock,
    )


def request(
    pair: Pair, config: PairConfig, task: Task, decoder: LoadedModel | None = None
) -> Request:
    """The request of a timed generation; `decoder` decodes where that is not the target."""
    model, k = decoder or pair.target, task.k
    plain = completion(model, config, task.entry, task.temperature, task.repetition)
    asked = drafted(plain, config, k, pair.draft_name, task.p_min)
    identity = {
        "model": _identity(config.model if model is pair.target else config.draft),
        "draft": _identity(config.draft) if k else None,
        "prompt": [plain.prompt_set, plain.prompt, list(plain.tokens)],
        "k": k,
        "sampling": asdict(plain.sampling),
        "rule": config.decode.rule if k else None,
        "acceptance": _synthetic_rates(config, k),
        "stop_below": asked.stop_below,
        "stop_strings": config.decode.stop_strings,
        "new_tokens": config.new_tokens,
        "repetition": task.repetition,
        "seed": config.seed,
        "backend": config.backend,
        "clock": plain.clock,
    }
    return replace(asked, cell=hash_of(identity))


def drafted(plain: Request, config: Config, k: int, draft: str, p_min: float) -> Request:
    """A text of the target with `draft`; without one where k is 0."""
    rates = _synthetic_rates(config, k)
    return replace(
        plain,
        k=k,
        draft=draft if k else None,
        rule=config.decode.rule,
        synthetic=conditional(rates) if rates else None,
        stop_below=p_min if k and p_min else None,
    )


def _synthetic_rates(config: Config, k: int) -> Sequence[float] | None:
    acceptance = config.decode.acceptance
    return rates_for(acceptance, k) if k and acceptance is not None else None


def hash_of(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def sampling_of(decode: DecodeConf, temperature: float) -> SamplingParameters:
    penalty = decode.repetition_penalty
    return SamplingParameters(
        float(temperature),
        decode.top_k,
        decode.top_p,
        decode.min_p,
        None if penalty == 1.0 else penalty,
    )


def _identity(conf: ModelConf) -> dict[str, object]:
    keys = ("id", "revision", "dtype", "weights", "quantization", "attention", "layers", "block")
    return {key: getattr(conf, key) for key in keys}


# ---- running -------------------------------------------------------------------------------------


def side_by_side(folder: RunFolder, pair: Pair, ks: Collection[int]) -> bool:
    """True where plain decoding and every K take turns; a run goes on as it was begun.

    They do on processors with memory for the caches of all, by what is free when the run begins.
    One that has timings and no note of it was begun one generation after the other.
    """
    noted = folder.manifest.side_by_side
    if noted is None:
        begun = bool(folder.trials.read() or folder.rounds.read())
        number = len({0, *ks})
        noted = not begun and pair.fits(number)
        if not noted and not begun and pair.on_processors:
            say(f"no memory for {number} caches side by side: generations follow each other")
        folder.note(side_by_side=noted)
    return noted


def models_of(folder: RunFolder, pair: Pair, config: PairConfig) -> ModelsOf:
    if side_by_side(folder, pair, config.speculative_ks):
        return SideBySide(pair)
    return lambda _: (pair.target_model, pair.drafting)


def run_requests(
    folder: RunFolder,
    requests: Sequence[Request],
    models: ModelsOf,
    label: str,
    between: Callable[[float], None] = lambda _: None,
    *,
    warmed: set[Hashable] | None = None,
) -> list[Trial]:
    """Run what the folder lacks, a durable line of each; return every stored trial of `requests`.

    Successive requests of one text are run side by side where the models are made for that.
    `between` is called before each with the share that is done, and after the last: visits that
    time rounds are spread so. Kinds that are `warmed` need no warming up; others are added.
    """
    finished = {trial.cell for trial in folder.trials.read() if trial.status == "ok"}
    waiting = [entry for entry in requests if entry.cell not in finished]
    _warm_up(waiting, models, set() if warmed is None else warmed)
    done = 0
    with progress(label, len(waiting)) as tick, undisturbed():
        groups = [[entry] for entry in waiting]
        if isinstance(models, SideBySide):
            of_text = groupby(waiting, lambda entry: (entry.key, entry.turn))
            groups = [list(group) for _, group in of_text]
        for group in groups:
            for _ in group:
                done += 1
                between(done / (len(waiting) + 1))
            folder.trials.append(*run_side_by_side(group, _of_group(group, models)))
            tick(len(group))
        between(1.0)
    wanted = {entry.cell for entry in requests}
    return [trial for trial in folder.trials.read() if trial.cell in wanted]


def _of_group(group: Sequence[Request], models: ModelsOf) -> list[Models]:
    if isinstance(models, SideBySide):
        return models.models(len(group))
    return [models(entry) for entry in group]


def _warm_up(requests: Sequence[Request], models: ModelsOf, warmed: set[Hashable]) -> None:
    """A few unmeasured tokens of each kind: first calls allocate, compile, record, fill caches."""
    kinds = {(r.model, r.k, r.sampling, r.rule, r.synthetic): r for r in requests}
    kinds = {kind: entry for kind, entry in kinds.items() if kind not in warmed}
    warmed |= kinds.keys()
    with progress("warming up (compiling and recording new work)", len(kinds)) as tick:
        for entry in kinds.values():
            short = replace(entry, budget=min(entry.budget, WARMUP_TOKENS))
            run_trial(short, *_of_group([entry], models)[0])
            tick()


# ---- completions ---------------------------------------------------------------------------------

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
        for index, text in zip(waiting, texts, strict=True):
            tokens = list(text.tokens)
            answers[index][turn - 1] = tokenizer.decode(tokens, skip_special_tokens=True)
    prompts = tuple(
        turn_of(index, turn)
        for index, prompt in enumerate(conversations)
        for turn in prompt.answered
    )
    positions = reserve(prompts, config, list(opened.opened.values()))
    return replace(opened, prompts=prompts, positions=positions)


def _answers(
    folder: RunFolder, opened: Target, prompts: Sequence[EncodedPrompt], config: Config
) -> list[GeneratedText]:
    """The greedy answers to one turn of several conversations, generated where not stored."""
    asked = [completion(opened.target, config, entry, 0.0, 0) for entry in prompts]
    requests = [replace(entry, seed=0) for entry in asked]
    doing = "the target answers earlier turns"
    return _generated(folder, opened, requests, config, doing, answers=True)


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
    requests, doing = text_requests(opened.target, opened.prompts, config), "the target generates"
    return _generated(folder, opened, requests, config, doing, skip_broken=skip_broken)


def _generated(
    folder: RunFolder,
    opened: Target,
    requests: Sequence[Request],
    config: Config,
    doing: str,
    *,
    answers: bool = False,
    skip_broken: bool = False,
) -> list[GeneratedText]:
    """The texts of some requests, those that are not stored generated, and stored batch by batch.

    Token by token is shown: a batch of texts takes minutes on a processor.
    """
    lines = folder.answers if answers else folder.trials
    stored = {trial.key: trial for trial in lines.read()}
    waiting = [entry for entry in requests if entry.key not in stored]
    fresh: dict[TextKey, GeneratedText] = {}

    def keep(text: GeneratedText) -> None:
        lines.append(trial_of(text))
        fresh[text.request.key] = text

    label = f"{doing}, {fmt.number_of(len(waiting), 'text', 'texts')}, tokens"
    with progress(label, sum(entry.budget for entry in waiting)) as tick:

        def generate(some: Sequence[Request]) -> None:
            if not some:
                return
            batch = config.batch if isinstance(config, AuditionConfig) else BATCH
            name = opened.target.shown
            generate_texts(
                opened.target_model,
                some,
                name=name,
                batch=batch,
                states=not answers,
                tick=tick,
                keep=keep,
            )

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
    return [
        completion(target, config, task.entry, task.temperature, task.repetition)
        for task in text_tasks(prompts, config)
    ]


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
