"""What selection found: a verdict for every known backend, and why one was chosen or none."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from attnmux.table import Row, table_lines, wrapped

if TYPE_CHECKING:
    from attnmux.request import AttentionRequest


ASK_WITH = "eligible with "
"""How the remedy of a flag begins."""


class Reason(str):
    """One reason against a backend: a string, with what came and what would be allowed beside it.

    Attributes:
        got: what the request asks; "" when the reason says it all.
        allowed: what the backend takes; "" when it does not say.
        remedy: what would remove this reason; "" when nothing is known.
        traceback: text of the traceback, when the reason is an exception.
    """

    got: str
    allowed: str
    remedy: str
    traceback: str

    def __new__(
        cls, text: str, got: str = "", allowed: str = "", remedy: str = "", traceback: str = ""
    ) -> Self:
        """Make a reason."""
        self = super().__new__(cls, text)
        self.got, self.allowed, self.remedy, self.traceback = got, allowed, remedy, traceback
        return self

    def __reduce__(self) -> tuple[type[Reason], tuple[str, str, str, str, str]]:
        """Copy and pickle with the details."""
        return (Reason, (str(self), self.got, self.allowed, self.remedy, self.traceback))

    def with_detail(self) -> str:
        """``head_size not supported (got 80; allowed: 64, 128)``; a flag says it all itself."""
        flag, is_flag, _ = self.got.partition("=")
        if is_flag and self.allowed.startswith(f"{flag}="):
            return str(self)
        detail = []
        if self.got:
            detail.append(f"got {self.got}")
        if self.allowed:
            detail.append(f"allowed: {self.allowed}")
        return f"{self} ({'; '.join(detail)})" if detail else str(self)

    def to_dict(self) -> dict[str, str]:
        """The reason as plain values, ready for JSON."""
        return {
            "reason": str(self),
            "got": self.got,
            "allowed": self.allowed,
            "remedy": self.remedy,
            "traceback": self.traceback,
        }


@dataclass(frozen=True)
class Verdict:
    """What was found about one backend.

    Attributes:
        name: the backend; the plugin's entry point when its backends could not be learned.
        eligible: whether it can serve the request.
        reasons: every reason against it; empty when it is eligible.
        entry_point: name of its plugin.
        distribution: the installed distribution it comes from; "" when registered in code.
        version: version of the distribution.
        priority: among eligible backends the higher one goes first.
        device_types: device types it runs on.
        chosen: whether it is the one.
        notes: what a reader should know, without counting against it.
    """

    name: str
    eligible: bool
    reasons: tuple[Reason, ...] = ()
    entry_point: str = ""
    distribution: str = ""
    version: str = ""
    priority: int = 0
    device_types: tuple[str, ...] = ()
    chosen: bool = False
    notes: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """``chosen``, ``eligible`` or ``refused``."""
        if self.chosen:
            return "chosen"
        return "eligible" if self.eligible else "refused"

    @property
    def remedy(self) -> str:
        """What would make it eligible: the remedies of all reasons, those of flags in one."""
        remedies = list(dict.fromkeys(reason.remedy for reason in self.reasons if reason.remedy))
        flags = [text.removeprefix(ASK_WITH) for text in remedies if text.startswith(ASK_WITH)]
        others = [text for text in remedies if not text.startswith(ASK_WITH)]
        return "; ".join([*([ASK_WITH + ", ".join(flags)] if flags else []), *others])

    @property
    def source(self) -> str:
        """``attnmux-cpu 0.1.0``."""
        if not self.distribution:
            return self.entry_point
        return f"{self.distribution} {self.version}".rstrip()

    def to_dict(self) -> dict[str, object]:
        """The verdict as plain values, ready for JSON."""
        return {
            "name": self.name,
            "verdict": self.word,
            "eligible": self.eligible,
            "chosen": self.chosen,
            "reasons": [reason.to_dict() for reason in self.reasons],
            "remedy": self.remedy,
            "plugin": self.entry_point,
            "distribution": self.distribution,
            "version": self.version,
            "priority": self.priority,
            "device_types": list(self.device_types),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class SelectionReport:
    """The answer to one request. ``str(report)`` is the plain table, and the text of the error.

    Attributes:
        request: what was asked.
        chosen: name of the chosen backend, or None.
        decided_by: ``keyword``, ``context``, ``environment`` or ``automatic``.
        decision: one sentence: why this one, or why none.
        verdicts: one for every known backend, the chosen one first, then the eligible ones.
        forced: the name that was asked for, or None.
        notes: what went wrong on the way without changing a verdict.
    """

    request: AttentionRequest
    chosen: str | None
    decided_by: str
    decision: str
    verdicts: tuple[Verdict, ...]
    forced: str | None = None
    notes: tuple[str, ...] = field(default=())

    def verdict(self, name: str) -> Verdict:
        """The verdict about one backend.

        Raises:
            KeyError: the report knows no such name.
        """
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise KeyError(name)

    def to_dict(self) -> dict[str, object]:
        """The report as plain values."""
        return {
            "request": self.request.to_dict(),
            "chosen": self.chosen,
            "decided_by": self.decided_by,
            "decision": self.decision,
            "forced": self.forced,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_table(self) -> str:
        """The report as plain text, at most 100 columns wide where words allow."""
        lines = wrapped(f"request: {self.request}", indent=" " * 9)
        lines += wrapped(f"chosen:  {self.decision}", indent=" " * 9)
        if self.verdicts:
            rows = [_row(verdict) for verdict in self.verdicts]
            lines += ["", *table_lines(("BACKEND", "VERDICT", "FROM", "WHY"), rows)]
        else:
            lines += ["", "no backend is installed; for the CPU: pip install attnmux-cpu"]
        for note in self.notes:
            lines += wrapped(f"note: {note}", indent=" " * 6)
        return "\n".join(lines)

    def __str__(self) -> str:
        """The plain table."""
        return self.to_table()


def _row(verdict: Verdict) -> Row:
    whys = [reason.with_detail() for reason in verdict.reasons]
    whys += [f"note: {note}" for note in verdict.notes]
    if verdict.remedy:
        whys.append(f"-> {verdict.remedy}")
    return (verdict.name, verdict.word, verdict.source), whys or [
        f"can serve it; priority {verdict.priority}"
    ]


class SelectionError(ValueError):
    """No backend can serve the request, or the one asked for cannot. The text is the report.

    Attributes:
        report: the whole report.
    """

    def __init__(self, report: SelectionReport) -> None:
        """Keep the report; its table is the text."""
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[SelectionError], tuple[SelectionReport]]:
        """Pickle by the report, so that the error crosses process borders."""
        return (type(self), (self.report,))
