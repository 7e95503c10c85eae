"""Count the memory of optimizer state for models from 60M to 70B, without allocating it.

`python -m benchmarks.memory` prints the tables of docs/memory.md, and `--write docs/memory.md` replaces them there.
`plan` counts the state of a model on the meta device. State per GPU comes from the layouts that the optimizer
makes for FSDP2, in a process group that does not communicate. A form of state is one line of `FORMS`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cosmos_optim import OPTIMIZERS, plan

GIB = 2**30
GPUS = (1, 8, 64)
BEGIN, END = "<!-- tables: python -m benchmarks.memory --write docs/memory.md -->", "<!-- end of tables -->"
# bitsandbytes: one byte for each element of two moments, a float32 scale for each block, small tensors in float32.
BLOCK, SMALL = 256, 4096


@dataclass(frozen=True)
class Decoder:
    """The shapes of a LLaMA; `kv` is the width of keys and values."""

    width: int
    mlp: int
    depth: int
    kv: int
    vocab: int = 32_000


MODELS = {
    "LLaMA-60M": Decoder(512, 1376, 8, 512),
    "LLaMA-130M": Decoder(768, 3072, 12, 768),
    "LLaMA-350M": Decoder(1024, 2736, 24, 1024),
    "LLaMA-1B": Decoder(2048, 5461, 24, 2048),
    "LLaMA-7B": Decoder(4096, 11_008, 32, 4096),
    "LLaMA-13B": Decoder(5120, 13_824, 40, 5120),
    "LLaMA-70B": Decoder(8192, 28_672, 80, 1024),
}


@dataclass(frozen=True)
class Form:
    """One form of optimizer state: an optimizer and its options, or, without one, bytes by a formula."""

    name: str
    optimizer: str = "cosmos"
    options: dict[str, Any] = field(default_factory=dict)
    formula: Callable[[Tensor], int] | None = None


def eight_bit_adam(p: Tensor) -> int:
    """Return the bytes of 8-bit AdamW for a tensor: two bytes an element and two scales a block."""
    size = p.numel()
    return 8 * size if size < SMALL else 2 * size + 2 * 4 * math.ceil(size / BLOCK)


FORMS = (
    Form("AdamW", "adam"),
    Form("8-bit AdamW (formula)", formula=eight_bit_adam),
    Form("Muon", "muon"),
    Form("COSMOS"),
    Form("COSMOS, momentum in bf16", options={"momentum_dtype": torch.bfloat16}),
    Form("COSMOS, momentum in int8", options={"momentum_dtype": torch.int8}),
)


class Block(nn.Module):
    """The parameters of one layer."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        d, f, kv = shape.width, shape.mlp, shape.kv
        sizes = {"q_proj": (d, d), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (d, d)}
        sizes |= {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
        for name, (n, m) in sizes.items():
            self.add_module(name, nn.Linear(n, m, bias=False))
        self.norm_1, self.norm_2 = nn.RMSNorm(d), nn.RMSNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        """Return x: only the parameters are counted."""
        return x


class Llama(nn.Module):
    """The parameters of a LLaMA."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x: only the parameters are counted."""
        return x


def model_of(shape: Decoder) -> Llama:
    """Return the model on the meta device, which allocates nothing."""
    with torch.device("meta"):
        return Llama(shape)


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Act as the first of this many ranks, without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def state_bytes(shape: Decoder, form: Form, gpus: int = 1) -> int:
    """Return the bytes of state on the first GPU, which has the largest part, with FSDP2 over `gpus` of them."""
    model = model_of(shape)
    if form.formula is not None:
        return math.ceil(sum(map(form.formula, model.parameters())) / gpus)
    if gpus == 1:
        return plan(model, form.optimizer, **form.options).state_bytes
    with fake_ranks(gpus):
        mesh = init_device_mesh("cpu", (gpus,))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        opt = OPTIMIZERS[form.optimizer](model, **form.options)
        held = [(opt._layouts[p], p, group) for group in opt.param_groups for p in group["params"]]
        step = 4  # bytes of the step count of each parameter
        return sum(
            step + sum(layout.local(x).nbytes for x in layout.allocate(p, group).values()) for layout, p, group in held
        )


def human(size: float) -> str:
    """Format a number of bytes in GiB with three digits."""
    value = size / GIB
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def table(gpus: int) -> str:
    """Return the table for this number of GPUs: GiB of state on each."""
    count = {name: sum(p.numel() for p in model_of(shape).parameters()) for name, shape in MODELS.items()}
    lines = [
        "| GiB per GPU | " + " | ".join(name.removeprefix("LLaMA-") for name in MODELS) + " |",
        "|---|" + "---:|" * len(MODELS),
        "| weights and gradients in fp32 | " + " | ".join(human(8 * n / gpus) for n in count.values()) + " |",
    ]
    for form in FORMS:
        cells = (human(state_bytes(shape, form, gpus)) for shape in MODELS.values())
        lines.append(f"| {form.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables() -> str:
    """Return all tables as markdown, each under its heading."""
    names = {gpus: "One GPU" if gpus == 1 else f"{gpus} GPUs with FSDP2" for gpus in GPUS}
    return "\n".join(f"### {name}\n\n{table(gpus)}\n" for gpus, name in names.items())


def main() -> None:
    """Print the tables, or write them between the two markers of a page."""
    parser = argparse.ArgumentParser(description="GiB of optimizer state by model, form and number of GPUs.")
    parser.add_argument("--write", type=Path, help="the page to write the tables to, docs/memory.md")
    page = parser.parse_args().write
    if page is None:
        print(tables())
        return
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
