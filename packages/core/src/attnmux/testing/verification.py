"""Verify one backend: every scenario and behaviour of the kit, or one of them by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator

import torch

from attnmux.abc.backend import AttentionBackend
from attnmux.capability import untaken_arguments
from attnmux.checks import bad_argument, check_in
from attnmux.options import resolve_options
from attnmux.plugins import get_registry
from attnmux.testing.behaviours import behaviours
from attnmux.testing.behaviours.behaviour import OTHER
from attnmux.testing.declared import Declared
from attnmux.testing.generate import LEVELS, recipes
from attnmux.testing.kit import Target, guarded_outcome, run_recipe
from attnmux.testing.matrix import Matrix
from attnmux.testing.mla.kit import mla_names, mla_outcomes
from attnmux.testing.outcome import NonConformanceError, Outcome, State

DECLARATIONS = "declarations"
"""What the backend says of itself: asked first, since all else follows from it."""

_FLAGS = tuple(
    name
    for name in dir(AttentionBackend)
    if name.startswith("supports_")
    and not inspect.signature(getattr(AttentionBackend, name)).parameters
)
"""Questions of the contract that are answered with yes or no."""


def verify(
    backend: str | type[AttentionBackend],
    *,
    device: str = "cpu",
    seed: int = 0,
    level: str = "quick",
) -> Matrix:
    """Verify a backend and return the report; `attnmux verify` does this.

    Args:
        backend: name of an installed backend, or a class.
        device: where it runs.
        seed: of every draw.
        level: "quick" or "full".

    Raises:
        ValueError: no such backend, or no such level.
    """
    _check_device(device)
    origin = ""
    if isinstance(backend, str):
        target = installed_target(backend, device)
        origin = get_registry().backends()[backend].origin.label
    else:
        target = Target(backend, device)
    found = tuple(outcomes(target, seed, level))
    return Matrix(target.label, origin, device, seed, level, found, notes_on(target))


def installed_target(name: str, device: str = "cpu") -> Target:
    """Return an installed backend, loaded, with the options that are set for it.

    Raises:
        ValueError: no such backend, or it cannot be used; the text says what to do.
    """
    registry = get_registry()
    known = registry.backends()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise bad_argument("backend", repr(name) + hint, " | ".join(known) or "none is installed")
    entry = known[name]
    if entry.disabled_by is not None:
        raise ValueError(f"{name} is left out by {entry.disabled_by}")
    failure = entry.failure
    if failure is None:
        loaded = registry.load(name)
        if loaded.cls is not None:
            return Target(loaded.cls, device, resolve_options(name), name)
        failure = loaded.failure
    assert failure is not None, "a backend is imported, or there is a failure"
    raise ValueError(f"{name}: {failure.message}; {failure.way_out}")


def notes_on(target: Target) -> tuple[str, ...]:
    """Return what a reader of the report should know beside the outcomes."""
    untaken = untaken_arguments(target.backend)
    if not untaken:
        return ()
    return (f"its validate_configuration does not take: {', '.join(untaken)}",)


def outcomes(target: Target, seed: int = 0, level: str = "quick") -> Iterator[Outcome]:
    """Yield the outcome of everything that the kit knows for this kind of backend.

    Args:
        target: what is verified.
        seed: of every draw.
        level: "quick" (seconds) or "full" (every phase and every declared size; minutes).

    Raises:
        ValueError: no such level.
    """
    check_in("level", level, LEVELS)
    answers = outcome_of(target, DECLARATIONS, seed)
    if answers.state is State.PROVED:
        yield from _outcomes(target, seed, level)
    yield answers


def _outcomes(target: Target, seed: int, level: str) -> Iterator[Outcome]:
    if target.backend.is_mla():
        yield from mla_outcomes(target, seed)
        return
    declared = Declared.by(target.backend)
    for recipe in recipes(declared, seed, level):
        yield run_recipe(target, recipe)
    for behaviour in behaviours(declared):
        yield behaviour.run(target, declared, seed)


def scenario_names(target: Target, seed: int = 0, level: str = "quick") -> tuple[str, ...]:
    """Return the names of all scenarios and behaviours for this kind of backend."""
    if outcome_of(target, DECLARATIONS, seed).state is not State.PROVED:
        return (DECLARATIONS,)
    if target.backend.is_mla():
        return (DECLARATIONS, *mla_names(target, seed))
    declared = Declared.by(target.backend)
    drawn = [recipe.name for recipe in recipes(declared, seed, level)]
    return (DECLARATIONS, *drawn, *(behaviour.name for behaviour in behaviours(declared)))


def outcome_of(target: Target, name: str, seed: int = 0) -> Outcome:
    """Run one scenario or behaviour.

    Raises:
        ValueError: no such name; the closest one is suggested.
    """
    if name == DECLARATIONS:
        return guarded_outcome(
            target, name, seed, (DECLARATIONS,), OTHER, lambda: _check_declarations(target)
        )
    if target.backend.is_mla():
        for outcome in mla_outcomes(target, seed, only=name):
            return outcome
        raise _unknown(name, mla_names(target, seed))
    declared = Declared.by(target.backend)
    for recipe in recipes(declared, seed, "full"):
        if recipe.name == name:
            return run_recipe(target, recipe)
    for behaviour in behaviours(declared):
        if behaviour.name == name:
            return behaviour.run(target, declared, seed)
    raise _unknown(name, scenario_names(target, seed, "full"))


def _check_declarations(target: Target) -> tuple[State, tuple[str, ...]]:
    """Ask the backend every question once; without answers there is nothing to run."""
    if target.backend.is_ssm():
        return State.NOT_RUN, ("the kit has no reference for state-space layers",)
    if target.backend.is_mla():
        return State.PROVED, ()
    declared = Declared.by(target.backend)
    for what in ("dtypes", "head_sizes", "block_sizes", "layouts"):
        if not getattr(declared, what):
            return State.NOT_RUN, (f"the backend declares no {what} that the kit can judge",)
    for flag in _FLAGS:
        answer = getattr(target.backend, flag)()
        if not isinstance(answer, bool):
            raise NonConformanceError(f"{flag} answers {answer!r}; right: True or False")
    return State.PROVED, ()


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise bad_argument("device", device, f"one that torch can use here ({reason})") from error


def _unknown(name: str, known: tuple[str, ...]) -> ValueError:
    close = difflib.get_close_matches(name, known, n=3) or known[:3]
    return bad_argument("scenario", repr(name), f"one of {len(known)}, such as {', '.join(close)}")
