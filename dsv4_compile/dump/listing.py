"""A graph as readable Python: grouped by module path, shapes in the margin, the operators of this package marked.

def forward(
    arg0_1,                                                  # float32[96, 64]  = layers.0.attn.wq.weight
    arg1_1,                                                  # float32[10, 64]  = x
):
    # ---- layers.0.attn  /path/model.py:41
    permute = aten.permute.default(arg0_1, [1, 0])           # float32[64, 96]  arg0_1 = layers.0.attn.wq.weight
    pack = dsv4.packed_linear.default(arg1_1, [w0, w1])      # float32[10, 96]  <- dsv4

Graphs within the graph, which an operator such as `cond` calls, follow as functions of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dsv4_compile.dump.schema import NodeRecord, printable

__all__ = ["MARK", "inputs_of", "listing"]

MARK = "<- dsv4"
"""Stands behind a line with an operator of this package."""

_MARGIN = 88


def listing(nodes: Sequence[NodeRecord], title: str, inputs: Mapping[tuple[str, str], str] | None = None) -> str:
    """The text of a graph; `title` becomes a comment at its top.

    Args:
        inputs: as `inputs_of` makes it, where `nodes` are a part of the graph only.
    """
    inputs = inputs_of(nodes) if inputs is None else inputs
    legend = f"# aten.*, dsv4.* and so on stand for torch.ops.*; {MARK} marks operators of dsv4_compile"
    lines = [f"# {title}", legend]
    for graph in dict.fromkeys(["", *(node.graph for node in nodes)]):
        own = [node for node in nodes if node.graph == graph]
        lines += ["", "", f"def {_one_line(graph).replace('.', '__') or 'forward'}("]
        lines += [_aligned(f"    {node.name},", node, _behind(node)) for node in own if node.op == "placeholder"]
        lines.append("):")
        lines += _body(own, inputs)
    return printable("\n".join(lines)) + "\n"


def inputs_of(nodes: Sequence[NodeRecord]) -> dict[tuple[str, str], str]:
    """What the user calls the inputs of a graph, by graph and name, where it is known."""
    return {(node.graph, node.name): node.behind for node in nodes if node.behind}


def _behind(node: NodeRecord) -> str:
    return f"= {node.behind}" if node.behind else ""


def _body(nodes: Sequence[NodeRecord], inputs: Mapping[tuple[str, str], str]) -> Iterator[str]:
    module: str | None = None
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op != "output" and node.module != module:
            module = node.module
            where = f"  {node.source}" if node.source else ""
            yield ""
            yield f"    # ---- {_one_line(module) or '(no module)'}{_one_line(where)}"
        read = dict.fromkeys(name for name in node.inputs if (node.graph, name) in inputs)
        known = ", ".join(f"{name} = {inputs[node.graph, name]}" for name in read)
        yield _aligned(f"    {_statement(node)}", node, known if node.op != "output" else "")


def _statement(node: NodeRecord) -> str:
    if node.op == "output":
        return f"return {', '.join(node.args)}"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    arguments = [*node.args, *(f"{name}={value}" for name, value in node.kwargs.items())]
    if node.op == "call_method" and arguments:
        return f"{node.name} = {arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    owner = "self." if node.op == "call_module" else ""
    return f"{node.name} = {owner}{node.target}({', '.join(arguments)})"


def _aligned(code: str, node: NodeRecord, known: str) -> str:
    parts = (node.margin if node.op != "output" else "", known, MARK if node.ours else "")
    margin = "  ".join(part for part in parts if part)
    return f"{_one_line(code):<{_MARGIN}}  # {_one_line(margin)}" if margin else _one_line(code)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
