"""The plugin in a process with vLLM: silent until it is wanted, one line when it is, never an exception."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import CompilationConfig, VllmConfig

import dsv4_compile
from dsv4_compile.vllm import plugin
from dsv4_compile.vllm.settings import HOOK, PASS


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the plugin logs."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler()
    plugin.logger.addHandler(handler)
    before = plugin.logger.level
    plugin.logger.setLevel(logging.INFO)  # as an engine's logging does
    plugin.register()
    plugin._once.cache_clear()
    yield found
    plugin.logger.removeHandler(handler)
    plugin.logger.setLevel(before)


def make(additional: Any = None, **settings: Any) -> VllmConfig:
    return VllmConfig(compilation_config=CompilationConfig(**settings), additional_config=additional or {})


def hook_of(config: VllmConfig) -> Any:
    return config.compilation_config.inductor_compile_config.get(HOOK)


def test_it_is_an_entry_point_of_vllms_group():
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name="dsv4")
    assert found.load() is plugin.register


def test_it_is_silent_and_changes_nothing_until_it_is_wanted(lines):
    config = make()
    assert lines == [] and hook_of(config) is None and config.additional_config == {}


def test_registering_again_changes_nothing(lines):
    wrapped = VllmConfig.__post_init__
    plugin.register()
    assert VllmConfig.__post_init__ is wrapped


def test_one_variable_is_enough(lines, monkeypatch):
    monkeypatch.setenv("DSV4_VLLM", "1")
    assert hook_of(make()) is dsv4_compile.post_grad_pass
    assert hook_of(make()) is dsv4_compile.post_grad_pass
    assert len(lines) == 1 and lines[0].startswith("dsv4: the passes run in mode DYNAMO_TRACE_ONCE")


def test_a_key_of_the_configuration_is_enough_and_may_hold_options(lines):
    assert hook_of(make({"dsv4": True})) is dsv4_compile.post_grad_pass
    chosen = hook_of(make({"dsv4": {"mhc": "reference"}}))
    assert chosen.options.mhc == "reference"
    assert "mhc=reference" in lines[-1]


def test_the_users_dictionary_stays_as_it_was(lines):
    given = {"dsv4": True}
    assert "dsv4_compile" in make(given).additional_config
    assert given == {"dsv4": True}


def test_the_variable_switches_the_key_off(lines, monkeypatch):
    monkeypatch.setenv("DSV4_VLLM", "0")
    assert hook_of(make({"dsv4": True})) is None and lines == []


def test_vllms_keys_follow_our_settings(monkeypatch, lines):
    def key(options: str = "{}", **settings: Any) -> str:
        monkeypatch.setenv("DSV4_OPTIONS", options)
        return make(mode=2, **settings).compute_hash()

    keys = [key(), key(backend="dsv4"), key('{"mhc": "off"}', backend="dsv4"), key(backend="dsv4")]
    assert keys[1] == keys[3] and len(set(keys)) == 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": 0}, "vLLM compiles nothing"),
        ({"mode": 1}, "vLLM compiles nothing on a CPU in mode STOCK_TORCH_COMPILE"),
        ({"mode": 2, "backend": "eager"}, "runs no passes of Inductor"),
        ({"mode": 2}, "the passes run in mode DYNAMO_TRACE_ONCE"),
    ],
)
def test_it_says_what_runs_and_why_not(lines, settings, sentence):
    make(inductor_passes={HOOK: PASS}, **settings)
    assert len(lines) == 1 and sentence in lines[0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": 2, "backend": "dsv4"}, 'backend "dsv4" compiles whole graphs in mode DYNAMO_TRACE_ONCE'),
        ({"mode": 1, "backend": "dsv4"}, "vLLM compiles nothing on a CPU in mode STOCK_TORCH_COMPILE"),
        ({"backend": "dsv4"}, 'set "mode": 2 together with the backend'),
    ],
)
def test_it_says_whether_the_backend_runs(lines, settings, sentence):
    make(**settings)
    assert len(lines) == 1 and sentence in lines[0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"inductor_passes": {HOOK: PASS}}, "hands no passes to Inductor"),
        ({"backend": "dsv4"}, 'backend "dsv4" compiles whole graphs in mode STOCK_TORCH_COMPILE'),
    ],
)
def test_mode_1_is_for_the_backend_on_a_gpu(lines, monkeypatch, settings, sentence):
    from dsv4_compile.vllm import verdict

    monkeypatch.setattr(verdict, "_is_cpu", lambda: False)
    make(mode=1, **settings)
    assert len(lines) == 1 and sentence in lines[0]


def test_deepseek_v4_in_breakable_graphs_is_said_with_the_way_out(monkeypatch):
    import vllm
    from vllm.platforms import current_platform

    from dsv4_compile.vllm import verdict

    config = make()

    class Model:
        architectures = ("DeepseekV4ForCausalLM",)

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    found = type("Config", (), {"model_config": Model(), "compilation_config": config.compilation_config})()
    for release, runs in (("0.22.1", True), ("0.23.0", False), ("0.32.0", False)):
        monkeypatch.setattr(vllm, "__version__", release)
        is_on, text = verdict.of(found, dsv4_compile.post_grad_pass, False)
        assert is_on == runs
        assert runs or ("VLLM_USE_BREAKABLE_CUDAGRAPH=0" in text and release in text)


@pytest.mark.parametrize("variable", ["DSV4_VLLM", "key"])
def test_a_value_that_means_nothing_is_one_line(lines, monkeypatch, variable):
    if variable == "key":
        config = make({"dsv4": "yes please"})
    else:
        monkeypatch.setenv("DSV4_VLLM", "perhaps")
        config = make()
    assert hook_of(config) is None
    assert len(lines) == 1 and "nothing of ours was set up" in lines[0]


def test_an_unknown_option_in_the_key_is_one_line(lines):
    assert hook_of(make({"dsv4": {"mch": "off"}})) is None
    assert len(lines) == 1 and "'mhc'" in lines[0]


def test_our_pass_in_a_hook_where_it_cannot_run_is_taken_out(lines):
    config = make(inductor_passes={"pre_grad_custom_pass": PASS})
    assert "pre_grad_custom_pass" not in config.compilation_config.inductor_compile_config
    assert any("cannot run in the hook pre_grad_custom_pass" in line for line in lines)


def test_the_name_where_vllm_wants_the_object_becomes_the_object(lines):
    assert hook_of(make(inductor_compile_config={HOOK: PASS})) is dsv4_compile.post_grad_pass
    wrong = make(inductor_compile_config={HOOK: "dsv4_compile.post_grad_passes"})
    assert hook_of(wrong) is None and any("is not used" in line for line in lines)


def test_a_hook_that_is_taken_stays_theirs(lines, monkeypatch):
    from vllm.compilation.passes.inductor_pass import CallableInductorPass

    monkeypatch.setenv("DSV4_VLLM", "1")
    theirs = CallableInductorPass(print, uuid="theirs")
    assert hook_of(make(inductor_compile_config={HOOK: theirs})) is theirs
    assert len(lines) == 1 and "is taken by CallableInductorPass" in lines[0]


def test_a_release_without_what_we_look_for_is_one_line(lines, monkeypatch):
    import vllm.config

    monkeypatch.delattr(vllm.config, "VllmConfig")
    plugin.register()
    assert len(lines) == 1 and "nothing of ours runs with this vLLM" in lines[0]


def test_wrong_options_in_the_environment_leave_the_engine_alone():
    import os
    import subprocess
    import sys

    code = f"""
from vllm.config import CompilationConfig, VllmConfig
from dsv4_compile.vllm import plugin
plugin.register()
config = VllmConfig(compilation_config=CompilationConfig(inductor_passes={{{HOOK!r}: {PASS!r}}}))
print(config.compilation_config.inductor_compile_config[{HOOK!r}].idle)
"""
    environment = os.environ | {"DSV4_OPTIONS": '{"mch": 1}'}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "unknown option 'mch'" in done.stdout and "Traceback" not in done.stderr
