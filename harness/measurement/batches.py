"""Work in batches that shrink when memory runs out."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from harness.models.memory import is_out_of_memory
from harness.records import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_batches(
    items: Sequence[Item],
    size: int,
    together: Callable[[Item, Item], bool],
    work: Callable[[Sequence[Item]], list[Result]],
    name: str,
) -> list[Result]:
    """Do `work` on consecutive items, halving the batch whenever memory runs out.

    Args:
        items: in the order they are batched.
        size: items in a batch at most.
        together: whether an item may be in one batch with the batch's first.
        work: one result per item; it is called again with fewer items where memory ran out.
        name: what the error calls the model.

    Raises:
        UserError: a single item runs out of memory.
    """
    results: list[Result] = []
    while len(results) < len(items):
        some = items[len(results) : len(results) + size]
        count = next((i for i, item in enumerate(some) if not together(some[0], item)), len(some))
        done = _attempt(work, some[:count])
        if done is not None:
            results += done
        elif count == 1:
            raise UserError(
                f"{name}: out of memory with a single text; lower new_tokens or prompts.limit, or "
                "use a smaller dtype"
            )
        else:
            size = count // 2
    return results


def _attempt(
    work: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]
) -> list[Result] | None:
    """The results, or None where memory ran out (and what the attempt held is free again)."""
    try:
        return work(items)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
