"""What would be run, without running it (`dry_run=true`)."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harness.config import PairConfig
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
