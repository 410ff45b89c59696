"""What the card of a run costs, and whether the run was on that card at all."""

from typing import Any

from harness.analysis.setup import is_card
from harness.records import Verdict
from harness.storage import StoredRun
from harness.theory.cost import usd_per_million_tokens
from harness.theory.speedup import StepTimes


def other_card(stored: StoredRun) -> str | None:
    """A caveat where another card ran than `gpu=` names; a cloud may upgrade without a word."""
    if not stored.config.get("gpu") or _of_card(stored):
        return None
    device = _environment(stored).get("device_name") or "another device"
    return (
        f"gpu={stored.config['gpu']['name']} was asked for and {device} ran: the step times are"
        " those of what ran, and no cost is given"
    )


def prices(
    stored: StoredRun, verdict: Verdict | None, times: StepTimes | None
) -> dict[str, float | int | str | None]:
    """The price of a token on the card of the run, plain and as the verdict says to serve.

    Empty where no card is named, or another one ran.
    """
    if verdict is None or times is None or not stored.config.get("gpu") or not _of_card(stored):
        return {}
    price = float(stored.config["gpu"]["price_per_hour_usd"])
    plain = usd_per_million_tokens(times.target_s, price)
    gain = verdict.speedup if verdict.speculate and verdict.speedup else 1.0
    return {
        "price_per_hour_usd": price,
        "plain_usd_per_million_tokens": plain,
        "usd_per_million_tokens": plain / gain,
    }


def _of_card(stored: StoredRun) -> bool:
    gpu, here = stored.config["gpu"], _environment(stored)
    name, memory = here.get("device_name"), here.get("device_memory_bytes")
    return is_card(gpu["name"], gpu["memory_gb"], name, memory)


def _environment(stored: StoredRun) -> dict[str, Any]:
    return stored.manifest.get("environment") or {}
