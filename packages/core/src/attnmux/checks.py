"""One sentence for every bad argument: what it is called, what came, what is allowed.

Every backend asks here, so that users read the same words whichever kernel is behind them. A check
returns nothing and raises `ValueError`; it never reads the values of a tensor, so it is safe on any
device and inside a captured graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real

import numpy as np
import torch

INDEX_DTYPES = (torch.int32, torch.int64)
"""Dtypes in which lengths, tables and slots may arrive."""


def bad_argument(name: str, got: object, allowed: object) -> ValueError:
    """Return (not raise) the error for argument `name`; the text is ``name: got …; allowed: …``."""
    return ValueError(f"{name}: got {got}; allowed: {allowed}")


def check_in(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise `ValueError` unless `value` is one of `allowed`."""
    choices = list(allowed)
    if value not in choices:
        raise bad_argument(name, repr(value), " | ".join(str(choice) for choice in choices))


def check_positive(name: str, value: object) -> None:
    """Raise `ValueError` unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_argument(name, repr(value), "an integer of at least 1")


def check_divisible(name: str, value: int, by_name: str, by: int) -> None:
    """Raise `ValueError` unless `value` is a multiple of `by`."""
    if value % by:
        raise bad_argument(name, value, f"a multiple of {by_name} ({by})")


def check_head_counts(num_heads: int, num_kv_heads: int) -> None:
    """Raise `ValueError` unless both are positive and the first is a multiple of the second."""
    check_positive("num_heads", num_heads)
    check_positive("num_kv_heads", num_kv_heads)
    check_divisible("num_heads", num_heads, "num_kv_heads", num_kv_heads)


def check_sliding_window(window: int | None) -> None:
    """Raise `ValueError` unless `window` is None (no window) or a count of at least 1 token.

    The count includes the token itself: a window of 1 sees only itself.
    """
    if window is not None and (
        not isinstance(window, int) or isinstance(window, bool) or window < 1
    ):
        raise bad_argument(
            "sliding_window", repr(window), "None (no window) or an integer of at least 1"
        )


def check_scale(scale: object) -> float:
    """Return the factor of the scores; a `ValueError` unless it is a finite number."""
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise bad_argument("scale", repr(scale), "a finite number")
    return float(scale)


def check_soft_cap(cap: object) -> None:
    """Raise `ValueError` unless `cap` is None or 0 (no cap) or a finite positive number."""
    if cap is not None and not (isinstance(cap, Real) and 0 <= float(cap) < math.inf):
        raise bad_argument("logits_soft_cap", repr(cap), "None, 0 or a finite positive number")


def check_alibi_slopes(slopes: Sequence[float] | torch.Tensor | None, num_heads: int) -> None:
    """Raise `ValueError` unless there is one slope for each query head, or none at all."""
    if slopes is None:
        return
    allowed = f"one for each of {num_heads} query heads"
    if isinstance(slopes, (torch.Tensor, np.ndarray)):
        if slopes.ndim != 1:
            raise bad_argument("alibi_slopes.shape", list(slopes.shape), f"[{num_heads}]")
    elif not isinstance(slopes, Sequence) or not all(isinstance(slope, Real) for slope in slopes):
        raise bad_argument("alibi_slopes", repr(slopes), allowed)
    if len(slopes) != num_heads:
        raise bad_argument("alibi_slopes", f"{len(slopes)} slopes", allowed)


def check_sinks(sinks: torch.Tensor | None, num_heads: int) -> None:
    """Raise `ValueError` unless `sinks` is None or a floating tensor of shape ``[num_heads]``."""
    if sinks is None:
        return
    check_tensor("sinks", sinks, shape=(num_heads,))
    if not sinks.dtype.is_floating_point:
        raise bad_argument("sinks.dtype", sinks.dtype, "a floating-point dtype")


def check_index_dtype(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` unless the tensor of lengths, slots or blocks is int32 or int64."""
    if tensor.dtype not in INDEX_DTYPES:
        raise bad_argument(f"{name}.dtype", tensor.dtype, _one_of(INDEX_DTYPES))


def check_tensor(
    name: str,
    tensor: object,
    *,
    shape: Sequence[int | str] | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    device: torch.device | str | None = None,
    last_dim_contiguous: bool = False,
) -> None:
    """Raise `ValueError` unless `tensor` is a tensor with the given properties.

    Args:
        name: What the caller calls it; it begins the sentence.
        tensor: What came.
        shape: One entry a dimension: an integer must match, a string names a free dimension.
        dtype: The dtype, or the dtypes, that are allowed.
        device: Only the type is compared when it has no index ("cuda" takes "cuda:1").
        last_dim_contiguous: Require a stride of 1 in the last dimension (of more than one entry).
    """
    if not isinstance(tensor, torch.Tensor):
        raise bad_argument(name, type(tensor).__name__, "a torch.Tensor")
    if shape is not None and not _shape_matches(tensor.shape, shape):
        wanted = ", ".join(str(size) for size in shape)
        raise bad_argument(f"{name}.shape", list(tensor.shape), f"[{wanted}]")
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if tensor.dtype not in allowed:
            raise bad_argument(f"{name}.dtype", tensor.dtype, _one_of(allowed))
    if device is not None:
        _check_device(name, tensor.device, torch.device(device))
    if last_dim_contiguous and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise bad_argument(f"{name}.stride(-1)", tensor.stride(-1), 1)


def _shape_matches(got: Sequence[int], wanted: Sequence[int | str]) -> bool:
    return len(got) == len(wanted) and all(
        isinstance(want, str) or have == want for have, want in zip(got, wanted, strict=True)
    )


def _check_device(name: str, got: torch.device, wanted: torch.device) -> None:
    if got.type != wanted.type or (wanted.index is not None and got.index != wanted.index):
        raise bad_argument(f"{name}.device", got, wanted)


def _one_of(values: Iterable[object]) -> str:
    return " | ".join(str(value) for value in values)
