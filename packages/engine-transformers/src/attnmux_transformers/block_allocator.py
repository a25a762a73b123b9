"""Which blocks of the KV cache are free."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.checks import bad_argument, check_positive


class BlockAllocator:
    """Hands out block numbers and takes them back; the block given back last is given out first.

    A block belongs to one request at a time. Giving a block back twice, or one that was never given
    out, is an error, since it would let two requests write to the same memory.
    """

    def __init__(self, num_blocks: int) -> None:
        """Manage blocks 0 to `num_blocks` - 1, all free.

        Raises:
            ValueError: If `num_blocks` is not a positive integer.
        """
        check_positive("num_blocks", num_blocks)
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """How many blocks can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks that nobody holds.

        Raises:
            ValueError: If `count` is negative or more than `num_free`; nothing is taken then.
        """
        if not 0 <= count <= self.num_free:
            raise bad_argument("count", count, f"0 to {self.num_free} (the free blocks)")
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """Make `blocks` free again.

        Raises:
            ValueError: If a block is not held, or is named twice; nothing is given back then.
        """
        returned = list(blocks)
        if len(set(returned)) != len(returned) or not self._taken.issuperset(returned):
            raise bad_argument("blocks", returned, "blocks that are held, each once")
        self._taken.difference_update(returned)
        self._free.extend(reversed(returned))
