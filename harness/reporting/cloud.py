"""What a rented card did, in a line or two: which one it was, how long it took and what it cost."""

from dataclasses import dataclass
from pathlib import Path

from harness.reporting import formatting as fmt


@dataclass(frozen=True)
class Receipt:
    """A rented job, done or not.

    Attributes:
        name, gpu: of the job, and the card as it was asked for.
        status: as a door exits.
        error: what went wrong.
        device, upgraded: what the card called itself, and whether that is another one.
        seconds, usd: rented, and what that costs.
        price_per_hour_usd, price_date: of the card, and when that was looked up.
    """

    name: str
    gpu: str
    status: int
    error: str | None
    device: str | None
    upgraded: bool
    seconds: float
    usd: float | None
    price_per_hour_usd: float
    price_date: str


def lines(receipt: Receipt, folder: Path | None) -> tuple[str, ...]:
    """What to print of a job.

    Args:
        receipt: what it was and cost.
        folder: where its run lies now; None where nothing came back.
    """
    said = f"{receipt.name} on {receipt.gpu}"
    if folder is None:
        return (f"{said}: failed: {receipt.error}",)
    price = f"{fmt.dollars(receipt.price_per_hour_usd)} an hour, {receipt.price_date}"
    spent = f"{fmt.seconds(receipt.seconds)}, about {fmt.dollars(receipt.usd)}"
    told = [f"{said}: {spent} (the card alone, at {price})"]
    if receipt.upgraded:
        told.append(
            f"note: {receipt.gpu} was asked for and {receipt.device} ran:"
            f" these are not the latencies of {receipt.gpu}"
        )
    if receipt.error is not None:
        told += [
            f"{said}: failed: {receipt.error}",
            f"note: what it had stored came back: python -m harness.report run={folder}",
        ]
    elif receipt.status:
        told.append("note: some cells did not complete; --resume runs them again")
    return (*told, f"run: {folder}")
