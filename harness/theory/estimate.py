"""What a run would take and cost on a card, modelled before anything is rented.

A run is a list of forwards; each takes at least its memory floor (and the time of its arithmetic at
the card's dense rate), and in an engine that launches its kernels one by one at least so much per
layer. So a run lies between two numbers: one where every forward is at its floor, and one where
launching decides. The slow one is a typed rate: the post this harness began with measured 29.9 ms a
step on 36 layers and 22.1 ms on 28, on an A10G, which is 0.8 ms a layer. How many rounds a
generation takes depends on the acceptance, which nobody knows beforehand; an alpha is typed in.

Texts may end before their budget, and then a run is shorter; a start takes what its machine takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.fleet import money
from harness.theory.acceptance import expected_tokens_per_round
from harness.theory.hardware import Architecture, memory_floor_ms

SECONDS_PER_LAYER = 0.8e-3
ALPHA = 0.6
# A container with its image and Python, then weights from the hub or the volume; rates of thumb.
START_S = 60.0
LOAD_BYTES_PER_S = 0.5e9
# How often each step is timed, in every door that times steps.
TIMINGS = 40
USABLE_MEMORY = 0.9


@dataclass(frozen=True)
class Player:
    """A model in the run.

    Attributes:
        shape: its sizes.
        bytes_per_parameter: 2 for bf16.
    """

    shape: Architecture
    bytes_per_parameter: float

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        return self.shape.parameters * self.bytes_per_parameter


@dataclass(frozen=True)
class Forwards:
    """Forwards of one kind.

    Attributes:
        player: name of the model.
        count: how many; an expectation, so no whole number.
        tokens: new positions of each sequence.
        batch: sequences side by side.
    """

    player: str
    count: float
    tokens: int = 1
    batch: int = 1


@dataclass(frozen=True)
class Rates:
    """A card.

    Attributes:
        name: of conf/gpu.
        bandwidth_gb_s, tflops, memory_gb: what it can do; tflops dense in 16 bits.
        price_per_hour: US dollars.
    """

    name: str
    bandwidth_gb_s: float
    tflops: float
    memory_gb: float
    price_per_hour: float


@dataclass(frozen=True)
class Estimate:
    """What a run would take on a card.

    Attributes:
        card: its name.
        fits: whether the weights do.
        start_s: until the first forward.
        low_s, high_s: all of it, with every forward at its floor, and launched layer by layer.
        low_usd, high_usd: what that costs.
        price_per_hour: of the card.
    """

    card: str
    fits: bool
    start_s: float
    low_s: float
    high_s: float
    low_usd: float
    high_usd: float
    price_per_hour: float


def pair_forwards(
    ks: Sequence[int], generations: int, new_tokens: int, alpha: float = ALPHA
) -> list[Forwards]:
    """The forwards of a measured sweep: every K in turn, and the timing of single steps.

    Args:
        ks: with 0 for plain decoding.
        generations: at each K.
        new_tokens: budget of each.
        alpha: probability that a draft token is accepted, given that all before it were.
    """
    tokens = generations * new_tokens
    work = [*timing_forwards(max(ks), "draft")]
    for k in ks:
        if k == 0:
            work.append(Forwards("target", tokens))
            continue
        rounds = tokens / expected_tokens_per_round(alpha, k)
        work += [Forwards("draft", k * rounds), Forwards("target", rounds, k + 1)]
    return work


def text_forwards(texts: int, new_tokens: int, batch: int) -> list[Forwards]:
    """The forwards of the target's texts, written side by side."""
    whole, rest = divmod(texts, batch)
    sizes = [batch] * whole + ([rest] if rest else [])
    return [Forwards("target", new_tokens, 1, size) for size in sizes]


def timing_forwards(max_k: int, draft: str) -> list[Forwards]:
    """The forwards that time one draft beside the target: a step each, and every verify."""
    verifies = [Forwards("target", TIMINGS, tokens) for tokens in range(1, max_k + 2)]
    return [Forwards(draft, TIMINGS), Forwards("target", TIMINGS), *verifies]


def estimate(
    work: Sequence[Forwards], players: Mapping[str, Player], card: Rates, context_tokens: int
) -> Estimate:
    """What the forwards take and cost on a card.

    Args:
        work: the forwards.
        players: by name, `target` among them; who is not costs nothing (an n-gram).
        card: its rates.
        context_tokens: of a typical step.
    """
    weights = sum(player.weight_bytes for player in players.values())
    target = players["target"].weight_bytes
    drafts = [player.weight_bytes for name, player in players.items() if name != "target"]
    together = target + max(drafts, default=0.0)  # an audition loads one draft after the other
    start = START_S + weights / LOAD_BYTES_PER_S
    low = high = start
    for entry in work:
        player = players.get(entry.player)
        if player is not None:
            floor = _floor_s(entry, player, card, context_tokens)
            low += entry.count * floor
            high += entry.count * max(floor, player.shape.layers * SECONDS_PER_LAYER)
    return Estimate(
        card=card.name,
        fits=together <= USABLE_MEMORY * card.memory_gb * 1e9,
        start_s=start,
        low_s=low,
        high_s=high,
        low_usd=money(low, card.price_per_hour),
        high_usd=money(high, card.price_per_hour),
        price_per_hour=card.price_per_hour,
    )


def _floor_s(entry: Forwards, player: Player, card: Rates, context_tokens: int) -> float:
    """The time in which weights and cache can be read, or the arithmetic be done."""
    width = player.bytes_per_parameter
    read = player.shape.bytes_read(
        tokens=entry.tokens,
        context_tokens=context_tokens,
        batch=entry.batch,
        bytes_per_parameter=width,
        bytes_per_value=width,
    )
    # Two operations per weight that a token uses
    used = player.shape.weight_bytes_read(1, 1.0)
    arithmetic = 2.0 * used * entry.tokens * entry.batch / (card.tflops * 1e12)
    return max(memory_floor_ms(read, card.bandwidth_gb_s) / 1e3, arithmetic)
