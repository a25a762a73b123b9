"""The one-line class: all scenarios as tests, strict exceptions, and nothing can be left out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CLASS = """
from attnmux.testing import BackendConformance
from attnmux.testing.sabotage import SABOTAGES, ToyBackend

def broken(name):
    return next(s for s in SABOTAGES if s.name == name).backend()

class TestToy(BackendConformance):
    {body}
"""


def _run(folder: Path, body: str, *options: str) -> tuple[int, str]:
    """Run a conformance class in a process of its own, where the entry point is found."""
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ").strip()
    (folder / "test_it.py").write_text(CLASS.format(body=body))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_one_line_runs_the_scenarios_as_tests(tmp_path: Path) -> None:
    code, text = _run(tmp_path, "backend = ToyBackend", "-vv", "-k", "decode.sinks or whole")
    assert code == 0, text
    assert "TestToy::test_conforms[decode.sinks] PASSED" in text
    assert "TestToy::test_standard_tests_are_whole PASSED" in text


def test_failure_is_shown_as_the_report(tmp_path: Path) -> None:
    code, text = _run(tmp_path, "backend = broken('sink_dropped')", "-k", "decode.sinks")
    assert code == 1
    assert "looks as if the sink is dropped" in text
    assert "repeat: attnmux verify" in text


def test_known_failure_is_expected_and_strict(tmp_path: Path) -> None:
    known = """
        backend = broken('sink_dropped')
        known_failures = {'decode.sinks': 'issue 1', 'decode.plain': 'issue 2'}
    """
    tests = [f"test_it.py::TestToy::test_conforms[decode.{name}]" for name in ("sinks", "plain")]
    code, text = _run(tmp_path, known, *tests)
    assert code == 1
    assert "1 failed, 1 xfailed" in text
    assert "decode.plain is proved, but known_failures says that it fails (issue 2)" in text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("known_failures = {'decode.sink': 'a link'}", "there is no scenario 'decode.sink'"),
        ("known_failures = {'decode.sinks': ' '}", "'decode.sinks' has no reason"),
        ("test_conforms = None", "TestToy.test_conforms: standard tests are neither removed"),
        ("test_standard_tests_are_whole = None", "neither removed nor overridden"),
        ("backend = ''", "TestToy: set `backend` to the name of a backend"),
    ],
)
def test_nothing_can_be_left_out(tmp_path: Path, body: str, says: str) -> None:
    code, text = _run(tmp_path, f"backend = ToyBackend\n{body}", "-k", "known or whole")
    assert code != 0
    assert says in text


def test_unknown_backend_is_an_error_that_says_what_is_installed(tmp_path: Path) -> None:
    code, text = _run(tmp_path, "backend = 'NO_SUCH'")
    assert code != 0
    assert "backend: got 'NO_SUCH'" in text


def test_plugin_loads_neither_torch_nor_hypothesis() -> None:
    code = (
        "import sys, attnmux.testing.pytest_plugin\n"
        "heavy = {'torch', 'hypothesis', 'numpy', 'typer', 'pluggy._tracing.torch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
