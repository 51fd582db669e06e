"""Results that lie in the pool: what a caller holds is not written again, whatever the recorded call looked like."""

from __future__ import annotations

import torch

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
