"""A pair on the engine that will serve it: every K on live servers, then the verdict.

What the servers are asked for is in `server_requests`, how they are started or attached to in
`server_start`, and the requests in `server_visits`. What they returned is held here against the
pair's own weights: it is scored by the pair for replay (traces.parquet), and compared with plain
decoding's texts and with the target's distribution (checks.jsonl). Where only a tokenizer is here
(score=false) there is nothing of that.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from harness.analysis.cells import latest
from harness.commands.checks import check_run, without_too_long
from harness.commands.drafted import Drafted, Scoring
from harness.commands.dry_run import print_server_plan
from harness.commands.eligible_drafts import mtp_layers
from harness.commands.other_runs import stored_own_rounds
from harness.commands.progress import progress
from harness.commands.run_lifecycle import (
    Outcome,
    begin,
    concluded,
    load_prompts,
    measuring,
    resumed,
    unless_broken,
)
from harness.commands.server_requests import Workload, check_turns, open_workload
from harness.commands.server_start import (
    is_synthetic,
    states_of_servers,
    stored_facts,
    try_addresses,
)
from harness.commands.server_structured import check_structured
from harness.commands.server_visits import measure
from harness.commands.snapshot import check_texts
from harness.commands.timing import time_own_loop
from harness.config import ServerConfig
from harness.engines.adapters import Adapter, adapter_of
from harness.engines.process import check_port_free
from harness.measurement.draft_scores import after_lookup
from harness.measurement.server_request import likelihood_test
from harness.records import (
    GREEDY,
    NotInstalledError,
    NotMeasured,
    TextTrace,
    Trial,
    UserError,
    grouped,
)
from harness.serving.engines import OWN
from harness.storage import RunFolder
from harness.storage.manifest import SERVER
from harness.summary import TextLikelihood


def check_mtp(config: ServerConfig, adapter: Adapter) -> None:
    """Refuse a K that the engine does not draft with a local checkpoint's MTP layers."""
    if config.draft.kind != "mtp" or not adapter.spec.mtp_multiples or config.url is not None:
        return
    layers = mtp_layers(config.draft)
    refused = [k for k in config.k if layers and k > layers and k % layers]
    if refused:
        raise UserError(
            f"k={refused[0]}: draft={config.draft.name} has {layers} MTP layers, with which"
            f" engine={config.engine} drafts up to {layers} tokens or a multiple of {layers}"
        )


def check_budget(config: ServerConfig, adapter: Adapter) -> None:
    """Refuse texts that end where rounds begin."""
    counting = adapter.spec.counting
    from_prefill = 1 if counting is None else counting.first_position
    if config.new_tokens <= from_prefill:
        raise UserError(
            f"new_tokens={config.new_tokens}: the first token of engine={config.engine} comes from"
            " the prefill, so no round would be timed; give more"
        )


def run(config: ServerConfig) -> Outcome:
    """Measure the grid on the engine; status 1 where a server failed or changed a greedy text."""
    prompts = without_too_long(config, load_prompts(config))
    adapter = adapter_of(config)
    check_budget(config, adapter)
    # A dry run with gpu= is the plan of another machine
    here = config.url is None and not (config.dry_run and config.gpu is not None)

    def startable() -> None:
        try:
            adapter.check(config)
        except NotInstalledError:  # the plan names it
            if not config.dry_run:
                raise
        if config.port is not None:
            check_port_free(config.port)

    check_mtp(config, adapter)
    check_structured(config, prompts, adapter.spec)
    check_turns(config, prompts)
    needed = [startable] if here else []
    check_run(config, prompts, [config.draft], *needed, lambda: stored_own_rounds(config))
    if config.dry_run:
        states = states_of_servers(config, adapter)
        print_server_plan(config, prompts, states, synthetic=is_synthetic(config, adapter))
        return Outcome(None)
    folder = resumed(config, SERVER)
    own_rounds = stored_own_rounds(config)
    if config.url is not None:  # before weights are loaded and a folder is made
        try_addresses(config, adapter, prompts)
    work = open_workload(config, prompts)
    folder = begin(config, SERVER, folder, work.describe())
    with measuring(folder, work.measured_on):
        work = work.with_turns(folder)
        measure(folder, work, adapter, partial(_score_so_far, folder, work))
        if work.pair is not None:
            _judge(folder, work, work.pair)
            if config.engine != OWN.name:
                time_own_loop(folder, work.pair, config, own_rounds)
    return concluded(folder, verbose=config.verbose)


# ---- what they returned ------------------------------------------------------------------------


def _judge(folder: RunFolder, work: Workload, pair: Drafted) -> None:
    """Score the returned texts for replay, and hold them against the target's own."""
    stored = latest(list(folder.trials.read()))
    trials = [trial for trial in stored if trial.status == "ok" and trial.tokens]
    with unless_broken(folder, NotMeasured("returned_texts")):
        check_texts(folder, trials, pair, work.config, _likelihoods(trials, work, pair))
        _score(folder, work, pair)


def _score_so_far(folder: RunFolder, work: Workload) -> None:
    """Score what is stored while the run goes on; nothing where no weights are here."""
    if work.pair is not None:
        with unless_broken(folder, NotMeasured("returned_texts")):
            _score(folder, work, work.pair)


def _likelihoods(trials: Sequence[Trial], work: Workload, pair: Drafted) -> list[TextLikelihood]:
    sampled = [trial for trial in trials if trial.temperature != GREEDY]
    cells = grouped(sampled, lambda trial: (trial.temperature, trial.k))
    with progress("testing the returned texts", len(cells)) as tick:
        tests: list[TextLikelihood] = []
        for _, cell in sorted(cells.items()):
            tests.append(likelihood_test([work.returned(each) for each in cell], pair.target_model))
            tick()
    return tests


def _score(folder: RunFolder, work: Workload, pair: Drafted) -> None:
    """Score plain decoding's greedy texts, which are every K's, and every sampled text."""
    facts = stored_facts(folder)
    counting = facts.spec.counting
    if counting is None:
        return
    wanted: dict[tuple[Any, int], Trial] = {}
    for trial in (*latest(list(folder.trials.read())), *latest(list(folder.probes.read()))):
        if trial.status != "ok" or not trial.tokens or not trial.new_tokens:
            continue
        if trial.temperature != GREEDY:
            wanted.setdefault((trial.key, trial.k), trial)
        elif trial.k == 0:
            wanted.setdefault((replace(trial.key, repetition=0), 0), replace(trial, repetition=0))
    emitted = {name: tuple(counting.decoded(t.tokens or ())) for name, t in wanted.items()}
    if emitted == {(trace.key, trace.k): tuple(trace.tokens.tolist()) for trace in folder.traces()}:
        return
    by_k = grouped(wanted.values(), lambda trial: trial.k)
    traces: list[TextTrace] = []
    with progress("scoring the returned texts", len(by_k)) as tick:
        for k, texts in sorted(by_k.items()):
            decoded = [work.returned(trial).decoded(facts) for trial in texts]
            scored = pair.score(decoded, Scoring(max(work.ks), facts.draft_sampling))
            if work.config.lookup is not None:
                scored = after_lookup(scored, decoded, work.config.lookup, max(work.ks))
            traces += [replace(trace, k=k) for trace in scored]
            tick()
    folder.write_traces(traces)
