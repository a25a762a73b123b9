"""Cannot keep quiet."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from attnmux.plugins import BackendInfo, hookimpl

print("*** welcome to LOUD_ATTN ***")
sys.stdout.write('{"this": "is not the JSON you asked for"}\n')
os.write(1, b"*** written past Python's own stdout, as a library in C does ***\n")
logging.getLogger(__name__).warning("LOUD_ATTN is the best")
warnings.warn("LOUD_ATTN has a newsletter", UserWarning, stacklevel=1)


@hookimpl
def attnmux_backends():
    """Answer a backend, loudly."""
    print("*** LOUD_ATTN at your service ***", flush=True)
    return [
        BackendInfo(
            name="LOUD_ATTN",
            class_path="hostile_prints_at_import.backend:LoudBackend",
            priority=-100,
        )
    ]
