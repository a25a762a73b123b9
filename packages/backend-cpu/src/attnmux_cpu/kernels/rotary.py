"""Rotary position embedding and the norm that may come before it, on heads of any size.

Su et al., "RoFormer" (2021), section 3.2.2; Zhang and Sennrich, "Root Mean Square Layer
Normalization" (2019). Computed in float32.
"""

from __future__ import annotations

import torch


def rotated(
    heads: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool
) -> torch.Tensor:
    """Return `heads` turned by the angles of their positions, float32.

    Args:
        heads: ``[tokens, num_heads, head_size]``; what lies past the rotary part stays as it is.
        positions: int64 ``[tokens]``.
        cos_sin_cache: ``[max_position, rotary_dim]``: cosines, then sines.
        is_neox: True: the first half of the rotary part turns against the second. False:
            neighbours turn against each other.
    """
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    result = heads.float().clone()
    part = result[..., :rotary_dim]
    first, second = part.chunk(2, dim=-1) if is_neox else (part[..., 0::2], part[..., 1::2])
    turned = first * cos - second * sin, second * cos + first * sin
    first.copy_(turned[0])
    second.copy_(turned[1])
    return result


def normalised(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return each head divided by its root mean square and multiplied by `weight`, float32.

    Args:
        heads: ``[..., head_size]``.
        weight: ``[head_size]``.
        eps: Added to the mean square.
    """
    values = heads.float()
    mean_square = values.square().mean(dim=-1, keepdim=True)
    return values * (mean_square + eps).rsqrt() * weight.float()
