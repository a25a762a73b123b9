"""Blocks: each belongs to one holder, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmux_transformers.block_allocator import BlockAllocator


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6))))
def test_no_block_has_two_holders_and_none_is_lost(
    num_blocks: int, actions: list[tuple[bool, int]]
) -> None:
    allocator = BlockAllocator(num_blocks)
    held: list[list[int]] = []
    for takes, number in actions:
        if takes and number <= allocator.num_free:
            held.append(allocator.take(number))
        elif not takes and held:
            allocator.give_back(held.pop(number % len(held)))
        blocks = [block for holder in held for block in holder]
        assert len(set(blocks)) == len(blocks)
        assert all(0 <= block < num_blocks for block in blocks)
        assert allocator.num_free == num_blocks - len(blocks)
    for blocks in held:
        allocator.give_back(blocks)
    assert sorted(allocator.take(num_blocks)) == list(range(num_blocks))


def test_blocks_given_back_are_given_out_first() -> None:
    allocator = BlockAllocator(8)
    first = allocator.take(2)
    allocator.take(3)
    allocator.give_back(first)
    assert sorted(allocator.take(2)) == sorted(first)


def test_more_than_is_free_is_refused_and_takes_nothing() -> None:
    allocator = BlockAllocator(3)
    allocator.take(1)
    with pytest.raises(ValueError, match=r"count: got 3; allowed: 0 to 2 \(the free blocks\)"):
        allocator.take(3)
    assert allocator.num_free == 2


@pytest.mark.parametrize("blocks", [[0, 0], [2], [0, 7], [-1]])  # twice, not held, none, none
def test_giving_back_what_is_not_held_is_refused(blocks: list[int]) -> None:
    allocator = BlockAllocator(3)
    assert allocator.take(2) == [0, 1]
    with pytest.raises(
        ValueError, match=r"blocks: got .* allowed: blocks that are held, each once"
    ):
        allocator.give_back(blocks)
    assert allocator.num_free == 1


@pytest.mark.parametrize("num_blocks", [0, -1, 2.0])
def test_a_cache_has_at_least_one_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="num_blocks: got"):
        BlockAllocator(num_blocks)
