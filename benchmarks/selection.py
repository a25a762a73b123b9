"""What selection costs once warm, and cold. Promise: a repeated request takes under 100 us.

    python benchmarks/selection.py

Prints microseconds a call and the ratio to the promise. The request object is made once, as an
engine does for each kind of layer; "new object" makes an equal one for each call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from attnmux import AttentionRequest, explain, list_backends, select_backend
from attnmux.plugins import get_registry

PROMISE_US = 100.0
CALLS = 2_000
ROUNDS = 15


def microseconds(call: Callable[[], object], calls: int = CALLS, rounds: int = ROUNDS) -> float:
    """Median over rounds of the mean time of one call."""
    means = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(means)


def main() -> None:
    started = time.perf_counter()
    names = list_backends()
    discovery_ms = (time.perf_counter() - started) * 1e3
    print(f"backends: {', '.join(names)}; discovery {discovery_ms:.1f} ms")

    request = AttentionRequest(head_size=128, dtype=torch.bfloat16, block_size=16)
    started = time.perf_counter()
    chosen = select_backend(request)
    print(f"first choice ({chosen.get_name()}): {(time.perf_counter() - started) * 1e3:.1f} ms")

    promised = {
        "same request, warm": microseconds(lambda: select_backend(request)),
        "new object, warm": microseconds(
            lambda: select_backend(
                AttentionRequest(head_size=128, dtype=torch.bfloat16, block_size=16)
            )
        ),
        "forced by keyword, warm": microseconds(lambda: select_backend(request, chosen.get_name())),
    }
    others = {
        "registry generation": microseconds(lambda: get_registry().generation),
        "whole report (explain)": microseconds(lambda: explain(request), calls=20),
    }
    for name, value in promised.items():
        print(f"{name:<26} {value:9.2f} us   {value / PROMISE_US:6.3f} of the promise")
    for name, value in others.items():
        print(f"{name:<26} {value:9.2f} us")


if __name__ == "__main__":
    main()
