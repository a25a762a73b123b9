"""The scheduler: budgets hold, every request ends, no block has two holders, all come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux_transformers.block_allocator import BlockAllocator
from attnmux_transformers.request import Request
from attnmux_transformers.sampling import SamplingParams
from attnmux_transformers.scheduler import Chunk, Scheduler


def make_request(index: int, prompt_len: int, new_tokens: int) -> Request:
    return Request(index, [7] * prompt_len, SamplingParams(max_new_tokens=new_tokens))


def run_step(scheduler: Scheduler, chunks: list[Chunk]) -> list[Request]:
    """Do what the engine does after a step; return the requests that ended."""
    ended = []
    for chunk in chunks:
        request, chooses = chunk.request, chunk.completes
        request.num_computed += chunk.num_tokens
        if chooses:
            request.output.append(7)
            if len(request.output) == request.params.max_new_tokens:
                scheduler.finish(request)
                ended.append(request)
    return ended


def check_step(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    assert chunks, "there is work, so there is progress"
    assert sum(chunk.num_tokens for chunk in chunks) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert len({chunk.request.index for chunk in chunks}) == len(chunks)
    held = [block for request in scheduler.running for block in request.blocks]
    assert len(set(held)) == len(held)
    assert len(held) + scheduler.allocator.num_free == scheduler.allocator.num_blocks
    assert not any(request.blocks for request in scheduler.waiting)
    for chunk in chunks:
        assert chunk.num_tokens >= 1
        assert len(chunk.request.blocks) * scheduler.block_size >= chunk.seq_len


@settings(max_examples=200, deadline=None)  # a slow machine is not a failure
@given(
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 16]),
    spare_blocks=st.integers(0, 10),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 5),
)
def test_every_request_ends_and_every_block_comes_back(
    shapes: list[tuple[int, int]],
    block_size: int,
    spare_blocks: int,
    budget: int,
    max_num_seqs: int,
) -> None:
    requests = [make_request(index, *shape) for index, shape in enumerate(shapes)]
    largest = max(-(-request.max_num_tokens // block_size) for request in requests)
    allocator = BlockAllocator(largest + spare_blocks)
    scheduler = Scheduler(allocator, block_size, budget, max_num_seqs)
    for request in requests:
        scheduler.add(request)
    ended: list[Request] = []
    while scheduler.has_work:
        chunks = scheduler.schedule()
        check_step(scheduler, chunks)
        ended += run_step(scheduler, chunks)
    assert sorted(request.index for request in ended) == list(range(len(requests)))
    assert allocator.num_free == allocator.num_blocks


def test_decodes_and_prefills_share_a_step_and_decodes_come_first() -> None:
    scheduler = Scheduler(BlockAllocator(8), 16, max_num_batched_tokens=8, max_num_seqs=4)
    scheduler.add(make_request(0, 3, 5))
    run_step(scheduler, scheduler.schedule())
    scheduler.add(make_request(1, 20, 5))
    chunks = scheduler.schedule()
    assert [(chunk.request.index, chunk.num_tokens) for chunk in chunks] == [(0, 1), (1, 7)]
    assert [chunk.completes for chunk in chunks] == [True, False]


def test_the_youngest_gives_its_blocks_to_the_oldest_and_computes_again() -> None:
    # Each prompt fills one block of two; the third block goes to whoever grows first.
    scheduler = Scheduler(BlockAllocator(3), 4, max_num_batched_tokens=16, max_num_seqs=2)
    old, young = make_request(0, 4, 6), make_request(1, 4, 6)
    scheduler.add(old)
    scheduler.add(young)
    run_step(scheduler, scheduler.schedule())
    chunks = scheduler.schedule()
    assert [chunk.request for chunk in chunks] == [old]
    assert (young.num_preemptions, young.num_computed, young.blocks) == (1, 0, [])
    assert list(scheduler.waiting) == [young]
    assert young.output == [7], "what it has generated stays"
    while old in scheduler.running:
        run_step(scheduler, chunks)
        chunks = scheduler.schedule()
    assert [(chunk.request, chunk.num_tokens) for chunk in chunks] == [(young, 5)]


def test_a_request_that_could_never_finish_is_refused() -> None:
    scheduler = Scheduler(BlockAllocator(2), 4, max_num_batched_tokens=8, max_num_seqs=2)
    scheduler.add(make_request(0, 5, 4))  # 8 positions: the last token is never computed
    with pytest.raises(
        ValueError,
        match=r"prompt: got 5 tokens, with max_new_tokens 5; allowed: "
        r"prompt and answer of at most 9 tokens \(the KV cache has 2 blocks of 4\)",
    ):
        scheduler.add(make_request(1, 5, 5))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("block_size", lambda: Scheduler(BlockAllocator(1), 0, 8, 8)),
        ("max_num_batched_tokens", lambda: Scheduler(BlockAllocator(1), 16, 0, 8)),
        ("max_num_seqs", lambda: Scheduler(BlockAllocator(1), 16, 8, 0)),
    ],
)
def test_numbers_below_one_are_refused_by_name(name: str, make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"{name}: got 0; allowed: an integer of at least 1"):
        make()
