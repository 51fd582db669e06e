"""Results that lie in the pool: what a caller holds is not written again, whatever the recorded call looked like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_compile.report import CudaGraphs
from dsv4_compile.runtime.program import Code, Program, Step
from dsv4_compile.runtime.runner import Policy, Runner
from tests.recorder import FakeRecorder


def test_a_view_that_was_empty_when_recorded_is_copied_for_the_caller() -> None:
    steps = (
        Step("made", Code(lambda given: [given[0] * 2 + 1]), (0,), (2,), (0,)),
        Step("part", Code(lambda given: [given[0][: given[1]]]), (2, 1), (3,), (2,), apart="its size changes"),
    )
    run = Runner(Program(steps, 4, (), (), ((3, None),)), FakeRecorder(), Policy(), CudaGraphs())
    lengths = [0, 2, 3, 1]  # the first call is the one that is recorded
    given = [torch.randn(3, 4) for _ in lengths]
    got = [run([x, n])[0] for x, n in zip(given, lengths, strict=True)]
    torch.testing.assert_close(got, [x[:n] * 2 + 1 for x, n in zip(given, lengths, strict=True)])
    assert run.report.replays == 3


@pytest.mark.parametrize(
    "lay",
    [
        pytest.param(lambda x: x[:, 1:], id="rows of a wider matrix"),
        pytest.param(lambda x: x[:1, 1:], id="one row of it"),
        pytest.param(lambda x: x.t(), id="turned"),
        pytest.param(lambda x: x[:, :1].expand(-1, 5), id="expanded"),
        pytest.param(lambda x: x[:0, 1:], id="nothing"),
        pytest.param(lambda x: x.as_strided((2, 3), (1, 1)), id="overlapping"),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_a_result_lies_as_it_did_when_nothing_was_replayed(lay: Callable[..., Tensor], own: bool) -> None:
    """Dynamo guards on strides of what is handed in again: another one than before would be another graph."""
    steps = (Step("made", Code(lambda given: [lay(given[0] * 2 + 1)]), (0,), (1,), (1,)),)
    recorder = FakeRecorder()
    recorder.is_here = own
    run = Runner(Program(steps, 2, (), (), ((1, None),)), recorder, Policy(), CudaGraphs())
    given = [torch.randn(3, 4) for _ in range(3)]
    got = [run([x])[0] for x in given]
    assert run.report.replays == 2
    for x, result in zip(given, got, strict=True):
        assert torch.equal(result, lay(x * 2 + 1))
    laid = {result.stride() for result in got}
    assert len(laid) == 1 or got[0].stride() == (1, 1)


def test_a_small_part_of_a_long_result_takes_no_more_memory_than_it_needs() -> None:
    steps = (Step("made", Code(lambda given: [(given[0] * 2 + 1)[:, -1]]), (0,), (1,), (1,)),)
    run = Runner(Program(steps, 2, (), (), ((1, None),)), FakeRecorder(), Policy(), CudaGraphs())
    given = [torch.randn(8, 64) for _ in range(3)]
    got = [run([x])[0] for x in given]
    assert all(torch.equal(result, (x * 2 + 1)[:, -1]) for x, result in zip(given, got, strict=True))
    assert got[-1].untyped_storage().nbytes() == 8 * 4


def test_conjugated_and_negated_results_are_read_as_they_are() -> None:
    def made(x: Tensor) -> list[Tensor]:
        return [torch.complex(x, x * 2).t().conj(), torch.complex(x, x * 3).conj().imag]

    steps = (Step("made", Code(lambda given: made(given[0])), (0,), (1, 2), (1, 2)),)
    run = Runner(Program(steps, 3, (), (), ((1, None), (2, None))), FakeRecorder(), Policy(), CudaGraphs())
    for _ in range(3):
        x = torch.randn(2, 3)
        for got, expected in zip(run([x]), made(x), strict=True):
            assert torch.equal(got, expected)
    assert run.report.replays == 2
