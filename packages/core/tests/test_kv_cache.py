"""Cache dtypes, specs, layouts and allocation: every byte of a cache has one owner."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.backend import AttentionBackend
from attnmux.kv_cache import (
    AttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheAllocation,
    KVCacheLayout,
    MLAAttentionSpec,
    SlidingWindowSpec,
    allocate,
    cache_dtype_handler,
    per_token_head_scales,
    resolve_layout,
    split_kv,
    write_mla_cache,
)

LAYOUTS = list(KVCacheLayout)
# One name for each width of a stored value, and one whose rows carry scales and padding.
CACHE_DTYPES = ["auto", "float32", "fp8_e5m2", "int8_per_token_head"]
PER_TOKEN_HEAD = ["int8_per_token_head", "fp8_per_token_head"]


def layout_ids(layout: KVCacheLayout) -> str:
    return layout.name


def spec_of(name: str = "auto", **sizes: Any) -> FullAttentionSpec:
    defaults = {"block_size": 4, "num_kv_heads": 3, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec.for_layer(kv_cache_dtype=name, **defaults | sizes)


def byte_places(allocation: KVCacheAllocation, name: str) -> torch.Tensor:
    """The byte of the buffer at which each element of a view begins, in the view's shape."""
    view = allocation.views[name]
    places = torch.tensor(view.data_ptr() - allocation.buffer.data_ptr())
    for size, stride in zip(view.shape, view.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * (stride * view.element_size())
    return places


def assert_every_byte_has_one_owner(allocation: KVCacheAllocation) -> int:
    """Check that views neither overlap nor leave the buffer; return the bytes that they cover."""
    owned = []
    for name, view in allocation.views.items():
        if view.numel():
            element = torch.arange(view.element_size())
            owned.append((byte_places(allocation, name).unsqueeze(-1) + element).flatten())
    every = torch.cat(owned)
    assert every.min() >= 0
    assert every.max() < allocation.buffer.numel()
    assert every.unique().numel() == every.numel()
    return every.numel()


# Allocation.


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_ids)
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_views_lie_in_the_order_that_the_layout_names(
    block_size: int, cache_dtype: str, num_layers: int, layout: KVCacheLayout
) -> None:
    spec = spec_of(cache_dtype, block_size=block_size)
    names = [f"layer.{i}" for i in range(num_layers)]
    allocation = allocate(dict.fromkeys(names, spec), 5, layout)
    assert allocation.layout is layout
    assert allocation.buffer.shape == (5 * num_layers * spec.page_size_bytes,)
    logical = (num_layers, 5, 3, block_size, spec.content_size)
    order = ["LBHNC".index(letter) for letter in layout.name]
    numbered = torch.arange(math.prod(logical)).view([logical[dim] for dim in order])
    expected = numbered.permute([order.index(dim) for dim in range(5)])
    for place, name in enumerate(names):
        view = allocation.views[name]
        assert (view.shape, view.dtype) == (logical[1:], spec.dtype)
        found = byte_places(allocation, name) // view.element_size()
        assert torch.equal(found, expected[place])


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_ids)
def test_what_one_layer_writes_no_other_reads(layout: KVCacheLayout) -> None:
    names = ["a", "b", "c"]
    allocation = allocate(dict.fromkeys(names, spec_of("float32")), 2, layout)
    assert not allocation.buffer.any()
    sizes = [allocation.views[name].numel() for name in names]
    ids = torch.arange(1.0, sum(sizes) + 1).split(sizes)
    for name, part in zip(names, ids, strict=True):
        allocation.views[name].copy_(part.view(allocation.views[name].shape))
    for name, part in zip(names, ids, strict=True):
        assert torch.equal(allocation.views[name].flatten(), part)
    assert torch.equal(allocation.buffer.view(torch.float32).sort().values, torch.cat(ids))


MIXED: dict[str, AttentionSpec] = {
    "full": spec_of(),
    "window": SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=16, dtype=torch.bfloat16, sliding_window=8
    ),
    "odd bytes": spec_of("fp8", num_kv_heads=1, head_size=5, block_size=3),
    "scaled": spec_of("int8_per_token_head", head_size=6),
    "latent": MLAAttentionSpec(block_size=4, head_size=24, dtype=torch.float32),
    "padded": spec_of(page_size_padded=1000),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_ids)
def test_layers_whose_pages_differ_share_a_buffer_or_are_refused(layout: KVCacheLayout) -> None:
    if layout.name in ("LHBNC", "BHLNC"):
        with pytest.raises(
            ValueError, match=rf"layout: got {layout.name} .* allowed: LBHNC \| LBNHC \| BLHNC"
        ):
            allocate(MIXED, 7, layout)
        return
    allocation = allocate(MIXED, 7, layout)
    covered = assert_every_byte_has_one_owner(allocation)
    assert covered == sum(7 * spec.real_page_size_bytes for spec in MIXED.values())
    for name, spec in MIXED.items():
        view = allocation.views[name]
        assert view.shape == (7, *spec.layer_shape)
        # A kernel may load whole elements, or whole scaled rows, at once.
        assert view.data_ptr() % view.element_size() == 0
    scales = per_token_head_scales(allocation.views["scaled"], 6)
    assert scales[0].shape == (7, 3, 4)


@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.BHLNC], ids=layout_ids)
@pytest.mark.parametrize(
    "other",
    [spec_of(block_size=8), spec_of("float16"), spec_of(page_size_padded=4096)],
    ids=["another shape", "another dtype", "padded"],
)
def test_a_layout_that_interleaves_layers_wants_equal_pages(
    layout: KVCacheLayout, other: AttentionSpec
) -> None:
    with pytest.raises(ValueError, match="whose pages differ or are padded"):
        allocate({"a": spec_of(), "b": other}, 2, layout)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.BLHNC], ids=layout_ids)
def test_padding_of_a_page_lies_between_blocks(layout: KVCacheLayout) -> None:
    spec = spec_of(page_size_padded=512)
    assert spec.real_page_size_bytes == 4 * 3 * 16 * 2 == 384
    allocation = allocate({"a": spec, "b": spec}, 3, layout)
    assert allocation.buffer.numel() == 2 * 3 * 512
    step = 512 if layout is KVCacheLayout.LBNHC else 2 * 512
    assert allocation.views["b"].stride(0) * 2 == step
    assert assert_every_byte_has_one_owner(allocation) == 2 * 3 * 384


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_ids)
def test_layers_without_a_cache_get_an_empty_view(layout: KVCacheLayout) -> None:
    encoder = EncoderOnlyAttentionSpec(
        block_size=4, num_kv_heads=3, head_size=8, dtype=torch.bfloat16
    )
    with_one = allocate({"first": encoder, "a": spec_of(), "last": encoder}, 2, layout)
    alone = allocate({"a": spec_of()}, 2, layout)
    assert with_one.buffer.numel() == alone.buffer.numel()
    assert with_one.views["first"].numel() == with_one.views["last"].numel() == 0
    assert with_one.views["a"].stride() == alone.views["a"].stride()
    nothing = allocate({"first": encoder}, 2, layout)
    assert nothing.buffer.numel() == nothing.views["first"].numel() == 0


def test_allocation_without_layers_is_empty() -> None:
    assert allocate({}, 2, KVCacheLayout.LBNHC).views == {}


@pytest.mark.parametrize("num_blocks", [0, -1, 2.0])
def test_a_cache_has_at_least_one_block(num_blocks: Any) -> None:
    with pytest.raises(ValueError, match="num_blocks: got"):
        allocate({"a": spec_of()}, num_blocks, KVCacheLayout.LBNHC)


def test_the_name_of_a_layout_is_refused_where_a_layout_is_wanted() -> None:
    name: Any = "LBNHC"
    with pytest.raises(ValueError, match="layout: got 'LBNHC'; allowed: a KVCacheLayout"):
        allocate({}, num_blocks=1, layout=name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_ids)
def test_a_cache_may_be_larger_than_32_bits_address(layout: KVCacheLayout) -> None:
    spec = spec_of("fp8", block_size=16, num_kv_heads=8, head_size=128)
    num_blocks = 2**33 // spec.page_size_bytes
    allocation = allocate(dict.fromkeys("abc", spec), num_blocks, layout, device="meta")
    assert allocation.buffer.numel() == 3 * 2**33
    view = allocation.views["c"]
    assert view.shape == (num_blocks, 8, 16, 256)
    last = view.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)
    )
    assert last == 3 * 2**33 - 1


@given(
    layout=st.sampled_from(LAYOUTS),
    num_blocks=st.integers(1, 4),
    num_layers=st.integers(1, 3),
    block_size=st.integers(1, 9),
    num_kv_heads=st.integers(1, 4),
    head_size=st.integers(1, 20),
    head_size_v=st.none() | st.integers(1, 20),
    cache_dtype=st.sampled_from([*CACHE_DTYPES, "fp8_per_token_head", "int4_per_token_head"]),
)
@settings(max_examples=150, deadline=None)
def test_equal_layers_cover_the_buffer_exactly(
    layout: KVCacheLayout, num_blocks: int, num_layers: int, cache_dtype: str, **sizes: Any
) -> None:
    spec = spec_of(cache_dtype, **sizes)
    allocation = allocate({f"{i}": spec for i in range(num_layers)}, num_blocks, layout)
    covered = assert_every_byte_has_one_owner(allocation)
    padding = allocation.buffer.numel() - num_blocks * num_layers * spec.page_size_bytes
    assert covered == allocation.buffer.numel() - padding
    assert 0 <= padding < num_blocks * num_layers * 16
    if spec.page_size_bytes % 16 == 0:
        assert padding == 0


# Layouts.


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_ids)
def test_a_layout_is_what_its_letters_say(layout: KVCacheLayout) -> None:
    letters = layout.name
    assert layout.stride_order == tuple("LBHNC".index(letter) for letter in letters)
    one_layer = letters.replace("L", "")
    assert layout.layer_view_order == tuple("BHNC".index(letter) for letter in one_layer)
    assert layout.is_layer_compact == letters.startswith("L")
    assert layout.is_block_outermost == letters.startswith("B")
    assert layout.is_block_compact == (set(letters[:2]) == {"L", "B"})
    assert layout.is_block_contiguous == letters.endswith("HNC")


def test_there_are_six_layouts() -> None:
    assert [layout.name for layout in LAYOUTS] == [
        "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC",
    ]  # fmt: skip


def reader(name: str, *layouts: KVCacheLayout, any_layout: bool = False) -> type[AttentionBackend]:
    stated = None if any_layout else layouts
    members = {
        "get_name": staticmethod(lambda: name),
        "supported_kv_cache_layouts": classmethod(lambda cls: stated),
    }
    return type(name, (AttentionBackend,), members)


L = KVCacheLayout
ANY = reader("ANY", any_layout=True)
TOKENS = reader("TOKENS", L.LBNHC, L.BLNHC, L.LBHNC)
HEADS = reader("HEADS", L.LBHNC, L.BLHNC, L.BLNHC)
BLOCKS = reader("BLOCKS", L.BHLNC)
NOTHING = reader("NOTHING")


@pytest.mark.parametrize(
    ("backends", "prefer", "expected"),
    [
        ([ANY], None, L.LBNHC),
        ([ANY, ANY], L.BHLNC, L.BHLNC),
        ([TOKENS], None, L.LBNHC),
        ([ANY, HEADS], None, L.LBHNC),
        ([TOKENS, HEADS], None, L.BLNHC),  # the first backend's order decides
        ([HEADS, TOKENS], None, L.LBHNC),
        ([TOKENS, HEADS], L.LBHNC, L.LBHNC),
        ([BLOCKS, ANY, BLOCKS], None, L.BHLNC),
        ([], None, L.LBNHC),
    ],
    ids=lambda value: "+".join(b.__name__ for b in value) if isinstance(value, list) else None,
)
def test_the_layout_is_one_that_all_can_read(
    backends: list[type[AttentionBackend]], prefer: KVCacheLayout | None, expected: KVCacheLayout
) -> None:
    layers = {f"layer.{i}": backend for i, backend in enumerate(backends)}
    assert resolve_layout(layers, prefer) is expected


@pytest.mark.parametrize(
    ("backends", "prefer", "message"),
    [
        (
            [TOKENS, BLOCKS],
            None,
            "no KV cache layout suits all layers: TOKENS reads LBNHC, BLNHC, LBHNC; "
            "BLOCKS reads BHLNC",
        ),
        ([NOTHING], None, "NOTHING reads none"),
        ([TOKENS, HEADS], L.LBNHC, r"prefer: got LBNHC; allowed: BLNHC \| LBHNC .*HEADS reads"),
    ],
    ids=["disagreement", "none at all", "preference"],
)
def test_the_error_says_who_reads_what(
    backends: list[type[AttentionBackend]], prefer: KVCacheLayout | None, message: str
) -> None:
    layers = {f"layer.{i}": backend for i, backend in enumerate(backends)}
    with pytest.raises(ValueError, match=message):
        resolve_layout(layers, prefer)


# Rows.


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_ids)
@pytest.mark.parametrize(("head_size", "head_size_v"), [(8, None), (12, 4)])
def test_keys_come_first_and_values_after(
    layout: KVCacheLayout, head_size: int, head_size_v: int | None
) -> None:
    spec = spec_of(head_size=head_size, head_size_v=head_size_v)
    view = allocate({"a": spec, "b": spec}, 2, layout).views["b"]
    key, value = split_kv(view, head_size, head_size_v)
    assert key.shape == (2, 3, 4, head_size)
    assert value.shape == (2, 3, 4, head_size_v or head_size)
    key.fill_(1.0)
    value.fill_(2.0)
    assert view[..., :head_size].eq(1).all()
    assert view[..., head_size:].eq(2).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_ids)
@pytest.mark.parametrize("name", PER_TOKEN_HEAD)
@pytest.mark.parametrize(
    ("head_size", "head_size_v", "offset", "content"),
    [(64, None, 128, 144), (8, None, 16, 32), (13, 6, 20, 32), (4, 4, 8, 16), (5, 1, 8, 16)],
)
def test_scales_stand_behind_the_values_of_their_row(
    head_size: int,
    head_size_v: int | None,
    offset: int,
    content: int,
    name: str,
    layout: KVCacheLayout,
) -> None:
    spec = spec_of(name, head_size=head_size, head_size_v=head_size_v)
    assert spec.content_size == content
    view = allocate({"a": spec, "b": spec}, 2, layout).views["a"]
    k_scale, v_scale = per_token_head_scales(view, head_size, head_size_v)
    assert (k_scale.dtype, k_scale.shape) == (torch.float32, (2, 3, 4))
    numbers = torch.arange(24.0).view(2, 3, 4) + 0.5
    k_scale.copy_(numbers)
    v_scale.copy_(-numbers)
    row = view[1, 2, 3].view(torch.uint8)
    assert row[offset : offset + 8].view(torch.float32).tolist() == [23.5, -23.5]
    assert not row[:offset].any()
    assert not row[offset + 8 :].any()
    again = per_token_head_scales(view, head_size, head_size_v)
    assert torch.equal(again[0], numbers)
    assert torch.equal(again[1], -numbers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 8), "kv_cache: got NoneType"),
        ((torch.zeros(2, 1, 4, 16), 9), r"kv_cache.shape\[-1\]: got 16; allowed: at least 18"),
        ((torch.zeros(2, 1, 4, 16), -1), "head_size: got -1"),
        ((torch.zeros(2, 1, 4, 16), 8, 0), "head_size_v: got 0"),
    ],
)
def test_rows_that_are_shorter_than_their_heads_are_not_split(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split_kv(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_c_normed": None}, "kv_c_normed: got NoneType"),
        ({"kv_c_normed": torch.zeros(2, 4).int()}, "kv_c_normed.dtype: got"),
        ({"k_pe": None}, "k_pe: got NoneType"),
        ({"slot_mapping": None}, "slot_mapping: got NoneType"),
        ({"slot_mapping": torch.tensor([0, 8])}, "slot_mapping: got 8; allowed: below 8"),
        ({"kv_cache_dtype": "fp8", "k_scale": None}, "k_scale: got NoneType"),
    ],
    ids=str,
)
def test_a_latent_write_names_what_does_not_fit_and_writes_nothing(
    changes: dict[str, Any], message: str
) -> None:
    fp8 = changes.get("kv_cache_dtype") == "fp8"
    cache = torch.zeros(2, 1, 4, 6, dtype=torch.float8_e4m3fn if fp8 else torch.float32)
    arguments: dict[str, Any] = {
        "kv_c_normed": torch.ones(2, 4),
        "k_pe": torch.ones(2, 2),
        "kv_cache": cache,
        "slot_mapping": torch.tensor([0, 1]),
        "kv_cache_dtype": "auto",
        "k_scale": torch.ones(1),
    }
    with pytest.raises(ValueError, match=message):
        write_mla_cache(**arguments | changes)
    assert not cache.float().any()


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(2, 1, 4, 16, dtype=torch.int8), r"kv_cache.shape\[-1\]: got 16; .* least 24"),
        (torch.zeros(2, 1, 4, 26, dtype=torch.int8), r"kv_cache.stride\(\): got .*multiples of 4"),
        (torch.zeros(2, 1, 4, 36, dtype=torch.int8)[..., 2:30], "kv_cache"),
        (torch.zeros(2, 1, 4, 32), "kv_cache.dtype: got torch.float32"),
    ],
    ids=["too short", "rows not aligned", "begins between", "wide dtype"],
)
def test_rows_that_cannot_hold_scales_are_refused(cache: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        per_token_head_scales(cache, 8)


@pytest.mark.parametrize("model_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "float32", "fp8_e5m2"])
def test_a_latent_row_is_stored_in_the_dtype_of_the_cache(
    model_dtype: torch.dtype, cache_dtype: str
) -> None:
    storage = cache_dtype_handler(cache_dtype).resolve_storage_dtype(model_dtype)
    cache = torch.zeros(2, 1, 4, 6, dtype=storage)
    latent = torch.tensor([[1.0, 2.0, -3.0, 4.0]] * 2, dtype=model_dtype)  # exact in all of them
    rope = torch.tensor([[0.5, -0.25]] * 2, dtype=model_dtype)
    write_mla_cache(latent, rope, cache, torch.tensor([5, -1]), cache_dtype, torch.ones(()))
    assert cache[1, 0, 1].float().tolist() == [1.0, 2.0, -3.0, 4.0, 0.5, -0.25]
    assert int(torch.count_nonzero(cache.float())) == 6
