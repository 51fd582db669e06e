"""The commands that read a dump, on one of a real small DeepSeek-V4 with a site that is broken on purpose."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from dsv4_compile.cli.app import app
from dsv4_compile.cli.diff import compared
from dsv4_compile.cli.streams import _fork
from dsv4_compile.dump.reader import read
from dsv4_compile.dump.schema import SCHEMA, NodeRecord
from dsv4_compile.passes.sites import LinearInfo, ProjectionGroup
from tests.models import CSA, SLIDING, deepseek

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m[red]"
DUMP_COMMANDS = ("show", "diff", "explain", "streams", "pieces", "report")


class Branches(nn.Module):
    """Two linears of one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def compile_into(folder: Path, model: nn.Module, *inputs: torch.Tensor, **options: object) -> None:
    torch._dynamo.reset()
    chosen = {"compiler": "eager", "projections": "streams", "dump_dir": str(folder), **options}
    with torch.no_grad():
        torch.compile(model, backend="dsv4", options=chosen)(*inputs)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump in which all is matched."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("good")
    compile_into(folder, deepseek((SLIDING, CSA)), torch.randint(0, 128, (1, 16)))
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, but that the second layer's hyper-connection doubles its logits' scale in another way."""
    pytest.importorskip("transformers")
    model = deepseek((SLIDING, CSA))
    module = model.model.layers[1].attn_hc
    forward = module.input_norm.forward
    module.input_norm.forward = lambda x: forward(x).tanh()
    folder = tmp_path_factory.mktemp("broken")
    compile_into(folder, model, torch.randint(0, 128, (1, 16)))
    return folder


# ---------------------------------------------------------------------------------------------------------------- show


def test_show_lists_the_graphs(good):
    done = run("show", good)
    assert done.exit_code == 0, done.output
    assert re.search(r"0/0 +compiled +(\d+ -> ){3}\d+ +static +6 ", done.stdout)


def test_show_of_a_graph_lists_stages_and_operators(good):
    done = run("show", good, "0/0")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in ("dynamo", "before", "mhc", "projections", "aten.mm.default"))
    assert re.search(r"dsv4.mhc_post_pre.default +3 +3", done.stdout)


def test_show_of_a_pass_prints_the_graph(good):
    done = run("show", good, "--pass", "mhc")
    assert done.exit_code == 0
    assert done.stdout == read(good).graphs[0].listing("mhc") + "\n" * (not done.stdout.endswith("\n"))


def test_show_of_a_module_prints_its_part(good):
    done = run("show", good, "--pass", "before", "--module", "model.layers.1.self_attn")
    assert set(re.findall(r"# ---- (\S+)", done.stdout)) and "def forward" in done.stdout
    assert all(path.startswith("model.layers.1.self_attn") for path in re.findall(r"# ---- (\S+)", done.stdout))


def test_the_data_of_show(good):
    assert json.loads(run("show", good, "--json").stdout)["graphs"][0]["mhc"] == 6
    assert {s["name"] for s in json.loads(run("show", good, "0/0", "--json").stdout)["stages"]} > {"before", "mhc"}
    nodes = json.loads(run("show", good, "--pass", "mhc", "--json").stdout)
    assert any(node["target"] == "dsv4.mhc_pre.default" for node in nodes)


# ---------------------------------------------------------------------------------------------------------------- diff


def test_diff_counts_operators_and_names_nodes(good):
    done = run("diff", good)
    assert done.exit_code == 0
    assert re.search(r"dsv4.mhc_pre.default +0 +1 +\+1", done.stdout)
    assert re.search(r"^  \+ mhc_pre_default = dsv4.mhc_pre.default\(", done.stdout, re.MULTILINE)
    assert re.search(r"^  - \w+ = aten.mm.default\(", done.stdout, re.MULTILINE)


def test_diff_of_one_pass_has_its_work_only(good):
    data = json.loads(run("diff", good, "--pass", "projections", "--json").stdout)
    assert (data["before"], data["after"]) == ("mhc", "projections")
    assert "dsv4.parallel_linear.default" in data["ops"] and "dsv4.mhc_pre.default" not in data["ops"]


def test_diff_tells_moved_from_changed():
    def node(name: str, *args: str) -> NodeRecord:
        return NodeRecord(name, "call_function", f"aten.{name}", args)

    a, b, c, d = node("a"), node("b"), node("c"), node("d", "a")
    diff = compared([a, b, c, d], [b, c, a, node("d", "b"), node("e")], ("x", "y"), "")
    assert [n.name for n in diff.moved] == ["a"]
    assert [new.name for _, new in diff.changed] == ["d"]
    assert [n.name for n in diff.added] == ["e"] and not diff.removed
    assert diff.ops == {"aten.e": (0, 1)}


# ------------------------------------------------------------------------------------------------------------- explain


def test_explain_says_how_every_site_was_matched(good):
    done = run("explain", good)
    assert done.exit_code == 0, done.output
    assert re.search(r"model.layers.0.attn_hc +mhc pre\+norm +replaced", done.stdout)
    assert re.search(r"modeling_deepseek_v4.py:\d+", done.stdout)


def test_explain_names_what_stopped_a_site_and_the_users_line(broken):
    done = run("explain", broken, "model.layers.1.attn_hc")
    assert done.exit_code == 1
    assert "model.layers.1.attn_hc: mhc left alone" in done.stdout
    assert re.search(r"because: .+", done.stdout)
    assert re.search(r"source: /.*modeling_deepseek_v4.py:\d+", done.stdout)
    (finding,) = json.loads(run("explain", broken, "model.layers.1.attn_hc", "--json").stdout)
    assert finding["outcome"] == "left alone" and finding["graphs"] == ["0/0"]


def test_explain_finds_a_linear_by_its_own_path(good):
    done = run("explain", good, "model.layers.0.self_attn.kv_proj")
    assert done.exit_code == 0
    assert "model.layers.0.self_attn: projections together" in done.stdout


def test_explain_of_a_module_that_looks_like_nothing(good):
    done = run("explain", good, "model.norm")
    assert done.exit_code == 0
    assert re.match(r"Nothing at model.norm looked like a site: its \d+ nodes, from .*py:\d+ on", done.stdout)


def test_explain_of_no_module_names_the_nearest(good):
    done = run("explain", good, "model.lyers.1.attn_hc")
    assert done.exit_code == 2
    assert "has nodes of a module model.lyers.1.attn_hc; the nearest are model.layers.1.attn_hc" in done.stderr


# ----------------------------------------------------------------------------------- streams, pieces, compare, report


def test_streams_draws_lanes_and_the_critical_one(good, tmp_path):
    done = run("streams", good, "--svg", tmp_path / "lanes.svg")
    assert done.exit_code == 0
    assert re.search(r"main +●━+ *○ q_a_proj:32 +<- critical\n +side 1 +●━+ *○ kv_proj:16", done.stdout)
    assert (tmp_path / "lanes.svg").read_text().startswith("<svg xmlns")
    fork = json.loads(run("streams", good, "--json").stdout)[0]
    assert [lane["stream"] for lane in fork["lanes"]] == [0, 1] and fork["critical"] == 0
    assert sum(lane["share"] for lane in fork["lanes"]) == pytest.approx(1)


def test_lanes_weigh_bytes():
    """A float8 weight is read in half of the time of one in bfloat16 with as many rows."""
    linears = (LinearInfo("a", 100, "bfloat16", 0), LinearInfo("b", 100, "float8_e4m3fn", 1, "some::fp8_linear"))
    fork = _fork("0/0", ProjectionGroup("attn", "x", linears, "streams", "asked for"))
    assert [lane.share for lane in fork.lanes] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert (fork.critical, fork.bound) == (0, pytest.approx(1.5))


def test_pieces_has_the_one_of_each_graph(good):
    done = run("pieces", good)
    assert done.exit_code == 0 and "Graph 0/0: 1 piece, 1 distinct; 1 eager" in done.stdout
    assert re.search(r"why: the graph is one piece, \d+ nodes", done.stdout)
    (graph,) = json.loads(run("pieces", good, "--json").stdout)
    assert graph["cudagraphs"]["mode"] == "off" and len(graph["pieces"]) == 1


def test_compare_tells_a_lost_site_and_ends_with_one(good, broken):
    same = run("compare", good, good)
    assert same.exit_code == 0 and "Nothing differs but times." in same.stdout
    lost = run("compare", good, broken)
    assert lost.exit_code == 1
    assert "model.layers.1.attn_hc" in lost.stdout
    data = json.loads(run("compare", good, broken, "--json").stdout)
    site = next(s for s in data["sites"] if s["site"] == "model.layers.1.attn_hc" and s["kind"] == "mhc")
    assert "replaced" in site["before"] and "left alone" in site["after"]
    assert run("compare", broken, good).exit_code == 0


def test_report_is_one_page_that_loads_nothing(good):
    page = good / "page.html"
    assert run("report", good, "-o", page).exit_code == 0
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!#)', text) and "url(" not in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text
    assert "model.layers.0.attn_hc" in text and "dsv4.mhc_post_pre.default" in text


def test_report_leaves_out_what_is_too_long_and_says_where_it_is(good, tmp_path):
    assert run("report", good, "-o", tmp_path / "page.html", "--max-lines", "10").exit_code == 0
    assert "lines are too many for this page" in (tmp_path / "page.html").read_text()


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("command", DUMP_COMMANDS)
def test_what_cannot_be_read_is_one_sentence(command, good, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(good, tmp_path / "half")
    shutil.copytree(good, tmp_path / "newer")
    (half,), (newer,) = ((tmp_path / name).glob("2*/index.json") for name in ("half", "newer"))
    half.write_text(half.read_text()[:300])
    newer.write_text(newer.read_text().replace(f'"schema": {SCHEMA}', '"schema": 99'))
    for name, status in {"none": 2, "empty": 1, "half": 1, "newer": 1}.items():
        done = run(command, tmp_path / name)
        assert done.exit_code == status, (name, done.output)
        assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.endswith(".\n"), done.stderr


@pytest.mark.parametrize("command", DUMP_COMMANDS[:-1])
def test_a_crashed_run_can_be_looked_at(command, tmp_path):
    with pytest.raises(Exception, match="matched nothing"):
        compile_into(tmp_path, nn.Linear(4, 4), torch.randn(2, 4), strict=True)
    done = run(command, tmp_path)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    if command == "show":
        assert done.exit_code == 1 and "0/0 failed: StrictError: " in done.stdout
    assert run("report", tmp_path).exit_code == 0


def test_a_graph_without_a_pass_has_no_diff(tmp_path):
    torch._dynamo.reset()
    options = {"compiler": "eager", "dump_dir": str(tmp_path)}
    torch.compile(nn.Linear(4, 4), backend="dsv4", options=options)(torch.randn(2, 4))  # with gradients
    done = run("diff", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.startswith("No pass ran on graph 0/0, so there is nothing to compare")


@pytest.mark.parametrize("arguments", [("--pass", "mch"), ("9/9",)])
def test_a_wrong_name_is_a_usage_error_that_lists_the_right_ones(arguments, good):
    for command in ("show", "diff"):
        done = run(command, good, *arguments)
        assert done.exit_code == 2
        assert "mhc, projections" in done.stderr or "there are 0/0" in done.stderr


@pytest.mark.parametrize("command", DUMP_COMMANDS)
def test_a_folder_without_rights_is_one_sentence(command, tmp_path, monkeypatch):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    if os.access(locked, os.R_OK):  # nothing is forbidden to root, so the system is made to say so
        monkeypatch.setattr(os, "scandir", forbid)
    done = run(command, locked)
    assert done.exit_code == 1 and done.stderr == f"{locked} cannot be read: Permission denied.\n"


@pytest.mark.parametrize("command", DUMP_COMMANDS)
def test_a_file_without_rights_is_one_sentence(command, good, monkeypatch):
    monkeypatch.setattr(Path, "read_text", forbid)
    done = run(command, good)
    assert done.exit_code == 1 and done.stdout == ""
    assert re.fullmatch(r".*index\.json, .* cannot be read: Permission denied\.\n", done.stderr)


def forbid(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("arguments", [("report", "-o"), ("streams", "--svg")])
def test_a_file_that_cannot_be_written_is_one_sentence(arguments, good, tmp_path):
    (tmp_path / "file").write_text("")
    done = run(arguments[0], good, arguments[1], tmp_path / "file" / "page")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "could not be written" in done.stderr


def test_names_with_markup_and_escapes_are_only_text(tmp_path):
    model = nn.Sequential()
    model.add_module(HOSTILE, Branches())
    compile_into(tmp_path, model, torch.randn(2, 4))
    for command in ("show", "diff", "explain", "streams", "pieces"):
        done = run(command, tmp_path)
        assert done.exit_code == 0, done.output
        assert "\x1b" not in done.output
        assert "\x1b" not in run(command, tmp_path, "--json").output
    assert "<img" in run("explain", tmp_path).stdout
    assert run("report", tmp_path).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "<img" not in page and "\x1b" not in page and "&lt;img" in page
    assert run("streams", tmp_path, "--svg", tmp_path / "lanes.svg").exit_code == 0
    assert "<img" not in (tmp_path / "lanes.svg").read_text()


# ------------------------------------------------------------------------------------------------------ the command


def test_commands_that_read_a_dump_import_no_torch(good):
    code = """
import sys
from dsv4_compile.cli.app import app
try:
    app(sys.argv[1:])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    commands = [("show", good), ("diff", good), ("explain", good), ("compare", good, good), ("report", good)]
    for command in commands:
        arguments = [sys.executable, "-c", code, *map(str, command)]
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert done.stderr.splitlines()[-1] == "False", (command, done.stderr)


def test_python_m_and_the_version():
    done = subprocess.run([sys.executable, "-m", "dsv4_compile", "--version"], capture_output=True, text=True)
    assert re.fullmatch(r"dsv4_compile \d+\.\d+\.\d+\S*\n", done.stdout)


@pytest.mark.parametrize("arguments", [("diff",), ("show", "--pass", "mhc"), ("explain", "--json")])
def test_a_reader_that_has_seen_enough_is_no_problem(arguments, good):
    """As `dsv4-compile diff DIR | head -1`, with an output that is larger than a pipe holds."""
    command = [sys.executable, "-m", "dsv4_compile", arguments[0], str(good), *arguments[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0


@pytest.mark.parametrize("command", ["show", "streams", "explain", "pieces", "diff"])
def test_an_output_that_knows_ascii_only_is_no_problem(command, good):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "dsv4_compile", command, str(good)]
    done = subprocess.run(words, capture_output=True, env=environment)
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    assert done.stdout.isascii() and done.stdout


def test_usage_errors_end_with_two():
    assert run("shwo").exit_code == 2
    assert run("show").exit_code == 2
    assert run("show", ".", "--jsn").exit_code == 2


def test_graphs_and_passes_complete(good, tmp_path):
    def complete(words: str, count: int) -> list[str]:
        environment = os.environ | {
            "_DSV4_COMPILE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(count),
        }
        command = [sys.executable, "-m", "dsv4_compile"]
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split()

    assert "explain" in complete("dsv4-compile ex", 1)
    assert complete(f"dsv4-compile show {good} ", 3) == ["0/0"]
    assert complete(f"dsv4-compile diff {good} --pass m", 4) == ["mhc"]
    assert complete(f"dsv4-compile show {tmp_path} ", 3) == []


# ------------------------------------------------------------------------------------------- what explain cannot know


def test_explain_of_a_graph_that_was_not_finished_does_not_say_that_nothing_is_there(good, tmp_path):
    """As a process leaves it that is killed in Inductor: the passes ran, and the report was to be written then."""
    shutil.copytree(good, tmp_path / "killed")
    (index,), (path,) = (list((tmp_path / "killed").glob(f"*/{name}")) for name in ("index.json", "report_0.json"))
    index.write_text(index.read_text().replace('"state": "compiled"', '"state": "compiling"'))
    report = json.loads(path.read_text())
    report["graphs"][0] |= {"mhc": [], "projections": [], "missed": []}
    path.write_text(json.dumps(report))
    for site in ((), ("model.layers.0",)):
        done = run("explain", tmp_path / "killed", *site)
        assert done.exit_code == 1 and "Graph 0/0 was not finished" in done.stdout
        assert "looked like a site" not in done.stdout
    assert run("report", tmp_path / "killed").exit_code == 0
    page = next((tmp_path / "killed").glob("report.html")).read_text()
    assert "Graph 0/0 was not finished" in page and "Nothing looked like a site" not in page
