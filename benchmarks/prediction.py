"""How far are predictions from measurements? Cell by cell, for every K and temperature.

    python benchmarks/prediction.py --folder runs   # the embedded pair, then a random one
    python benchmarks/prediction.py --folder runs_cpu --pair embedded clock=cpu
    python benchmarks/prediction.py --folder others model=qwen3_4b draft=qwen3_0_6b

Each run is a sweep of the product with 16 texts in every cell and a seed of its own, and every
number comes from what it stored. Runs that the folder has are not measured again, so that another
version of the analysis, in another checkout, says its errors of the same runs. The random pair is
made from config classes: 8 layers, of which the draft has the first two, and the others change
little, so that its tokens are accepted often. Two errors are distinguished, both as predicted /
measured - 1:

- time: measured tokens per round x R(0) / R(K), against the measured speedup. Acceptance is what
  happened, so the error is that of the round times, which were taken on other texts.
- whole: the prediction as the report gives it, tokens per round by replay (or by the synthetic
  acceptance that was asked for), against the measured speedup, both of the prompts that were
  measured. At temperature 0 replay is exact; at others the text differs between K, and synthetic
  acceptance is drawn at all. There z says how far the predicted tokens per round are from the
  observed ones, in standard errors.

After the runs of a pair come the errors of all cells of 16 texts or more, and the mean of each
temperature and K: what remains there is not noise of a run, but a direction.

The last column marks a cell whose alpha is above break-even although its measured speedup lies
below 1 with its whole interval: such a cell would mislead whoever goes by alpha.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from harness.analysis import analyse
from harness.analysis.cells import completed, latest, new_tokens, per_prompt
from harness.analysis.round_costs import latency_of_draft
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import errors_of, pair_run
from harness.cli import compose
from harness.commands import sweep
from harness.models import embedded
from harness.records import Cell, UserError
from harness.stats.jackknife import workload_ratio
from harness.storage import StoredRun, load

TEXTS = 16
GRID = ["temperature=[0,1]", "k=[1,2,4,8]", "threads=1", "until=all", "repetitions=1"]
GRID.append(f"prompts.limit={TEXTS}")
PAIRS = ("embedded", "random")
# The random pair: a token of the target takes a few milliseconds, and logits are as far apart as
# those of trained models, so that texts differ and sampling is no coin toss
LAYERS, DRAFT_LAYERS, HIDDEN, HEAD_STD = 8, 2, 256, 0.15
# Of the layers that the draft lacks: their weights' size, 1 being that of the first ones
LATER = 0.8
CELL = ["prompt_set", "temperature", "k"]


@dataclass(frozen=True)
class Errors:
    """Of many cells: median of the absolute ones, mean with sign, 95th percentile."""

    median: float
    mean_signed: float
    p95: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> "Errors":
        """From predicted / measured - 1 of each cell."""
        size = np.abs(errors)
        return cls(float(np.median(size)), float(np.mean(errors)), float(np.percentile(size, 95)))

    def __str__(self) -> str:
        return f"median {self.median:.1%}, mean {self.mean_signed:+.1%}, p95 {self.p95:.1%}"


def cells(run: StoredRun) -> pd.DataFrame:
    """A row per measured cell that drafts, with its errors."""
    rows = run.results[(run.results.k > 0) & (run.results.status == "complete")]
    measured = rows[rows.source == "measured"].set_index(CELL)
    predicted = rows[rows.source == "replayed"].set_index(CELL)
    draft = str(run.config["draft"]["name"])
    times = {t: latency_of_draft(run, draft, t) for t in {cell[1] for cell in measured.index}}
    checks = {(c.prompt_set, c.temperature, c.k): c for c in analyse(run).replay_checks}
    errors = errors_of(pair_run(Setup(run))).values()
    gaps = {cell: gap.value for error in errors for cell, gap in error.gaps.items()}
    table: list[dict[str, object]] = []
    for cell, row in cast(Iterable[tuple[Any, Any]], measured.iterrows()):
        prompt_set, temperature, k = cell
        latency, check = times[temperature], checks.get((prompt_set, temperature, k))
        assert latency is not None
        assert latency.visits is not None, "the run timed no rounds"
        speedup = latency.rounds.speedup(row.tokens_per_round, k)
        needed = latency.rounds.break_even_alpha(k)
        whole = predicted.speedup[cell] / row.speedup - 1
        if Cell(*cell) in gaps:
            whole = math.expm1(gaps[Cell(*cell)])
        z = None if check is None else check.gap_in_standard_errors
        if check is None:
            z = gap_of_synthetic(run, Cell(*cell), predicted.tokens_per_round[cell])
        table.append(
            {
                **dict(zip(CELL, (prompt_set, temperature, k), strict=True)),
                "texts": row.prompts,
                "measured": row.speedup,
                "lo": row.speedup_lo,
                "hi": row.speedup_hi,
                "time": speedup / row.speedup - 1,
                "whole": whole,
                "z": z,
                "misleads": needed is not None and row.alpha > needed and row.speedup_hi < 1,
            }
        )
    return pd.DataFrame(table)


def gap_of_synthetic(run: StoredRun, cell: Cell, expected: float) -> float | None:
    """How far observed tokens per round are from the expected ones, in standard errors."""
    trials = [trial for trial in completed(latest(run.trials)) if trial.cell_key == cell]
    sums = per_prompt(trials, [new_tokens, lambda trial: trial.rounds or 0])
    counts = np.array(list(sums.values()))
    observed = workload_ratio(counts[:, 0], counts[:, 1])
    error = observed.standard_error
    return (float(observed.value) - expected) / error if error else None


def shown(name: str, number: int, table: pd.DataFrame, console: Console) -> None:
    """Print a run's cells."""
    columns = (
        "set",
        "T",
        "K",
        "texts",
        "measured",
        "interval",
        "time",
        "whole",
        "z",
        "alpha misleads",
    )
    page = Table(title=f"{name}, run {number}")
    for column in columns:
        page.add_column(column, justify="left" if column == "set" else "right")
    for row in cast(Iterable[Any], table.itertuples()):
        page.add_row(
            str(row.prompt_set),
            f"{row.temperature:g}",
            str(row.k),
            f"{row.texts:.0f}",
            f"{row.measured:.2f}x",
            f"{row.lo:.2f} to {row.hi:.2f}" if pd.notna(row.lo) else "",
            f"{row.time:+.1%}",
            f"{row.whole:+.1%}",
            f"{row.z:+.1f}" if pd.notna(row.z) else "",
            "yes" if row.misleads else "",
        )
    console.print(page)


def summaries(table: pd.DataFrame) -> dict[str, Errors]:
    """The errors that a run is judged by."""
    errors = {"time": Errors.of(table.time.tolist()), "whole": Errors.of(table.whole.tolist())}
    for temperature, rows in table.groupby("temperature"):
        errors[f"whole, T={temperature:g}"] = Errors.of(rows.whole.tolist())
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="further words are keys of harness.sweep, of these pairs or of another",
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the runs")
    parser.add_argument("--runs", type=int, default=5, help="sweeps of each pair")
    parser.add_argument("--pair", choices=PAIRS, help="only this one")
    parser.add_argument("keys", nargs="*", help="keys of harness.sweep")
    asked = parser.parse_args()
    console = Console(width=100)
    names = [asked.pair] if asked.pair else PAIRS
    if any(word.startswith("model=") for word in asked.keys):
        names = ["other"]
    for name in names:
        folder = asked.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        keys = [*GRID, *pair_keys(name, folder / "models"), *asked.keys]
        tables: list[pd.DataFrame] = []
        for number, run in enumerate(swept(folder / "runs", keys, asked.runs), 1):
            tables.append(cells(run))
            shown(name, number, tables[-1], console)
            console.print(f"  other processes kept {others(run):.2f} processors busy")
            for what, errors in summaries(tables[-1]).items():
                console.print(f"  {what}: {errors}")
        table = pd.concat(tables)
        many = table[table.texts >= TEXTS]
        console.print(f"{name}, {len(many)} cells of {TEXTS} texts or more:")
        for what, errors in summaries(many).items():
            console.print(f"  {what}: {errors}")
        for (temperature, k), rows in table.groupby(["temperature", "k"]):
            mean = rows.whole.mean()
            console.print(f"  T={temperature:g}, K={k}: {mean:+.1%} in the mean of all runs")
        worst = table.z.dropna().abs().max()  # 0 where replay is exact
        console.print(f"  largest |z| of predicted tokens per round: {worst:.1f}")
        console.print(f"  cells where alpha misleads: {table.misleads.sum()}")


def others(run: StoredRun) -> float:
    """Processors that others kept busy while the run measured, on average."""
    load = run.manifest.other_load
    return math.nan if load is None else load.load


def pair_keys(name: str, folder: Path) -> list[str]:
    """The keys of a pair; the random one, a target and its first layers, is written first."""
    if name != "random":
        return []
    torch.manual_seed(0)
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    shipped = Path(embedded.__file__).parent / "tiny"
    vocabulary = json.loads((shipped / "config.json").read_text())
    settings |= {name: vocabulary[name] for name in ("vocab_size", "eos_token_id")}
    target = Qwen3ForCausalLM(Qwen3Config(**settings, num_hidden_layers=LAYERS))
    torch.nn.init.normal_(target.lm_head.weight, std=HEAD_STD)
    torch.nn.init.normal_(target.model.embed_tokens.weight, std=1.0)
    for layer in cast(Iterable[Any], target.model.layers[DRAFT_LAYERS:]):
        for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
            out.weight.data.mul_(LATER)
    draft = Qwen3ForCausalLM(Qwen3Config(**settings, num_hidden_layers=DRAFT_LAYERS))
    draft.load_state_dict(target.state_dict(), strict=False)
    keys = ["new_tokens=48"]
    for role, network in (("model", target), ("draft", draft)):
        shown = f"{network.config.num_hidden_layers} layers"
        place = folder / role
        network.save_pretrained(place)
        for file in shipped.glob("tokenizer*.json"):
            shutil.copy(file, place)
        keys += [f"{role}=hf", f"{role}.id={place}", f"{role}.name={shown}"]
    return keys


def swept(folder: Path, keys: Sequence[str], number: int) -> list[StoredRun]:
    """So many sweeps, those that the folder has among them, without what they print."""

    def made() -> list[Path]:
        return sorted(path.parent for path in folder.glob("*/summary.json"))

    while (seed := len(made()) + 1) <= number:
        with redirect_stdout(StringIO()):
            outcome = sweep.run(compose("sweep", [*keys, f"seed={seed}", f"results_root={folder}"]))
        if outcome.folder is None or outcome.error is not None:
            raise UserError(f"the sweep ended without results: {outcome.reason}")
    return [load(path) for path in made()[:number]]


if __name__ == "__main__":
    main()
