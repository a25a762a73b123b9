"""A workshop for plugins: small modules written to a temporary folder, named by entry points.

Every test sees an environment without ``ATTNMUX_*`` variables and a fresh memory of warnings.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnmux import settings
from attnmux.plugins import Registry

_numbers = itertools.count()

BACKEND_SOURCE = """
import torch
from attnmux.abc.attention_type import AttentionType
from attnmux.abc.backend import AttentionBackend, MultipleOf
from attnmux.abc.builder import AttentionMetadataBuilder
from attnmux.abc.impl import AttentionImpl
from attnmux.kv_cache import KVCacheLayout


class Impl(AttentionImpl):
    def __init__(self, *args, **kwargs): ...
    def forward(self, *args, **kwargs): ...


class Builder(AttentionMetadataBuilder):
    def build(self, *args, **kwargs): ...


class Base(AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    get_impl_cls = staticmethod(lambda: Impl)
    get_builder_cls = staticmethod(lambda: Builder)
"""


@dataclass(frozen=True)
class FakeEntryPoint:
    """What discovery reads of an entry point."""

    name: str
    value: str
    dist: Any

    def load(self) -> Any:
        module, _, attribute = self.value.partition(":")
        loaded = importlib.import_module(module)
        return getattr(loaded, attribute) if attribute else loaded


class Workshop:
    """Writes plugins and backends as real modules and puts them into registries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, source: str, stem: str = "made") -> str:
        """Write a module; the answer is its unique name."""
        name = f"{stem}_{next(_numbers)}"
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return name

    def point(
        self, name: str, source: str, dist: str | None = None, version: str = "1.0"
    ) -> FakeEntryPoint:
        """A plugin whose module has this source; no distribution name makes one of its own."""
        return self.named_point(name, self.module(source, f"plug_{name}"), dist, version)

    def named_point(
        self, name: str, value: str, dist: str | None = None, version: str = "1.0"
    ) -> FakeEntryPoint:
        """An entry point with any value."""
        metadata = {"Name": dist or f"attnmux-{name}"}
        return FakeEntryPoint(name, value, SimpleNamespace(metadata=metadata, version=version))

    def backends(self, **bodies: str) -> str:
        """A module with one backend class for each name; the answer is the module's name."""
        parts = [BACKEND_SOURCE]
        for name, body in bodies.items():
            inside = textwrap.indent(textwrap.dedent(body).strip() or "pass", "    ")
            parts.append(
                f"class {name}(Base):\n    get_name = staticmethod(lambda: {name!r})\n{inside}\n"
            )
        return self.module("\n".join(parts), "backends")

    def plugin(
        self,
        name: str,
        backends: dict[str, str],
        dist: str | None = None,
        info: str = "",
        hooks: str = "",
    ) -> FakeEntryPoint:
        """A plugin that brings these backends; ``info`` is more arguments of each BackendInfo."""
        module = self.backends(**backends)
        infos = ", ".join(f"BackendInfo({n!r}, '{module}:{n}', {info})" for n in backends)
        source = (
            "from attnmux.plugins import BackendInfo, PlatformInfo, hookimpl\n"
            f"@hookimpl\ndef attnmux_backends():\n    return [{infos}]\n"
        ) + textwrap.dedent(hooks)
        return self.point(name, source, dist)

    def registry(self, *points: FakeEntryPoint) -> Registry:
        """A registry that knows these plugins only."""
        return Registry(lambda: points)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Workshop(tmp_path)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(settings.PREFIX):
            monkeypatch.delenv(name)
    settings.forget_warnings()
