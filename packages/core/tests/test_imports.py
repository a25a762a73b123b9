"""Promises about what an import pulls in, tried in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["triton", "typer", "rich", "pluggy", "torch", "numpy", "importlib_metadata"]


def modules_after(code: str) -> set[str]:
    """Names of the modules that are there after ``code`` has run in a fresh process."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_imports_nothing_heavy_and_no_plugin() -> None:
    loaded = modules_after("import attnmux")
    assert not loaded.intersection(HEAVY)
    assert {name for name in loaded if name.startswith("attnmux")} == {
        "attnmux",
        "attnmux._contract",
        "attnmux._version",
    }


def test_the_contract_modules_add_no_triton_no_typer_and_no_plugin_to_torch() -> None:
    torch_alone = modules_after("import torch")
    code = "import attnmux, attnmux.backend, attnmux.selection, attnmux.batch, attnmux.create"
    added = modules_after(code) - torch_alone
    tops = {name.partition(".")[0] for name in added}
    assert not tops.intersection(
        {"triton", "typer", "rich", "click", "attnmux_cpu", "attnmux_flash"}
    )


def test_plugins_are_discovered_without_torch_or_a_backend_module() -> None:
    code = "from attnmux.plugins import get_registry\nprint(get_registry().entries())"
    loaded = modules_after(code)
    assert "torch" not in loaded
    assert not {n for n in loaded if n.startswith("attnmux_") and n.endswith((".backend", ".impl"))}


@pytest.mark.parametrize(
    "name",
    [
        "AttentionRequest",
        "SelectionError",
        "SelectionReport",
        "create_builder",
        "create_impl",
        "explain",
        "list_backends",
        "resolve_options",
        "select_backend",
        "use_backend",
    ],
)
def test_each_public_name_is_there(name: str) -> None:
    import attnmux

    assert getattr(attnmux, name).__name__ == name
    assert name in dir(attnmux)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import attnmux

    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        attnmux.no_such_name  # noqa: B018
