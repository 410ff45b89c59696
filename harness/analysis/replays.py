"""Expected counts of every (draft, K) on the same prompts, at one temperature, under one rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.evidence import Candidate
from harness.records import Rule
from harness.stats.intervals import Array
from harness.theory.replay import Replayed


@dataclass(frozen=True, eq=False)
class Replays:
    """Replayed candidates on n prompts, repetitions (and turns) of a prompt added up.

    Attributes:
        rule, temperature: of all of them.
        prompts, prompt_sets, categories: of each prompt, n.
        texts: [n] how many texts (repetitions x turns) each prompt has.
        prompt_tokens: [n] their prompt lengths added up.
        candidates: by (draft, K), counts of each prompt.
        lookups: the drafts that cost one look-up per round, rather than a step per token.
    """

    rule: Rule
    temperature: float
    prompts: tuple[str, ...]
    prompt_sets: tuple[str, ...]
    categories: tuple[str | None, ...]
    texts: Array
    prompt_tokens: Array
    candidates: Mapping[Candidate, Replayed]
    lookups: frozenset[str]

    @property
    def new_tokens(self) -> Array:
        """[n] tokens of the texts, the same for every candidate."""
        return next(iter(self.candidates.values())).new_tokens

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts, in the order they were given."""
        return tuple(dict.fromkeys(draft for draft, _ in self.candidates))

    @property
    def ks(self) -> tuple[int, ...]:
        """The K of any draft, ascending."""
        return tuple(sorted({k for _, k in self.candidates}))

    def only(self, prompt_sets: Sequence[str]) -> "Replays":
        """The prompts of some prompt sets alone."""
        return self.rows([name in prompt_sets for name in self.prompt_sets])

    def rows(self, keep: Sequence[bool]) -> "Replays":
        """Some of the prompts, in order."""
        rows = np.flatnonzero(np.asarray(keep, dtype=bool))
        return replace(
            self,
            prompts=tuple(self.prompts[row] for row in rows),
            prompt_sets=tuple(self.prompt_sets[row] for row in rows),
            categories=tuple(self.categories[row] for row in rows),
            texts=self.texts[rows],
            prompt_tokens=self.prompt_tokens[rows],
            candidates={name: found.rows(rows) for name, found in self.candidates.items()},
        )
