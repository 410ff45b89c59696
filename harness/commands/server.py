"""A pair on the engine that will serve it: every K on live servers, then the verdict.

The requests of servers are listed in `tasks` and made in `server_requests`, what a budget leaves of
them is in `server_plan`, how servers are started or attached to in `server_start`, the visits that
send them in `server_visits`, and what the weights say of returned texts in `server_judging`. Where
only a tokenizer is here (score=false) there is little of the last.
"""

from harness.commands.checks import Problems, Vocabularies, check_run, without_too_long
from harness.commands.dry_run import print_server
from harness.commands.eligible_drafts import mtp_layers
from harness.commands.pair import check_memory
from harness.commands.run_lifecycle import (
    Outcome,
    answer_so_far,
    begin,
    concluded,
    load_prompts,
    measuring,
    resumed,
)
from harness.commands.server_judging import judge, score
from harness.commands.server_requests import check_turns, open_workload
from harness.commands.server_start import states_of_servers, try_addresses
from harness.commands.server_visits import measure
from harness.config import ServerConfig
from harness.engines.adapters import Adapter, adapter_of
from harness.models.load import check_tokenizers, load_vocabulary
from harness.records import GREEDY, NotInstalledError, UserError
from harness.storage.manifest import SERVER


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


def check_drafts_file(config: ServerConfig, read: Vocabularies) -> None:
    """Refuse a draft's file with another vocabulary than the target's."""
    target = read.of(config.model)
    draft = read.of(config.draft) if config.draft.is_file else None
    if target is not None and draft is not None and config.draft.id != config.model.id:
        check_tokenizers(target, draft)


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
    read = Vocabularies(config)
    adapter = adapter_of(config)
    # A dry run with gpu= is the plan of another machine
    here = config.url is None and not (config.dry_run and config.gpu is not None)

    def startable() -> None:
        try:
            adapter.check(config)
        except NotInstalledError:  # the plan names it
            if not config.dry_run:
                raise

    if config.model.is_file:  # a server of it encodes the prompts
        startable()
        check_drafts_file(config, read)
    prompts = without_too_long(config, load_prompts(config), read)
    check_budget(config, adapter)
    check_mtp(config, adapter)
    check_turns(config, prompts)
    problems = Problems()
    if here:
        problems.of(startable)
    check_run(config, prompts, [config.draft], problems, read)
    if config.dry_run:
        states = states_of_servers(config, adapter)
        print_server(config, prompts, states)
        return Outcome(None)
    folder = resumed(config, SERVER)
    if config.url is not None:  # before weights are loaded and a folder is made
        target = read.of(config.model) or load_vocabulary(config.model)
        try_addresses(config, adapter, prompts, target.tokenizer)
    work = open_workload(config, prompts, read)
    if (
        config.score and work.pair is None and not config.model.is_file
    ):  # what will not fit is said before anything is measured
        sampled = any(value != GREEDY for value in config.temperature)
        check_memory(config, prompts, target=sampled or config.url is not None)
    folder = begin(config, SERVER, folder, work.describe(folder and folder.manifest))
    try:
        with measuring(folder, work.measured_on):
            work = work.with_turns(folder)
            work = measure(folder, work)
            score(folder, work)
            judge(folder, work)
    except KeyboardInterrupt:
        answer_so_far(folder, "interrupted", page=True)
        raise
    return concluded(folder, verbose=config.verbose)
