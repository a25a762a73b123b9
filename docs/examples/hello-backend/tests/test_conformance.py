"""Everything that attnmux asks of a backend, run on this one."""

from __future__ import annotations

from attnmux.testing import BackendConformance


class TestHello(BackendConformance):
    """A test for each scenario of the conformance kit."""

    backend = "HELLO_ATTN"
