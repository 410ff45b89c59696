"""Numbers as text: units and digits, decided once for the console, the markdown and the plots.

Two habits keep quantities apart that readers mix up: an acceptance_rate is always printed in
percent ("34.2 %"), an alpha never is ("0.561"). A value that does not apply is "-", never 0.
"""

EMPTY = "-"
NO_ROOT = "none"
_GIB = 1024**3
_MIB = 1024**2


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


def memory(value: float | None) -> str:
    """Bytes as GiB, or as MiB below one GiB."""
    if value is None:
        return EMPTY
    return f"{value / _GIB:.2f} GiB" if value >= _GIB else f"{value / _MIB:.0f} MiB"


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
