"""Costs of tokens and runs: prices, and the time of a run before anything is rented.

A run is a list of forwards; each takes at least its floor (`roofline.forward_floor`), and in an
engine that launches its kernels one by one at least so much per layer. So a run lies between two
numbers: one where every forward is at its floor, and one where launching decides. The slow one is a
typed rate: the post this harness began with measured 29.9 ms a step on 36 layers and 22.1 ms on 28,
on an A10G, which is 0.8 ms a layer. How many rounds a generation takes depends on the acceptance,
which nobody knows beforehand; an alpha is typed in.

Texts may end before their budget, and then a run is shorter; a start takes what its machine takes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.records import UserError
from harness.theory.acceptance import expected_tokens_per_round
from harness.theory.architecture import Architecture
from harness.theory.memory import MemoryFit, ModelBytes, usable_bytes
from harness.theory.roofline import Card, forward_floor

SECONDS_PER_HOUR = 3600.0
SECONDS_PER_LAYER = 0.8e-3
ALPHA = 0.6
# A container with its image and Python, then weights from the hub or the volume; rates of thumb.
START_S = 60.0
LOAD_BYTES_PER_S = 0.5e9
# How often each step is timed, in every command that times steps.
TIMINGS = 40


def money(seconds: float, price_per_hour: float) -> float:
    """Price of that much time, in the currency of the price."""
    return seconds * price_per_hour / SECONDS_PER_HOUR


def usd_per_million_tokens(seconds_per_token: float, price_per_hour: float) -> float:
    """Price of 10^6 emitted tokens, in the currency of the price.

    Of one sequence at a time; or, with the mean time from token to token of all, of a fleet.
    """
    if not (math.isfinite(seconds_per_token) and seconds_per_token > 0.0):
        raise UserError(f"seconds_per_token={seconds_per_token}: must be above 0")
    if not (math.isfinite(price_per_hour) and price_per_hour >= 0.0):
        raise UserError(f"price_per_hour={price_per_hour}: must be 0 or more")
    return money(seconds_per_token * 1e6, price_per_hour)


@dataclass(frozen=True)
class ModelSize:
    """A model of the run; one that is `shared` has its weights in another, the target."""

    shape: Architecture
    bytes_per_parameter: float
    shared: bool = False

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights of its own."""
        return 0.0 if self.shared else self.shape.parameters * self.bytes_per_parameter

    @property
    def memory(self) -> ModelBytes:
        """Its bytes in memory, the cache in the dtype of its weights."""
        return ModelBytes(self.weight_bytes, self.shape.kv_bytes_read(1, self.bytes_per_parameter))


@dataclass(frozen=True)
class Forwards:
    """Forwards of one kind."""

    model: str  # its name
    count: float  # how many; an expectation, so no whole number
    tokens: int = 1  # new positions of each sequence
    batch: int = 1  # sequences side by side


@dataclass(frozen=True)
class Estimate:
    """The time and cost of a run on a card.

    low_s, high_s: all of it, with every forward at its floor, and launched layer by layer.
    """

    card: str
    fits: bool  # whether the weights do
    start_s: float  # until the first forward
    low_s: float
    high_s: float
    low_usd: float
    high_usd: float
    price_per_hour: float


def pair_forwards(
    ks: Sequence[int], generations: float, new_tokens: int, alpha: float = ALPHA
) -> list[Forwards]:
    """The forwards of measured generations, every K in turn, without their prompts.

    `ks` has 0 for plain decoding; at each K there are so many generations, each of `new_tokens`.
    `alpha` is the probability that a draft token is accepted, given that all before it were.
    """
    tokens = generations * new_tokens
    work: list[Forwards] = []
    for k in ks:
        if k == 0:
            work.append(Forwards("target", tokens))
            continue
        rounds = tokens / expected_tokens_per_round(alpha, k)
        work += [Forwards("draft", k * rounds), Forwards("target", rounds, k + 1)]
    return work


def text_forwards(texts: int, new_tokens: int, batch: int) -> list[Forwards]:
    """The forwards that generate the target's completions in batches."""
    full, rest = divmod(texts, batch)
    sizes = [batch] * full + ([rest] if rest else [])
    return [Forwards("target", new_tokens, 1, size) for size in sizes]


def timing_forwards(max_k: int, draft: str) -> list[Forwards]:
    """The forwards that time one draft with the target: a step of each, and every verify."""
    verifies = [Forwards("target", TIMINGS, tokens) for tokens in range(1, max_k + 2)]
    return [Forwards(draft, TIMINGS), Forwards("target", TIMINGS), *verifies]


def forwards_s(
    work: Sequence[Forwards], models: Mapping[str, ModelSize], card: Card, context_tokens: int
) -> tuple[float, float]:
    """Seconds of the forwards, all at their floors, and launched layer by layer; see `estimate`."""
    low = high = 0.0
    for entry in work:
        model = models.get(entry.model)
        if model is None:
            continue
        floor = forward_floor(
            model.shape,
            card,
            tokens=entry.tokens,
            context_tokens=context_tokens,
            batch=entry.batch,
            bytes_per_parameter=model.bytes_per_parameter,
        )
        low += entry.count * floor
        high += entry.count * max(floor, model.shape.layers * SECONDS_PER_LAYER)
    return low, high


def estimate(
    work: Sequence[Forwards], models: Mapping[str, ModelSize], card: Card, context_tokens: int
) -> Estimate:
    """Time and cost of forwards on a card with a price.

    Args:
        models: by name, `target` among them; a drafter without a model (an n-gram) costs nothing.
        context_tokens: of a typical step.
    """
    drafts = [model for name, model in models.items() if name != "target"]
    # An audition loads one draft after the other.
    heaviest = sorted(drafts, key=lambda model: model.weight_bytes)[-1:]
    together = tuple(model.memory for model in (models["target"], *heaviest))
    start = START_S + sum(model.weight_bytes for model in models.values()) / LOAD_BYTES_PER_S
    low, high = (start + seconds for seconds in forwards_s(work, models, card, context_tokens))
    price = card.price_per_hour_usd or 0.0
    return Estimate(
        card=card.name,
        fits=MemoryFit(usable_bytes(card.memory_gb), together).fits,
        start_s=start,
        low_s=low,
        high_s=high,
        low_usd=money(low, price),
        high_usd=money(high, price),
        price_per_hour=price,
    )
