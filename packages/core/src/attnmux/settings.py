"""Everything attnmux reads from the environment, in one place.

A variable that cannot be read is an error that names it; a variable that starts with ``ATTNMUX_``
and is not known is warned about once, so that a misspelling is never ignored in silence. Nothing
is read when the package is imported: each call sees the environment as it is then.
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "ATTNMUX_"
OPTION_PREFIX = "ATTNMUX_OPT_"

BACKEND = "ATTNMUX_BACKEND"
PLUGINS = "ATTNMUX_PLUGINS"
DISABLE = "ATTNMUX_DISABLE"
PLUGIN_TIMEOUT = "ATTNMUX_PLUGIN_TIMEOUT"
BACKEND_TIMEOUT = "ATTNMUX_BACKEND_TIMEOUT"
TRACE_PLUGINS = "ATTNMUX_TRACE_PLUGINS"

KNOWN_VARIABLES: dict[str, str] = {
    BACKEND: "name of the backend to use for every request (unset or empty: automatic choice)",
    PLUGINS: "comma list of the plugins that may load (unset: all, empty: none)",
    DISABLE: "comma list of plugins, distributions or backends that must not be used",
    PLUGIN_TIMEOUT: "seconds a plugin may take to be imported or to answer a hook (default 10)",
    BACKEND_TIMEOUT: "seconds a backend may take to be imported and asked (default 120)",
    TRACE_PLUGINS: "1 prints each hook call, who answered and what, to stderr",
}
"""Each variable with one sentence; ``ATTNMUX_OPT_<BACKEND>_<FIELD>`` comes on top."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")

_warned: set[str] = set()


class SettingsError(ValueError):
    """A variable of the environment that cannot be read. The text names it and what is allowed."""

    def __init__(self, variable: str, got: str, allowed: str) -> None:
        """Make the sentence: the variable, what it holds, what is allowed."""
        super().__init__(f"{variable}: got {got!r}; allowed: {allowed}")
        self.variable = variable


@dataclass(frozen=True)
class Settings:
    """What the environment says, read and checked.

    Attributes:
        backend: the backend forced by ``ATTNMUX_BACKEND``, or None.
        plugins: names of the plugins that may load, or None for all of them.
        disable: names of plugins, distributions or backends that must not be used.
        plugin_timeout: seconds for the import and for each hook of a plugin.
        backend_timeout: seconds for the import and the probing of one backend.
        trace_plugins: whether hook calls are printed to stderr.
    """

    backend: str | None = None
    plugins: frozenset[str] | None = None
    disable: frozenset[str] = frozenset()
    plugin_timeout: float = 10.0
    backend_timeout: float = 120.0
    trace_plugins: bool = False


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read every variable of ``environ`` (default: ``os.environ``).

    Raises:
        SettingsError: a variable has a value that cannot be read; the text names it.
    """
    env = os.environ if environ is None else environ
    warn_unknown_variables(env)
    plugins = env.get(PLUGINS)
    return Settings(
        backend=env.get(BACKEND, "").strip() or None,
        plugins=None if plugins is None else _names(plugins),
        disable=_names(env.get(DISABLE, "")),
        plugin_timeout=_seconds(env, PLUGIN_TIMEOUT, 10.0),
        backend_timeout=_seconds(env, BACKEND_TIMEOUT, 120.0),
        trace_plugins=_switch(env, TRACE_PLUGINS),
    )


def selection_state() -> tuple[str | None, str | None, str | None]:
    """The raw text of the variables that can change a choice: a cheap key for caches."""
    get = os.environ.get
    return get(BACKEND), get(PLUGINS), get(DISABLE)


def attnmux_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """All variables whose name starts with ``ATTNMUX_``, sorted by name."""
    env = os.environ if environ is None else environ
    return {name: env[name] for name in sorted(env) if name.startswith(PREFIX)}


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """``ATTNMUX_*`` variables that nothing reads, each with the closest known name (or "")."""
    found = {}
    for name in attnmux_variables(environ):
        if name in KNOWN_VARIABLES or name.startswith(OPTION_PREFIX):
            continue
        # Without the prefix, which would make every name look close to every other.
        endings = [known.removeprefix(PREFIX) for known in KNOWN_VARIABLES]
        close = difflib.get_close_matches(name.removeprefix(PREFIX), endings, n=1)
        found[name] = PREFIX + close[0] if close else ""
    return found


def warn_unknown_variables(environ: Mapping[str, str] | None = None) -> None:
    """Warn about each unknown ``ATTNMUX_*`` variable, once in a process."""
    for name, close in unknown_variables(environ).items():
        warn_once(
            name,
            f"{name} is set, but attnmux reads no such variable; "
            + (f"did you mean {close}?" if close else f"known: {', '.join(KNOWN_VARIABLES)}"),
        )


def warn_once(variable: str, text: str) -> None:
    """Warn with ``text`` unless a warning about ``variable`` was given before."""
    if variable in _warned:
        return
    _warned.add(variable)
    warnings.warn(text, UserWarning, stacklevel=3)


def forget_warnings() -> None:
    """Let every variable be warned about again."""
    _warned.clear()


def _names(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def _seconds(env: Mapping[str, str], variable: str, default: float) -> float:
    text = env.get(variable)
    if text is None:
        return default
    allowed = "a number of seconds above 0"
    try:
        seconds = float(text)
    except ValueError:
        raise SettingsError(variable, text, allowed) from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise SettingsError(variable, text, allowed)
    return seconds


def _switch(env: Mapping[str, str], variable: str) -> bool:
    text = env.get(variable, "")
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise SettingsError(variable, text, "1 or 0")
