"""What would be run, without running it (`dry_run=true`)."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harness.config import AuditionConfig, ModelConf, PairConfig
from harness.records import Prompt


def print_plan(
    config: PairConfig, prompts: Sequence[Prompt], temperatures: Sequence[float]
) -> None:
    """Print cells, generations and the most tokens they can emit; no model is loaded."""
    ks = [0, *(k for k in config.k if k > 0)]
    sets = list(dict.fromkeys(prompt.prompt_set for prompt in prompts))
    cells = len(sets) * len(temperatures) * len(ks)
    generations = len(prompts) * len(temperatures) * len(ks) * config.repetitions
    table = Table(title="plan (nothing is run)", show_header=False)
    table.add_row("target", f"{config.model.name} ({config.model.id})")
    table.add_row("draft", f"{config.draft.name} ({config.draft.id})")
    table.add_row("K", ", ".join("0 (baseline)" if k == 0 else str(k) for k in ks))
    table.add_row("temperature", ", ".join(f"{value:g}" for value in temperatures))
    for name in sets:
        count = sum(prompt.prompt_set == name for prompt in prompts)
        table.add_row(f"prompt set {name}", f"{count} prompts")
    table.add_row("cells", str(cells))
    table.add_row("generations", f"{generations} (repetitions={config.repetitions})")
    table.add_row("tokens, at most", f"{generations * config.new_tokens:,}")
    Console(highlight=False).print(table)


def print_audition_plan(
    config: AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> None:
    """Print what an audition would generate and score; no model is loaded."""
    texts = sum(
        len(prompts) * (config.repetitions if temperature else 1)
        for temperature in config.temperature
    )
    ks = [k for k in config.k if k > 0]
    table = Table(title="plan (nothing is run)", show_header=False)
    table.add_row("target", f"{config.model.name} ({config.model.id})")
    for conf in drafts:
        table.add_row("draft", f"{conf.name} ({conf.id})")
    table.add_row("temperature", ", ".join(f"{value:g}" for value in config.temperature))
    table.add_row("texts of the target", str(texts))
    table.add_row("tokens, at most", f"{texts * config.new_tokens:,}")
    table.add_row("prefills by the drafts", str(texts * len(drafts)))
    cells = len(ks) * len(drafts) * len(config.temperature)
    table.add_row("cells, replayed", f"{cells} (K = {', '.join(map(str, ks))})")
    Console(highlight=False).print(table)
