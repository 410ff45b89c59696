"""The text that the embedded family learns, made by a seeded generator.

Three kinds: `easy` (a small draft learns it), `hard` (only the target does) and `unrelated`. A
document is a prompt, a newline, an answer; training adds the end token. See `easy.py` and
`hard.py` for what makes them so.
"""

import random
from collections.abc import Iterator, Mapping

from tools.train_embedded.easy import EASY_TASKS
from tools.train_embedded.hard import HARD_TASKS
from tools.train_embedded.tasks import Document, Task, draw
from tools.train_embedded.unrelated import UNRELATED_TASKS

TASKS: dict[str, tuple[Task, ...]] = {
    "easy": EASY_TASKS,
    "hard": HARD_TASKS,
    "unrelated": UNRELATED_TASKS,
}


def documents(mixture: Mapping[str, float], seed: int) -> Iterator[Document]:
    """Yield documents for ever.

    Args:
        mixture: Share of the documents per kind, e.g. `{"easy": 0.4, "hard": 0.6}`.
        seed: The same seed and mixture give the same documents.
    """
    rng = random.Random(seed)
    kinds, weights = list(mixture), list(mixture.values())
    while True:
        yield draw(TASKS[rng.choices(kinds, weights=weights)[0]], rng)


def find_task(prompt: str, kind: str) -> Task | None:
    """The task of this kind that the prompt is an instance of, or None."""
    return next((task for task in TASKS[kind] if task.accepts(prompt)), None)
