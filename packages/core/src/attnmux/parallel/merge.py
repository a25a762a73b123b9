"""Merges of partial attention over disjoint sets of keys, by their log-sum-exp.

The merge is the rescaling step of the online softmax (Milakov and Gimelshein, "Online normalizer
calculation for softmax", arXiv:1805.02867), as Flash-Decoding applies it to partial results:
``lse = log(sum_i exp(lse_i))`` and ``out = sum_i exp(lse_i - lse) * out_i``. It is exact in any
order, so that splits, chunks and ranks can be merged pairwise or all at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from attnmux.checks import bad_argument, check_in, check_tensor
from attnmux.parallel.groups import ContextParallelGroup

MergeScheme = Literal["all_gather_reduce_scatter", "all_to_all"]

_SCHEMES: tuple[MergeScheme, ...] = ("all_gather_reduce_scatter", "all_to_all")
_OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LN_2 = math.log(2.0)


def merge_attn_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    base_on_e: bool | Sequence[bool] = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial results over disjoint sets of keys; see `merge_states`."""
    return merge_states((out_a, out_b), (lse_a, lse_b), base_on_e=base_on_e)


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    base_on_e: bool | Sequence[bool] = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over disjoint sets of keys into the result over all of them.

    An empty state has log-sum-exp -inf; +inf, which some kernels give a row without keys, is read
    as -inf too. The output of an empty state is not read (it may be NaN). A row that is empty in
    every state gives output 0 and log-sum-exp -inf; a row that is empty in all but one gives that
    one unchanged. Weights and sums are float32. Nothing synchronises with the device.

    Args:
        outs: n states ``[num_tokens, num_heads, head_size]`` float16, bfloat16 or float32, as a
            sequence or stacked along dimension 0; each with strides of its own.
        lses: n log-sum-exps ``[num_tokens, num_heads]`` float32, alike.
        base_on_e: True if the log-sum-exps are natural logarithms, False if their base is 2. A
            sequence states it for each state; states of different bases are refused.

    Returns:
        The output, of the dtype of ``outs``, and its float32 log-sum-exp in the same base.

    Raises:
        ValueError: if there is no state, or shapes, dtypes, devices or bases disagree.
    """
    outs, lses = list(outs), list(lses)
    natural = _common_base(base_on_e, len(outs))
    _check_states(outs, lses)
    known = [_without_positive_inf(lse) for lse in lses]
    weights, merged_lse = _merge_weights(torch.stack(known), natural)
    merged = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for out, lse, weight in zip(outs, known, weights, strict=True):
        merged += _scaled(out, lse, weight)
    return merged.to(outs[0].dtype), merged_lse


def merge_across_ranks(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: ContextParallelGroup,
    scheme: MergeScheme = "all_gather_reduce_scatter",
    base_on_e: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge every rank's partial result over its own keys; each rank gets its part of the heads.

    The ranks exchange natural logarithms, whatever each of them declares for its own values, so
    that a group whose ranks run backends of different bases is merged rightly. As in
    `merge_states`, a rank without keys (-inf or +inf) adds nothing, and nothing synchronises.

    Args:
        out: ``[num_tokens, num_heads, head_size]`` float16, bfloat16 or float32: this rank's
            result for all heads of the group; the same shape and dtype on every rank.
        lse: ``[num_tokens, num_heads]`` float32.
        group: the ranks that share the context; ``num_heads`` is a multiple of its size.
        scheme: "all_gather_reduce_scatter" gathers the log-sum-exps and sums float32 outputs,
            scattered by heads. "all_to_all" exchanges parts of the outputs in their own dtype
            and merges them at the receiver. Both give the same result up to rounding.
        base_on_e: True if this rank's ``lse`` is a natural logarithm, False if its base is 2.

    Returns:
        ``[num_tokens, num_heads / world_size, head_size]`` and its float32 log-sum-exp
        ``[num_tokens, num_heads / world_size]``, in the base that this rank declared: the heads
        that stand at this rank's place in the group.

    Raises:
        ValueError: for a wrong shape, dtype, device or scheme, or heads that cannot be divided.
    """
    check_in("scheme", scheme, _SCHEMES)
    check_tensor("out", out, shape=("num_tokens", "num_heads", "head_size"), dtype=_OUTPUT_DTYPES)
    check_tensor("lse", lse, shape=tuple(out.shape[:2]), dtype=torch.float32, device=out.device)
    heads = group._part("out", out, 1)
    natural = _without_positive_inf(lse if base_on_e else lse * _LN_2)
    if scheme == "all_to_all":
        merged, merged_lse = merge_states(
            group.all_to_all(out, dim=1), group.all_to_all(natural, dim=1)
        )
    else:
        lses = group.all_gather(natural.unsqueeze(0), dim=0)
        weights, all_heads_lse = _merge_weights(lses, natural=True)
        scaled = _scaled(out, natural, weights[group.rank_in_group])
        merged = group.reduce_scatter(scaled, dim=1).to(out.dtype)
        merged_lse = all_heads_lse.narrow(1, group.rank_in_group * heads, heads)
    return merged, merged_lse if base_on_e else merged_lse / _LN_2


def _common_base(base_on_e: bool | Sequence[bool], num_states: int) -> bool:
    if isinstance(base_on_e, bool):
        return base_on_e
    bases = list(base_on_e)
    if len(bases) != num_states or len(set(bases)) != 1:
        raise bad_argument(
            "base_on_e", bases, f"one base for all {num_states} states; convert the others first"
        )
    return bases[0]


def _check_states(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise bad_argument(
            "outs, lses", f"{len(outs)} and {len(lses)} states", "the same number, at least 1"
        )
    first = outs[0]
    check_tensor(
        "outs[0]", first, shape=("num_tokens", "num_heads", "head_size"), dtype=_OUTPUT_DTYPES
    )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_tensor(
            f"outs[{i}]", out, shape=tuple(first.shape), dtype=first.dtype, device=first.device
        )
        check_tensor(
            f"lses[{i}]",
            lse,
            shape=tuple(first.shape[:2]),
            dtype=torch.float32,
            device=first.device,
        )


def _without_positive_inf(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(torch.isposinf(lse), -torch.inf)


def _merge_weights(lses: torch.Tensor, natural: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of n states and their common log-sum-exp, from ``lses`` ``[n, ...]`` without +inf."""
    exp, log = (torch.exp, torch.log) if natural else (torch.exp2, torch.log2)
    highest = lses.amax(dim=0)
    # Subtracting -inf from -inf is NaN, so a row without any key is measured from 0.
    reference = highest.masked_fill(torch.isneginf(highest), 0.0)
    weights = exp(lses - reference)
    total = weights.sum(dim=0)
    merged_lse = log(total) + reference
    return weights / total.masked_fill(total == 0, 1.0), merged_lse


def _scaled(out: torch.Tensor, lse: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``weight * out`` in float32; exactly 0 where the state is empty, whatever ``out`` holds."""
    empty = torch.isneginf(lse).unsqueeze(-1)
    return out.float().masked_fill(empty, 0.0) * weight.unsqueeze(-1)
