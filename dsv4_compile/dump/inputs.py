"""What stands behind an input of a graph: `arg19_1` is `layers.1.attn.wq.weight`, or `input_ids`.

Dynamo keeps a source for each input of its graph. AOTAutograd numbers them anew, and says in the meta of each of its
inputs which one it is of the graph that it was given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

__all__ = ["behind", "source_names"]


def source_names(graph: Graph) -> list[str]:
    """For each input of Dynamo's graph what the user calls it, empty where that is not known."""
    return [_source_name(node) for node in graph.nodes if node.op == "placeholder"]


def behind(node: Node, names: Sequence[str]) -> str:
    """What the user calls an input of a graph that was made of Dynamo's, whose inputs are called `names`."""
    if node.op != "placeholder":
        return ""
    return _described(node.meta["desc"], names) if "desc" in node.meta else _source_name(node)


def _source_name(node: Node) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    text = name() if callable(name) else name  # an attribute or a method, by release of torch
    if not isinstance(text, str):
        return ""
    text = re.sub(r"\._(?:modules|parameters|buffers)\[['\"]([^'\"]+)['\"]\]", r".\1", text)
    return re.sub(r"^[LG]\[['\"](\w+)['\"]\]", r"\1", text).removeprefix("self.")


def _described(description: Any, names: Sequence[str]) -> str:
    """By its fields and not by its class: the classes are not public, and differ between releases of torch."""
    index, target = getattr(description, "idx", None), getattr(description, "target", None)
    base = getattr(description, "base", None) or getattr(description, "base_of", None)
    if base is not None:  # a part of a tensor subclass, or what several views share; its sizes have no name
        name, part = _described(base, names), getattr(description, "attr", "")
        return "" if index is not None or not name else f"{name}.{part}" if part else name
    if isinstance(target, str):
        return target
    return names[index] if isinstance(index, int) and 0 <= index < len(names) else ""
