"""What the tests across packages share: wheels of plugins, and processes that see them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The build hook of PEP 517, called as pip calls it; one process builds all of them.
BUILD = """
import os, sys
from hatchling.build import build_wheel
for source in sys.argv[2:]:
    os.chdir(source)
    print(os.path.join(sys.argv[1], build_wheel(sys.argv[1])))
"""


def clean_environment(**settings: str) -> dict[str, str]:
    """The environment of a child: no setting of attnmux but those given, one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATTNMUX_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **settings}


@pytest.fixture(scope="session")
def unpack_plugins(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Path]]:
    """Build plugins and unpack each wheel into a folder of its own.

    A pure wheel unpacked on `sys.path` is an installed distribution, metadata and all: what
    `pip install --target` makes of it, without a second and a half of pip for each.
    """

    def unpack(*sources: Path) -> dict[str, Path]:
        wheels = tmp_path_factory.mktemp("wheels")
        command = [sys.executable, "-c", BUILD, str(wheels), *map(str, sources)]
        built = subprocess.run(command, check=False, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        folders = {}
        for source, wheel in zip(sources, built.stdout.splitlines(), strict=True):
            folders[source.name] = tmp_path_factory.mktemp(source.name.replace("-", "_"))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folders[source.name])
        return folders

    return unpack


@pytest.fixture(scope="session")
def run_with_plugins() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in a fresh process that has these folders on its path beside what is installed."""

    def run(
        *arguments: str, plugins: list[Path], timeout: float = 120, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        environment = clean_environment(**settings)
        environment["PYTHONPATH"] = os.pathsep.join(map(str, plugins))
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=timeout, env=environment
        )

    return run
