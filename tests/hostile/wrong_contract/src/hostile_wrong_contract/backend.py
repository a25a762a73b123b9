"""Must never be imported: its contract is refused first."""

from __future__ import annotations

raise AssertionError("a backend of another contract was imported")
