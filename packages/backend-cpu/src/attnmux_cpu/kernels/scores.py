"""From query and key tiles to scores, and into the softmax: one step that both schedules share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux_cpu.kernels.softmax import SoftmaxState
from attnmux_cpu.kernels.workspace import Workspace


@dataclass(frozen=True)
class ScoreRule:
    """What happens to a score before the softmax, for all requests of a layer.

    Attributes:
        scale: Factor of the product of query and key.
        soft_cap: ``cap * tanh(score / cap)`` after scaling; None: none.
        alibi_slopes: float32 ``[num_kv_heads, group, 1, 1]``: slope times distance is added after
            the soft cap; None: none.
        alibi_sqrt: Minus slope times the root of the distance to earlier keys is added instead.
    """

    scale: float
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    alibi_sqrt: bool = False


def load_queries(
    query: torch.Tensor, num_kv_heads: int, factor: float | torch.Tensor, workspace: Workspace
) -> torch.Tensor:
    """Fold each KV head's group of query heads into its rows, scaled, in float32.

    Args:
        query: ``[requests, tokens, num_heads, head_size]``, any strides, any float dtype.
        num_kv_heads: Divides num_heads.
        factor: Scale of the scores; a tensor has one element or ``[num_kv_heads]``.
        workspace: Gives the memory.

    Returns:
        ``[requests * num_kv_heads, group * tokens, head_size]``; the heads of a group are outer.
    """
    requests, tokens, num_heads, head_size = query.shape
    group = num_heads // num_kv_heads
    folded = workspace.take("query", (requests, num_kv_heads, group, tokens, head_size))
    folded.copy_(
        query.view(requests, tokens, num_kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    )
    folded.mul_(factor.view(-1, 1, 1, 1) if isinstance(factor, torch.Tensor) else factor)
    return folded.view(requests * num_kv_heads, group * tokens, head_size)


def query_factor(rule: ScoreRule, key_scale: torch.Tensor | None) -> float | torch.Tensor:
    """Return what queries are multiplied by, so that a product with a stored key is a score.

    The division before a soft cap is in it too. `key_scale` is as in `PagedKeys`.
    """
    factor = rule.scale / rule.soft_cap if rule.soft_cap else rule.scale
    return factor if key_scale is None else key_scale * factor


def attend_tile(
    state: SoftmaxState,
    rule: ScoreRule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    distance: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """Bring one tile of keys into the state.

    Args:
        state: Of ``requests * num_kv_heads`` problems with ``group * tokens`` rows.
        rule: What happens to scores.
        query: ``[problems, rows, head_size]`` float32, as `load_queries` made it.
        key: ``[problems, tile, head_size]`` float32.
        value: ``[problems, tile, value_size]`` float32, finite where nobody looks.
        mask: bool ``[requests, tokens, tile]``, True where seen; None: all seen.
        distance: int64 ``[requests, tokens, tile]``: key minus query position; only for ALiBi.
        workspace: Gives the memory of the scores.
    """
    problems, rows, _ = query.shape
    scores = workspace.take("scores", (problems, rows, key.shape[1]))
    torch.bmm(query, key.transpose(1, 2), out=scores)
    if rule.soft_cap:
        scores.tanh_().mul_(rule.soft_cap)
    if rule.alibi_slopes is not None and distance is not None:
        _add_alibi(scores, rule.alibi_slopes, distance, rule.alibi_sqrt)
    if mask is not None:
        by_request = scores.view(mask.shape[0], -1, mask.shape[1], mask.shape[2])
        by_request.masked_fill_(~mask.unsqueeze(1), float("-inf"))
    state.step(scores, value, is_masked=mask is not None)


def _add_alibi(
    scores: torch.Tensor, slopes: torch.Tensor, distance: torch.Tensor, use_sqrt: bool
) -> None:
    requests, tokens, tile = distance.shape
    kv_heads, group = slopes.shape[:2]
    bias = distance.float()
    if use_sqrt:
        bias = bias.clamp_max_(0.0).neg_().sqrt_().neg_()
    by_head = scores.view(requests, kv_heads, group, tokens, tile)
    by_head.addcmul_(slopes, bias.view(requests, 1, 1, tokens, tile))
