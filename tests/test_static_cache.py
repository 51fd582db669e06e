"""A static cache for transformers' DeepSeek-V4: the numbers of the cache that grows, and one graph for all steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import dsv4_compile
from dsv4_compile import assembly
from dsv4_compile.huggingface import ATTENTION, StaticDeepseekV4Cache
from tests.models import CSA, HCA, SLIDING, deepseek
from tests.recorder import Arena, FakeRecorder

LAYERS = (SLIDING, CSA, HCA, CSA)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    # Many heads of the indexer, for no two scores may be the same: which of them is taken is not defined.
    return deepseek(LAYERS, iters=2, hash_layers=1, index_heads=32, index_topk=3)


@pytest.fixture(autouse=True)
def no_grad() -> object:
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def tokens(model: nn.Module, count: int, rows: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (rows, count), generator=generator)


def prompted(model: nn.Module, ids: Tensor, **more: Tensor) -> DynamicCache:
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, **more)
    return cache


def steps(model: nn.Module, ids: Tensor, cache: object, call: object = None) -> Tensor:
    model.set_attn_implementation(ATTENTION if isinstance(cache, StaticDeepseekV4Cache) else "eager")
    call = model if call is None else call
    return torch.cat([call(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])], 1)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("prompt", [1, 3, 4, 7, 8, 9, 16, 21])
def test_steps_equal_those_with_the_cache_that_grows(model: nn.Module, prompt: int, rows: int) -> None:
    """Windows of 8, compressors of 4 and 8: prompts that end before, at and behind each of their borders."""
    ids = tokens(model, prompt + 26, rows)
    cache = prompted(model, ids[:, :prompt])
    static = StaticDeepseekV4Cache.of(copy.deepcopy(cache), model, ids.shape[1])
    expected = steps(model, ids[:, prompt:], cache)
    assert error(steps(model, ids[:, prompt:], static), expected) < 1e-5


def test_room_for_more_tokens_than_there_are_changes_nothing(model: nn.Module) -> None:
    ids = tokens(model, 30)
    cache = prompted(model, ids[:, :5])
    found = [
        steps(model, ids[:, 5:], StaticDeepseekV4Cache.of(copy.deepcopy(cache), model, length))
        for length in (30, 31, 200)
    ]
    assert error(found[1], found[0]) < 1e-5 and error(found[2], found[0]) < 1e-5


def test_all_steps_are_one_graph_that_is_captured_whole(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FakeRecorder()
    recorder.arena = Arena(1 << 26)
    monkeypatch.setattr(assembly, "recorder_of", lambda device: recorder)
    ids = tokens(model, 40)
    cache = prompted(model, ids[:, :6])
    static = StaticDeepseekV4Cache.of(copy.deepcopy(cache), model, 40)
    expected = steps(model, ids[:, 6:], cache)
    options = {"compiler": "eager", "cudagraphs": "full"}
    compiled = torch.compile(copy.copy(model), backend="dsv4", options=options, fullgraph=True)
    compiled.set_attn_implementation(ATTENTION)
    assert error(steps(model, ids[:, 6:], static, compiled), expected) < 1e-5
    (graph,) = dsv4_compile.report().graphs
    assert graph.cudagraphs.mode == "full" and graph.cudagraphs.replays == 33
    assert len(recorder.recorded) == 1 and not graph.cudagraphs.fallbacks
    assert len(graph.mhc) == 2 * len(LAYERS) + 2


@pytest.mark.slow
def test_inductor_compiles_it_once(model: nn.Module) -> None:
    ids = tokens(model, 30)
    cache = prompted(model, ids[:, :6])
    static = StaticDeepseekV4Cache.of(copy.deepcopy(cache), model, 40)
    expected = steps(model, ids[:, 6:], cache)
    compiled = torch.compile(copy.copy(model), backend="dsv4", fullgraph=True)
    assert error(steps(model, ids[:, 6:], static, compiled), expected) < 1e-5
    assert len(dsv4_compile.report().graphs) == 1


@pytest.mark.parametrize("first", [2, 3, 8, 11])
def test_a_chat_goes_on_with_the_next_prompt(model: nn.Module, first: int) -> None:
    ids = tokens(model, first + 9 + 7 + 12)
    cache = prompted(model, ids[:, :first])
    static = StaticDeepseekV4Cache.of(copy.deepcopy(cache), model, 100)
    steps(model, ids[:, first : first + 9], cache)
    steps(model, ids[:, first : first + 9], static)
    again = static.to_dynamic()
    model.set_attn_implementation("eager")
    prompt = ids[:, first + 9 : first + 16]
    expected, got = (model(prompt, past_key_values=one).logits for one in (cache, again))
    assert error(got, expected) < 1e-5
    rest = ids[:, first + 16 :]
    static = StaticDeepseekV4Cache.of(again, model, 100)
    assert error(steps(model, rest, static), steps(model, rest, cache)) < 1e-5


def test_places_of_padding_are_left_out(model: nn.Module) -> None:
    ids = tokens(model, 5 + 12, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = prompted(model, ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5])
    static = StaticDeepseekV4Cache.of(copy.deepcopy(cache), model, 40, attention_mask=mask[:, :5])
    for i in range(5, 17):
        model.set_attn_implementation("eager")
        given = {"position_ids": positions[:, i : i + 1]}
        expected = model(ids[:, i : i + 1], past_key_values=cache, attention_mask=mask[:, : i + 1], **given).logits
        model.set_attn_implementation(ATTENTION)
        assert error(model(ids[:, i : i + 1], past_key_values=static, **given).logits, expected) < 1e-5


def test_behind_the_last_place_results_are_nan_and_nothing_else_is_written(model: nn.Module) -> None:
    ids = tokens(model, 14)
    static = StaticDeepseekV4Cache.of(prompted(model, ids[:, :6]), model, 10)
    out = steps(model, ids[:, 6:12], static)
    assert out[:, :4].isfinite().all() and out[:, 4:].isnan().all()
    with pytest.raises(ValueError, match="has seen 12 tokens, and max_length is 10"):
        static.to_dynamic()


def test_several_tokens_are_refused(model: nn.Module) -> None:
    ids = tokens(model, 14)
    static = StaticDeepseekV4Cache.of(prompted(model, ids[:, :6]), model, 20)
    model.set_attn_implementation(ATTENTION)
    with pytest.raises(ValueError, match="one token at a time, not 3"):
        model(ids[:, 6:9], past_key_values=static)


def test_what_is_no_cache_of_the_model_is_refused(model: nn.Module) -> None:
    ids = tokens(model, 6)
    with pytest.raises(ValueError, match="holds 0 tokens"):
        StaticDeepseekV4Cache.of(DynamicCache(config=model.config), model, 20)
    with pytest.raises(ValueError, match="holds 6 tokens"):
        StaticDeepseekV4Cache.of(prompted(model, ids), model, 6)
    with pytest.raises(ValueError, match="not from None"):
        StaticDeepseekV4Cache.of(None, model, 20)
    with pytest.raises(ValueError, match="a number of tokens, and it is '40'"):
        StaticDeepseekV4Cache.of(prompted(model, ids), model, "40")
    with pytest.raises(ValueError, match="not one of this DeepSeek-V4"):
        StaticDeepseekV4Cache.of(prompted(model, ids), deepseek((SLIDING,), iters=2), 20)


@pytest.mark.parametrize("compiled", [False, True])
def test_another_attention_is_refused(model: nn.Module, compiled: bool) -> None:
    """It would multiply the places that hold nothing, and give NaN."""
    ids = tokens(model, 8)
    static = StaticDeepseekV4Cache.of(prompted(model, ids[:, :6]), model, 20)
    step = torch.compile(model, backend="dsv4", options={"compiler": "eager"}) if compiled else model
    with pytest.raises(Exception, match=r"set_attn_implementation.*model's attention is 'eager'"):
        step(ids[:, 6:7], past_key_values=static)
    assert torch.isfinite(steps(model, ids[:, 6:7], static)).all()


def test_other_sequences_are_refused(model: nn.Module) -> None:
    static = StaticDeepseekV4Cache.of(prompted(model, tokens(model, 6, rows=2)), model, 20)
    with pytest.raises(ValueError, match="has 2 sequences, and a step came with tokens of 1"):
        steps(model, tokens(model, 1), static)


def test_the_attention_of_the_static_cache_serves_the_other_one_as_well(model: nn.Module) -> None:
    ids = tokens(model, 20, rows=2)
    expected = steps(model, ids[:, 7:], prompted(model, ids[:, :7]))
    cache = prompted(model, ids[:, :7])
    model.set_attn_implementation(ATTENTION)
    got = torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(7, 20)], 1)
    assert error(got, expected) < 1e-5
    fresh = DynamicCache(config=model.config)
    assert error(model(ids, past_key_values=fresh).logits, model(ids, use_cache=False).logits) < 1e-5
