"""``python -m attnmux``: the command line, where its script is not on the path."""

from __future__ import annotations

from attnmux.cli import main

main(prog_name="attnmux")
