"""One target on several cards: where is a token fastest, and where is it cheapest?

A speedup is a ratio within one card and says nothing between cards: a slow card may have the larger
one. What compares is a token's time and, where the card has a price, a token's price, each with
what the evidence says to serve there: the draft if speculation pays, plain decoding if it does not
or is undecided.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.analysis.setup import Setup, card_of, ran_on
from harness.command_words import as_typed
from harness.records import UserError
from harness.storage import StoredRun
from harness.summary import CardRow, Summary
from harness.theory.cost import money, usd_per_million_tokens

# What must be alike for two auditions to be compared.
ALIKE = ("k", "temperature", "new_tokens", "repetitions", "seed", "decode", "backend", "p_min")
ALIKE_MODEL = ("id", "revision", "dtype", "weights", "quantization")


@dataclass(frozen=True)
class RankedCards:
    """Cards by what a token costs on them."""

    best: int  # index of the run on the best card at the first temperature
    cards: tuple[CardRow, ...]  # by temperature, the best first


def rank_cards(runs: Sequence[StoredRun], summaries: Sequence[Summary]) -> RankedCards:
    _check(runs, summaries)
    names = _names(runs)
    cards: list[CardRow] = []
    for name, run, summary in zip(names, runs, summaries, strict=True):
        cards += _card_rows(name, run, summary)
    ranked = _by_price(cards)
    first = [row for row in ranked if row.temperature == ranked[0].temperature]
    placed = [
        replace(row, place=1 + sum(other.temperature == row.temperature for other in ranked[:at]))
        for at, row in enumerate(ranked)
    ]
    return RankedCards(names.index(first[0].card), tuple(placed))


def _check(runs: Sequence[StoredRun], summaries: Sequence[Summary]) -> None:
    for run, summary in zip(runs, summaries, strict=True):
        if run.door != "audition":
            raise UserError(f"combine: {run.folder} was made by {run.door}, not by audition")
        if not summary.leaderboards or not summary.per_temperature:
            raise UserError(
                f"combine: {run.folder} ranked no draft; {as_typed('resume', run.folder)}"
                " continues it"
            )
        if run.manifest.cards:
            raise UserError(
                f"combine: {run.folder} is combined already; name the runs it was made of"
            )
    first = runs[0]
    for other in runs[1:]:
        differing = [*_differing(first, other)]
        if differing:
            raise UserError(
                f"combine: {other.folder} and {first.folder} differ in {', '.join(differing)}; "
                "only runs of one audition can be combined"
            )


def _differing(one: StoredRun, two: StoredRun) -> Iterator[str]:
    configs = one.config, two.config
    yield from (key for key in ALIKE if configs[0].get(key) != configs[1].get(key))
    models = [config["model"] for config in configs]
    for key in ALIKE_MODEL:
        if models[0].get(key) != models[1].get(key):
            yield f"model.{key}"
    if configs[0]["prompts"].get("weights") != configs[1]["prompts"].get("weights"):
        yield "prompts.weights"
    if one.manifest.prompts_sha256 != two.manifest.prompts_sha256:
        yield "prompts"


def _names(runs: Sequence[StoredRun]) -> list[str]:
    """The card's name where that is what ran, else the device's; each once."""
    names: list[str] = []
    for run in runs:
        setup = Setup(run)
        device = _device(setup)
        card = card_of(setup)
        names.append(card.name if card and ran_on(setup, card) else device)
        if names.count(names[-1]) > 1:
            asked = card.name if card else "no gpu="
            names[-1] = f"{names[-1]} (asked for {asked})"
        if names.count(names[-1]) > 1:
            raise UserError(
                f"combine: {run.folder} and another run are both of {names[-1]}; audition all"
                " drafts in one run"
            )
    return names


def _device(setup: Setup) -> str:
    return setup.environment.device_name or "typed latencies"


def _card_rows(name: str, run: StoredRun, summary: Summary) -> Iterator[CardRow]:
    """One per temperature, not yet placed."""
    price = summary.price_per_hour_usd
    rental = run.manifest.cloud
    seconds, rate = (rental.seconds, rental.price_per_hour_usd) if rental else (None, None)
    for answer in summary.per_temperature:
        gain = answer.speedup if answer.speculates and answer.speedup else 1.0
        at = (None, answer.temperature)
        times = min(summary.round_times, key=lambda each, at=at: each.temperature not in at)
        # The first draft's, to which others are scaled
        plain_s = times.plain_s if times.other_plain_s is None else times.other_plain_s
        yield CardRow(
            place=0,
            card=name,
            device=_device(Setup(run)),
            temperature=answer.temperature,
            decision=answer.decision,
            draft=answer.draft,
            k=answer.k,
            speedup=answer.speedup,
            speedup_lo=answer.speedup_lo,
            speedup_hi=answer.speedup_hi,
            plain_s=plain_s,
            seconds_per_token=plain_s / gain,
            price_per_hour_usd=price,
            plain_usd_per_million_tokens=_price(plain_s, price),
            usd_per_million_tokens=_price(plain_s / gain, price),
            rented_s=seconds,
            spent_usd=None if seconds is None or rate is None else money(seconds, rate),
        )


def _by_price(rows: Sequence[CardRow]) -> list[CardRow]:
    """By temperature, the cheapest first; the fastest, where any card has no price."""
    priced = all(row.usd_per_million_tokens is not None for row in rows)
    temperatures = list(dict.fromkeys(row.temperature for row in rows))

    def order(row: CardRow) -> tuple[int, float, float]:
        price = (row.usd_per_million_tokens or 0.0) if priced else 0.0
        return temperatures.index(row.temperature), price, row.seconds_per_token

    return sorted(rows, key=order)


def _price(seconds_per_token: float, price_per_hour: float | None) -> float | None:
    if price_per_hour is None:
        return None
    return usd_per_million_tokens(seconds_per_token, price_per_hour)
