"""What a round costs on some data sets predicts the speedup on another: on published results.

    python benchmarks/published.py [FILE.csv]

A server's speedup and acceptance length say what its rounds cost in plain tokens:

    R(K) / R(0) = acceptance length / speedup

For each chain (topk = 1) of a target, head and batch, the cost is taken from all data sets but one,
by the median, and the speedup of the one left out is predicted from its acceptance length alone.
Trees are not: theirs is another cost for another number of positions.

A round that costs less than a plain token is impossible: the head drafts and the target verifies
more than one position. It means that the throughput without the head was too low, so every chain
that was compared with that throughput is flagged, and is left out of the last line. The flag is
raised by measured speedups, those that are judged among them, so that the line before it says how
many chains were left out, and the median error with them.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

DEFAULT = Path(__file__).parent / "published" / "specbundle.csv"
# What shares a round's cost, and what shares a throughput without a head
SAME_ROUND = ["target", "draft", "batch", "steps", "num_draft_tokens"]
SAME_PLAIN = ["target", "data_set", "batch", "plain_throughput"]
COLUMNS = [*SAME_ROUND, "data_set", "topk", "accept_length", "throughput", "plain_throughput"]


def main() -> None:
    """Print a row per chain, and the median error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT)
    file = parser.parse_args().file
    try:
        results = pd.read_csv(file)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {file}: {error}")
    missing = [name for name in COLUMNS if name not in results]
    if missing:
        sys.exit(f"error: {file}: no column {missing[0]}; there must be {', '.join(COLUMNS)}")
    chains = predicted(results[results["topk"] == 1])
    Console(width=140).print(table(chains))
    judged = chains[chains["error"].notna()]
    if judged.empty:
        sys.exit(f"error: {file}: no chain was measured on two data sets")
    flagged, alone = chains["impossible"].sum(), (~chains["impossible"]).sum() - len(judged)
    every = predicted(chains, flag=False)["error"].dropna().abs()
    print(
        f"{flagged} of {len(chains)} chains left out, for their throughput without a head is"
        f" impossible; with them median error {100 * every.median():.1f} %, largest"
        f" {100 * every.max():.1f} % over {len(every)} chains"
    )
    if alone:
        print(f"{alone} chains have no other data set")
    print(f"largest error {100 * judged['error'].abs().max():.1f} %")
    print(f"median error {100 * judged['error'].abs().median():.1f} % over {len(judged)} chains")


def predicted(chains: pd.DataFrame, *, flag: bool = True) -> pd.DataFrame:
    """The chains with speedup, cost of a round in plain tokens, prediction and its error.

    Args:
        chains: rows of the file.
        flag: whether chains that rest on an impossible throughput are neither used nor judged.
    """
    speedup = chains["throughput"] / chains["plain_throughput"]
    rows = chains.assign(speedup=speedup, cost=chains["accept_length"] / speedup)
    rows["impossible"] = rows.groupby(SAME_PLAIN)["cost"].transform("min") < 1
    usable = rows[~rows["impossible"]] if flag else rows
    for _, group in usable.groupby(SAME_ROUND):
        for index in group.index:
            others = group["cost"].drop(index)
            rows.loc[index, "others_cost"] = others.median()
    rows["predicted"] = rows["accept_length"] / rows["others_cost"]
    rows["error"] = rows["predicted"] / rows["speedup"] - 1
    return rows


def table(chains: pd.DataFrame) -> Table:
    """One row per chain."""
    shown = Table()
    for name in ("target", "batch", "K", "data set"):
        shown.add_column(name)
    for name in ("accept length", "round / plain token", "measured", "predicted", "error"):
        shown.add_column(name, justify="right")
    for row in chains.to_dict("records"):
        judged = row["error"] == row["error"]  # NaN is not itself
        shown.add_row(
            str(row["target"]),
            str(row["batch"]),
            str(row["steps"]),
            str(row["data_set"]),
            f"{row['accept_length']:.2f}",
            f"{row['cost']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['predicted']:.2f}x" if judged else "-",
            f"{100 * row['error']:+.1f} %" if judged else "impossible" * row["impossible"],
        )
    return shown


if __name__ == "__main__":
    main()
