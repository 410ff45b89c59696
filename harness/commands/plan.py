"""What would be run, without running it (`dry_run=true`)."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harness import prompts as prompt_sets
from harness.commands.cost import answers, audition_costs, pair_costs, turns
from harness.config import AuditionConfig, ModelConf, PairConfig, ProfileConfig, SnapshotConfig
from harness.records import Prompt
from harness.reporting.cost import NOTES, Costs, cost_table, unknown_line
from harness.theory.architecture import architecture_of

BYTES_PER_PARAMETER = 2
BACKENDS = {
    "auto": "auto: CUDA graphs on CUDA where the model allows, else eager",
    "eager": "eager",
    "cuda_graphs": "CUDA graphs",
}


def print_plan(
    config: PairConfig, prompts: Sequence[Prompt], temperatures: Sequence[float]
) -> None:
    """Print cells, generations and the most tokens they can emit; no model is loaded."""
    ks = [0, *(k for k in config.k if k > 0)]
    sets = list(dict.fromkeys(prompt.prompt_set for prompt in prompts))
    cells = len(sets) * len(temperatures) * len(ks)
    generations = turns(prompts) * len(temperatures) * len(ks) * config.repetitions
    table = Table(title="plan (nothing is run)", show_header=False)
    table.add_row("backend", BACKENDS[config.backend])
    table.add_row("target", _said(config.model))
    table.add_row("draft", _said(config.draft))
    table.add_row("K", ", ".join("0 (baseline)" if k == 0 else str(k) for k in ks))
    table.add_row("temperature", ", ".join(f"{value:g}" for value in temperatures))
    for name in sets:
        count = sum(prompt.prompt_set == name for prompt in prompts)
        table.add_row(f"prompt set {name}", f"{count} prompts")
    _add_turns(table, config, prompts)
    table.add_row("cells", str(cells))
    table.add_row("generations", f"{generations} (repetitions={config.repetitions})")
    table.add_row("tokens, at most", f"{generations * config.new_tokens:,}")
    Console(highlight=False).print(table)
    _print_costs(pair_costs(config, prompts, temperatures))


def print_profile_plan(config: ProfileConfig, prompts: Sequence[Prompt]) -> None:
    """Print what a profile would generate, plainly with each model, and time."""
    models = 1 if config.model == config.draft else 2
    generations = turns(prompts) * models * config.repetitions
    table = Table(title="plan (nothing is run)", show_header=False)
    table.add_row("backend", BACKENDS[config.backend])
    table.add_row("target", _said(config.model))
    table.add_row("draft", _said(config.draft))
    table.add_row("prompts", str(len(prompts)))
    _add_turns(table, config, prompts)
    table.add_row("generations, plain", f"{generations} (each model alone)")
    table.add_row("tokens, at most", f"{generations * config.new_tokens:,}")
    table.add_row("steps and verifies", f"1 to {max(config.k) + 1} positions")
    table.add_row("rounds in parts", f"K = {', '.join(str(k) for k in config.k if k > 0)}")
    Console(highlight=False).print(table)
    _print_costs(pair_costs(config, prompts, [0.0]))


def print_snapshot_plan(config: SnapshotConfig, prompts: Sequence[Prompt]) -> None:
    """Print what a snapshot would generate and draw: texts at temperature 0 only, laws above."""
    ks = [k for k in config.k if k > 0]
    compared = turns(prompts) * config.repetitions if 0 in config.temperature else 0
    warm = [value for value in config.temperature if value]
    table = Table(title="plan (nothing is run)", show_header=False)
    table.add_row("backend", BACKENDS[config.backend])
    table.add_row("target", _said(config.model))
    table.add_row("draft", _said(config.draft))
    table.add_row("K", ", ".join(map(str, ks)))
    table.add_row("prompts", str(len(prompts)))
    _add_turns(table, config, prompts)
    table.add_row("generations", f"{compared * (1 + len(ks))} (temperature 0)")
    table.add_row("tokens, at most", f"{compared * (1 + len(ks)) * config.new_tokens:,}")
    draws = len(warm) * len(ks) * config.draws
    table.add_row("draws from one prefix", f"{draws:,} (temperatures above 0)")
    Console(highlight=False).print(table)


def print_audition_plan(
    config: AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> None:
    """Print what an audition would generate and score; no model is loaded."""
    texts = sum(
        turns(prompts) * (config.repetitions if temperature else 1)
        for temperature in config.temperature
    )
    ks = [k for k in config.k if k > 0]
    table = Table(title="plan (nothing is run)", show_header=False)
    table.add_row("backend", BACKENDS[config.backend])
    table.add_row("target", _said(config.model))
    for conf in drafts:
        table.add_row("draft", _said(conf))
    table.add_row("temperature", ", ".join(f"{value:g}" for value in config.temperature))
    _add_turns(table, config, prompts)
    table.add_row("texts of the target", str(texts))
    table.add_row("tokens, at most", f"{texts * config.new_tokens:,}")
    table.add_row("prefills by the drafts", str(texts * len(drafts)))
    cells = len(ks) * len(drafts) * len(config.temperature)
    table.add_row("cells, replayed", f"{cells} (K = {', '.join(map(str, ks))})")
    Console(highlight=False).print(table)
    _print_costs(audition_costs(config, drafts, prompts, texts))


def _add_turns(
    table: Table, config: PairConfig | AuditionConfig, prompts: Sequence[Prompt]
) -> None:
    """What conversations of several turns add, where there are any."""
    if turns(prompts) == len(prompts):
        return
    budget = prompt_sets.answer_tokens(config)
    table.add_row("turns", f"{turns(prompts)}, one generation for each")
    table.add_row("earlier answers", f"{answers(prompts)} by the target, {budget} tokens at most")


def _print_costs(costs: Costs) -> None:
    console = Console(highlight=False)
    if costs.unknown:
        console.print(unknown_line(costs), soft_wrap=True, markup=False)
        return
    console.print(cost_table(costs))
    console.print(NOTES, markup=False)


def _said(conf: ModelConf) -> str:
    """A model with its source, and its size in memory where its config tells it."""
    if conf.weights != "dummy":
        return f"{conf.name} ({conf.id})"
    weights = architecture_of(conf.architecture or {}).parameters * BYTES_PER_PARAMETER
    return f"{conf.name} (dummy weights, {weights / 1e9:,.3g} GB in bfloat16)"
