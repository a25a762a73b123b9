"""What the commands share: a clean stdout, and errors a user can act on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def clean_stdout() -> Iterator[None]:
    """While open, whatever writes to file descriptor 1 writes to stderr instead.

    Plugins may print from C, from a process of their own or from a thread: nothing of that may get
    between the lines of ``--json``.
    """
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:
        # There is no such descriptor (stdout closed): nothing to keep clean.
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a ``ValueError`` as one sentence on stderr and exit with code 2: no traceback."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def print_json(data: object) -> None:
    """Print ``data`` as JSON to stdout."""
    typer.echo(json.dumps(data, indent=2))
