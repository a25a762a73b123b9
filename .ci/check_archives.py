"""Check what is inside the built archives: `python .ci/check_archives.py FOLDER`.

Exit status 0 and one line an archive when all is there; otherwise 1, and a line for each fault.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# distribution -> import package, and what its wheel must hold beside the usual
EXPECTED = {
    "attnmux": ("attnmux", ["attnmux/testing/__init__.py", "attnmux/testing/pytest_plugin.py"]),
    "attnmux_cpu": ("attnmux_cpu", ["attnmux_cpu/plugin.py"]),
    "attnmux_flash": ("attnmux_flash", ["attnmux_flash/plugin.py"]),
    "attnmux_mla": ("attnmux_mla", ["attnmux_mla/plugin.py"]),
    "attnmux_transformers": ("attnmux_transformers", ["attnmux_transformers/demo.py"]),
}


def wheel_faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each thing that is missing from, or has no place in, a wheel."""
    distribution, version = path.name.split("-")[:2]
    package, more = EXPECTED[distribution]
    names = zipfile.ZipFile(path).namelist()
    licence = f"{distribution}-{version}.dist-info/licenses/LICENSE"
    for wanted in [f"{package}/__init__.py", f"{package}/py.typed", licence, *more]:
        if wanted not in names:
            yield f"{wanted} is missing"
    for name in names:
        if name.split("/")[0] not in {package, f"{distribution}-{version}.dist-info"}:
            yield f"{name} would land outside {package}/"


def source_faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each thing that is missing from, or has no place in, an sdist."""
    root = path.name.removesuffix(".tar.gz")
    package, _ = EXPECTED[root.rsplit("-", 1)[0]]
    with tarfile.open(path) as archive:
        names = {name.removeprefix(f"{root}/") for name in archive.getnames()}
    for wanted in ["pyproject.toml", "README.md", "LICENSE", f"src/{package}/py.typed"]:
        if wanted not in names:
            yield f"{wanted} is missing"
    if not any(name.startswith("tests/test_") for name in names):
        yield "the package's tests are missing"
    for name in sorted(names):
        if "__pycache__" in name or name.split("/")[0] in {".nox", ".whl", "build", "dist"}:
            yield f"{name} was made by a tool"


def main(folder: Path) -> int:
    """Check every archive in the folder, and that each distribution has both kinds."""
    failed = False
    for distribution in EXPECTED:
        wheels = list(folder.glob(f"{distribution}-*.whl"))
        sources = list(folder.glob(f"{distribution}-*.tar.gz"))
        found = [(path, list(wheel_faults(path))) for path in wheels]
        found += [(path, list(source_faults(path))) for path in sources]
        if len(wheels) != 1 or len(sources) != 1:
            found.append((folder / distribution, ["there must be one wheel and one sdist of it"]))
        for path, faults in found:
            failed = failed or bool(faults)
            print(f"{path.name}: {'; '.join(faults) or 'complete'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
