"""Pre-train a base, and fine-tune it in full or by LoRA: sizes, adapters, and the training of one run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sweep_training import split
from cosmos_lab.config import RunConfig, ScheduleOptions
from cosmos_lab.data import Batches, TokenSource, open_data, validation_batches
from cosmos_lab.io import atomic_write, write_json
from cosmos_lab.models import Decoder, build
from cosmos_lab.optimizers import build_optimizer
from cosmos_lab.provenance import commit
from cosmos_lab.run.schedule import lr_factor
from cosmos_optim import plan

Result = dict[str, Any]
OPTIMIZER_NAMES = ("adamw", "muon", "cosmos")
METHODS = ("full", "lora")


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes and rates of the experiment. `pretrain_lr` is the rate of the hidden matrices, by optimizer."""

    model: str = "llama-60m"
    sizes: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"vocab_size": 32_100})
    seq_len: int = 1024
    batch: int = 16
    pretrain_steps: int = 3200
    pretrain_lr: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"adamw": 1e-3, "muon": 5e-4, "cosmos": 5e-4}
    )
    pretrain_outer_lr: float = 2e-3  # Of embedding, head and norms, the same for all optimizers.
    steps: int = 160  # 2.6M tokens, less than one pass over the 3.0M of Python's library
    rates: Mapping[str, Mapping[str, Sequence[float]]] = dataclasses.field(
        default_factory=lambda: {
            "full": {"adamw": (1e-4, 3e-4, 1e-3), "muon": (5e-5, 1.5e-4, 5e-4), "cosmos": (5e-5, 1.5e-4, 5e-4)},
            "lora": dict.fromkeys(OPTIMIZER_NAMES, (1e-3, 3e-3, 1e-2)),
        }
    )
    outer_lr: float = 2e-4  # In full fine-tuning; LoRA trains no embedding, head or norm.
    lora_rank: int = 16
    lora_scale: float = 2.0  # alpha / rank
    read_tokens: int = 262_144  # Most tokens read of each held-out text.


TOY = Scale(
    "tiny", {}, seq_len=128, batch=16, pretrain_steps=400, pretrain_outer_lr=4e-3, steps=60, lora_rank=8,
    pretrain_lr={"adamw": 2e-3, "muon": 1e-3, "cosmos": 1e-3}, read_tokens=16_384,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """One fine-tuning run."""

    base: str
    method: str
    optimizer: str
    lr: float
    seed: int = 0
    outer_times: float | None = None  # The outer rate as a multiple of lr; None: the scale's, the same for all lr.

    @property
    def id(self) -> str:
        """Return the name of the result file."""
        name = f"{self.base}-{self.method}-{self.optimizer}-lr{self.lr:g}-s{self.seed}"
        return name if self.outer_times is None else f"{name}-outer{self.outer_times:g}"


# -- LoRA for the lab's decoder ---------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """A frozen linear layer with weight W + scale B A. The decoder reads `weight`, it does not call its layers."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scale = layer.in_features, layer.out_features, scale
        self.base = nn.Parameter(layer.weight.detach(), requires_grad=False)
        self.bias = layer.bias
        device = layer.weight.device
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, device=device)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, device=device)
        nn.init.zeros_(self.lora_B.weight)

    @property
    def weight(self) -> Tensor:
        """Return the weight with its adapter."""
        return self.base + self.scale * (self.lora_B.weight @ self.lora_A.weight)


def add_lora(model: Decoder, rank: int, scale: float) -> Decoder:
    """Freeze the model and give every linear layer of its blocks an adapter."""
    model.requires_grad_(False)
    for part in list(model.blocks.modules()):
        for name, layer in list(part.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(part, name, LoraLinear(layer, rank, scale))
    return model


def make_optimizer(model: nn.Module, name: str, lr: float, outer_lr: float) -> Any:
    """Return an optimizer with rate `lr` for hidden matrices and adapters, and `outer_lr` for all else."""
    optimizer = "adam" if name == "adamw" else name
    # Not by `adam_lr`, so that COSMOS's gamma is that of its default.
    rates = dict.fromkeys(("embedding_lr", "head_lr", "vector_lr"), outer_lr)
    options = RunConfig().replace(optimizer=optimizer, lr=lr, **rates).optimizer
    return build_optimizer(model, options)


def group_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return the settings of each group, without its parameters; before training, `lr` is the peak rate."""
    drop = {"params", "param_names"}
    return [{key: value for key, value in group.items() if key not in drop} for group in optimizer.param_groups]


# -- training ---------------------------------------------------------------------------------------------------------


class Bench:
    """Texts, compiled models and bases. A model is compiled once for each method and gets new weights for each run."""

    def __init__(self, scale: Scale, base_data: str, data: str, out: Path, device: str, cache: str | None) -> None:
        self.scale, self.out, self.device, self.cache = scale, out, torch.device(device), cache
        (out / "runs").mkdir(parents=True, exist_ok=True)
        self.sources = {"base": open_data(base_data, "train", cache_dir=cache),
                        "tune": open_data(data, "train", cache_dir=cache)}  # fmt: skip
        held_out = open_data(data, "val", cache_dir=cache)
        val, test = split(held_out, len(held_out) // 2, cache)
        self.texts = {"val": val, "test": test, "base": open_data(base_data, "val", cache_dir=cache)}
        known = [s.vocab_size for s in (*self.sources.values(), *self.texts.values()) if s.vocabulary.known]
        self.sizes: dict[str, Any] = {"vocab_size": max(known, default=512)} | dict(scale.sizes)
        self.models: dict[str, Decoder] = {}

    def fresh(self, method: str, weights: Mapping[str, Tensor] | None, seed: int) -> Decoder:
        """Return a model with these weights, or with drawn ones."""
        torch.manual_seed(seed)
        model = build(self.scale.model, device=self.device, **self.sizes)
        if weights is not None:
            model.load_state_dict(weights)
        return add_lora(model, self.scale.lora_rank, self.scale.lora_scale) if method == "lora" else model

    def model(self, method: str, weights: Mapping[str, Tensor] | None, seed: int) -> Decoder:
        """Return the compiled model of a method with the weights of a fresh one."""
        new = self.fresh(method, weights, seed)
        if self.device.type == "cpu":
            return new
        if method in self.models:
            self.models[method].load_state_dict(new.state_dict())
            return self.models[method]
        new.compile_parts()
        self.models[method] = new
        return new

    def autocast(self) -> torch.autocast:
        """Return bf16 autocast, off on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def train(self, model: Decoder, optimizer: Any, source: TokenSource, steps: int, seed: int) -> list[float]:
        """Train with 10 % warm-up, linear decay and clipping at 1; return the mean loss of each tenth of the steps."""
        peaks = [group["lr"] for group in optimizer.param_groups]
        batches: Iterator[tuple[Tensor, Tensor]] = Batches(source, self.scale.batch, self.scale.seq_len, seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        losses = []
        for step, (x, y) in enumerate(islice(batches, steps), 1):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * lr_factor(step, steps, ScheduleOptions())
            with self.autocast():
                loss = model(x.to(self.device), y.to(self.device))
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        part = max(1, steps // 10)
        return [float(torch.stack(losses[i : i + part]).mean()) for i in range(0, steps, part)]

    @torch.no_grad()
    def losses(self, model: Decoder) -> dict[str, float | None]:
        """Return the loss on each held-out text, None if it is not finite; whole batches, so nothing recompiles."""
        found: dict[str, float | None] = {}
        whole = self.scale.batch * self.scale.seq_len
        for name, source in self.texts.items():
            tokens = max(1, min(self.scale.read_tokens, len(source) - 1) // whole) * whole
            values = []
            for x, y, _ in validation_batches(source, self.scale.batch, self.scale.seq_len, tokens):
                with self.autocast():
                    values.append(float(model(x.to(self.device), y.to(self.device))))
            mean = statistics.fmean(values)
            found[f"{name}_loss"] = round(mean, 5) if math.isfinite(mean) else None
        return found

    def base(self, name: str) -> dict[str, Tensor]:
        """Return the weights of a base model; pre-train it if its file is missing."""
        path, scale = self.out / f"base-{name}.pt", self.scale
        if not path.exists():
            began = time.monotonic()
            model = self.model("full", None, 0)
            optimizer = make_optimizer(model, name, scale.pretrain_lr[name], scale.pretrain_outer_lr)
            about = {"base": name, "lr": scale.pretrain_lr[name], "outer_lr": scale.pretrain_outer_lr,
                     "steps": scale.pretrain_steps, "groups": group_settings(optimizer)}  # fmt: skip
            curve = self.train(model, optimizer, self.sources["base"], scale.pretrain_steps, 0)
            self.keep(f"base-{name}", about, model, optimizer, curve, began)
            weights = {key: value.cpu() for key, value in model.state_dict().items()}
            with atomic_write(path) as file:
                torch.save(weights, file)
        loaded: dict[str, Tensor] = torch.load(path, map_location=self.device)
        return loaded

    def run(self, run: Run) -> Result:
        """Fine-tune once, write the result and return it."""
        began = time.monotonic()
        weights = self.base(run.base)
        model = self.model(run.method, weights, run.seed)
        outer = self.scale.outer_lr if run.outer_times is None else run.outer_times * run.lr
        optimizer = make_optimizer(model, run.optimizer, run.lr, outer)
        about = {**dataclasses.asdict(run), "outer_lr": outer, "steps": self.scale.steps, "weights": digest(weights),
                 "groups": group_settings(optimizer)}  # fmt: skip
        curve = self.train(model, optimizer, self.sources["tune"], self.scale.steps, run.seed)
        return self.keep(run.id, about, model, optimizer, curve, began)

    def keep(
        self, name: str, about: Result, model: Decoder, optimizer: Any, curve: list[float], began: float
    ) -> Result:
        """Write a result with its losses and all settings."""
        texts = {**self.sources, **{f"held_out_{key}": text for key, text in self.texts.items()}}
        result = {
            "id": name, **about, **self.losses(model), "train_curve": [x if math.isfinite(x) else None for x in curve],
            "trained_parameters": sum(p.numel() for g in optimizer.param_groups for p in g["params"]),
            "state_bytes": plan(optimizer).state_bytes, "clip": 1.0, "schedule": "linear",
            "warmup": 0.1, "scale": dataclasses.asdict(self.scale), "vocab_size": self.sizes["vocab_size"],
            "texts": {key: {"tokens": len(t), "fingerprint": t.fingerprint} for key, t in texts.items()},
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__, "commit": commit(), "wall_s": round(time.monotonic() - began, 2),
        }  # fmt: skip
        result = json.loads(json.dumps(result, default=str))
        write_json(self.out / "runs" / f"{name}.json", result)
        return dict(result)


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return a short hash of a model's weights."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]
