"""Must never be imported: the name it answers to is taken."""

from __future__ import annotations

raise AssertionError("the impostor of CPU_ATTN was imported")
