"""The page of `report` in a real browser, where one is installed: it needs no network and finds what is searched."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dsv4_compile.cli.app import app
from tests.spellings import Stack, hf_post, hf_pre

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")

LAPTOP = "1366,768"

PIECES = [
    {
        "name": "piece_0",
        "key": "aa",
        "shared_with": 1,
        "kind": "captured",
        "reason": "between two boundaries",
        "nodes": 90,
    },
    {
        "name": "piece_1",
        "key": "bb",
        "shared_with": 0,
        "kind": "eager",
        "reason": "vllm::attention, model.py:7",
        "nodes": 1,
    },
    {
        "name": "piece_2",
        "key": "aa",
        "shared_with": 1,
        "kind": "captured",
        "reason": "the same as piece_0",
        "nodes": 90,
    },
]

SEARCH = """
<script>
search.value = "sigmoid";
search.dispatchEvent(new Event("input"));
setTimeout(() => {
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  document.title = JSON.stringify({
    hits: [...document.querySelectorAll(".hits")].map(one => one.textContent),
    lines: document.querySelector(".listing pre").textContent,
    rows: [...document.querySelectorAll(".searched tbody tr")].filter(row => !row.hidden).length,
    boxes: [...document.querySelectorAll(".map span")].map(box => [box.className, box.textContent, box.offsetWidth]),
    wide,
  });
}, 500);
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small dump, whose report is given pieces and CUDA graphs."""
    folder = tmp_path_factory.mktemp("dump")
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"compiler": "eager", "dump_dir": str(folder)}
        model = nn.Sequential(Stack(hf_pre, hf_post, layers=1), nn.Linear(64, 8))
        torch.compile(model, backend="dsv4", options=options)(torch.randn(2, 3, 4, 64))
    (path,) = folder.glob("*/report_0.json")
    report = json.loads(path.read_text())
    report["graphs"][0]["pieces"] = PIECES
    report["graphs"][0]["cudagraphs"] = {
        "mode": "piecewise",
        "sizes": [1, 8],
        "replays": 12,
        "bytes": 3_000_000,
        "fallbacks": [{"reason": "a tensor lies elsewhere"}],
    }
    path.write_text(json.dumps(report))
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    return folder / "report.html"


def browse(page: Path, *more: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={LAPTOP}", *more]
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    profile = f"--user-data-dir={page.parent / 'profile'}"
    return subprocess.run(
        [*command, offline, profile, "--enable-logging=stderr", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_browser
def test_the_page_works_in_a_browser_without_a_network(page):
    searching = page.with_name("searching.html")
    searching.write_text(page.read_text().replace("</body>", SEARCH + "</body>"))
    done = browse(searching, "--virtual-time-budget=3000", "--dump-dom")
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stdout[:500] + done.stderr[-2000:]
    seen = json.loads(title[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert not seen["wide"], "the page is wider than the screen of a laptop"
    assert all(re.fullmatch(r", \d+ lines found", hits) for hits in seen["hits"])
    lines = seen["lines"].splitlines()
    assert any("sigmoid" in line for line in lines)
    assert all("sigmoid" in line or line.startswith("    # ---- ") for line in lines)
    assert seen["rows"] == 0
    assert [box[:2] for box in seen["boxes"]] == [["captured", "a"], ["eager", "b"], ["captured", "a"]]
    assert seen["boxes"][0][2] > 5 * seen["boxes"][1][2]
    assert "CONSOLE" not in done.stderr, done.stderr


@needs_browser
def test_searching_for_a_module_finds_all_of_it(page):
    searching = page.with_name("module.html")
    text = page.read_text()
    heading = re.findall(r"# ---- (\S+)", text[: text.index("aten.addmm.default(")])[-1]
    script = SEARCH.replace("sigmoid", f"---- {heading}")
    script = script.replace('document.querySelector(".listing pre")', 'document.querySelectorAll(".listing pre")[1]')
    searching.write_text(text.replace("</body>", script + "</body>"))
    done = browse(searching, "--virtual-time-budget=3000", "--dump-dom")
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    assert "aten.addmm.default(" in title[1] and "sigmoid" not in title[1]


@needs_browser
def test_a_screenshot_of_the_page_is_not_empty(page, tmp_path):
    browse(page, f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_the_page_has_the_map_of_the_pieces_and_what_is_captured(page):
    text = page.read_text()
    assert "Graph 0/0: 3 pieces, 2 distinct; 2 captured, 1 eager" in text
    assert "CUDA graphs: piecewise, 12 replays, sizes 1, 8, 3.0 MB of memory" in text
    assert "not captured: a tensor lies elsewhere" in text and "vllm::attention, model.py:7" in text
