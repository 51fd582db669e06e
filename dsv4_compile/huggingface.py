"""A cache for transformers' DeepSeek-V4 whose tensors keep their sizes and addresses: a decode step is one graph.

transformers' own cache grows: each step has other sizes, the compressors close a window every fourth or 128th step, and
Dynamo makes a graph for each of these phases. Here every step does the same. Lists have room for the longest context,
places that hold nothing yet are marked, and what only some steps do is done by all and kept by those.

    cache = DynamicCache(config=model.config)
    logits = model(prompt, past_key_values=cache).logits                    # the prompt, as ever
    cache = StaticDeepseekV4Cache.of(cache, model, max_length=4096)
    model.set_attn_implementation("dsv4_static")
    compiled = torch.compile(model, backend="dsv4", options={"cudagraphs": "full"})
    logits = compiled(token, past_key_values=cache).logits                  # one token of each sequence at a time

Sizes: B sequences, W the sliding window, D the head dimension, R tokens in a window of a compressor, T such windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

__all__ = ["ATTENTION", "StaticDeepseekV4Cache"]

ATTENTION = "dsv4_static"
"""The attention implementation that knows the marked places."""
_ABSENT = float("inf")
"""In every feature of a place that holds nothing."""
_STATIC = -1
"""The offset by which the mask knows a cache of ours; those of transformers are at least 0."""


class StaticDeepseekV4Cache(Cache):
    """The state of a generation, for steps of one token of each sequence.

    Made with `of` from a cache of transformers that has seen the prompt; `to_dynamic` makes one of that kind again, for
    the next prompt of a chat. Behind `max_length` tokens the results are NaN, for a CUDA graph can raise nothing.
    """

    @classmethod
    def of(
        cls, cache: DynamicCache, model: Any, max_length: int, attention_mask: Tensor | None = None
    ) -> StaticDeepseekV4Cache:
        """A static cache with the content of `cache`.

        Args:
            cache: has seen at least one token.
            model: the one that `cache` belongs to, or its config.
            max_length: most tokens of a sequence, those in `cache` included.
            attention_mask: `[B, tokens so far]`, 0 where a prompt is padded; then steps need `position_ids`, too.

        Raises:
            ValueError: `cache` is none of transformers' for DeepSeek-V4, empty, of another model, or longer than
                `max_length`, or that is no number.
        """
        if not isinstance(cache, DynamicCache):
            raise ValueError(f"A static cache is made from a DynamicCache that has seen a prompt, not from {cache!r}.")
        if not isinstance(max_length, int) or isinstance(max_length, bool):
            raise ValueError(f"max_length must be a number of tokens, and it is {max_length!r}.")
        config = getattr(model, "config", model)
        length = int(cache.get_seq_length())
        kinds = list(getattr(config, "layer_types", ()))
        if getattr(config, "model_type", "") != "deepseek_v4" or len(cache.layers) != len(kinds):
            raise ValueError(f"The cache has {len(cache.layers)} layers and is not one of this DeepSeek-V4.")
        if length == 0:
            raise ValueError("The cache holds 0 tokens: it must have seen a prompt.")
        if length >= max_length:
            raise ValueError(f"The cache holds {length} tokens, and max_length={max_length} leaves no room for a step.")
        absent = None if attention_mask is None else attention_mask[:, -length:] == 0
        layers = [
            _layer(layer, kind, config, max_length, absent) for layer, kind in zip(cache.layers, kinds, strict=True)
        ]
        made = cls(layers=layers)
        made.config = config
        return made

    def to_dynamic(self) -> DynamicCache:
        """A cache of transformers with the same content. Waits for the device. Not for padded prompts.

        Raises:
            ValueError: it has seen more than `max_length` tokens.
        """
        cache = DynamicCache(config=self.config)
        for mine, layer in zip(self.layers, cache.layers, strict=True):
            mine.give(layer)
        return cache


def _layer(layer: Any, kind: str, config: Any, max_length: int, absent: Tensor | None) -> _Window:
    if kind == "sliding_attention":
        return _Window(layer, config, max_length, absent)
    return _Compressed(layer, config, max_length, absent, config.compress_rates[kind])


def _fixed(tensor: Tensor) -> Tensor:
    """Memory of its own, whose address Dynamo takes for that of a parameter."""
    made = tensor.detach().clone(memory_format=torch.contiguous_format)
    torch._dynamo.mark_static_address(made)
    return made


class _Window(CacheLayerMixin):
    """The last W keys, which are the values, too: `[B, 1, W, D]`, the newest last."""

    is_compileable = True
    is_sliding = True

    def __init__(self, layer: Any, config: Any, max_length: int, absent: Tensor | None):
        super().__init__()
        window = config.sliding_window
        known = layer.keys[:, :, -window:]
        if absent is not None:
            gone = absent[:, -known.shape[2] :, None].unsqueeze(1).expand(known.shape)
            known = known.masked_fill(gone, _ABSENT)
        room = known.new_full((*known.shape[:2], window - known.shape[2], known.shape[3]), _ABSENT)
        self.keys = self.values = _fixed(torch.cat([room, known], 2))
        self.config, self.window, self.max_length = config, window, max_length
        self.length = _fixed(torch.tensor(int(layer.get_seq_length()), device=known.device))
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes the keys of one token, `[B, 1, 1, D]`; returns the window.

        Raises:
            ValueError: more than one token, or other sequences than those of the prompt.
        """
        if key_states.shape[0] != self.keys.shape[0]:
            rows, known = key_states.shape[0], self.keys.shape[0]
            raise ValueError(f"The cache has {known} sequences, and a step came with tokens of {rows}.")
        if key_states.shape[2] != 1:
            raise ValueError(f"A static cache takes one token at a time, not {key_states.shape[2]}; see to_dynamic().")
        key = torch.where(self.length < self.max_length, key_states, float("nan"))
        self.keys.copy_(torch.cat([self.keys[:, :, 1:], key], 2))
        self.length.add_(1)
        return self.keys, self.keys

    def get_seq_length(self) -> Tensor:
        """Tokens so far, a tensor."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of the window, and the mark of a static cache.

        Raises:
            ValueError: the model's attention does not know the marked places, and would multiply them.
        """
        attention = getattr(self.config, "_attn_implementation", None)
        if attention != ATTENTION:
            raise ValueError(
                "A static cache needs model.set_attn_implementation(dsv4_compile.huggingface.ATTENTION), and the "
                f"model's attention is {attention!r}."
            )
        return self.window, _STATIC

    def get_max_length(self) -> int:
        """Most tokens."""
        return self.max_length

    def give(self, layer: Any) -> None:
        """Fills a layer of transformers' cache.

        Raises:
            ValueError: more than `max_length` tokens were seen.
        """
        length = int(self.length)
        if length > self.max_length:
            raise ValueError(f"The cache has seen {length} tokens, and max_length is {self.max_length}.")
        layer.lazy_initialization(self.keys, self.keys)
        layer.keys = layer.values = self.keys[:, :, -min(length, self.window - 1) :].clone()
        layer.cumulative_length = length


class _Compressed(_Window):
    """A window, and what the compressors need; "indexer" beside "compressor" where there is one.

    By name: `buffer_kv` and `buffer_gate` `[B, R, F]` hold the tokens of the open window, `compressed_kv` `[B, T, D]`
    an entry for each closed one, `overlap_kv` and `overlap_gate` `[B, R, D]` what the last one leaves to the next.
    """

    def __init__(self, layer: Any, config: Any, max_length: int, absent: Tensor | None, rate: int):
        super().__init__(layer, config, max_length, absent)
        self.compress_rate = rate
        self.count = {name: _fixed(self.length) for name in layer.buffer_kv}
        self.buffer_kv = {name: _padded(tensor, rate, 0.0) for name, tensor in layer.buffer_kv.items()}
        self.buffer_gate = {name: _padded(tensor, rate, 0.0) for name, tensor in layer.buffer_gate.items()}
        # Who has an indexer masks what it does not name; the others attend to whatever is there.
        rest = 0.0 if "indexer" in layer.buffer_kv else _ABSENT
        windows = -(-max_length // rate)
        self.compressed_kv = {name: _padded(tensor, windows, rest) for name, tensor in layer.compressed_kv.items()}
        self.overlap_kv: dict[str, Tensor] = {}
        self.overlap_gate: dict[str, Tensor] = {}
        for name, tensor in getattr(layer, "overlap_kv", {}).items():
            entry = self.compressed_kv[name]
            shape = (entry.shape[0], rate, entry.shape[2])
            gate = layer.overlap_gate[name]
            self.overlap_kv[name] = _fixed(entry.new_zeros(shape) if tensor is None else tensor)
            self.overlap_gate[name] = _fixed(entry.new_full(shape, -torch.inf) if gate is None else gate)

    def _closes(self, name: str) -> Tensor:
        """Whether this token is the last of its window."""
        return (self.count[name] + 1) % self.compress_rate == 0

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in transformers, but the window comes whether it is full or not; its position is a tensor."""
        slot = (self.count[name] % self.compress_rate).view(1)
        self.buffer_kv[name].index_copy_(1, slot, kv)
        self.buffer_gate[name].index_copy_(1, slot, gate)
        first = self.count[name] // self.compress_rate * self.compress_rate
        return self.buffer_kv[name], self.buffer_gate[name], first

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """As in transformers; kept when the window closes."""
        closes = self._closes(name)
        found = []
        for kept, chunk in ((self.overlap_kv[name], chunk_kv), (self.overlap_gate[name], chunk_gate)):
            found.append(kept.clone())
            kept.copy_(torch.where(closes, chunk[:, -1, :, :head_dim], kept))
        return found[0], found[1]

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """As in transformers; kept when the window closes. Counts the token."""
        entries, count = self.compressed_kv[name], self.count[name]
        slot = (count // self.compress_rate).clamp(max=entries.shape[1] - 1).view(1)
        entries.index_copy_(1, slot, torch.where(self._closes(name), compressed, entries.index_select(1, slot)))
        count.add_(1)
        return entries

    def give(self, layer: Any) -> None:
        """As `_Window.give`."""
        super().give(layer)
        for name, count in self.count.items():
            entries, rest = divmod(int(count), self.compress_rate)
            layer.buffer_kv[name] = self.buffer_kv[name][:, :rest].clone()
            layer.buffer_gate[name] = self.buffer_gate[name][:, :rest].clone()
            layer.compressed_kv[name] = self.compressed_kv[name][:, :entries].clone()
            layer.entry_count[name] = entries
            if entries and name in self.overlap_kv:
                layer.overlap_kv[name] = self.overlap_kv[name].clone()
                layer.overlap_gate[name] = self.overlap_gate[name].clone()


def _padded(tensor: Tensor, size: int, fill: float) -> Tensor:
    """`[B, size, F]` with `tensor` in front."""
    rest = tensor.new_full((tensor.shape[0], size - tensor.shape[1], tensor.shape[2]), fill)
    return _fixed(torch.cat([tensor, rest], 1))


# ------------------------------------------------------------------------------------------------------------ attention


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' eager attention `[B, H, 1, D] x [B, 1, L, D]`, with the one key of all heads read once.

    Other shapes than those of a decode step go to transformers' own.
    """
    if query.shape[2] != 1 or key.shape[1] != 1 or module.training:
        return eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    key = key.squeeze(1)
    absent = (key == _ABSENT).all(-1)
    key = key.masked_fill(absent.unsqueeze(-1), 0.0)
    logits = torch.bmm(query.squeeze(2), key.transpose(1, 2)) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask.squeeze(2)
    logits = logits.masked_fill(absent.unsqueeze(1), -torch.inf)
    sinks = module.sinks.view(1, -1, 1).expand(logits.shape[0], -1, -1)
    logits = torch.cat([logits, sinks], -1)
    logits = logits - logits.max(-1, keepdim=True).values
    weights = torch.softmax(logits, -1, dtype=logits.dtype)[..., :-1].to(key.dtype)
    return torch.bmm(weights, key).unsqueeze(1), weights.unsqueeze(2)


def _mask(batch_size: int, q_length: int, kv_length: int, kv_offset: Any = 0, **kwargs: Any) -> Tensor:
    """That of transformers' eager attention; a static cache marks what is to be left out itself."""
    if isinstance(kv_offset, int) and kv_offset == _STATIC:
        dtype, device = kwargs.get("dtype", torch.float32), kwargs.get("device", "cpu")
        return torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
    return eager_mask(batch_size, q_length, kv_length, kv_offset=kv_offset, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)
