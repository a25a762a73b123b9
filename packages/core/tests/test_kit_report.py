"""The report: a matrix, JSON and JUnit that agree, and a failure that can be repeated."""

from __future__ import annotations

import json

import pytest

from attnmux.testing import Matrix, Outcome, State, Target, outcome_of
from attnmux.testing.matrix import cell_text
from attnmux.testing.outcome import Failure
from attnmux.testing.sabotage import SABOTAGES

BROKEN = next(sabotage for sabotage in SABOTAGES if sabotage.name == "window_one_more")


def _outcome(state: State, topic: str = "sinks", column: str = "decode") -> Outcome:
    failure = None
    if state is State.FAILED:
        failure = Failure("X", f"{column}.{topic}", 0, "all is wrong")
    return Outcome(f"{column}.{topic}", (topic,), column, state, ("why",), failure)


def _matrix(*outcomes: Outcome) -> Matrix:
    return Matrix("X", "attnmux-x 1.2", "cpu", 3, "quick", outcomes, ("a note",))


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([], "-"),
        ([State.PROVED, State.PROVED], "proved"),
        ([State.PROVED, State.DECLINED], "proved 1/2"),
        ([State.DECLINED], "declined"),
        ([State.NOT_RUN], "not run here"),
        ([State.PROVED, State.FAILED, State.DECLINED], "FAILED 1/3"),
    ],
)
def test_cell_says_the_worst_state(states: list[State], text: str) -> None:
    assert cell_text([_outcome(state) for state in states]) == text


def test_matrix_as_text() -> None:
    text = str(
        _matrix(
            _outcome(State.PROVED),
            _outcome(State.DECLINED, "ALiBi", "mixed"),
            _outcome(State.FAILED, "sinks", "mixed"),
        )
    )
    lines = text.splitlines()
    assert lines[0] == "X (attnmux-x 1.2) on cpu, seed 3, level quick"
    assert lines[1] == "note: a note"
    assert lines[3].split() == ["decode", "mixed"]
    assert lines[4].split() == ["sinks", "proved", "FAILED", "1/1"]
    assert lines[5].split() == ["ALiBi", "-", "declined"]
    assert "FAILED mixed.sinks: all is wrong" in text
    assert "X does NOT conform: 1 proved, 1 declined, 1 FAILED, 0 not run here" in lines[-1]
    assert max(map(len, lines)) <= 100


def test_json_and_junit_tell_the_same() -> None:
    matrix = _matrix(*map(_outcome, State))
    data = json.loads(matrix.to_json())
    assert data["conforms"] is False
    assert data["counts"] == {state.value: 1 for state in State}
    assert [outcome["state"] for outcome in data["outcomes"]] == [s.value for s in State]
    assert data["outcomes"][2]["failure"]["what"] == "all is wrong"
    suite = matrix.to_junit()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "2")
    assert suite.find("testcase/failure").get("message") == "all is wrong"


def test_failure_is_a_bug_report() -> None:
    failure = outcome_of(Target(BROKEN.backend()), "decode.sliding_window", seed=5).failure
    text = str(failure)
    assert "looks as if the window counts one key too many" in text
    assert (
        "repeat: attnmux verify --backend TOY_WINDOW_ONE_MORE "
        "--scenario 'decode.sliding_window' --seed 5"
    ) in text
    assert "first: request " in text
    assert ", head " in text
    assert "expected [" in text
    assert "got [" in text
    assert "Scenario(name='decode.sliding_window'" in text
    again = outcome_of(Target(BROKEN.backend()), "decode.sliding_window", seed=5).failure
    assert str(again) == text
