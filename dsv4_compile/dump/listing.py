"""A graph as readable Python: grouped by module path, shapes in the margin, the operators of this package marked.

def forward(
    x,                                              # float32[2, 5, 64]
):
    # ---- layers.0.attn  /path/model.py:41
    wq = aten.mm.default(x, permute)                # float32[10, 32]
    pack = dsv4.packed_linear.default(x, [w0, w1])  # float32[10, 96]  <- dsv4
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsv4_compile.dump.schema import NodeRecord, printable

__all__ = ["MARK", "listing"]

MARK = "<- dsv4"
"""Stands behind a line with an operator of this package."""

_MARGIN = 88


def listing(nodes: Sequence[NodeRecord], title: str) -> str:
    """The text of a graph; `title` becomes a comment at its top."""
    legend = f"# aten.*, dsv4.* and so on stand for torch.ops.*; {MARK} marks operators of dsv4_compile"
    lines = [f"# {title}", legend, "", "", "def forward("]
    lines += [_aligned(f"    {node.name},", node) for node in nodes if node.op == "placeholder"]
    lines.append("):")
    lines += _body(nodes)
    return printable("\n".join(lines)) + "\n"


def _body(nodes: Sequence[NodeRecord]) -> Iterator[str]:
    module: str | None = None
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op != "output" and node.module != module:
            module = node.module
            where = f"  {node.source}" if node.source else ""
            yield ""
            yield f"    # ---- {_one_line(module) or '(no module)'}{_one_line(where)}"
        yield _aligned(f"    {_statement(node)}", node)


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


def _aligned(code: str, node: NodeRecord) -> str:
    margin = node.margin if node.op != "output" else ""
    if node.ours:
        margin += f"  {MARK}"
    return f"{_one_line(code):<{_MARGIN}}  # {_one_line(margin)}" if margin else _one_line(code)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
