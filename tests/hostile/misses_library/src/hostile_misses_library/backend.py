"""Needs a library that nobody has."""

from __future__ import annotations

import flux_capacitor_kernels


class LibrarylessBackend:
    """Never defined: the import above fails."""

    kernels = flux_capacitor_kernels
