"""What tests of the kernels get: families that have refused nothing yet and can warn again, choices not yet made."""

from collections.abc import Iterator

import pytest

from dsv4_compile.kernels.linear import proposals, skinny, tuning
from dsv4_compile.kernels.mhc import families


@pytest.fixture(autouse=True)
def fresh_families() -> Iterator[None]:
    families.forget()
    yield
    families.forget()


@pytest.fixture
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of any weights, cuBLASLt has not been asked, and the skinny product has not failed."""
    monkeypatch.setattr(skinny, "_broken", [])
    for forget in (tuning.forget, proposals.forget):
        forget()
    yield
    for forget in (tuning.forget, proposals.forget):
        forget()
