"""Raises while it is imported, and not an ImportError."""

from __future__ import annotations

raise RuntimeError("the driver of the quantum card is asleep")
