"""Acceptance rates per position, as they are given: unconditional, never increasing.

Rate j is the share of rounds that keep at least j draft tokens, as in vLLM's
`synthetic_acceptance_rates`. No numpy here: the command line checks its values with this.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from harness.records import UserError

Rates = tuple[float, ...]
# Prompt set, temperature, K
Cell = tuple[str, float, int]


def rates_for(acceptance: Any, k: int, key: str = "decode.acceptance") -> Rates:
    """Unconditional rates of positions 1..k.

    Args:
        acceptance: a scalar alpha (rate j is alpha^j), a list of at least k rates, or {k: either}.
        k: number of draft tokens.
        key: what errors name.

    Raises:
        UserError: a rate outside [0, 1], an increasing list, one that is too short, or no entry for
            k.
    """
    if isinstance(acceptance, Mapping):
        entries = cast("Mapping[Any, Any]", acceptance)
        own = {int(name): value for name, value in entries.items() if str(name).isdigit()}
        if k not in own:
            raise UserError(f"{key}: no entry for K={k}; it has {sorted(own)}")
        return rates_for(own[k], k, f"{key}.{k}")
    if isinstance(acceptance, Sequence) and not isinstance(acceptance, str):
        return _listed(cast("Sequence[Any]", acceptance), k, key)
    alpha = _rate(acceptance, key)
    return tuple(alpha**position for position in range(1, k + 1))


def _listed(rates: Sequence[Any], k: int, key: str) -> Rates:
    values = [_rate(value, key) for value in rates]
    for before, after in pairwise(values):
        if after > before:
            raise UserError(
                f"{key}: {after:g} follows {before:g}; give unconditional rates, which never "
                "increase (the share of rounds that keep at least j tokens)"
            )
    if len(values) < k:
        raise UserError(f"{key}: {len(values)} rates, but K={k} needs {k}; add rates or lower k")
    return tuple(values[:k])


def _rate(value: Any, key: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(float(value)) and 0 <= float(value) <= 1):
        raise UserError(f"{key}: {value!r} is not a rate; use numbers from 0 to 1")
    return float(value)


def conditional(rates: Sequence[float]) -> Rates:
    """Chance that position j is kept, given that all before it were; 0 where none ever were."""
    before = (1.0, *rates[:-1])
    return tuple(rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=True))
