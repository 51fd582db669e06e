"""Environment variables: a wrong value is told once and counts as none, and `doctor` lists it and misspelt names."""

from __future__ import annotations

import logging
import os
import re

import pytest
import torch
from torch import nn

from dsv4_compile.cli import doctor
from dsv4_compile.kernels import environment
from dsv4_compile.passes import projections, verify
from dsv4_compile.passes.vllm_mhc import VllmMhcPass

READERS = ("DSV4_OPTIONS", "DSV4_DISABLE", "DSV4_VLLM", "DSV4_VLLM_MAX_TOKENS", "DSV4_DUMP_LIMIT")


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours is set, and nothing has been told of any."""
    for name in [name for name in os.environ if name.startswith("DSV4_")]:
        monkeypatch.delenv(name)
    environment._warn.cache_clear()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "DSV4_" in r.getMessage()]


@pytest.mark.parametrize("name", environment.WORDS)
def test_a_wrong_word_is_told_once_and_counts_as_none(name, monkeypatch, caplog):
    default, words = environment.WORDS[name]
    assert environment.word(name) == default
    monkeypatch.setenv(name, "sometimes")
    assert [environment.word(name), environment.word(name)] == [default, default]
    (sentence,) = told(caplog)
    assert sentence.startswith(f"{name} is 'sometimes'; it can be ") and sentence.endswith(f" and {default} is used.")
    assert all(word in sentence for word in words)
    for word in ("", " ", *words, f" {words[0].upper()} "):
        monkeypatch.setenv(name, word)
        assert environment.word(name) == (word.strip().lower() or default)
    assert len(told(caplog)) == 1


@pytest.mark.parametrize(("word", "meant"), [("yes", "1"), ("True", "1"), ("on", "1"), ("no", "0"), ("off", "0")])
def test_a_switch_has_other_words_as_well(word, meant, monkeypatch, caplog):
    for name in ("DSV4_MEASURE", "DSV4_PIECES", "DSV4_CHECK"):
        monkeypatch.setenv(name, word)
        assert environment.word(name) == meant
    assert (projections._measures(), verify.wanted()) == (meant == "1", meant == "1")
    assert told(caplog) == []


def test_every_wrong_one_is_told_by_a_compilation_that_does_not_need_it(monkeypatch, caplog):
    for name in environment.WORDS:
        monkeypatch.setenv(name, "sometimes")
    for width in (4, 5):
        with torch.no_grad():
            torch.compile(nn.Linear(width, 4), backend="dsv4", options={"compiler": "eager"})(torch.randn(2, width))
    assert sorted(sentence.partition(" ")[0] for sentence in told(caplog)) == sorted(environment.WORDS)
    assert VllmMhcPass().uuid().endswith(":auto")


def test_every_variable_that_is_read_is_in_the_readme_and_known_to_the_doctor(pytestconfig):
    root = pytestconfig.rootpath
    files = [path for folder in ("dsv4_compile", "passes", "kernels") for path in (root / folder).rglob("*.py")]
    quoted = {name for path in files for name in re.findall(r'"(DSV4_[A-Z_]*[A-Z])"', path.read_text())}
    assert quoted == {*environment.WORDS, *READERS}
    readme = (root / "README.md").read_text()
    assert [name for name in quoted if f"`{name}`" not in readme] == []


# -------------------------------------------------------------------------------------------------------------- doctor


@pytest.mark.parametrize("name", [*environment.WORDS, *READERS])
def test_doctor_lists_a_wrong_value(name, monkeypatch):
    monkeypatch.setenv(name, "sometimes")
    (check,) = [check for check in doctor.checks() if name in check.name + check.detail and check.state == "problem"]
    assert check.value == "cannot be used" and name in check.detail and "'sometimes'" in check.detail


def test_doctor_looks_up_settings_of_inductor_in_the_options(monkeypatch):
    monkeypatch.setenv("DSV4_OPTIONS", '{"inductor": {"max_autotun": true}}')
    (check,) = [check for check in doctor.checks() if check.name == "environment"]
    assert check.state == "problem" and "'max_autotune'" in check.detail


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("DSV4_OPTION", "DSV4_OPTIONS was probably meant"),
        ("DSV4_TUNEE", "DSV4_TUNE was probably meant"),
        ("DSV4_LIMIT", "DSV4_DUMP_LIMIT was probably meant"),
        ("DSV4_MHC", "'mhc' is an option; options go into DSV4_OPTIONS"),
        ("DSV4_MODEL_PATH", None),
    ],
)
def test_doctor_names_a_variable_that_nobody_reads(name, sentence, monkeypatch):
    monkeypatch.setenv(name, "1")
    found = [check.detail for check in doctor.checks() if check.name == name]
    assert found == ([] if sentence is None else [sentence])
