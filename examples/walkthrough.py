"""The program of docs/walkthrough.md: the second layer has a site that the backend leaves alone. Which, and why?

python examples/walkthrough.py dump          # compiles, and writes a dump into the folder `dump`
python examples/walkthrough.py mended --mend # the same with the layer as it should be
dsv4-compile explain dump
dsv4-compile compare dump mended
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from deepseek_style import EPS, VOCABULARY, Block, Transformer
from torch import Tensor


class ForkedBlock(Block):
    """Somebody's variant: the streams are scaled by their mean magnitude and not by its root mean square."""

    def mixes(self, x: Tensor, fn: Tensor) -> Tensor:
        flat = x.flatten(2).float()
        return F.linear(flat, fn) / (flat.abs().mean(-1, keepdim=True) + EPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump_dir")
    parser.add_argument("--mend", action="store_true", help="the second layer as DeepSeek has it")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer((Block, Block if arguments.mend else ForkedBlock))
    compiled = torch.compile(model, backend="dsv4", options={"dump_dir": arguments.dump_dir})
    with torch.no_grad():
        compiled(torch.randint(0, VOCABULARY, (1, 32)))


if __name__ == "__main__":
    main()
