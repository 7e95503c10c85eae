"""Count the memory of optimizer state for models from 60M to 70B, without allocating it.

`python -m benchmarks.memory` prints the tables of docs/memory.md, and `--write docs/memory.md` replaces them there.
`plan` counts the state of a model on the meta device. State per GPU comes from the layouts that the optimizer
makes for FSDP2, in a process group that does not communicate. A form of state is one line of `FORMS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cosmos_lab.models import PRESETS
from cosmos_optim import OPTIMIZERS, param_groups, plan

GIB = 2**30
GPUS = (1, 8, 64)
WHOLE_TITLE = "Weights, gradients and state on one GPU"
BEGIN, END = "<!-- tables: python -m benchmarks.memory --write docs/memory.md -->", "<!-- end of tables -->"


@dataclass(frozen=True)
class Decoder:
    """The shapes of a LLaMA; `kv` is the width of keys and values."""

    width: int
    mlp: int
    depth: int
    kv: int
    vocab: int = 32_000


def _preset(name: str) -> Decoder:
    """Return the shapes of a preset of the lab, in which keys and values are as wide as the model."""
    c = PRESETS[name.lower()]
    return Decoder(c.width, c.mlp, c.depth, c.width, c.vocab_size)


MODELS = {
    **{name: _preset(name) for name in ("LLaMA-60M", "LLaMA-130M", "LLaMA-350M", "LLaMA-1B")},
    "LLaMA-7B": Decoder(4096, 11_008, 32, 4096),
    "LLaMA-13B": Decoder(5120, 13_824, 40, 5120),
    "LLaMA-70B": Decoder(8192, 28_672, 80, 1024),
}


@dataclass(frozen=True)
class Form:
    """One form of optimizer state: an optimizer, its options, and the type of the weights."""

    name: str
    optimizer: str = "cosmos"
    options: dict[str, Any] = field(default_factory=dict)
    weights: torch.dtype = torch.float32


ADAM_INT8 = {"adam_dtype": torch.int8}
BOTH_INT8 = {"momentum_dtype": torch.int8, **ADAM_INT8}
CORRECTED = {"weight_correction": True}
FORMS = (
    Form("AdamW", "adam"),
    Form("AdamW, moments in int8", "adam", ADAM_INT8),
    Form("Muon", "muon"),
    Form("COSMOS"),
    Form("COSMOS, momentum in bf16", options={"momentum_dtype": torch.bfloat16}),
    Form("COSMOS, momentum in int8", options={"momentum_dtype": torch.int8}),
    Form("COSMOS, momentum and AdamW's moments in int8", options=BOTH_INT8),
)
# Counted with weights and gradients. bfloat16 weights and gradients with a float32 copy take as much as float32 ones.
WHOLE = (
    Form("AdamW, fp32 weights", "adam"),
    Form("AdamW in int8, fp32 weights", "adam", ADAM_INT8),
    Form("AdamW in int8, 24-bit weights", "adam", ADAM_INT8 | CORRECTED, torch.bfloat16),
    Form("Muon, fp32 weights", "muon"),
    Form("COSMOS, fp32 weights"),
    Form("COSMOS, 24-bit weights", options=CORRECTED, weights=torch.bfloat16),
    Form("COSMOS, both in int8, fp32 weights", options=BOTH_INT8),
    Form("COSMOS, both in int8, 24-bit weights", options=BOTH_INT8 | CORRECTED, weights=torch.bfloat16),
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


def model_of(shape: Decoder, weights: torch.dtype = torch.float32) -> Llama:
    """Return the model on the meta device, which allocates nothing."""
    with torch.device("meta"):
        return Llama(shape).to(weights)


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
    model = model_of(shape, form.weights)
    if gpus == 1:
        return plan(model, form.optimizer, **form.options).state_bytes
    with fake_ranks(gpus):
        mesh = init_device_mesh("cpu", (gpus,))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # Ranks may cut a norm of more than 4,096 elements inside a block of 128, so norms keep moments in float32.
        groups = param_groups(model, form.optimizer, overrides={"*norm*": {"adam_dtype": torch.float32}})
        opt = OPTIMIZERS[form.optimizer](groups, **form.options)
        held = [(opt._layouts[p], p, group) for group in opt.param_groups for p in group["params"]]
        step = 4  # bytes of the step count of each parameter
        return sum(
            step + sum(layout.local(x).nbytes for x in layout.allocate(p, group).values()) for layout, p, group in held
        )


def whole_bytes(shape: Decoder, form: Form) -> int:
    """Return the bytes of weights, gradients and state on one GPU."""
    weights = sum(p.nbytes for p in model_of(shape, form.weights).parameters())
    return 2 * weights + state_bytes(shape, form)


def human(size: float) -> str:
    """Format a number of bytes in GiB with three digits."""
    value = size / GIB
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def table(gpus: int) -> str:
    """Return the table for this number of GPUs: GiB of state on each."""
    count = [sum(p.numel() for p in model_of(shape).parameters()) for shape in MODELS.values()]
    rows = {"weights and gradients in fp32": [8 * n / gpus for n in count]}
    rows |= {form.name: [state_bytes(shape, form, gpus) for shape in MODELS.values()] for form in FORMS}
    return markdown("GiB per GPU", rows)


def whole_table() -> str:
    """Return the table of weights, gradients and state together."""
    return markdown("GiB", {form.name: [whole_bytes(shape, form) for shape in MODELS.values()] for form in WHOLE})


def markdown(corner: str, rows: Mapping[str, Sequence[float]]) -> str:
    """Return a table of bytes with a column for each model."""
    head = [corner, *(name.removeprefix("LLaMA-") for name in MODELS)]
    cells = [head, *([name, *map(human, sizes)] for name, sizes in rows.items())]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([lines[0], "|---|" + "---:|" * len(MODELS), *lines[1:]])


def tables() -> str:
    """Return all tables as markdown, each under its heading."""
    names = {gpus: "State on one GPU" if gpus == 1 else f"State on {gpus} GPUs with FSDP2" for gpus in GPUS}
    found = {WHOLE_TITLE: whole_table()} | {name: table(gpus) for gpus, name in names.items()}
    return "\n".join(f"### {name}\n\n{text}\n" for name, text in found.items())


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
