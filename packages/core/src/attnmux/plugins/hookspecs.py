"""Everything a plugin can do: four hooks, one sentence each.

A plugin is a module named by an entry point of the group ``attnmux.backends``. It marks the hooks
it implements with :data:`hookimpl` and may leave out arguments it does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from attnmux.kv_cache import CacheDTypeHandler
    from attnmux.plugins.info import BackendInfo, PlatformInfo
    from attnmux.request import AttentionRequest

PROJECT = "attnmux"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def attnmux_backends() -> list[BackendInfo]:  # type: ignore[empty-body]
    """Return the backends this plugin brings, any number of them; nothing of them is imported."""


@hookspec(firstresult=True)
def attnmux_rank(request: AttentionRequest, candidates: Sequence[BackendInfo]) -> list[str] | None:
    """Return names of the eligible candidates in another order, best first, or None to stay out."""


@hookspec
def attnmux_kv_cache_dtypes() -> list[CacheDTypeHandler]:  # type: ignore[empty-body]
    """Return handlers of KV cache dtypes that the core does not know."""


@hookspec(firstresult=True)
def attnmux_platform() -> PlatformInfo | None:
    """Return the device in hand when it is one that the core does not know, or None."""
