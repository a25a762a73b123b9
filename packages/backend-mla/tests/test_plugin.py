from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import attnmux_mla
from attnmux.plugins import Registry
from attnmux_mla import plugin


def own_entry_points() -> list:
    return list(entry_points(group="attnmux.backends", name="mla"))


def test_plugin_returns_no_backend() -> None:
    assert plugin.attnmux_backends() == []


def test_entry_point_names_the_plugin_module() -> None:
    (entry,) = own_entry_points()
    assert entry.load() is plugin
    assert (entry.dist.name, entry.dist.version) == ("attnmux-mla", attnmux_mla.__version__)


def test_core_lists_the_plugin_as_installed_and_well_with_no_backends() -> None:
    registry = Registry(own_entry_points)
    (record,) = registry.plugins()
    assert record.origin.distribution == "attnmux-mla"
    assert (record.infos, record.failures) == ((), ())
    assert registry.entries() == ()


def test_importing_the_plugin_leaves_torch_and_triton_out() -> None:
    code = "import sys, attnmux_mla.plugin; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
