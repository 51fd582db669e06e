"""How do I use the backend with a `transformers` model and its `generate`?

    python examples/huggingface.py

Three lines matter: the experts as one grouped product, room for the graphs that Hugging Face's cache leads to, and
`model.compile`, which compiles the model in place, so that `generate` goes through it. The rewritten graphs run without
Inductor here (`compiler="eager"`), because compiling each of them would take minutes; leave the option out in earnest.
"""

from __future__ import annotations

import time
from collections import Counter

import torch
from random_model import TINY, random_model

import dsv4_compile

PROMPT, NEW = 22, 3  # with the third token a window of four tokens is compressed: another graph


def generate(model: torch.nn.Module, ids: torch.Tensor) -> list[int]:
    start = time.perf_counter()
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens = out[0, ids.shape[1] :].tolist()
    print(f"  {tokens} in {time.perf_counter() - start:.1f} s")
    return tokens


def main() -> None:
    model = random_model(TINY, ["csa"])
    ids = torch.randint(0, TINY["vocab_size"], (1, PROMPT))
    names = list(model.state_dict())

    print(f"Eager, {NEW} tokens after a prompt of {PROMPT}:")
    expected = generate(model, ids)

    model.set_experts_implementation("grouped_mm")
    torch._dynamo.config.recompile_limit = 64
    model.compile(backend="dsv4", options={"compiler": "eager"})

    print("Compiled, the first time (each new phase of the cache is a new graph):")
    first = generate(model, ids)
    print("Compiled, again:")
    again = generate(model, ids)
    print("The same tokens as eager." if first == again == expected else "The tokens differ from eager.")
    print("The same names in the state_dict." if list(model.state_dict()) == names else "The state_dict has changed.")

    report = dsv4_compile.report()
    print(f"\n{len(report.graphs)} graphs were compiled. What was replaced in each (a head is, on CUDA):")
    for graph in report.graphs:
        forms = Counter(site.form for site in graph.mhc)
        sites = ", ".join(f"{count} mhc {form}" for form, count in forms.items())
        print(f"  graph {graph.id}: {sites}; {len(graph.projections)} groups of projections")


if __name__ == "__main__":
    main()
