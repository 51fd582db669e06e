"""What every test gets: a skip where it needs an absent CUDA device, and a `torch.compile` that has seen nothing."""

import getpass
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Beside other workers each has one thread, and caches of its own, or it would find their graphs there. Before torch is
# imported, and for the processes that tests start.
if WORKER := os.environ.get("PYTEST_XDIST_WORKER"):
    CACHE = Path(tempfile.gettempdir(), f"dsv4-tests-{getpass.getuser()}-{WORKER}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(CACHE)
    os.environ["TRITON_CACHE_DIR"] = str(CACHE / "triton")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("COLUMNS", None)  # of the terminal around all workers; tables would be as wide

import pytest
import torch
import torch._dynamo
import torch._inductor.config


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Each test compiles for itself and draws the same random numbers, alone or after others.

    Inductor's cache on disk stays: its keys hold what matters, and to fill it anew would cost minutes.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mHC kernels run with the plans in the source, so that a test does not depend on what was timed here."""
    monkeypatch.setenv("DSV4_TUNE", "0")


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph that a test compiles is proved to be safe on several streams, before and after each pass."""
    monkeypatch.setenv("DSV4_CHECK", "1")


@pytest.fixture
def cold() -> Iterator[None]:
    """Inductor compiles: nothing comes from a cache."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def no_reports() -> None:
    """The process keeps 64 reports, so what is counted in a test starts from none."""
    sys.modules["dsv4_compile.report"]._reports.clear()
