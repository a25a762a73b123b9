"""Scratch memory that is kept between calls.

A fresh buffer of several megabytes costs more in page faults than the product it holds, so each
thread keeps the buffers it needs and hands them out again by name.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

MAX_VIEWS = 512
"""Shapes remembered; making a view costs as much as a small product."""


class Workspace:
    """Named scratch buffers; each grows to the largest shape it was asked for and stays.

    A buffer is valid until the same name is taken again. Its contents are whatever was there.
    """

    def __init__(self) -> None:
        """Start with no memory."""
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a contiguous, uninitialised CPU tensor of `shape` and `dtype`."""
        key = (name, dtype, tuple(shape))
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = self._new_view(*key)
        return view

    def _new_view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            # Views of the smaller buffer would keep it in memory.
            self._views = {k: v for k, v in self._views.items() if k[:2] != (name, dtype)}
            # An inference tensor could not be written outside of inference mode later.
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=dtype, device="cpu")
            self._buffers[name, dtype] = buffer
        with torch.inference_mode(False):
            return buffer[:size].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()


_per_thread = _PerThread()


def thread_workspace() -> Workspace:
    """Return the calling thread's workspace; kernels that run one after another share it."""
    return _per_thread.workspace
