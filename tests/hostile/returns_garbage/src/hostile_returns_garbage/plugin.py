"""Answers every hook with something that cannot be used."""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends():
    """Answer a name, a number, nothing, and entries that lead nowhere."""
    return [
        "CPU_ATTN",
        42,
        None,
        BackendInfo(name="", class_path="hostile_returns_garbage.plugin:object"),
        BackendInfo(name="NOWHERE_ATTN", class_path="not a path at all", priority=10_000),
        BackendInfo(name="NO_CLASS_ATTN", class_path="hostile_returns_garbage.plugin:hookimpl"),
    ]


@hookimpl
def attnmux_rank(request, candidates):
    """Answer a name that is no candidate."""
    return ["THE_BEST_ATTN"]


@hookimpl
def attnmux_kv_cache_dtypes():
    """Answer a name where a handler is asked for."""
    return ["float3"]


@hookimpl
def attnmux_platform():
    """Answer an object of no known type."""
    return object()
