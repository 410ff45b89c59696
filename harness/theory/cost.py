"""Costs of tokens and runs: prices, and the time of a run before anything is rented.

A run is a list of forwards; each takes at least its floor (`roofline.forward_floor`), and in an
engine that launches its kernels one by one at least a fixed time per layer. So a run takes between
two times: one with every forward at its floor, and one limited by kernel launches. The rate of the
second is a constant: the post that led to this harness measured 29.9 ms a step on 36 layers and
22.1 ms on 28, on an A10G, which is 0.8 ms a layer. The rounds of a generation depend on the
acceptance, which is not known beforehand; an alpha is assumed.

Texts may end before their budget, and then a run is shorter; the time of a start is assumed, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.records import UserError
from harness.theory.acceptance import expected_tokens_per_round
from harness.theory.architecture import Architecture, MemoryFit, ModelBytes, usable_bytes
from harness.theory.roofline import Card, forward_floor

SECONDS_PER_HOUR = 3600.0
SECONDS_PER_LAYER = 0.8e-3
ALPHA = 0.6
# Assumed seconds to start a container with its image and Python, and rate of loading weights from
# the hub or the volume
START_S = 60.0
LOAD_BYTES_PER_S = 0.5e9
# Timings of each step, in every command that times steps
TIMINGS = 40


def money(seconds: float, price_per_hour: float) -> float:
    return seconds * price_per_hour / SECONDS_PER_HOUR


def usd_per_million_tokens(seconds_per_token: float, price_per_hour: float) -> float:
    """The price of 10^6 emitted tokens, in the currency of `price_per_hour`.

    It is that of one sequence at a time; or of a fleet, with the mean time between all its tokens.
    """
    if not (math.isfinite(seconds_per_token) and seconds_per_token > 0.0):
        raise UserError(f"seconds_per_token={seconds_per_token}: must be above 0")
    if not (math.isfinite(price_per_hour) and price_per_hour >= 0.0):
        raise UserError(f"price_per_hour={price_per_hour}: must be 0 or more")
    return money(seconds_per_token * 1e6, price_per_hour)


@dataclass(frozen=True)
class ModelSize:
    """The size of a model of the run."""

    shape: Architecture
    bytes_per_parameter: float
    shared: bool = False  # whether its weights are the target's, as those of an early exit

    @property
    def weight_bytes(self) -> float:
        """The bytes of its own weights; 0 where they are shared."""
        return 0.0 if self.shared else self.shape.parameters * self.bytes_per_parameter

    @property
    def memory(self) -> ModelBytes:
        """Its bytes in memory, with the KV cache in the dtype of its weights."""
        return ModelBytes(self.weight_bytes, self.shape.kv_bytes_read(1, self.bytes_per_parameter))


@dataclass(frozen=True)
class Forwards:
    """A number of forwards of one kind."""

    model: str  # its name
    count: float  # an expectation, so it need not be whole
    tokens: int = 1  # new positions of each sequence
    batch: int = 1  # sequences side by side


@dataclass(frozen=True)
class Estimate:
    """The time and cost of a run on a card.

    low_s, high_s: the whole run with every forward at its floor, and limited by kernel launches.
    """

    card: str
    fits: bool  # whether the weights and the caches of a text fit
    needed_bytes: float  # of them
    start_s: float  # until the first forward
    low_s: float
    high_s: float
    low_usd: float
    high_usd: float


def pair_forwards(
    ks: Sequence[int], generations: float, new_tokens: int, alpha: float = ALPHA
) -> list[Forwards]:
    """The forwards of so many generations at every K, 0 being plain decoding, without prefills."""
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
    """Seconds of the forwards, at their floors and limited by kernel launches; see `estimate`."""
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

    `models` are by name, with `target`; a drafter without a model (an n-gram) costs nothing.
    `context_tokens` are those of a typical step.
    """
    drafts = [model for name, model in models.items() if name != "target"]
    # An audition loads one draft at a time
    heaviest = sorted(drafts, key=lambda model: model.weight_bytes)[-1:]
    together = tuple(model.memory for model in (models["target"], *heaviest))
    memory = MemoryFit(usable_bytes(card.memory_gb), together, context_tokens)
    start = START_S + sum(model.weight_bytes for model in models.values()) / LOAD_BYTES_PER_S
    low, high = (start + seconds for seconds in forwards_s(work, models, card, context_tokens))
    price = card.price_per_hour_usd or 0.0
    return Estimate(
        card=card.name,
        fits=memory.fits,
        needed_bytes=memory.needed_bytes,
        start_s=start,
        low_s=low,
        high_s=high,
        low_usd=money(low, price),
        high_usd=money(high, price),
    )
