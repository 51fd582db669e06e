"""`dsv4_compile.post_grad_pass` as vLLM takes it up: found by name, an `InductorPass`, copied, pickled, hashed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
from vllm.compilation.passes.inductor_pass import CallableInductorPass, InductorPass, pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationConfig, VllmConfig
from vllm.config.utils import Range

import dsv4_compile
from dsv4_compile.vllm.settings import HOOK, PASS


def named() -> CompilationConfig:
    return CompilationConfig(inductor_passes={HOOK: PASS})


def of(*arguments: object) -> CompilationConfig:
    return CompilationConfig(inductor_compile_config={HOOK: dsv4_compile.graph_pass(*arguments)})


def test_the_name_in_the_json_gives_our_object_unwrapped():
    found = named().inductor_compile_config[HOOK]
    assert found is dsv4_compile.post_grad_pass
    assert isinstance(found, InductorPass) and not isinstance(found, CallableInductorPass)


@pytest.mark.parametrize("first", ["torch", "dsv4_compile", "vllm"])
def test_the_name_is_found_whatever_was_imported_first(first):
    code = f"""
import {first}
import dsv4_compile
from vllm.config import CompilationConfig
found = CompilationConfig(inductor_passes={{{HOOK!r}: {PASS!r}}}).inductor_compile_config[{HOOK!r}]
from vllm.compilation.passes.inductor_pass import CallableInductorPass, InductorPass
import copy, pickle
for one in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
    assert isinstance(one, InductorPass) and not isinstance(one, CallableInductorPass)
    assert one.uuid() == found.uuid() and callable(one)
print("good")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "good", done.stderr


def test_copies_and_pickles_are_the_same_pass():
    for one in (named(), of({"mhc": "reference"}, 64)):
        original = one.inductor_compile_config[HOOK]
        for other in (copy.deepcopy(one).inductor_compile_config[HOOK], pickle.loads(pickle.dumps(original))):
            assert isinstance(other, InductorPass)
            assert other.uuid() == original.uuid() and other.max_tokens == original.max_tokens


def test_vllms_hash_changes_with_our_settings_and_only_with_them():
    settings = ((), ({"mhc": "off"},), ({"projections": "serial"},), ({"num_streams": 2},), (None, 64), (None, 65))
    hashes = [of(*s).compute_hash() for s in settings]
    assert len({*hashes, CompilationConfig().compute_hash()}) == len(settings) + 1
    assert hashes == [of(*s).compute_hash() for s in settings]


def test_vllms_hash_changes_with_what_the_environment_says_of_its_operators(monkeypatch):
    before = of().compute_hash()
    monkeypatch.setenv("DSV4_VLLM_MHC", "always")
    assert of().compute_hash() != before


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_pass_manager_takes_it_before_and_after_its_own(place):
    manager, ours = PostGradPassManager(), dsv4_compile.graph_pass()
    with pass_context(Range(1, 8)):
        if place == "before":
            manager.add(ours)
            manager.configure(VllmConfig())
        else:
            manager.configure(VllmConfig())
            manager.add(ours)
        assert ours in manager.passes
        alone = PostGradPassManager()
        alone.configure(VllmConfig())
        assert manager.uuid() != alone.uuid()


def test_the_gate_is_asked_by_range():
    ours = dsv4_compile.graph_pass(max_tokens=64)
    assert ours.is_applicable_for_range(Range(1, 64))
    assert not ours.is_applicable_for_range(Range(1, 65))
    (note,) = dsv4_compile.report().graphs[0].notes
    assert "1 to 65 tokens" in note
    assert dsv4_compile.graph_pass().is_applicable_for_range(Range(1, 1 << 20))
