"""Synthetic acceptance of a run: from the command line, or from what another run measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.cells import acceptance_by_position, completed, latest
from harness.commands.audition import check_drawn_alike, check_trusted
from harness.config import SweepConfig, rates_for
from harness.records import Prompt, UserError
from harness.storage import StoredRun, load

Rates = tuple[float, ...]
# Prompt set, temperature, K
Cell = tuple[str, float, int]


def synthetic_rates(config: SweepConfig, prompts: Sequence[Prompt]) -> dict[Cell, Rates]:
    """Unconditional rates for every (prompt set, temperature, K > 0); empty where none are set.

    Raises:
        UserError: rates that cannot be, or a run that did not measure one of the cells: none other
            stands in for it, since acceptance drifts with the text, the temperature and K alike.
    """
    decode = config.decode
    if decode.acceptance is None and decode.acceptance_from is None:
        return {}
    cells = [
        (name, float(temperature), k)
        for name in dict.fromkeys(prompt.prompt_set for prompt in prompts)
        for temperature in config.temperature
        for k in config.k
        if k > 0
    ]
    if decode.acceptance_from is None:
        return {cell: rates_for(decode.acceptance, cell[2]) for cell in cells}
    source = load(decode.acceptance_from)
    key = f"decode.acceptance_from={source.folder}"
    check_trusted(key, source)
    check_drawn_alike(key, source, decode)
    return {cell: _measured(source, cell) for cell in cells}


def _measured(source: StoredRun, cell: Cell) -> Rates:
    trials = [trial for trial in completed(latest(source.trials)) if trial.k > 0]
    measured = [t for t in trials if (t.prompt_set, t.temperature, t.k) == cell]
    if not measured:
        known = sorted({(t.prompt_set, t.temperature, t.k) for t in trials})
        has = ", ".join(f"{name} T={value:g} K={k}" for name, value, k in known)
        raise UserError(
            f"decode.acceptance_from={source.folder}: no generations of {cell[0]} at "
            f"T={cell[1]:g}, K={cell[2]}; it has {has or 'none with a draft'}"
        )
    # Few rounds can leave a later position a little above the one before it
    falling: list[float] = []
    for rate in acceptance_by_position(measured):
        falling.append(min(rate, falling[-1]) if falling else rate)
    if len(falling) < cell[2]:
        raise UserError(
            f"decode.acceptance_from={source.folder}: its texts of {cell[0]} at T={cell[1]:g} are "
            f"too short to show more than {len(falling)} of K={cell[2]} positions; lower k or take "
            "a run with a larger new_tokens"
        )
    return tuple(falling)


def as_stored(rates: Mapping[Cell, Rates]) -> list[dict[str, Any]]:
    """The manifest's entry, so that the run explains itself when its source is gone."""
    return [
        {"prompt_set": name, "temperature": temperature, "k": k, "rates": list(shares)}
        for (name, temperature, k), shares in rates.items()
    ]


def stored_rates(manifest: Mapping[str, Any]) -> dict[Cell, Rates]:
    """What `as_stored` wrote; empty where acceptance was found. An older run has another key."""
    entries = manifest.get("synthetic_acceptance") or manifest.get("imposed_acceptance") or ()
    return {
        (entry["prompt_set"], float(entry["temperature"]), int(entry["k"])): tuple(entry["rates"])
        for entry in entries
    }
