"""Import one backend's class, when somebody asks for it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnmux import settings as env
from attnmux.plugins.catalogue import BackendEntry
from attnmux.plugins.failures import (
    FailureKind,
    Origin,
    PluginFailure,
    import_failure,
    safe_repr,
    timeout_failure,
)
from attnmux.plugins.guard import call_guarded

if TYPE_CHECKING:
    from attnmux.abc.backend import AttentionBackend


@dataclass(frozen=True)
class LoadedBackend:
    """What became of importing a backend: its class, or the failure.

    Attributes:
        cls: the class; None when it could not be imported.
        failure: why not, or None.
        notes: what a reader should know, such as what the module printed.
    """

    cls: type[AttentionBackend] | None = None
    failure: PluginFailure | None = None
    notes: tuple[str, ...] = ()


def load_backend(
    entry: BackendEntry, given: type[AttentionBackend] | None, settings: env.Settings
) -> LoadedBackend:
    """Import the class an entry names, under the time limit; ``given`` is taken as it is.

    An entry that already has a failure (wrong contract, name clash) is not imported.
    """
    if entry.failure is not None or entry.info is None:
        return LoadedBackend(failure=entry.failure)
    if given is not None:
        return _checked(given, entry, ())
    class_path = entry.info.class_path
    outcome = call_guarded(lambda: _import_object(class_path), settings.backend_timeout)
    notes: tuple[str, ...] = ()
    if outcome.output.strip():
        first = outcome.output.strip().splitlines()[0][:120]
        notes = (f"its module printed while it was imported (kept apart): {first}",)
    what = f"backend module {class_path.partition(':')[0]}"
    if outcome.timed_out:
        failure = timeout_failure(
            settings.backend_timeout, entry.origin, what, env.BACKEND_TIMEOUT, entry.name
        )
        return LoadedBackend(failure=failure, notes=notes)
    if isinstance(outcome.error, _NoSuchNameError):
        return LoadedBackend(failure=_wrong_path(outcome.error, entry), notes=notes)
    if outcome.error is not None:
        origin = Origin(
            entry.origin.entry_point,
            class_path.partition(":")[0],
            entry.origin.distribution,
            entry.origin.version,
        )
        failure = import_failure(outcome.error, origin, what, entry.name)
        return LoadedBackend(failure=failure, notes=notes)
    return _checked(outcome.value, entry, notes)


class _NoSuchNameError(LookupError):
    """The module is there, the class is not."""


def _import_object(path: str) -> Any:
    module_name, _, qualified = path.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in qualified.split("."):
        if not hasattr(found, part):
            raise _NoSuchNameError(f"{module_name} has no {qualified}")
        found = getattr(found, part)
    return found


def _wrong_path(error: LookupError, entry: BackendEntry) -> PluginFailure:
    package = entry.origin.distribution or entry.origin.entry_point
    return PluginFailure(
        FailureKind.MISSING_MODULE,
        f"the class of {entry.name} is not where its plugin says: {error}",
        f"install it anew: pip install --force-reinstall {package}; or report it to its authors",
        entry.origin,
        entry.name,
    )


def _checked(found: object, entry: BackendEntry, notes: tuple[str, ...]) -> LoadedBackend:
    from attnmux.abc.backend import AttentionBackend

    problem = None
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        problem = f"is {safe_repr(found)}; allowed: a subclass of AttentionBackend"
    elif missing := sorted(getattr(found, "__abstractmethods__", ())):
        problem = f"does not define {', '.join(missing)}"
    if problem is not None:
        assert entry.info is not None
        failure = PluginFailure(
            FailureKind.BAD_ANSWER,
            f"{entry.info.class_path} {problem}",
            f"report it to the authors of {entry.origin.label}",
            entry.origin,
            entry.name,
        )
        return LoadedBackend(failure=failure, notes=notes)
    return LoadedBackend(found, None, notes)  # type: ignore[arg-type]
