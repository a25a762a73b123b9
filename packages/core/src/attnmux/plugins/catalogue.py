"""From what plugins answered to one list of backends: who owns a name, and who is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attnmux import settings as env
from attnmux._contract import core_serves
from attnmux.plugins.discovery import PluginRecord
from attnmux.plugins.failures import FailureKind, Origin, PluginFailure, contract_failure
from attnmux.plugins.info import BackendInfo

FIRST_PARTY = frozenset({"attnmux", "attnmux-cpu", "attnmux-flash", "attnmux-mla"})
"""Distributions of this project. A name that one of them brings cannot be taken by another
distribution: the other is refused, and the backend that users rely on stays."""


@dataclass(frozen=True)
class BackendEntry:
    """One row of the catalogue: a backend, or a plugin none of whose backends could be learned.

    Attributes:
        name: name of the backend; of the plugin's entry point when ``info`` is None.
        origin: where it comes from.
        info: what the plugin says about it; None when the plugin failed or was left out.
        failure: why it cannot be used, or None.
        disabled_by: the setting that leaves it out, or None.
        notes: what a reader should know beside that.
    """

    name: str
    origin: Origin
    info: BackendInfo | None = None
    failure: PluginFailure | None = None
    disabled_by: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the backend may be imported and asked."""
        return self.info is not None and self.failure is None and self.disabled_by is None


@dataclass(frozen=True)
class Claim:
    """A plugin's wish to own a name; ``notes`` go to the backend's row."""

    info: BackendInfo
    origin: Origin
    notes: tuple[str, ...] = ()

    def same_as(self, other: Claim) -> bool:
        """The same thing said twice, which is nothing."""
        return self.info == other.info and self.origin.distribution == other.origin.distribution


def assemble(
    records: Sequence[PluginRecord], extra: Iterable[Claim], settings: env.Settings
) -> tuple[tuple[BackendEntry, ...], tuple[PluginFailure, ...]]:
    """Make the catalogue.

    Returns:
        The entries, sorted by name; and every failure, those of name clashes included.
    """
    failures = [failure for record in records for failure in record.failures]
    entries = [entry for record in records for entry in _entries_without_backend(record)]
    claims: dict[str, list[Claim]] = {}
    for claim in (*_claims(records), *extra):
        known = claims.setdefault(claim.info.name, [])
        if not any(claim.same_as(other) for other in known):
            known.append(claim)
    for name in claims:
        settled, clashes = _settle(name, claims[name], settings)
        entries += settled
        failures += clashes
    entries.sort(key=lambda entry: (entry.name, entry.origin.distribution))
    return tuple(entries), tuple(failures)


def _claims(records: Sequence[PluginRecord]) -> Iterable[Claim]:
    for record in records:
        for info in record.infos:
            yield Claim(info, record.origin, _notes(record))


def _entries_without_backend(record: PluginRecord) -> list[BackendEntry]:
    """Rows for a plugin that was left out, failed as a whole, or described a backend badly."""
    if record.disabled_by is not None:
        return [
            BackendEntry(record.origin.entry_point, record.origin, disabled_by=record.disabled_by)
        ]
    notes = _notes(record)
    named = [failure for failure in record.failures if failure.backend is not None]
    rows = [
        BackendEntry(failure.backend or "", record.origin, failure=failure, notes=notes)
        for failure in named
    ]
    whole = [failure for failure in record.failures if failure.backend is None]
    if whole and not record.infos and not rows:
        rows.append(
            BackendEntry(record.origin.entry_point, record.origin, failure=whole[0], notes=notes)
        )
    return rows


def _notes(record: PluginRecord) -> tuple[str, ...]:
    """What a reader of the plugin's backends should know of the plugin itself."""
    notes = []
    if record.output.strip():
        first = record.output.strip().splitlines()[0]
        notes.append(f"the plugin printed while it was loaded (kept apart): {first[:120]}")
    if record.infos:
        notes += [
            f"its plugin has a problem: {failure.message}"
            for failure in record.failures
            if failure.backend is None
        ]
    return tuple(notes)


def _settle(
    name: str, claims: list[Claim], settings: env.Settings
) -> tuple[list[BackendEntry], list[PluginFailure]]:
    disabled = env.DISABLE if name in settings.disable else None
    if len(claims) == 1:
        return [_entry(claims[0], disabled)], []
    owners = [claim for claim in claims if claim.origin.distribution in FIRST_PARTY]
    if len(owners) == 1:
        losers = [claim for claim in claims if claim is not owners[0]]
        clashes = [_taken_name(claim, owners[0]) for claim in losers]
        who = ", ".join(claim.origin.label for claim in losers)
        note = f"{who} claims this name too and was refused"
        return [
            _entry(owners[0], disabled, (note,)),
            *(
                BackendEntry(name, claim.origin, claim.info, clash, disabled)
                for claim, clash in zip(losers, clashes, strict=True)
            ),
        ], clashes
    clash = _conflict(name, claims)
    entry = BackendEntry(name, claims[0].origin, claims[0].info, clash, disabled)
    return [entry], [clash]


def _entry(claim: Claim, disabled: str | None, notes: tuple[str, ...] = ()) -> BackendEntry:
    failure = None
    if not core_serves(claim.info.contract):
        failure = contract_failure(claim.info.contract, claim.origin, claim.info.name)
    return BackendEntry(
        claim.info.name, claim.origin, claim.info, failure, disabled, claim.notes + notes
    )


def _taken_name(claim: Claim, owner: Claim) -> PluginFailure:
    name = claim.info.name
    return PluginFailure(
        FailureKind.CONFLICT,
        f"the name {name} belongs to {owner.origin.label}; {claim.origin.label} "
        f"({claim.info.class_path}) claims it too and was refused",
        f"ask the authors of {claim.origin.label} for another name, or remove it: "
        f"pip uninstall {claim.origin.distribution or claim.origin.entry_point}",
        claim.origin,
        name,
    )


def _conflict(name: str, claims: list[Claim]) -> PluginFailure:
    who = " and ".join(f"{c.origin.label} ({c.info.class_path})" for c in claims)
    if len({claim.origin.distribution for claim in claims}) == 1:
        origin = claims[0].origin
        way_out = (
            f"report it to the authors of {origin.label}, who use one name twice; "
            f"until then {origin.off_switch}"
        )
    else:
        switches = [f"{env.DISABLE}={_switch_name(claim, claims)}" for claim in claims]
        way_out = f"keep one: {' or '.join(switches)}, or uninstall one of them"
    return PluginFailure(
        FailureKind.CONFLICT,
        f"the name {name} is claimed by {who}; none of them is used",
        way_out,
        claims[0].origin,
        name,
    )


def _switch_name(claim: Claim, claims: list[Claim]) -> str:
    """The name that leaves out this claim alone: the entry point, where that is not shared."""
    points = [other.origin.entry_point for other in claims]
    if points.count(claim.origin.entry_point) == 1 or not claim.origin.distribution:
        return claim.origin.entry_point
    return claim.origin.distribution
