"""Numbers as text: the units and digits of the console, the pages and the plots.

An acceptance_rate is always printed in percent ("34.2 %") and an alpha never ("0.561"), since the
two are easily confused. A value that does not apply is "-", never 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# The colours of series: those of Okabe and Ito, which differ under every kind of colour vision
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#806000", "#3a8fb7")
EMPTY = "-"
NO_ROOT = "none"

Bounded = tuple[float | None, float | None, float | None]  # a value, and its interval
_GIB = 1024**3
_MIB = 1024**2
_KIB = 1024


def bounded(record: Any, name: str = "speedup") -> Bounded:
    """A field of a record with its interval, the fields with `_lo` and `_hi` behind the name."""
    return getattr(record, name), getattr(record, f"{name}_lo"), getattr(record, f"{name}_hi")


def gain(record: Any, name: str = "speedup") -> str:
    """A speedup, or a ratio of speedups, of a record with its interval: "1.42x [1.36, 1.48]"."""
    return speedup(*bounded(record, name))


def number_of(number: object, one: str, several: str) -> str:
    """A number with the name of what is counted: "1 prompt", "3 prompts"."""
    return f"{number} {one if number == 1 else several}"


def count(value: float | None) -> str:
    """A whole number, as "48"; an expected (replayed) count keeps one decimal."""
    if value is None:
        return EMPTY
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def decimal(value: float | None, digits: int = 2) -> str:
    """A plain number with `digits` decimals."""
    return EMPTY if value is None else f"{value:.{digits}f}"


def milliseconds(value: float | None) -> str:
    """Milliseconds as "29.92"; below one, three decimals ("0.318")."""
    if value is None:
        return EMPTY
    return f"{value:.3f}" if abs(value) < 1 else f"{value:,.2f}"


def in_ms(seconds: float | None) -> str:
    """A time in seconds as milliseconds, without the unit: "29.92", "0.318"."""
    return EMPTY if seconds is None else milliseconds(1e3 * seconds)


def rate(value: float | None) -> str:
    """Tokens per second as "42.1"; from 1,000 on without decimals."""
    if value is None:
        return EMPTY
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share as "34.2 %"."""
    return EMPTY if value is None else f"{100 * value:.1f} %"


def alpha(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """An alpha with its interval where there is one: "0.812 [0.79, 0.83]"."""
    return EMPTY if value is None else decimal(value, 3) + _interval(low, high)


def speedup(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A speedup with its interval where there is one: "1.42x [1.36, 1.48]"."""
    return EMPTY if value is None else f"{value:.2f}x" + _interval(low, high)


def with_ratios(ks: Sequence[int], ratios: Mapping[int, float | None]) -> str:
    """Several K, each with its ratio where it is known: "K=1 (0.83x), K=2"."""
    known = {k: f" ({speedup(ratios[k])})" if ratios.get(k) is not None else "" for k in ks}
    return ", ".join(f"K={k}{ratio}" for k, ratio in known.items())


def memory(value: float | None) -> str:
    """Bytes in GiB; below one GiB in the largest unit that is not above the value."""
    if value is None:
        return EMPTY
    if value < _MIB:
        return f"{value / _KIB:.0f} KiB" if value >= _KIB else f"{value:.0f} B"
    return f"{value / _GIB:.2f} GiB" if value >= _GIB else f"{value / _MIB:.0f} MiB"


def chance(value: float | None) -> str:
    """A simulated probability as "97 %"; the draws are too few for more than "> 99 %"."""
    if value is None:
        return EMPTY
    if value > 0.99:
        return "> 99 %"
    return "< 1 %" if value < 0.01 else f"{100 * value:.0f} %"


def signed(value: float | None, digits: int = 2) -> str:
    """A difference as "+0.13"; a zero has no sign."""
    if value is None:
        return EMPTY
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0.0 else text


def deviations(value: float | None) -> str:
    """A difference in standard deviations as "+1.3"."""
    return signed(value, 1)


def with_bounds(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A number with two decimals and its interval where there is one: "1.42 [1.36, 1.48]"."""
    return EMPTY if value is None else decimal(value) + _interval(low, high)


def signed_percent(value: float | None) -> str:
    """A relative difference as "+2.9 %"."""
    return EMPTY if value is None else f"{signed(100 * value, 1)} %"


def p_value(value: float | None) -> str:
    """A probability with three decimals; below a thousandth as "< 0.001"."""
    return "< 0.001" if value is not None and value < 1e-3 else decimal(value, 3)


def dollars(value: float | None) -> str:
    """A price as "$0.42"; below ten cents with two significant digits ("$0.0031")."""
    if value is None:
        return EMPTY
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${value:.2g}"


def seconds(value: float | None) -> str:
    """A time as "12.3 s"; below one second in milliseconds ("410 ms")."""
    if value is None:
        return EMPTY
    if value < 1:
        return f"{milliseconds(1e3 * value)} ms" if value < 0.01 else f"{1e3 * value:.0f} ms"
    return f"{value:,.1f} s" if value < 100 else f"{value:,.0f} s"


def duration(seconds: float) -> str:
    """A long time: "45 s", "12 min", "2.9 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def temperature(value: float | None) -> str:
    """A temperature as "0.7"; whole ones without decimals ("1")."""
    return EMPTY if value is None else f"{value:g}"


def text(value: object) -> str:
    """Any stored value as a word; None as "-", a list as its entries."""
    if value is None or value == "":
        return EMPTY
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(text(entry) for entry in value) or EMPTY
    return str(value)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
