"""What was matched, what was not, and why? And how do I make a program fail when something was not?

    python examples/read_report.py

The second layer of the model clamps the mixing logits of its hyper-connections: another formula than DeepSeek's, so the
backend must leave it as it is, and it says so.
"""

from __future__ import annotations

import torch
from deepseek_style import VOCABULARY, Block, Transformer
from torch import Tensor

import dsv4_compile


class ClampedBlock(Block):
    def mixes(self, x: Tensor, fn: Tensor) -> Tensor:
        return super().mixes(x, fn).clamp(-8, 8)


def main() -> None:
    torch.manual_seed(0)
    model = Transformer((Block, ClampedBlock))
    ids = torch.randint(0, VOCABULARY, (1, 32))

    print("1. What happened, as text: print(dsv4_compile.report())\n")
    with torch.no_grad():
        torch.compile(model, backend="dsv4", options={"compiler": "eager"})(ids)
    report = dsv4_compile.report()
    print(report)

    print("\n2. The same as data, for a program or a dashboard: report.to_dict(), or to_json()\n")
    for graph in report.to_dict()["graphs"]:
        for site in graph["mhc"]:
            print(f"  replaced  {site['site']:10} mhc {site['form']} by kernel {site['kernel']}")
        for group in graph["projections"]:
            linears = ", ".join(linear["name"] for linear in group["linears"])
            print(f"  together  {group['site']:10} {linears}: {group['strategy']}")
        for missed in graph["missed"]:
            print(f"  missed    {missed['site']:10} {missed['kind']}: {missed['reason']}")

    print("\n3. As a condition: strict=True raises when something that was asked for was left alone\n")
    strict = torch.compile(model, backend="dsv4", options={"compiler": "eager", "mhc": "reference", "strict": True})
    try:
        with torch.no_grad():
            strict(ids)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        print(f"  {type(error.inner_exception).__name__}: {error.inner_exception}")


if __name__ == "__main__":
    main()
