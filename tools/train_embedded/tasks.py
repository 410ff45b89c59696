"""A task is a question with blanks and the rule that answers it.

Documents of the corpus and the shipped prompts come from the same tasks, so that a shipped prompt
is text the embedded models know how to continue, and also one that makes sense to a real chat
model.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Values = Mapping[str, str]
Answer = Callable[[Values, random.Random], str]


@dataclass(frozen=True)
class Document:
    """One training text: a prompt, and the answer that follows it after a newline."""

    category: str
    prompt: str
    answer: str

    @property
    def text(self) -> str:
        """The document as the models see it, without the end token."""
        return f"{self.prompt}\n{self.answer}"


@dataclass(frozen=True)
class Task:
    """A family of prompts with one way to answer them.

    Attributes:
        category: What the prompt sets call it (facts, arithmetic, counting, lists, story, poem).
        templates: Wordings of the prompt, with `{blanks}`.
        blanks: The values that each blank may take. Values are drawn independently.
        answer: Builds the answer from the values; the generator is for free choices of wording.
        weight: How often the task is drawn relative to its siblings.
    """

    category: str
    templates: Sequence[str]
    blanks: Mapping[str, Sequence[str]]
    answer: Answer
    weight: float = 1.0

    def document(self, rng: random.Random) -> Document:
        """Draw one document of this task."""
        template = rng.choice(self.templates)
        values = {name: rng.choice(choices) for name, choices in self.blanks.items()}
        return Document(self.category, template.format(**values), self.answer(values, rng))

    def accepts(self, prompt: str) -> bool:
        """Whether `prompt` is an instance of one of the templates."""
        return self.values(prompt) is not None

    def values(self, prompt: str) -> dict[str, str] | None:
        """The value of each blank in a prompt of this task; None if it is none."""
        matches = (self._pattern(template).fullmatch(prompt) for template in self.templates)
        return next((match.groupdict() for match in matches if match), None)

    def _pattern(self, template: str) -> re.Pattern[str]:
        seen: set[str] = set()

        def fill(match: re.Match[str]) -> str:
            name = match.group(1)
            if name in seen:
                return f"(?P={name})"
            seen.add(name)
            return f"(?P<{name}>{'|'.join(map(re.escape, self.blanks[name]))})"

        parts = re.split(r"(\{\w+\})", template)
        return re.compile(
            "".join(
                re.sub(r"\{(\w+)\}", fill, p) if p.startswith("{") else re.escape(p) for p in parts
            )
        )


def draw(tasks: Sequence[Task], rng: random.Random) -> Document:
    """Draw a task by weight, and one document of it."""
    return rng.choices(tasks, weights=[task.weight for task in tasks])[0].document(rng)
