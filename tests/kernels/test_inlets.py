"""Copies at the start of a CUDA graph: the right bytes from wherever they lie, however far the host is ahead."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.cuda import inlets
from dsv4_compile.runtime.recorder import Recording, RecordingError, cuda_recorder

BYTES = (1, 15, 16, 17, 255, 4096, 4099, 70_000)


def test_what_the_kernel_is_given() -> None:
    found = struct.unpack(f"={3 * inlets.MOST}q", inlets.packed([1, 2], [3, 4], [5, 6]))
    assert [found[i * inlets.MOST : i * inlets.MOST + 3] for i in range(3)] == [(1, 2, 0), (3, 4, 0), (5, 6, 0)]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_it_compiles(architecture: str, tmp_path: Path) -> None:
    command = ["nvcc", "-cubin", f"-arch={architecture}", f"-DMOST={inlets.MOST}", "-std=c++17", str(inlets.SOURCE)]
    subprocess.run([*command, "-o", str(tmp_path / "inlets.cubin")], check=True)


def recorded(buffers: list[Tensor]) -> tuple[Recording, inlets.Inlets, list[Tensor]]:
    """A graph that copies `buffers`, which it fills first."""
    recorder = cuda_recorder(0)
    made: list[Tensor] = []
    found: list[inlets.Inlets] = []

    def body() -> None:
        one = recorder.inlets(buffers)
        assert isinstance(one, inlets.Inlets)
        found.append(one)
        made.extend(buffer.clone() for buffer in buffers)

    with recorder.session():
        recording = recorder.record(body)
    assert recorder.enter()
    return recording, found[0], made


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("count", [1, len(BYTES), inlets.MOST])
def test_bytes_from_anywhere(count: int, offset: int) -> None:
    sizes = [BYTES[i % len(BYTES)] for i in range(count)]
    buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]
    recording, one, made = recorded(buffers)
    for _ in range(3):
        sources = [
            torch.randint(0, 256, (size + 8,), dtype=torch.uint8, device="cuda")[offset:][:size] for size in sizes
        ]
        one.point([source.data_ptr() for source in sources])
        recording.replay()
        assert all(map(torch.equal, made, sources))


@pytest.mark.gpu
def test_replays_under_way_do_not_see_the_next_source() -> None:
    """The host names 300 sources while the device is still busy with something else."""
    (buffer,) = buffers = [torch.zeros(1000, device="cuda")]
    recording, one, (made,) = recorded(buffers)
    sources = torch.randn(300, 1000, device="cuda")
    results = torch.zeros_like(sources)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    for source, result in zip(sources, results, strict=True):
        one.point([source.data_ptr()])
        recording.replay()
        result.copy_(made)
    assert torch.equal(results, sources) and torch.equal(buffer, sources[-1])


@pytest.mark.gpu
def test_a_large_tensor() -> None:
    recording, one, (made,) = recorded([torch.zeros(1 << 26, dtype=torch.int8, device="cuda")])
    source = torch.randint(-128, 127, (1 << 26,), dtype=torch.int8, device="cuda")
    one.point([source.data_ptr()])
    recording.replay()
    assert torch.equal(made, source)


@pytest.mark.gpu
def test_the_stream_is_the_callers() -> None:
    recording, one, (made,) = recorded([torch.zeros(1000, device="cuda")])
    recorder = cuda_recorder(0)
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            source = torch.randn(1000, device="cuda")
            assert recorder.enter()
            one.point([source.data_ptr()])
            recording.replay()
            result = made.clone()
        stream.synchronize()
        assert torch.equal(result, source)


@pytest.mark.gpu
def test_more_than_one_node_takes_are_left_to_torch() -> None:
    recorder = cuda_recorder(0)
    buffers = [torch.zeros(4, device="cuda") for _ in range(inlets.MOST + 1)]
    assert recorder.inlets(buffers) is None


@pytest.mark.gpu
def test_a_graph_of_copies_alone_is_empty() -> None:
    recorder = cuda_recorder(0)
    buffers = [torch.zeros(4, device="cuda")]
    with pytest.raises(RecordingError, match="launches nothing"), recorder.session():
        recorder.record(lambda: recorder.inlets(buffers) and None)
