"""Time CPU_ATTN beside what plain torch does, in one run, as ratios.

Every call goes through the public road: spec, cache, builder, impl. The peers "sdpa" and "bmm" get
keys and values that lie contiguously, as no paged cache gives them; "gather" collects the same
pages as we do and then calls sdpa. All fold the query heads of a group into the query dimension,
the fastest way to call them. Methods alternate within a case and medians are compared; decodes
rotate through caches larger than any processor cache. Before a case is timed, the answers are
compared.

    python benchmarks/cpu_attention.py [--quick] [--threads N] [--save NAME]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

import attnmux
from attnmux.batch import make_metadata
from attnmux.config import EngineConfig
from attnmux.kv_cache import FullAttentionSpec, KVCacheLayout, allocate
from attnmux_cpu import __version__
from attnmux_cpu.backend import CPUAttentionBackend

ROTATED_BYTES = 512 << 20
SHOWN = ("attnmux", "gather", "sdpa", "bmm")
MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """Requests of equal lengths; decodes have one query token."""

    name: str
    requests: int
    queries: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    block_size: int = 16

    def bytes(self, dtype: torch.dtype) -> int:
        return self.requests * self.keys * self.kv_heads * self.size * 2 * dtype.itemsize

    @property
    def flops(self) -> int:
        """Of the products that causality leaves, all heads and requests."""
        context = self.keys - self.queries
        pairs = self.queries * context + self.queries * (self.queries + 1) // 2
        return 4 * self.requests * self.heads * self.size * pairs


DECODES = [
    Case("decode 1 x 128", 1, 1, 128),
    Case("decode 1 x 4096", 1, 1, 4096),
    Case("decode 8 x 4096", 8, 1, 4096),
    Case("decode 16 x 1024", 16, 1, 1024),
    Case("decode 64 x 128", 64, 1, 128),
    Case("decode 4 x 512, 9/3 heads of 64", 4, 1, 512, heads=9, kv_heads=3, size=64),
]
PREFILLS = [
    Case("prefill 512", 1, 512, 512),
    Case("prefill 2048", 1, 2048, 2048),
    Case("256 more at 4096", 1, 256, 4096),
    Case("prefill 16 x 32", 16, 32, 32),
    Case("prefill 512, 9/3 heads of 64", 1, 512, 512, heads=9, kv_heads=3, size=64),
]


class Run:
    """One case in one dtype: every method, over `copies` caches."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        is_decode = case.queries == 1
        self.copies = max(1, -(-ROTATED_BYTES // case.bytes(dtype))) if is_decode else 1
        self.copies = min(self.copies, 64)
        torch.manual_seed(0)
        tokens = case.requests * case.queries
        self.query = torch.randn(tokens, case.heads, case.size).to(dtype)
        self.output = torch.empty_like(self.query)
        shape = (case.requests, case.kv_heads, case.keys, case.size)
        self.keys = [torch.randn(shape).to(dtype) for _ in range(self.copies)]
        self.values = [torch.randn(shape).to(dtype) for _ in range(self.copies)]
        self._make_paged()

    def _make_paged(self) -> None:
        case = self.case
        spec = FullAttentionSpec.for_layer(
            block_size=case.block_size,
            num_kv_heads=case.kv_heads,
            head_size=case.size,
            dtype=self.dtype,
        )
        per_request = -(-case.keys // case.block_size)
        names = [f"layers.{i}" for i in range(self.copies)]
        num_blocks = case.requests * per_request
        self.views = list(
            allocate(dict.fromkeys(names, spec), num_blocks, KVCacheLayout.LBHNC).views.values()
        )
        table = torch.randperm(num_blocks).view(case.requests, per_request).int()
        batch = make_metadata(
            [case.queries] * case.requests, [case.keys] * case.requests, table, case.block_size
        )
        self.builder = attnmux.create_builder(
            CPUAttentionBackend, spec, names, EngineConfig(), "cpu"
        )
        self.batch = batch
        impl = attnmux.create_impl(
            CPUAttentionBackend,
            num_heads=case.heads,
            head_size=case.size,
            scale=case.size**-0.5,
            num_kv_heads=case.kv_heads,
        )
        self.impl = cast(Any, impl)
        all_pos = torch.arange(case.keys)
        slots = (table[:, all_pos // case.block_size] * case.block_size) + all_pos % case.block_size
        for view, key, value in zip(self.views, self.keys, self.values, strict=True):
            rows = [part.transpose(1, 2).flatten(0, 1) for part in (key, value)]
            self.impl.do_kv_cache_update(None, *rows, view, slots.flatten())
        self.metadata = self.builder.build(0, batch)
        self.blocks = table.flatten().long()

    def ours(self, copy: int) -> torch.Tensor:
        self.impl.forward(
            None, self.query, None, None, self.views[copy], self.metadata, self.output
        )
        return self.output

    def _folded(self) -> torch.Tensor:
        case = self.case
        query = self.query.view(case.requests, case.queries, case.kv_heads, -1, case.size)
        return query.permute(0, 2, 3, 1, 4)

    def sdpa(self, copy: int) -> torch.Tensor:
        return self._sdpa(self.keys[copy], self.values[copy])

    def gather(self, copy: int) -> torch.Tensor:
        case = self.case
        pages = self.views[copy].index_select(0, self.blocks)
        by_request = pages.view(case.requests, -1, *pages.shape[1:]).transpose(1, 2)
        rows = by_request.reshape(case.requests, case.kv_heads, -1, 2 * case.size)
        rows = rows[:, :, : case.keys]
        return self._sdpa(rows[..., : case.size], rows[..., case.size :])

    def _sdpa(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        case = self.case
        folded = self._folded()
        if case.queries == 1:
            query = folded.reshape(case.requests, case.kv_heads, -1, case.size)
            out = scaled_dot_product_attention(query, key, value)
        elif case.queries == case.keys:
            query = folded.reshape(case.requests, case.heads, case.queries, case.size)
            out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            query = folded.reshape(case.requests, case.heads, case.queries, case.size)
            mask = torch.ones(case.queries, case.keys, dtype=torch.bool).tril(
                case.keys - case.queries
            )
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        by_head = out.view(case.requests, case.heads, case.queries, case.size)
        return by_head.transpose(1, 2).reshape_as(self.query)

    def bmm(self, copy: int) -> torch.Tensor:
        case = self.case
        query = self._folded().reshape(-1, self._folded().shape[2], case.size)
        key, value = self.keys[copy].flatten(0, 1), self.values[copy].flatten(0, 1)
        scores = torch.bmm(query, key.transpose(1, 2)).mul_(case.size**-0.5)
        return torch.bmm(scores.softmax(-1), value).reshape_as(self.query)

    def read(self, copy: int) -> torch.Tensor:
        return self.keys[copy].view(torch.int16).max() + self.values[copy].view(torch.int16).max()

    def methods(self) -> dict[str, Callable[[int], torch.Tensor]]:
        methods: dict[str, Callable[[int], torch.Tensor]] = {
            "attnmux": self.ours,
            "gather": self.gather,
            "sdpa": self.sdpa,
        }
        if self.case.queries == 1:
            methods |= {"bmm": self.bmm, "read": self.read}
        return methods

    def check(self) -> float:
        want = self.sdpa(0).float()
        errors = [
            (method(0).float() - want).abs().max().item()
            for name, method in self.methods().items()
            if name != "read"
        ]
        if not max(errors) <= MAX_ERROR[self.dtype]:
            sys.exit(f"{self.case.name} {self.dtype}: answers differ by {errors}; nothing is timed")
        return errors[0]


def time_case(case: Case, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    run = Run(case, dtype)
    error = run.check()
    times: dict[str, list[float]] = {name: [] for name in run.methods()}
    end = time.perf_counter() + seconds
    turn = 0
    while turn < 5 or time.perf_counter() < end:
        for name, method in run.methods().items():
            start = time.perf_counter()
            method(turn % run.copies)
            times[name].append(time.perf_counter() - start)
        turn += 1
    medians = {name: statistics.median(series[1:]) for name, series in times.items()}
    build = _median(lambda: run.builder.build(0, run.batch))
    row: dict[str, Any] = {
        "case": case.name,
        "dtype": str(dtype).removeprefix("torch."),
        "ms": {name: round(1e3 * value, 4) for name, value in medians.items()},
        "build_ms": round(1e3 * build, 4),
        "turns": turn,
        "max_error": error,
        "sdpa_by_attnmux": round(medians["sdpa"] / medians["attnmux"], 3),
        "gather_by_attnmux": round(medians["gather"] / medians["attnmux"], 3),
    }
    if case.queries == 1:
        row["fraction_of_read"] = round(medians["read"] / medians["attnmux"], 3)
    else:
        row["gflops"] = round(case.flops / medians["attnmux"] / 1e9, 1)
    return row


def _median(call: Callable[[], object]) -> float:
    series = []
    for _ in range(20):
        start = time.perf_counter()
        call()
        series.append(time.perf_counter() - start)
    return statistics.median(series)


def matmul_gflops(dtype: torch.dtype) -> float:
    square = torch.randn(2048, 2048).to(dtype)
    return round(2 * 2048**3 / _median(lambda: square @ square) / 1e9, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of a second for each case")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--save", help="write results/NAME.json and results/NAME.md")
    parser.add_argument("--note", default="", help="what else the machine was doing, say")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    head = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/cpu_attention.py", *sys.argv[1:]]),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "note": arguments.note,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "attnmux": attnmux.__version__,
            "attnmux-cpu": __version__,
        },
        "matmul_gflops": {
            str(dtype).removeprefix("torch."): matmul_gflops(dtype)
            for dtype in (torch.float32, torch.bfloat16)
        },
    }
    print(json.dumps(head, indent=1))
    rows = []
    for case in DECODES + PREFILLS:
        for dtype in (torch.float32, torch.bfloat16):
            if arguments.only in case.name:
                rows.append(time_case(case, dtype, 0.2 if arguments.quick else 2.0))
                print(_markdown_row(rows[-1]), flush=True)
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps({**head, "cases": [asdict(c) for c in DECODES + PREFILLS], "rows": rows})
        (RESULTS / f"{arguments.save}.json").write_text(text + "\n")
        (RESULTS / f"{arguments.save}.md").write_text(_markdown(head, rows))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _markdown_row(row: dict[str, Any]) -> str:
    ms = row["ms"]
    rate = row.get("fraction_of_read", row.get("gflops"))
    cells = [row["case"], row["dtype"]]
    cells += [f"{ms[name]:.3f}" if name in ms else "" for name in SHOWN]
    cells += [f"{row['gather_by_attnmux']:.2f}", f"{row['sdpa_by_attnmux']:.2f}", str(rate)]
    return "| " + " | ".join(cells) + " |"


def _markdown(head: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        f"# CPU attention, {head['date']}",
        "",
        f"`{head['command']}` on {head['threads']} thread(s) of {head['processor']}; "
        + ", ".join(f"{name} {version}" for name, version in head["versions"].items())
        + f". Matmul of 2048: {head['matmul_gflops']} GFLOP/s.",
        "",
        *([head["note"], ""] if head["note"] else []),
        "Milliseconds, medians of methods that alternate. attnmux and gather (pages gathered, then "
        "SDPA) work on shuffled pages of 16, SDPA and bmm on contiguous keys. The last column is "
        "the fraction of the speed of reading keys and values (decodes) or GFLOP/s (prefills).",
        "",
        "| case | dtype | attnmux | gather | SDPA | bmm | gather/attnmux | SDPA/attnmux | rate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_markdown_row, rows)]) + "\n"


if __name__ == "__main__":
    main()
