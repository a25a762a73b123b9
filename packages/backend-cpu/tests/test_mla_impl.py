"""Latent attention on the CPU: what the kit's scenarios do not show."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from attnmux.backend import AttentionType
from attnmux.batch import make_metadata
from attnmux.config import EngineConfig, SpeculativeConfig
from attnmux.create import create_builder, create_impl
from attnmux.kv_cache import KVCacheLayout, MLAAttentionSpec, allocate
from attnmux.parallel import ContextParallelGroup, use_context_parallel_groups
from attnmux.testing.mla.case import make_mla_case
from attnmux.testing.mla.run import make_mla_builder, make_mla_impl, run_mla_scenario
from attnmux.testing.mla.scenarios import MlaScenario
from attnmux.testing.road import Layer
from attnmux.testing.scenario import Request
from attnmux_cpu.kernels.workspace import thread_workspace
from attnmux_cpu.mla_backend import CPUMLABackend, CPUMLASparseBackend
from attnmux_cpu.options import CPUMLAOptions

ONE = torch.ones(1)


@dataclass(frozen=True)
class Sizes:
    """Of a layer; the default is a small DeepSeek."""

    num_heads: int = 4
    rank: int = 32
    nope: int = 24
    rope: int = 8
    v: int = 16

    def arguments(self, **changes: object) -> dict[str, object]:
        """Keywords of the impl's constructor."""
        arguments = {
            "num_heads": self.num_heads,
            "head_size": self.rank + self.rope,
            "scale": (self.nope + self.rope) ** -0.5,
            "num_kv_heads": 1,
            "alibi_slopes": None,
            "sliding_window": None,
            "kv_cache_dtype": "auto",
            "logits_soft_cap": None,
            "attn_type": AttentionType.DECODER,
            "kv_sharing_target_layer_name": None,
            "q_lora_rank": None,
            "kv_lora_rank": self.rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "qk_head_dim": self.nope + self.rope,
            "v_head_dim": self.v,
            "kv_b_proj": lambda x: x.new_zeros(x.shape[0], self.num_heads * (self.nope + self.v)),
        }
        return {**arguments, **changes}


def layer_with(scale: float = 1.0) -> Layer:
    return Layer.with_scales(torch.tensor([scale]), torch.tensor([scale]), "cpu")


def new_cache(num_blocks: int, block_size: int, width: int, dtype: torch.dtype = torch.float32):
    return torch.full((num_blocks, 1, block_size, width), torch.nan).to(dtype)


class DeepSeekLayer(torch.nn.Module):
    """Multi-head latent attention as the paper writes it, with random weights and no cache."""

    def __init__(self, sizes: Sizes, hidden: int = 48) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.num_heads * (sizes.nope + sizes.rope)
        self.q_proj = torch.nn.Linear(hidden, width, bias=False)
        self.kv_a_proj = torch.nn.Linear(hidden, sizes.rank + sizes.rope, bias=False)
        self.kv_b_proj = torch.nn.Linear(
            sizes.rank, sizes.num_heads * (sizes.nope + sizes.v), bias=False
        )

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate halves; `x` is ``[tokens, heads, rope]``."""
        half = self.sizes.rope // 2
        angles = positions[:, None] * 10_000.0 ** -(torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def inputs(self, hidden: torch.Tensor, first_position: int = 0):
        """Query ``[tokens, heads, nope + rope]``, latent and rotated part of some tokens."""
        sizes = self.sizes
        positions = torch.arange(first_position, first_position + hidden.shape[0]).float()
        q = self.q_proj(hidden).unflatten(-1, (sizes.num_heads, -1))
        q = torch.cat([q[..., : sizes.nope], self.rotate(q[..., sizes.nope :], positions)], dim=-1)
        latent, k_pe = self.kv_a_proj(hidden).split([sizes.rank, sizes.rope], dim=-1)
        latent = torch.nn.functional.rms_norm(latent, (sizes.rank,))
        return q, latent, self.rotate(k_pe[:, None], positions)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Uncompressed attention over a whole sequence, ``[tokens, heads, v]``."""
        q, latent, k_pe = self.inputs(hidden)
        per_head = self.kv_b_proj(latent).unflatten(-1, (self.sizes.num_heads, -1))
        k_nope, value = per_head.split([self.sizes.nope, self.sizes.v], dim=-1)
        key = torch.cat([k_nope, k_pe.expand(-1, self.sizes.num_heads, -1)], dim=-1)
        q, key, value = (x.transpose(0, 1) for x in (q, key, value))
        return scaled_dot_product_attention(q, key, value, is_causal=True).transpose(0, 1)


def test_a_deepseek_layer_token_by_token_equals_uncompressed_attention() -> None:
    torch.manual_seed(0)
    sizes, block_size, prompt, total = Sizes(), 4, 11, 19
    model = DeepSeekLayer(sizes)
    hidden = torch.randn(total, 48)
    right = model(hidden)

    spec = MLAAttentionSpec.for_layer(
        block_size=block_size,
        head_size=sizes.rank + sizes.rope,
        dtype=torch.float32,
        num_kv_heads=1,
    )
    cache = allocate({"layer": spec}, 8, KVCacheLayout.LBNHC).views["layer"]
    impl = create_impl(CPUMLABackend, **sizes.arguments(kv_b_proj=model.kv_b_proj))
    builder = create_builder(CPUMLABackend, spec, ["layer"], EngineConfig(), "cpu")
    w_uk, w_uv = model.kv_b_proj.weight.unflatten(0, (sizes.num_heads, -1)).split(
        [sizes.nope, sizes.v], 1
    )
    table, got = [[6, 1, 4, 0, 3]], []
    # The prompt in two chunks, then one token at a time.
    for start, end in [(0, 7), (7, prompt), *((i, i + 1) for i in range(prompt, total))]:
        q, latent, k_pe = model.inputs(hidden[start:end], start)
        step = make_metadata([end - start], [end], table, block_size)
        metadata = builder.build(0, step)
        impl.do_kv_cache_update(latent, k_pe, cache, step.slot_mapping, "auto", ONE)
        if metadata.num_prefills:
            output = torch.empty(end - start, sizes.num_heads * sizes.v)
            impl.forward_mha(q, latent, k_pe, cache, metadata, ONE, output)
            got.append(output.unflatten(-1, (sizes.num_heads, -1)))
        else:
            q_latent = torch.einsum("thn,hnr->thr", q[..., : sizes.nope], w_uk)
            parts = (q_latent, q[..., sizes.nope :])
            output, _ = impl.forward_mqa(parts, cache, metadata, layer_with())
            got.append(torch.einsum("thr,hvr->thv", output, w_uv))
    # float32 on both sides, outputs of about 1, two products more on one of them
    torch.testing.assert_close(torch.cat(got), right, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_number_of_context_rounds_does_not_show(dtype: str) -> None:
    # Keys of 192 and values of 128 as in the reports of faults in this merge.
    scenario = MlaScenario(
        "mla.prefill.rounds",
        (),
        (Request(6, 6), Request(5, 105), Request(3, 303)),
        kv_lora_rank=48,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        dtype=dtype,
    )
    case = make_mla_case(scenario, CPUMLABackend)
    impl = make_mla_impl(CPUMLABackend, case)
    results = {}
    for workspace in (1_000, 200, 134, 50, 1):
        options = CPUMLAOptions(context_tokens=workspace)
        metadata = make_mla_builder(CPUMLABackend, scenario, options=options).build(
            0, case.metadata
        )
        output = torch.empty(14, 4 * 128, dtype=case.dtype)
        impl.forward_mha(case.q, case.kv_c, case.k_pe, case.kv_cache, metadata, ONE, output)
        results[len(metadata.prefill.context_rounds)] = output
    assert sorted(results) == [1, 2, 3, 8, 400]
    # The up-projection of a round may be summed in another order; then one rounding of the result.
    tolerance = 2e-6 if dtype == "float32" else 2**-7
    for output in results.values():
        torch.testing.assert_close(output, results[1], rtol=tolerance, atol=tolerance)


def test_kv_b_proj_sees_no_more_than_the_workspace_at_a_time() -> None:
    scenario = MlaScenario("mla.prefill.x", (), (Request(40, 40), Request(9, 99)), num_heads=1)
    case = make_mla_case(scenario, CPUMLABackend)
    seen: list[int] = []

    def project(latents: torch.Tensor) -> torch.Tensor:
        seen.append(latents.shape[0])
        return linear(latents, case.w_kv_b)

    options = CPUMLAOptions(context_tokens=32)
    metadata = make_mla_builder(CPUMLABackend, scenario, options=options).build(0, case.metadata)
    impl = make_mla_impl(CPUMLABackend, case, kv_b_proj=project)
    output = torch.empty(49, 24)
    impl.forward_mha(case.q, case.kv_c, case.k_pe, case.kv_cache, metadata, ONE, output)
    assert seen == [32, 32, 26, 32, 17]


@pytest.mark.parametrize("backend", [CPUMLABackend, CPUMLASparseBackend])
def test_a_context_of_128k_is_decoded_in_a_bounded_workspace(
    backend: type[CPUMLABackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    seq_len, block_size, rank, rope = 131_072, 256, 24, 8
    torch.manual_seed(0)
    cache = torch.randn(seq_len // block_size, 1, block_size, rank + rope)
    sizes = Sizes(num_heads=2, rank=rank, rope=rope)
    indexer = None
    if backend.is_sparse():
        indexer = type("Indexer", (), {"topk_indices_buffer": torch.arange(seq_len)[None]})
    spec = MLAAttentionSpec.for_layer(
        block_size=block_size, head_size=rank + rope, dtype=torch.float32, num_kv_heads=1
    )
    builder = create_builder(backend, spec, ["layer"], EngineConfig(), "cpu")
    impl = create_impl(backend, **sizes.arguments(indexer=indexer))
    step = make_metadata([1], [seq_len], [list(range(seq_len // block_size))], block_size)
    workspace = type(thread_workspace())()
    monkeypatch.setattr("attnmux_cpu.mla_base.thread_workspace", lambda: workspace)
    q = torch.randn(1, 2, rank + rope)
    output, lse = impl.forward_mqa(q, cache, builder.build(0, step), layer_with())
    rows = cache.view(-1, rank + rope)
    scores = (q[0].double() @ rows.double().T) * impl.scale
    right = scores.softmax(dim=-1) @ rows[:, :rank].double()
    # Scores of some units, rounded to float32, and sums of 131,072 terms.
    torch.testing.assert_close(output[0].double(), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(dim=-1), rtol=0, atol=1e-5)
    rows_at_a_time = impl.options.decode_tokens
    assert workspace.num_bytes < 4 * rows_at_a_time * 4 * (rank + rope)


@pytest.mark.parametrize("drafts", [0, 7])
@pytest.mark.parametrize("num_heads", [1, 2, 128])
def test_a_request_alone_and_in_a_batch_give_the_same(num_heads: int, drafts: int) -> None:
    requests = (Request(1 + drafts, 70), Request(1, 33), Request(1 + drafts // 2, 200))
    values = {"num_heads": num_heads, "num_speculative_tokens": drafts, "kv_lora_rank": 32}
    case = make_mla_case(MlaScenario("mla.decode.x", (), requests, **values), CPUMLABackend)
    impl = make_mla_impl(CPUMLABackend, case)
    builder = make_mla_builder(CPUMLABackend, case.scenario)
    impl.do_kv_cache_update(
        case.kv_c, case.k_pe, case.kv_cache, case.metadata.slot_mapping, "auto", ONE
    )
    together, _ = impl.forward_mqa(
        (case.q_latent, case.q_pe), case.kv_cache, builder.build(0, case.metadata), case.layer
    )
    start = 0
    for index, request in enumerate(requests):
        rows = slice(start, start + request.query_len)
        step = make_metadata([request.query_len], [request.seq_len], case.table[[index]].int(), 16)
        alone, _ = impl.forward_mqa(
            (case.q_latent[rows], case.q_pe[rows]),
            case.kv_cache,
            builder.build(0, step),
            case.layer,
        )
        torch.testing.assert_close(alone, together[rows], rtol=1e-5, atol=1e-6)
        start = rows.stop


def written(slots: list[int], rows: int, cache: torch.Tensor, **changes: object) -> None:
    sizes = Sizes(rank=4, rope=2)
    impl = create_impl(CPUMLABackend, **sizes.arguments(**changes))
    kv_c = torch.arange(rows * 4.0).view(rows, 4) + 1
    k_pe = -torch.arange(rows * 2.0).view(rows, 1, 2) - 1
    dtype = changes.get("kv_cache_dtype", "auto")
    impl.do_kv_cache_update(kv_c, k_pe, cache, torch.tensor(slots), dtype, torch.tensor([0.5]))


def test_a_slot_of_minus_1_is_not_written_and_rows_without_a_slot_are_ignored() -> None:
    cache = new_cache(3, 4, 6)
    written([0, 1, -1, -1, 9], rows=8, cache=cache)
    filled = ~cache.view(12, 6).isnan().any(dim=-1)
    assert filled.nonzero().flatten().tolist() == [0, 1, 9]
    assert cache[2, 0, 1].tolist() == [17, 18, 19, 20, -9, -10]


@pytest.mark.parametrize(("slots", "place"), [([0, 12], 1), ([0, -2], 1), ([2**40], 0)])
def test_a_slot_outside_of_the_cache_is_refused_before_any_write(
    slots: list[int], place: int
) -> None:
    cache = new_cache(3, 4, 6)
    with pytest.raises(
        ValueError, match=rf"slot_mapping\[{place}\]: got {slots[place]}; allowed: -1"
    ):
        written(slots, rows=2, cache=cache)
    assert cache.isnan().all()


def test_an_empty_cache_takes_nothing() -> None:
    written([0, 1], rows=2, cache=torch.empty(0))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_a_quantised_write_divides_by_the_scale_and_saturates(name: str) -> None:
    dtype = getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}[name])
    cache = new_cache(1, 4, 6, dtype)
    sizes = Sizes(rank=4, rope=2)
    impl = create_impl(CPUMLABackend, **sizes.arguments(kv_cache_dtype=name))
    kv_c = torch.tensor([[1.0, -2.0, 1e30, -1e30]])
    impl.do_kv_cache_update(
        kv_c, torch.ones(1, 1, 2), cache, torch.tensor([2]), name, torch.tensor([0.25])
    )
    largest = torch.finfo(dtype).max
    assert cache[0, 0, 2].float().tolist() == [4, -8, largest, -largest, 4, 4]


def test_a_slot_past_two_gigabytes_is_written_in_its_place() -> None:
    # Rows of 576 bytes: slot 3,728,270 is the last whose offset fits 31 bits.
    width, block_size = 576, 64
    num_blocks = 3_728_270 // block_size + 2
    storage = torch.empty(
        num_blocks * block_size * width, dtype=torch.uint8
    )  # not touched: no memory
    cache = storage.view(torch.float8_e4m3fn).view(num_blocks, 1, block_size, width)
    sizes = Sizes(num_heads=1, rank=512, rope=64)
    impl = create_impl(CPUMLABackend, **sizes.arguments(kv_cache_dtype="fp8"))
    slots = torch.tensor([3_728_269, 3_728_270, 3_728_271, 3_728_272])
    kv_c, k_pe = torch.ones(4, 512) * torch.tensor([[1.0], [2], [3], [4]]), torch.ones(4, 1, 64)
    impl.do_kv_cache_update(kv_c, k_pe, cache, slots, "fp8", ONE)
    rows = [cache[int(s) // block_size, 0, int(s) % block_size].float() for s in slots]
    assert [row[0].item() for row in rows] == [1, 2, 3, 4]
    block = 3_728_272 // block_size
    spec = MLAAttentionSpec.for_layer(
        block_size=block_size,
        head_size=576,
        dtype=torch.float32,
        kv_cache_dtype="fp8",
        num_kv_heads=1,
    )
    builder = create_builder(CPUMLABackend, spec, ["layer"], EngineConfig(), "cpu")
    cache[block, 0, :1] = torch.full((576,), 2.0).to(cache.dtype)
    step = make_metadata([1], [1], [[block]], block_size)
    output, _ = impl.forward_mqa(
        torch.ones(1, 1, 576), cache, builder.build(0, step), layer_with(0.5)
    )
    assert output.unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 3]], r"block_table_tensor\[0, 1\]: got 3; allowed: 0 to 2"),
        ([[-1, 2]], r"block_table_tensor\[0, 0\]: got -1; allowed: 0 to 2"),
    ],
)
def test_a_block_outside_of_the_cache_is_refused(table: list[list[int]], message: str) -> None:
    sizes = Sizes(rank=4, rope=2)
    impl = create_impl(CPUMLABackend, **sizes.arguments())
    spec = MLAAttentionSpec.for_layer(
        block_size=4, head_size=6, dtype=torch.float32, num_kv_heads=1
    )
    builder = create_builder(CPUMLABackend, spec, ["layer"], EngineConfig(), "cpu")
    step = make_metadata([1], [7], table, 4, slot_mapping=torch.tensor([-1]))
    with pytest.raises(ValueError, match=message):
        impl.forward_mqa(
            torch.ones(1, 4, 6), new_cache(3, 4, 6), builder.build(0, step), layer_with()
        )


def test_a_table_that_was_put_in_later_is_looked_through_too() -> None:
    case = make_mla_case(MlaScenario("mla.decode.x", (), (Request(1, 9),)), CPUMLABackend)
    impl = make_mla_impl(CPUMLABackend, case)
    builder = make_mla_builder(CPUMLABackend, case.scenario)
    metadata = builder.build(0, case.metadata)
    impl.do_kv_cache_update(
        case.kv_c, case.k_pe, case.kv_cache, case.metadata.slot_mapping, "auto", ONE
    )
    query = (case.q_latent, case.q_pe)
    impl.forward_mqa(query, case.kv_cache, metadata, case.layer)
    other = torch.full_like(case.metadata.block_table_tensor, 99)
    metadata = builder.update_block_table(metadata, other, case.metadata.slot_mapping)
    with pytest.raises(ValueError, match=r"block_table_tensor\[0, 0\]: got 99"):
        impl.forward_mqa(query, case.kv_cache, metadata, case.layer)


def test_weights_that_want_gradients_are_left_out_of_any_graph() -> None:
    scenario = MlaScenario("mla.prefill.x", (), (Request(5, 9),))
    case = make_mla_case(scenario, CPUMLABackend)
    weight = case.w_kv_b.clone().requires_grad_()
    impl = make_mla_impl(CPUMLABackend, case, kv_b_proj=lambda x: linear(x, weight))
    metadata = make_mla_builder(CPUMLABackend, scenario).build(0, case.metadata)
    output = torch.empty(5, 96)
    impl.forward_mha(case.q, case.kv_c, case.k_pe, case.kv_cache, metadata, ONE, output)
    assert not output.requires_grad
    assert output.isfinite().all()


def test_a_later_call_runs_after_one_in_inference_mode() -> None:
    # The thread's scratch memory must not become an inference tensor.
    scenario = MlaScenario("mla.mixed.x", (), (Request(1, 300), Request(5, 80)))
    with torch.inference_mode():
        run_mla_scenario(CPUMLABackend, scenario)
    assert run_mla_scenario(CPUMLABackend, scenario) <= 1.0


@pytest.mark.parametrize("name", ["dcp", "pcp"])
def test_context_parallelism_is_refused(name: str) -> None:
    group = ContextParallelGroup(world_size=2, rank_in_group=1)
    with (
        use_context_parallel_groups(**{name: group}),
        pytest.raises(ValueError, match=r"context_parallel_size: got 2; allowed: 1"),
    ):
        create_impl(CPUMLABackend, **Sizes().arguments())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_tokens": 0}, "context_tokens: got 0"),
        ({"decode_tokens": -1}, "decode_tokens: got -1"),
    ],
)
def test_a_workspace_that_holds_no_token_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUMLAOptions(**options)


def test_what_the_backends_declare() -> None:
    for backend, sparse in ((CPUMLABackend, False), (CPUMLASparseBackend, True)):
        impl = backend.get_impl_cls()
        assert backend.is_mla()
        assert backend.is_sparse() is impl.is_sparse is sparse
        assert impl.supports_dense_mha_prefill is not sparse
        assert impl.can_return_lse_for_decode
        assert not impl.supports_dcp
        assert not backend.supports_pcp()
        assert not backend.forward_includes_kv_cache_update


def test_drafts_of_parallel_drafting_are_decodes() -> None:
    spec = MLAAttentionSpec.for_layer(
        block_size=16, head_size=24, dtype=torch.float32, num_kv_heads=1
    )
    config = EngineConfig(speculative_config=SpeculativeConfig(3, parallel_drafting=True))
    assert (
        create_builder(CPUMLABackend, spec, ["layer"], config, "cpu").reorder_batch_threshold == 7
    )
