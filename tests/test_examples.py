"""Each example runs as its docstring says, and prints what it is there to show."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsv4_compile

ROOT = Path(__file__).parent.parent


def run(script: str, *arguments: str) -> str:
    """What a script prints."""
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_a_model_in_the_style_of_deepseek_is_recognised() -> None:
    out = run("examples/deepseek_style.py")
    assert out.count("  mhc pre+norm at layers.0") == 1
    assert out.count("  mhc post+pre+norm at ") == 3
    assert out.count("  mhc post at ") == 1
    assert re.search(r"projections at layers.0.attn: \w+ \[wq_a:64, wkv:32\]", out)
    assert re.search(r"projections at layers.1.ffn: \w+ \[w1:256, w3:256\]", out)
    assert "missed" not in out
    difference = re.search(r"largest difference to eager: (\S+) of", out)
    assert difference and float(difference[1]) < 1e-5


def test_an_epsilon_in_a_global_variable_is_a_constant_with_symbolic_shapes_as_well() -> None:
    """`dynamic=True` makes it a graph input, and a formula with unknown constants cannot be recognised."""
    torch.manual_seed(0)
    model = runpy.run_path(str(ROOT / "examples/deepseek_style.py"))["Transformer"]()
    compiled = torch.compile(model, backend="dsv4", dynamic=True, options={"compiler": "eager"})
    for length in (32, 7):
        ids = torch.randint(0, 512, (1, length))
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-5)
    (graph,) = dsv4_compile.report().graphs
    assert graph.dynamic
    assert [site.form for site in graph.mhc] == ["pre", "post_pre", "post_pre", "post_pre", "post"]
    assert not graph.missed


def test_the_report_names_the_site_that_is_not_the_formula_and_where_it_is_written() -> None:
    out = run("examples/read_report.py")
    assert "replaced  layers.0   mhc pre" in out
    assert "replaced  layers.0   mhc post_pre" in out
    assert "together  layers.1.attn wq_a, wkv" in out
    assert re.search(r"missed    layers.1   mhc: .*clamp.*read_report.py:\d+", out)
    assert re.search(r"StrictError: Graph \S+ mhc at layers.1 was left alone: .*clamp", out)


def test_generate_of_a_compiled_hugging_face_model_gives_the_tokens_of_eager() -> None:
    pytest.importorskip("transformers")
    out = run("examples/huggingface.py")
    assert "The same tokens as eager." in out
    assert "The same names in the state_dict." in out
    assert re.search(r"graph 0/0: 1 mhc pre, 1 mhc post_pre, 1 mhc post, 1 mhc head; [1-9] groups of projections", out)


@pytest.mark.slow
def test_the_demo_compares_the_backend_with_eager_and_stock_inductor() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("rich")
    out = run("examples/demo.py", "--quick")
    cells = r"\s*│\s*([\d.]+)\s*│\s*([\d.]+)\s*│\s*(\S+)\s*│\s*(\S+)\s*│"
    for way in ("stock Inductor", 'backend="dsv4"'):
        row = re.search(re.escape(way) + cells, out)
        assert row, out
        assert float(row[3]) < 1e-3
    assert "mhc post+pre+norm at model.layers.0" in out
    assert "  the same tokens" in out


def test_the_walk_through_finds_the_line_that_stops_a_site(tmp_path: Path) -> None:
    script = (ROOT / "examples/walkthrough.py").read_text()
    at = next(i for i, line in enumerate(script.splitlines(), 1) if "flat.abs()" in line)
    dumps = [tmp_path / name for name in ("dump", "mended")]
    environment = os.environ | {"DSV4_OPTIONS": '{"compiler": "eager"}'}
    for dump, arguments in zip(dumps, ([], ["--mend"]), strict=True):
        command = [sys.executable, str(ROOT / "examples/walkthrough.py"), str(dump), *arguments]
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
    explained = tool("explain", dumps[0], "layers.1")
    assert explained.returncode == 1
    assert f"walkthrough.py:{at}" in explained.stdout and "layers.1: mhc left alone, 2 times" in explained.stdout
    documented = (ROOT / "docs/walkthrough.md").read_text()
    assert explained.stdout.splitlines()[1] in documented
    assert tool("explain", dumps[1]).returncode == 0
    assert tool("compare", *dumps).returncode == 0
    assert tool("compare", *reversed(dumps)).returncode == 1


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsv4_compile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
