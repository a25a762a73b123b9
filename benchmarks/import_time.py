"""What ``import attnmux`` adds to ``import torch``. Promise: under 0.15 s.

    python benchmarks/import_time.py

Fresh processes; each imports torch first and times what comes after it; medians. "in use" imports
everything a selecting engine needs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

PROMISE_S = 0.15
ROUNDS = 7
CASES = {
    "import attnmux": "import attnmux",
    "in use": "from attnmux import AttentionRequest, select_backend, create_impl",
}
SCRIPT = (
    "import time; t = time.perf_counter(); import torch; mid = time.perf_counter(); {}; "
    "print(mid - t, time.perf_counter() - mid)"
)


def seconds(code: str) -> tuple[float, float]:
    """Of ``import torch``, and of ``code`` after it."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(code)], capture_output=True, text=True, check=True
    )
    torch_alone, added = done.stdout.split()
    return float(torch_alone), float(added)


def main() -> None:
    for name, code in CASES.items():
        times = [seconds(code) for _ in range(ROUNDS)]
        torch_alone = statistics.median(pair[0] for pair in times)
        added = statistics.median(pair[1] for pair in times)
        print(
            f"{name:<16} adds {added * 1e3:7.2f} ms to {torch_alone:5.2f} s of torch   "
            f"{added / PROMISE_S:6.3f} of the promise"
        )


if __name__ == "__main__":
    main()
