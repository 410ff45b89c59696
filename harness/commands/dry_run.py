"""Dry runs: the work of a command, its time and its cost, without running it.

With `dry_run=true` no model is loaded: sizes come from a model's configuration, times and prices
from the cards' data sheets (`harness.theory.cost`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from harness import formatting as fmt
from harness import prompts as prompt_sets
from harness.analysis.caveats.prompts import log_covered
from harness.analysis.looks import searched_next
from harness.commands.eligible_drafts import SERVED_BYTES, Pairing, pairings, sizes_of
from harness.commands.run_time import CELL_S, about, model_sizes, name_of, run_time, scores, work_of
from harness.commands.server_plan import (
    SAFE_SHARE,
    audition_time,
    expected,
    fitted,
    left_out,
    listed,
    load_requests,
    machine_pace,
    memory_line,
    prompts_by_set,
)
from harness.commands.server_start import is_synthetic
from harness.commands.tasks import (
    BATCH,
    PROMPTS_OF_EVERY_K,
    Config,
    EncodedPrompt,
    ServerTasks,
    everything,
    missing_answers,
    planned_turns,
    profile_tasks,
    prompts_at,
    server_tasks,
    snapshot_tasks,
    sweep_tasks,
    text_tasks,
)
from harness.config import (
    AUTO_DRAFTS,
    CONF_DIR,
    AuditionConfig,
    GpuConf,
    ModelConf,
    ProfileConfig,
    ServerConfig,
    SnapshotConfig,
    SweepConfig,
)
from harness.engine_facts.spec import shorter_budget
from harness.measurement.load import requests_of_load
from harness.records import Prompt
from harness.reporting.console import print_brief, print_table, standard_output
from harness.reporting.tables.cards import cost_table
from harness.reporting.tables.specification import Column, Table, table
from harness.stats.verdict_interval import LOOKS, most_measured
from harness.theory.architecture import MemoryFit, architecture_of, usable_bytes
from harness.theory.cost import (
    ALPHA,
    Forwards,
    estimate,
    pair_forwards,
    text_forwards,
    timing_forwards,
)
from harness.theory.roofline import Card

# Cards whose costs stand above the table of drafts
FEW_CARDS = 2
# The row of a run's time, at the pace of whatever else runs there
NOW = "on this machine now"
ROWS: tuple[Column[tuple[str, str]], ...] = (
    Column("what", lambda row: row[0], key=True),
    Column("how much", lambda row: row[1], flexible=True),
)


def _parameters(value: float) -> str:
    size, unit = (1e9, "B") if value >= 1e9 else (1e6, "M") if value >= 1e6 else (1e3, "K")
    return f"{value / size:,.3g} {unit}"


PAIRING: tuple[Column[Pairing], ...] = (
    Column("draft", lambda row: row.conf.name, key=True),
    Column("serves the\ntarget", lambda row: row.result),
    Column("why", lambda row: row.why, flexible=True),
    Column("parameters", lambda row: row.parameters, _parameters),
    Column("weights", lambda row: row.weight_bytes, fmt.memory),
)

Rows = dict[str, object]


# ---- plans ---------------------------------------------------------------------------------------


def print_sweep(config: SweepConfig, prompts: Sequence[Prompt]) -> None:
    ks = [0, *config.speculative_ks]
    sets = {prompt.prompt_set for prompt in prompts}
    tasks = sweep_tasks(planned_turns(prompts, config), config)
    generations, looks = f"{tasks.count} (repetitions={config.repetitions})", Rows()
    if config.until == "decided":
        generations = (
            f"at most {generations}, {len(tasks.texts)} of them in batches; short texts are"
            f" repeated until each cell has {CELL_S:g} s, which adds {tasks.repeats:,} at most"
        )
        measured = most_measured(len(prompts))
        others = f"; other K: {PROMPTS_OF_EVERY_K} prompts of each set" if ks[2:] else ""
        number = fmt.number_of(min(LOOKS, measured), "look", "looks")
        of_each = fmt.number_of(prompts_at(measured, 1), "prompt", "prompts")
        looks["measured"] = f"the best K by replay, in at most {number} of {of_each}{others}"
    rows: Rows = {
        "K": ", ".join("0 (baseline)" if k == 0 else str(k) for k in ks),
        **({"p_min": listed(config.p_min)} if config.thresholds else {}),
        "temperature": listed(config.temperature),
        **_prompt_rows(config, prompts),
        **looks,
        "cells": len(sets) * len(config.temperature) * len(ks),
        "generations": generations,
        "tokens, at most": f"{tasks.count * config.new_tokens:,}",
    }
    if config.latency_from is not None:
        rows["round times"] = f"from {config.latency_from}"
    if (time := run_time(config, [config.draft], prompts)) is not None:
        rows[NOW] = time
    work = work_of(config, [config.draft], prompts).all
    _print_run(config, [config.draft], rows, _costs(config, prompts, work))


def print_server(
    config: ServerConfig, prompts: Sequence[Prompt], states: Mapping[str, str]
) -> None:
    """Servers, and the requests that each kind of them gets.

    The `states` are addresses, each with who answers there, or why no server starts here.
    """
    ks = [0, *config.speculative_ks]
    turns = planned_turns(prompts, config)
    asked = everything(config, turns)
    tasks = server_tasks(asked, config, turns, synthetic=is_synthetic(config))
    whole = [task for task in (*tasks.plain, *tasks.measured) if task.file == "trials"]
    files = Counter(task.file for task in tasks.measured)
    rounds, at_most = f"{files['starts']} more requests, cut short", ""
    servers = ", ".join("plain" if k == 0 else f"K = {k}" for k in ks)
    if config.until == "decided":
        at_most = "at most "
        rounds = (
            f"at most {len(tasks.choosing)} more requests, on few prompts, half of them cut short"
        )
        first = searched_next(sorted(config.speculative_ks), {})
        servers = (
            f"plain, {', '.join(f'K = {k}' for k in first)} and at most"
            f" {tasks.started - len(first)} more; replay"
            " chooses the one that is asked every prompt (until=all: every K)"
        )
    elif files["rounds"]:  # a prompt of each set, at two budgets
        rounds = (
            f"{files['rounds']} more requests, to plain servers and to one more per K"
            " that is told to reject every draft"
        )
    rows: Rows = {
        "engine": f"{config.engine}, {'to be started here' if config.url is None else 'running'}",
        **states,
        "not used with url=": ", ".join(config.not_with_url),
        "servers": servers,
        "temperature": listed(config.temperature),
        **_prompt_rows(config, prompts),
        "visits": config.repetitions,
        "requests, one at a time": f"{at_most}{len(whole)}, of up to {config.new_tokens} tokens",
        "to time rounds": rounds if tasks.choosing or len(files) > 1 else "",
        **_load_rows(config, turns),
        "returned texts": "scored for replay" if config.score else "not scored (score=false)",
    }
    rows = {name: value for name, value in rows.items() if value != ""}
    # On machines that are not known here, or on this one, which costs nothing
    no_server = config.url is None and states  # they say why none starts here
    if config.gpu is None and not no_server:
        rows |= _time_here(config, turns)
    costs: list[Table | str] = []
    if config.url is None and config.gpu is not None:
        rows["not in the estimate"] = "the start of each server, requests at random, the scores"
        costs.append(_costs(config, prompts, _served_forwards(config, turns, tasks)))
    _print_run(config, [config.draft], rows, *costs)


def _time_here(config: ServerConfig, turns: Sequence[EncodedPrompt]) -> Rows:
    """About how long the run takes on this machine's processors, and in what memory."""
    pace = machine_pace(config)
    if pace is None:
        return {}
    whole = everything(config, turns)
    time = expected(whole, config, turns, pace)
    seconds = time.total_s
    took = f"about {fmt.duration(seconds)}"
    if config.until == "decided":
        took = about(time.first_look_s, seconds)
    rows: Rows = {NOW: took}
    if config.budget_s is not None and seconds > SAFE_SHARE * config.budget_s:
        asked, fits = fitted(config, turns, pace, config.budget_s)
        rows[f"within budget_s={config.budget_s:g}"] = (
            f"about {fmt.duration(fits.total_s)}; less is asked: {left_out(asked, whole)}"
        )
    return rows


def _served_forwards(
    config: ServerConfig, turns: Sequence[EncodedPrompt], tasks: ServerTasks
) -> list[Forwards]:
    """The forwards of the requests, those side by side included, without their prompts."""
    work: list[Forwards] = []
    alone = (*tasks.choosing, *tasks.plain, *tasks.measured)
    alike = Counter((task.role, task.budget(config.new_tokens)) for task in alone)
    for (role, budget), count in sorted(alike.items()):
        alpha = 0.0 if role.rejects else ALPHA
        work += pair_forwards([role.k], count, budget, alpha)
    levels = config.concurrency if max(config.concurrency) > 1 else ()
    ks, visits = [0, *config.speculative_ks], len(config.temperature) * config.repetitions
    both = config.new_tokens + shorter_budget(config.new_tokens)
    for level in levels:
        requests = visits * requests_of_load(prompts_by_set(turns), level)
        side_by_side = pair_forwards(ks, requests, both)
        work += [replace(each, count=each.count / level, batch=level) for each in side_by_side]
    return work


def _load_rows(config: ServerConfig, turns: Sequence[EncodedPrompt]) -> Rows:
    asked, rows = load_requests(config, turns), Rows()
    if asked.side_by_side:
        levels = listed(config.concurrency)
        rows["requests side by side"] = f"{levels}: {asked.side_by_side}, half of them cut short"
    if asked.at_random:
        rows["requests at random"] = f"{listed(config.rate or ())} per second: {asked.at_random}"
    if rows:
        rows["to warm up for them"] = f"{asked.warming}, cut short"
    return rows


def print_profile(config: ProfileConfig, prompts: Sequence[Prompt]) -> None:
    models = 1 if config.model == config.draft else 2
    texts = len(profile_tasks(planned_turns(prompts, config), config))
    rows: Rows = {
        **_prompt_rows(config, prompts),
        "generations, plain": f"{texts * models} (each model alone)",
        "tokens, at most": f"{texts * models * config.new_tokens:,}",
        "steps and verifies": f"1 to {max(config.k) + 1} positions",
        "rounds": f"K = {listed(config.speculative_ks)}",
    }
    work = [Forwards(name, texts * config.new_tokens) for name in ("target", "draft")]
    work += timing_forwards(max(config.k), "draft")
    _print_run(config, [config.draft], rows, _costs(config, prompts, work))


def print_snapshot(config: SnapshotConfig, prompts: Sequence[Prompt]) -> None:
    ks = config.speculative_ks
    compared = len(snapshot_tasks(planned_turns(prompts, config), config))
    # At every offset of a round
    draws = sum(value > 0 for value in config.temperature) * sum(k + 1 for k in ks) * config.draws
    rows: Rows = {
        "K": listed(ks),
        **_prompt_rows(config, prompts),
        "generations": f"{compared} (temperature 0)",
        "tokens, at most": f"{compared * config.new_tokens:,}",
        "draws from one prefix": f"{draws:,} (temperatures above 0)",
    }
    _print_run(config, [config.draft], rows)


def print_audition(
    config: AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> None:
    tasks = text_tasks(planned_turns(prompts, config), config)
    texts, ks = len(tasks), config.speculative_ks
    cells = len(ks) * len(drafts) * len(config.temperature) * len(config.p_min or ())
    prefills = sum(each.count for conf in drafts for each in scores(tasks, conf, config))
    p_min = f"; p_min = {listed(config.p_min or ())}" if config.thresholds else ""
    in_looks = config.until == "decided" and len(drafts) > 1
    rows: Rows = {
        "temperature": listed(config.temperature),
        **_prompt_rows(config, prompts),
        "texts of the target": f"{texts}, of up to {config.new_tokens} tokens",
        "prefills that score them": f"{'at most ' if in_looks else ''}{prefills:.0f}",
    }
    rows["cells, replayed"] = f"{cells} (K = {listed(ks)}{p_min})"
    if (time := run_time(config, drafts, prompts)) is not None:
        rows[NOW] = time
    paired: list[Table | str] = []
    if AUTO_DRAFTS in (config.drafts or ()):
        found = pairings(config.model, config.gpu, [conf.name for conf in drafts])
        paired.append(table(f"Drafts for {config.model.name}", PAIRING, found))
    if config.traces_from is not None:
        rows["texts of the target"] = f"{texts}, from {config.traces_from}"
    costs: list[Table | str] = []
    if config.texts_from is not None:  # its server's time and cost are not known here
        rows["texts of the target"] = f"{texts}, from {urlsplit(config.texts_from).netloc}"
    else:
        work = work_of(config, drafts, prompts).all
        most = FEW_CARDS if paired and not config.verbose else None
        costs.append(_costs(config, prompts, work, drafts, most))
    _print_run(config, drafts, rows, *costs, *paired)


def print_served_audition(
    config: AuditionConfig,
    pairs: Mapping[str, ServerConfig],
    drafts: Sequence[ModelConf],
    prompts: Sequence[Prompt],
) -> None:
    time = audition_time(config, pairs, planned_turns(prompts, config))
    rows: Rows = {
        "engine": f"{config.engine}, started here",
        **_prompt_rows(config, prompts),
        "texts of the target": f"{len(prompts)} of {config.new_tokens} tokens at most",
        "cells, replayed": f"K = {listed(config.speculative_ks)}; p_min ="
        f" {listed(config.p_min or ())}; of each draft",
        "measured": "the best by replay, next to plain decoding; two drafts at most",
        "memory": memory_line(config, drafts),
    }
    if time is not None:
        rows[NOW] = time.sentence()
        rows |= {f"of that, {name}": fmt.duration(each) for name, each in time.drafts.items()}
    _print_run(config, drafts, rows)


def _print_run(config: Config, drafts: Sequence[ModelConf], rows: Rows, *more: Table | str) -> None:
    """The plan and what follows it; without `verbose` as much as fits on the console."""
    rows = {
        "target": _model_line(config.model),
        **_too_large(config),
        "drafts" if len(drafts) > 1 else "draft": ", ".join(map(_model_line, drafts)),
        **rows,
    }
    lines = [(name, str(value)) for name, value in rows.items()]
    parts, console = [table("Plan (nothing is run)", ROWS, lines), *more], standard_output()
    if not config.verbose:
        print_brief(parts, console)
        return
    for part in parts:
        if isinstance(part, str):
            console.print(part, soft_wrap=True, markup=False)
        else:
            print_table(part, console)


def _too_large(config: Config) -> Rows:
    card, size = getattr(config, "gpu", None), sizes_of(config.model)
    if not card or not size or MemoryFit(usable_bytes(card.memory_gb), (size.memory,)).fits:
        return {}
    weights = f"{size.weight_bytes / 1e9:,.3g} GB of weights, {card.memory_gb:g} GB of memory"
    return {f"target on {card.name}": f"does not fit: {weights}"}


def _prompt_rows(config: Config, prompts: Sequence[Prompt]) -> Rows:
    """Rows of each prompt set: its prompts, those without a limit, and later turns."""
    used = Counter(prompt.prompt_set for prompt in prompts)
    available = prompt_sets.available(config.prompts)
    sample = prompt_sets.log_sample(config.prompts)
    rows = Rows()
    if sample is not None:
        covered = log_covered({**asdict(sample.facts), "strata": len(sample.sizes)})
        rows["requests of the log"] = covered
        for name, size in available.items():
            share = f"{size / sample.facts.requests:.1%} of the workload"
            rows[f"stratum {name}"] = f"{used[name]:,} of {size:,} requests ({share})"
    for name, count in used.items() if sample is None else ():
        number = f"{count} of {available[name]} prompts (prompts.limit)"
        if available[name] <= count:
            number = fmt.number_of(count, "prompt", "prompts")
        rows[f"prompt set {name}"] = number
    turns = sum(len(prompt.answered) for prompt in prompts)
    if turns != len(prompts):
        missing, budget = missing_answers(prompts), config.new_tokens
        rows["turns"] = f"{turns}, one generation for each"
        rows["earlier answers"] = f"{missing} by the target, {budget} tokens at most"
    return rows


def _model_line(conf: ModelConf) -> str:
    if conf.weights != "dummy":
        return conf.name if conf.name == conf.id else f"{conf.name} ({conf.id})"
    weights = architecture_of(conf.architecture or {}).parameters * SERVED_BYTES
    return f"{conf.name} (dummy weights, {weights / 1e9:,.3g} GB in bfloat16)"


# ---- costs ---------------------------------------------------------------------------------------


def _costs(
    config: Config,
    prompts: Sequence[Prompt],
    work: Sequence[Forwards],
    drafts: Sequence[ModelConf] = (),
    most: int | None = None,
) -> Table | str:
    """Time and cost of the work, and of answers to earlier turns, on the cheapest cards.

    These are at most so many, or all; those that hold the models come first. `drafts` are an
    audition's; else there is the pair's.
    """
    if not isinstance(config, AuditionConfig):
        drafts = [config.draft]
    if isinstance(config, ServerConfig) and (config.model.gguf or config.draft.gguf):
        return "estimated cost: unknown; the sizes in a GGUF file are not read here"
    if isinstance(config, ServerConfig | ProfileConfig) and (waiting := missing_answers(prompts)):
        work = [*work, *text_forwards(waiting, config.new_tokens, BATCH)]
    sizes = model_sizes(config, drafts)
    confs = {"target": config.model} | {name_of(config, conf): conf for conf in drafts}
    unknown = " and ".join(confs[name].name for name, size in sizes.items() if size is None)
    if unknown:
        return (
            f"estimated cost: unknown; the sizes of {unknown} are not in its config"
            " (model.architecture={family: ..., layers: ...} gives them)"
        )
    known = {name: size for name, size in sizes.items() if size is not None}
    # Of a typical step: the mean over all turns, with half of the text generated
    lengths = prompt_sets.estimated_tokens(prompts, config)
    context = sum(lengths) // len(lengths) + config.new_tokens // 2
    card = getattr(config, "gpu", None)
    cards = [card] if card is not None else all_cards()
    estimates = [estimate(work, known, card_of(card), context) for card in cards]
    return cost_table(sorted(estimates, key=lambda row: (not row.fits, row.high_usd))[:most])


def all_cards() -> list[GpuConf]:
    files = sorted((CONF_DIR / "gpu").glob("*.yaml"))
    merged = (OmegaConf.merge(OmegaConf.structured(GpuConf), OmegaConf.load(f)) for f in files)
    return [card for entry in merged if isinstance(card := OmegaConf.to_object(entry), GpuConf)]


def card_of(card: GpuConf) -> Card:
    return Card(
        card.name, card.bandwidth_gb_s, card.bf16_tflops, card.memory_gb, card.price_per_hour_usd
    )
