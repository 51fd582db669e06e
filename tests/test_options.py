"""Options: defaults, sources, contradictions, the sentence of every error, and fingerprints."""

import copy
import dataclasses
import json
import os
import pathlib
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

from dsv4_compile.options import OptionError, Options, disabled

DEFAULTS = {
    "projections": "auto",
    "num_streams": 3,
    "stream_max_tokens": 1024,
    "mhc": "auto",
    "attention": "auto",
    "cudagraphs": "auto",
    "capture_sizes": None,
    "capture_memory": None,
    "split_ops": [],
    "branches": False,
    "deterministic": False,
    "verify": 0,
    "strict": False,
    "dump_dir": None,
    "compiler": "inductor",
    "inductor": {},
}

WRONG = [
    ({"projection": "pack"}, "'projection'", "'projections'"),
    ({"max_autotune": True}, "'max_autotune'", "go into 'inductor'"),
    ({"projections": "packed"}, "'packed'", "'pack'"),
    ({"projections": False}, "the bool False", "'off'"),
    ({"mhc": "tritton"}, "'tritton'", "'triton'"),
    ({"mhc": None}, "None", "is 'off'"),
    ({"mhc": "cuda"}, "the str 'cuda'", "is 'auto', which takes 'cuda' where that is the best"),
    ({"mhc": "CPP"}, "the str 'CPP'", "is 'auto', which takes 'cpp'"),
    ({"mhc": "ref"}, "'ref'", "is 'reference'"),
    ({"attention": False}, "the bool False", "is 'off'"),
    ({"projections": "parallel"}, "'parallel'", "is 'streams'"),
    ({"cudagraphs": True}, "the bool True", "is 'auto'"),
    ({"cudagraphs": "piecwise"}, "'piecwise'", "'piecewise'"),
    ({"cudagraphs": "OFF"}, "'OFF'", "'off'"),
    ({"compiler": "Eager"}, "'Eager'", "'eager'"),
    ({"num_streams": 17}, "the int 17", "16"),
    ({"num_streams": True}, "the bool True", "is 3"),
    ({"num_streams": "4"}, "the str '4'", "is 4"),
    ({"stream_max_tokens": -1}, "the int -1", "is 0"),
    ({"stream_max_tokens": 512.0}, "the float 512.0", "is 512"),
    ({"verify": True}, "the bool True", "is 0"),
    ({"verify": float("nan")}, "the float nan", "is 0"),
    ({"capture_sizes": [1, 0, 8]}, "the int 0", "[1, 8]"),
    ({"capture_sizes": [True]}, "the bool True", "None"),
    ({"capture_sizes": []}, "empty", "None"),
    ({"capture_sizes": 8}, "the int 8", "[8]"),
    ({"capture_sizes": "8"}, "the str '8'", "None"),
    ({"capture_memory": 0}, "the int 0", "is 1"),
    ({"capture_memory": 1.5e9}, "the float", "is 1500000000"),
    ({"capture_memory": "1GB"}, "the str '1GB'", "is None"),
    ({"split_ops": "vllm::unified_attention"}, "the str", "['vllm::unified_attention']"),
    ({"split_ops": torch.ops.aten.mm}, "the OpOverloadPacket", "['aten::mm']"),
    ({"split_ops": [torch.ops.aten.mm.default]}, "the OpOverload", "'aten::mm.default'"),
    ({"split_ops": ["vllm.unified_attention"]}, "'vllm.unified_attention'", "'vllm::unified_attention'"),
    ({"split_ops": ["torch.ops.vllm.mla.default"]}, "mla.default", "'vllm::mla.default'"),
    ({"split_ops": [3]}, "the int 3", "'3'"),
    ({"branches": "on"}, "the str 'on'", "is True"),
    ({"deterministic": 1}, "the int 1", "is True"),
    ({"strict": "no"}, "the str 'no'", "is False"),
    ({"dump_dir": 3}, "the int 3", "os.PathLike"),
    ({"dump_dir": b"x"}, "the bytes", "os.PathLike"),
    ({"dump_dir": ""}, "the str ''", "'.'"),
    ({"inductor": [("max_autotune", True)]}, "the list", "{}"),
    ({"inductor": {3: True}}, "the int 3", "{}"),
]

CONTRADICTING = [
    ({"projections": "streams", "num_streams": 0}, "num_streams=3"),
    ({"projections": "streams", "stream_max_tokens": 0}, "stream_max_tokens=1024"),
    ({"capture_sizes": [1, 2], "cudagraphs": "off"}, 'cudagraphs="auto"'),
    ({"capture_memory": 1 << 30, "cudagraphs": "off"}, "capture_memory=None"),
    ({"compiler": "eager", "inductor": {"max_autotune": True}}, 'compiler="inductor"'),
]

CHANGED = {
    "projections": "pack",
    "num_streams": 2,
    "stream_max_tokens": 0,
    "mhc": "triton",
    "attention": "off",
    "cudagraphs": "full",
    "capture_sizes": [1, 8],
    "split_ops": ["vllm::unified_attention"],
    "branches": True,
    "deterministic": True,
    "compiler": "eager",
    "inductor": {"max_autotune": True},
}


class Pass:
    """An Inductor pass as other people write it: an identity, no equality."""

    def __init__(self, identity: object) -> None:
        self.identity = identity

    def uuid(self) -> object:
        return self.identity


def test_defaults_are_those_of_the_table() -> None:
    assert Options().to_dict() == DEFAULTS
    assert list(Options().to_dict()) == list(DEFAULTS)
    assert Options.from_mapping(None) == Options.from_mapping({}) == Options()


@pytest.mark.parametrize(("mapping", "found", "nearest"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_error_is_one_sentence_with_what_was_found_and_the_nearest(
    mapping: dict[str, object], found: str, nearest: str
) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_mapping(mapping)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert next(iter(mapping)) in message and found in message and nearest in message
    assert message.endswith(".") and "\n" not in message and ". " not in message


@pytest.mark.parametrize("word", ["cutlass", "", "xyz"])
def test_where_no_value_is_near_all_of_them_are_listed(word: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_mapping({"mhc": word})
    assert str(caught.value) == (
        f"Option 'mhc' must be one of 'auto', 'tilelang', 'triton', 'reference', 'off', and it is the str {word!r}."
    )


def test_every_option_has_an_error_case() -> None:
    assert {name for mapping, _, _ in WRONG for name in mapping} >= set(DEFAULTS)


@pytest.mark.parametrize(("mapping", "advice"), CONTRADICTING, ids=[str(case[0]) for case in CONTRADICTING])
def test_contradiction_names_both_options_and_a_way_out(mapping: dict[str, object], advice: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_mapping(mapping)
    assert all(f"{name}=" in str(caught.value) for name in mapping)
    assert advice in str(caught.value)


def test_options_are_not_a_mapping() -> None:
    with pytest.raises(OptionError, match="mapping from option names"):
        Options.from_mapping(["mhc"])  # type: ignore[arg-type]


def test_direct_construction_and_replacement_are_checked_too() -> None:
    with pytest.raises(OptionError, match="nearest is 'triton'"):
        Options(mhc="Triton")
    with pytest.raises(OptionError, match="nearest is 16"):
        dataclasses.replace(Options(), num_streams=99)
    assert dataclasses.replace(Options(), mhc="triton").explicit == {"mhc"}


def test_values_are_normalised(tmp_path: pathlib.Path) -> None:
    options = Options.from_mapping({"capture_sizes": [8, 1, 8], "split_ops": ["a::b", "a::b"], "dump_dir": tmp_path})
    assert options.capture_sizes == (1, 8)
    assert options.split_ops == ("a::b",)
    assert options.dump_dir == str(tmp_path)


def test_splitting_without_capture_is_allowed() -> None:
    assert Options.from_mapping({"split_ops": ["a::b"], "cudagraphs": "off"}).split_ops == ("a::b",)


def test_given_settings_are_copied() -> None:
    settings = {"max_autotune": True}
    options = Options.from_mapping({"inductor": settings})
    settings["max_autotune"] = False
    assert options.inductor == {"max_autotune": True}


def test_explicit_options_are_known_and_change_nothing_else() -> None:
    options = Options.from_mapping({"mhc": "auto", "verify": 2})
    assert options.explicit == {"mhc", "verify"}
    assert options == Options(verify=2)
    assert hash(options) == hash(Options(verify=2))
    assert options.fingerprint() == Options(verify=2).fingerprint()


def test_options_survive_pickle_deepcopy_and_their_own_dict() -> None:
    options = Options.from_mapping({"mhc": "auto", "capture_sizes": [1, 2], "inductor": {"max_autotune": True}})
    for other in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert other == options and other.explicit == options.explicit
    assert Options.from_mapping(options.to_dict()) == options


def test_dict_is_json_safe_whatever_is_passed_to_inductor() -> None:
    options = Options(inductor={"post_grad_custom_post_pass": Pass("a"), "max_autotune": True, "limit": float("inf")})
    values = json.loads(json.dumps(options.to_dict(), allow_nan=False))
    assert values["inductor"]["max_autotune"] is True
    assert "Pass" in values["inductor"]["post_grad_custom_post_pass"]


# ------------------------------------------------------------------------------------------------------- environment


def test_environment_overrides_the_call() -> None:
    options = Options.resolve({"mhc": "off", "verify": 1}, {"DSV4_OPTIONS": '{"mhc": "triton"}'})
    assert (options.mhc, options.verify) == ("triton", 1)
    assert options.explicit == {"mhc", "verify"}


def test_environment_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_OPTIONS", '{"capture_sizes": [4], "strict": true}')
    assert Options.resolve() == Options(capture_sizes=(4,), strict=True)
    monkeypatch.setenv("DSV4_OPTIONS", " ")
    assert Options.resolve({}) == Options()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{mhc: triton}", "is not JSON"),
        ('["mhc"]', "the list"),
        ('{"mch": "triton"}', "'mhc'"),
        ('{"mhc": "trito"}', "'triton'"),
    ],
)
def test_wrong_environment_is_explained(text: str, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.resolve({}, {"DSV4_OPTIONS": text})
    assert expected in str(caught.value)
    if "trito" not in text or "{mhc" in text:
        assert "DSV4_OPTIONS" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "environment", "dropped"),
    [
        ({"capture_sizes": [1]}, {"cudagraphs": "off"}, "capture_sizes"),
        ({"cudagraphs": "off"}, {"capture_sizes": [1]}, "cudagraphs"),
        ({"inductor": {"max_autotune": True}}, {"compiler": "eager"}, "inductor"),
        ({"projections": "streams"}, {"num_streams": 0}, "projections"),
        ({"num_streams": 0}, {"projections": "streams"}, "num_streams"),
    ],
)
def test_environment_wins_over_what_contradicts_it_in_the_call(
    call: dict[str, object], environment: dict[str, object], dropped: str
) -> None:
    with pytest.warns(UserWarning, match=f"so {dropped}="):
        options = Options.resolve(call, {"DSV4_OPTIONS": json.dumps(environment)})
    assert dropped not in options.explicit
    assert {name: options.to_dict()[name] for name in environment} == environment


def test_contradiction_within_the_call_is_an_error_whatever_the_environment_says() -> None:
    with pytest.raises(OptionError, match="contradict"):
        Options.resolve({"capture_sizes": [1], "cudagraphs": "off"}, {"DSV4_OPTIONS": '{"mhc": "off"}'})


def test_no_warning_without_contradiction() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Options.resolve({"mhc": "triton", "num_streams": 2}, {"DSV4_OPTIONS": '{"mhc": "off"}'})


@pytest.mark.parametrize("word", ["1", "true", "Yes", " ON "])
def test_disabled_by(word: str) -> None:
    assert disabled({"DSV4_DISABLE": word})


@pytest.mark.parametrize("word", ["0", "False", "no", "off", "", " "])
def test_not_disabled_by(word: str) -> None:
    assert not disabled({"DSV4_DISABLE": word})


def test_disable_with_another_word_is_an_error() -> None:
    assert not disabled({})
    with pytest.raises(OptionError, match=r"DSV4_DISABLE.*'ture'.*nearest is 'true'"):
        disabled({"DSV4_DISABLE": "ture"})


# ------------------------------------------------------------------------------------------------------- fingerprint


def test_every_option_that_changes_code_changes_the_fingerprint() -> None:
    prints = {Options.from_mapping({name: value}).fingerprint() for name, value in CHANGED.items()}
    assert len(prints | {Options().fingerprint()}) == len(CHANGED) + 1
    assert set(CHANGED) | {"dump_dir", "verify", "strict", "capture_memory"} == set(DEFAULTS)


@pytest.mark.parametrize(
    "mapping", [{"dump_dir": "here"}, {"verify": 3}, {"capture_memory": 9}, {"strict": True}, {"mhc": "auto"}]
)
def test_options_without_effect_on_code_leave_the_fingerprint(mapping: dict[str, object]) -> None:
    assert Options.from_mapping(mapping).fingerprint() == Options().fingerprint()


def test_fingerprint_is_the_same_in_another_process() -> None:
    mapping = {**CHANGED, "compiler": "inductor", "inductor": {"a": [1, {"c": True}], "b": "x", "sort": None}}
    code = (
        "import json, sys; from dsv4_compile.options import Options;"
        "import operator; m = json.loads(sys.argv[1]); m['inductor']['hook'] = operator.add;"
        "print(Options.from_mapping(m).fingerprint())"
    )
    prints = set()
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, json.dumps(mapping)]
        prints.add(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)
    assert len(prints) == 1


def test_passes_count_by_their_uuid() -> None:
    def fingerprint(identity: object) -> str:
        return Options(inductor={"post_grad_custom_post_pass": [Pass(identity)]}).fingerprint()

    assert fingerprint("a") == fingerprint("a") != fingerprint("b")
    # No uuid means: do not take two of these for the same.
    kept = [Options(inductor={"hook": Pass(None)}) for _ in range(2)]
    assert kept[0].fingerprint() != kept[1].fingerprint()


def test_functions_without_a_lasting_identity_are_told_apart() -> None:
    def hook(scale: int) -> object:
        return lambda graph: scale

    kept = [Options(inductor={"hook": hook(scale)}) for scale in (1, 2)]
    assert kept[0].fingerprint() != kept[1].fingerprint()
    assert Options(inductor={"a": 1}).fingerprint() != Options(inductor={"a": True}).fingerprint()
