"""Weights of several linear layers one behind the other in one storage, so that one product reads them all.

The parameters stay what they are: the same objects, names, shapes and values; only where they live changes. A module's
`state_dict` is the same as before. What to know about a packed model:

- `load_state_dict`, optimiser steps and every other write in place keep it packed. `module.to(dtype)`,
  `param.data = ...`, `copy.deepcopy` and `load_state_dict(assign=True)` give the parameters storages of their own
  again. Nothing is cached, so the values are right either way; `dsv4::packed_linear` then runs separate products and
  `fallbacks()` says so.
- `torch.save` writes each storage once and whole: a complete `state_dict` is as large as before, one packed parameter
  saved alone takes its whole group with it (save a `clone()`). Loaded tensors share a storage again.
- safetensors' `save_file`, and with it `save_pretrained`, takes packed parameters, because they do not overlap. Its
  `save_model` and `load_model` refuse a module in which a parameter is a part of a storage: `unpack` first.
- A CUDA graph that was captured before packing reads the old addresses. Pack first, capture then.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = [
    "PackResult",
    "already_packed",
    "clear_fallbacks",
    "fallbacks",
    "pack",
    "packed_view",
    "record_fallback",
    "separation",
    "unpack",
]

_APART = "The weights are not one behind the other in one storage."

_fallbacks: Counter[str] = Counter()
_fallbacks_lock = threading.Lock()


@dataclass(frozen=True)
class PackResult:
    """What `pack` did."""

    packed: bool
    """Whether the tensors lie one behind the other in one storage now."""
    reason: str
    """A sentence that says why not, or how it came to be."""
    nbytes: int = 0
    """Size of the storage that was allocated, in bytes; 0 when none was."""


def pack(parameters: Sequence[torch.Tensor]) -> PackResult:
    """Moves weights into one new storage, one behind the other in the given order; refuses instead of raising.

    Each tensor keeps its identity, shape `[M_i, K]`, dtype, `requires_grad`, `grad` and values. While it runs the
    memory grows by the size of the group; afterwards the old storages are free.

    Args:
        parameters: leaf tensors (parameters or buffers), contiguous `[M_i, K]`, of one dtype, device and K; `M_i` may
            be 0.

    Returns:
        `packed=True` when they are adjacent now, or were already; else `packed=False`, with everything left as it was.
    """
    parameters = list(parameters)
    reason = _refusal(parameters)
    if reason is not None:
        return PackResult(False, reason)
    if already_packed(parameters):
        return PackResult(True, "The weights were already one behind the other in one storage.")
    reason = _foreign_memory(parameters)
    if reason is not None:
        return PackResult(False, reason)
    # Views of an inference tensor would make inference tensors of the parameters.
    with torch.inference_mode(False), torch.no_grad():
        try:
            rows = [parameter.shape[0] for parameter in parameters]
            whole = parameters[0].new_empty((sum(rows), parameters[0].shape[1]))
        except RuntimeError as error:
            return PackResult(False, f"A storage for the packed weights could not be allocated: {error}")
        views = whole.split(rows)
        for view, parameter in zip(views, parameters, strict=True):
            view.copy_(parameter)
        if whole.is_cuda:
            # Other streams may still read the old storages, and will read the new one without waiting for this stream.
            torch.cuda.synchronize(whole.device)
        for view, parameter in zip(views, parameters, strict=True):
            parameter.data = view
    return PackResult(True, "The weights were moved into one storage.", whole.nbytes)


def unpack(parameters: Sequence[torch.Tensor]) -> None:
    """Gives every tensor that shares a larger storage one of its own, with the same values; undoes `pack`.

    The memory of the group is free once its last member has been unpacked.

    Raises:
        RuntimeError: the current stream is capturing a CUDA graph.
    """
    if any(_is_capturing(parameter) for parameter in parameters):
        raise RuntimeError("unpack was called while a CUDA graph is being captured: unpack before the capture.")
    with torch.inference_mode(False), torch.no_grad():
        for parameter in parameters:
            if parameter.untyped_storage().nbytes() != parameter.nbytes:
                own = parameter.clone(memory_format=torch.contiguous_format)
                if own.is_cuda:
                    torch.cuda.synchronize(own.device)
                parameter.data = own


def already_packed(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether `parameters` can be read as one `[sum M_i, K]` weight, in this order."""
    return separation(parameters) is None


def separation(weights: Sequence[torch.Tensor]) -> str | None:
    """Why `weights` cannot be read as one weight, or `None` when they can; cheap enough for every call.

    They can when each is `[M_i, K]` with strides (K, 1), of one dtype, and each begins in memory where the one before
    it ends, within the storage of the first. Weights without rows do not count.
    """
    if not weights:
        return "There are no weights."
    dtype, columns = weights[0].dtype, weights[0].shape[-1] if weights[0].dim() else 0
    first: torch.Tensor | None = None
    end = 0
    for weight in weights:
        shape = weight.shape
        if len(shape) != 2 or shape[1] != columns or weight.dtype != dtype:
            return "The weights differ in dtype or in their number of columns, or are not matrices."
        rows = shape[0]
        if rows == 0 or columns == 0:
            continue
        # A stride along an axis of length 1 means nothing.
        if weight.stride() != (columns, 1) and not weight.is_contiguous():
            return "A weight is not contiguous by rows."
        address = weight.data_ptr()
        if first is None:
            first = weight
        elif address != end:
            return _APART
        end = address + rows * columns * weight.element_size()
    if first is not None:
        # Memory within a living storage is memory of that storage: whatever device or storage object the others name.
        storage = first.untyped_storage()
        if end > storage.data_ptr() + storage.nbytes():
            return _APART
    return None


def packed_view(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights for which `separation` is `None` as one `[sum M_i, K]` tensor over the same memory."""
    base = next((weight for weight in weights if weight.numel() > 0), weights[0])
    columns = base.shape[1]
    rows = sum(weight.shape[0] for weight in weights)
    return base.as_strided((rows, columns), (columns, 1), base.storage_offset())


def record_fallback(reason: str) -> None:
    """Counts one call that ran separate products."""
    with _fallbacks_lock:
        _fallbacks[reason] += 1


def fallbacks() -> list[tuple[str, int]]:
    """Why `dsv4::packed_linear` ran separate products since `clear_fallbacks()`, and how often, frequent first.

    A call counts when it runs in Python: replays of a CUDA graph do not.
    """
    with _fallbacks_lock:
        return _fallbacks.most_common()


def clear_fallbacks() -> None:
    """Starts counting anew."""
    with _fallbacks_lock:
        _fallbacks.clear()


def _refusal(parameters: Sequence[torch.Tensor]) -> str | None:
    """Why these tensors can never be packed, as they are, wherever they live."""
    if len(parameters) < 2:
        return f"Packing takes two weights or more, and there were {len(parameters)}."
    if _get_current_dispatch_mode() is not None:
        return "A dispatch mode (fake tensors or tracing) is active, so there is no memory to move."
    for position, parameter in enumerate(parameters):
        reason = _unfit(parameter)
        if reason is not None:
            return f"Weight {position} {reason}."
    first = parameters[0]
    for position, parameter in enumerate(parameters):
        for name, here, there in (
            ("dtype", parameter.dtype, first.dtype),
            ("device", parameter.device, first.device),
            ("number of columns", parameter.shape[1], first.shape[1]),
        ):
            if here != there:
                return f"Weight {position} has the {name} {here}, and weight 0 has {there}."
    if _is_capturing(first):
        return "A CUDA graph is being captured, and it would keep the addresses of now."
    return None


def _unfit(parameter: torch.Tensor) -> str | None:
    """What about one tensor makes it unfit, as the rest of a sentence."""
    if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(parameter).__name__}, which has no plain storage"
    if torch._is_functional_tensor(parameter) or torch._C._functorch.is_functorch_wrapped_tensor(parameter):
        return "is a wrapper of a function transform"
    if parameter.device.type == "meta":
        return "is on the meta device"
    if parameter.layout is not torch.strided or parameter.is_quantized:
        return f"has the layout {parameter.layout} or is quantised"
    if parameter.dim() != 2 or not parameter.is_contiguous():
        return f"is no contiguous matrix: shape {list(parameter.shape)}, strides {list(parameter.stride())}"
    if parameter.is_inference():
        return "was made in inference mode, and moving it would make a normal tensor of it"
    if parameter.requires_grad and not parameter.is_leaf:
        return "is the result of a computation and not a leaf"
    if parameter.is_conj() or parameter.is_neg():
        return "is a lazy conjugate or negation"
    return None


def _foreign_memory(parameters: Sequence[torch.Tensor]) -> str | None:
    """Why moving these tensors would part them from somebody who shares their memory."""
    spans: list[tuple[int, int, int]] = []
    for position, parameter in enumerate(parameters):
        storage = parameter.untyped_storage()
        if storage.nbytes() != parameter.nbytes:
            return f"Weight {position} is a part of a larger storage, which other tensors may share."
        if parameter._is_view():
            return f"Weight {position} is a view of another tensor."
        if parameter.device.type == "cpu" and (parameter.is_pinned() or parameter.is_shared()):
            return f"Weight {position} lies in pinned memory or in memory shared between processes."
        if parameter.numel() > 0:
            spans.append((parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, position))
    spans.sort()
    for (_, end, before), (start, _, after) in itertools.pairwise(spans):
        if start < end:
            low, high = sorted((before, after))
            return f"Weights {low} and {high} share memory: they are tied."
    for position, parameter in enumerate(parameters):
        if _owners(parameter) > 1:
            return f"Weight {position} shares its storage with a tensor outside the group."
    return None


def _owners(parameter: torch.Tensor) -> int:
    """How many tensors hold the storage of `parameter`; 1 where this torch cannot say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = parameter.untyped_storage()
    # The Python object of the storage is one more holder.
    return 1 if count is None or parameter.numel() == 0 else count(storage._cdata) - 1


def _is_capturing(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cuda":
        return False
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()
