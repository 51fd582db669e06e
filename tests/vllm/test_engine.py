"""Real engines of vLLM on the CPU, tiny models with random weights: what is started, what runs, the same tokens.

An engine takes a good part of a minute to start, so the starts are shared by the tests: the processes `cold` and `warm`
with a Qwen3-Next, one after the other with one cache folder, two likewise with a DeepSeek-V4, one with a Qwen3.5, and
one server with its engine in its own process.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import deepseek
from tests.vllm.engine import MARK

ROOT = Path(__file__).parents[2]
SERIAL = {"projections": "serial"}
# Without vLLM's fusions, some of whose operators its CPU build lacks.
MODE_3 = {"mode": 3, "compile_sizes": [], "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False}}

COLD: dict[str, dict[str, Any]] = {
    "without": {"compilation": {"mode": 2}},
    "serial": {"compilation": {"mode": 2}, "additional": {"dsv4": SERIAL}},
    "off": {"compilation": {"mode": 2}, "additional": {"dsv4": {"projections": "off"}}},
    "piecewise": {"compilation": MODE_3, "additional": {"dsv4": SERIAL}, "piecewise": True},
    "backend": {"compilation": {"mode": 2, "backend": "dsv4"}, "environment": {"DSV4_OPTIONS": json.dumps(SERIAL)}},
    "packed": {"compilation": {"mode": 2}, "additional": {"dsv4": True}, "plain": False},
}
WARM: dict[str, dict[str, Any]] = {
    "piecewise": COLD["piecewise"],
    "changed": COLD["piecewise"] | {"additional": {"dsv4": SERIAL | {"num_streams": 2}}},
    "serial": COLD["serial"],
    "backend": COLD["backend"],
}
QWEN3_5: dict[str, dict[str, Any]] = {
    name: {**COLD[name], "seeing": True} for name in ("without", "serial", "piecewise")
}
DEEPSEEK: dict[str, dict[str, Any]] = {
    name: {
        **COLD[name],
        "additional": {"dsv4": {**SERIAL, "mhc": "reference"}},
        "environment": {"DSV4_VLLM": "0" if name == "without" else "1"},
        "engine": deepseek.ENGINE,
        "deepseek": True,
    }
    for name in ("without", "serial", "piecewise")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    runpy.run_path(str(ROOT / "examples/vllm_engine.py"))["make_model"](folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def start(model: str, cache: str, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results of `runs`, made in one new process, and under "log" what it wrote."""
    asked = json.dumps([{"plain": True, **run} for run in runs.values()])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DSV4_")} | {"VLLM_CACHE_ROOT": cache}
    command = [sys.executable, str(ROOT / "tests/vllm/engine.py"), model, asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    found = [json.loads(x.removeprefix(MARK)) for x in done.stdout.splitlines() if x.startswith(MARK)]
    assert len(found) == len(runs), done.stdout[-2000:] + done.stderr[-4000:]
    return dict(zip(runs, found, strict=True)) | {"log": {"text": done.stdout + done.stderr}}


@pytest.fixture(scope="module")
def cold(model: str, cache: str) -> dict[str, dict[str, Any]]:
    return start(model, cache, COLD)


@pytest.fixture(scope="module")
def warm(model: str, cache: str, cold: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return start(model, cache, WARM)


@pytest.fixture(scope="module")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    folder = tmp_path_factory.mktemp("qwen3_5")
    config = runpy.run_path(str(ROOT / "examples/vllm_engine.py"))["CONFIG"]
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config)).bfloat16().save_pretrained(folder / "model")
    return start(str(folder / "model"), str(folder / "cache"), QWEN3_5)


@pytest.fixture(scope="module")
def deepseek_v4(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("deepseek_v4")
    deepseek.make_model(folder / "model")
    first = start(str(folder / "model"), str(folder / "cache"), DEEPSEEK)
    again = start(str(folder / "model"), str(folder / "cache"), {"piecewise": DEEPSEEK["piecewise"]})
    return first | {"again": again["piecewise"]}


def groups(result: dict[str, Any]) -> list[list[str]]:
    """The members of each group of projections in the reports."""
    graphs = [graph for report in result["reports"] for graph in report["graphs"]]
    return [[linear["name"] for linear in group["linears"]] for graph in graphs for group in graph["projections"]]


def operators(result: dict[str, Any]) -> list[str]:
    return sorted({name.partition(":")[2] for name in result["operators"]})


@pytest.mark.parametrize("way", ["serial", "off", "piecewise", "backend"])
def test_the_tokens_are_those_without_us(cold, way):
    assert len({*map(tuple, cold["without"]["tokens"])}) == 2, "two prompts, two answers"
    assert cold[way]["tokens"] == cold["without"]["tokens"]


@pytest.mark.parametrize(("way", "mode"), [("serial", 2), ("piecewise", 3), ("backend", 2)])
def test_the_projections_of_qwen_are_found_and_run_together(cold, way, mode):
    assert cold[way]["mode"] == mode
    assert ["in_proj_qkvz", "in_proj_ba"] in groups(cold[way])
    assert operators(cold[way]) == ["parallel_linear"]


@pytest.mark.parametrize(("way", "mode"), [("serial", 2), ("piecewise", 3)])
def test_qwen3_5_is_treated_and_its_tokens_are_the_same(qwen3_5, way, mode):
    assert len({*map(tuple, qwen3_5["without"]["tokens"])}) == 2, "two prompts, two answers"
    assert qwen3_5[way]["tokens"] == qwen3_5["without"]["tokens"]
    assert qwen3_5[way]["mode"] == mode and groups(qwen3_5[way]) == [["in_proj_qkvz", "in_proj_ba"]]
    assert operators(qwen3_5[way]) == ["parallel_linear"] and operators(qwen3_5["without"]) == []


def assert_same_unless_tied(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same tokens, with probabilities as near as roundings, up to a step whose two best are as good as equal."""
    compared = 0
    for row, other, best, of_other in zip(ours["tokens"], theirs["tokens"], ours["best"], theirs["best"], strict=True):
        for a, b, mine, (second, first) in zip(row, other, best, of_other, strict=True):
            assert abs(mine[-1] - first) < 0.05 and first < -0.5, "near, and of a model that is not sure"
            if a != b:
                assert first - second < 0.05
                break
            compared += 1
    assert compared >= 8


@pytest.mark.parametrize(("way", "mode"), [("serial", 2), ("piecewise", 3)])
def test_deepseek_v4_is_treated_and_its_tokens_are_the_same(deepseek_v4, way, mode):
    assert len({*map(tuple, deepseek_v4["without"]["tokens"])}) == 2, "two prompts, two answers"
    assert deepseek_v4["without"]["reports"] == [] and operators(deepseek_v4["without"]) == []
    assert_same_unless_tied(deepseek_v4[way], deepseek_v4["without"])
    assert deepseek_v4[way]["mode"] == mode
    (report,) = deepseek_v4[way]["reports"]
    sites = [(site["form"], site["kernel"]) for graph in report["graphs"] for site in graph["mhc"]]
    ours = [("pre", "reference"), *[("post_pre", "reference")] * 5, ("post", "reference")]
    assert sorted(sites) == sorted([("head", "vllm"), *ours])
    compressed = ["fused_wqa_wkv", "compressor.fused_wkv_wgate"]
    assert compressed in groups(deepseek_v4[way])
    assert [*compressed, "indexer.compressor.fused_wkv_wgate", "indexer.weights_proj"] in groups(deepseek_v4[way])
    assert operators(deepseek_v4[way]) == ["mhc_post", "mhc_post_pre", "mhc_pre", "parallel_linear"]


def test_deepseek_v4_from_vllms_cache_is_still_transformed(deepseek_v4):
    assert deepseek_v4["again"]["tokens"] == deepseek_v4["piecewise"]["tokens"]
    assert deepseek_v4["again"]["reports"] == [], "no pass ran"
    assert operators(deepseek_v4["again"]) == operators(deepseek_v4["piecewise"])


def test_two_sets_of_options_in_one_process_do_not_share_code(cold):
    assert operators(cold["off"]) == [] and groups(cold["off"]) == []
    assert len(cold["off"]["reports"]) == 1, "it was compiled, and not taken from what the other options made"


def test_products_of_vllm_with_packed_weights_are_left_and_named(cold):
    missed = [m for report in cold["packed"]["reports"] for graph in report["graphs"] for m in graph["missed"]]
    assert any(m["reason"].startswith("a product of vLLM's (_C::") for m in missed)
    assert operators(cold["packed"]) == []


def test_a_second_start_takes_the_code_from_vllms_cache_and_it_is_still_transformed(cold, warm):
    assert warm["piecewise"]["tokens"] == cold["without"]["tokens"]
    assert warm["piecewise"]["reports"] == [], "no pass ran"
    assert operators(warm["piecewise"]) == ["parallel_linear"]
    assert "Directly load AOT compilation" in warm["log"]["text"]


@pytest.mark.parametrize("way", ["serial", "backend"])
def test_a_second_start_in_mode_2_is_transformed(cold, warm, way):
    """In mode 2 vLLM 0.32 writes its cache and cannot read it, so the graph is compiled again."""
    assert warm[way]["tokens"] == cold["without"]["tokens"]
    assert operators(warm[way]) == ["parallel_linear"]
    assert groups(warm[way]) == groups(cold[way])


def test_other_options_are_compiled_anew(cold, warm):
    assert len(warm["changed"]["reports"]) == len(cold["piecewise"]["reports"]) > 0
    assert warm["changed"]["tokens"] == cold["without"]["tokens"]


def test_the_log_says_what_runs_and_what_was_done(cold):
    text = cold["log"]["text"]
    assert "dsv4: the passes run in mode DYNAMO_TRACE_ONCE: mhc=auto, projections=serial" in text
    assert 'dsv4: the backend "dsv4" compiles whole graphs in mode DYNAMO_TRACE_ONCE' in text
    assert re.search(r"dsv4: graph of \d+ nodes: \d x projections \(serial\)", text)


def test_the_example_starts_the_engine_in_a_process_of_its_own_with_one_variable():
    done = subprocess.run([sys.executable, str(ROOT / "examples/vllm_engine.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "dsv4: the passes run in mode DYNAMO_TRACE_ONCE" in done.stdout
    assert re.search(r"dsv4: graph of \d+ nodes", done.stdout)
    assert "the same: True" in done.stdout
