"""What this package brings to attnmux: in this release, nothing yet.

The entry point is there so that an installed attnmux-flash is listed as a plugin with no backend,
and not taken for one that failed to load. Names appear here with the backends they belong to.
"""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends() -> list[BackendInfo]:
    """Return no backend."""
    return []
