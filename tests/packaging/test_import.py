"""What `import dsv4_compile` brings into a process, and what it leaves alone, asked in fresh interpreters."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("triton", "tilelang", "vllm", "transformers", "typer", "click", "rich")


def answer(code: str, cwd: Path) -> object:
    """Run `code` in a new interpreter in the folder `cwd`; what it prints last is one JSON value, returned here."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_brings_no_heavy_package_beyond_what_torch_brings(tmp_path: Path) -> None:
    code = f"""
import json, sys
import torch, torch._dynamo
heavy = lambda: {{name for name in sys.modules if name.partition(".")[0] in {HEAVY!r}}}
before = heavy()
import dsv4_compile
print(json.dumps(sorted(heavy() - before)))
"""
    assert answer(code, tmp_path) == []


def test_import_alone_brings_no_triton_when_torch_brings_none(tmp_path: Path) -> None:
    code = """
import json, sys
import {}
print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] == "triton")))
"""
    with_torch = answer(code.format("torch"), tmp_path)
    with_us = answer(code.format("dsv4_compile"), tmp_path)
    assert with_us == with_torch


@pytest.mark.parametrize("at_root", [True, False], ids=["in the checkout", "elsewhere"])
def test_folders_are_importable_under_our_name_only(at_root: bool, tmp_path: Path) -> None:
    code = """
import importlib.util, json
import dsv4_compile.kernels.mhc, dsv4_compile.passes
from dsv4_compile import kernels, passes
specs = [importlib.util.find_spec(name) for name in ("kernels", "passes")]
print(json.dumps([spec is not None and spec.origin for spec in specs]))
"""
    # At the root each folder is also a namespace package (origin None): Python leaves no choice.
    expected = [None, None] if at_root else [False, False]
    assert answer(code, ROOT if at_root else tmp_path) == expected


def test_other_packages_called_kernels_and_passes_win_in_the_checkout(tmp_path: Path) -> None:
    for name in ("kernels", "passes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("whose = 'theirs'\n")
    code = f"""
import json, sys
sys.path.append({str(tmp_path)!r})
import kernels, passes
import dsv4_compile.kernels.mhc as mhc, dsv4_compile.passes
print(json.dumps([kernels.whose, passes.whose, mhc.__name__]))
"""
    assert answer(code, ROOT) == ["theirs", "theirs", "dsv4_compile.kernels.mhc"]


def test_backend_is_registered_with_dynamo_without_an_import_of_ours(tmp_path: Path) -> None:
    code = """
import json, sys
import torch._dynamo
listed = "dsv4" in torch._dynamo.list_backends()
print(json.dumps([listed, "dsv4_compile" in sys.modules]))
"""
    assert answer(code, tmp_path) == [True, False]


def test_backend_entry_point_loads() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="dsv4")
    assert callable(entry.load())


def test_installed_version_is_the_one_in_the_source() -> None:
    import dsv4_compile

    assert importlib.metadata.version("dsv4_compile") == dsv4_compile.__version__
