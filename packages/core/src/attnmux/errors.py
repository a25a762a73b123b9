"""Errors that belong to the contract itself."""

from __future__ import annotations


class ContractError(ValueError, AssertionError):
    """A promise of the contract was broken by the caller.

    It is a `ValueError` for users, and an `AssertionError` for code written against the interface
    this contract grew from, where the same conditions are assertions.
    """
