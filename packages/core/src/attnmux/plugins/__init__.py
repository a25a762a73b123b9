"""Plugins: what one can do, how they are found, and what is kept of those that fail.

A plugin is a light module named by an entry point of the group ``attnmux.backends``::

    from attnmux.plugins import BackendInfo, hookimpl

    @hookimpl
    def attnmux_backends():
        return [BackendInfo("HELLO", "hello.backend:HelloBackend")]

This package imports neither torch nor any plugin.
"""

from __future__ import annotations

from attnmux.plugins.catalogue import BackendEntry
from attnmux.plugins.discovery import GROUP, PluginRecord
from attnmux.plugins.failures import FailureKind, Origin, PluginFailure
from attnmux.plugins.hookspecs import hookimpl, hookspec
from attnmux.plugins.info import BackendInfo, PlatformInfo
from attnmux.plugins.loading import LoadedBackend
from attnmux.plugins.registry import Registry, get_registry

__all__ = [
    "GROUP",
    "BackendEntry",
    "BackendInfo",
    "FailureKind",
    "LoadedBackend",
    "Origin",
    "PlatformInfo",
    "PluginFailure",
    "PluginRecord",
    "Registry",
    "get_registry",
    "hookimpl",
    "hookspec",
]
