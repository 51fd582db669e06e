"""The wheel, built from a copy of the checkout: what it holds, and that it works from anywhere."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"dsv4_compile": "dsv4_compile"} | {
    name: f"dsv4_compile/{name}" for name in ("benchmarks", "examples", "kernels", "passes")
}
PACKAGED = {".py", ".cpp", ".cu", ".cuh", ".html", ".svg", ".typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: no `build/` is left in the checkout, and nothing of an earlier one gets into the wheel."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    target = tmp_path_factory.mktemp("wheel")
    pip(["wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(target), str(copy)])
    (built,) = target.glob("*.whl")
    return built


def pip(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_holds_every_source_under_one_top_level_name(wheel: Path) -> None:
    expected = {
        f"{name}/{path.relative_to(ROOT / folder)}"
        for folder, name in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in PACKAGED or path.name == "py.typed"
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "dsv4_compile/py.typed" in expected


def test_wheel_carries_licence_and_entry_point(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = [name for name in archive.namelist() if ".dist-info/" in name]
    texts = {name.rpartition("/")[2]: archive.read(name).decode() for name in metadata}
    assert texts["top_level.txt"].split() == ["dsv4_compile"]
    assert "dsv4 = dsv4_compile.backend:dsv4" in texts["entry_points.txt"]
    assert "dsv4-compile = dsv4_compile.cli.app:main" in texts["entry_points.txt"]
    assert "Apache License" in texts["LICENSE"]


@pytest.mark.parametrize("at_root", [True, False], ids=["in the checkout", "elsewhere"])
def test_installed_wheel_imports(wheel: Path, at_root: bool, tmp_path: Path) -> None:
    """In the checkout its own `dsv4_compile/` comes before the installed one, and brings its own two other folders."""
    site = tmp_path / "site"
    pip(["install", "--no-deps", "--target", str(site), str(wheel)])
    code = f"""
import sys
sys.path.insert(1, {str(site)!r})
import dsv4_compile.kernels.mhc, dsv4_compile.passes
print(dsv4_compile.__file__, dsv4_compile.kernels.mhc.__file__, *dsv4_compile.passes.__path__, sep="\\n")
"""
    cwd = ROOT if at_root else tmp_path
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    source = ROOT if at_root else site
    assert all(Path(line).is_relative_to(source) for line in done.stdout.splitlines()), done.stdout
