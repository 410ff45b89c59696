"""What a caveat is: its code, how serious it is, when it holds and what it says, in one record."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec

from harness.summary import Caveat, Values

# "caution": without it a reader takes a number for what it is not, so no short form leaves it out
Severity = Literal["caution", "note"]
# The values of a caveat as its sentence quotes them, each None or of the type that `when` gave it
Quoted = Mapping[str, Any]
Evidence = ParamSpec("Evidence")


@dataclass(frozen=True)
class CaveatRecord(Generic[Evidence]):
    """One thing to know before acting on a run."""

    code: str  # in summary.json
    severity: Severity
    # The values of every time that it holds, by the evidence; nothing where it does not
    when: Callable[Evidence, Iterable[Values]]
    sentence: str | Callable[[Quoted], str]  # made from the values; without a full stop

    def of(self, *args: Evidence.args, **kwargs: Evidence.kwargs) -> Iterator[Caveat]:
        """The caveats that the evidence calls for."""
        return (Caveat(self.code, values) for values in self.when(*args, **kwargs))

    def say(self, values: Quoted) -> str:
        words = self.sentence
        return words.format(**values) if isinstance(words, str) else words(values)


def caveat(
    severity: Severity, sentence: str | Callable[[Quoted], str]
) -> Callable[[Callable[Evidence, Iterable[Values]]], CaveatRecord[Evidence]]:
    """Makes a record of the function that says when it holds; its name is the code."""
    return lambda when: CaveatRecord(when.__name__, severity, when, sentence)
