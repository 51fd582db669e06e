"""`benchmarks/vllm_engine.py` without vLLM: parts that fail cost their own numbers, and what is said of the tokens."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

PART = """
import json, sys
def say(result): print("RESULT " + json.dumps(result), flush=True)
part = sys.argv[1]
asked = 0
print("a line of its log")
if part == "dsv4" and "qwen" in sys.argv[2]:
    sys.exit("ValueError: it cannot start")
say({"start_seconds": 1.0, "compile_seconds": 2.0})
for line in sys.stdin:
    what, number = line.split()
    if part == "replay":
        say({"microseconds": {"vllm": 24.0, "dsv4": 6.0}, "relative_difference": {"row": 0.001}})
    elif what == "first":
        say({"rows": [list(range(30))] * int(number), "best": [[[-1.0, -2.0]] * 30] * int(number)})
    elif what == "time":
        asked += 1
        say({"ms": 3.0 if asked % 5 else 30.0})
    else:
        say({"mhc_us": 5.0, "kernel_us": 50.0})
"""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("vllm_engine")


def test_a_part_that_fails_costs_its_own_numbers(benchmark, tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm_part.py").write_text(PART)
    monkeypatch.setattr(benchmark, "__file__", str(tmp_path / "vllm_engine.py"))
    monkeypatch.setattr(sys, "argv", ["vllm_engine.py", "--batches", "1,4", "--out", str(tmp_path)])
    benchmark.main()
    found = json.loads((tmp_path / "vllm_engine.json").read_text())
    assert list(found["failed"]) == ["qwen3_next dsv4"] and "it cannot start" in found["failed"]["qwen3_next dsv4"]
    assert set(found["rows"]["qwen3_next batch 4"]) == {"vllm"}
    assert set(found["rows"]["deepseek_v4 batch 4"]) == {"vllm", "dsv4"}
    cell = found["rows"]["deepseek_v4 batch 4"]["dsv4"]
    assert len(cell["rows"]) == 2 and len(cell["rows"][0]) == 24 and "best" not in cell and cell["mhc_us"] == 5.0
    assert len(cell["ms_all"]) == 15 and set(cell["ms_all"]) == {3.0, 30.0}
    assert found["tokens"]["deepseek_v4 batch 4"]["same_rows"] == 4
    assert found["replay"]["4"]["replay"]["microseconds"]["dsv4"] == 6.0
    assert "| deepseek_v4 batch 4 | 3.000, 3.000 | 5.0, 5.0 | 50, 50 | 4 of 4 |" in capsys.readouterr().out
    assert "a line of its log" in (tmp_path / "vllm_engine-qwen3_next-dsv4.log").read_text()


def test_rows_are_compared_up_to_the_first_token_that_differs(benchmark):
    best = [[-1.0, -1.5], [-1.0, -1.25], [-1.0, -2.0]]
    plain = {"rows": [[1, 2, 3], [4, 5, 6]], "best": [best, best]}
    ours = {"rows": [[1, 2, 3], [4, 7, 9]], "best": [best, [[-1.0, -1.5], [-1.125, -1.25], [-3.0, -9.0]]]}
    found = benchmark.compared(plain, ours)
    assert (found["rows"], found["same_rows"], found["steps"], found["different_steps"]) == (2, 1, 5, 1)
    assert found["parted"] == [{"row": 1, "step": 1, "margins": [0.25, 0.125]}]
    assert found["largest_apart"] == 0.125 and found["distinct_tokens"] == 6
