"""Hooks that are asked of all plugins together: another order, new cache dtypes, a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attnmux.plugins.discovery import PluginRecord, call_hook, hook_failure
from attnmux.plugins.failures import (
    Origin,
    PluginFailure,
    bad_answer_failure,
    error_text,
    safe_repr,
)
from attnmux.plugins.guard import Outcome
from attnmux.plugins.info import BackendInfo, PlatformInfo
from attnmux.settings import Settings


@dataclass(frozen=True)
class RankAnswer:
    """What ``attnmux_rank`` came to.

    Attributes:
        order: names, best first; empty when no plugin gave an order.
        origin: the plugin that gave it.
        failures: what went wrong with the plugins asked before.
    """

    order: tuple[str, ...] = ()
    origin: Origin | None = None
    failures: tuple[PluginFailure, ...] = ()


def ask(
    records: Sequence[PluginRecord], hook: str, settings: Settings, **arguments: object
) -> Iterator[tuple[PluginRecord, Outcome]]:
    """Call ``hook`` of each plugin that has it, one after the other, as the results are wanted.

    Plugins that mark the hook ``tryfirst`` come before, those that mark it ``trylast`` after the
    others; otherwise the order is that of ``records``.
    """
    turns = []
    for record in records:
        if record.manager is None:
            continue
        impls = getattr(record.manager.hook, hook).get_hookimpls()
        if impls:
            place = -1 if impls[-1].tryfirst else int(impls[-1].trylast)
            turns.append((place, record, record.manager))
    for _, record, manager in sorted(turns, key=lambda turn: turn[0]):
        yield record, call_hook(manager, record.origin, hook, settings, **arguments)


def ask_rank(
    records: Sequence[PluginRecord],
    request: object,
    candidates: Sequence[BackendInfo],
    settings: Settings,
) -> RankAnswer:
    """Ask for another order of the eligible candidates; the first usable answer is taken."""
    hook = "attnmux_rank"
    names = {info.name for info in candidates}
    failures: list[PluginFailure] = []
    for record, outcome in ask(
        records, hook, settings, request=request, candidates=tuple(candidates)
    ):
        if not outcome.ok:
            failures.append(hook_failure(outcome, record.origin, hook, settings))
        elif outcome.value is not None:
            problem = _rank_problem(outcome.value, names)
            if problem is None:
                return RankAnswer(tuple(outcome.value), record.origin, tuple(failures))
            failures.append(bad_answer_failure(hook, problem, record.origin))
    return RankAnswer(failures=tuple(failures))


def _rank_problem(answer: object, names: set[str]) -> str | None:
    """An order may leave candidates out (they come last); it may not name others."""
    if not isinstance(answer, list | tuple) or not answer:
        return f"answered {safe_repr(answer)}; allowed: a list of candidates' names, or None"
    strangers = [name for name in answer if not isinstance(name, str) or name not in names]
    if strangers:
        return (
            f"named {safe_repr(strangers[0])}; allowed: the candidates {', '.join(sorted(names))}"
        )
    return None


def ask_platform(
    records: Sequence[PluginRecord], settings: Settings
) -> tuple[PlatformInfo | None, tuple[PluginFailure, ...]]:
    """Ask for a device that the core does not know; the first usable answer is taken."""
    hook = "attnmux_platform"
    failures: list[PluginFailure] = []
    for record, outcome in ask(records, hook, settings):
        if not outcome.ok:
            failures.append(hook_failure(outcome, record.origin, hook, settings))
        elif isinstance(outcome.value, PlatformInfo):
            return outcome.value, tuple(failures)
        elif outcome.value is not None:
            problem = f"answered {safe_repr(outcome.value)}; allowed: PlatformInfo or None"
            failures.append(bad_answer_failure(hook, problem, record.origin))
    return None, tuple(failures)


def with_cache_dtypes(record: PluginRecord, settings: Settings) -> PluginRecord:
    """Register the cache dtypes a plugin brings; what goes wrong becomes a failure of the record.

    Only a plugin that has the hook makes the core import ``attnmux.kv_cache`` (and with it torch).
    """
    hook = "attnmux_kv_cache_dtypes"
    failures: list[PluginFailure] = []
    output = ""
    for _, outcome in ask([record], hook, settings):
        output += outcome.output
        if not outcome.ok:
            failures.append(hook_failure(outcome, record.origin, hook, settings))
            continue
        answer = outcome.value[0] if outcome.value else None
        if not isinstance(answer, list | tuple):
            problem = f"answered {safe_repr(answer)}; allowed: a list of CacheDTypeHandler"
            failures.append(bad_answer_failure(hook, problem, record.origin))
            continue
        failures += _register_handlers(answer, record.origin)
    if not failures and not output:
        return record
    return replace(record, failures=(*record.failures, *failures), output=record.output + output)


def _register_handlers(handlers: Sequence[object], origin: Origin) -> list[PluginFailure]:
    from attnmux.kv_cache import CacheDTypeHandler, register_cache_dtype

    hook = "attnmux_kv_cache_dtypes"
    failures = []
    for handler in handlers:
        if not isinstance(handler, CacheDTypeHandler):
            problem = f"answered {safe_repr(handler)} in its list; allowed: CacheDTypeHandler"
            failures.append(bad_answer_failure(hook, problem, origin))
            continue
        try:
            register_cache_dtype(handler)
        except ValueError as error:
            failures.append(bad_answer_failure(hook, error_text(error), origin))
    return failures
