"""The one optimizer class and the only step().

A step: collect gradients, look for a non-finite one, take first bases where they are missing, run each group's rule
over stacks of same-shape matrices, decay and write back. Rules, layouts and kernels are told nothing of each other;
they meet here. Hyper-parameters live in `param_groups`, state in `state`, and nothing a checkpoint needs on `self`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn

from cosmos_optim import checkpoint
from cosmos_optim import sharding as distributed
from cosmos_optim.cuda.graph import Replays
from cosmos_optim.engine import gradients
from cosmos_optim.engine import run as execute
from cosmos_optim.engine.entries import Entry
from cosmos_optim.engine.layout import Layout, refuse_deep
from cosmos_optim.engine.precision import exact_products
from cosmos_optim.hyperparameters import COMMON, ROUTING, check_keys, check_values, in_one_form, rule_named
from cosmos_optim.routing.param_groups import as_groups
from cosmos_optim.rules import RULES, Rule
from cosmos_optim.rules.cosmos import SOAP_LR
from cosmos_optim.rules.rule import require, require_number, two_sided
from cosmos_optim.suggest import close_to

TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class MatrixOptimizer(torch.optim.Optimizer):
    """One rule for the hidden matrices, Adam for the rest.

    rule: of groups that name none; a class attribute, where the arguments do not choose another.
    soap_lr: bounds the rate of the SOAP half where gamma is not given.
    params: a model, tensors, (name, tensor) pairs, or group dicts as torch.optim takes them.
    lr, adam_lr: the rate of that rule's groups, and of Adam's; a group's own "lr" wins.
    hyper: hyper-parameters for every group whose rule has them, and cuda_graphs: whether steps on a GPU are recorded
        and replayed (`replays` says what that holds).
    """

    rule: ClassVar[str]
    soap_lr: ClassVar[float] = SOAP_LR

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        *,
        lr: float | Tensor,
        adam_lr: float | Tensor,
        hyper: Mapping[str, Any],
    ) -> None:
        rule, hyper = self.rule, dict(hyper)
        for flag in ("cuda_graphs", "two_sided"):
            require_number(flag, hyper.get(flag) or False, flag=True)
        self.replays = Replays(hyper.pop("cuda_graphs", True))
        both = {"two_sided"} if two_sided(rule) in RULES else set()
        known = {*COMMON, *RULES[rule].hyper, *RULES["adam"].hyper, *both, "cuda_graphs", "lr", "adam_lr"}
        for key in hyper:
            if key in ROUTING:
                raise ValueError(f"{key!r} is an argument of param_groups: give param_groups(model, {key}=...)")
            if key not in known:
                meant = " (did you mean 'lr'?)" if key == "learning_rate" else close_to(key, known)
                raise ValueError(f"{type(self).__name__} has no argument {key!r}{meant}; it has {sorted(known)}")
        self._setup: dict[str, Any] = {
            "rule": rule, "adam_lr": adam_lr, "hyper": hyper, "cuda_graphs": self.replays.on,
        }  # fmt: skip
        self._layouts: dict[Tensor, Layout] = {}
        self._started: set[Tensor] = set()
        self._skips = gradients.Skips()
        self._recorder: dict[str, dict[str, float]] | None = None
        # OneCycleLR and CyclicLR look for "betas" in the defaults; they may cycle beta1 where every group has it.
        cycled = {"betas": hyper["betas"]} if "betas" in RULES[rule].hyper and "betas" in hyper else {}
        for name, rate in (("lr", lr), ("adam_lr", adam_lr)):
            require_number(name, rate)
        groups = as_groups(params, rule)
        self._check_rules(groups)
        super().__init__(groups, {"lr": lr, **cycled})

    # -- groups -------------------------------------------------------------------------------------------------------

    def _check_rules(self, groups: list[Any]) -> None:
        """Groups that were made for another optimizer would train with that one's rule, and nothing would show it."""
        own, name = self._setup["rule"], type(self).__name__
        asked = {group.get("rule", own) if isinstance(group, dict) else own for group in groups}
        others = asked - {"adam", own, two_sided(own)}
        if others and others <= set(RULES) and not asked & ({own, two_sided(own)} - {"adam"}):
            raise ValueError(
                f"{name} was given groups of rule {' and '.join(sorted(others))} and no matrix for its own: make them "
                f"with param_groups(model, {own!r}), or give {name} the model"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: fill in its rule's hyper-parameters, check them, and allocate the state.

        `two_sided` chooses between the two forms of the optimizer's own rule, where it has two.
        """
        both = self._setup["hyper"].get("two_sided", False)
        name, group = in_one_form(self._setup["rule"], param_group, both)
        rule = rule_named(name)
        group["rule"] = name
        if not rule.elementwise and "layout" not in group:
            refuse_deep(group["params"], rule)
        self._fill(group, rule)
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            self._lay_out(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            for p in group["params"]:
                self._layouts.pop(p, None)
                self.state.pop(p, None)
            raise

    def _fill(self, group: dict[str, Any], rule: Rule) -> None:
        """Defaults, then the optimizer's arguments, then the group's own; then the checks."""
        check_keys(group, rule)
        given = self._setup["hyper"]
        for key, default in {**COMMON, **rule.hyper}.items():
            group.setdefault(key, given.get(key, default))
            if isinstance(default, Real) and key != "row_beta2":  # which may be None
                require_number(key, group[key], flag=isinstance(default, bool))
        adam_lr = self._setup["adam_lr"]
        group.setdefault("lr", adam_lr if rule.name == "adam" else self.defaults["lr"])
        require_number("lr", group["lr"])
        if isinstance(group["lr"], Tensor) and group["lr"].dim() > 0:
            require(group["lr"].numel() == 1, "lr", group["lr"], "a tensor must have one element")
            group["lr"] = group["lr"].view(())  # the same memory, as a number
        check_values(group)
        rule.check(group)
        if "gamma" in rule.hyper and group["gamma"] is None:
            means = "gamma=None takes it from lr and adam_lr: give gamma, or"
            require(float(adam_lr) > 0, "adam_lr", adam_lr, f"{means} a positive adam_lr")
            require(float(group["lr"]) > 0, "lr", group["lr"], f"{means} the peak lr")
            faster = float(adam_lr) > 1.0001 * self.soap_lr  # 2e-3 is more than 2e-3 in a float32 tensor
            group["gamma"] = float(group["lr"]) / (self.soap_lr if faster else float(adam_lr))

    def _lay_out(self, index: int) -> None:
        """Layouts and state of the group's parameters that have none yet."""
        group = self.param_groups[index]
        names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            if p in self._layouts:
                continue
            if p.dtype not in TRAINED:
                narrow = f"has dtype {p.dtype}, in which nothing is trained: leave it out, or give a wider copy"
                hint = "is complex: split it into two real ones" if p.is_complex() else narrow
                raise ValueError(f"parameter {name!r} of shape {tuple(p.shape)} {hint}")
            if p.layout is not torch.strided:
                raise ValueError(f"parameter {name!r} of shape {tuple(p.shape)} is sparse: make it dense by to_dense()")
            self._layouts[p] = distributed.layout_of(name, p, RULES[group["rule"]], group)
            if p not in self.state and not p.is_meta:
                self._allocate(p, group)
        distributed.prepare(list(self._layouts.values()))

    def _meet(self) -> None:
        """Lay out parameters that other code put into the groups (accelerate does, for FSDP2); forget those it took."""
        held = {p for group in self.param_groups for p in group["params"]}
        for p in [p for p in self._layouts if p not in held]:
            del self._layouts[p]
            self.state.pop(p, None)
            self._started.discard(p)
        for index in range(len(self.param_groups)):
            self._lay_out(index)

    def _allocate(self, p: Tensor, group: dict[str, Any]) -> None:
        layout = self._layouts[p]
        self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **layout.allocate(p, group)}

    def _follow(self, p: Tensor, group: dict[str, Any]) -> None:
        """Bring the state of a parameter that was moved or cast (model.to(...)) to its device and dtype."""
        layout, state = self._layouts[p], self.state[p]
        layout.dtype = p.dtype
        wide = torch.promote_types(p.dtype, torch.float32)
        dtypes = {"step": torch.float32} | {name: slot.dtype or wide for name, slot in layout.slots(group).items()}
        self.state[p] = {name: value.to(p.device, dtypes[name]) for name, value in state.items()}

    # -- the step -----------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step. Gradients are read, never written."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @torch._disable_dynamo
    def _update(self) -> None:
        entries = self._collect()
        if not entries:
            return
        with exact_products(entries[0].p.device):
            found = gradients.inspect(entries, self._started, getattr(self, "found_inf", None))
            self._skips.note(found, entries[0].p.device)
            if found.skip_all:
                return
            self._started.update(e.p for e, fresh in zip(entries, found.fresh, strict=True) if fresh)
            execute.run(entries, found, self._recorder, self.replays)

    def _collect(self) -> list[Entry]:
        """Every parameter with a gradient, its layout and state."""
        entries = []
        layouts, state = self._layouts, self.state  # each look-up of a tensor hashes it
        for group in self.param_groups:
            rule = RULES[group["rule"]]
            for p in group["params"]:
                layout = layouts.get(p)
                if layout is None:
                    self._meet()
                    layout = layouts[p]
                if p.is_meta:
                    raise ValueError(
                        f"parameter {layout.name!r} is on the meta device, so the model was materialized into other "
                        "tensors: build the optimizer after model.to_empty(...) or load_state_dict(assign=True)"
                    )
                grad = p.grad
                if grad is None and group.get("missing") == "zero" and p.requires_grad:
                    grad = layout.no_gradient(p)
                if grad is None or p.numel() == 0:
                    continue
                if grad.is_sparse:
                    raise ValueError(f"parameter {layout.name!r} has a sparse gradient: use sparse=False in its module")
                if p.shape != layout.shape:
                    raise ValueError(
                        f"parameter {layout.name!r} had shape {layout.shape} when it was added and has "
                        f"{tuple(p.shape)} now: build the optimizer after whatever reshapes the model"
                    )
                mine = state.get(p)
                if not mine:  # materialized since, or reset by hand
                    self._allocate(p, group)
                    self._started.discard(p)
                    mine = state[p]
                elif mine["step"].device != p.device or layout.dtype != p.dtype:
                    self._follow(p, group)
                    mine = state[p]
                entries.append(Entry(p, layout.gradient(grad), mine, layout, group, rule))
        return entries

    # -- what a user asks it ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def diagnostics(self) -> Iterator[dict[str, dict[str, float]]]:
        """Record the steps taken inside: for each matrix with a tracked subspace, by name,

        energy: the share of the gradient's energy in the subspace; drift: 1 - |U_new' U|^2 / r, how far the subspace
        turned; update_rms: the RMS of the applied direction; ratio: |A| / |gamma B sqrt(m)|, SOAP half over MUON half.
        Where parameters are sharded every rank must enter it: the numbers are sums over ranks.
        """
        record: dict[str, dict[str, float]] = {}
        self._recorder = record
        try:
            yield record
        finally:
            self._recorder = None

    @property
    def skipped_steps(self) -> int:
        """Steps since this object was made that changed nothing, for a gradient was not finite. Waits for the GPU."""
        return self._skips.total()

    def state_bytes(self) -> int:
        """Bytes of optimizer state stored here, shared storage counted once."""
        storages = {}
        for p, state in self.state.items():
            for value in state.values():
                storage = self._layouts[p].local(value).untyped_storage()
                storages[storage.data_ptr(), storage.device] = storage.nbytes()
        return sum(storages.values())

    def state_dict(self) -> dict[str, Any]:
        """What torch's gives, with dtypes by their names: its gathering of sharded state takes none."""
        self._meet()
        saved = super().state_dict()
        return saved | {"param_groups": checkpoint.with_names(saved["param_groups"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, keeping its dtypes; a checkpoint of another rank, rule or shape is an error."""
        checkpoint.load(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in self.__dict__.items() if k in ("defaults", "state", "param_groups", "_setup")}
        return kept | {"state": dict(self.state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = checkpoint.as_default_dict(self.state)
        self._recorder, self._layouts, self._started, self._skips = None, {}, set(), gradients.Skips()
        self.replays = Replays(self._setup.get("cuda_graphs", True))
        self._meet()
        self._started = checkpoint.started(self)
