"""What runs in the next step: decodes first, then chunks of prompts, within a token budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from attnmux.checks import bad_argument, check_positive
from attnmux_transformers.block_allocator import BlockAllocator
from attnmux_transformers.request import Request


@dataclass(frozen=True)
class Chunk:
    """A request's part in one step: its next `num_tokens` tokens."""

    request: Request
    num_tokens: int

    @property
    def seq_len(self) -> int:
        """Length of the request's sequence once this chunk is computed."""
        return self.request.num_computed + self.num_tokens

    @property
    def completes(self) -> bool:
        """Whether the request has nothing pending afterwards, so that a token can be chosen."""
        return self.num_tokens == self.request.num_pending


class Scheduler:
    """Keeps the waiting and the running requests, and their blocks.

    Requests run in the order in which they were added. When blocks run out, the running request
    that was admitted last gives all of its own back and waits at the head of the queue; its keys
    and values are computed again later. The oldest one is never stopped by a younger one, and every
    request fits into the cache alone, so that there is always progress.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> None:
        """Share out the allocator's blocks.

        Args:
            allocator: The blocks of the KV cache.
            block_size: Tokens in a block.
            max_num_batched_tokens: Most tokens in one step, over all requests.
            max_num_seqs: Most requests that run at once.

        Raises:
            ValueError: If a number is not a positive integer.
        """
        check_positive("block_size", block_size)
        check_positive("max_num_batched_tokens", max_num_batched_tokens)
        check_positive("max_num_seqs", max_num_seqs)
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.waiting or self.running)

    def check(self, request: Request) -> None:
        """Refuse a request that could never finish.

        Raises:
            ValueError: If its prompt and answer do not fit into the whole cache.
        """
        new_tokens = request.params.max_new_tokens
        capacity = self.allocator.num_blocks * self.block_size
        if request.max_num_tokens > capacity:
            raise bad_argument(
                "prompt",
                f"{len(request.prompt)} tokens, with max_new_tokens {new_tokens}",
                f"prompt and answer of at most {capacity + 1} tokens (the KV cache has "
                f"{self.allocator.num_blocks} blocks of {self.block_size})",
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: As `check`.
        """
        self.check(request)
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """Choose the next step and give its requests the blocks they need.

        Returns:
            At most `max_num_batched_tokens` tokens in all, one chunk a request; empty only if
            there is no work.
        """
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        preempted = False
        for request in list(self.running):
            if budget == 0:
                break
            if request not in self.running:
                continue  # it gave its blocks to an older one
            chunk = Chunk(request, min(request.num_pending, budget))
            while not self._grow(request, chunk.seq_len):
                preempted = True
                if self._preempt_last() is request:
                    break
            else:
                chunks.append(chunk)
                budget -= chunk.num_tokens
        if not preempted:
            self._admit(chunks, budget)
        return chunks

    def finish(self, request: Request) -> None:
        """Forget a request, whatever its state, and take its blocks back."""
        self.allocator.give_back(request.blocks)
        request.blocks = []
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting requests, in order, whose whole sequence fits into the free blocks."""
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if self._blocks_for(request.num_tokens) > self.allocator.num_free:
                return
            # All blocks of the sequence at once: otherwise the chunks of two prompts could each
            # wait for the blocks of the other.
            request.blocks = self.allocator.take(self._blocks_for(request.num_tokens))
            self.running.append(self.waiting.popleft())
            chunk = Chunk(request, min(request.num_pending, budget))
            chunks.append(chunk)
            budget -= chunk.num_tokens

    def _grow(self, request: Request, seq_len: int) -> bool:
        """Give `request` the blocks for `seq_len` tokens; False if there are not enough."""
        missing = self._blocks_for(seq_len) - len(request.blocks)
        if missing > self.allocator.num_free:
            return False
        request.blocks += self.allocator.take(max(missing, 0))
        return True

    def _preempt_last(self) -> Request:
        request = self.running.pop()
        self.allocator.give_back(request.blocks)
        request.blocks = []
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        return request

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
