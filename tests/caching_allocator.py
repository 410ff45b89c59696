"""torch's CUDA caching allocator without a card: what it reserves for a sequence of tensors.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings (torch 2.8 to
2.13). `watching` gives it every fake CUDA tensor that the block makes, and takes back what the
block dropped.
"""

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 2**20
LEAST_BLOCK = 512
# Blocks up to this are cut from segments of 2 MiB, larger ones up to 10 MiB from segments of 20 MiB
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
SHARED, SHARED_SEGMENT = 10 * MIB, 20 * MIB
# A larger block is a segment of its own
SEGMENT_MULTIPLE = 2 * MIB


@dataclass(eq=False)
class Block:
    """A part of a segment, in a list with its neighbours."""

    size: int
    small: bool
    order: int
    free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


class CachingAllocator:
    """One device and one stream.

    Attributes:
        reserved, allocated: bytes now.
        most_reserved: bytes at most so far.
        capacity: bytes of the card.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = self.allocated = self.most_reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._made = 0

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes: the smallest that is free, else of a new segment."""
        size = max(1, -(-size // LEAST_BLOCK)) * LEAST_BLOCK
        small = size <= SMALL
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, -1))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size, small)
        block.free = False
        left = block.size - size
        if left >= LEAST_BLOCK if small else left > SMALL:
            rest = self._block(left, small)
            rest.before, rest.after, block.size = block, block.after, size
            if rest.after is not None:
                rest.after.before = rest
            block.after = rest
            self._give(rest)
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Take a block back, and join it with what is free on either side."""
        self.allocated -= block.size
        if block.before is not None and block.before.free:
            block = self._joined(block.before, block)
        if block.after is not None and block.after.free:
            block = self._joined(block, block.after)
        self._give(block)

    def empty_cache(self) -> None:
        """Give the device back every segment that is free as a whole."""
        for small, pool in self._free.items():
            kept = [e for e in pool if e[2].before is not None or e[2].after is not None]
            self.reserved -= sum(size for size, *_ in pool) - sum(size for size, *_ in kept)
            self._free[small] = kept

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            size = SMALL_SEGMENT
        elif size < SHARED:
            size = SHARED_SEGMENT
        else:
            size = -(-size // SEGMENT_MULTIPLE) * SEGMENT_MULTIPLE
        if self.reserved + size > self.capacity:
            self.empty_cache()
        assert self.reserved + size <= self.capacity, "out of memory"
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return self._block(size, small)

    def _block(self, size: int, small: bool) -> Block:
        self._made += 1
        return Block(size, small, self._made)

    def _give(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.order, block))

    def _joined(self, first: Block, second: Block) -> Block:
        """Two neighbours as one block that is in no list; one of them was free."""
        for part in (first, second):
            entry = (part.size, part.order, part)
            if entry in (pool := self._free[part.small]):
                pool.remove(entry)
        first.size, first.after = first.size + second.size, second.after
        if first.after is not None:
            first.after.before = first
        return first


class _Allocations(TorchDispatchMode):
    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self._allocator = allocator
        self._held: dict[int, tuple[StorageWeakRef, Block]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                storage = leaf.untyped_storage()
                if storage.nbytes() and storage._cdata not in self._held:
                    self.settle()
                    held = StorageWeakRef(storage)
                    self._held[storage._cdata] = held, self._allocator.allocate(storage.nbytes())
        return result

    def settle(self) -> None:
        """Take back the blocks of what is gone."""
        for key, (held, block) in [*self._held.items()]:
            if held.expired():
                self._allocator.release(block)
                del self._held[key]


@contextmanager
def watching(allocator: CachingAllocator) -> Iterator[Callable[[], None]]:
    """Within it the allocator has every CUDA tensor that is made and lives.

    What is dropped is noticed when the next tensor is made, and by what this yields.
    """
    with _Allocations(allocator) as made:
        yield made.settle
