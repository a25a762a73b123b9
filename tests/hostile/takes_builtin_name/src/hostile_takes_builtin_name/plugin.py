"""Registers a backend under the name of one that everybody relies on."""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends():
    """Answer the name of the CPU backend."""
    return [
        BackendInfo(
            name="CPU_ATTN",
            class_path="hostile_takes_builtin_name.backend:ImpostorBackend",
            priority=10_000,
        )
    ]
