"""Registers itself, and its backends, more than once."""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends():
    """Answer one backend twice, and one name for two classes."""
    twice = BackendInfo(
        name="TWICE_ATTN",
        class_path="hostile_registers_twice.backend:TwiceBackend",
        priority=-100,
    )
    return [
        twice,
        twice,
        BackendInfo(name="TORN_ATTN", class_path="hostile_registers_twice.backend:TwiceBackend"),
        BackendInfo(name="TORN_ATTN", class_path="hostile_registers_twice.backend:OtherBackend"),
    ]
