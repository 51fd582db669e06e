"""Identity of the passes, and what a second process does with a warm Inductor cache."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

import dsv4_compile
from dsv4_compile import Options, memory
from dsv4_compile.backend import graph_passes

ROOT = Path(__file__).parents[1]

VARIANTS: list[dict[str, Any]] = [
    {},
    {"mhc": "reference"},
    {"mhc": "triton"},
    {"mhc": "off"},
    {"projections": "pack"},
    {"projections": "streams"},
    {"projections": "serial"},
    {"projections": "off"},
    {"num_streams": 2},
    {"stream_max_tokens": 64},
    {"branches": True},
]


def uuids() -> list[str]:
    return [graph_passes(Options(**variant)).uuid() for variant in VARIANTS]


def test_uuid_differs_with_every_option_that_changes_code():
    assert len(set(uuids())) == len(VARIANTS)


def test_uuid_does_not_differ_with_options_that_do_not(tmp_path):
    plain = graph_passes(Options()).uuid()
    for same in ({"verify": 3}, {"strict": True}, {"dump_dir": str(tmp_path)}):
        assert graph_passes(Options(**same)).uuid() == plain


def test_uuid_differs_with_the_version(monkeypatch):
    before = (graph_passes(Options()).uuid(), dsv4_compile.post_grad_pass.uuid())
    monkeypatch.setattr(dsv4_compile, "__version__", "999.0")
    after = (graph_passes(Options()).uuid(), dsv4_compile.post_grad_pass.uuid())
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_uuid_of_the_pass_on_its_own_is_not_that_of_the_backend():
    assert dsv4_compile.post_grad_pass.uuid() not in uuids()


def test_uuid_is_the_same_in_every_process(tmp_path):
    code = f"""
import json
from dsv4_compile import Options, post_grad_pass
from dsv4_compile.backend import graph_passes
print(json.dumps([graph_passes(Options(**v)).uuid() for v in {VARIANTS!r}] + [post_grad_pass.uuid()]))
"""
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [*uuids(), dsv4_compile.post_grad_pass.uuid()]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("which", ["post_grad_pass", "backend", "dumping"])
def test_passes_survive_copy_and_pickle(which, duplicate, tmp_path):
    passes = {
        "post_grad_pass": dsv4_compile.post_grad_pass,
        "backend": graph_passes(Options(projections="pack", mhc="reference")),
        "dumping": graph_passes(Options(dump_dir=str(tmp_path))),
    }[which]
    again = duplicate(passes)
    assert again.uuid() == passes.uuid()
    assert isinstance(again, CustomGraphPass)
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3)
    assert again(graph) is None


# ------------------------------------------------------------------------------------------------ a second process

CHILD = """
import json, sys
import torch
import dsv4_compile
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from tests.spellings import Stack, hf_post, hf_pre

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(64, 12, bias=False)
    def forward(self, x):
        return self.a(x), self.b(x)

torch.manual_seed(0)
model = torch.nn.Sequential(Stack(hf_pre, hf_post), Branches())
x = torch.randn(2, 5, 4, 64)
results = []
for options in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend="dsv4", options=options)
        got = compiled(x)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            got = compiled(x)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected))
    (graph,) = dsv4_compile.report().to_dict()["graphs"]
    weights = [model[1].a.weight, model[1].b.weight]
    results.append({
        "error": error,
        "operators": {e.key: e.count for e in seen.key_averages() if e.key.startswith("dsv4::")},
        "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "adjacent": weights[1].data_ptr() == weights[0].data_ptr() + weights[0].nbytes,
        "graph": graph,
    })
print(json.dumps(results))
"""

MHC = {"dsv4::mhc_pre": 1, "dsv4::mhc_post_pre": 1, "dsv4::mhc_post": 1}
PACK = MHC | {"dsv4::packed_linear": 1}


def child(folder: Path, *options: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """What one new process with its Inductor cache in `folder` got, for each set of options in turn."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    variables |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    command = [sys.executable, "-c", CHILD, json.dumps(options)]
    done = subprocess.run(command, cwd=folder, env=os.environ | variables | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_second_process_hits_the_cache_and_is_still_transformed(tmp_path):
    """In one test, because every process costs seconds: cold, warm with the same and with other options, and warm
    without the findings that lie beside the cache."""
    (cold,) = child(tmp_path, {"projections": "pack"})
    warm, strict, streams, reference = child(
        tmp_path,
        {"projections": "pack"},
        {"projections": "pack", "strict": True, "verify": 1},
        {"projections": "streams"},
        {"projections": "pack", "mhc": "reference"},
    )
    assert (cold["hits"], cold["misses"]) == (0, 1)
    for run in (warm, strict):
        assert run["hits"] >= 1, "a hit"
        assert run["misses"] == 0
    for run in (streams, reference):
        assert (run["hits"], run["misses"]) == (0, 1), "other code"

    assert cold["operators"] == warm["operators"] == strict["operators"] == reference["operators"] == PACK
    assert streams["operators"] == MHC | {"dsv4::parallel_linear": 1}
    for run in (cold, warm, strict, streams, reference):
        assert run["error"] < 1e-5

    assert cold["adjacent"] and warm["adjacent"], "a warm start packs the parameters as well"
    for run in (warm, strict):
        for part in ("mhc", "projections", "missed", "nodes", "dynamic"):
            assert run["graph"][part] == cold["graph"][part], part
        assert any("cache" in note for note in run["graph"]["notes"])
    assert [s["form"] for s in cold["graph"]["mhc"]] == ["pre", "post_pre", "post"]
    assert {s["kernel"] for s in reference["graph"]["mhc"]} == {"reference"}
    assert cold["graph"]["notes"] == []

    for path in (tmp_path / "dsv4").iterdir():
        path.unlink()
    (lost,) = child(tmp_path, {"projections": "pack"})
    assert lost["hits"] >= 1
    assert lost["error"] < 1e-5
    assert lost["operators"] == PACK
    assert any("not known" in note for note in lost["graph"]["notes"])


def test_the_findings_are_found_again_when_the_models_source_has_moved():
    """Inductor's cache does not look at paths: a hit whose findings are not known would leave the report empty."""
    keys = []

    def note(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for place in ("/a/model.py", "/b/model.py"):
            for node in gm.graph.nodes:
                node.meta["stack_trace"] = f'  File "{place}", line 3, in forward\n    return x'
            keys.append(memory.key_of(gm, inputs, Options(), {}))
        return gm.forward

    for factor in (2.0, 3.0):
        torch._dynamo.reset()
        torch.compile(lambda x, factor=factor: x.sin() * factor, backend=note)(torch.randn(3))
    assert keys[0] == keys[1] != keys[2] == keys[3]
