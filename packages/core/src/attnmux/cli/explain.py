"""``attnmux explain``: which backend serves a layer, or each layer of a model, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attnmux.checks import bad_argument, check_sliding_window
from attnmux.cli.output import clean_stdout, print_json, user_errors
from attnmux.model_config import ModelNeeds, layers_text, model_needs, read_model_config
from attnmux.request import FLAGS, AttentionRequest
from attnmux.selection import SelectionReport
from attnmux.selection import explain as explain_request
from attnmux.table import table_lines, wrapped

_LAYER = "What a layer asks"
_PLACE = "Where it runs"


def explain(
    config: Annotated[
        Path | None,
        typer.Option(help="config.json of a model, or its folder: explains each kind of layer."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Ask for this backend and no other.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the tracebacks behind reasons as well.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Such as cpu or cuda:0.", rich_help_panel=_PLACE)
    ] = "cpu",
    capability: Annotated[
        str | None,
        typer.Option(help="Of a GPU that is not here, such as 9.0.", rich_help_panel=_PLACE),
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Name of a cache dtype.", rich_help_panel=_PLACE)
    ] = "auto",
    block_size: Annotated[
        int, typer.Option(help="Tokens of a cache block.", rich_help_panel=_PLACE)
    ] = 16,
    layout: Annotated[
        str | None, typer.Option(help="Layout of the cache, if fixed.", rich_help_panel=_PLACE)
    ] = None,
    head_size: Annotated[
        int | None, typer.Option(help="Elements of a head.", rich_help_panel=_LAYER)
    ] = None,
    head_size_v: Annotated[
        int | None, typer.Option(help="Elements of a value head.", rich_help_panel=_LAYER)
    ] = None,
    num_heads: Annotated[
        int | None, typer.Option(help="Query heads.", rich_help_panel=_LAYER)
    ] = None,
    num_kv_heads: Annotated[
        int | None, typer.Option(help="KV heads.", rich_help_panel=_LAYER)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of queries; bfloat16, or the model's.", rich_help_panel=_LAYER),
    ] = None,
    attn_type: Annotated[
        str,
        typer.Option(
            help="decoder, encoder, encoder_only, encoder_decoder.", rich_help_panel=_LAYER
        ),
    ] = "decoder",
    sliding_window: Annotated[
        int | None, typer.Option(help="Tokens of a window.", rich_help_panel=_LAYER)
    ] = None,
    soft_cap: Annotated[
        float | None, typer.Option(help="Cap of the scores.", rich_help_panel=_LAYER)
    ] = None,
    sinks: Annotated[
        bool, typer.Option("--sinks", help="Attention sinks.", rich_help_panel=_LAYER)
    ] = False,
    alibi: Annotated[
        bool, typer.Option("--alibi", help="ALiBi slopes.", rich_help_panel=_LAYER)
    ] = False,
    alibi_sqrt: Annotated[
        bool,
        typer.Option(
            "--alibi-sqrt",
            help="ALiBi in its square-root form.",
            rich_help_panel=_LAYER,
        ),
    ] = False,
    mla: Annotated[
        bool, typer.Option("--mla", help="Latent attention.", rich_help_panel=_LAYER)
    ] = False,
    sparse: Annotated[
        bool,
        typer.Option(
            "--sparse",
            help="Sparse latent attention over top-k tokens (with --mla).",
            rich_help_panel=_LAYER,
        ),
    ] = False,
    mm_prefix: Annotated[
        bool, typer.Option("--mm-prefix", help="Multimodal prefix ranges.", rich_help_panel=_LAYER)
    ] = False,
    non_causal: Annotated[
        bool,
        typer.Option("--non-causal", help="Decoder without a causal mask.", rich_help_panel=_LAYER),
    ] = False,
    per_request_causal: Annotated[
        bool,
        typer.Option(
            "--per-request-causal",
            help="Causal or not, request by request.",
            rich_help_panel=_LAYER,
        ),
    ] = False,
    rswa: Annotated[
        bool, typer.Option("--rswa", help="Reference sliding window.", rich_help_panel=_LAYER)
    ] = False,
    lse: Annotated[
        bool, typer.Option("--lse", help="Log-sum-exp out.", rich_help_panel=_LAYER)
    ] = False,
    kv_sharing: Annotated[
        bool,
        typer.Option("--kv-sharing", help="Reads another layer's cache.", rich_help_panel=_LAYER),
    ] = False,
    per_head_scales: Annotated[
        bool,
        typer.Option(
            "--per-head-scales", help="A cache scale for each KV head.", rich_help_panel=_LAYER
        ),
    ] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Bits that do not depend on the batch.",
            rich_help_panel=_LAYER,
        ),
    ] = False,
    dcp: Annotated[
        bool, typer.Option("--dcp", help="Decode context parallelism.", rich_help_panel=_LAYER)
    ] = False,
    pcp: Annotated[
        bool, typer.Option("--pcp", help="Prefill context parallelism.", rich_help_panel=_LAYER)
    ] = False,
    kv_connector: Annotated[
        bool,
        typer.Option(
            "--kv-connector", help="Cache blocks are moved by a connector.", rich_help_panel=_LAYER
        ),
    ] = False,
    adaptive_verification: Annotated[
        bool,
        typer.Option(
            "--adaptive-verification",
            help="Drafts are shortened on the device.",
            rich_help_panel=_LAYER,
        ),
    ] = False,
) -> None:
    """Say which backend serves a layer (by options) or a model (by --config), and why.

    Exit code 1: nothing can serve it. With --config, options add to what the model's layers ask.
    """
    with user_errors():
        check_sliding_window(sliding_window)
        asked: dict[str, Any] = {
            "has_sliding_window": sliding_window is not None,
            "has_logits_soft_cap": _is_cap(soft_cap),
            "has_sink": sinks,
            "use_alibi": alibi or alibi_sqrt,
            "use_alibi_sqrt": alibi_sqrt,
            "use_mla": mla,
            "use_sparse": sparse,
            "use_mm_prefix": mm_prefix,
            "use_non_causal": non_causal,
            "use_per_request_causal": per_request_causal,
            "use_rswa": rswa,
            "needs_lse": lse,
            "use_kv_sharing": kv_sharing,
            "use_per_head_quant_scales": per_head_scales,
            "use_batch_invariant": batch_invariant,
            "use_dcp": dcp,
            "use_pcp": pcp,
            "use_kv_connector": kv_connector,
            "use_adaptive_verification": adaptive_verification,
        }
        assert set(asked) == set(FLAGS), "every flag of a request has an option"
        place: dict[str, Any] = {"device": device, "device_capability": _capability(capability)}
        # The request brings the name of a layout to the layout.
        fixed: dict[str, Any] = {} if layout is None else {"kv_cache_layout": layout}
        if config is not None:
            _refuse_with_config(head_size, head_size_v, num_heads, num_kv_heads, attn_type)
            needs = model_needs(
                read_model_config(config),
                dtype=_dtype(dtype),
                kv_cache_dtype=kv_cache_dtype,
                block_size=block_size,
                **place,
            )
            more = {name: True for name, value in asked.items() if value} | fixed
            _explain_model(_with_more(needs, more), backend, as_json, traceback)
            return
        if head_size is None:
            raise ValueError("nothing was asked: give --head-size N, or --config PATH of a model")
        request = AttentionRequest(
            head_size=head_size,
            dtype=_dtype(dtype) or torch.bfloat16,
            head_size_v=head_size_v,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            kv_cache_dtype=None if attn_type in ("encoder", "encoder_only") else kv_cache_dtype,
            block_size=None if attn_type in ("encoder", "encoder_only") else block_size,
            attn_type=attn_type,
            **fixed,
            **place,
            **asked,
        )
        _explain_layer(request, backend, as_json, traceback)


def _explain_layer(
    request: AttentionRequest, backend: str | None, as_json: bool, traceback: bool
) -> None:
    with clean_stdout():
        report = explain_request(request, backend)
    if as_json:
        print_json(report.to_dict())
    else:
        typer.echo(str(report))
        if traceback:
            typer.echo("\n".join(_traceback_lines(report)))
    if report.chosen is None:
        raise typer.Exit(1)


def _explain_model(needs: ModelNeeds, backend: str | None, as_json: bool, traceback: bool) -> None:
    with clean_stdout():
        reports = [explain_request(kind.request, backend) for kind in needs.kinds]
    if as_json:
        print_json(_model_data(needs, reports))
    else:
        typer.echo("\n".join(_model_lines(needs, reports)))
        if traceback:
            for report in reports:
                typer.echo("\n".join(_traceback_lines(report)))
    if any(report.chosen is None for report in reports):
        raise typer.Exit(1)


def _model_data(needs: ModelNeeds, reports: list[SelectionReport]) -> dict[str, object]:
    return {
        "model": needs.name,
        "model_type": needs.model_type,
        "notes": list(needs.notes),
        "kinds": [
            {"name": kind.name, "layers": list(kind.layers), "report": report.to_dict()}
            for kind, report in zip(needs.kinds, reports, strict=True)
        ],
    }


def _model_lines(needs: ModelNeeds, reports: list[SelectionReport]) -> list[str]:
    pairs = list(zip(needs.kinds, reports, strict=True))
    lines = [f"model: {needs.name} ({needs.model_type or 'no model_type'})"]
    for note in needs.notes:
        lines += wrapped(f"note:  {note}", indent=" " * 7)
    rows = [
        (
            (kind.name, str(len(kind.layers)), report.chosen or "NOTHING"),
            [report.decision.removeprefix(f"{report.chosen}, ").removeprefix("nothing: ")],
        )
        for kind, report in pairs
    ]
    lines += ["", *table_lines(("KIND OF LAYER", "LAYERS", "SERVED BY", "WHY"), rows)]
    for kind, report in pairs:
        title = f"{kind.name} (layers {layers_text(kind.layers)})"
        lines += ["", title, "-" * len(title), *str(report).splitlines()]
    return lines


def _traceback_lines(report: SelectionReport) -> list[str]:
    lines = []
    for verdict in report.verdicts:
        for reason in verdict.reasons:
            if reason.traceback:
                lines += ["", f"traceback of {verdict.name}:", reason.traceback.rstrip()]
    return lines or ["", "no reason has a traceback"]


def _with_more(needs: ModelNeeds, more: dict[str, Any]) -> ModelNeeds:
    """Add features of the command line to every kind of layer."""
    kinds = [replace(kind, request=replace(kind.request, **more)) for kind in needs.kinds]
    return replace(needs, kinds=tuple(kinds))


def _refuse_with_config(
    head_size: int | None,
    head_size_v: int | None,
    num_heads: int | None,
    num_kv_heads: int | None,
    attn_type: str,
) -> None:
    given = {
        "--head-size": head_size,
        "--head-size-v": head_size_v,
        "--num-heads": num_heads,
        "--num-kv-heads": num_kv_heads,
        "--attn-type": None if attn_type == "decoder" else attn_type,
    }
    for name, value in given.items():
        if value is not None:
            raise bad_argument(name, value, "nothing beside --config, which says it already")


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise bad_argument("--dtype", repr(name), "bfloat16 | float16 | float32 | another dtype")
    return found


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise bad_argument("--capability", repr(text), "MAJOR.MINOR, such as 9.0")
    return int(major), int(minor)


def _is_cap(cap: float | None) -> bool:
    if cap is not None and cap <= 0:
        raise bad_argument("--soft-cap", cap, "a number above 0")
    return cap is not None
