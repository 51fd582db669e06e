"""Linear layers on one input, in parallel and packed: results, gradients, tracing, and weights that change or move."""

import copy
import gc
import pathlib
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dsv4_compile.kernels import linear, streams
from dsv4_compile.kernels.linear import packing

ROWS = (5, 1, 8, 3)
COLUMNS = 16

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


class Projections(nn.Module):
    """Projections `[K] -> [M_i]` on one input, one of them with a bias."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Linear(COLUMNS, rows, bias=rows == 8, device=device, dtype=dtype) for rows in ROWS
        )

    @property
    def weights(self) -> list[Tensor]:
        return [part.weight for part in self.parts]

    @property
    def biases(self) -> list[Tensor | None]:
        return [part.bias for part in self.parts]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)

    def packed(self, x: Tensor) -> Tensor:
        return linear.packed_linear(x, self.weights, self.biases)

    def parallel(self, x: Tensor) -> Tensor:
        return torch.cat(linear.parallel_linear(x, self.weights, self.biases, [0, 1, 2, 1]), -1)


@pytest.fixture(autouse=True)
def no_fallbacks() -> None:
    packing.clear_fallbacks()


def assert_same(model: Projections, x: Tensor) -> None:
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(model.packed(x), expected)
        torch.testing.assert_close(model.parallel(x), expected)


def inputs(device: str = "cpu") -> dict[str, Tensor]:
    wide = torch.randn(4, 6, 2 * COLUMNS, device=device)
    return {
        "matrix": torch.randn(7, COLUMNS, device=device),
        "row": torch.randn(COLUMNS, device=device),
        "leading dimensions": torch.randn(2, 3, 4, COLUMNS, device=device),
        "no rows": torch.randn(0, COLUMNS, device=device),
        "no rows in a batch": torch.randn(3, 0, COLUMNS, device=device),
        "transposed": torch.randn(COLUMNS, 7, device=device).t(),
        "strided": wide[:, ::2, ::2],
        "permuted": torch.randn(COLUMNS, 3, 5, device=device).permute(1, 2, 0),
        "expanded": torch.randn(1, COLUMNS, device=device).expand(9, COLUMNS),
    }


# ----------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(inputs()))
@pytest.mark.parametrize("pack", [True, False])
def test_equals_separate_linear_layers(kind: str, pack: bool, device: str) -> None:
    model = Projections(device)
    if pack:
        assert packing.pack(model.weights).packed
    x = inputs(device)[kind]
    assert_same(model, x)
    assert bool(packing.fallbacks()) is not pack
    with torch.no_grad():
        outputs = [model.packed(x), *linear.parallel_linear(x, model.weights, model.biases, [0, 1, 2, 0])]
    assert all(output.is_contiguous() for output in outputs)
    assert outputs[0].shape == (*x.shape[:-1], sum(ROWS))


@pytest.mark.parametrize("biased", [(), (0,), (0, 1, 2, 3), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_biases_are_added_where_they_are(biased: tuple[int, ...], dtype: torch.dtype) -> None:
    weights = [torch.randn(rows, COLUMNS, dtype=dtype) for rows in ROWS]
    biases = [torch.randn(rows, dtype=dtype) if i in biased else None for i, rows in enumerate(ROWS)]
    x = torch.randn(6, COLUMNS, dtype=dtype)
    expected = torch.cat([functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], -1)
    torch.testing.assert_close(linear.packed_linear(x, weights, biases), expected)
    assert packing.pack(weights).packed
    torch.testing.assert_close(linear.packed_linear(x, weights, biases), expected)


def test_low_precision_bias_is_no_farther_from_the_oracle_than_eager() -> None:
    weights = [torch.randn(64, 128, dtype=torch.bfloat16) for _ in range(3)]
    biases = [None, torch.randn(64, dtype=torch.bfloat16), None]
    x = torch.randn(32, 128, dtype=torch.bfloat16)
    pairs = list(zip(weights, biases, strict=True))
    oracle = torch.cat(
        [functional.linear(x.double(), w.double(), None if b is None else b.double()) for w, b in pairs], -1
    )
    eager = torch.cat([functional.linear(x, w, b) for w, b in pairs], -1)
    packing.pack(weights)
    ours = linear.packed_linear(x, weights, biases)
    assert (ours - oracle).abs().mean() <= (eager - oracle).abs().mean() * 1.01


def test_parallel_layers_may_differ_in_dtype_from_x_and_from_each_other() -> None:
    x = torch.randn(3, 5, COLUMNS, dtype=torch.bfloat16)
    weights = [torch.randn(4, COLUMNS, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    outputs = linear.parallel_linear(x, weights, [None] * 3, [0, 1, 1])
    for output, weight in zip(outputs, weights, strict=True):
        assert output.dtype == weight.dtype
        torch.testing.assert_close(output, functional.linear(x.to(weight.dtype), weight))


def test_transposed_weight_is_right_and_counted() -> None:
    weights = [torch.randn(5, COLUMNS), torch.randn(COLUMNS, 4).t()]
    x = torch.randn(3, COLUMNS)
    expected = torch.cat([x @ weight.t() for weight in weights], -1)
    for _ in range(2):
        torch.testing.assert_close(linear.packed_linear(x, weights, [None, None]), expected)
    assert packing.fallbacks() == [("A weight is not contiguous by rows.", 2)]
    torch.testing.assert_close(torch.cat(linear.parallel_linear(x, weights, [None, None], [1, 0]), -1), expected)


def test_weights_without_rows_are_packed_and_multiplied() -> None:
    weights = [torch.randn(rows, COLUMNS) for rows in (0, 3, 0, 2, 0)]
    x = torch.randn(4, COLUMNS)
    expected = x @ torch.cat(weights).t()
    assert packing.pack(weights).packed and packing.already_packed(weights)
    torch.testing.assert_close(linear.packed_linear(x, weights, [None] * 5), expected)
    empty = [torch.randn(0, COLUMNS), torch.randn(0, COLUMNS)]
    assert linear.packed_linear(x, empty, [None, None]).shape == (4, 0)
    assert packing.fallbacks() == []


def test_no_features_make_zeros() -> None:
    weights = [torch.randn(2, 0), torch.randn(3, 0)]
    assert linear.packed_linear(torch.randn(4, 0), weights, [None, None]).equal(torch.zeros(4, 5))
    assert linear.parallel_linear(torch.randn(4, 0), weights, [None, torch.ones(3)], [0, 1])[1].equal(torch.ones(4, 3))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([torch.ones(2, 3)], [None], [0]), r"needs x \[\.\.\., K\]"),
        (([torch.ones(2, 4)], [], [0]), "1 weights and 0 biases"),
        (([], [], []), "0 weights"),
        (([torch.ones(2, 4)], [torch.ones(3)], [0]), r"must be \[2\]"),
        (([torch.ones(2, 4)], [torch.ones(2).half()], [0]), "float16"),
        (([torch.ones(2, 4)], [None], [-1]), "stream of 0 or more"),
        (([torch.ones(2, 4)], [None], [0, 1]), "stream of 0 or more"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_arguments_are_explained(arguments: tuple[list[Tensor], ...], sentence: str, device: str) -> None:
    weights, biases, numbers = arguments
    weights = [weight.to(device) for weight in weights]
    biases = [None if bias is None else bias.to(device) for bias in biases]
    with pytest.raises(RuntimeError, match=sentence):
        linear.parallel_linear(torch.ones(1, 4, device=device), weights, biases, numbers)


def test_packed_weights_of_two_dtypes_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"one dtype.*bfloat16.*float32"):
        linear.packed_linear(torch.ones(1, 4), [torch.ones(2, 4), torch.ones(2, 4).bfloat16()], [None, None])


# ------------------------------------------------------------------------------------------------ gradients, tracing


@pytest.mark.parametrize("form", ["packed", "parallel"])
@pytest.mark.parametrize("frozen", ["nothing", "x", "weights", "bias"])
def test_gradients_equal_eager(form: str, frozen: str) -> None:
    model = Projections(dtype=torch.float64)
    packing.pack(model.weights)
    x = torch.randn(2, 3, COLUMNS, dtype=torch.float64, requires_grad=frozen != "x")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen.removesuffix("s")))
    wanted = [tensor for tensor in (x, *model.parameters()) if tensor.requires_grad]
    expected = torch.autograd.grad(model(x).sin().sum(), wanted)
    found = torch.autograd.grad(getattr(model, form)(x).sin().sum(), wanted)
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager)


def test_second_derivative_and_an_unused_output() -> None:
    weights = [torch.randn(rows, 4, dtype=torch.float64, requires_grad=True) for rows in (2, 3)]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, *w: linear.parallel_linear(x, list(w), [None, None], [0, 1])[0].pow(2), (x, *weights), atol=1e-4
    )


SAMPLES = {
    "plain": ([None] * 4, False),
    "one bias, gradients": ([None, None, 8, None], True),
    "all biases, gradients": (list(ROWS), True),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sample", list(SAMPLES))
def test_opcheck(sample: str, packed: bool) -> None:
    lengths, gradients = SAMPLES[sample]
    weights = [torch.randn(rows, COLUMNS) for rows in ROWS]
    if packed:
        packing.pack(weights)
    biases = [None if length is None else torch.randn(length) for length in lengths]
    x = torch.randn(2, 3, COLUMNS)
    for tensor in (x, *weights, *(bias for bias in biases if bias is not None)):
        tensor.requires_grad_(gradients)
    torch.library.opcheck(torch.ops.dsv4.packed_linear.default, (x, weights, biases))
    torch.library.opcheck(torch.ops.dsv4.parallel_linear.default, (x, weights, biases, [0, 1, 1, 2]))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("form", ["packed", "parallel"])
def test_traces_once_for_all_token_counts(form: str, gradients: bool) -> None:
    model = Projections()
    packing.pack(model.weights)
    graphs = 0

    def count(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    compiled = torch.compile(getattr(model, form), backend=count, dynamic=True, fullgraph=True)
    with torch.set_grad_enabled(gradients):
        for shape in ((4, 7), (2, 3), (5, 2)):
            x = torch.randn(*shape, COLUMNS)
            torch.testing.assert_close(compiled(x), model(x))
    assert graphs == 1


def test_operator_stays_in_an_inference_graph() -> None:
    model = Projections()
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=look)
    with torch.no_grad():
        torch.compile(model.packed, backend=backend)(torch.randn(3, COLUMNS))
    assert "dsv4.packed_linear.default" in seen


def test_fake_outputs_have_shape_dtype_and_strides_of_real_ones() -> None:
    x, weights = torch.randn(3, 0, COLUMNS).half(), [torch.randn(rows, COLUMNS).half() for rows in ROWS]
    real = [linear.packed_linear(x, weights, [None] * 4), *linear.parallel_linear(x, weights, [None] * 4, [0] * 4)]
    x, weights = x.to("meta"), [weight.to("meta") for weight in weights]
    meta = [linear.packed_linear(x, weights, [None] * 4), *linear.parallel_linear(x, weights, [None] * 4, [0] * 4)]
    for one, other in zip(real, meta, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


# ------------------------------------------------------------------------------------ weights that change after packing


@pytest.mark.parametrize("compiled", [False, True])
def test_new_values_are_used_after_every_kind_of_change(compiled: bool) -> None:
    model = Projections()
    assert packing.pack(model.weights).packed
    if compiled:
        model.packed = torch.compile(model.packed, backend="aot_eager", dynamic=True)  # type: ignore[method-assign]
    x = torch.randn(3, COLUMNS)
    assert_same(model, x)

    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    assert_same(model, x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    assert_same(model, x)
    assert packing.already_packed(model.weights) and packing.fallbacks() == []

    model.parts[1].weight.data = torch.randn(ROWS[1], COLUMNS)
    assert_same(model, x)
    assert [count for _, count in packing.fallbacks()] == [1]
    model.parts[0].weight = model.parts[2].weight = nn.Parameter(torch.randn(6, COLUMNS))
    model.parts[2].bias = None
    assert_same(model, x)
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()}, assign=True)
    assert_same(model, x)


def test_casting_unpacks_and_packing_again_works() -> None:
    model = Projections()
    packing.pack(model.weights)
    model.to(torch.float64)
    assert not packing.already_packed(model.weights)
    assert_same(model, torch.randn(3, COLUMNS, dtype=torch.float64))
    assert packing.pack(model.weights).packed
    packing.clear_fallbacks()
    assert_same(model, torch.randn(3, COLUMNS, dtype=torch.float64))
    assert packing.fallbacks() == []


def test_copy_of_a_packed_model_is_independent() -> None:
    model = Projections()
    packing.pack(model.weights)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.parts[0].weight.zero_()
    assert model.parts[0].weight.abs().sum() > 0
    assert_same(other, torch.randn(3, COLUMNS))


def test_order_of_the_weights_matters() -> None:
    weights = [torch.randn(rows, COLUMNS) for rows in ROWS]
    packing.pack(weights)
    x = torch.randn(2, COLUMNS)
    swapped = [weights[1], weights[0], weights[2]]
    torch.testing.assert_close(
        linear.packed_linear(x, swapped, [None] * 3), torch.cat([x @ weight.t() for weight in swapped], -1)
    )
    assert [count for _, count in packing.fallbacks()] == [1]
    # A neighbouring subset is packed as well.
    linear.packed_linear(x, weights[1:3], [None] * 2)
    assert [count for _, count in packing.fallbacks()] == [1]


# ----------------------------------------------------------------------------------------------------------- packing


def test_parameters_stay_what_they_are() -> None:
    model = Projections()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.parts[0].weight.requires_grad_(False)
    model.parts[1].weight.grad = torch.ones(ROWS[1], COLUMNS)
    objects = model.weights
    result = packing.pack(objects)
    assert result.packed and result.nbytes == sum(ROWS) * COLUMNS * 4
    assert all(one is other for one, other in zip(model.weights, objects, strict=True))
    assert [weight.requires_grad for weight in objects] == [False, True, True, True]
    assert all(isinstance(weight, nn.Parameter) and weight.is_leaf for weight in objects)
    assert model.parts[1].weight.grad is not None
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].equal(value) for name, value in before.items())


def test_packing_twice_is_success_without_new_memory() -> None:
    weights = [torch.randn(rows, COLUMNS) for rows in ROWS]
    packing.pack(weights)
    addresses = [weight.data_ptr() for weight in weights]
    result = packing.pack(weights)
    assert result.packed and result.nbytes == 0 and "already" in result.reason
    assert [weight.data_ptr() for weight in weights] == addresses


def test_packing_frees_the_old_storages() -> None:
    weights = [torch.randn(rows, COLUMNS) for rows in ROWS]
    old = [weakref.ref(weight.untyped_storage()) for weight in weights]
    packing.pack(weights)
    gc.collect()
    assert all(reference() is None for reference in old)
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    assert list(storages.values()) == [sum(ROWS) * COLUMNS * 4]


def test_unpacking_gives_every_weight_its_own_storage() -> None:
    model = Projections()
    values = [weight.detach().clone() for weight in model.weights]
    packing.pack(model.weights)
    packing.unpack(model.weights)
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in model.weights)
    assert all(one.equal(other) for one, other in zip(model.weights, values, strict=True))
    assert not packing.already_packed(model.weights)
    assert packing.pack(model.weights).packed


def embedding_slice() -> list[Tensor]:
    table = torch.randn(9, 4)
    return [table[:3], torch.randn(2, 4)]


def tied() -> list[Tensor]:
    weight = torch.randn(3, 4)
    return [weight, torch.randn(2, 4), weight]


def tied_by_data() -> list[Tensor]:
    weight, other = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    other.data = weight.data
    return [weight, other]


def functional_wrapper() -> list[Tensor]:
    return [torch._to_functional_tensor(torch.randn(3, 4)), torch.randn(2, 4)]


def fake() -> list[Tensor]:
    mode = torch._subclasses.FakeTensorMode()
    return [mode.from_tensor(torch.randn(3, 4)), torch.randn(2, 4)]


def of_inference_mode() -> list[Tensor]:
    with torch.inference_mode():
        return [torch.randn(3, 4), torch.randn(2, 4)]


class Wrapper(torch.Tensor):
    """A tensor that is not what it seems, as DTensor and quantised tensors are."""

    @staticmethod
    def __new__(cls) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, (3, 4))  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise NotImplementedError("This tensor holds nothing.")


REFUSED = {
    "one weight": (lambda: [torch.randn(3, 4)], "two weights or more"),
    "dtype": (lambda: [torch.randn(3, 4), torch.randn(2, 4).half()], "Weight 1 has the dtype"),
    "columns": (lambda: [torch.randn(3, 4), torch.randn(2, 5)], "Weight 1 has the number of columns 5"),
    "meta": (lambda: [torch.randn(3, 4, device="meta")] * 2, "meta device"),
    "vector": (lambda: [torch.randn(3, 4), torch.randn(4)], "Weight 1 is no contiguous matrix"),
    "transposed": (lambda: [torch.randn(4, 3).t(), torch.randn(2, 4)], "Weight 0 is no contiguous matrix"),
    "sparse": (lambda: [torch.randn(3, 4).to_sparse(), torch.randn(2, 4)], "layout"),
    "slice": (embedding_slice, "Weight 0 is a part of a larger storage"),
    "tied": (tied, "Weights 0 and 2 share memory"),
    "tied by data": (tied_by_data, "Weights 0 and 1 share memory"),
    "computed": (lambda: [torch.randn(3, 4, requires_grad=True) * 2, torch.randn(2, 4)], "not a leaf"),
    "view": (lambda: [torch.randn(12).view(3, 4), torch.randn(2, 4)], "view"),
    "inference": (of_inference_mode, "inference mode"),
    "functional": (functional_wrapper, "function transform"),
    "fake": (fake, "FakeTensor"),
    "subclass": (lambda: [Wrapper(), torch.randn(2, 4)], "Wrapper"),
    "shared": (lambda: [torch.randn(3, 4).share_memory_(), torch.randn(2, 4)], "shared between processes"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_packing_refuses_with_a_reason_and_leaves_everything(kind: str) -> None:
    make, sentence = REFUSED[kind]
    weights = make()
    plain = [weight for weight in weights if type(weight) is Tensor and weight.layout is torch.strided]
    addresses = [weight.data_ptr() for weight in plain if not torch._is_functional_tensor(weight)]
    result = packing.pack(weights)
    assert not result.packed and result.nbytes == 0
    assert sentence in result.reason and result.reason.endswith(".")
    assert [weight.data_ptr() for weight in plain if not torch._is_functional_tensor(weight)] == addresses


def test_packing_refuses_what_a_tensor_outside_the_group_shares() -> None:
    weights = [nn.Parameter(torch.randn(rows, COLUMNS)) for rows in ROWS]
    outsider = nn.Parameter(torch.empty(0))
    outsider.data = weights[1].data
    result = packing.pack(weights)
    assert not result.packed and "Weight 1 shares its storage" in result.reason
    del outsider
    assert packing.pack(weights).packed


def test_packing_a_part_of_another_group_is_refused() -> None:
    weights = [torch.randn(rows, COLUMNS) for rows in ROWS]
    packing.pack(weights)
    assert "larger storage" in packing.pack([weights[0], torch.randn(2, COLUMNS)]).reason
    assert "larger storage" in packing.pack([weights[0], weights[2]]).reason
    assert packing.pack(weights[1:]).packed


def test_packing_under_fake_mode_is_refused() -> None:
    weights = [torch.randn(3, 4), torch.randn(2, 4)]
    with torch._subclasses.FakeTensorMode():
        assert "dispatch mode" in packing.pack(weights).reason


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_packing_and_the_operators_work_in_every_gradient_mode(context: type) -> None:
    model = Projections()
    x = torch.randn(3, COLUMNS)
    with context():
        assert packing.pack(model.weights).packed
        torch.testing.assert_close(model.packed(x), model(x))
        torch.testing.assert_close(model.parallel(x), model(x))
    assert not any(weight.is_inference() for weight in model.weights)
    model.packed(x).sum().backward()
    assert packing.fallbacks() == []


def test_weights_can_be_packed_inside_a_backend() -> None:
    model = Projections()

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        weights = [value for value in examples if isinstance(value, nn.Parameter) and value.dim() == 2]
        result = packing.pack(weights)
        assert result.packed, result.reason
        return graph

    x = torch.randn(3, COLUMNS)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert packing.already_packed(model.weights)


# ------------------------------------------------------------------------------------------------------------- files


def test_state_dict_survives_torch_save(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    model = Projections()
    torch.save(model.state_dict(), tmp_path / "before.pt")
    packing.pack(model.weights)
    torch.save(model.state_dict(), tmp_path / "after.pt")
    assert (tmp_path / "after.pt").stat().st_size <= (tmp_path / "before.pt").stat().st_size
    loaded = torch.load(tmp_path / "after.pt")
    other = Projections()
    other.load_state_dict(loaded)
    x = torch.randn(2, COLUMNS)
    torch.testing.assert_close(other(x), model(x))
    # Loaded tensors lie in one storage, as those that were saved.
    assert packing.already_packed([loaded[f"parts.{i}.weight"] for i in range(len(ROWS))])


def test_state_dict_survives_safetensors(tmp_path: pathlib.Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = Projections()
    packing.pack(model.weights)
    safetensors.save_file(model.state_dict(), tmp_path / "after.safetensors")
    loaded = safetensors.load_file(tmp_path / "after.safetensors")
    assert all(loaded[name].equal(value) for name, value in model.state_dict().items())
    # `save_model` wants of every storage one tensor that covers it whole.
    with pytest.raises(RuntimeError, match="covering the entire storage"):
        safetensors.save_model(model, tmp_path / "model.safetensors")
    packing.unpack(model.weights)
    safetensors.save_model(model, tmp_path / "model.safetensors")
    other = Projections()
    safetensors.load_model(other, tmp_path / "model.safetensors")
    assert all(one.equal(two) for one, two in zip(other.weights, model.weights, strict=True))


def test_packed_model_survives_save_pretrained(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config)
    attention = model.model.layers[0].self_attn
    assert packing.pack([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).packed
    model.save_pretrained(tmp_path)
    other = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert other.state_dict()[name].equal(value), name
    attention = other.model.layers[0].self_attn
    result = packing.pack([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert result.packed, result.reason


# --------------------------------------------------------------------------------------------------------------- GPU


def gpu_model(rows: int = 1024, columns: int = 1024, count: int = 4) -> list[Tensor]:
    return [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(count)]


@GPU
def test_parallel_layers_on_streams_equal_eager_1000_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_devices", {})
    weights = gpu_model()
    for step in range(1000):
        x = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
        outputs = linear.parallel_linear(x, weights, [None] * 4, [0, 1, 2, 3])
        if step % 50 == 0:
            for output, weight in zip(outputs, weights, strict=True):
                torch.testing.assert_close(output, functional.linear(x, weight), rtol=2e-2, atol=2e-2)
        del x, outputs
    assert streams.stream_count("cuda") == 3


@GPU
def test_parallel_output_read_late_keeps_its_value() -> None:
    # 16 MiB each: 1024 tokens of 8192 features in bfloat16.
    weights = gpu_model(rows=8192, columns=256, count=3)
    for _ in range(20):
        x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16)
        expected = [functional.linear(x, weight).double().abs().sum() for weight in weights]
        outputs = linear.parallel_linear(x, weights, [None] * 3, [0, 1, 2])
        torch.cuda._sleep(20_000_000)
        found = [output.double().abs().sum() for output in outputs]
        del outputs
        for stream in [torch.cuda.current_stream(), *streams.auxiliary_streams("cuda", 2)]:
            with torch.cuda.stream(stream):
                [torch.full((1024, 8192), 7.0, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


@GPU
@pytest.mark.parametrize("form", ["packed", "parallel"])
def test_captured_operator_replays_with_new_inputs_and_new_weights(form: str) -> None:
    model = Projections("cuda")
    packing.pack(model.weights)
    x = torch.randn(5, COLUMNS, device="cuda")
    run = getattr(model, form)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run(x)
            refused = packing.pack([weight.clone() for weight in model.weights])
        assert not refused.packed and "captured" in refused.reason
        for _ in range(20):
            x.copy_(torch.randn_like(x))
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter))
            graph.replay()
            torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-4)


@GPU
def test_packing_on_the_gpu_takes_no_more_than_the_group_and_gives_it_back() -> None:
    weights = [torch.randn(2048, 4096, device="cuda") for _ in range(4)]
    group = sum(weight.nbytes for weight in weights)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert packing.pack(weights).packed
    assert torch.cuda.max_memory_allocated() - before <= group
    assert torch.cuda.memory_allocated() == before
