"""The class that a plugin's author writes one line of.

This module imports neither torch nor the kit: both come when pytest collects a class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from attnmux.abc.backend import AttentionBackend
    from attnmux.testing.kit import Target

STANDARD_TESTS = (
    "test_conforms",
    "test_known_failures_exist",
    "test_standard_tests_are_whole",
)
"""Tests that every backend runs; a subclass that takes one away fails the last of them."""


class BackendConformance:
    """Every test of the conformance kit, for one backend.

    Write a subclass whose name begins with ``Test``::

        class TestMyBackend(BackendConformance):
            backend = "MY_BACKEND"

    Attributes:
        backend: name of an installed backend, or its class.
        device: where it runs.
        level: "quick" (seconds) or "full" (minutes).
        seed: of every draw; a failure shows the command that repeats it.
        known_failures: scenario → why it fails, with a link. Strict: one that passes is an error,
            and so is a name that does not exist. There is no other way to leave a test out.
    """

    backend: ClassVar[str | type[AttentionBackend]] = ""
    device: ClassVar[str] = "cpu"
    level: ClassVar[str] = "quick"
    seed: ClassVar[int] = 0
    known_failures: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **named: Any) -> None:
        """Refuse a subclass that puts something in the place of a standard test.

        Raises:
            TypeError: it does; a scenario that fails goes into `known_failures`.
        """
        super().__init_subclass__(**named)
        taken = [name for name in STANDARD_TESTS if name in vars(cls)]
        if taken:
            raise TypeError(
                f"{cls.__name__}.{taken[0]}: standard tests are neither removed nor overridden; "
                "what is known to fail goes into known_failures"
            )

    def test_conforms(self, attnmux_scenario: str) -> None:
        """One scenario or behaviour of the kit.

        To repair a failure: run the command that it shows, which runs this scenario alone, and look
        at the first wrong place. What "looks as if" says is a mistake that gives the same numbers.
        """
        import pytest

        from attnmux.testing.outcome import State
        from attnmux.testing.verification import outcome_of

        outcome = outcome_of(target_of(type(self)), attnmux_scenario, self.seed)
        reason = self.known_failures.get(attnmux_scenario)
        if reason is not None and outcome.state is State.FAILED:
            pytest.xfail(f"known failure: {reason}")
        if reason is not None:
            pytest.fail(
                f"{attnmux_scenario} is {outcome.state.value}, but known_failures says that it "
                f"fails ({reason}): take the entry out"
            )
        if outcome.failure is not None:
            pytest.fail(str(outcome.failure), pytrace=False)
        if outcome.state is State.NOT_RUN:
            pytest.skip("; ".join(outcome.reasons))

    def test_known_failures_exist(self) -> None:
        """Each entry of `known_failures` names a scenario and says why.

        To repair a failure: correct the name, or take the entry out.
        """
        import pytest

        from attnmux.testing.verification import scenario_names

        names = scenario_names(target_of(type(self)), self.seed, self.level)
        for name, reason in self.known_failures.items():
            if name not in names:
                pytest.fail(f"known_failures: there is no scenario {name!r} at level {self.level}")
            if not isinstance(reason, str) or not reason.strip():
                pytest.fail(f"known_failures: {name!r} has no reason")

    def test_standard_tests_are_whole(self) -> None:
        """No standard test was taken away or replaced, here or in a class between.

        To repair a failure: remove the override; a scenario that fails goes into `known_failures`.
        """
        import pytest

        for name in STANDARD_TESTS:
            if getattr(type(self), name, None) is not getattr(BackendConformance, name):
                pytest.fail(
                    f"{type(self).__name__}.{name} is not the kit's own: standard tests are "
                    "neither removed nor overridden"
                )


def target_of(cls: type[BackendConformance]) -> Target:
    """Return what a conformance class verifies.

    Raises:
        ValueError: no backend of that name is installed, or it cannot be loaded.
    """
    from attnmux.testing.kit import Target
    from attnmux.testing.verification import installed_target

    if isinstance(cls.backend, str):
        return installed_target(cls.backend, cls.device)
    return Target(cls.backend, cls.device)


def scenarios_of(cls: type[BackendConformance]) -> list[Any]:
    """Return the names that `test_conforms` is run with."""
    from attnmux.testing.verification import scenario_names

    return list(scenario_names(target_of(cls), cls.seed, cls.level))
