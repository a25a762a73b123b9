"""Guarded calls: whatever the code does, a value comes back."""

from __future__ import annotations

import contextvars
import sys
import threading

import pytest

from attnmux.plugins.guard import call_guarded, in_guarded_call

VALUE = contextvars.ContextVar("value", default=0)


def test_a_value_comes_back_and_the_caller_is_not_guarded() -> None:
    outcome = call_guarded(in_guarded_call, 5)
    assert outcome.ok
    assert outcome.value is True
    assert in_guarded_call() is False


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(2), GeneratorExit(), MemoryError()])
def test_whatever_is_raised_is_an_outcome(error: BaseException) -> None:
    def body() -> None:
        raise error

    outcome = call_guarded(body, 5)
    assert not outcome.ok
    assert outcome.error is error


def test_a_call_inside_a_guarded_call_stays_in_its_thread() -> None:
    def outer() -> tuple[int, int]:
        return threading.get_ident(), call_guarded(threading.get_ident, 5).value

    first, second = call_guarded(outer, 5).value
    assert first == second != threading.get_ident()


def test_context_variables_of_the_caller_are_seen() -> None:
    token = VALUE.set(7)
    try:
        assert call_guarded(VALUE.get, 5).value == 7
    finally:
        VALUE.reset(token)


def test_output_is_captured_and_a_flood_is_cut(capsys) -> None:
    def flood() -> None:
        sys.stdout.writelines(["x"] * 100_000)
        sys.stdout.flush()
        print("after", sys.stdout.isatty())

    outcome = call_guarded(flood, 5)
    assert outcome.ok
    assert 4_000 <= len(outcome.output) < 5_000
    assert outcome.output.endswith("...")
    assert capsys.readouterr().out == ""
