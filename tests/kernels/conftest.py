"""What every test of the kernels gets: families that have refused nothing yet and can warn again."""

from collections.abc import Iterator

import pytest

from dsv4_compile.kernels.mhc import families


@pytest.fixture(autouse=True)
def fresh_families() -> Iterator[None]:
    families.forget()
    yield
    families.forget()
