"""The command ``attnmux``. Each command lives in a file of its own and is imported when it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from attnmux import CONTRACT_VERSION, __version__
from attnmux._contract import contract_text

COMMANDS = {
    "list": ("attnmux.cli.listing", "list_plugins"),
    "explain": ("attnmux.cli.explain", "explain"),
    "verify": ("attnmux.cli.verify", "verify"),
    "new-backend": ("attnmux.cli.new_backend", "new_backend"),
    "doctor": ("attnmux.cli.doctor", "doctor"),
}
"""Name of each command, and where its function is."""


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table of commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command; None when there is no such name."""
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name]
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        try:
            body = getattr(import_module(module), function)
        except ImportError as error:
            # A library that one command needs may be missing; the others still work.
            body = _unavailable(cmd_name, error)
        alone.command(name=cmd_name)(body)
        command = typer.main.get_command(alone)
        command.name = cmd_name
        return command


def _unavailable(name: str, error: ImportError) -> Callable[[], None]:
    text = f"attnmux {name} cannot run here: {error}"

    def body() -> None:
        typer.echo(f"error: {text}", err=True)
        raise typer.Exit(2)

    body.__doc__ = f"(not available here: {error})"
    return body


main = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnmux {__version__}, contract {contract_text(CONTRACT_VERSION)}")
        raise typer.Exit


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings as sentences: where in attnmux they arose helps nobody at a prompt."""
    kept = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = kept


@main.callback()
def _main(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print versions and exit."
    ),
) -> None:
    """Attention backends: what is installed, which one serves a model, and whether it is right."""
    ctx.with_resource(_plain_warnings())
