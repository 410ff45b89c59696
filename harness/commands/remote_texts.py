"""An audition whose target is on a server: its completions come from there.

No step or round is timed, since the target's are not here: their times come from another run or
are typed in. Completions and scores are stored as they are made, and a resumed run asks for those
that it lacks.
"""

import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from harness import prompts as prompt_sets
from harness.commands.checks import SERVERS_RETURN_NO_STATES, encoded_turn
from harness.commands.draft_scoring import DraftResult, described_draft, each_draft
from harness.commands.other_runs import StoredTimes, check_draft_of, check_target_of
from harness.commands.pair import described, open_draft, reserve
from harness.commands.progress import fetching, progress
from harness.commands.requests import sampling_of, stored_text, text_requests, trial_of
from harness.commands.run_lifecycle import begin, measuring, resumable
from harness.commands.run_time import Stopwatch
from harness.commands.tasks import EncodedPrompt
from harness.config import AuditionConfig, ModelConf
from harness.engines.adapters import api_key
from harness.engines.http_client import WantedModel
from harness.measurement.draft_scores import lookup_traces, score_texts
from harness.measurement.generations import Request
from harness.measurement.remote_scores import TextServer, refuse_sampling
from harness.measurement.target_texts import GeneratedText
from harness.models.device import resolve_device
from harness.models.load import NotEligible, Vocabulary, load_vocabulary
from harness.models.probe import check_length
from harness.models.tokenizer import check_thinking
from harness.records import Prompt, TextKey, UserError
from harness.storage import RunFolder
from harness.storage.manifest import ModelEntry, TextsFrom
from harness.storage.resume import check_engine


def check_texts_from(config: AuditionConfig, prompts: Sequence[Prompt]) -> None:
    """Refuse what no server's completions can be had, or scored, for.

    Raises:
        UserError: no API key, sampling parameters whose log-probabilities no server tells, or a
            prompt whose earlier turns lack answers.
    """
    api_key(config.api_key_env)
    for temperature in config.temperature:
        refuse_sampling(sampling_of(config.decode, temperature))
    for prompt in prompts:
        if prompt_sets.missing_answers(prompt):
            raise UserError(
                f"texts_from: prompt {prompt.prompt_set}/{prompt.id} lacks answers to its earlier"
                " turns, which the target would have to generate; give them in the file, or set"
                " prompts.max_turns=1"
            )


def audition_texts(
    config: AuditionConfig,
    drafts: Sequence[ModelConf],
    prompts: Sequence[Prompt],
    times: StoredTimes,
    folder: RunFolder | None,
) -> RunFolder:
    """Collect the completions that the folder lacks, and let every draft score them.

    Raises:
        UserError: a server or a tokenizer that cannot be used, or no draft left to rank.
    """
    check_target_of(times.engine, config.model, ModelEntry())
    with fetching(f"reading the tokenizer of {config.model.name}", config.model.id):
        target = load_vocabulary(config.model)
    check_thinking(target.tokenizer, prompts, config.prompts)
    turns = tuple(
        encoded_turn(target.tokenizer, prompt, number, prompt.answers, config)
        for prompt in prompts
        for number in prompt.answered
    )
    requests = text_requests(target, turns, config)
    known = {trial.key for trial in folder.trials.read()} if folder else set[TextKey]()
    waiting = [request for request in requests if request.key not in known]
    server = texts_from = None
    if waiting:
        with progress(f"asking who answers at {config.texts_from}"):
            key = api_key(config.api_key_env)
            wanted = WantedModel(config.served_name, config.model.served_names)
            server = TextServer(str(config.texts_from), key, config.timeout_factor, wanted)
        host = urlsplit(str(config.texts_from)).netloc
        texts_from = TextsFrom(server.engine, server.version, host)
        if folder is not None and folder.manifest.texts_from is not None:
            check_engine(folder.path, folder.manifest.texts_from, texts_from)
    device = resolve_device(config.device.name)
    models = {"target": {"name": config.model.name, "weights": "served"}}
    folder = begin(config, "audition", folder, described(device, models, prompts))
    with measuring(folder, device):
        times.copy_to(folder)
        watch, start = Stopwatch(folder, None), time.perf_counter()
        if server is not None:
            folder.note(texts_from=texts_from)
            _complete(folder, server, waiting, target)
        generation_s = time.perf_counter() - start
        stored = {trial.key: trial for trial in folder.trials.read()}
        texts = [stored_text(request, stored[request.key]) for request in requests]

        def measure(conf: ModelConf, unscored: Sequence[GeneratedText]) -> DraftResult | None:
            if not unscored:
                return None
            result = _draft_result(conf, unscored, target, turns, config)
            entry = result.described
            check_draft_of(times.engine, conf.name, conf.kind, entry, config.temperature)
            return result

        each_draft(folder, texts, drafts, measure, generation_s, watch=watch, debug=config.debug)
    return folder


def _complete(
    folder: RunFolder, server: TextServer, requests: Sequence[Request], target: Vocabulary
) -> None:
    def decode(tokens: Sequence[int]) -> str:
        return target.tokenizer.decode(list(tokens), skip_special_tokens=True)

    with progress(f"{server.engine} completes prompts", len(requests)) as tick:
        for request in requests:
            with resumable(folder):
                text = server.complete(request, decode)
            folder.trials.append(trial_of(text))
            tick()


def _draft_result(
    conf: ModelConf,
    texts: Sequence[GeneratedText],
    target: Vocabulary,
    turns: Sequence[EncodedPrompt],
    config: AuditionConfig,
) -> DraftResult:
    """One draft's scores: looked up, or by its weights here."""
    name, described, start = conf.name, None, time.perf_counter()
    if conf.spec.looks_up:
        traces = lookup_traces(texts, conf.kind, num_draft_tokens=max(config.k), draft_name=name)
    elif conf.spec.reads_states:
        raise NotEligible(SERVERS_RETURN_NO_STATES)
    else:
        draft, model = open_draft(conf, target, config)
        check_length(model, reserve(turns, config, [(draft, model)]), draft.shown)
        start = time.perf_counter()
        with progress(f"{name} scores", len(texts)) as tick:
            how = {"draft_name": name, "draft_shown": draft.shown, "batch": config.batch}
            traces = score_texts(texts, None, model, **how, tick=tick)
        described = described_draft(conf, {**draft.describe(), **model.describe()})
    return DraftResult(traces, time.perf_counter() - start, described)
