"""How far a right answer may be off: computed for each (row, head) from the problem itself.

No test types a tolerance. The budget of a row and head is::

    2 * (error of an independent low-precision reference + rounding band)

The low-precision reference does what an honest kernel does: scores and sums in float32, weights
rounded to the dtype of the query, the output rounded to its own. Its error is what this row costs
in that arithmetic. The band adds what another order of the same operations may cost, from unit
roundoffs and the sizes of what is added up (first-order error analysis: N. J. Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., chapter 3). The factor 2 leaves room for a second
rounding, as when partial results are merged.

Quantised caches need no room of their own: the reference reads the same stored values. What is
allowed is the rounding of ``stored * scale`` to the dtype of the query, which kernels do before a
product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnmux.testing.paged_read import PLAIN_CACHE_DTYPES
from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import DenseRows, ReferenceResult, dense_rows, weigh_keys

FACTOR = 2.0
"""Room for one more rounding of everything."""

VISIBLE = 4.0
"""A wrong answer counts as visible when it is off by this many budgets somewhere."""

_ACCUMULATION = 8.0  # float32 roundoffs that a score's sum and its scaling may cost
_SIGMAS = 3.0  # independent roundings add up like a random walk; three deviations cover a batch


class Budget(NamedTuple):
    """Largest error allowed, float64 ``[num_tokens, num_heads]`` each."""

    output: torch.Tensor
    lse: torch.Tensor


class Verdict(NamedTuple):
    """The worst (row, head) of a comparison."""

    ratio: float  # its error in budgets; above 1 is wrong; inf for NaN
    row: int
    head: int
    error: float
    budget: float


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`: half the distance from 1 to the next value."""
    return torch.finfo(dtype).eps / 2


def budget_for(
    problem: AttentionProblem,
    exact: ReferenceResult,
    output_dtype: torch.dtype | None = None,
) -> Budget:
    """Compute the budget of every (row, head) of `problem`, whose exact answer is `exact`.

    Args:
        problem: inputs in the dtypes that the backend gets.
        exact: `attnmux.testing.reference.solve` of the same problem.
        output_dtype: dtype of the output; the query's when None.
    """
    dtype = problem.query.dtype
    out_dtype = dtype if output_dtype is None else output_dtype
    output = torch.zeros_like(exact.lse)
    lse = torch.zeros_like(exact.lse)
    for piece in dense_rows(problem):
        low = _low_precision(piece, problem, dtype)
        band = _band(piece, problem, exact, dtype, out_dtype)
        low_output = low.output.to(out_dtype).double()
        error = (low_output - exact.output[piece.rows]).abs().amax(dim=-1)
        # Rows that see nothing: -inf on both sides, no error.
        lse_error = (low.lse.double() - exact.lse[piece.rows]).abs().nan_to_num(nan=0.0)
        output[piece.rows] = FACTOR * (error + band.output)
        lse[piece.rows] = FACTOR * (lse_error + band.lse)
    return Budget(output, lse)


def judge(got: torch.Tensor, exact: torch.Tensor, budget: torch.Tensor) -> Verdict:
    """Find the worst (row, head) of an output.

    Args:
        got, exact: ``[num_tokens, num_heads, size]``.
        budget: ``[num_tokens, num_heads]``.
    """
    error = (got.double() - exact).abs()
    return _worst(error.amax(dim=-1), got.isnan().any(dim=-1), budget)


def judge_lse(got: torch.Tensor, exact: torch.Tensor, budget: torch.Tensor) -> Verdict:
    """Find the worst (row, head) of a log-sum-exp; -inf must be -inf."""
    error = (got.double() - exact).abs()
    same_infinity = torch.isneginf(got) & torch.isneginf(exact)
    return _worst(error.masked_fill(same_infinity, 0.0), got.isnan(), budget)


def _worst(error: torch.Tensor, is_nan: torch.Tensor, budget: torch.Tensor) -> Verdict:
    if error.numel() == 0:
        return Verdict(0.0, 0, 0, 0.0, 0.0)
    infinite = torch.full_like(error, float("inf"))
    ratio = torch.where(error == 0, torch.zeros_like(error), error / budget)
    ratio = torch.where(is_nan | ratio.isnan(), infinite, ratio)
    row, head = divmod(int(ratio.argmax()), ratio.shape[1])
    return Verdict(
        float(ratio[row, head]), row, head, float(error[row, head]), float(budget[row, head])
    )


def _low_precision(
    piece: DenseRows, problem: AttentionProblem, dtype: torch.dtype
) -> ReferenceResult:
    """Attend as an honest kernel would: float32 inside, weights and dequantised rows in `dtype`."""
    key, value = (x.to(dtype).float() for x in (piece.key, piece.value))
    scores = torch.einsum("thd,nhd->htn", piece.query.float(), key) * problem.scale_factor
    cap = problem.logits_soft_cap
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = (scores + piece.bias.float()).masked_fill(~piece.visible, float("-inf"))
    highest = scores.new_full((*scores.shape[:2], 1), float("-inf"))
    if scores.shape[2]:
        highest = scores.amax(dim=-1, keepdim=True)
    sinks = problem.sinks
    if sinks is not None:
        sink = sinks.float().to(scores.device).view(-1, 1, 1)
        highest = torch.maximum(highest, sink)
    highest = highest.masked_fill(torch.isneginf(highest), 0.0)
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - highest)
    summed = torch.einsum("htn,nhd->thd", weights.to(dtype).float(), value)
    divisor = total.masked_fill(total == 0, 1.0).squeeze(-1).transpose(0, 1).unsqueeze(-1)
    lse = (highest + torch.log(total)).squeeze(-1).transpose(0, 1)
    return ReferenceResult(summed / divisor, lse)


def _band(
    piece: DenseRows,
    problem: AttentionProblem,
    exact: ReferenceResult,
    dtype: torch.dtype,
    output_dtype: torch.dtype,
) -> Budget:
    """Return what other orders of the same operations may cost, ``[t, num_heads]`` each."""
    half, single = unit_roundoff(dtype), unit_roundoff(torch.float32)
    score_error = _score_error(piece, problem, half, single)  # [t, num_heads]
    weights, _ = weigh_keys(piece, problem.scale_factor, problem.logits_soft_cap, problem.sinks)
    spread = torch.einsum("htn,nhd->thd", weights, piece.value.abs()).amax(dim=-1)
    largest = exact.output[piece.rows].abs().amax(dim=-1)
    summing = single * (1.0 + piece.key.shape[0]) ** 0.5
    output = (
        unit_roundoff(output_dtype) * largest
        + (half + summing + _value_error(problem, half)) * spread
        + score_error * (spread + largest)
    )
    lse = exact.lse[piece.rows]
    size_of_lse = lse.abs().masked_fill(torch.isinf(lse), 0.0)
    lse_band = score_error + half + summing + single * _ACCUMULATION * (size_of_lse + 1.0)
    return Budget(output, lse_band)


def _score_error(
    piece: DenseRows, problem: AttentionProblem, half: float, single: float
) -> torch.Tensor:
    """Largest error of a visible score, ``[t, num_heads]``."""
    if piece.key.shape[0] == 0:
        return piece.query.new_zeros(piece.query.shape[:2])
    scale = abs(problem.scale_factor)
    sizes = torch.einsum("thd,nhd->htn", piece.query.abs(), piece.key.abs()) * scale
    error = _ACCUMULATION * single * (sizes + piece.bias.abs())
    if problem.uses_cache and problem.kv_cache_dtype not in PLAIN_CACHE_DTYPES:
        squares = torch.einsum("thd,nhd->htn", piece.query.square(), piece.key.square())
        error = error + _SIGMAS * half * scale * squares.sqrt()
    return error.masked_fill(~piece.visible, 0.0).amax(dim=-1).transpose(0, 1)


def _value_error(problem: AttentionProblem, half: float) -> float:
    """Relative error of a value that is dequantised to the query's dtype."""
    scaled = problem.uses_cache and problem.kv_cache_dtype not in PLAIN_CACHE_DTYPES
    return half if scaled else 0.0
