from __future__ import annotations

import re
import warnings

import pytest

from attnmux import settings
from attnmux.settings import Settings, SettingsError, read_settings


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Settings()),
        ({"ATTNMUX_BACKEND": " CPU_ATTN "}, Settings(backend="CPU_ATTN")),
        ({"ATTNMUX_BACKEND": ""}, Settings(backend=None)),
        ({"ATTNMUX_PLUGINS": ""}, Settings(plugins=frozenset())),  # set and empty: no plugin
        ({"ATTNMUX_PLUGINS": "cpu, flash,"}, Settings(plugins=frozenset({"cpu", "flash"}))),
        ({"ATTNMUX_DISABLE": "flash"}, Settings(disable=frozenset({"flash"}))),
        ({"ATTNMUX_PLUGIN_TIMEOUT": "2.5"}, Settings(plugin_timeout=2.5)),
        ({"ATTNMUX_BACKEND_TIMEOUT": "7"}, Settings(backend_timeout=7.0)),
        ({"ATTNMUX_TRACE_PLUGINS": "1"}, Settings(trace_plugins=True)),
        ({"ATTNMUX_TRACE_PLUGINS": "off"}, Settings(trace_plugins=False)),
        ({"OTHER": "x", "ATTNMUX_OPT_CPU_ATTN_X": "1"}, Settings()),
    ],
    ids=lambda value: ",".join(value) or "empty" if isinstance(value, dict) else "",
)
def test_each_variable_is_read(environ: dict[str, str], expected: Settings) -> None:
    assert read_settings(environ) == expected


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("ATTNMUX_PLUGIN_TIMEOUT", "soon", "a number of seconds above 0"),
        ("ATTNMUX_PLUGIN_TIMEOUT", "0", "a number of seconds above 0"),
        ("ATTNMUX_PLUGIN_TIMEOUT", "nan", "a number of seconds above 0"),
        ("ATTNMUX_BACKEND_TIMEOUT", "-1", "a number of seconds above 0"),
        ("ATTNMUX_BACKEND_TIMEOUT", "inf", "a number of seconds above 0"),
        ("ATTNMUX_TRACE_PLUGINS", "maybe", "1 or 0"),
    ],
)
def test_an_unreadable_variable_is_an_error_that_names_it(
    variable: str, text: str, allowed: str
) -> None:
    with pytest.raises(
        SettingsError, match=re.escape(f"{variable}: got {text!r}; allowed: {allowed}")
    ):
        read_settings({variable: text})


def test_an_unknown_variable_is_warned_about_once_with_the_closest_name() -> None:
    environ = {"ATTNMUX_BACKENDS": "CPU_ATTN"}
    with pytest.warns(UserWarning, match=r"ATTNMUX_BACKENDS .* did you mean ATTNMUX_BACKEND\?"):
        read_settings(environ)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_settings(environ)


def test_an_unknown_variable_close_to_none_lists_all() -> None:
    with pytest.warns(UserWarning, match="ATTNMUX_XYZZY.*known: ATTNMUX_BACKEND, ATTNMUX_PLUGINS"):
        read_settings({"ATTNMUX_XYZZY": "1"})
    with pytest.warns(UserWarning, match="ATTNMUX_FOO.*known: "):  # the prefix alone is not close
        read_settings({"ATTNMUX_FOO": "1"})


def test_the_cache_key_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings.selection_state()
    monkeypatch.setenv("ATTNMUX_DISABLE", "flash")
    assert settings.selection_state() != before
