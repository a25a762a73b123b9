"""What a plugin says about one backend, without importing it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnmux._contract import is_contract_version

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class BackendInfo:
    """One backend of a plugin.

    Making one never fails: the registry checks it with :meth:`problems`, so that one bad entry is
    reported as such and the other backends of the same plugin stay.

    Attributes:
        name: the name by which the backend is chosen, unique over all installed plugins.
        class_path: ``"package.module:Class"``; imported when the backend is first asked.
        device_types: types of ``torch.device`` it runs on.
        priority: among eligible backends the higher one is chosen; ties go by name.
        summary: one sentence for lists.
        contract: the contract version the backend was written for. The default is the first one
            and stays it: a backend that says nothing never claims a later contract.
        options: a frozen dataclass with a default for each field, or ``"package.module:Class"``
            naming one; None when the backend has no options.
    """

    name: str
    class_path: str
    device_types: tuple[str, ...] = ("cpu",)
    priority: int = 0
    summary: str = ""
    contract: tuple[int, int] = (1, 0)
    options: type | str | None = None

    def problems(self) -> list[str]:
        """What is wrong with the fields, a sentence each; empty when all is well."""
        checks = (
            (
                isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None,
                "name",
                self.name,
                "a letter, then letters, digits, '_', '-' or '.'",
            ),
            (_is_class_path(self.class_path), "class_path", self.class_path, "'module:Class'"),
            (
                isinstance(self.device_types, tuple)
                and len(self.device_types) > 0
                and all(isinstance(d, str) and d.isidentifier() for d in self.device_types),
                "device_types",
                self.device_types,
                "a tuple of device types such as ('cpu',) or ('cuda',)",
            ),
            (
                isinstance(self.priority, int) and not isinstance(self.priority, bool),
                "priority",
                self.priority,
                "an integer",
            ),
            (isinstance(self.summary, str), "summary", self.summary, "a string"),
            (
                is_contract_version(self.contract),
                "contract",
                self.contract,
                "(major, minor), two integers",
            ),
            (
                self.options is None
                or isinstance(self.options, type)
                or _is_class_path(self.options),
                "options",
                self.options,
                "a dataclass, 'module:Class' or None",
            ),
        )
        return [
            f"BackendInfo.{field}: got {got!r}; allowed: {allowed}"
            for good, field, got, allowed in checks
            if not good
        ]


@dataclass(frozen=True)
class PlatformInfo:
    """A device that the core does not know, as the hook ``attnmux_platform`` answers it.

    Attributes:
        device_type: the type of its ``torch.device``.
        name: what users call it.
        capability: ``(major, minor)`` handed to ``supports_compute_capability``.
    """

    device_type: str
    name: str = ""
    capability: tuple[int, int] = (0, 0)


def _is_class_path(value: object) -> bool:
    return isinstance(value, str) and _CLASS_PATH.fullmatch(value) is not None
