from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import attnmux_flash
from attnmux.plugins import Registry
from attnmux_flash import plugin


def own_entry_points() -> list:
    return list(entry_points(group="attnmux.backends", name="flash"))


def test_plugin_returns_no_backend() -> None:
    assert plugin.attnmux_backends() == []


def test_entry_point_names_the_plugin_module() -> None:
    (entry,) = own_entry_points()
    assert entry.load() is plugin
    assert (entry.dist.name, entry.dist.version) == ("attnmux-flash", attnmux_flash.__version__)


def test_core_lists_the_plugin_as_installed_and_well_with_no_backends() -> None:
    registry = Registry(own_entry_points)
    (record,) = registry.plugins()
    assert record.origin.distribution == "attnmux-flash"
    assert (record.infos, record.failures) == ((), ())
    assert registry.entries() == ()


def test_importing_the_plugin_leaves_torch_and_triton_out() -> None:
    code = "import sys, attnmux_flash.plugin; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
