"""Memory that nobody wrote must not matter: fill it with poison, and watch what gets written.

One byte pattern poisons every dtype: ``0xFF`` repeated is NaN as float32, float16, bfloat16, fp8
e4m3 and fp8 e5m2, and a NaN scale behind an int8 row. A second kind is finite and large, for
kernels that clean NaN away and would hide that they read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.checks import check_in

POISON_KINDS = ("nan", "finite")
_NAN_BYTE = 0xFF
_FINITE_BYTE = 0x7B  # 1e36 as float32 and bfloat16, 61,280 as float16, 352 as e4m3: never NaN
_WHOLE_STORAGE = 1 << 28  # bytes; a larger buffer is mostly address space that nobody may touch
_GUARD_ELEMENTS = 256  # on both sides of a guarded tensor; a vector store that slips is far shorter


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View all bytes of the memory behind `tensor`, not only those that it shows."""
    flat = torch.zeros(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def is_far(tensor: torch.Tensor) -> bool:
    """Whether the memory behind a view is too large to be touched as a whole."""
    return tensor.untyped_storage().nbytes() > _WHOLE_STORAGE


def poison_(tensor: torch.Tensor, kind: str = "nan") -> torch.Tensor:
    """Fill all memory behind `tensor` with poison, in place, and return `tensor`.

    Of a view whose rows lie gigabytes apart only what it shows is filled.
    """
    check_in("kind", kind, POISON_KINDS)
    target = tensor.view(torch.uint8) if is_far(tensor) else storage_bytes(tensor)
    target.fill_(_NAN_BYTE if kind == "nan" else _FINITE_BYTE)
    return tensor


class PoisonedAllocations:
    """While open, `torch.empty`, `empty_like` and `new_empty` return poison, not old memory.

    A workspace that is read before it is written then gives NaN every time, not once a month.
    """

    def __enter__(self) -> PoisonedAllocations:
        """Put the poisoning functions in place."""
        self._saved: tuple[Any, ...] = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
        for owner, name in zip(_OWNERS, _NAMES, strict=True):
            setattr(owner, name, _poisoning(getattr(owner, name)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Put the real ones back."""
        for owner, name, real in zip(_OWNERS, _NAMES, self._saved, strict=True):
            setattr(owner, name, real)


_OWNERS: tuple[Any, ...] = (torch, torch, torch.Tensor)
_NAMES = ("empty", "empty_like", "new_empty")


def _poisoning(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(real)
    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = real(*args, **kwargs)
        if torch.compiler.is_compiling():
            return tensor  # a compiler traces the call itself, and would trip over the poison
        return poison_(tensor) if tensor.numel() and tensor.dtype.is_floating_point else tensor

    return allocate


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    row_gap: int = 0,
) -> torch.Tensor:
    """Return a poisoned view of `shape` with a guard region on both sides.

    Args:
        shape: of the view; its last dimension is contiguous.
        dtype, device: of the view.
        row_gap: elements between rows of the first dimension, as in a view of a wider buffer.
    """
    row = 1
    for extent in shape[1:]:
        row *= extent
    pitch = row + row_gap
    total = shape[0] * pitch + 2 * _GUARD_ELEMENTS
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, 0, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    strides[0] = pitch
    buffer = torch.empty(total, dtype=dtype, device=device)
    return poison_(buffer.as_strided(tuple(shape), tuple(strides), _GUARD_ELEMENTS))


def _watched_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes behind a tensor, or those it shows where that would be too many."""
    if is_far(tensor):
        return tensor.contiguous().view(torch.uint8).flatten()
    return storage_bytes(tensor)


@dataclass(frozen=True)
class Watch:
    """The bytes behind a tensor at one moment, and which of its elements may change after it."""

    name: str
    tensor: torch.Tensor
    before: torch.Tensor  # uint8 copy of the storage
    writable: torch.Tensor | None  # bool, one for each element of the storage; None: nothing

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, writable: torch.Tensor | None = None) -> Watch:
        """Start watching; `writable` is a bool mask of the shape of `tensor`, None for nothing."""
        mask = None
        if writable is not None and is_far(tensor):
            mask = writable.flatten()
        elif writable is not None:
            count = storage_bytes(tensor).numel() // tensor.element_size()
            mask = torch.zeros(count, dtype=torch.bool, device=tensor.device)
            view = mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            view.masked_fill_(writable, True)
        return cls(name, tensor, _watched_bytes(tensor).clone(), mask)

    def complaint(self) -> str | None:
        """Return what was written where nothing may be written, None when all is intact."""
        changed = _watched_bytes(self.tensor) != self.before
        if not bool(changed.any()):
            return None
        per_element = changed.view(-1, self.tensor.element_size()).any(dim=1)
        if self.writable is not None:
            per_element = per_element & ~self.writable
        bad = per_element.nonzero().flatten()
        if bad.numel() == 0:
            return None
        first = int(bad[0])
        place = f"element {first} of the view" if is_far(self.tensor) else self._describe(first)
        return f"{self.name}: {bad.numel()} elements changed that must not, the first at {place}"

    def _describe(self, element: int) -> str:
        """Name an element of the storage by its index in the view where it has one."""
        offset = element - self.tensor.storage_offset()
        index = []
        order = sorted(
            range(self.tensor.dim()), key=lambda dim: self.tensor.stride(dim), reverse=True
        )
        places = {}
        for dim in order:
            stride = self.tensor.stride(dim)
            places[dim] = offset // stride if stride else 0
            offset -= places[dim] * stride
        index = [places[dim] for dim in range(self.tensor.dim())]
        inside = all(0 <= i < n for i, n in zip(index, self.tensor.shape, strict=True))
        return f"{index}" if inside else f"element {element} of its memory, outside the view"
