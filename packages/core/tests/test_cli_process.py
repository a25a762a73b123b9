"""Commands and imports in fresh processes, with plugins installed as distributions are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PLUGIN = """
from attnmux.plugins import BackendInfo, hookimpl
@hookimpl
def attnmux_backends():
    return [BackendInfo("{name}", "{module}_backend:Backend")]
"""


class Site:
    """A folder of installed distributions, put on the path of child processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, plugin: str, backend: str = "") -> None:
        module = f"made_{name}"
        (self.folder / f"{module}.py").write_text(plugin)
        (self.folder / f"{module}_backend.py").write_text(backend)
        info = self.folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[attnmux.backends]\n{name} = {module}\n")

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(self.folder), **variables}
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=environ, timeout=120
        )

    def attnmux(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("-c", "from attnmux.cli import main; main()", *arguments, **variables)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_plugin_that_prints_in_every_way_leaves_the_json_clean(site: Site) -> None:
    loud = "import os, sys\nprint('python')\nos.write(1, b'descriptor')\nos.system('echo child')\n"
    site.install("loud", loud + PLUGIN.format(name="LOUD", module="made_loud"))
    done = site.attnmux("list", "--json")
    assert done.returncode == 0
    data = json.loads(done.stdout)
    record = next(row for row in data["plugins"] if row["name"] == "loud")
    assert record["output"] == "python\n"
    assert "descriptor" in done.stderr
    assert "child" in done.stderr


def test_list_does_not_wait_for_a_slow_backend_module_or_for_torch(site: Site) -> None:
    site.install(
        "slow", PLUGIN.format(name="SLOW", module="made_slow"), "import time\ntime.sleep(60)\n"
    )
    started = time.monotonic()
    done = site.attnmux("list", "--json")
    assert time.monotonic() - started < 30
    assert "SLOW" in {row["name"] for row in json.loads(done.stdout)["backends"]}
    # The module list of the same command: torch is not among them.
    code = (
        "import sys; from attnmux.cli import main; main(['list'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    assert site.run("-c", code).stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "variables",
    [{"ATTNMUX_DISABLE": "traced"}, {"ATTNMUX_PLUGINS": "cpu"}, {"ATTNMUX_PLUGINS": ""}],
    ids=["disabled", "not among those allowed", "none allowed"],
)
def test_a_plugin_left_out_is_not_imported(site: Site, variables: dict[str, str]) -> None:
    trace = "import sys\nsys.__stderr__.write('IMPORTED\\n')\n"
    site.install("traced", trace + PLUGIN.format(name="TRACED", module="made_traced"))
    assert "IMPORTED" in site.attnmux("list").stderr
    done = site.attnmux("list", "--json", **variables)
    assert "IMPORTED" not in done.stderr
    row = next(r for r in json.loads(done.stdout)["backends"] if r["name"] == "traced")
    assert row["state"] == "disabled"


def test_every_hostile_plugin_at_once_leaves_the_good_one(site: Site) -> None:
    hostile = {
        "raises": "1 / 0",
        "exits": "import sys\nsys.exit(1)",
        "hangs": "import time\ntime.sleep(600)",
        "garbage": "from attnmux.plugins import hookimpl\n@hookimpl\ndef attnmux_backends():\n"
        "    return {'not': 'a list'}\n",
        "misses": "import no_such_library",
    }
    for name, source in hostile.items():
        site.install(name, source)
    site.install("fine", PLUGIN.format(name="FINE", module="made_fine"))
    done = site.attnmux("list", "--json", ATTNMUX_PLUGIN_TIMEOUT="1")
    assert done.returncode == 0
    rows = {row["name"]: row for row in json.loads(done.stdout)["backends"]}
    assert rows["FINE"]["state"] == "ready"
    kinds = {name: rows[name]["failure"]["kind"] for name in hostile}
    assert kinds == {
        "raises": "raised",
        "exits": "exited",
        "hangs": "timeout",
        "garbage": "bad-answer",
        "misses": "missing-library",
    }
    assert all(rows[name]["failure"]["way_out"] for name in hostile)


def test_an_unknown_variable_warns_in_a_fresh_process(site: Site) -> None:
    done = site.attnmux("list", ATTNMUX_BAKEND="x")
    assert "did you mean ATTNMUX_BACKEND?" in done.stderr


def test_a_misspelt_variable_is_a_sentence_without_a_line_of_source(site: Site) -> None:
    done = site.attnmux("list", "--json", ATTNMUX_BACKENDS="x", ATTNMUX_PLUGINS="")
    assert done.returncode == 0
    assert done.stderr == (
        "warning: ATTNMUX_BACKENDS is set, but attnmux reads no such variable; "
        "did you mean ATTNMUX_BACKEND?\n"
    )
