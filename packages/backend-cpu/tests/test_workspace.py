"""Memory of a call is bounded, whatever the lengths, and tiles that nobody sees are not read."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnmux_cpu.kernels.grouping import Pages
from attnmux_cpu.kernels.masks import MaskRule
from attnmux_cpu.kernels.tiles import GROUP_TILE_BYTES, HeadShape, TileShape
from attnmux_cpu.kernels.workspace import Workspace, thread_workspace
from attnmux_cpu.options import CPUAttentionOptions


class LargestResult(TorchDispatchMode):
    """Records the largest tensor memory that any operation returned, and bytes gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.gathered = 0
        self.known: set[int] = set()

    def know(self, *tensors: torch.Tensor) -> LargestResult:
        self.known |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.largest = max(self.largest, storage.nbytes())
            if func.overloadpacket is torch.ops.aten.index_select:
                self.gathered += result.nbytes
        return result


MIB = 1 << 20
CONTEXT = 1 << 17


def _long_step(built, queries, **fields):
    # One block for all keys of a kind: the table names the same few blocks again and again.
    step = built([queries], [queries + 64], heads=(8, 2), head_size=16, **fields)
    length = CONTEXT + queries
    table = torch.arange(-(-length // 16)).remainder(step.cache.shape[0]).int().unsqueeze(0)
    step.cache.copy_(torch.randn(step.cache.shape))
    step.batch = step.batch.replace(
        seq_lens=torch.tensor([length]), block_table_tensor=table, max_seq_len=length
    )
    return step


@pytest.mark.parametrize("queries", [1, 4, 96])
@pytest.mark.parametrize("mebibytes", [1, 64])
def test_a_long_context_needs_no_more_than_the_workspace(built, monkeypatch, queries, mebibytes):
    options = CPUAttentionOptions(workspace_bytes=mebibytes * MIB)
    step = _long_step(built, queries, options=options)
    fresh = Workspace()
    monkeypatch.setattr("attnmux_cpu.impl.thread_workspace", lambda: fresh)
    metadata, output = step.builder.build(0, step.batch), step.new_output()
    arguments = (None, step.query, None, None, step.cache, metadata, output)
    with LargestResult().know(step.cache, step.query, output) as seen:
        step.impl.forward(*arguments)
    assert fresh.num_bytes <= options.workspace_bytes
    # Scores of all queries over all keys would be 4, 16 and 384 MiB.
    assert seen.largest <= min(options.workspace_bytes, GROUP_TILE_BYTES)
    assert torch.isfinite(output).all()


def test_a_small_workspace_changes_nothing_but_rounding(built):
    lens = ([1, 1, 1, 40, 300], [900, 30, 500, 100, 300])
    small = CPUAttentionOptions(workspace_bytes=MIB, max_grouped_queries=1)
    built(*lens, heads=(16, 16), head_size=64, options=small).check()
    built(*lens, heads=(16, 16), head_size=64, block_size=528, options=small).check()


def test_only_the_pages_of_a_window_are_read(built):
    windowed, full = (_long_step(built, 1, window=window) for window in (100, None))
    gathered = []
    for step in (windowed, full):
        metadata = step.builder.build(0, step.batch)
        with LargestResult() as seen:
            step.impl.forward(None, step.query, None, None, step.cache, metadata, step.new_output())
        gathered.append(seen.gathered)
    rows = 2 * 32 * 4  # heads, key and value, float32
    assert gathered[0] <= (100 + 2 * 16) * rows
    assert gathered[1] >= CONTEXT * rows


def test_a_causal_prefill_reads_half_of_the_square(built):
    step = built([2048], [2048], heads=(1, 1), head_size=8)
    step.update()
    metadata = step.builder.build(0, step.batch)
    with LargestResult() as seen:
        step.impl.forward(None, step.query, None, None, step.cache, metadata, step.new_output())
    tiles = -(-2048 // TileShape(HeadShape(1, 1, 8, 8), 64 * MIB).tile_q)
    square = tiles * 2048 * 16 * 4
    assert seen.gathered < 0.6 * square


def test_pages_of_a_prefix_and_a_window_without_the_middle():
    lengths = _lengths([1, 1], [100, 8], prefix_lens=[10, 30])
    pages = Pages.seen(lengths, MaskRule(rswa_window=5), 4, 1, torch.arange(2).numpy())
    # Positions 0..9 and 95..99; then all of a request that is shorter than its prefix.
    assert pages.index(0, 5, 2).tolist() == [[0, 1, 2, 23, 24], [0, 1, 1, 1, 1]]
    assert pages.count.tolist() == [5, 2]


def _lengths(query_lens, key_lens, prefix_lens):
    import numpy as np

    from attnmux_cpu.kernels.schedule import Lengths

    return Lengths(
        query_starts=np.cumsum([0, *query_lens]),
        key_lens=np.array(key_lens),
        causal=np.ones(len(key_lens), dtype=bool),
        prefix_lens=np.array(prefix_lens),
        mm_ranges={},
        block_table=None,
        block_size=4,
    )


def test_buffers_are_kept_grow_and_differ_by_name():
    workspace = Workspace()
    first = workspace.take("a", (4, 4))
    assert workspace.take("a", (2, 3)).data_ptr() == first.data_ptr()
    assert workspace.take("b", (4, 4)).data_ptr() != first.data_ptr()
    assert workspace.take("a", (4, 4), torch.int16).data_ptr() != first.data_ptr()
    workspace.take("a", (100,))
    assert workspace.num_bytes == 400 + 64 + 32


def test_each_thread_has_its_own():
    others = []
    thread = threading.Thread(target=lambda: others.append(thread_workspace()))
    thread.start()
    thread.join()
    assert thread_workspace() is thread_workspace()
    assert others[0] is not thread_workspace()


def test_threads_do_not_disturb_each_other(built):
    step = built([1, 30, 300], [400, 80, 300])
    step.update()
    want = step.forward()
    metadata = step.builder.build(0, step.batch)
    outputs = [step.new_output() for _ in range(4)]

    def run(output: torch.Tensor) -> None:
        for _ in range(5):
            step.impl.forward(None, step.query, None, None, step.cache, metadata, output)

    threads = [threading.Thread(target=run, args=(output,)) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(output, want) for output in outputs)
