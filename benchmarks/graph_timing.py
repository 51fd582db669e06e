"""Microseconds of calls, from replays of CUDA graphs that hold many of them. For the benchmarks beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Calls = list[Callable[[], Any]]

REPLAYS = 15
L2_BYTES = 50 << 20  # of an H100 and an H200


def sets_beyond_l2(bytes_of_set: int) -> int:
    """How many sets of buffers are together larger than twice L2; two where nothing is measured."""
    return 2 if not torch.cuda.is_available() else max(2, -(-2 * L2_BYTES // bytes_of_set) + 1)


def microseconds(calls: Calls) -> float:
    """Of one call, in a graph of all of them; median of the replays."""
    return side_by_side({"": calls})[""]


def side_by_side(columns: dict[str, Calls]) -> dict[str, float]:
    """Of one call of each column; the graphs of the columns are replayed in turns."""
    if not torch.cuda.is_available():
        return {name: _by_the_clock(calls) for name, calls in columns.items()}
    graphs = {name: _graph(calls) for name, calls in columns.items()}
    for graph in list(graphs.values()) * 3:
        graph.replay()
    rounds = [{name: _replay(graph) / len(columns[name]) for name, graph in graphs.items()} for _ in range(REPLAYS)]
    return {name: statistics.median(one[name] for one in rounds) for name in columns}


def _graph(calls: Calls) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def _by_the_clock(calls: Calls) -> float:
    """On a CPU, to see whether a benchmark runs."""
    begun = time.perf_counter()
    for call in calls:
        call()
    return 1e6 * (time.perf_counter() - begun) / len(calls)
