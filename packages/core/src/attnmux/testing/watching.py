"""Watch everything that a backend is handed: most of it must not change."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch

from attnmux.abc.metadata import CommonAttentionMetadata
from attnmux.testing.case import Case
from attnmux.testing.outcome import NonConformanceError
from attnmux.testing.poison import Watch

_CACHED_FIELDS = frozenset(
    {
        "_seq_lens_cpu",
        "_num_computed_tokens_cpu",
        "_num_computed_tokens_cache",
        "_token_to_req_indices_cache",
    }
)
"""What the metadata itself keeps when it is asked for it."""


@dataclass(frozen=True)
class MetadataWatch:
    """The metadata as it was: its plain values and the bytes of its tensors."""

    metadata: CommonAttentionMetadata
    plain: dict[str, Any]
    tensors: tuple[Watch, ...]

    @classmethod
    def of(cls, metadata: CommonAttentionMetadata) -> MetadataWatch:
        """Start watching."""
        plain: dict[str, Any] = {}
        tensors = []
        for field in fields(metadata):
            value = getattr(metadata, field.name)
            if field.name in _CACHED_FIELDS:
                continue
            if isinstance(value, torch.Tensor):
                tensors.append(Watch.of(f"metadata.{field.name}", value))
                plain[field.name] = id(value)
            elif hasattr(value, "tobytes"):
                plain[field.name] = value.tobytes()
            else:
                plain[field.name] = copy.deepcopy(value)
        return cls(metadata, plain, tuple(tensors))

    def complaint(self) -> str | None:
        """Return what changed, None when nothing did."""
        for watch in self.tensors:
            if found := watch.complaint():
                return found
        for name, before in self.plain.items():
            value = getattr(self.metadata, name)
            now = id(value) if isinstance(value, torch.Tensor) else value
            now = now.tobytes() if hasattr(now, "tobytes") else now
            if now != before:
                return f"metadata.{name} was replaced: it was {before!r}, it is {now!r}"
        return None


@dataclass(frozen=True)
class InputWatch:
    """Inputs, metadata and scales of a case."""

    watches: tuple[Watch | MetadataWatch, ...]

    @classmethod
    def of(cls, case: Case) -> InputWatch:
        """Start watching everything that `case` hands to a backend, but for cache and output."""
        named = {
            "query": case.query,
            "key": case.key,
            "value": case.value,
            "sinks": case.sinks,
            "layer._k_scale": case.layer._k_scale,
            "layer._v_scale": case.layer._v_scale,
        }
        watches = [Watch.of(name, x) for name, x in named.items() if x is not None]
        return cls((*watches, MetadataWatch.of(case.metadata)))

    def check(self, after: str) -> None:
        """Raise when something changed.

        Raises:
            NonConformanceError: with what changed first.
        """
        for watch in self.watches:
            if found := watch.complaint():
                raise NonConformanceError(f"{after} changed its input {found}")


def watch_output(case: Case, output: torch.Tensor) -> Watch:
    """Watch all memory of an output but the rows that belong to it."""
    writable = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    writable[: case.num_actual_tokens] = True
    return Watch.of("output", output, writable)


def watch_cache(case: Case, *, may_write: bool) -> Watch:
    """Watch the whole cache buffer, but for the new rows where they may be written."""
    return Watch.of("kv_cache", case.kv_cache, case.writable_rows() if may_write else None)
