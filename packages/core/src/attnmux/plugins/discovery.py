"""Find plugins by their entry points and ask each of them, one at a time.

This is a loop of our own over importlib-metadata: one plugin that raises, hangs or answers
nonsense is one record with a failure, and the loop goes on. Each plugin has a pluggy manager of its
own, so that hook implementations are checked by pluggy and no plugin can end another's call.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import pluggy

from attnmux import settings as env
from attnmux._contract import core_serves, is_contract_version
from attnmux.plugins import hookspecs
from attnmux.plugins.failures import (
    FailureKind,
    Origin,
    PluginFailure,
    bad_answer_failure,
    contract_failure,
    error_text,
    frames_of,
    import_failure,
    raised_failure,
    safe_repr,
    timeout_failure,
    traceback_text,
)
from attnmux.plugins.guard import Outcome, call_guarded
from attnmux.plugins.info import BackendInfo

GROUP = "attnmux.backends"
CONTRACT_NAME = "ATTNMUX_CONTRACT"
"""A plugin module may set this to ``(major, minor)``; it is then checked before any hook runs."""

_ENTRY_POINT_VALUE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?")
HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("attnmux_"))


class EntryPoint(Protocol):
    """What discovery reads of an entry point; ``importlib_metadata.EntryPoint`` has it all."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def value(self) -> str: ...  # noqa: D102
    @property
    def dist(self) -> Any: ...  # noqa: D102
    def load(self) -> Any: ...  # noqa: D102


EntryPointSource = Callable[[], Iterable[EntryPoint]]


@dataclass(frozen=True)
class PluginRecord:
    """What is known of one plugin.

    Attributes:
        origin: where it comes from.
        manager: pluggy manager that holds this plugin alone; None when it could not be loaded.
        infos: the backends it brings.
        failures: what is wrong with it.
        output: what it printed while it was loaded and asked.
        disabled_by: the setting that left it out before it was imported, or None.
    """

    origin: Origin
    manager: pluggy.PluginManager | None = None
    infos: tuple[BackendInfo, ...] = ()
    failures: tuple[PluginFailure, ...] = ()
    output: str = ""
    disabled_by: str | None = None

    @property
    def state(self) -> str:
        """``disabled``, ``failed`` (nothing of it can be used), ``problems`` or ``loaded``."""
        if self.disabled_by is not None:
            return "disabled"
        if self.manager is None:
            return "failed"
        return "problems" if self.failures else "loaded"


def installed_entry_points() -> Iterable[EntryPoint]:
    """Entry points of the group ``attnmux.backends`` of every installed distribution."""
    import importlib_metadata

    found: Iterable[EntryPoint] = importlib_metadata.entry_points(group=GROUP)
    return found


def origin_of(entry_point: EntryPoint) -> Origin:
    """Where an entry point comes from; damaged metadata leaves fields empty."""
    value = str(entry_point.value)
    distribution, version = "", ""
    try:
        if entry_point.dist is not None:
            distribution = str(entry_point.dist.metadata["Name"] or "")
            version = str(entry_point.dist.version or "")
    except Exception as error:
        # Metadata without a name or version: the plugin may still work, so it is only marked.
        version = f"(metadata unreadable: {error_text(error)})"
    return Origin(str(entry_point.name), value.partition(":")[0].strip(), distribution, version)


def same_distribution(left: str, right: str) -> bool:
    """Whether two distribution names are the same by the packaging rules (case, ``-``, ``_``)."""
    return _normal(left) == _normal(right)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def named_by(names: Iterable[str], origin: Origin) -> bool:
    """Whether a list from the environment names this plugin, by entry point or distribution."""
    wanted = {_normal(name) for name in names}
    return _normal(origin.entry_point) in wanted or (
        origin.distribution != "" and _normal(origin.distribution) in wanted
    )


def left_out_by(origin: Origin, settings: env.Settings) -> str | None:
    """The setting that leaves this plugin out, or None."""
    if named_by(settings.disable, origin):
        return env.DISABLE
    if settings.plugins is not None and not named_by(settings.plugins, origin):
        return env.PLUGINS
    return None


def load_plugin(entry_point: EntryPoint, origin: Origin, settings: env.Settings) -> PluginRecord:
    """Import one plugin, check its hooks and ask for its backends. Never raises.

    (``KeyboardInterrupt`` excepted: it is the user's.)
    """
    what = f"plugin module {origin.module}"
    if not _ENTRY_POINT_VALUE.fullmatch(str(entry_point.value).strip()):
        failure = PluginFailure(
            FailureKind.BAD_ENTRY_POINT,
            f"the entry point {origin.entry_point!r} names {str(entry_point.value)!r}, which is "
            "no module",
            f"report it to the authors of {origin.label}; until then {origin.off_switch}",
            origin,
        )
        return PluginRecord(origin, failures=(failure,))
    outcome = call_guarded(entry_point.load, settings.plugin_timeout)
    if not outcome.ok:
        failure = _import_outcome_failure(outcome, origin, what, settings)
        return PluginRecord(origin, failures=(failure,), output=outcome.output)
    stated = _stated_contract_failure(outcome.value, origin)
    if stated is not None:
        return PluginRecord(origin, failures=(stated,), output=outcome.output)
    return _ask_plugin(outcome.value, origin, settings, outcome.output)


def _import_outcome_failure(
    outcome: Outcome, origin: Origin, what: str, settings: env.Settings
) -> PluginFailure:
    if outcome.error is None:
        return timeout_failure(settings.plugin_timeout, origin, what, env.PLUGIN_TIMEOUT)
    for names in frames_of(outcome.error):
        # The module may have stated its contract before it failed: that explains the failure best.
        needed = names.get(CONTRACT_NAME)
        if names.get("__name__") == origin.module and _wrong_contract(needed):
            assert isinstance(needed, tuple)
            failure = contract_failure(needed, origin)
            return PluginFailure(
                failure.kind,
                f"{failure.message} (its import ends with {error_text(outcome.error)})",
                failure.way_out,
                origin,
                traceback=traceback_text(outcome.error),
            )
    return import_failure(outcome.error, origin, what)


def _wrong_contract(needed: object) -> bool:
    return is_contract_version(needed) and not core_serves(needed)  # type: ignore[arg-type]


def _stated_contract_failure(plugin: object, origin: Origin) -> PluginFailure | None:
    needed = getattr(plugin, "__dict__", {}).get(CONTRACT_NAME)
    if needed is None:
        return None
    if not is_contract_version(needed):
        problem = f"got {safe_repr(needed)}; allowed: (major, minor), two integers"
        return bad_answer_failure(CONTRACT_NAME, problem, origin)
    return contract_failure(needed, origin) if _wrong_contract(needed) else None


def _ask_plugin(
    plugin: object, origin: Origin, settings: env.Settings, printed: str
) -> PluginRecord:
    registered = call_guarded(lambda: _own_manager(plugin, origin), settings.plugin_timeout)
    output = printed + registered.output
    if not registered.ok:
        failure = _bad_hook_failure(registered, origin, settings)
        return PluginRecord(origin, failures=(failure,), output=output)
    manager, unknown = registered.value
    failures = [_unknown_hook_failure(name, origin) for name in unknown]
    infos: tuple[BackendInfo, ...] = ()
    if manager.hook.attnmux_backends.get_hookimpls():
        answer = call_hook(manager, origin, "attnmux_backends", settings)
        output += answer.output
        infos, problems = _checked_infos(answer, origin, settings)
        failures += problems
    return PluginRecord(origin, manager, infos, tuple(failures), output)


def _own_manager(plugin: object, origin: Origin) -> tuple[pluggy.PluginManager, tuple[str, ...]]:
    """Register the plugin with a manager of its own; also names the hooks that do not exist."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=origin.entry_point)
    unknown = tuple(
        name
        for name, caller in vars(manager.hook).items()
        if isinstance(caller, pluggy.HookCaller)
        and not caller.has_spec()
        and any(not impl.optionalhook for impl in caller.get_hookimpls())
    )
    if not manager.get_hookcallers(plugin):
        raise pluggy.PluginValidationError(
            plugin,
            "it implements no hook (mark functions with attnmux.plugins.hookimpl); "
            f"hooks: {', '.join(HOOKS)}",
        )
    return manager, unknown


def _bad_hook_failure(outcome: Outcome, origin: Origin, settings: env.Settings) -> PluginFailure:
    what = f"reading the hooks of {origin.module}"
    if outcome.error is None:
        return timeout_failure(settings.plugin_timeout, origin, what, env.PLUGIN_TIMEOUT)
    if not isinstance(outcome.error, pluggy.PluginValidationError):
        return raised_failure(outcome.error, origin, what)
    # pluggy's text names the plugin, the hook, the definition found and what is wrong with it.
    text = " ".join(str(outcome.error).split())
    return PluginFailure(
        FailureKind.BAD_HOOK,
        f"the hooks of {origin.module} cannot be used: {text}",
        f"report it to the authors of {origin.label}; until then {origin.off_switch}",
        origin,
        traceback=traceback_text(outcome.error),
    )


def _unknown_hook_failure(hook: str, origin: Origin) -> PluginFailure:
    close = difflib.get_close_matches(hook, HOOKS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"hooks: {', '.join(HOOKS)}"
    return PluginFailure(
        FailureKind.UNKNOWN_HOOK,
        f"plugin {origin.entry_point} implements the hook {hook}, which does not exist; {hint}",
        f"report it to the authors of {origin.label}, or upgrade attnmux if the hook is a newer "
        "one; the plugin's other hooks are used",
        origin,
    )


def call_hook(
    manager: pluggy.PluginManager,
    origin: Origin,
    hook: str,
    settings: env.Settings,
    **arguments: object,
) -> Outcome:
    """Call one hook of one plugin under the time limit; prints the call when tracing is on."""
    caller = getattr(manager.hook, hook)
    outcome = call_guarded(lambda: caller(**arguments), settings.plugin_timeout)
    if settings.trace_plugins:
        _trace(hook, origin, arguments, outcome)
    return outcome


def _trace(hook: str, origin: Origin, arguments: dict[str, object], outcome: Outcome) -> None:
    given = ", ".join(f"{name}={safe_repr(value)}" for name, value in arguments.items())
    if outcome.timed_out:
        result = "no answer in time"
    elif outcome.error is not None:
        result = f"raised {error_text(outcome.error)}"
    else:
        result = safe_repr(outcome.value, 400)
    print(
        f"attnmux trace: {hook}({given})\n"
        f"  implemented by {origin.entry_point} ({origin.module}, {origin.label})\n"
        f"  result: {result}",
        file=sys.stderr,
    )


def hook_failure(
    outcome: Outcome, origin: Origin, hook: str, settings: env.Settings
) -> PluginFailure:
    """The failure of a hook call that raised or did not answer."""
    if outcome.error is None:
        return timeout_failure(settings.plugin_timeout, origin, f"hook {hook}", env.PLUGIN_TIMEOUT)
    return raised_failure(outcome.error, origin, f"hook {hook}")


def _checked_infos(
    outcome: Outcome, origin: Origin, settings: env.Settings
) -> tuple[tuple[BackendInfo, ...], list[PluginFailure]]:
    hook = "attnmux_backends"
    if not outcome.ok:
        return (), [hook_failure(outcome, origin, hook, settings)]
    # A plugin has one implementation of a hook; pluggy leaves out an answer of None.
    answer = outcome.value[0] if outcome.value else None
    if not isinstance(answer, list | tuple):
        problem = f"answered {safe_repr(answer)}; allowed: a list of BackendInfo"
        return (), [bad_answer_failure(hook, problem, origin)]
    infos: list[BackendInfo] = []
    failures: list[PluginFailure] = []
    for item in answer:
        if not isinstance(item, BackendInfo):
            problem = f"answered {safe_repr(item)} in its list; allowed: BackendInfo"
            failures.append(bad_answer_failure(hook, problem, origin))
        elif problems := _problems_of(item):
            name = item.name if isinstance(item.name, str) else None
            failures.append(bad_answer_failure(hook, "; ".join(problems), origin, name))
        elif item not in infos:
            infos.append(item)
    return tuple(infos), failures


def _problems_of(info: BackendInfo) -> list[str]:
    try:
        return info.problems()
    except Exception as error:
        # Fields may be objects whose own methods raise.
        return [f"BackendInfo cannot be read: {error_text(error)}"]
