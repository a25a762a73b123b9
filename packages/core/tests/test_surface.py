"""The surface of `attnmux.backend` against the snapshot it must keep, attribute by attribute.

What the snapshot names must be here: class, base, decorator, attribute and default, method and its
kind, parameter, its place and default. What is here and not in the snapshot must be in `ADDITIONS`
with the reason. The comparison itself is tried on snapshots that were falsified.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnmux.backend as surface

SNAPSHOT: dict[str, Any] = json.loads(
    Path(__file__).with_name("data").joinpath("surface.json").read_text()
)
CLASSES: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in SNAPSHOT["classes"]}
FUNCTIONS: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in SNAPSHOT["functions"]}

_ASKED = "selection must know of the feature before an impl is made"
ADDITIONS: dict[str, str] = {
    "AttentionBackend.supports_alibi": _ASKED,
    "AttentionBackend.supports_logits_soft_cap": _ASKED,
    "AttentionBackend.supports_rswa": _ASKED,
    "AttentionBackend.supports_per_request_causal": _ASKED,
    "AttentionBackend.supports_lse": _ASKED,
    "AttentionBackend.supports_kv_sharing": _ASKED,
    "AttentionImpl.forward_with_lse": "standard attention returns its log-sum-exp for merges",
    "AttentionImpl.do_kv_cache_update": "the write of a backend whose forward leaves it out",
    "MultipleOf.__repr__": "reasons and reports show block sizes",
}

# Names that the original module imports and its signatures mention: they live here too.
NAMES_BESIDE_THE_SNAPSHOT: dict[str, str] = {
    "T": "type variable of metadata",
    "M": "type variable of builders",
    "AttentionSpec": "customize_spec",
    "CacheDType": "validate_configuration",
    "DeviceCapability": "validate_configuration",
    "KVCacheLayout": "supported_kv_cache_layouts",
    "KVCacheSpec": "builder constructor",
    "KVQuantMode": "kv_quant_mode",
    "QuantKey": "fused_output_quant_supported",
    "get_kv_quant_mode": "kv_quant_mode",
    "kFp8Dynamic64Sym": "fused_output_quant_supported",
    "kFp8Dynamic128Sym": "fused_output_quant_supported",
    "kFp8StaticTensorSym": "fused_output_quant_supported",
    "kNvfp4Dynamic": "fused_output_quant_supported",
    "GroupShape": "part of QuantKey",
    "ScaleDesc": "part of QuantKey",
    "MLAAttentionSpec": "a spec that backends customise",
    "SlidingWindowSpec": "a spec that backends customise",
}

_ANY = inspect.Parameter.POSITIONAL_OR_KEYWORD
_STARS = {"**": inspect.Parameter.VAR_KEYWORD, "*": inspect.Parameter.VAR_POSITIONAL}


def evaluate(expression: str) -> object:
    """A default or base as the snapshot writes it, evaluated among the names of the surface."""
    return eval(expression, {**vars(typing), **vars(surface), "torch": torch, "Enum": enum.Enum})


def base_names(cls: type) -> list[str]:
    """Bases as source text: ``Generic[T]``, not the class that stands for it at run time."""
    names = []
    for base in getattr(cls, "__orig_bases__", cls.__bases__):
        arguments = [str(a.__name__) for a in typing.get_args(base)]
        name = (typing.get_origin(base) or base).__name__
        names.append(f"{name}[{', '.join(arguments)}]" if arguments else name)
    return names


def class_differences(entry: dict[str, Any], cls: type) -> list[str]:
    """Everything in which a class departs from its entry in the snapshot."""
    name = entry["name"]
    found = []
    bases = [base for base in base_names(cls) if base != "object"]
    if bases != entry["bases"]:
        found.append(f"{name}: bases {bases}, not {entry['bases']}")
    if dataclasses.is_dataclass(cls) != ("dataclass" in entry["decorators"]):
        found.append(f"{name}: dataclass or not, unlike {entry['decorators']}")
    if issubclass(cls, enum.Enum):
        members = {member.name: member.value for member in cls}
        wanted = {a["name"]: evaluate(a["default"]) for a in entry["attributes"]}
        if list(members.items()) != list(wanted.items()):
            found.append(f"{name}: members {members}, not {wanted}")
        return found
    if dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls)]
        order = [attribute["name"] for attribute in entry["attributes"]]
        if fields[: len(order)] != order:
            found.append(f"{name}: fields {fields}, not {order}")
    for attribute in entry["attributes"]:
        found += attribute_differences(name, attribute, cls)
    for method in entry["methods"]:
        found += method_differences(name, method, cls)
    return found


def attribute_differences(owner: str, attribute: dict[str, Any], cls: type) -> list[str]:
    name, default = attribute["name"], attribute["default"]
    if name not in inspect.get_annotations(cls):
        return [f"{owner}.{name}: not declared"]
    if default is None:
        return [f"{owner}.{name}: has a default"] if name in cls.__dict__ else []
    if name not in cls.__dict__:
        return [f"{owner}.{name}: no default, not {default}"]
    value, wanted = cls.__dict__[name], evaluate(default)
    return [] if same(value, wanted) else [f"{owner}.{name}: default {value!r}, not {default}"]


def same(value: object, wanted: object) -> bool:
    """Equal and of one type: True is not 1. A string enumeration may stand for its string."""
    return value == wanted and (type(value) is type(wanted) or isinstance(value, str))


def kind_of(member: object) -> str:
    for kind in (classmethod, staticmethod, property):
        if isinstance(member, kind):
            return kind.__name__
    return "method"


def function_of(member: object) -> Callable[..., object]:
    if isinstance(member, property):
        member = member.fget
    function = getattr(member, "__func__", member)
    assert callable(function)
    return function


def method_differences(owner: str, method: dict[str, Any], cls: type) -> list[str]:
    name = f"{owner}.{method['name']}"
    member = cls.__dict__.get(method["name"])
    if member is None:
        return [f"{name}: missing"]
    if method["name"] == "__new__":
        member = function_of(member)  # Python makes __new__ a static method by itself
    found = []
    if kind_of(member) != method["kind"]:
        found.append(f"{name}: {kind_of(member)}, not {method['kind']}")
    if getattr(member, "__isabstractmethod__", False) != method["abstract"]:
        found.append(f"{name}: abstract or not, unlike {method['abstract']}")
    function = function_of(member)
    if hasattr(function, "__deprecated__") != method["deprecated"]:
        found.append(f"{name}: deprecated or not, unlike {method['deprecated']}")
    return found + parameter_differences(name, method["params"], function)


def parameter_differences(
    name: str, wanted: list[dict[str, Any]], function: Callable[..., object]
) -> list[str]:
    parameters = list(inspect.signature(inspect.unwrap(function)).parameters.values())
    stars = {kind: star for star, kind in _STARS.items()}
    names = [stars.get(p.kind, "") + p.name for p in parameters]
    wanted_names = [parameter["name"] for parameter in wanted]
    if names != wanted_names:
        return [f"{name}: parameters {names}, not {wanted_names}"]
    found = []
    for parameter, entry in zip(parameters, wanted, strict=True):
        label = f"{name}({parameter.name})"
        if parameter.kind is not _ANY and parameter.kind not in stars:
            found.append(f"{label}: not by position and by keyword")
        has_default = parameter.default is not inspect.Parameter.empty
        if has_default != (entry["default"] is not None):
            found.append(f"{label}: default or not, unlike {entry['default']}")
        elif has_default and not same(parameter.default, evaluate(entry["default"])):
            found.append(f"{label}: default {parameter.default!r}, not {entry['default']}")
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_as_the_snapshot_says(name: str) -> None:
    assert class_differences(CLASSES[name], getattr(surface, name)) == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_as_the_snapshot_says(name: str) -> None:
    function = getattr(surface, name)
    assert inspect.isfunction(function)
    assert parameter_differences(name, FUNCTIONS[name]["params"], function) == []


def test_the_snapshot_is_whole() -> None:
    methods = sum(len(entry["methods"]) for entry in CLASSES.values())
    attributes = sum(len(entry["attributes"]) for entry in CLASSES.values())
    assert (len(CLASSES), methods, attributes, len(FUNCTIONS)) == (11, 66, 73, 2)


def test_every_name_of_the_surface_is_accounted_for() -> None:
    assert set(surface.__all__) == set(CLASSES) | set(FUNCTIONS) | set(NAMES_BESIDE_THE_SNAPSHOT)
    assert all(hasattr(surface, name) for name in surface.__all__)


def added_members(name: str) -> set[str]:
    """Public members that the snapshot lacks, special methods among them."""
    entry, cls = CLASSES[name], getattr(surface, name)
    known = {member["name"] for member in [*entry["attributes"], *entry["methods"]]}
    # Into these, Python itself writes special methods.
    generated = dataclasses.is_dataclass(cls) or issubclass(cls, (enum.Enum, typing.Protocol))
    public = {
        member
        for member, value in vars(cls).items()
        if not member.startswith("_")
        or (member.startswith("__") and inspect.isfunction(value) and not generated)
    }
    declared = {m for m in inspect.get_annotations(cls) if not m.startswith("_")}
    return {f"{name}.{member}" for member in (public | declared) - known}


def test_additions_are_listed_with_their_reason() -> None:
    found = set().union(*(added_members(name) for name in CLASSES))
    assert found == set(ADDITIONS)


def _mutations() -> dict[str, tuple[str, Callable[[dict[str, Any]], object]]]:
    """Ways to falsify an entry; each must be noticed."""

    def method(entry: dict[str, Any], name: str) -> dict[str, Any]:
        return next(m for m in entry["methods"] if m["name"] == name)

    def attribute(entry: dict[str, Any], name: str) -> dict[str, Any]:
        return next(a for a in entry["attributes"] if a["name"] == name)

    return {
        "base": ("AttentionImpl", lambda e: e["bases"].pop()),
        "decorator": ("CommonAttentionMetadata", lambda e: e["decorators"].clear()),
        "enum value": ("AttentionCGSupport", lambda e: e["attributes"][0].update(default="4")),
        "enum order": ("AttentionCGSupport", lambda e: e["attributes"].reverse()),
        "field order": ("CommonAttentionMetadata", lambda e: e["attributes"].reverse()),
        "attribute gone": (
            "AttentionImplBase",
            lambda e: e["attributes"].append({"name": "gone", "default": None}),
        ),
        "attribute default": (
            "AttentionImplBase",
            lambda e: attribute(e, "supports_dcp").update(default="False"),
        ),
        "default of another type": (
            "AttentionImplBase",
            lambda e: attribute(e, "supports_dcp").update(default="1"),
        ),
        "default wanted": (
            "AttentionImplBase",
            lambda e: attribute(e, "num_heads").update(default="0"),
        ),
        "default unwanted": (
            "AttentionImplBase",
            lambda e: attribute(e, "supports_dcp").update(default=None),
        ),
        "method gone": ("AttentionBackend", lambda e: method(e, "is_ssm").update(name="gone")),
        "kind": ("AttentionBackend", lambda e: method(e, "is_ssm").update(kind="staticmethod")),
        "abstract": ("AttentionImpl", lambda e: method(e, "forward").update(abstract=False)),
        "deprecated": (
            "CommonAttentionMetadata",
            lambda e: method(e, "seq_lens_cpu").update(deprecated=False),
        ),
        "parameter gone": ("AttentionImpl", lambda e: method(e, "forward")["params"].pop()),
        "parameter order": ("AttentionImpl", lambda e: method(e, "forward")["params"].reverse()),
        "parameter default": (
            "AttentionImpl",
            lambda e: method(e, "forward")["params"][-1].update(default="1"),
        ),
        "parameter default unwanted": (
            "AttentionImpl",
            lambda e: method(e, "forward")["params"][-1].update(default=None),
        ),
        "star": ("AttentionImplBase", lambda e: method(e, "__new__")["params"].pop()),
    }


@pytest.mark.parametrize("case", _mutations())
def test_the_comparison_notices_every_kind_of_departure(case: str) -> None:
    name, falsify = _mutations()[case]
    entry = copy.deepcopy(CLASSES[name])
    falsify(entry)
    assert entry != CLASSES[name]
    assert class_differences(entry, getattr(surface, name)) != []
