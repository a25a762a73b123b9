"""``attnmux verify``: run the conformance kit on installed backends and print what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from xml.etree import ElementTree

import typer

from attnmux.checks import check_in
from attnmux.cli.output import clean_stdout, print_json, user_errors
from attnmux.plugins import get_registry

if TYPE_CHECKING:
    from attnmux.testing.matrix import Matrix


def verify(
    backend: Annotated[
        str | None, typer.Option(help="Name of a backend; all of the device if not given.")
    ] = None,
    level: Annotated[
        str, typer.Option(help="quick (seconds) or full (every phase and declared size).")
    ] = "quick",
    scenario: Annotated[
        str | None, typer.Option(help="Run one scenario by its name, as a failure shows it.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every random number.")] = 0,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda:0.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML to this file.")] = None,
) -> None:
    """Check that backends do what they declare, and refuse what they do not.

    Each backend is asked what it supports. What it declares is run against exact
    answers in float64; what it declines must be refused with a reason.

    Exit code 1: something FAILED.
    """
    with user_errors():
        check_in("--level", level, ("quick", "full"))
        names = _chosen(backend, device)
        with clean_stdout():
            matrices = [_verified(name, device, seed, level, scenario) for name in names]
        if junit is not None:
            suites = ElementTree.Element("testsuites")
            suites.extend(matrix.to_junit() for matrix in matrices)
            ElementTree.ElementTree(suites).write(junit, encoding="utf-8", xml_declaration=True)
        if as_json:
            print_json([matrix.to_dict() for matrix in matrices])
        else:
            typer.echo("\n\n".join(str(matrix) for matrix in matrices))
        if any(matrix.failures for matrix in matrices):
            raise typer.Exit(1)


def _chosen(name: str | None, device: str) -> list[str]:
    """Return the names of the backends to verify.

    Raises:
        ValueError: none runs on the device.
    """
    if name is not None:
        return [name]
    kind = device.partition(":")[0]
    fitting = [
        entry.name
        for entry in get_registry().backends().values()
        if entry.usable and entry.info is not None and kind in entry.info.device_types
    ]
    if not fitting:
        raise ValueError(
            f"no installed backend runs on {device}; `attnmux list` shows what is installed, "
            "and `pip install attnmux-cpu` installs one for the CPU"
        )
    return fitting


def _verified(name: str, device: str, seed: int, level: str, scenario: str | None) -> Matrix:
    from attnmux.testing.matrix import Matrix
    from attnmux.testing.verification import installed_target, notes_on, outcome_of
    from attnmux.testing.verification import verify as verify_backend

    if scenario is None:
        return verify_backend(name, device=device, seed=seed, level=level)
    target = installed_target(name, device)
    origin = get_registry().backends()[name].origin.label
    found = (outcome_of(target, scenario, seed),)
    return Matrix(name, origin, device, seed, level, found, notes_on(target))
