"""The check of built archives can fail: each fault that it is for is made and must be told."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parent.parent / ".ci" / "check_archives.py"
MODULES = {
    "attnmux": ["testing/__init__.py", "testing/pytest_plugin.py"],
    "attnmux_cpu": ["plugin.py"],
    "attnmux_flash": ["plugin.py"],
    "attnmux_mla": ["plugin.py"],
    "attnmux_transformers": ["demo.py"],
}


def make_archives(folder: Path, left_out: str = "", added: str = "") -> None:
    """Write what a complete build leaves, less and more one file of each archive that has it."""
    for name, modules in MODULES.items():
        files = {f"{name}/{module}" for module in ["__init__.py", "py.typed", *modules]}
        wheel = files | {f"{name}-1.0.dist-info/licenses/LICENSE", *filter(None, [added])}
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            for path in sorted(wheel - {left_out}):
                archive.writestr(path, "")
        source = {f"src/{path}" for path in files} | {"tests/test_it.py", *filter(None, [added])}
        source |= {"pyproject.toml", "README.md", "LICENSE"}
        with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
            for path in sorted(source - {left_out}):
                archive.addfile(tarfile.TarInfo(f"{name}-1.0/{path}"), io.BytesIO())


def check(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(CHECK), str(folder)], check=False, capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_complete_archives_pass(tmp_path: Path) -> None:
    make_archives(tmp_path)
    code, told = check(tmp_path)
    assert (code, told.count(": complete")) == (0, 10)


@pytest.mark.parametrize(
    ("left_out", "complaint"),
    [
        ("attnmux_cpu/py.typed", "attnmux_cpu-1.0-py3-none-any.whl: attnmux_cpu/py.typed"),
        ("attnmux/testing/pytest_plugin.py", "attnmux/testing/pytest_plugin.py is missing"),
        ("attnmux_mla-1.0.dist-info/licenses/LICENSE", "licenses/LICENSE is missing"),
        ("LICENSE", "attnmux_flash-1.0.tar.gz: LICENSE is missing"),
        ("tests/test_it.py", "the package's tests are missing"),
    ],
)
def test_missing_file_is_told(tmp_path: Path, left_out: str, complaint: str) -> None:
    make_archives(tmp_path, left_out=left_out)
    code, told = check(tmp_path)
    assert code == 1
    assert complaint in told


@pytest.mark.parametrize(
    ("added", "complaint"),
    [
        ("tests/test_it.py", "would land outside attnmux_cpu/"),
        ("src/attnmux/__pycache__/x.pyc", "was made by a tool"),
        (".nox/lint/pyvenv.cfg", "was made by a tool"),
    ],
)
def test_file_that_has_no_place_is_told(tmp_path: Path, added: str, complaint: str) -> None:
    make_archives(tmp_path, added=added)
    code, told = check(tmp_path)
    assert code == 1
    assert complaint in told


def test_distribution_that_was_not_built_is_told(tmp_path: Path) -> None:
    make_archives(tmp_path)
    (tmp_path / "attnmux_mla-1.0.tar.gz").unlink()
    code, told = check(tmp_path)
    assert code == 1
    assert "attnmux_mla: there must be one wheel and one sdist" in told
