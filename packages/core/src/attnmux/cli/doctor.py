"""``attnmux doctor``: everything a bug report needs, and what to do about what is wrong."""

from __future__ import annotations

import difflib
import os
import platform
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from attnmux import CONTRACT_VERSION, __version__
from attnmux import settings as env
from attnmux._contract import contract_text
from attnmux.cli.output import clean_stdout, print_json
from attnmux.cli.requirements import Mismatch, installed_version, mismatches
from attnmux.options import option_problems
from attnmux.plugins import BackendEntry, Registry, get_registry
from attnmux.table import Row, table_lines, wrapped

LIBRARIES = ("torch", "triton", "numpy", "pluggy", "importlib-metadata", "typer", "transformers")
OTHER_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
)


@dataclass
class Examination:
    """What doctor finds, before it is printed.

    Attributes:
        system: name -> text, for Python, the machine and the devices.
        versions: distribution -> version, or "not installed".
        mismatches: requirements that are not met.
        backends: name, state and words for each backend and failed plugin.
        variables: settings of the environment, each with a remark.
        advice: what to do, the most urgent first.
    """

    system: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    backends: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examine this installation: versions, devices, plugins, settings, and what to do.

    Paste the output into a bug report. Backends of the devices in hand are imported. Exit code 1:
    something is wrong.
    """
    with clean_stdout():
        found = examine(get_registry())
    if as_json:
        print_json(_data(found))
    else:
        typer.echo("\n".join(_lines(found)))
    if found.advice:
        raise typer.Exit(1)


def examine(registry: Registry) -> Examination:
    """Look at everything; a setting that cannot be read is advice, not an end."""
    found = Examination(system=_system())
    _look_at_variables(found)
    try:
        env.read_settings()
    except env.SettingsError as error:
        found.advice.append(f"repair the setting: {error}")
        _look_at_versions(found, {"attnmux"})
        return found
    origins = [record.origin for record in registry.plugins()]
    distributions = {"attnmux", *(o.distribution for o in origins if o.distribution)}
    _look_at_versions(found, distributions)
    _look_at_backends(found, registry)
    _look_at_wishes(found, registry)
    return found


def _system() -> dict[str, str]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    if getattr(torch.version, "hip", None):
        build = f"ROCm {torch.version.hip}"
    system = {
        "attnmux": f"{__version__}, contract {contract_text(CONTRACT_VERSION)}",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "torch": f"{torch.__version__} ({build or 'no GPU build'})",
        "cpu": f"{os.cpu_count()} threads seen, torch uses {torch.get_num_threads()}, "
        f"vector instructions {torch.backends.cpu.get_cpu_capability()}",
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        system[f"cuda:{index}"] = (
            f"{properties.name}, capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    if torch.cuda.device_count() == 0:
        system["gpu"] = "none that torch can see"
    return system


def _look_at_versions(found: Examination, distributions: set[str]) -> None:
    for name in (*sorted(distributions), *LIBRARIES):
        found.versions[name] = installed_version(name) or "not installed"
    for name in sorted(distributions):
        found.mismatches += mismatches(name)
    for wrong in found.mismatches:
        found.advice.append(f"{wrong.distribution} needs {wrong.requirement}: {wrong.command}")


def _look_at_variables(found: Examination) -> None:
    unknown = env.unknown_variables()
    for name, value in env.attnmux_variables().items():
        remark = ""
        if name in unknown:
            close = f"; did you mean {unknown[name]}?" if unknown[name] else ""
            remark = f"   MISMATCH: nothing reads it{close}"
            found.advice.append(f"unset {name}, which nothing reads{close}")
        found.variables[name] = f"{value!r}{remark}"
    for name in OTHER_VARIABLES:
        if name in os.environ:
            found.variables[name] = repr(os.environ[name])


def _look_at_backends(found: Examination, registry: Registry) -> None:
    here = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    device, failures = registry.platform()
    if device is not None:
        here.add(device.device_type)
        found.system[device.device_type] = f"{device.name}, by a plugin"
    for failure in (*registry.failures(), *failures):
        advice = f"{failure.origin.label}: {failure.way_out}"
        if advice not in found.advice:
            found.advice.append(advice)
    for entry in registry.entries():
        found.backends.append(_examined(found, registry, entry, here))
    if not any(entry.usable for entry in registry.entries()):
        found.advice.append("install a backend; for the CPU: pip install attnmux-cpu")


def _look_at_wishes(found: Examination, registry: Registry) -> None:
    """Settings that can be read, and yet ask for what is not there."""
    wanted = env.read_settings().backend
    usable = [entry.name for entry in registry.entries() if entry.usable]
    if wanted is not None and wanted not in usable:
        close = difflib.get_close_matches(wanted.casefold(), map(str.casefold, usable), n=1)
        hint = next((name for name in usable if name.casefold() in close), "")
        found.variables[env.BACKEND] += "   MISMATCH: no usable backend has this name"
        found.advice.append(
            f"unset {env.BACKEND}, or set it to {hint or ' | '.join(usable) or 'nothing'}: "
            f"{wanted!r} is no usable backend, so every selection fails"
        )
    found.advice += [f"repair the setting: {problem}" for problem in option_problems(registry)]


def _examined(
    found: Examination, registry: Registry, entry: BackendEntry, here: set[str]
) -> dict[str, Any]:
    failure = entry.failure
    if entry.disabled_by is not None:
        state, words = "disabled", f"left out by {entry.disabled_by}"
    elif failure is not None:
        state, words = "FAILED", failure.message
    elif entry.info is not None and not here.intersection(entry.info.device_types):
        state, words = "elsewhere", f"runs on {', '.join(entry.info.device_types)}"
    else:
        failure = registry.load_entry(entry).failure
        state, words = ("works", "imported") if failure is None else ("FAILED", failure.message)
    if failure is not None:
        advice = f"{failure.origin.label}: {failure.way_out}"
        if advice not in found.advice:
            found.advice.append(advice)
    return {
        "name": entry.name,
        "state": state,
        "from": entry.origin.label,
        "contract": contract_text(entry.info.contract) if entry.info else "",
        "about": words,
        "notes": list(entry.notes),
        "failure": failure.to_dict() if failure is not None else None,
    }


def _data(found: Examination) -> dict[str, object]:
    return {
        "system": found.system,
        "versions": found.versions,
        "mismatches": [vars(wrong) | {"command": wrong.command} for wrong in found.mismatches],
        "backends": found.backends,
        "variables": found.variables,
        "python": sys.executable,
        "advice": found.advice,
    }


def _lines(found: Examination) -> list[str]:
    bad = {wrong.requirement.split()[0]: wrong for wrong in found.mismatches}
    lines = ["SYSTEM", *_pairs(found.system), "", "VERSIONS", *_pairs(found.versions)]
    for wrong in bad.values():
        lines.append(
            f"  MISMATCH: {wrong.distribution} needs {wrong.requirement}, found {wrong.found}"
        )
    lines += ["", "BACKENDS"]
    rows: list[Row] = [
        (
            (str(row["name"]), str(row["state"]), str(row["from"]), str(row["contract"])),
            [str(row["about"]), *(f"note: {note}" for note in row["notes"])],
        )
        for row in found.backends
    ]
    if rows:
        table = table_lines(("NAME", "STATE", "FROM", "CONTRACT", "WHAT WAS FOUND"), rows, width=96)
        lines += [f"  {line}" for line in table]
    else:
        lines.append("  none")
    lines += ["", "SETTINGS", *(_pairs(found.variables) or ["  none"]), "", "WHAT TO DO"]
    if not found.advice:
        lines.append("  nothing: no problem was found")
    for number, text in enumerate(found.advice, 1):
        lines += wrapped(f"  {number}. {text}", indent="     ")
    return lines


def _pairs(values: dict[str, str]) -> list[str]:
    width = max((len(name) for name in values), default=0)
    return [f"  {name.ljust(width)}  {value}" for name, value in values.items()]
