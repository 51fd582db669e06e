"""Packed products with other algorithms of cuBLASLt: which there are, what the library is given, what torch makes.

With a stand-in for the library (`standin_cublaslt.py`); `test_proposals_gpu.py` has cuBLASLt itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.choice import replays
from dsv4_compile.kernels.linear import cublaslt, grouped, packing, products, proposals, strategies, tuning
from dsv4_compile.kernels.linear.buckets import LIMITS
from dsv4_compile.kernels.linear.strategies import Card, Low, Problem
from tests.kernels.standin_cublaslt import Layout, Proposed, Standin

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.usefixtures("fresh_choices")

HOPPER = Card("NVIDIA H200", 132, 90)
NAMES = [f"pack: proposal {which}" for which in (1, 2, 3, 4)]
K, M = 64, 48


def problem(**changes: Any) -> Problem:
    three = Problem(HOPPER, K, (16, 8, 24), (BF16,) * 3, (False,) * 3, ((0, 1, 2),), (0,) * 3, BF16, True)
    return dataclasses.replace(three, **changes)


def names(of: Problem, tokens: float = 64) -> list[str]:
    return [name for name in strategies.legal(of, tokens) if "proposal" in name]


class OnCard(Tensor):
    """A tensor of the CPU that says that it is on a card."""

    is_cuda = True
    number = 0

    def get_device(self) -> int:
        return self.number


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    """A stand-in for cuBLASLt, and two cards on which nothing else runs."""
    standin = Standin()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, standin.device = standin.device, index
        yield
        standin.device = before

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    loaded = {"libcublasLt.so.13": standin}
    monkeypatch.setattr(cublaslt, "ctypes", SimpleNamespace(**{**vars(cublaslt.ctypes), "CDLL": loaded.__getitem__}))
    monkeypatch.setattr(tuning, "card_of", lambda index: HOPPER)
    monkeypatch.setattr(replays, "beside_captures", lambda stack: None)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: standin.device,
        "is_current_stream_capturing": lambda: False,
        "device": device,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "_cuda_getDevice": lambda: standin.device,
        "_cuda_hasPrimaryContext": lambda index: True,
        "_cuda_getCurrentRawStream": lambda index: 70 + index,
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    yield standin
    assert not standin.errors, standin.errors


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of the products that torch makes."""
    seen: list[Tensor] = []
    real = products.multiply

    def multiply(rows: Tensor, turned: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        seen.append(rows)
        return real(rows, turned, bias, out)

    monkeypatch.setattr(products, "multiply", multiply)
    return seen


def aligned(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    """Random numbers from an address that is a multiple of 64 on."""
    flat = torch.zeros(rows * columns + 32, dtype=dtype)
    start = -flat.data_ptr() % 64 // dtype.itemsize
    made = flat[start : start + rows * columns].view(rows, columns).copy_(torch.randn(rows, columns))
    return made.as_subclass(OnCard)


def operands(tokens: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    return aligned(tokens, K, dtype), aligned(M, K, dtype).t()


def assert_product(made: Tensor, rows: Tensor, turned: Tensor) -> None:
    expected = rows.float().as_subclass(Tensor) @ turned.float()
    torch.testing.assert_close(made.as_subclass(Tensor), expected.to(made.dtype), rtol=2e-2, atol=2e-2)


# --------------------------------------------------------------------------------------------------- which there are


def test_the_proposals_are_ways_where_they_serve(library: Standin) -> None:
    assert names(problem()) == NAMES[:3]
    assert names(problem(), 512) == NAMES[:3] and names(problem(), 1024) == []
    assert names(problem(x=F16, dtypes=(F16,) * 3)) == NAMES[:3]
    assert names(problem(card=dataclasses.replace(HOPPER, name="another"))) == []


LOW = Low(BF16, False, 0, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": ((0, 1), (2,))},
        {"runs": ((0,), (1,), (2,))},
        {"dtypes": (F32,) * 3, "x": F32},
        {"dtypes": (F16,) * 3},
        {"biased": (False, True, False)},
        {"wide": (True, False, False)},
        {"dtypes": (BF16, BF16, torch.float8_e4m3fn), "scaled": (LOW,)},
        {"aligned": False},
        {"contiguous": False},
        {"columns": 60},
        {"features": (16, 8, 23)},
        {"features": (0, 0, 0)},
        {"card": Card("Tesla V100", 80, 70)},
        {"card": Card("a card of another maker", 132)},
        {"card": Card("cpu", 0)},
    ],
    ids=str,
)
def test_and_nowhere_else(library: Standin, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    of = problem(**changes)
    monkeypatch.setattr(tuning, "card_of", lambda index: of.card)
    assert names(of) == [] and library.asked == [] and proposals.unavailable() is None


def test_none_without_a_card() -> None:
    assert names(problem()) == [] and proposals.unavailable() is None


def test_a_device_that_is_not_in_use_is_not_asked(library: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", used.__contains__)
    assert names(problem()) == [] and library.handles == {}
    used.append(1)
    assert names(problem()) == NAMES[:3] and list(library.handles.values()) == [1]


def test_the_current_device_is_asked_first(library: Standin) -> None:
    library.device = 1
    assert names(problem()) == NAMES[:3] and list(library.handles.values()) == [1]


def test_left_out_are_what_torch_takes_repetitions_partial_sums_and_what_needs_memory(library: Standin) -> None:
    mine = [Proposed(5), Proposed(5, cluster=3), Proposed(6), Proposed(7), Proposed(8)]

    def found(tokens: int, workspace: int) -> list[Proposed]:
        if workspace:
            return [Proposed(4), Proposed(6)]
        others = Proposed(1, parts=3), Proposed(2, workspace=8), Proposed(3, state=15), Proposed(4)
        return [*others, mine[0], mine[1], mine[0], *mine[2:]]

    library.proposed = found
    assert names(problem()) == NAMES
    rows, turned = operands(64)
    for which in range(5):
        assert_product(proposals.multiply(which, rows, turned, None), rows, turned)
    assert [call.algorithm for call in library.calls] == mine[:4]


def test_what_torch_takes_may_be_no_proposal_at_all(library: Standin) -> None:
    library.proposed = lambda tokens, workspace: [Proposed(1, parts=3, workspace=100)] if workspace else [Proposed(2)]
    assert names(problem()) == NAMES[:1]
    library.proposed = lambda tokens, workspace: [] if workspace else [Proposed(2)]
    assert names(problem(columns=2 * K)) == NAMES[:1]
    library.proposed = lambda tokens, workspace: []
    assert names(problem(columns=3 * K)) == [] and proposals.unavailable() is None


def test_asked_is_once_without_workspace_for_the_limit_of_the_bucket(library: Standin) -> None:
    for tokens in (33, 64, 40):
        rows, turned = operands(tokens)
        proposals.multiply(0, rows, turned, None)
        assert names(problem(), 64) == NAMES[:3]
    sixteen = dict.fromkeys((5, 6, 7, 8), 16)
    assert library.asked == [(64, 1, {1: 32 << 20, **sixteen}), (64, 16, {1: 0, **sixteen})]
    assert library.of(list) == []


@pytest.mark.parametrize("how", ["absent", "old", "no handle", "error"])
def test_a_library_that_fails_is_one_reason_and_no_proposal(
    library: Standin,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
    by_torch: list[Tensor],
) -> None:
    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    if how == "absent":
        monkeypatch.setattr(cublaslt.ctypes, "CDLL", absent)
    elif how == "old":
        del library.cublasLtMatmulAlgoCheck  # type: ignore[attr-defined]
    elif how == "no handle":
        library.create = 3
    else:
        library.proposed = lambda tokens, workspace: [][1]
    for tokens in (64, 128):
        assert names(problem(), tokens) == []
    rows, turned = operands(64)
    assert_product(proposals.multiply(0, rows, turned, None), rows, turned)
    assert len(by_torch) == 1 and len([one for one in caplog.records if "could not be asked" in one.message]) == 1
    assert {"absent": "cannot open", "old": "AlgoCheck", "no handle": "returned 3", "error": "returned 99"}[how] in (
        proposals.unavailable() or ""
    )
    library.errors.clear()


# ------------------------------------------------------------------------------------------------------- what it gets


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 63, 64, 65, 512])
def test_the_product_and_its_algorithm(
    library: Standin, by_torch: list[Tensor], tokens: int, dtype: torch.dtype
) -> None:
    rows, turned = operands(tokens, dtype)
    made = proposals.multiply(1, rows, turned, None)
    assert_product(made, rows, turned)
    assert made.shape == (tokens, M) and made.is_contiguous() and made.dtype == dtype
    (call,) = library.calls
    limit = min(limit for limit in LIMITS if limit >= tokens)
    assert call.algorithm.tile == 10 * limit + 2 and call.stream == 70
    assert call.layouts == (Layout(dtype, K, M, K), Layout(dtype, K, tokens, K), Layout(dtype, M, tokens, M))
    assert by_torch == []


@pytest.mark.parametrize("tokens", [1, 5])
def test_columns_of_a_wider_matrix(library: Standin, by_torch: list[Tensor], tokens: int) -> None:
    rows, turned = aligned(tokens, 3 * K).as_subclass(OnCard)[:, K : 2 * K], aligned(M, 2 * K)[:, :K].t()
    whole = aligned(tokens, M + 24).fill_(7)
    out = whole[:, 16 : 16 + M]
    assert proposals.multiply(0, rows, turned, None, out) is out
    assert_product(out, rows, turned)
    assert (whole[:, :16] == 7).all() and (whole[:, 16 + M :] == 7).all()
    steps = [layout.step for layout in library.calls[0].layouts]
    assert steps == ([2 * K, K, M] if tokens == 1 else [2 * K, 3 * K, M + 24]) and by_torch == []


def test_the_stride_of_a_single_row_does_not_count(library: Standin, by_torch: list[Tensor]) -> None:
    rows, turned = operands(1)
    for stride in (0, 1, 3, 1000 * K):
        assert_product(proposals.multiply(0, rows.as_strided((1, K), (stride, 1)), turned, None), rows, turned)
    assert len(library.calls) == 4 and by_torch == []


UNFIT: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]] = {
    "a bias": lambda: (*operands(4), torch.randn(M).to(BF16), None),
    "no row": lambda: (*operands(0), None, None),
    "many rows": lambda: (*operands(513), None, None),
    "float32": lambda: (*operands(4, F32), None, None),
    "a CPU": lambda: (operands(4)[0].as_subclass(Tensor), operands(4)[1], None, None),
    "an input between": lambda: (aligned(1, 8 * K).as_subclass(OnCard)[:, 1 : 1 + K], operands(4)[1], None, None),
    "a weight between": lambda: (operands(4)[0], aligned(1, M * K + 8).view(-1)[1:-7].view(M, K).t(), None, None),
    "an output between": lambda: (*operands(4), None, aligned(4, M + 8)[:, 1 : 1 + M]),
    "an input by columns": lambda: (aligned(K, 8).t().as_subclass(OnCard), operands(4)[1], None, None),
    "a weight by columns": lambda: (operands(4)[0], aligned(K, M), None, None),
    "an output by columns": lambda: (*operands(8), None, aligned(M, 8).t()),
    "an odd input": lambda: (aligned(4, K + 4).as_subclass(OnCard)[:, :K], operands(4)[1], None, None),
    "an odd weight": lambda: (operands(4)[0], aligned(M, K + 4)[:, :K].t(), None, None),
    "an odd output": lambda: (*operands(4), None, aligned(4, M + 4)[:, :M]),
    "one row many times": lambda: (operands(1)[0].expand(4, K), operands(4)[1], None, None),
    "rows that overlap": lambda: (operands(8)[0].as_strided((4, K), (8, 1)), operands(4)[1], None, None),
    "odd features": lambda: (operands(4)[0], aligned(M - 3, K).t(), None, None),
    "odd features in a wide output": lambda: (
        operands(4)[0],
        aligned(M - 3, K).t(),
        None,
        aligned(4, M)[:, : M - 3],
    ),
    "every second input": lambda: (aligned(4, 2 * K).as_subclass(OnCard)[:, ::2], operands(4)[1], None, None),
    "every second weight": lambda: (operands(4)[0], aligned(M, 2 * K)[:, ::2].t(), None, None),
    "every second output": lambda: (*operands(4), None, aligned(4, 2 * M)[:, ::2]),
    "odd columns": lambda: (aligned(4, K)[:, :60].as_subclass(OnCard), aligned(M, K)[:, :60].t(), None, None),
}


@pytest.mark.parametrize("why", UNFIT)
def test_what_does_not_fit_is_made_by_torch(library: Standin, by_torch: list[Tensor], why: str) -> None:
    rows, turned, bias, out = UNFIT[why]()
    made = proposals.multiply(0, rows, turned, bias, out)
    assert len(by_torch) == 1 and library.calls == [] and (out is None or made.data_ptr() == out.data_ptr())
    assert made.shape == (rows.shape[0], turned.shape[1]) and made.dtype == rows.dtype
    assert_product(made if bias is None else made - bias, rows, turned)


def test_what_makes_no_sense_is_left_to_torch(library: Standin, by_torch: list[Tensor]) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        proposals.multiply(0, operands(4)[0], aligned(M, 2 * K).t(), None)
    proposals.multiply(0, *operands(4), None, aligned(4, M).as_strided((4, M), (8, 1)))
    assert len(by_torch) == 2 and library.calls == [] and proposals.unavailable() is None


def test_a_weight_on_another_device_and_a_result_that_does_not_fit_are_left_to_torch(
    library: Standin, by_torch: list[Tensor]
) -> None:
    rows, turned = operands(4)
    proposals.multiply(0, rows, turned.as_subclass(Tensor), None)
    assert len(by_torch) == 1
    for out in (aligned(4, M, torch.float32), aligned(2, M)):
        with contextlib.suppress(RuntimeError):
            proposals.multiply(0, rows, turned, None, out)
    assert len(by_torch) == 3 and library.calls == []


@pytest.mark.parametrize("checked", [(15, 0), (0, 16)], ids=str)
def test_an_algorithm_that_does_not_take_these_strides_is_replaced_by_torch(
    library: Standin, by_torch: list[Tensor], checked: tuple[int, int]
) -> None:
    library.checked = lambda algorithm, layouts: checked if layouts[1].columns == 5 else (0, 0)
    for tokens in (5, 6):
        rows, turned = operands(tokens)
        assert_product(proposals.multiply(0, rows, turned, None), rows, turned)
    assert [rows.shape[0] for rows in by_torch] == [5] and len(library.calls) == 1


def test_a_product_that_fails_is_made_by_torch_and_said_so(
    library: Standin, by_torch: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    library.status = 7
    rows, turned = operands(4)
    for _ in range(2):
        assert_product(proposals.multiply(0, rows, turned, None), rows, turned)
    assert len(by_torch) == 2 and ["returned 7" in record.message for record in caplog.records] == [True]


def test_each_device_has_its_handle_and_is_the_current_one(library: Standin) -> None:
    """The stand-in refuses a handle of another device than the current one."""
    rows, turned = operands(4)
    for current, number in ((0, 0), (0, 1), (1, 1), (1, 0)):
        library.device, rows.number, turned.number = current, number, number
        assert_product(proposals.multiply(0, rows, turned, None), rows, turned)
        assert library.device == current
    assert [(call.device, call.stream) for call in library.calls] == [(0, 70), (1, 71), (1, 71), (0, 70)]
    assert list(library.handles.values()) == [0, 1]


def test_threads_share_a_handle(library: Standin) -> None:
    together = threading.Barrier(4)

    def run(tokens: int) -> None:
        rows, turned = operands(tokens)
        together.wait()
        assert_product(proposals.multiply(0, rows, turned, None), rows, turned)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, (1, 9, 17, 33)))
    assert len(library.handles) == 1 and len(library.calls) == 4


def test_layouts_go_with_the_launches_that_are_forgotten(library: Standin) -> None:
    rows, turned = operands(4)
    for _ in range(3):
        proposals.multiply(0, rows, turned, None)
    assert len(library.of(Layout)) == 3
    proposals._launch.cache_clear()
    gc.collect()
    assert library.of(Layout) == []


def test_a_group_runs_as_a_proposal(library: Standin, by_torch: list[Tensor]) -> None:
    weights = [torch.randn(count, K).to(BF16) for count in (16, 8, 24)]
    assert packing.pack(weights).packed
    x = aligned(6, K).as_subclass(OnCard)
    there = [weight.as_subclass(OnCard) for weight in weights]
    (made,) = grouped.run_as(NAMES[2], x.view(2, 3, K), there, [None] * 3, [0] * 3)
    assert made.shape == (2, 3, M)
    assert_product(made.view(6, M), x, torch.cat(weights).t())
    assert [call.algorithm.tile for call in library.calls] == [83] and by_torch == []


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = aligned(math.prod(shape[:-1]), shape[-1], dtype).view(shape)
        assert made.stride() == tuple(stride)
        return made

    monkeypatch.setattr(proposals, "empty_strided_cuda", empty)


@pytest.mark.parametrize("lead", [(6,), (2, 3), (1, 6, 1)])
def test_a_kept_call_is_the_product_of_a_new_input(
    library: Standin, by_torch: list[Tensor], allocated: None, lead: tuple[int, ...]
) -> None:
    rows, turned = operands(6)
    kept = proposals.keep(1, rows.view(*lead, K), rows, turned)
    assert kept is not None and library.calls == []
    for _ in range(3):
        x = aligned(6, K)
        (made,) = kept(x.view(*lead, K)) or ()
        assert made.shape == (*lead, M) and made.dtype == BF16
        assert_product(made.view(6, M), x, turned)
    assert [call.algorithm.tile for call in library.calls] == [82] * 3 and by_torch == []


def test_a_kept_call_leaves_what_is_not_like_the_first(
    library: Standin, allocated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, turned = operands(6)
    kept = proposals.keep(1, rows, rows, turned)
    assert kept is not None
    wider = aligned(6, K + 8)
    assert kept(wider.view(-1)[1 : 6 * K + 1].view(6, K)) is None
    elsewhere = aligned(6, K)
    elsewhere.number = 1
    assert kept(elsewhere) is None
    library.device = 1
    assert kept(rows) is None
    library.device = 0
    monkeypatch.setattr(type(kept.launch), "__call__", lambda *_: 7)
    assert kept(rows) is None


def test_nothing_is_kept_of_what_torch_makes(library: Standin, allocated: None) -> None:
    rows, turned = operands(6)
    odd = aligned(M, K + 4).t()[:K]
    assert proposals.keep(1, rows, rows, odd) is None
    assert proposals.keep(1, aligned(6, K), rows, turned) is None
    assert proposals.keep(77, rows, rows, turned) is None
    assert proposals.keep(1, rows, rows.as_subclass(Tensor), turned) is None
