"""What does the backend do to a DeepSeek-V4, and what is it worth? This is what `make demo` runs.

    python examples/demo.py            # a few minutes on two cores, two on a GPU
    python examples/demo.py --quick    # one layer and few tokens

A `transformers` DeepSeek-V4 with random weights (tiny on a CPU, four layers of Flash's widths with a GPU) reads a
prompt eagerly, under stock Inductor and under this backend; then it generates some tokens. Each way of compiling starts
with an empty Inductor cache, so the compile times can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from random_model import FLASH, TINY, random_model
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dsv4_compile

console = Console(width=None if Console().is_terminal else 160, highlight=False)


@dataclass(frozen=True)
class Setting:
    """What is run, by device and by `--quick`."""

    device: str
    layers: tuple[str, ...]
    prompt: int
    generated: int

    @property
    def sizes(self) -> dict:
        return FLASH if self.device == "cuda" else TINY

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


@dataclass(frozen=True)
class Outcome:
    """One way of running the prompt."""

    name: str
    compile_seconds: float | None
    milliseconds: float
    logits: Tensor


def setting(quick: bool) -> Setting:
    if quick:
        return Setting("cpu", ("csa",), 24, 3)
    if torch.cuda.is_available():
        return Setting("cuda", ("sliding", "csa", "hca", "csa"), 160, 12)
    # More than 128 tokens: only then has the heavily compressed layer something to attend to.
    return Setting("cpu", ("sliding", "csa", "hca"), 160, 8)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """A spinner on a terminal, and a line with the time when it is done."""
    start = time.perf_counter()
    with console.status(f"{text} ..."):
        yield
    console.print(f"  {text}: {time.perf_counter() - start:.1f} s")


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    """The result of a call, and the seconds until the device has it."""
    settle(device)
    start = time.perf_counter()
    result = call()
    settle(device)
    return result, time.perf_counter() - start


def read_prompt(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits.float()


def run(name: str, model: torch.nn.Module, ids: Tensor, backend: str | None) -> Outcome:
    """First call, then the median of ten more."""
    device = ids.device.type
    compiled = model if backend is None else torch.compile(model, backend=backend)
    with step(f"{name}: first call, compiles" if backend else f"{name}: first call"):
        logits, first = timed(lambda: read_prompt(compiled, ids), device)
    seconds = [timed(lambda: read_prompt(compiled, ids), device)[1] for _ in range(10)]
    return Outcome(name, first if backend else None, 1e3 * statistics.median(seconds), logits)


def compile_and_compare(model: torch.nn.Module, ids: Tensor) -> None:
    from torch._inductor.utils import fresh_cache

    with step("start of Dynamo and Inductor, which neither way is charged for"):
        read_prompt(torch.compile(model, backend="eager"), ids)
        torch.compile(lambda x: x.sin() + 1)(ids.float())
    outcomes = [run("eager", model, ids, None)]
    for name, backend in (("stock Inductor", "inductor"), ('backend="dsv4"', "dsv4")):
        torch._dynamo.reset()
        with fresh_cache():
            outcomes.append(run(name, model, ids, backend))
    show(outcomes)


def show(outcomes: list[Outcome]) -> None:
    eager = outcomes[0].logits
    table = Table(title=f"Prompt of {eager.shape[1]} tokens; each way of compiling began with an empty cache")
    for heading in ("", "first call, s", "run, ms", "largest difference to eager", "of the largest logit"):
        table.add_column(heading, justify="left" if not heading else "right")
    for outcome in outcomes:
        compile_seconds = "" if outcome.compile_seconds is None else f"{outcome.compile_seconds:.1f}"
        difference = float((outcome.logits - eager).abs().max())
        cells = (f"{difference:.1e}", f"{difference / float(eager.abs().max()):.1e}") if compile_seconds else ("", "")
        table.add_row(outcome.name, compile_seconds, f"{outcome.milliseconds:.1f}", *cells)
    console.print(table)
    if eager.is_cuda:
        console.print("  (bfloat16: each way rounds differently, eager too; benchmarks/model.py compares with float32)")


def generate(model: torch.nn.Module, ids: Tensor, count: int) -> list[int]:
    out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


def generate_and_compare(model: torch.nn.Module, ids: Tensor, count: int) -> None:
    """Greedy generation with Hugging Face's cache, eagerly and through the backend."""
    torch._dynamo.reset()
    # The shapes of the cache change from token to token; by default Dynamo gives up after eight graphs.
    torch._dynamo.config.recompile_limit = 64
    with step("eager"):
        expected = generate(model, ids, count)
    model.compile(backend="dsv4", options={"compiler": "eager"})
    with step("compiled, first time"):
        first = generate(model, ids, count)
    with step("compiled, again"):
        again = generate(model, ids, count)
    console.print(f"  eager    {expected}\n  compiled {again}")
    console.print("  the same tokens" if first == again == expected else "  the tokens DIFFER from eager")
    graphs = dsv4_compile.report().graphs
    sites = " or ".join(
        str(count) for count in sorted({sum(site.kernel != "inductor" for site in graph.mhc) for graph in graphs})
    )
    console.print(f"  {len(graphs)} graphs, one for each phase of the cache, with {sites} mHC sites replaced in each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one layer and few tokens, on the CPU")
    chosen = setting(parser.parse_args().quick)
    where = torch.cuda.get_device_name() if chosen.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"

    console.rule("1. A DeepSeek-V4 with random weights")
    with step("made"):
        model = random_model(chosen.sizes, chosen.layers, chosen.device, chosen.dtype)
        ids = torch.randint(0, model.config.vocab_size, (1, chosen.prompt), device=chosen.device)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    dtype = str(chosen.dtype).removeprefix("torch.")
    console.print(f"  layers: {', '.join(chosen.layers)}; hidden size {model.config.hidden_size}")
    console.print(f"  {parameters:.1f} million parameters, {dtype}, torch {torch.__version__}, {where}")

    console.rule("2. Reading a prompt: eager, stock Inductor, dsv4")
    compile_and_compare(model, ids)

    console.rule("3. What was done to the graph: print(dsv4_compile.report())")
    console.print(str(dsv4_compile.report()), markup=False, soft_wrap=True)

    console.rule("4. Generating with Hugging Face's cache")
    console.print('  options={"compiler": "eager"}: without Inductor, which would take minutes for so many graphs')
    generate_and_compare(model, ids, chosen.generated)


if __name__ == "__main__":
    main()
