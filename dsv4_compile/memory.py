"""What outlives a compilation: the passes' findings beside Inductor's cache, and packed parameters.

Inductor's caches keep compiled code and skip the passes the next time. The findings are kept beside them, under a key
of the Dynamo graph, so that a warm start packs the same parameters and its report says the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from dsv4_compile.files import write_atomically
from dsv4_compile.kernels.linear import packing
from dsv4_compile.options import Options
from dsv4_compile.passes.pipeline import Collected, source_hash
from dsv4_compile.passes.sites import MhcSite, Missed, PassResult, ProjectionGroup, SharedOperand
from dsv4_compile.report import GraphReport

__all__ = ["key_of", "pack", "recall", "remember"]

logger = logging.getLogger("dsv4_compile")


def key_of(gm: GraphModule, inputs: Sequence[Any], options: Options, patches: Mapping[str, Any]) -> str:
    """Hash of the graph, its inputs' types, the options and every version that changes code."""
    digest = hashlib.sha256()
    parts = [torch.__version__, source_hash(), options.fingerprint(), repr(sorted(map(str, patches)))]
    # Without the lines of the user's source, which Inductor's own key does not have either.
    parts += [module.code for module in gm.modules() if isinstance(module, GraphModule)]
    parts += [_describe(x) for x in inputs]
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()


def _describe(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{x.dtype}{x.device}{[str(d) for d in x.shape]}{x.requires_grad}"
    return str(type(x))


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "dsv4"


def remember(key: str, collected: Collected) -> None:
    """Writes the findings, atomically; a folder that cannot be written is passed over."""
    record = {
        "nodes": collected.nodes,
        "dynamic": collected.dynamic,
        "results": [dataclasses.asdict(r) for r in collected.results],
    }
    try:
        write_atomically(_folder() / f"{key}.json", json.dumps(record))
    except OSError as error:
        logger.info("The findings of the passes were not kept: %s", error)


def recall(key: str) -> Collected | None:
    """The findings kept under `key`, or None when there are none or they cannot be read."""
    try:
        record = json.loads((_folder() / f"{key}.json").read_text())
        results = [_result(r) for r in record["results"]]
        return Collected(nodes=int(record["nodes"]), dynamic=bool(record["dynamic"]), results=results)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _result(record: Mapping[str, Any]) -> PassResult:
    return PassResult(
        mhc=tuple(MhcSite(**s) for s in record["mhc"]),
        projections=tuple(ProjectionGroup.from_dict({**g, "measured": ()}) for g in record["projections"]),
        attention=tuple(SharedOperand(**one) for one in record["attention"]),
        missed=tuple(Missed(**m) for m in record["missed"]),
        effective=tuple((e[0], e[1], e[2]) for e in record["effective"]),
        packs=tuple(tuple(int(i) for i in p) for p in record["packs"]),
    )


def pack(collected: Collected, inputs: Sequence[Any], graph: GraphReport) -> None:
    """Lays the weights of each packed group one behind the other; the parameters become views of that storage."""
    for result in collected.results:
        positions = iter(result.packs)
        for group in result.projections:
            for _ in range(1 if group.strategy == "pack" else group.packs):
                reason = _pack([inputs[i] for i in next(positions)])
                if reason is not None:
                    _note(graph, group, reason)


def _note(graph: GraphReport, group: ProjectionGroup, reason: str) -> None:
    """Says in the report that weights of `group` could not be packed."""
    at = next(i for i, known in enumerate(graph.projections) if known.linears is group.linears)
    if group.strategy == "measured":
        graph.notes.append(f"weights of a group stay apart: {reason}")
        reason = f"{graph.projections[at].reason}; not packed: {reason}"
        graph.projections[at] = dataclasses.replace(group, reason=reason)
        return
    graph.notes.append(f"a packed group runs as separate products: {reason}")
    graph.projections[at] = dataclasses.replace(group, strategy="serial", reason=f"not packed: {reason}")


def _pack(weights: Sequence[Any]) -> str | None:
    """Why the weights are not packed, or None when they are. What a user passes in is not ours to move."""
    if not all(isinstance(weight, torch.nn.Parameter) for weight in weights):
        return "A weight is not a parameter of a module."
    outcome = packing.pack(weights)
    return None if outcome.packed else outcome.reason
