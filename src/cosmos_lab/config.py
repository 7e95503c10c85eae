"""What defines one training run: frozen dataclasses, one per topic, with flat flag names.

Every field is a flag of ``cosmos-lab train`` (``--seq-len``, ``--lr``, ...), so a field name occurs once over all
topics; :meth:`RunConfig.replace` takes those flat names too. Every run folder has its config as JSON.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

# What another value of a field makes of a run. A field without one of the first three makes another method.
# "The same run": a finished run with another value is reused. No number changes, except that `device` and `compile`
# change rounding, and precision "auto" follows the device: to compare machines, give the precision and another folder.
NOT_IDENTITY = {"makes": "the same run"}
COMPARABLE = {"makes": "a comparable run"}  # Rounding, speed or times of measurement change: results can be compared.
TASK = {"makes": "another task"}  # Something else is learnt or measured: losses must not be ranked together.
FIXED = {"resume": False}  # A resume is refused, as it is for another model, text or setting of the optimizer.


@dataclass(frozen=True)
class ModelOptions:
    """Which network. Sizes left at None are the preset's."""

    model: str = field(default="llama-130m", metadata=TASK)  # Preset name.
    width: int | None = field(default=None, metadata=TASK)  # Model width, a multiple of the head dimension.
    depth: int | None = field(default=None, metadata=TASK)  # Number of blocks.
    mlp: int | None = field(default=None, metadata=TASK)  # Hidden width of the MLP.
    vocab_size: int | None = field(default=None, metadata=TASK)
    """Rows of the embedding (None: the preset's; the data's if larger or embedded)."""
    checkpointing: bool = field(default=False, metadata=COMPARABLE)
    """Recompute activations in the backward pass: less memory, a third more compute."""


@dataclass(frozen=True)
class DataOptions:
    """Which tokens."""

    data: str = field(default="embedded", metadata=TASK)  # "embedded", or the folder or glob of .bin / .bin.xz shards.
    seq_len: int = field(default=1024, metadata=TASK | FIXED)  # Tokens in a sequence.
    cache_dir: str | None = field(default=None, metadata=NOT_IDENTITY)  # Where data is cached (None: the user's cache).


ONE_RULE = ("adam", "adam-mini")  # optimizers that update every parameter by one rule


@dataclass(frozen=True)
class OptimizerOptions:
    """Which optimizer, at which rates."""

    optimizer: str = field(default="cosmos", metadata=FIXED)  # Name in cosmos_optim.OPTIMIZERS.
    lr: float = 5e-4  # Peak learning rate (of the hidden matrices, if the optimizer treats them separately).
    adam_lr: float | None = None
    """Peak rate of embeddings, head and norms (None: the optimizer's default; `lr` for AdamW and Adam-mini)."""
    beta1: float = 0.9  # Decay of the first moment.
    beta2: float = 0.98  # Decay of the second moment.
    eps: float = 1e-8  # Added to the denominators.
    weight_decay: float = 0.0  # Decoupled weight decay.
    rank: int | None = field(default=None, metadata=FIXED)
    """Subspace rank of COSMOS and GaLore (None: the optimizer's default)."""
    gamma: float | None = None  # Weight of COSMOS's Muon part (None: lr / adam_lr; `cosmos` caps adam_lr at 2e-3).
    embedding_lr: float | None = None  # Separate rate for the embedding.
    head_lr: float | None = None  # Separate rate for the output head.
    vector_lr: float | None = None  # Separate rate for norms and biases.
    adam_beta1: float | None = None  # Separate first-moment decay for embedding and head.
    options: tuple[str, ...] = ()  # Further keyword arguments of the optimizer, as name=value.


@dataclass(frozen=True)
class TrainingOptions:
    """How long to train, with which batch, on which device."""

    steps: int = 1000  # Optimizer steps.
    batch: int = field(default=64, metadata=FIXED)  # Sequences in one step, over all devices and accumulation.
    micro_batch: int | None = field(default=None, metadata=COMPARABLE)
    """Sequences in one forward pass on a device (None: chosen to hold about 32k tokens)."""
    clip: float | None = None  # Clip the gradient's global norm at this value.
    seed: int = field(default=0, metadata=FIXED)  # Seed of the weights and of the data order.
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # Type of autocast, not of weights (auto: bf16 on a GPU).
    weights: Literal["fp32", "bf16"] = field(default="fp32", metadata=FIXED)
    """Type of weights and gradients; `weight_correction` is for bf16."""
    compile: Literal["auto", "on", "blocks", "off"] = field(default="auto", metadata=NOT_IDENTITY)
    """torch.compile the model (auto: on a GPU); blocks: compile one block for all, in a fraction of the time."""
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=NOT_IDENTITY)  # Where to train.
    sharding: Literal["auto", "ddp", "fsdp"] = field(default="auto", metadata=COMPARABLE)
    """How processes under torchrun share the work (auto: ddp)."""
    deterministic: bool = field(default=False, metadata=COMPARABLE)
    """Only kernels that give the same bits every time (slower on a GPU)."""


@dataclass(frozen=True)
class ScheduleOptions:
    """How the learning rate changes."""

    schedule: Literal["linear", "cosine", "wsd", "constant"] = "linear"  # After the warm-up; wsd holds, then decays.
    warmup: float = 0.1  # Share of the steps spent on linear warm-up.
    decay: float = 0.2  # Share of the steps spent on wsd's decay.
    final_lr: float = 0.0  # Share of the peak rate left at the end.


@dataclass(frozen=True)
class LoggingOptions:
    """What is written, where and how often (steps; 0 is never)."""

    out: str = field(default="runs", metadata=NOT_IDENTITY)  # Folder that holds the run folders.
    name: str | None = field(default=None, metadata=NOT_IDENTITY)  # Name of the run folder (None: from the settings).
    recipe: str = "custom"  # The recipe this run came from.
    log_every: int = field(default=10, metadata=NOT_IDENTITY)  # Steps between lines of the training log.
    val_every: int = field(default=100, metadata=COMPARABLE)  # Steps between validations; the end always has one.
    val_tokens: int = field(default=1_048_576, metadata=TASK)  # Validation tokens, the same ones every time.
    diagnostics_every: int = field(default=100, metadata=NOT_IDENTITY)  # Steps between COSMOS diagnostics.
    checkpoint_every: int = field(default=500, metadata=NOT_IDENTITY)
    """Steps between checkpoints; there is always one at the end, unless this is 0."""
    keep: int = field(default=2, metadata=NOT_IDENTITY)  # Checkpoints kept.
    tensorboard: bool = field(default=False, metadata=NOT_IDENTITY)  # Also write TensorBoard logs.
    wandb: str | None = field(default=None, metadata=NOT_IDENTITY)  # Also log to this Weights & Biases project.
    resume: Literal["auto", "previous", "never"] = field(default="auto", metadata=NOT_IDENTITY)
    """auto: continue from the newest checkpoint; previous: from the newest undamaged one; never: only a new folder."""


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)

    def replace(self, **flat: Any) -> RunConfig:
        """Return a copy with the named fields changed, of any topic.

        >>> RunConfig().replace(lr=1e-3, steps=10).optimizer.lr
        0.001
        """
        topics: dict[str, dict[str, Any]] = {}
        for name, value in flat.items():
            topics.setdefault(_topic(name), {})[name] = value
        return dataclasses.replace(
            self, **{topic: dataclasses.replace(getattr(self, topic), **new) for topic, new in topics.items()}
        )

    def get(self, name: str) -> Any:
        """Return the value of a field by its flat name."""
        return getattr(getattr(self, _topic(name)), name)

    def flat(self) -> dict[str, Any]:
        """Return every field by its flat name; ``RunConfig.from_flat`` is the inverse."""
        return {name: self.get(name) for name in _TOPICS}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return the config that ``flat`` (or its JSON) describes."""
        return cls().replace(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def identity(self) -> dict[str, Any]:
        """Return the fields that decide a run's numbers, those without ``NOT_IDENTITY``, as JSON has them."""
        values = {name: self.get(name) for name in _FIELDS if name not in marked(NOT_IDENTITY)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def run_name(self) -> str:
        """Return the name of the run folder."""
        if self.logging.name:
            return self.logging.name
        o = self.optimizer
        return f"{self.logging.recipe}-{o.optimizer}-lr{o.lr:g}-s{self.training.seed}"

    @property
    def folder(self) -> Path:
        """Return the folder of the run's files."""
        return Path(self.logging.out) / self.run_name

    def check(self) -> RunConfig:
        """Raise a ValueError naming the field if a value makes no sense; return self."""
        if problem := next(_problems(self), None):
            raise ValueError(problem)
        return self


def marked(mark: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields with this mark: ``NOT_IDENTITY``, ``COMPARABLE``, ``TASK`` or ``FIXED``.

    >>> marked(FIXED)
    ('seq_len', 'optimizer', 'rank', 'batch', 'seed', 'weights')
    """
    return tuple(name for name, f in _FIELDS.items() if mark.items() <= f.metadata.items())


def _topic(name: str) -> str:
    if name not in _TOPICS:
        close = difflib.get_close_matches(name, _TOPICS, n=3)
        raise ValueError(f"a run has no field {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
    return _TOPICS[name]


def parse_options(options: tuple[str, ...], flag: str = "--options") -> dict[str, Any]:
    """Read ``("ns_steps=4", "side=smaller")`` as keyword arguments.

    >>> parse_options(("ns_steps=4", "side=smaller", "nesterov=True"))
    {'ns_steps': 4, 'side': 'smaller', 'nesterov': True}
    >>> parse_options(("momentum_dtype=torch.bfloat16", "nesterov=true", "row_beta2=none"))
    {'momentum_dtype': torch.bfloat16, 'nesterov': True, 'row_beta2': None}
    >>> parse_options(("adam_dtype=int8",))
    {'adam_dtype': torch.int8}
    """
    parsed: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{flag} takes name=value, for example ns_steps=4; got {option!r}")
        if text.startswith("torch.") or name.endswith("_dtype"):
            import torch  # here, because it takes seconds and few options need it

            dtype = getattr(torch, text.removeprefix("torch."), None)
            if isinstance(dtype, torch.dtype):
                parsed[name] = dtype
                continue
        try:
            parsed[name] = ast.literal_eval(text.title() if text in ("true", "false", "none") else text)
        except (ValueError, SyntaxError):
            parsed[name] = text
    return parsed


_POSITIVE = (
    "seq_len lr steps batch keep width depth mlp vocab_size adam_lr rank micro_batch clip "
    "embedding_lr head_lr vector_lr"
)
_NOT_NEGATIVE = "eps weight_decay log_every val_every val_tokens diagnostics_every checkpoint_every"
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (_POSITIVE, lambda value: 0 < value < math.inf, "must be positive"),
    (_NOT_NEGATIVE, lambda value: value >= 0, "must be 0 or more"),
    ("beta1 beta2 adam_beta1", lambda value: 0 <= value < 1, "must be in [0, 1)"),
    ("seed", lambda value: abs(value) < 2**63, "must have at most 63 bits"),
    ("warmup decay final_lr", lambda value: 0 <= value <= 1, "is a share and must be in [0, 1]"),
)


def _problems(c: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the config, one sentence each."""
    for names, allowed, rule in _RANGES:
        for name in names.split():
            value = c.get(name)
            is_optional = type(None) in get_args(_TYPES[name])
            if not (is_optional if value is None else allowed(value)):
                yield f"--{_flag(name)} {rule}; got {value}"
    if c.schedule.schedule == "wsd" and c.schedule.warmup + c.schedule.decay > 1:
        yield f"--warmup {c.schedule.warmup} and --decay {c.schedule.decay} take more than all the steps"
    for name, kind in _TYPES.items():
        choices = get_args(kind)
        if get_origin(kind) is Literal and c.get(name) not in choices:
            yield f"--{_flag(name)} must be one of {', '.join(choices)}; got {c.get(name)!r}"
    micro = c.training.micro_batch
    if micro and c.training.batch % micro:
        yield f"--batch {c.training.batch} is not a multiple of --micro-batch {micro}"
    parse_options(c.optimizer.options)


def _flag(name: str) -> str:
    return name.replace("_", "-")


_TOPICS = {f.name: t.name for t in fields(RunConfig) for f in fields(t.default_factory)}  # type: ignore[arg-type]
_TYPES = {name: kind for t in fields(RunConfig) for name, kind in get_type_hints(t.default_factory).items()}
_FIELDS = {f.name: f for t in fields(RunConfig) for f in fields(t.default_factory)}  # type: ignore[arg-type]
