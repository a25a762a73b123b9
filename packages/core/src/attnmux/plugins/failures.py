"""What went wrong with a plugin, kept as data: the kind, where it came from, and the way out.

A failure is never raised while plugins are discovered. It is an entry of ``attnmux list``, a row
of every selection report, and the text of the error when somebody asks for the backend by name.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import TracebackType

from attnmux._contract import CONTRACT_VERSION, contract_text, core_is_too_old

_TRACEBACK_LIMIT = 20_000  # characters; a plugin that recurses would fill the report otherwise


class FailureKind(StrEnum):
    """Kinds of failure; the value is what ``--json`` shows."""

    MISSING_LIBRARY = "missing-library"
    BROKEN_LIBRARY = "broken-library"
    UNLOADABLE_LIBRARY = "unloadable-library"
    MISSING_MODULE = "missing-module"
    CONTRACT = "contract"
    RAISED = "raised"
    EXITED = "exited"
    TIMEOUT = "timeout"
    BAD_ENTRY_POINT = "bad-entry-point"
    BAD_HOOK = "bad-hook"
    UNKNOWN_HOOK = "unknown-hook"
    BAD_ANSWER = "bad-answer"
    CONFLICT = "conflict"


@dataclass(frozen=True)
class Origin:
    """Where a plugin comes from.

    Attributes:
        entry_point: name of the entry point, which is the name of the plugin.
        module: the module the entry point names.
        distribution: name of the installed distribution; "" when it is not known.
        version: version of that distribution; "" when it is not known.
    """

    entry_point: str
    module: str = ""
    distribution: str = ""
    version: str = ""

    @property
    def label(self) -> str:
        """``attnmux-cpu 0.1.0``, or the entry point's name when no distribution is known."""
        if not self.distribution:
            return f"plugin {self.entry_point}"
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def off_switch(self) -> str:
        """How to leave this plugin out."""
        return f"leave it out with ATTNMUX_DISABLE={self.entry_point}"


@dataclass(frozen=True)
class PluginFailure:
    """One thing that is wrong with one plugin.

    Attributes:
        kind: what sort of failure it is.
        message: what happened, with the original text of an exception.
        way_out: what to do about it.
        origin: which plugin it is.
        backend: the backend concerned; None when it is the whole plugin.
        traceback: the text of the traceback; "" when nothing was raised.
    """

    kind: FailureKind
    message: str
    way_out: str
    origin: Origin
    backend: str | None = None
    traceback: str = ""

    def to_dict(self) -> dict[str, object]:
        """The failure as plain values, ready for JSON."""
        data = asdict(self)
        data["kind"] = str(self.kind)
        return data


def traceback_text(error: BaseException) -> str:
    """The whole traceback of ``error`` as text, cut in the middle when it is very long."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as broken:
        # An exception whose own __str__ raises is still reported.
        text = f"{type(error).__name__} (its text cannot be made: {type(broken).__name__})\n"
    if len(text) <= _TRACEBACK_LIMIT:
        return text
    half = _TRACEBACK_LIMIT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def error_text(error: BaseException) -> str:
    """``TypeError: the text``, in one line when the text is."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as broken:
        return f"{name} (its text cannot be made: {type(broken).__name__})"
    return f"{name}: {text}" if text else name


def safe_repr(value: object, limit: int = 80) -> str:
    """``repr(value)``, shortened; the type's name when ``__repr__`` raises."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__} whose repr raises>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def import_failure(
    error: BaseException, origin: Origin, what: str, backend: str | None = None
) -> PluginFailure:
    """Say why ``what`` could not be imported, each kind of error in its own words."""
    kind, message, way_out = _diagnose_import(error, origin, what)
    return PluginFailure(kind, message, way_out, origin, backend, traceback_text(error))


def _diagnose_import(
    error: BaseException, origin: Origin, what: str
) -> tuple[FailureKind, str, str]:
    original = error_text(error)
    package = origin.distribution or f"the distribution of {origin.entry_point}"
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or ""
        top = missing.partition(".")[0]
        if top == "attnmux":
            return _moved_name(original, what, package, origin)
        if top and top == origin.module.partition(".")[0]:
            return (
                FailureKind.MISSING_MODULE,
                f"{what} is not in the installed package: {original}",
                f"install it anew: pip install --force-reinstall {package}",
            )
        return (
            FailureKind.MISSING_LIBRARY,
            f"{what} needs a library that is not installed: {original}",
            f"install what provides module {missing or 'it'!r} (often: pip install "
            f"{top or 'NAME'}), or {origin.off_switch}",
        )
    if isinstance(error, ImportError):
        if (error.name or "").partition(".")[0] == "attnmux":
            return _moved_name(original, what, package, origin)
        return (
            FailureKind.BROKEN_LIBRARY,
            f"{what} finds its library, but the library does not load: {original}",
            "it is installed and does not match the rest of this environment (often another "
            f"torch): pip install --force-reinstall --no-cache-dir {package}",
        )
    if isinstance(error, OSError):
        return (
            FailureKind.UNLOADABLE_LIBRARY,
            f"{what} met an error of the operating system, often a shared library that cannot "
            f"be opened: {original}",
            "install the system library or file the text names, or make it findable "
            f"(LD_LIBRARY_PATH), or {origin.off_switch}",
        )
    if isinstance(error, SystemExit):
        return (
            FailureKind.EXITED,
            f"{what} tried to end the process: {original}",
            _report_it(origin),
        )
    return FailureKind.RAISED, f"{what} raised {original}", _report_it(origin)


def _moved_name(
    original: str, what: str, package: str, origin: Origin
) -> tuple[FailureKind, str, str]:
    return (
        FailureKind.CONTRACT,
        f"{what} imports something this attnmux (contract {contract_text(CONTRACT_VERSION)}) "
        f"does not have: {original}",
        f"install versions that fit: pip install --upgrade attnmux {package}; "
        f"or {origin.off_switch}",
    )


def _report_it(origin: Origin) -> str:
    return (
        f"report it, with the traceback, to the authors of {origin.label}; "
        f"until then {origin.off_switch}"
    )


def raised_failure(
    error: BaseException, origin: Origin, what: str, backend: str | None = None
) -> PluginFailure:
    """Say that ``what`` (a hook, a question to a backend) raised."""
    exited = isinstance(error, SystemExit)
    message = (
        f"{what} tried to end the process: {error_text(error)}"
        if exited
        else f"{what} raised {error_text(error)}"
    )
    kind = FailureKind.EXITED if exited else FailureKind.RAISED
    return PluginFailure(kind, message, _report_it(origin), origin, backend, traceback_text(error))


def timeout_failure(
    seconds: float, origin: Origin, what: str, variable: str, backend: str | None = None
) -> PluginFailure:
    """Say that ``what`` did not answer in time; ``variable`` is the setting that gives it more."""
    return PluginFailure(
        FailureKind.TIMEOUT,
        f"{what} did not answer within {seconds:g} s",
        f"{origin.off_switch}; if it is only slow, give it more time with {variable}=SECONDS",
        origin,
        backend,
    )


def contract_failure(
    needed: tuple[int, int], origin: Origin, backend: str | None = None
) -> PluginFailure:
    """Say that the plugin was built for a contract that this core cannot serve."""
    package = origin.distribution or "the plugin"
    if core_is_too_old(needed):
        side, upgrade = "the core is too old for it", "pip install --upgrade attnmux"
    else:
        side, upgrade = "it is too old for this core", f"pip install --upgrade {package}"
    return PluginFailure(
        FailureKind.CONTRACT,
        f"built for contract {contract_text(needed)}, needs a core that serves it; "
        f"this attnmux serves contract {contract_text(CONTRACT_VERSION)}: {side}",
        f"{upgrade}; or {origin.off_switch}",
        origin,
        backend,
    )


def bad_answer_failure(
    hook: str, problem: str, origin: Origin, backend: str | None = None
) -> PluginFailure:
    """Say that a hook answered something that cannot be used."""
    return PluginFailure(
        FailureKind.BAD_ANSWER, f"{hook}: {problem}", _report_it(origin), origin, backend
    )


def frames_of(error: BaseException) -> Iterator[dict[str, object]]:
    """Global variables of each frame the error went through, outermost first."""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        yield step.tb_frame.f_globals
        step = step.tb_next
