"""The right answers of a case of latent attention, and how a backend's are held against them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.testing.mla.case import MlaCase
from attnmux.testing.mla.reference import MlaReference, mla_reference, mla_reference_absorbed
from attnmux.testing.mla.scenarios import MlaScenario
from attnmux.testing.outcome import NonConformanceError
from attnmux.testing.paged_read import PLAIN_CACHE_DTYPES
from attnmux.testing.tolerances import Budget, judge, judge_lse


@dataclass(frozen=True)
class Split:
    """How many tokens and requests `forward_mqa` gets; the rest is for `forward_mha`."""

    num_requests: int
    num_tokens: int
    num_prefill_tokens: int


def exact_absorbed(case: MlaCase, split: Split) -> MlaReference:
    """Return what `forward_mqa` should give, for the query as it was rounded."""
    heads = case.scenario.num_heads
    lists = case.indexer.topk_indices_buffer[: split.num_tokens].cpu() if case.indexer else None
    return mla_reference_absorbed(
        case.q_latent[: split.num_tokens, :heads].cpu(),
        case.q_pe[: split.num_tokens, :heads].cpu(),
        case.kv_cache.cpu(),
        case.table[: split.num_requests].cpu(),
        case.query_lens[: split.num_requests],
        case.seq_lens[: split.num_requests],
        scale=case.scale,
        causal=case.causal[: split.num_requests],
        topk_indices=lists,
        cache_scale=case.cache_scale,
    )


def exact_uncompressed(case: MlaCase, split: Split) -> MlaReference:
    """Return what `forward_mha` should give."""
    tokens = slice(split.num_tokens, split.num_tokens + split.num_prefill_tokens)
    requests = slice(split.num_requests, None)
    return mla_reference(
        case.q[tokens].cpu(),
        case.kv_c[tokens].cpu(),
        case.k_pe[tokens].cpu(),
        case.w_kv_b.cpu(),
        case.kv_cache.cpu(),
        case.table[requests].cpu(),
        case.query_lens[requests],
        case.seq_lens[requests],
        scale=case.scale,
        causal=case.causal[requests],
        cache_scale=case.cache_scale,
    )


def rows_are_rounded(scenario: MlaScenario) -> bool:
    """Whether what the cache holds may be no value of the model's dtype."""
    name = scenario.kv_cache_dtype
    return name not in (*PLAIN_CACHE_DTYPES[:1], scenario.dtype)


def judged(what: str, got: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> float:
    """Return the largest error in budgets.

    Raises:
        NonConformanceError: it is more than 1.
    """
    got = got.cpu()
    verdict = judge(got, exact, allowed)
    if verdict.ratio <= 1.0:
        return verdict.ratio
    row, head = verdict.row, verdict.head
    values = [", ".join(f"{float(x):.5g}" for x in rows[row, head, :4]) for rows in (exact, got)]
    likely = "memory that nobody wrote reaches the output" if got.isnan().any() else ""
    raise NonConformanceError(
        f"{what}: the result is wrong",
        f"worst: row {row}, head {head}: expected [{values[0]}, …], got [{values[1]}, …]; error "
        f"{verdict.error:.3g}, allowed {verdict.budget:.3g}",
        likely,
    )


def judged_lse(
    case: MlaCase,
    impl: Any,
    lse: torch.Tensor,
    wanted: list[int],
    exact: MlaReference,
    budget: Budget,
) -> float:
    """Return the largest error of a log-sum-exp in budgets; heads of padding do not count.

    Raises:
        NonConformanceError: it is more than 1, or shape or dtype are wrong.
    """
    if list(lse.shape) != wanted or lse.dtype != torch.float32:
        raise NonConformanceError(
            f"log-sum-exp: got {lse.dtype} {list(lse.shape)}; right: torch.float32 {wanted}"
        )
    natural = lse[:, : case.scenario.num_heads].cpu()
    if not impl.lse_base_on_e:
        natural = natural * math.log(2.0)
    verdict = judge_lse(natural, exact.lse, budget.lse)
    if not verdict.ratio <= 1.0:
        row, head = verdict.row, verdict.head
        raise NonConformanceError(
            "forward_mqa: log-sum-exp is wrong",
            f"worst: row {row}, head {head}: expected {exact.lse[row, head]:.6g}, got "
            f"{natural[row, head]:.6g}, allowed error {verdict.budget:.2g}",
        )
    return verdict.ratio
