"""`run`, `bench` and `doctor`: the commands that do something, and vLLM's settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from dsv4_compile.cli import bench, doctor
from dsv4_compile.cli.app import app
from dsv4_compile.dump.reader import read
from dsv4_compile.passes.pipeline import GraphPasses
from dsv4_compile.vllm import settings as vllm_settings

SCRIPT = """
import sys, torch
model = torch.nn.Linear(4, 4)
with torch.no_grad():
    torch.compile(model, backend="dsv4", options={"compiler": "eager"})(torch.randn(2, 4))
print(__name__, sys.argv[1:])
"""

VLLM = {"mode": 3, "inductor_passes": {"post_grad_custom_post_pass": "dsv4_compile.post_grad_pass"}}


def command(*arguments: object, **keywords: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "dsv4_compile", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, **keywords)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


# ----------------------------------------------------------------------------------------------------------------- run


def test_run_hands_on_arguments_and_writes_a_dump(script, tmp_path):
    done = command("run", "--dump-dir", tmp_path / "dump", script, "--json", "-x", "y")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ ['--json', '-x', 'y']\n"
    assert f"dsv4-compile show {tmp_path / 'dump'}" in done.stderr
    (graph,) = read(tmp_path / "dump").graphs
    assert graph.run.index.ended and not graph.run.index.error and graph.run.index.script == str(script)


def test_run_leaves_other_options_of_the_environment_and_takes_a_limit(script, tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_OPTIONS", '{"mhc": "off"}')
    done = command("run", "--dump-dir", tmp_path / "dump", "--limit", "1K", script)
    assert done.returncode == 0, done.stderr
    (graph,) = read(tmp_path / "dump").graphs
    assert graph.passes == ["projections", "attention"]
    assert graph.run.index.limit == 1000 and graph.run.index.left_out


def test_run_of_a_script_that_raises_has_its_error_in_the_dump(script, tmp_path):
    script.write_text(SCRIPT + "raise ValueError('no more')\n")
    done = command("run", "--dump-dir", tmp_path / "dump", script)
    assert done.returncode == 1 and "ValueError: no more" in done.stderr
    shown = run("show", tmp_path / "dump")
    assert shown.exit_code == 1 and "the script ended with ValueError: no more" in shown.stdout


def test_run_ends_as_the_script_does(script, tmp_path):
    script.write_text(SCRIPT + "raise SystemExit(7)\n")
    assert command("run", "--dump-dir", tmp_path / "dump", script).returncode == 7


def test_run_of_a_script_that_compiles_nothing(script, tmp_path):
    script.write_text("print('nothing')\n")
    done = command("run", "--dump-dir", tmp_path / "dump", script)
    assert done.returncode == 1
    assert "Nothing was compiled with the dsv4 backend" in done.stderr


def test_a_limit_that_is_none_is_a_usage_error_before_anything_runs(script, tmp_path):
    done = run("run", "--dump-dir", tmp_path / "dump", "--limit", "much", script)
    assert done.exit_code == 2 and done.stderr.startswith("DSV4_DUMP_LIMIT must be a number of bytes")
    assert not (tmp_path / "dump").exists()


def test_run_of_no_script_is_a_usage_error(tmp_path):
    done = run("run", tmp_path / "none.py")
    assert done.exit_code == 2 and done.stderr.startswith("There is no script")


# --------------------------------------------------------------------------------------------------------------- bench


def test_bench_names_the_benchmarks_there_are():
    done = run("bench", "speed")
    assert done.exit_code == 2
    assert "there are projections, mhc, model, compile-time, dump" in done.stderr


@pytest.mark.parametrize("name", ["projections", "mhc", "model", "compile-time", "dump", "decode", "replay"])
def test_bench_hands_arguments_to_the_benchmark(name):
    done = command("bench", name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_bench_gives_data_and_keeps_tables_apart_from_it(tmp_path, monkeypatch, capfd):
    path = tmp_path / "mine.py"
    path.write_text("import sys; print('a table'); open(sys.argv[sys.argv.index('--json') + 1], 'w').write('[1]')")
    monkeypatch.setattr(bench, "script", lambda name: path)
    with pytest.raises(SystemExit) as stop:
        app(["bench", "--json", "mhc", "--tokens", "1"])
    assert stop.value.code == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == [1] and err == "a table\n"


def test_benchmarks_need_nothing_that_is_not_installed_with_the_package():
    """An installed package has no tests, and no checkout around it."""
    for name in bench.NAMES:
        text = bench.script(name).read_text()
        assert not re.search(r"(?:from|import) tests\b", text), name


def test_a_benchmark_without_a_card_says_so_in_a_sentence():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    for name in ("mhc", "projections", "model", "decode"):
        done = command("bench", name)
        assert done.returncode == 1
        assert re.fullmatch(r"There is no CUDA device; --tiny runs .* on the CPU\.\n", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mhc", "projections"])
def test_benchmarks_run_on_a_cpu(name):
    done = command("bench", "--json", name, "--tiny")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]


@pytest.mark.slow
def test_the_benchmark_of_compile_times_runs():
    pytest.importorskip("transformers")
    done = command("bench", "--json", "compile-time", "--layers", "1", "--steps", "", "--columns", "dsv4")
    assert done.returncode == 0, done.stderr
    cell = json.loads(done.stdout)["rows"]["layers/1"]["dsv4"]
    assert cell["equal"] is True and cell["graphs"] == 1 and cell["seconds"] > 0


@pytest.mark.slow
def test_the_benchmark_of_dumps_runs():
    pytest.importorskip("transformers")
    done = command("bench", "--json", "dump", "--layers", "1", "--compiler", "eager")
    assert done.returncode == 0, done.stderr
    seconds = json.loads(done.stdout)["seconds"]
    assert seconds["dsv4 with a dump"]["bytes"] > 0 and seconds["dsv4"]["total"] > 0


# -------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_says_what_would_be_used():
    found = {check.name: check for check in doctor.checks()}
    assert found["torch"].value == torch.__version__
    assert found["mhc='auto'"].value in ("cuda", "triton", "cpp")
    tools = {"Python", "C++ compiler", "nvcc", "triton", "tilelang", "depyf", "matplotlib", "vllm"}
    assert tools | {"Inductor's cache", "kernels and choices", "pieces"} <= set(found)
    assert found["cudagraphs='auto'"].value and found["projections='auto'"].value


def test_doctor_says_that_a_family_is_no_value_of_mhc():
    found = {check.name: check for check in doctor.checks()}
    assert not {"mhc='cpp'", "mhc='cuda'"} & set(found)
    if found["mhc='auto'"].value == "cpp":
        assert "no value of mhc=" in found["mhc='auto'"].detail
        assert "mhc='auto' takes them on cuda; they cannot be asked for" in found["CUDA C++ kernels"].detail


def test_doctor_ends_with_one_when_what_is_asked_for_does_not_run(monkeypatch):
    """TileLang and streams on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("TileLang may run here")
    monkeypatch.setenv("DSV4_OPTIONS", '{"mhc": "tilelang"}')
    done = run("doctor")
    assert done.exit_code == 1
    assert "mhc='tilelang': falls back to cpp: DSV4_OPTIONS asks for it; " in done.stdout
    monkeypatch.setenv("DSV4_OPTIONS", '{"projections": "streams"}')
    assert "projections='streams': serial: there are no streams on cpu" in run("doctor").stdout


def test_doctor_finds_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = {check.name: check for check in doctor.checks()}
    assert found["Triton's cache"].state == "problem" and "set TRITON_CACHE_DIR" in found["Triton's cache"].detail


def test_doctor_ends_with_one_when_the_environment_is_wrong(monkeypatch):
    monkeypatch.setenv("DSV4_OPTIONS", '{"mch": "triton"}')
    done = run("doctor")
    assert done.exit_code == 1
    assert "the nearest one is 'mhc'" in done.stdout
    monkeypatch.setenv("DSV4_OPTIONS", "{}")
    monkeypatch.setenv("DSV4_DISABLE", "1")
    assert "DSV4_DISABLE turns the backend off" in run("doctor").stdout


def test_doctor_outlives_a_check_that_raises(monkeypatch):
    monkeypatch.setattr(doctor, "_package", lambda name, purpose: 1 / 0)
    found = {check.name: check for check in doctor.checks()}
    assert found["compilers"].state == "problem" and "ZeroDivisionError" in found["compilers"].detail
    assert "torch" in found


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({**VLLM, "mode": 0}, "vLLM's mode NONE compiles nothing"),
        ({**VLLM, "mode": "NONE"}, "vLLM's mode NONE compiles nothing"),
        ({**VLLM, "mode": 1}, "STOCK_TORCH_COMPILE does not hand passes to Inductor"),
        ({**VLLM, "mode": 9}, "vLLM has no mode 9"),
        ({**VLLM, "backend": "eager"}, "backend 'eager' runs no passes"),
        ({"mode": 2, "backend": "dvs4"}, '"dsv4" was probably meant'),
        ({"mode": 3, "backend": "dsv4"}, 'set "mode": 2'),
        ({"backend": "dsv4"}, 'set "mode": 2'),
        ({**VLLM, "inductor_pass": {}}, "'inductor_passes' was probably meant"),
        ({"inductor_passes": {"post_grad_custom_pre_pass": vllm_settings.PASS}}, "was probably meant"),
        ({"inductor_passes": {vllm_settings.HOOK: "dsv4_compile.post_grad_passes"}}, "There is no pass"),
        ({"inductor_compile_config": {vllm_settings.HOOK: vllm_settings.PASS}}, "looks up no name"),
        ({"inductor_passes": 3}, "must be JSON objects"),
        ({}, "No pass of ours is set"),
    ],
)
def test_doctor_says_when_a_pass_will_not_run_in_vllm(settings, sentence):
    assert [found for found in vllm_settings.problems(settings) if sentence in found]
    assert run("doctor", "--vllm-config", json.dumps(settings)).exit_code == 1


def test_doctor_finds_right_settings_right(tmp_path):
    assert list(vllm_settings.problems(VLLM)) == []
    assert list(vllm_settings.problems({**VLLM, "mode": None})) == []
    assert list(vllm_settings.problems({**VLLM, "mode": 2})) == []
    assert [list(vllm_settings.problems({"mode": mode, "backend": "dsv4"})) for mode in (1, 2)] == [[], []]
    (tmp_path / "settings.json").write_text(json.dumps(VLLM))
    done = run("doctor", "--json", "--vllm-config", tmp_path / "settings.json")
    (check,) = [check for check in json.loads(done.stdout) if check["name"] == "vLLM's settings"]
    assert check["state"] == "ok"


@pytest.mark.parametrize("text", ["nothing", "[1]", "{"])
def test_settings_that_are_none_are_a_usage_error(text, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(text)
    assert run("doctor", "--vllm-config", path if text == "[1]" else text).exit_code == 2


def test_the_dotted_name_of_the_pass_is_found_as_vllm_looks_it_up():
    """vLLM imports the module, takes the name out of its dictionary, and has a process with torch."""
    (name,) = VLLM["inductor_passes"].values()  # type: ignore[attr-defined]
    module, _, attribute = name.rpartition(".")
    code = f"import torch; found = __import__({module!r}).__dict__[{attribute!r}]; print(type(found).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "StandalonePass\n", done.stderr
    assert issubclass(type(getattr(__import__(module), attribute)), GraphPasses)
