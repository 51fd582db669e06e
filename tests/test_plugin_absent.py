"""Without vLLM its plugin and the pass are there, import no vLLM, and do nothing wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is there")
def test_the_plugin_without_vllm_is_one_sentence():
    code = """
import logging
logging.basicConfig(format="%(message)s")
from dsv4_compile.vllm import plugin
plugin.register()
plugin.register()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stderr.strip().splitlines()) == 1
    assert "nothing of ours runs with this vLLM: ModuleNotFoundError" in done.stderr


def test_the_pass_is_in_the_dictionary_before_torch_is_imported_and_is_the_same_afterwards():
    code = """
import sys, dsv4_compile
found = dsv4_compile.__dict__["post_grad_pass"]
assert "torch" not in sys.modules
from torch._inductor.custom_graph_pass import CustomGraphPass
import copy, pickle
assert isinstance(found, CustomGraphPass)
from dsv4_compile.standalone import post_grad_pass
for one in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
    assert one.uuid() == post_grad_pass.uuid()
print(dsv4_compile.graph_pass({"mhc": "off"}).uuid() != found.uuid())
"""
    assert run(code) == "True\n"


def test_wrong_options_in_the_environment_do_not_keep_the_package_from_being_imported(monkeypatch):
    monkeypatch.setenv("DSV4_OPTIONS", '{"mch": "off"}')
    assert "unknown option 'mch'" in run("import torch, dsv4_compile; print(dsv4_compile.post_grad_pass.idle)")


def test_the_number_of_tokens_must_be_a_number(monkeypatch):
    monkeypatch.setenv("DSV4_VLLM_MAX_TOKENS", "many")
    assert "must be a number of tokens" in run("import torch, dsv4_compile; print(dsv4_compile.post_grad_pass.idle)")
    monkeypatch.setenv("DSV4_VLLM_MAX_TOKENS", "512")
    assert run("import torch, dsv4_compile; print(dsv4_compile.post_grad_pass.max_tokens)") == "512\n"
