"""``attnmux list``: every plugin and backend, and what is wrong with those that failed."""

from __future__ import annotations

from typing import Annotated

import typer

from attnmux import __version__
from attnmux._contract import CONTRACT_VERSION, contract_text
from attnmux.cli.output import clean_stdout, print_json, user_errors
from attnmux.options import describe_options, warn_unknown_option_variables
from attnmux.plugins import BackendEntry, PluginRecord, Registry, get_registry
from attnmux.table import Row, table_lines, wrapped


def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    options: Annotated[
        bool, typer.Option("--options", help="Show the options of each backend as well.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the tracebacks of failures as well.")
    ] = False,
) -> None:
    """List installed backends and plugins, the failed ones with what to do.

    No backend is imported for this: whether one works on this machine is told by `attnmux explain`.
    """
    registry = get_registry()
    with user_errors(), clean_stdout():
        warn_unknown_option_variables(registry)
        data = list_data(registry, options)
        lines = list_lines(registry, options, traceback)
    if as_json:
        print_json(data)
    else:
        typer.echo("\n".join(lines))


def state_of(entry: BackendEntry) -> str:
    """``ready``, ``failed`` or ``disabled``."""
    if entry.disabled_by is not None:
        return "disabled"
    return "failed" if entry.failure is not None else "ready"


def list_data(registry: Registry, options: bool = False) -> dict[str, object]:
    """Everything ``attnmux list`` knows, as plain values."""
    return {
        "attnmux": __version__,
        "contract": contract_text(CONTRACT_VERSION),
        "backends": [_entry_data(entry, options) for entry in registry.entries()],
        "plugins": [_record_data(record) for record in registry.plugins()],
    }


def _entry_data(entry: BackendEntry, options: bool) -> dict[str, object]:
    info = entry.info
    data: dict[str, object] = {
        "name": entry.name,
        "state": state_of(entry),
        "plugin": entry.origin.entry_point,
        "distribution": entry.origin.distribution,
        "version": entry.origin.version,
        "class": info.class_path if info else None,
        "device_types": list(info.device_types) if info else [],
        "priority": info.priority if info else None,
        "contract": contract_text(info.contract) if info else None,
        "summary": info.summary if info else "",
        "disabled_by": entry.disabled_by,
        "failure": entry.failure.to_dict() if entry.failure else None,
        "notes": list(entry.notes),
    }
    if options and info is not None and entry.usable:
        data["options"] = [vars(field) for field in describe_options(info)]
    return data


def _record_data(record: PluginRecord) -> dict[str, object]:
    return {
        "name": record.origin.entry_point,
        "module": record.origin.module,
        "distribution": record.origin.distribution,
        "version": record.origin.version,
        "state": record.state,
        "backends": [info.name for info in record.infos],
        "disabled_by": record.disabled_by,
        "failures": [failure.to_dict() for failure in record.failures],
        "output": record.output,
    }


def list_lines(registry: Registry, options: bool = False, traceback: bool = False) -> list[str]:
    """The list as plain text."""
    head = ("BACKEND", "STATE", "FROM", "DEVICES", "PRIORITY", "CONTRACT", "WHAT IT IS")
    entries = registry.entries()
    rows = [_entry_row(entry) for entry in entries]
    rows += [
        (
            (f"({record.origin.entry_point})", record.state, record.origin.label, "", "", ""),
            ["a plugin that brings no backend"],
        )
        for record in registry.plugins()
        if record.state == "loaded" and not record.infos
    ]
    lines = [f"attnmux {__version__}, contract {contract_text(CONTRACT_VERSION)}", ""]
    if rows:
        lines += table_lines(head, rows, width=120)
    else:
        lines.append("no plugin is installed; for the CPU: pip install attnmux-cpu")
    if options:
        lines += _option_lines(entries)
    if traceback:
        lines += _traceback_lines(registry)
    lines += ["", *wrapped(_closing(registry), indent="  ")]
    return lines


def _entry_row(entry: BackendEntry) -> Row:
    info = entry.info
    about = [info.summary] if info is not None and info.summary else []
    if entry.failure is not None:
        about = [entry.failure.message, f"-> {entry.failure.way_out}"]
    elif entry.disabled_by is not None:
        about = [f"left out by {entry.disabled_by}"]
    about += [f"note: {note}" for note in entry.notes]
    cells = (
        entry.name if info is not None else f"({entry.name})",
        state_of(entry),
        entry.origin.label,
        ", ".join(info.device_types) if info else "",
        str(info.priority) if info else "",
        contract_text(info.contract) if info else "",
    )
    return cells, about


def _option_lines(entries: tuple[BackendEntry, ...]) -> list[str]:
    rows: list[Row] = [
        ((entry.name, field.name, field.default, field.variable), [field.allowed])
        for entry in entries
        if entry.usable and entry.info is not None
        for field in describe_options(entry.info)
    ]
    if not rows:
        return ["", "no backend has options"]
    return ["", *table_lines(("BACKEND", "OPTION", "DEFAULT", "VARIABLE", "TAKES"), rows)]


def _traceback_lines(registry: Registry) -> list[str]:
    lines = []
    for failure in registry.failures():
        if failure.traceback:
            lines += ["", f"traceback of {failure.origin.label}:", failure.traceback.rstrip()]
    return lines


def _closing(registry: Registry) -> str:
    ready = [entry for entry in registry.entries() if entry.usable]
    bad = [record for record in registry.plugins() if record.failures]
    text = f"{len(ready)} ready."
    if any(entry.info is None for entry in registry.entries()):
        text += " A name in brackets is a plugin whose backends are not known."
    if bad:
        text += " Tracebacks of failures: attnmux list --traceback."
    if ready:
        text += " Which one serves a model: attnmux explain --config PATH/TO/config.json"
    return text
