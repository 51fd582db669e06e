"""`explain` of graphs on which no pass ran, or not every one."""

from __future__ import annotations

import re

import torch

from tests.test_cli import Branches, compile_into, run


def test_explain_says_when_a_pass_was_off(tmp_path):
    compile_into(tmp_path, Branches(), torch.randn(2, 4), mhc="off", projections="off")
    done = run("explain", tmp_path, "a")
    assert done.exit_code == 0
    assert done.stdout == "Nothing was looked for at a: no pass ran on graph 0/0 (both are off).\n"
    compile_into(tmp_path / "half", Branches(), torch.randn(2, 4), projections="off")
    done = run("explain", tmp_path / "half", "a")
    assert re.search(r"have no product with an fn .* in mHC's manner\. The pass projections was off\.", done.stdout)


def test_explain_of_a_graph_with_gradients_says_why_no_pass_ran(tmp_path):
    torch._dynamo.reset()
    options = {"compiler": "eager", "dump_dir": str(tmp_path)}
    torch.compile(Branches(), backend="dsv4", options=options)(torch.randn(2, 4))
    assert (
        "no pass ran on graph 0/0 (compiled without replacements: the graph needs"
        in run("explain", tmp_path, "a").stdout
    )
