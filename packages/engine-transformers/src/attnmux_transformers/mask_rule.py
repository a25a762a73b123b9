"""Reading a layer's mask as a rule: causal or not, and how wide its window is.

Transformers describes a mask by a function of (batch, head, query position, key position). Instead
of trusting the names in a model's configuration, the function itself is asked at every position
where a rule could change, and the one rule that agrees everywhere is the layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_SIZES_IN_CONFIG = ("sliding_window", "attention_chunk_size", "max_position_embeddings")
_LONGEST_DISTANCE_LOG2 = 20

_probing: ContextVar[bool] = ContextVar("attnmux_transformers_probing", default=False)


@dataclass(frozen=True)
class MaskRule:
    """What a layer's mask lets a token see.

    Attributes:
        causal: Only itself and what came before.
        sliding_window: Number of tokens seen to each allowed side, the token itself included; None
            for no window.
        problem: Why the mask cannot be said in these two words; None when it can.
    """

    causal: bool = True
    sliding_window: int | None = None
    problem: str | None = None


def is_probing() -> bool:
    """Whether masks are being read and not built."""
    return _probing.get()


@contextmanager
def probing() -> Iterator[None]:
    """Inside the block, the mask function answers with a `MaskRule`."""
    token = _probing.set(True)
    try:
        yield
    finally:
        _probing.reset(token)


def classify_mask(mask_function: MaskFunction, config: object) -> MaskRule:
    """Return the rule that `mask_function` obeys.

    Args:
        mask_function: Index-based mask of transformers: True where the key is seen.
        config: The model's configuration; only its window and chunk sizes are read, as candidates.

    Returns:
        The rule; its `problem` is set when no causal, windowed or bidirectional rule agrees with
        the function at every position asked (chunked attention, ranges of image tokens and the
        like).
    """
    sizes = [getattr(config, name, None) for name in _SIZES_IN_CONFIG]
    positions = _positions_of_interest(size for size in sizes if isinstance(size, int))
    query_pos, key_pos = positions[:, None], positions[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    try:
        got = torch.as_tensor(mask_function(zero, zero, query_pos, key_pos))
        got = got.to(device="cpu", dtype=torch.bool).expand(len(positions), len(positions))
    except (IndexError, RuntimeError, TypeError) as error:
        return MaskRule(problem=f"its mask depends on more than positions ({error})")
    window = sizes[0]
    windows = [None, window, window + 1] if isinstance(window, int) and window > 0 else [None]
    for causal in (True, False):
        for candidate in windows:
            if torch.equal(got, _expected(query_pos, key_pos, causal, candidate)):
                return MaskRule(causal=causal, sliding_window=candidate)
    return MaskRule(
        problem="its mask is neither causal nor bidirectional, with or without a window "
        "(chunked attention, for one)"
    )


def _positions_of_interest(sizes: Iterable[int]) -> torch.Tensor:
    """Return positions around zero, around powers of two and around each size and its double."""
    centres = [0, *(2**exponent for exponent in range(_LONGEST_DISTANCE_LOG2 + 1))]
    for size in sizes:
        centres += [size, 2 * size]
    near = {centre + offset for centre in centres for offset in range(-3, 4)}
    return torch.tensor(sorted(position for position in near if position >= 0))


def _expected(
    query_pos: torch.Tensor, key_pos: torch.Tensor, causal: bool, window: int | None
) -> torch.Tensor:
    distance = query_pos - key_pos
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)
