"""What the tests of the passes share."""

from collections.abc import Iterator

import pytest

from dsv4_compile.kernels.linear import tuning
from dsv4_compile.passes import projections


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pass takes every group for one on a CUDA device."""
    monkeypatch.setattr(projections, "_device_type", lambda group: "cuda")
    monkeypatch.setenv("DSV4_MEASURE", "1")
    tuning.forget()
    yield
    tuning.forget()
