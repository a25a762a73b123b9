"""Backends that attend wrongly: masks, scores, sinks, alignment, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnmux.abc.impl import AttentionLayer
from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import ReferenceResult, dense_rows, solve
from attnmux.testing.sabotage.toy import ToyImpl

Mutate = Callable[[AttentionProblem], AttentionProblem]


def answering(mutate: Mutate) -> type[ToyImpl]:
    """Return an impl that answers another problem than it was given."""

    class Impl(ToyImpl):
        def attend(self, problem: AttentionProblem) -> ReferenceResult:
            return solve(mutate(problem))

    return Impl


def window_by(step: int) -> Mutate:
    """The window counts `step` keys more."""

    def mutate(problem: AttentionProblem) -> AttentionProblem:
        window = problem.sliding_window
        return problem if window is None else replace(problem, sliding_window=max(1, window + step))

    return mutate


def whole_block_window(problem: AttentionProblem) -> AttentionProblem:
    """The window drops whole blocks only, so up to a block of extra keys is seen."""
    window = problem.sliding_window
    if window is None or problem.kv_cache is None:
        return problem
    block = problem.kv_cache.shape[2]
    return replace(problem, sliding_window=-(-window // block) * block)


def sink_twice(problem: AttentionProblem) -> AttentionProblem:
    """The sink enters the denominator once for each of two splits."""
    if problem.sinks is None:
        return problem
    return replace(problem, sinks=problem.sinks.double() + math.log(2.0))


def top_left(problem: AttentionProblem) -> AttentionProblem:
    """Queries stand at the first positions instead of the last."""
    return replace(problem, query_offsets=torch.zeros_like(problem.seq_lens))


def half_open_ranges(problem: AttentionProblem) -> AttentionProblem:
    """The end of a multimodal range is taken as exclusive."""
    ranges = problem.mm_req_doc_ranges
    if not ranges:
        return problem
    shorter = {req: [(start, end - 1) for start, end in spans] for req, spans in ranges.items()}
    return replace(problem, mm_req_doc_ranges=shorter)


def ignored_rswa_prefix(problem: AttentionProblem) -> AttentionProblem:
    """The prefix of a reference window is windowed too."""
    if problem.rswa_prefix_lens is None:
        return problem
    return replace(problem, rswa_prefix_lens=torch.zeros_like(problem.rswa_prefix_lens))


def causal_encoder(problem: AttentionProblem) -> AttentionProblem:
    """An encoder is masked as a decoder is."""
    if problem.type_name not in ("encoder", "encoder_only"):
        return problem
    return replace(problem, attn_type="decoder", causal=True, kv_cache=None)


def first_64_dims(problem: AttentionProblem) -> AttentionProblem:
    """Only the first 64 dimensions of a head are multiplied."""
    query = problem.queries.clone()
    query[..., 64:] = 0
    return replace(problem, query=query)


def one_kv_head_for_all(problem: AttentionProblem) -> AttentionProblem:
    """Query heads are dealt to the KV heads in turns instead of in groups."""
    kv_heads = _num_kv_heads(problem)
    heads = problem.queries.shape[1]
    if kv_heads in (1, heads):
        return problem
    order = torch.arange(heads).view(-1, kv_heads).t().flatten()  # position of each head's twin
    return replace(problem, query=problem.queries[:, order])


def _num_kv_heads(problem: AttentionProblem) -> int:
    if problem.kv_cache is not None and problem.kv_cache.numel():
        return problem.kv_cache.shape[1]
    assert problem.key is not None
    return problem.key.shape[1]


def _with_tails(problem: AttentionProblem) -> AttentionProblem:
    """Let every request have all keys of its last block; the queries stay where they are."""
    assert problem.kv_cache is not None
    block = problem.kv_cache.shape[2]
    lens = problem.seq_lens
    offsets = lens - problem.query_start_loc.diff()
    return replace(problem, seq_lens=-(-lens // block) * block, query_offsets=offsets)


class NanLeakImpl(ToyImpl):
    """Multiplies masked keys of the last block with weight 0, and 0 * NaN is NaN."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Attend over whole blocks."""
        answer = solve(problem)
        if not problem.uses_cache or problem.type_name != "decoder":
            return answer
        for piece in dense_rows(_with_tails(problem)):
            # Every key that is read, seen or not: the oracle would have cleaned these.
            masked = self.read_again(problem, piece.rows)
            answer.output[piece.rows] += masked
        return answer

    def read_again(self, problem: AttentionProblem, rows: slice) -> torch.Tensor:
        """Return 0 times the values that the request's blocks hold."""
        assert problem.kv_cache is not None
        assert problem.block_table is not None
        ends = problem.query_start_loc[1:].tolist()
        request = next(i for i, end in enumerate(ends) if rows.start < end)
        block = problem.kv_cache.shape[2]
        count = -(-int(problem.seq_lens[request]) // block) + self.extra_entries
        ids = self.usable(problem.block_table[request, :count].long())
        start = problem.size
        values = problem.kv_cache[ids][..., start : start + problem.size_v]
        return 0.0 * values.double().sum(dim=(0, 1, 2))

    extra_entries = 0

    def usable(self, ids: torch.Tensor) -> torch.Tensor:
        """Take the table's entries as they are."""
        return ids


class ReadsPastTableImpl(NanLeakImpl):
    """Looks at one table entry past the request's length."""

    extra_entries = 1


class ReadsBlockZeroImpl(NanLeakImpl):
    """Clamps entries that are out of range to block 0, and reads that."""

    extra_entries = 1

    def usable(self, ids: torch.Tensor) -> torch.Tensor:
        """Replace what cannot be a block."""
        return torch.where((ids < 0) | (ids >= 2**20), 0, ids)


class Int32OffsetsImpl(ToyImpl):
    """Computes ``block * stride`` in 32 bits: past 2**31 elements it reads somewhere else."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Attend over the blocks that the wrapped offsets point at."""
        if not problem.uses_cache:
            return solve(problem)
        assert problem.kv_cache is not None
        cache = problem.kv_cache
        stride = cache.stride(0)
        wrapped = []
        for block in range(cache.shape[0]):
            offset = block * stride
            wraps = offset >= 2**31
            wrapped.append(0 if wraps else block)
        return solve(replace(problem, kv_cache=cache[torch.tensor(wrapped)]))


class Int32RowsImpl(ToyImpl):
    """Computes ``row * stride`` of the query in 32 bits."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Attend with row 0 in place of each row whose offset does not fit."""
        query = problem.query
        rows = [0 if row * query.stride(0) >= 2**31 else row for row in range(query.shape[0])]
        return solve(replace(problem, query=query[torch.tensor(rows, dtype=torch.long)]))


class FlatQueryImpl(ToyImpl):
    """Takes the query's memory as contiguous, whatever its strides are."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Attend with the rows that contiguous memory would have."""
        query = problem.query
        if query.is_contiguous():
            return solve(problem)
        rows, heads, size = query.shape
        flat = query.as_strided((rows, heads, size), (heads * size, size, 1))
        return solve(replace(problem, query=flat))


class BaseTwoLseImpl(ToyImpl):
    """Returns the log-sum-exp to base 2 and says nothing."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Divide by ln 2."""
        output, lse = solve(problem)
        return ReferenceResult(output, lse / math.log(2.0))


class ZeroLseImpl(ToyImpl):
    """Starts the log-sum-exp of a row without keys at 0."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Replace -inf."""
        output, lse = solve(problem)
        return ReferenceResult(output, lse.nan_to_num(neginf=0.0))


class DividesByZeroImpl(ToyImpl):
    """Divides by the sum of the weights also where there is no key."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Give NaN for rows that see nothing."""
        output, lse = solve(problem)
        return ReferenceResult(
            output.masked_fill(torch.isneginf(lse).unsqueeze(-1), float("nan")), lse
        )


class ExpCapImpl(ToyImpl):
    """Computes the soft cap as ``(e^x - e^-x) / (e^x + e^-x)`` in float32."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Give NaN where both exponentials overflow."""
        answer = solve(problem)
        if not problem.logits_soft_cap:
            return answer
        limit = 88.0 * problem.logits_soft_cap
        for piece in dense_rows(problem):
            scores = torch.einsum("thd,nhd->thn", piece.query, piece.key) * problem.scale_factor
            overflow = (scores.abs() > limit).any(dim=-1, keepdim=True)
            answer.output[piece.rows] = answer.output[piece.rows].masked_fill(
                overflow, float("nan")
            )
        return answer


class FiniteInfinityImpl(ToyImpl):
    """Starts the running maximum at -50,000 instead of -inf."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Lose rows all of whose scores are lower."""
        output, lse = solve(problem)
        return ReferenceResult(
            output.masked_fill((lse < -50_000.0).unsqueeze(-1), 0.0), lse.clamp(min=-50_000.0)
        )


class PastEndImpl(ToyImpl):
    """Writes one row past the tokens of the batch."""

    def store(self, output: torch.Tensor, answer: torch.Tensor, rows: int) -> None:
        """Write, and write one more."""
        super().store(output, answer, rows)
        end = output.storage_offset() + rows * output.stride(0)
        output.as_strided((4,), (1,), end).zero_()


class SkipsPaddingImpl(ToyImpl):
    """Leaves the rows of padding as they were."""

    def forward_with_lse(
        self, layer: AttentionLayer, query: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember where the requests end."""
        self.end = int(rest[3].batch.query_start_loc_cpu[-1])
        return super().forward_with_lse(layer, query, *rest, **named)

    def store(self, output: torch.Tensor, answer: torch.Tensor, rows: int) -> None:
        """Write the rows of requests alone."""
        super().store(output, answer, min(rows, self.end))
