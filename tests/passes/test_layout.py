"""Columns of a packed product in the place of a tensor of its own: whoever reads them must not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

import dsv4_compile
from dsv4_compile.backend import graph_passes
from dsv4_compile.options import Options
from dsv4_compile.passes import projections
from dsv4_compile.passes.pipeline import collecting
from tests.passes.test_projections import names


class Pair(nn.Module):
    """Two linears on one input; `read` gets both results and the pair."""

    def __init__(self, read: Callable[..., Any], widths: tuple[int, int] = (8, 4), dtype: torch.dtype = torch.float32):
        super().__init__()
        self.a, self.b = (nn.Linear(16, width, bias=False, dtype=dtype) for width in widths)
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.a(x), self.b(x))


def split_heads(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As Qwen3.5 does with `in_proj_z`: split into heads, then one row for each head."""
    return a.reshape(*a.shape[:-1], -1, 2).reshape(-1, 2) + 1, b.view(-1, 2) * 2


def turned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As the causal convolution is given its input, and back."""
    weight = torch.ones(8, 1, 2)
    return F.conv1d(a.transpose(-1, -2), weight, padding=1, groups=8).transpose(-1, -2), b.transpose(-1, -2).exp()


def parts(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    first, second = a.unflatten(-1, (2, 4)).split([1, 3], dim=-1)
    return first.flatten(-2).relu(), second.flatten() * 2, torch.cat([a, b], dim=-1).view(-1)


def outputs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b


def views_as_outputs(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return a, a.view(-1, 2), b.view(-1), b.transpose(0, 1)


def complex_numbers(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As rotary embeddings are written with complex numbers."""
    rotation = torch.polar(torch.ones(2), torch.tensor([0.1, 0.2]))
    return a + 1, torch.view_as_real(torch.view_as_complex(b.unflatten(-1, (-1, 2))) * rotation).flatten(-2)


def bits(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.view(torch.int64) + 0, b.view(torch.int32) + 0


def strided(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.as_strided((3, 2), (2, 1)) + 1, b + 1


def scaled_in_part(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a[..., :2].mul_(2)
    return a.view(-1), b + 1


def rotated_in_part(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a[..., -2:].copy_(a[..., -2:].flip(-1) * 0.5)
    return a.as_strided((12,), (4,)), b + 1


def overwritten(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a.copy_(b.repeat(1, 1, 2))
    return a.view(-1), b + 1


def strided_copies(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.as_strided_copy(a, (12,), (4,)), torch.as_strided_scatter(b, torch.ones(6), (6,), (4,))


READERS = [split_heads, turned, parts, outputs, views_as_outputs, complex_numbers, bits, strided]
READERS += [scaled_in_part, rotated_in_part, overwritten, strided_copies]


@pytest.mark.parametrize("strategy", ["pack", "streams"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("read", READERS, ids=lambda f: f.__name__)
def test_readers_do_not_notice(read, dynamic, strategy):
    widths = (7, 4) if read is complex_numbers else (8, 4)
    module, x = Pair(read, widths), torch.randn(2, 3, 16)
    if read is bits:  # a packed product may add up in another order: whole numbers have one sum
        x = x.mul(4).round()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(16).round_()
    options = {"compiler": "eager", "mhc": "off", "projections": strategy}
    with torch.no_grad():
        expected = module(x)
        out = torch.compile(module, backend="dsv4", options=options, dynamic=dynamic)(x)
    assert names(dsv4_compile.report().graphs[-1]) == [["a", "b"]]
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("read", [split_heads, views_as_outputs, complex_numbers], ids=lambda f: f.__name__)
def test_readers_do_not_notice_under_inductor(read):
    module, x = Pair(read, (7, 4) if read is complex_numbers else (8, 4)), torch.randn(2, 3, 16)
    with torch.no_grad():
        expected = module(x)
        out = torch.compile(module, backend="dsv4", options={"projections": "pack", "mhc": "off"})(x)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


class Compared(torch.fx.Interpreter):
    """Runs a graph and compares the strides of what comes out with what is written at each node."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and 0 not in result.shape:
            significant = [i for i, size in enumerate(result.shape) if size != 1]
            written = n.meta["val"].stride()
            assert [written[i] for i in significant] == [result.stride()[i] for i in significant], n.format_node()
        return result


@pytest.mark.parametrize("read", [split_heads, turned, parts, outputs, views_as_outputs], ids=lambda f: f.__name__)
def test_strides_of_what_is_behind_are_written_in_the_graph(read):
    """What is compiled in pieces relies on them."""
    module, seen = Pair(read), []

    def rewritten(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graph_passes(Options.resolve({"mhc": "off", "projections": "pack"}))(gm.graph)
        seen.append(any("packed_linear" in str(node.target) for node in gm.graph.nodes))
        return make_boxed_func(Compared(gm).run)

    with torch.no_grad(), collecting():
        x = torch.randn(2, 3, 16)
        backend = aot_autograd(fw_compiler=rewritten, inference_compiler=rewritten)
        torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x))
    assert seen == [True]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_view_behind_a_graph_break(compiler):
    def read(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        torch._dynamo.graph_break()
        return a.view(-1) + 1, b.view(-1, 2) + 1

    module, x = Pair(read), torch.randn(2, 3, 16)
    options = {"compiler": compiler, "mhc": "off", "projections": "pack"}
    with torch.no_grad():
        expected = module(x)
        out = torch.compile(module, backend="dsv4", options=options)(x)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_operator_of_somebody_else_gets_what_it_got():
    torch.library.define("dsv4_test::dense", "(Tensor x) -> Tensor")

    @torch.library.impl("dsv4_test::dense", "CompositeExplicitAutograd")
    def dense(x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x * 2

    torch.library.register_fake("dsv4_test::dense")(lambda x: torch.empty_like(x))

    def read(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.dsv4_test.dense(a.view(*a.shape[:-1], 4, 2)), b + 1

    module, x = Pair(read), torch.randn(2, 3, 16)
    options = {"compiler": "eager", "mhc": "off", "projections": "pack"}
    with torch.no_grad():
        expected = module(x)
        out = torch.compile(module, backend="dsv4", options=options)(x)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("widths", "copies"), [((8, 8), 0), ((8, 4), 1), ((3, 8), 1)])
def test_attention_gets_aligned_rows_and_no_needless_copy(widths, copies, tmp_path):
    """The kernels of attention want rows that begin at 16 bytes: a copy where packing has moved them, else none."""

    def read(a: Tensor, b: Tensor) -> Tensor:
        heads = b.view(*b.shape[:-1], -1, 4).transpose(1, 2)
        return a.sum() + F.scaled_dot_product_attention(heads, heads, heads)

    module, x = Pair(read, widths, torch.bfloat16), torch.randn(2, 8, 16).bfloat16()
    options = {"compiler": "eager", "mhc": "off", "projections": "pack", "dump_dir": str(tmp_path)}
    with torch.no_grad():
        expected = module(x)
        out = torch.compile(module, backend="dsv4", options=options)(x)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    (text,) = (path.read_text() for path in tmp_path.rglob("projections.py"))
    assert "_scaled_dot_product" in text
    assert text.count("aten.clone.default") == copies


@pytest.mark.parametrize("strategy", ["pack", "streams"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_groups_of_an_activation_and_of_its_transpose(dynamic, strategy):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(16, width, bias=False) for width in (8, 4, 8, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            turned = x.sin().transpose(0, 1)
            return self.a(x), self.b(x), self.c(turned), self.d(turned)

    module = Both()
    is_strict = strategy == "pack"  # there are no streams here, which strict would not let pass
    options = {"compiler": "eager", "mhc": "off", "projections": strategy, "strict": is_strict}
    compiled = torch.compile(module, backend="dsv4", options=options, dynamic=dynamic)
    for lead in ((2, 6), (3, 5)):
        x = torch.randn(*lead, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), module(x))
    (graph,) = dsv4_compile.report().graphs[:1]
    assert names(graph) == [["a", "b"], ["c", "d"]] and not graph.missed


def test_permuted_rows_of_a_shared_activation():
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(16, 8, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x.permute(1, 0, 2)).view(-1, 4)

    module, x = Turned(), torch.randn(2, 3, 16)
    with torch.no_grad():
        expected = module(x)
        for strategy in ("pack", "streams"):
            torch._dynamo.reset()
            options = {"compiler": "eager", "mhc": "off", "projections": strategy}
            for a, b in zip(torch.compile(module, backend="dsv4", options=options)(x), expected, strict=True):
                torch.testing.assert_close(a, b)
                assert a.stride() == b.stride()


@pytest.mark.parametrize("strategy", ["pack", "auto"])
def test_rows_that_depend_on_data_are_not_packed(strategy, monkeypatch):
    """Inductor reads the wrong columns when the number of rows is unbacked."""

    class Chosen(Pair):
        def forward(self, x: Tensor, chosen: Tensor) -> Any:
            return super().forward(x[chosen.nonzero().squeeze(-1)])

    if strategy == "auto":  # as on CUDA
        monkeypatch.setattr(projections, "_device_type", lambda group: "cuda")
    module = Chosen(lambda a, b: (a.sum(0), b.view(-1, 2).unbind(1)[1] * 2))
    inputs = torch.randn(9, 16), torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1])
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(module, backend="dsv4", options={"projections": strategy, "mhc": "off"})
        for out, expected in zip(compiled(*inputs), module(*inputs), strict=True):
            torch.testing.assert_close(out, expected)
    assert names(dsv4_compile.report().graphs[-1]) == [["a", "b"]]
