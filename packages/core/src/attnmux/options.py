"""Options of a backend: declared by its plugin, set by keyword or environment, always checked.

A plugin names a frozen dataclass in ``BackendInfo.options``. Each field can be set by the variable
``ATTNMUX_OPT_<BACKEND>_<FIELD>`` (upper case, other characters than letters and digits as ``_``),
and by keyword, which is the stronger one. Field types: bool, int, float, str, ``Literal``, ``Enum``
and any of them with None.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import os
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from attnmux import settings as env
from attnmux.plugins.info import BackendInfo
from attnmux.plugins.registry import Registry, get_registry

_WORDS_FOR_NONE = ("none", "")


@dataclasses.dataclass(frozen=True)
class OptionField:
    """One option, for people who look for it.

    Attributes:
        name: name of the field, and of the keyword.
        variable: the variable of the environment that sets it.
        allowed: what it takes, in words.
        default: the default as text.
    """

    name: str
    variable: str
    allowed: str
    default: str


def resolve_options(backend: str, /, **overrides: object) -> Any:
    """Make the options of a backend: keyword, then environment, then the field's default.

    Returns:
        An instance of the class the plugin names; None when the backend has no options.

    Raises:
        ValueError: no such backend or field (the closest one is named), or a value that the field
            does not take; the text names the keyword or the variable.
    """
    return resolve_options_in(get_registry(), backend, overrides)


def resolve_options_in(
    registry: Registry,
    backend: str,
    overrides: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
) -> Any:
    """:func:`resolve_options` for a registry and an environment of the caller's choice."""
    info = _info_of(registry, backend)
    texts = _variables_of(
        backend, _backend_names(registry), os.environ if environ is None else environ
    )
    cls = options_class(info)
    if cls is None:
        if overrides:
            raise ValueError(
                f"{next(iter(overrides))}: got an option; allowed: none ({backend} has no options)"
            )
        if texts:
            raise ValueError(
                f"{next(iter(texts.values()))[0]} is set, but {backend} has no options"
            )
        return None
    hints = _hints(cls)
    values: dict[str, object] = {}
    by_folded = {_folded(name): name for name in hints}
    for folded, (variable, text) in texts.items():
        if folded not in by_folded:
            raise _unknown_field(variable, folded, [_folded(name) for name in hints], backend)
        name = by_folded[folded]
        values[name] = _converted(variable, text, hints[name])
    for name, value in overrides.items():
        if name not in hints:
            raise _unknown_field(name, name, list(hints), backend)
        values[name] = _checked(name, value, hints[name])
    return cls(**values)


def checked_options(backend: str, options: object | None) -> object | None:
    """The options for a backend's constructors: those given, or those that the environment sets.

    Returns:
        ``options`` when given; otherwise an instance made from ``ATTNMUX_OPT_<BACKEND>_*``, or
        None when no such variable is set or no installed plugin has this backend.

    Raises:
        ValueError: options of another class than the plugin names, or a variable that cannot be
            read.
    """
    if options is None:
        prefix = variable_prefix(backend)
        if not any(variable.startswith(prefix) for variable in os.environ):
            return None
    registry = get_registry()
    entry = registry.backends().get(backend)
    if entry is None or entry.info is None:
        return options
    if options is None:
        # CPU_MLA's prefix begins the variables of CPU_MLA_SPARSE too.
        if not _variables_of(backend, _backend_names(registry), os.environ):
            return None
        return resolve_options_in(registry, backend, {})  # type: ignore[no-any-return]
    cls = options_class(entry.info)
    if cls is not None and not isinstance(options, cls):
        raise ValueError(
            f"options: got {options!r}; allowed: {cls.__name__}, "
            f"as attnmux.resolve_options({backend!r}, ...) makes it"
        )
    return options


def describe_options(info: BackendInfo) -> tuple[OptionField, ...]:
    """The options of a backend, in the order of their fields; empty when it has none.

    Raises:
        ValueError: the plugin names something that is no dataclass of defaults.
    """
    cls = options_class(info)
    if cls is None:
        return ()
    hints = _hints(cls)
    return tuple(
        OptionField(
            field.name,
            f"{variable_prefix(info.name)}{_folded(field.name)}",
            _allowed(hints[field.name]),
            repr(_default(field)),
        )
        for field in dataclasses.fields(cls)
        if field.init
    )


def variable_prefix(backend: str) -> str:
    """``ATTNMUX_OPT_CPU_ATTN_`` for ``CPU_ATTN``."""
    return f"{env.OPTION_PREFIX}{_folded(backend)}_"


def warn_unknown_option_variables(
    registry: Registry, environ: Mapping[str, str] | None = None
) -> None:
    """Warn once about each ``ATTNMUX_OPT_*`` variable that names no known backend."""
    for variable, sentence in _unowned_variables(registry, environ).items():
        env.warn_once(variable, sentence)


def _unowned_variables(registry: Registry, environ: Mapping[str, str] | None) -> dict[str, str]:
    """``ATTNMUX_OPT_*`` variables that belong to no known backend, each with a sentence."""
    known = _backend_names(registry)
    return {
        variable: f"{variable} is set, but no known backend has options of that name "
        f"(backends: {', '.join(known) or 'none'})"
        for variable in env.attnmux_variables(environ)
        if variable.startswith(env.OPTION_PREFIX) and _owner(variable, known) is None
    }


def _backend_names(registry: Registry) -> list[str]:
    return [entry.name for entry in registry.entries() if entry.info is not None]


def option_problems(registry: Registry) -> list[str]:
    """One sentence for each option in the environment that is misspelt or cannot be read."""
    problems = list(_unowned_variables(registry, None).values())
    usable = [entry for entry in registry.entries() if entry.usable and entry.info is not None]
    for entry in usable:
        try:
            resolve_options_in(registry, entry.name, {})
        except ValueError as error:
            problems.append(str(error))
    return problems


def options_class(info: BackendInfo) -> type[Any] | None:
    """The dataclass of a backend's options, imported when it is given as ``"module:Class"``.

    Raises:
        ValueError: it cannot be imported, is no frozen dataclass, or has a field with no default.
    """
    cls: Any = info.options
    if cls is None:
        return None
    if isinstance(cls, str):
        module, _, name = cls.partition(":")
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"options of {info.name}: {info.options} not found: {error}"
            ) from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"options of {info.name}: got {cls!r}; allowed: a frozen dataclass")
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ValueError(f"options of {info.name}: got {cls.__name__}; allowed: a frozen dataclass")
    for field in dataclasses.fields(cls):
        if field.init and _default(field) is dataclasses.MISSING:
            raise ValueError(
                f"options of {info.name}: {cls.__name__}.{field.name} has no default; "
                "allowed: a default for each field"
            )
    for name, hint in _hints(cls).items():
        if not all(_is_supported(member) for member in _members(hint)):
            raise ValueError(
                f"options of {info.name}: {cls.__name__}.{name} has type {hint}; "
                "allowed: bool, int, float, str, Literal, Enum, and any of them with None"
            )
    return cls


# Which variable belongs to whom ---------------------------------------------------------------


def _info_of(registry: Registry, backend: str) -> BackendInfo:
    known = registry.backends()
    entry = known.get(backend)
    if entry is not None and entry.info is not None:
        return entry.info
    close = difflib.get_close_matches(str(backend), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"backend: got {backend!r}{hint}; allowed: {', '.join(known) or 'none is installed'}"
    )


def _variables_of(
    backend: str, names: list[str], environ: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Variables that set options of this backend: folded field -> (variable, text)."""
    prefix = variable_prefix(backend)
    return {
        variable.removeprefix(prefix): (variable, text)
        for variable, text in env.attnmux_variables(environ).items()
        if variable.startswith(prefix) and _owner(variable, names) == backend
    }


def _owner(variable: str, names: list[str]) -> str | None:
    """The backend with the longest name that fits: ``CPU_MLA_SPARSE`` before ``CPU_MLA``."""
    fitting = [name for name in names if variable.startswith(variable_prefix(name))]
    return max(fitting, key=len, default=None)


def _folded(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def _unknown_field(what: str, name: str, fields: list[str], backend: str) -> ValueError:
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return ValueError(
        f"{what}: {backend} has no option {name!r}; {hint}options: {', '.join(fields) or 'none'}"
    )


# Types ----------------------------------------------------------------------------------------


def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the one type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _is_supported(member: Any) -> bool:
    return (
        member in (bool, int, float, str, type(None))
        or typing.get_origin(member) is Literal
        or (isinstance(member, type) and issubclass(member, enum.Enum))
    )


def _allowed(hint: Any) -> str:
    """The type in words that a user understands."""
    words = []
    for member in _members(hint):
        if member is type(None):
            words.append("None")
        elif typing.get_origin(member) is Literal:
            words += [repr(value) for value in typing.get_args(member)]
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            words += [choice.name for choice in member]
        else:
            words.append(
                {bool: "true or false", int: "an integer", float: "a number"}.get(
                    member, "a string" if member is str else str(member)
                )
            )
    return " | ".join(words)


def _bad(name: str, got: object, hint: Any) -> ValueError:
    return ValueError(f"{name}: got {got!r}; allowed: {_allowed(hint)}")


def _converted(variable: str, text: str, hint: Any) -> object:
    """A value from the environment: the first alternative of the type that can read the text."""
    # None first: for "str | None" the text "none" means None.
    for member in sorted(_members(hint), key=lambda member: member is not type(None)):
        found, value = _read(text.strip(), member)
        if found:
            return value
    raise _bad(variable, text, hint)


def _read(text: str, member: Any) -> tuple[bool, object]:
    if member is type(None):
        return text.lower() in _WORDS_FOR_NONE, None
    if typing.get_origin(member) is Literal:
        for value in typing.get_args(member):
            if text == str(value):
                return True, value
        return False, None
    if isinstance(member, type) and issubclass(member, enum.Enum):
        for choice in member:
            if text in (choice.name, str(choice.value)):
                return True, choice
        return False, None
    if member is bool:
        truth = {"1": True, "true": True, "yes": True, "on": True}
        lies = {"0": False, "false": False, "no": False, "off": False}
        return text.lower() in truth | lies, (truth | lies).get(text.lower())
    if member is str:
        return True, text
    try:
        return True, member(text)  # int or float
    except ValueError:
        return False, None


def _checked(name: str, value: object, hint: Any) -> object:
    """A value given by keyword: it must have the type already (an int may stand for a float)."""
    for member in _members(hint):
        if member is type(None):
            if value is None:
                return value
        elif typing.get_origin(member) is Literal:
            if any(value == v and type(value) is type(v) for v in typing.get_args(member)):
                return value
        elif member is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif isinstance(member, type) and isinstance(value, member):
            if member is int and isinstance(value, bool):
                continue
            return value
    raise _bad(name, value, hint)
