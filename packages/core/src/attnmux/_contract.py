"""The version of the contract, and the one rule that says which plugins a core can serve.

The contract has a version of its own, apart from the version of any distribution. A higher major
number is a breaking change (a method that plugins override takes another argument, a hook changes
its meaning); a higher minor number only adds. A plugin states the version it was written for.

This module imports nothing, so that it can be asked before anything of a plugin is imported.
"""

from __future__ import annotations

CONTRACT_VERSION: tuple[int, int] = (1, 0)
"""``(major, minor)`` of the contract that this core serves."""


def contract_text(version: tuple[int, int]) -> str:
    """``(1, 0)`` as it is written in messages: ``1.0``."""
    return f"{version[0]}.{version[1]}"


def is_contract_version(value: object) -> bool:
    """Whether ``value`` has the form of a contract version: two non-negative integers."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(part, int) and not isinstance(part, bool) for part in value)
        and min(value) >= 0
    )


def core_serves(needed: tuple[int, int], served: tuple[int, int] = CONTRACT_VERSION) -> bool:
    """Whether a core of contract ``served`` can serve a plugin written for ``needed``.

    The major numbers must be equal and the plugin may not ask for a later minor number.
    """
    return needed[0] == served[0] and needed[1] <= served[1]


def core_is_too_old(needed: tuple[int, int], served: tuple[int, int] = CONTRACT_VERSION) -> bool:
    """Which side to upgrade when :func:`core_serves` says no: True means the core."""
    return needed > served
