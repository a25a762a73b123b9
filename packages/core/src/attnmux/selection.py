"""From a request to a backend: who decides, what every known backend says, and which one it is.

The strongest wish counts: keyword, then :func:`use_backend`, then ``ATTNMUX_BACKEND``, then the
automatic choice (a plugin's ``attnmux_rank``, then priority, then name). A backend that was asked
for and cannot serve is an error with its reasons, never another backend.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple

from attnmux import settings as env
from attnmux.abc.backend import AttentionBackend
from attnmux.capability import TELL_AUTHORS, raised, reasons_against, untaken_arguments
from attnmux.checks import bad_argument
from attnmux.options import warn_unknown_option_variables
from attnmux.platform import DeviceCapability, device_capability
from attnmux.plugins.catalogue import BackendEntry
from attnmux.plugins.failures import PluginFailure
from attnmux.plugins.guard import call_guarded
from attnmux.plugins.registry import Registry, get_registry
from attnmux.report import Reason, SelectionError, SelectionReport, Verdict
from attnmux.request import AttentionRequest

__all__ = [
    "AttentionRequest",
    "Reason",
    "SelectionError",
    "SelectionReport",
    "Verdict",
    "explain",
    "list_backends",
    "reasons_against",
    "select_backend",
    "use_backend",
]

_CHOICES_KEPT = 4096  # remembered choices of one registry; a program has a few dozen kinds of layer

_wish: ContextVar[str | None] = ContextVar("attnmux_use_backend", default=None)
_choices: weakref.WeakKeyDictionary[Registry, dict[object, type[AttentionBackend]]] = (
    weakref.WeakKeyDictionary()
)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Ask for a backend by name for every request made inside the ``with`` block.

    The wish belongs to the current thread or task. It is stronger than ``ATTNMUX_BACKEND`` and
    weaker than the keyword of a call.

    Raises:
        ValueError: ``name`` is no name. Whether the backend exists is told by the first request.
    """
    if not isinstance(name, str) or not name:
        raise bad_argument("name", repr(name), "the name of a backend")
    token = _wish.set(name)
    try:
        yield
    finally:
        _wish.reset(token)


def select_backend(
    request: AttentionRequest, backend: str | None = None, *, registry: Registry | None = None
) -> type[AttentionBackend]:
    """The class of the backend for a request.

    Choices are remembered by request, wish, and the state of registry and environment.

    Args:
        request: what the layer asks.
        backend: the name of a backend, when it must be that one.
        registry: where to look; the process's own by default.

    Raises:
        SelectionError: nothing fits, or the backend asked for does not; the text is the report.
    """
    _check_request(request)
    registry = get_registry() if registry is None else registry
    remembered = _choices.get(registry)
    if remembered is None:
        remembered = _choices.setdefault(registry, {})
    key = (request, backend, _wish.get(), env.selection_state(), registry.generation)
    chosen = remembered.get(key)
    if chosen is None:
        chosen = _select(request, backend, registry)
        if len(remembered) >= _CHOICES_KEPT:
            remembered.clear()
        remembered[key] = chosen
    return chosen


def explain(
    request: AttentionRequest, backend: str | None = None, *, registry: Registry | None = None
) -> SelectionReport:
    """The same decision as :func:`select_backend`, told in full and never raised.

    Every known backend gets a verdict, whether or not one was asked for by name.
    """
    _check_request(request)
    registry = get_registry() if registry is None else registry
    warn_unknown_option_variables(registry)
    wish = _strongest_wish(backend)
    verdicts = [_judge(entry, request, registry) for entry in registry.entries()]
    if wish.name is None:
        return _automatic_report(request, verdicts, registry)
    return _forced_report(request, wish, verdicts, registry)


def list_backends(*, registry: Registry | None = None) -> tuple[str, ...]:
    """Names of the backends that are known and not failed or left out, sorted."""
    registry = get_registry() if registry is None else registry
    return tuple(entry.name for entry in registry.entries() if entry.usable)


class _Wish(NamedTuple):
    name: str | None
    decided_by: str
    words: str


def _strongest_wish(keyword: str | None) -> _Wish:
    if keyword is not None:
        if not isinstance(keyword, str) or not keyword:
            raise bad_argument("backend", repr(keyword), "the name of a backend, or None")
        return _Wish(keyword, "keyword", "by keyword")
    if (name := _wish.get()) is not None:
        return _Wish(name, "context", "by use_backend")
    if (name := env.read_settings().backend) is not None:
        return _Wish(name, "environment", f"by {env.BACKEND}")
    return _Wish(None, "automatic", "automatically")


def _check_request(request: object) -> None:
    if not isinstance(request, AttentionRequest):
        raise bad_argument("request", repr(request), "an AttentionRequest")


def _select(
    request: AttentionRequest, keyword: str | None, registry: Registry
) -> type[AttentionBackend]:
    wish = _strongest_wish(keyword)
    warn_unknown_option_variables(registry)
    entry = registry.backends().get(wish.name) if wish.name is not None else None
    if entry is not None and _judge(entry, request, registry).eligible:
        # A forced backend is asked alone: no other one is imported for it.
        name = entry.name
    else:
        report = explain(request, keyword, registry=registry)
        if report.chosen is None:
            raise SelectionError(report)
        name = report.chosen
    loaded = registry.load(name)
    assert loaded.cls is not None, "an eligible backend has been imported"
    return loaded.cls


# One backend -------------------------------------------------------------------------------


def _judge(entry: BackendEntry, request: AttentionRequest, registry: Registry) -> Verdict:
    notes = list(entry.notes)
    reasons = _reasons_before_import(entry, request)
    if not reasons:
        capability = _capability_of(request, registry)
        if isinstance(capability, Reason):
            reasons = (capability,)
        else:
            reasons = _reasons_of_class(entry, request, capability, registry, notes)
    info = entry.info
    return Verdict(
        entry.name,
        not reasons,
        reasons,
        entry.origin.entry_point,
        entry.origin.distribution,
        entry.origin.version,
        info.priority if info is not None else 0,
        info.device_types if info is not None else (),
        notes=tuple(notes),
    )


def _reasons_before_import(entry: BackendEntry, request: AttentionRequest) -> tuple[Reason, ...]:
    """What can be said without importing the backend: such a backend is never imported."""
    if entry.disabled_by is not None:
        how = (
            f"take it out of {env.DISABLE}"
            if entry.disabled_by == env.DISABLE
            else f"add {entry.origin.entry_point} to {env.PLUGINS}, or unset that"
        )
        return (Reason(f"left out by {entry.disabled_by}", remedy=how),)
    if entry.failure is not None:
        return (_failure_reason(entry.failure),)
    if entry.info is not None and request.device_type not in entry.info.device_types:
        allowed = ", ".join(entry.info.device_types)
        return (
            Reason(
                f"device type {request.device_type} not supported",
                got=request.device,
                allowed=allowed,
                remedy=f"ask for a device it runs on: {allowed}",
            ),
        )
    return ()


def _failure_reason(failure: PluginFailure) -> Reason:
    return Reason(failure.message, remedy=failure.way_out, traceback=failure.traceback)


def _capability_of(request: AttentionRequest, registry: Registry) -> DeviceCapability | Reason:
    if request.device_capability is not None:
        return request.device_capability
    platform, _ = registry.platform()
    if platform is not None and platform.device_type == request.device_type:
        return DeviceCapability(*platform.capability)
    try:
        return device_capability(request.device)
    except (ValueError, RuntimeError) as error:
        return Reason(
            f"the capability of {request.device} is not known here: {error}",
            remedy="name it: device_capability=(major, minor)",
        )


def _reasons_of_class(
    entry: BackendEntry,
    request: AttentionRequest,
    capability: DeviceCapability,
    registry: Registry,
    notes: list[str],
) -> tuple[Reason, ...]:
    loaded = registry.load_entry(entry)
    notes += loaded.notes
    cls = loaded.cls
    if cls is None:
        assert loaded.failure is not None, "a backend is imported, or there is a failure"
        return (_failure_reason(loaded.failure),)
    seconds = env.read_settings().backend_timeout
    outcome = call_guarded(lambda: _ask(cls, entry, request, capability), seconds)
    if outcome.timed_out:
        return (
            Reason(
                f"{cls.__name__} did not say within {seconds:g} s what it supports",
                remedy=f"{entry.origin.off_switch}, or give it more: {env.BACKEND_TIMEOUT}=SECONDS",
            ),
        )
    if outcome.error is not None:
        return (_with_authors(raised(cls, outcome.error), entry),)
    reasons, more = outcome.value
    notes += more
    return tuple(_with_authors(reason, entry) for reason in reasons)


def _with_authors(reason: Reason, entry: BackendEntry) -> Reason:
    """Where a reason says to report it: say to whom, and how to do without it until then."""
    if reason.remedy != TELL_AUTHORS:
        return reason
    remedy = (
        f"report it, with the traceback, to the authors of {entry.origin.label}; "
        f"until then {entry.origin.off_switch}"
    )
    return Reason(reason, reason.got, reason.allowed, remedy, reason.traceback)


def _ask(
    cls: type[AttentionBackend],
    entry: BackendEntry,
    request: AttentionRequest,
    capability: DeviceCapability,
) -> tuple[tuple[Reason, ...], list[str]]:
    reasons = reasons_against(cls, request, capability)
    notes = []
    try:
        if untaken := untaken_arguments(cls):
            notes.append(f"its validate_configuration does not take: {', '.join(untaken)}")
        if (own := cls.get_name()) != entry.name:
            notes.append(f"its class calls itself {own!r}")
    except Exception as error:
        return (*reasons, raised(cls, error)), notes
    return reasons, notes


# The decision ------------------------------------------------------------------------------


def _automatic_report(
    request: AttentionRequest, verdicts: list[Verdict], registry: Registry
) -> SelectionReport:
    entries = registry.backends()
    able = sorted(
        (verdict for verdict in verdicts if verdict.eligible),
        key=lambda verdict: (-verdict.priority, verdict.name),
    )
    if not able:
        decision = "nothing: no backend can serve this request"
        return SelectionReport(request, None, "automatic", decision, _ordered(verdicts, None))
    infos = [info for v in able if (info := entries[v.name].info) is not None]
    answer = registry.rank(request, infos)
    notes = tuple(f"{f.message} ({f.origin.label}); {f.way_out}" for f in answer.failures)
    first = answer.order[0] if answer.order else able[0].name
    if answer.origin is not None:
        why = f"ranked first by {answer.origin.label}"
    elif len(able) == 1:
        why = "the only one that can serve it"
    elif able[0].priority > able[1].priority:
        why = f"highest priority ({able[0].priority}) of {len(able)} that can serve it"
    else:
        why = f"first by name among those of the highest priority ({able[0].priority})"
    return SelectionReport(
        request,
        first,
        "automatic",
        f"{first}, automatically: {why}",
        _ordered(verdicts, first),
        notes=notes,
    )


def _forced_report(
    request: AttentionRequest, wish: _Wish, verdicts: list[Verdict], registry: Registry
) -> SelectionReport:
    name = wish.name
    assert name is not None
    own = [verdict for verdict in verdicts if verdict.name == name]
    able = [verdict.name for verdict in verdicts if verdict.eligible]
    chosen = name if any(verdict.eligible for verdict in own) else None
    if chosen is not None:
        decision = f"{name}, asked for {wish.words}"
    elif own:
        decision = f"nothing: {name} was asked for {wish.words} and cannot serve this request; " + (
            f"could serve it: {', '.join(able)}" if able else "neither can any other"
        )
    else:
        decision = f"nothing: {_unknown_name(name, wish, request, registry)}"
    return SelectionReport(
        request, chosen, wish.decided_by, decision, _ordered(verdicts, chosen or name), name
    )


def _unknown_name(name: str, wish: _Wish, request: AttentionRequest, registry: Registry) -> str:
    names = [entry.name for entry in registry.entries() if entry.usable]
    here = [
        entry.name
        for entry in registry.entries()
        if entry.usable and entry.info and request.device_type in entry.info.device_types
    ]
    by_folded = {known.casefold(): known for known in names}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.5)
    hint = f"did you mean {by_folded[close[0]]}? " if close else ""
    return (
        f"{name!r} was asked for {wish.words}, and no backend of that name is installed; {hint}"
        f"names for device {request.device_type}: {', '.join(here) or 'none is installed'}"
    )


def _ordered(verdicts: list[Verdict], first: str | None) -> tuple[Verdict, ...]:
    """The chosen (or asked-for) one first, then the eligible ones by priority, then the others."""
    marked = [replace(v, chosen=True) if v.name == first and v.eligible else v for v in verdicts]
    return tuple(
        sorted(marked, key=lambda v: (v.name != first, not v.eligible, -v.priority, v.name))
    )
