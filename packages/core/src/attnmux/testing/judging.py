"""Hold a backend's answer against the right one, and say where and how it is wrong."""

from __future__ import annotations

import itertools
import math

import torch

from attnmux.testing.case import Case
from attnmux.testing.outcome import NonConformanceError
from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import ReferenceResult
from attnmux.testing.tolerances import Budget, Verdict, judge, judge_lse
from attnmux.testing.variants import likely_kind

_SHOWN = 4  # values of a row that a report shows


def judge_output(
    case: Case,
    output: torch.Tensor,
    problem: AttentionProblem,
    exact: ReferenceResult,
    budget: Budget,
    what: str = "forward",
) -> None:
    """Check every row that the backend had to write.

    Raises:
        NonConformanceError: a row is off by more than its budget, NaN, or was not written.
    """
    rows = case.num_actual_tokens
    got = output[:rows].reshape(rows, case.scenario.num_heads, case.content.head_size_v)
    verdict = judge(got, exact.output[:rows], budget.output[:rows])
    if verdict.ratio <= 1.0:
        return
    raise NonConformanceError(
        f"{what}: {_count_wrong(got, exact.output[:rows], budget.output[:rows])}",
        _places(case, got, exact.output[:rows], budget.output[:rows], verdict),
        _likely(case, got, problem, exact, budget),
    )


def judge_log_sum_exp(
    case: Case, lse: torch.Tensor, base_e: bool, exact: ReferenceResult, budget: Budget
) -> None:
    """Check the log-sum-exp of every row that belongs to a request.

    Raises:
        NonConformanceError: wrong shape, dtype or value, or NaN in a row of padding.
    """
    rows, heads = case.num_actual_tokens, case.scenario.num_heads
    fits = lse.dim() == 2 and lse.shape[1] == heads and rows <= lse.shape[0] <= case.query.shape[0]
    if not fits or lse.dtype != torch.float32:
        raise NonConformanceError(
            f"log-sum-exp: got {lse.dtype} {list(lse.shape)}; "
            f"right: torch.float32 [{rows}, {heads}]"
        )
    if bool(lse[:rows].isnan().any()):
        raise NonConformanceError("log-sum-exp is NaN", _first_nan(case, lse[:rows]))
    own = case.scenario.num_tokens
    natural = lse[:own] if base_e else lse[:own] * math.log(2.0)
    right, allowed = exact.lse[:own], budget.lse[:own]
    verdict = judge_lse(natural, right, allowed)
    if verdict.ratio <= 1.0:
        return
    row, head = verdict.row, verdict.head
    where = (
        f"worst: {_place(case, row, head)}: expected {right[row, head]:.6g}, "
        f"got {natural[row, head]:.6g}, allowed error {verdict.budget:.2g}"
    )
    raise NonConformanceError("log-sum-exp is wrong", where, _likely_lse(natural, right, allowed))


def _likely_lse(natural: torch.Tensor, right: torch.Tensor, allowed: torch.Tensor) -> str:
    """Name what is wrong with a log-sum-exp."""
    stretched = allowed * 2 + right.abs().nan_to_num(posinf=0.0, neginf=0.0) * 1e-6
    if judge_lse(natural * math.log(2.0), right, stretched).ratio <= 1.0:
        return "it is to base 2 though lse_base_on_e says natural"
    if judge_lse(natural / math.log(2.0), right, stretched).ratio <= 1.0:
        return "it is natural though lse_base_on_e says base 2"
    no_key = torch.isneginf(right)
    if bool((no_key & ~torch.isneginf(natural)).any()):
        return "a row that sees no key has another log-sum-exp than -inf"
    return ""


def _likely(
    case: Case,
    got: torch.Tensor,
    problem: AttentionProblem,
    exact: ReferenceResult,
    budget: Budget,
) -> str:
    own = case.scenario.num_tokens
    if bool(got[own:].isnan().any()) and not bool(got[:own].isnan().any()):
        return "rows of padding are not written, or NaN of the padding reaches them"
    if bool(got.isnan().any()):
        if case.scenario.poison == "nan":
            return (
                "memory that nobody wrote reaches the output (0 * NaN is NaN), "
                "or a row is not written"
            )
        return "a row is not written, or an infinity is divided by itself"
    return likely_kind(got[:own], problem, exact, budget) or ""


def _count_wrong(got: torch.Tensor, right: torch.Tensor, allowed: torch.Tensor) -> str:
    bad = _wrong(got, right, allowed)
    return f"{int(bad.sum())} of {bad.numel()} (row, head) pairs are wrong"


def _wrong(got: torch.Tensor, right: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    error = (got.double() - right).abs().amax(dim=-1)
    return ~(error <= allowed)


def _places(
    case: Case, got: torch.Tensor, right: torch.Tensor, allowed: torch.Tensor, worst: Verdict
) -> str:
    row, head = _wrong(got, right, allowed).nonzero()[0].tolist()
    lines = []
    for label, r, h in (("first", row, head), ("worst", worst.row, worst.head)):
        error = float((got[r, h].double() - right[r, h]).abs().amax())
        lines.append(
            f"{label}: {_place(case, r, h)}: expected {_values(right[r, h])}, "
            f"got {_values(got[r, h])}; error {error:.3g}, allowed {float(allowed[r, h]):.3g}"
        )
    return "\n".join(dict.fromkeys(lines))


def _place(case: Case, row: int, head: int) -> str:
    """Name a row by its request and token."""
    starts = case.metadata.query_start_loc_cpu.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        if start <= row < end:
            seq_len = int(case.metadata.seq_lens[request])
            return (
                f"request {request} (query_len {end - start}, seq_len {seq_len}), "
                f"token {row - start} at position {seq_len - end + row}, head {head}"
            )
    return f"row {row} of padding, head {head}"


def _first_nan(case: Case, lse: torch.Tensor) -> str:
    row, head = lse.isnan().nonzero()[0].tolist()
    return f"first: {_place(case, row, head)}"


def _values(row: torch.Tensor) -> str:
    shown = ", ".join(f"{float(x):.5g}" for x in row[:_SHOWN])
    return f"[{shown}, …]" if row.numel() > _SHOWN else f"[{shown}]"
