"""``attnmux verify``: exit codes, JSON, JUnit, and errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from attnmux.cli import main
from attnmux.plugins import BackendInfo, get_registry
from attnmux.testing.sabotage import SABOTAGES, ToyBackend

BROKEN = next(sabotage for sabotage in SABOTAGES if sabotage.name == "sink_dropped").backend()


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    registry = get_registry()
    for name, backend in (("TOY", ToyBackend), ("BROKEN", BROKEN)):
        info = BackendInfo(name=name, class_path="attnmux.testing.sabotage.toy:ToyBackend")
        registry.register(info, backend)
    yield
    registry.unregister("TOY")
    registry.unregister("BROKEN")


def _verify(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify", *arguments])


def test_right_backend_conforms_with_exit_code_0() -> None:
    result = _verify("--backend", "TOY", "--scenario", "decode.sinks")
    assert result.exit_code == 0, result.output
    assert "TOY conforms: 1 proved" in result.stdout


def test_broken_backend_fails_with_exit_code_1_and_says_how() -> None:
    result = _verify("--backend", "BROKEN", "--scenario", "decode.sinks", "--seed", "2")
    assert result.exit_code == 1
    assert "looks as if the sink is dropped" in result.stdout
    assert "attnmux verify --backend BROKEN --scenario 'decode.sinks' --seed 2" in result.stdout


def test_json_is_one_entry_for_each_backend() -> None:
    result = _verify("--backend", "BROKEN", "--scenario", "decode.sinks", "--json")
    assert result.exit_code == 1
    (data,) = json.loads(result.stdout)
    assert (data["backend"], data["conforms"]) == ("BROKEN", False)
    assert data["matrix"] == {"attention sinks": {"decode": "FAILED 1/1"}}


def test_junit_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.xml"
    _verify("--backend", "TOY", "--scenario", "decode.sinks", "--junit", str(path))
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    assert suite.get("tests") == "1"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--backend", "TOI"), "did you mean TOY?"),
        (("--backend", "TOY", "--scenario", "decode.sink"), "decode.sinks"),
        (("--backend", "TOY", "--level", "slow"), "--level: got 'slow'; allowed: quick | full"),
        (("--device", "meta"), "no installed backend runs on meta"),
    ],
)
def test_bad_argument_is_one_sentence_with_exit_code_2(
    arguments: tuple[str, ...], says: str
) -> None:
    result = _verify(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
