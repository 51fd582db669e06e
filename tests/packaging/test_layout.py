"""The three folders of the checkout: what is packaged, and who imports whom."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"dsv4_compile": "dsv4_compile"} | {
    name: f"dsv4_compile.{name}" for name in ("benchmarks", "examples", "kernels", "passes")
}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def packages(folder: str) -> Iterator[str]:
    """Every folder under `folder` that holds Python files, by the name it is installed under."""
    for parent in {path.parent for path in sources(folder)}:
        yield ".".join([FOLDERS[folder], *parent.relative_to(ROOT / folder).parts])


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that the file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_folder_with_code_is_packaged() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(name for folder in FOLDERS for name in packages(folder))


@pytest.mark.parametrize("folder", ["kernels", "passes"])
def test_folder_is_a_namespace_portion_at_its_top_and_packages_below(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
    for parent in {path.parent for path in sources(folder)} - {ROOT / folder}:
        assert (parent / "__init__.py").exists(), f"{parent.relative_to(ROOT)} has no __init__.py"


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("kernels", ("dsv4_compile.kernels",)),
        ("passes", ("dsv4_compile.kernels", "dsv4_compile.passes")),
        ("dsv4_compile", ("dsv4_compile",)),
    ],
)
def test_folder_imports_only_what_lies_below_it(folder: str, allowed: tuple[str, ...]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(folder)
        for line, name in imported(path)
        if name.partition(".")[0] in FOLDERS and not any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)
    ]
    assert not wrong, "\n".join(wrong)
