"""The Triton kernels of mHC on the CPU, in Triton's interpreter.

The interpreter must be on before Triton is imported, so the cases run in one process of their own: this file as a
script prints the distance of every output from the float64 reference, and the tests read them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# name: tokens, hidden, n, iters, dtype, norm weight
CASES = {
    "one token": (1, 64, 4, 20, "float32", True),
    "no token": (0, 64, 4, 20, "float32", True),
    "odd hidden size": (5, 40, 4, 2, "float32", True),
    "more tokens than a block": (17, 64, 4, 1, "float32", True),
    "several steps in a slice": (17, 1040, 2, 0, "float32", False),
    "two streams": (5, 40, 2, 3, "float32", True),
    "three streams": (5, 40, 3, 3, "float32", True),
    "five streams": (5, 40, 5, 3, "float32", True),
    "eight streams": (5, 40, 8, 3, "float32", True),
    "eight streams, no iteration": (2, 40, 8, 0, "float32", True),
    "bfloat16": (5, 40, 4, 3, "bfloat16", True),
    "float16": (5, 40, 4, 3, "float16", True),
}
# Of the outputs in the residual's dtype; `post` and `comb` are judged on the rounded residual and stay at float32's.
BOUNDS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def distances(tokens: int, hidden: int, n: int, iters: int, kind: str, norm: bool) -> dict[str, float]:
    import torch

    from dsv4_compile.kernels.mhc import operators, reference, resolve

    assert operators.NAMES
    dtype = getattr(torch, kind)
    assert resolve("triton", torch.device("cpu"), n, hidden, dtype) == ("triton", None)
    torch.manual_seed(tokens + n)
    logits = (2 + n) * n
    streams = (
        torch.randn(tokens, hidden).to(dtype),
        torch.randn(tokens, n, hidden).to(dtype),
        torch.rand(tokens, n) * 2,
        torch.rand(tokens, n, n),
    )
    weights = [torch.randn(logits, n * hidden) / (n * hidden) ** 0.5, torch.randn(3), torch.randn(logits)]
    weights = [tensor.to(dtype) for tensor in weights]
    constants = (torch.rand(hidden) if norm else None, iters, 1e-2, 3e-2, 2e-3, 1.7, 5e-2)

    def wide(values: tuple[object, ...]) -> list[object]:
        return [value.double() if isinstance(value, torch.Tensor) else value for value in values]

    fused = torch.ops.dsv4.mhc_post_pre(*streams, *weights, *constants, dtype, dtype, "triton")
    post = torch.ops.dsv4.mhc_post(*streams, dtype, "triton")
    pre = torch.ops.dsv4.mhc_pre(streams[1], *weights, *constants, dtype, "triton")
    rest = (*weights, *constants)
    pairs = {
        "residual": (fused[0], reference.mhc_post(*wide(streams), torch.float64)),
        "post alone": (post, reference.mhc_post(*wide(streams), torch.float64)),
    }
    for mixing in (torch.bfloat16, torch.float16):
        rounded = (*streams[:2], *(weight.to(mixing) for weight in streams[2:]))
        exact = reference.mhc_post(*wide(rounded), torch.float64)
        given = streams
        if (
            mixing is torch.bfloat16
        ):  # the interpreter cuts off what the compiler rounds: weights where both are the same
            given = (*streams[:2], *(weight.float() * (1 + 2**-10) for weight in rounded[2:]))
        how = (torch.float32, "triton", False, mixing)
        alone = torch.ops.dsv4.mhc_post(*given, *how)
        both = torch.ops.dsv4.mhc_post_pre(*given, *weights, *constants, torch.float32, *how)
        plain = torch.ops.dsv4.mhc_post(*given, torch.float32, "triton")
        pairs |= {f"mixed in {mixing}": (both[0], exact), f"mixed in {mixing} alone": (alone, exact)}
        pairs[f"not mixed in {mixing}"] = (plain, exact)
    for suffix, got, source in (("", fused[1:], fused[0]), (" of pre", pre, streams[1])):
        wanted = reference.mhc_pre(*wide((source, *rest)), torch.float64)
        pairs |= {name + suffix: pair for name, *pair in zip(("input", "post", "comb"), got, wanted, strict=True)}
    assert all(a.shape == b.shape and a.is_contiguous() for a, b in pairs.values())
    return {name: ((a.double() - b).norm() / b.norm()).nan_to_num().item() for name, (a, b) in pairs.items()}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__))], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_the_interpreted_kernels_match_the_reference(name: str, measured: dict[str, dict[str, float]]) -> None:
    kind = CASES[name][4]
    for output, value in measured[name].items():
        if output.startswith("not mixed"):  # or the bound for what is mixed so would say nothing
            assert value > 1e-5 or CASES[name][0] == 0, (output, value)
            continue
        exact = output.startswith(("post of", "comb", "mixed")) or output == "post"
        assert value <= (1e-6 if exact else BOUNDS[kind]), (output, value)


if __name__ == "__main__":
    print(json.dumps({name: distances(*case) for name, case in CASES.items()}))
