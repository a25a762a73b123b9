"""The registry: which backends this process knows, learned at first use and only once."""

from __future__ import annotations

import difflib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from attnmux import settings as env
from attnmux.plugins.catalogue import BackendEntry, Claim, assemble
from attnmux.plugins.discovery import (
    EntryPoint,
    EntryPointSource,
    PluginRecord,
    installed_entry_points,
    left_out_by,
    load_plugin,
    named_by,
    origin_of,
)
from attnmux.plugins.failures import Origin, PluginFailure, raised_failure
from attnmux.plugins.guard import in_guarded_call
from attnmux.plugins.info import BackendInfo, PlatformInfo
from attnmux.plugins.loading import LoadedBackend, load_backend
from attnmux.plugins.questions import RankAnswer, ask_platform, ask_rank, with_cache_dtypes

if TYPE_CHECKING:
    from attnmux.abc.backend import AttentionBackend

IN_CODE = "registered in code"
_registries: weakref.WeakSet[Registry] = weakref.WeakSet()


@dataclass(frozen=True)
class _View:
    """One consistent state of the registry; replaced as a whole, never changed."""

    key: tuple[str | None, str | None, int]
    records: tuple[PluginRecord, ...]
    entries: tuple[BackendEntry, ...]
    by_name: Mapping[str, BackendEntry]
    failures: tuple[PluginFailure, ...]
    generation: int


class Registry:
    """Backends of one set of entry points, and those registered in code.

    Plugins are looked for at first use, each is imported and asked once in the life of the
    registry, and no backend's own module is imported until somebody asks for it. All methods may
    be called from any thread. A change of ``ATTNMUX_PLUGINS`` or ``ATTNMUX_DISABLE`` is seen at
    the next call.

    Args:
        entry_points: gives the entry points to look at; by default those of every installed
            distribution. Tests pass their own.
    """

    def __init__(self, entry_points: EntryPointSource = installed_entry_points) -> None:
        """Make a registry; nothing is looked for yet."""
        self._source = entry_points
        self._lock = threading.RLock()
        self._found: list[tuple[EntryPoint, Origin]] | None = None
        self._records: dict[tuple[str, str, str, str], PluginRecord] = {}
        self._claims: dict[str, tuple[Claim, type[AttentionBackend] | None]] = {}
        self._loaded: dict[tuple[str, Origin], LoadedBackend] = {}
        self._changes = 0
        self._generation = 0
        self._view: _View | None = None
        _registries.add(self)

    # What is known -------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Grows with every change of what is known; part of the key of every cache."""
        return self._current().generation

    def plugins(self) -> tuple[PluginRecord, ...]:
        """One record for each entry point, sorted by name."""
        return self._current().records

    def entries(self) -> tuple[BackendEntry, ...]:
        """Every known backend, and a row for each plugin whose backends could not be learned."""
        return self._current().entries

    def backends(self) -> Mapping[str, BackendEntry]:
        """The backends by name, those included that cannot be used; a read-only view."""
        return self._current().by_name

    def failures(self) -> tuple[PluginFailure, ...]:
        """Everything that is wrong with any plugin."""
        return self._current().failures

    # Changing it ---------------------------------------------------------------------------

    def register(
        self, info: BackendInfo, backend_cls: type[AttentionBackend] | None = None
    ) -> None:
        """Make a backend known to this process from code, for tests and experiments.

        The same registration twice is nothing. Other processes do not see it: a plugin is the way
        to be known everywhere.

        Args:
            info: what a plugin would say.
            backend_cls: the class itself, when ``info.class_path`` cannot be imported.

        Raises:
            ValueError: a field of ``info`` is wrong, or another registration has the name.
        """
        problems = info.problems()
        if problems:
            raise ValueError("; ".join(problems))
        claim = Claim(info, Origin(IN_CODE, info.class_path.partition(":")[0]))
        with self._locked():
            known = self._claims.get(info.name)
            if known == (claim, backend_cls):
                return
            if known is not None:
                raise ValueError(
                    f"name: got {info.name!r}, registered before as {known[0].info.class_path}; "
                    "allowed: a new name, or unregister() first"
                )
            self._claims[info.name] = (claim, backend_cls)
            self._changes += 1

    def unregister(self, name: str) -> None:
        """Forget a backend registered by :meth:`register`.

        Raises:
            ValueError: no backend of that name was registered in code.
        """
        with self._locked():
            if name not in self._claims:
                raise ValueError(
                    f"name: got {name!r}; allowed: a name registered in code "
                    f"({', '.join(sorted(self._claims)) or 'there is none'})"
                )
            claim, _ = self._claims.pop(name)
            self._loaded.pop((name, claim.origin), None)
            self._changes += 1

    def refresh(self) -> None:
        """Look for plugins anew; modules already imported stay imported."""
        with self._locked():
            self._found = None
            self._records.clear()
            self._loaded.clear()
            self._changes += 1

    # Using it ------------------------------------------------------------------------------

    def load(self, name: str) -> LoadedBackend:
        """Import the backend's class, once; a failure is kept and not tried again.

        Raises:
            KeyError: no backend of that name is known.
        """
        return self.load_entry(self._current().by_name[name])

    def load_entry(self, entry: BackendEntry) -> LoadedBackend:
        """Like :meth:`load`, for an entry of :meth:`entries`."""
        key = (entry.name, entry.origin)
        with self._locked():
            if key not in self._loaded:
                known = self._claims.get(entry.name)
                in_code = known is not None and known[0].origin == entry.origin
                given = known[1] if in_code and known is not None else None
                self._loaded[key] = load_backend(entry, given, env.read_settings())
            return self._loaded[key]

    def rank(self, request: object, candidates: Sequence[BackendInfo]) -> RankAnswer:
        """Ask plugins for another order of the eligible candidates."""
        return ask_rank(self._current().records, request, candidates, env.read_settings())

    def platform(self) -> tuple[PlatformInfo | None, tuple[PluginFailure, ...]]:
        """Ask plugins for a device that the core does not know; also what went wrong."""
        return ask_platform(self._current().records, env.read_settings())

    # Making the view -----------------------------------------------------------------------

    def _current(self) -> _View:
        view = self._view
        if view is not None and view.key == self._key():
            return view
        with self._locked():
            key = self._key()
            if self._view is None or self._view.key != key:
                self._view = self._make_view(key)
            return self._view

    def _key(self) -> tuple[str | None, str | None, int]:
        _, plugins, disable = env.selection_state()
        return plugins, disable, self._changes

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A plugin that asks the registry while the registry waits for that plugin would wait for
        # ever: say so instead.
        if not self._lock.acquire(timeout=0.5 if in_guarded_call() else -1):
            raise RuntimeError(
                "a plugin asked the registry while it was being loaded itself; "
                "ask when a backend is used, not when its module is imported"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _make_view(self, key: tuple[str | None, str | None, int]) -> _View:
        settings = env.read_settings()
        if self._found is None:
            self._found = _find(self._source)
        records = tuple(self._record(point, origin, settings) for point, origin in self._found)
        claims = [claim for claim, _ in self._claims.values()]
        entries, failures = assemble(records, claims, settings)
        _warn_of_unmatched_names(settings, records, entries)
        by_name: dict[str, BackendEntry] = {}
        for entry in entries:
            # Of two rows with one name (a clash) the usable one answers to it.
            if entry.info is not None and (entry.usable or entry.name not in by_name):
                by_name[entry.name] = entry
        self._generation += 1
        return _View(key, records, entries, MappingProxyType(by_name), failures, self._generation)

    def _record(self, point: EntryPoint, origin: Origin, settings: env.Settings) -> PluginRecord:
        left_out = left_out_by(origin, settings)
        if left_out is not None:
            return PluginRecord(origin, disabled_by=left_out)
        key = (origin.entry_point, str(point.value), origin.distribution, origin.version)
        if key not in self._records:
            try:
                record = load_plugin(point, origin, settings)
                record = with_cache_dtypes(record, settings)
            except Exception as error:
                # The loop over plugins must go on whatever one of them is made of.
                failure = raised_failure(error, origin, f"reading plugin {origin.entry_point}")
                record = PluginRecord(origin, failures=(failure,))
            self._records[key] = record
        return self._records[key]


def _find(source: EntryPointSource) -> list[tuple[EntryPoint, Origin]]:
    """The entry points in the order of their names; the same one twice is one."""
    found: dict[tuple[str, str, str], tuple[EntryPoint, Origin]] = {}
    for point in source():
        origin = origin_of(point)
        found.setdefault(
            (origin.entry_point, origin.distribution, str(point.value)), (point, origin)
        )
    return [found[key] for key in sorted(found)]


def _warn_of_unmatched_names(
    settings: env.Settings,
    records: Sequence[PluginRecord],
    entries: Sequence[BackendEntry],
) -> None:
    """Warn of names in the lists of the environment that name nothing that is installed."""
    backends = {entry.name for entry in entries}
    plugins = {record.origin.entry_point for record in records}
    lists = (
        (env.PLUGINS, settings.plugins or frozenset(), plugins),
        (env.DISABLE, settings.disable, plugins | backends),
    )
    for variable, names, known in lists:
        for name in sorted(names):
            if name in known or any(named_by([name], record.origin) for record in records):
                continue
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            env.warn_once(
                f"{variable}={name}", f"{variable} names {name!r}, which is not installed{hint}"
            )


_registry = Registry()


_held_for_fork: list[Registry] = []


def _hold_locks() -> None:
    # A fork in the middle of a discovery would leave the child with half-imported modules.
    if in_guarded_call():
        return  # a plugin that forks: the lock is held on its behalf already
    for registry in sorted(_registries, key=id):
        registry._lock.acquire()
        _held_for_fork.append(registry)


def _release_locks() -> None:
    if in_guarded_call():
        return
    while _held_for_fork:
        _held_for_fork.pop()._lock.release()


def _renew_locks() -> None:
    _held_for_fork.clear()
    for registry in _registries:
        registry._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold_locks, after_in_parent=_release_locks, after_in_child=_renew_locks
    )


def get_registry() -> Registry:
    """The registry of this process. Making it known costs nothing; plugins load at first use."""
    return _registry
