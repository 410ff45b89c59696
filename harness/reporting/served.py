"""What a verdict says to serve, as an engine with a rule of acceptance of its own sees it.

Engines accept by different rules, so one pair has up to three acceptances above temperature 0, and
a verdict is for an engine. An engine's K and speedup are the verdict's where it accepts as the run
did, replay's where the run has the target's texts scored, and else not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.records import Rule
from harness.reporting import formatting as fmt

# Acceptance is the engine's rule; time is not the engine's
_CLOCK = ", at this run's step times"


@dataclass(frozen=True)
class Served:
    """What a verdict says to serve, and what the run knows of other rules of acceptance.

    Attributes:
        target, draft: ids or folders.
        k, temperature, rule: the verdict's, and the rule that the run accepted by.
        gain: its speedup in words, interval included.
        cells: by rule, its best cell by replay: `k` and `speedup`.
        top_k, top_p, min_p: the run's sampling parameters; None leaves all tokens.
        repetition_penalty: the run's; None for none.
        stop: the threshold of adaptive drafting; None drafts K always.
        imposed: whether acceptance was set instead of found.
    """

    target: str
    draft: str
    k: int
    temperature: float
    rule: str
    gain: str
    cells: Mapping[str, Mapping[str, Any]]
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    top_p: float | None = None
    stop: float | None = None
    imposed: bool = False

    def under(self, rule: Rule, *, adaptive: bool = False) -> tuple[int, str]:
        """An engine's K, and what is known of its speedup, as a sentence.

        Args:
            rule: the engine's.
            adaptive: whether it can stop drafting as the run did.
        """
        if self.imposed:
            return self.k, (
                f"{self.gain} at the acceptance that was set for this run; what this engine would"
                " accept is not known."
            )
        cell = self.cells.get(rule)
        if self.stop is None or adaptive:
            if self.temperature == 0 or rule == self.rule:
                same = "all rules are one at temperature 0" if not self.temperature else rule
                held = f"{self.gain} on held-out prompts, under its rule of acceptance ({same})"
                return self.k, f"{held}{_CLOCK}."
        elif cell is None:
            return self.k, "Its speedup is not known: the run stopped drafting early, it does not."
        if cell is None:
            unknown = f"it accepts by the rule {rule}, which was not replayed here"
            return self.k, f"Its speedup is not known: {unknown}."
        gain = float(cell["speedup"])
        told = (
            f"{fmt.speedup(gain)} by replay under its rule, {rule}, at K={cell['k']}, picked on"
            f" these prompts{_CLOCK}"
        )
        paid = told if gain > 1 else f"{told}: it does not pay by this rule"
        return int(cell["k"]), f"{paid}."

    @property
    def requests(self) -> str:
        """Which requests the speedup is of, for an engine whose requests say how to sample."""
        penalty = self.repetition_penalty
        penalised = "" if penalty is None else f" and repetition_penalty {penalty:g}"
        if self.temperature == 0:
            return (
                f"Its speedup is for requests with temperature 0{penalised}; a server's default is "
                "another."
            )
        min_p = "" if self.min_p is None else f", min_p {self.min_p:g}"
        return (
            f"Its speedup is for requests with temperature {fmt.temperature(self.temperature)},"
            f" {_said('top_k', self.top_k)} and {_said('top_p', self.top_p)}{min_p}{penalised};"
            " a server's defaults are others."
        )


def _said(name: str, value: float | None) -> str:
    return f"no {name}" if value is None else f"{name} {value:g}"
