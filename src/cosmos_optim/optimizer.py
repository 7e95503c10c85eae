"""The one optimizer class and the only step().

A step collects gradients, checks that they are finite, and runs each group's rule over stacks of equal matrices, by
`engine.run` on a CPU and `cuda.gpu_run` on a GPU. Rules, layouts and kernels are independent; this file combines them.
Hyper-parameters are in `param_groups`, state is in `state`, and a checkpoint needs no other attribute. `group_checks`
notes what the groups had when they were added, and `sharding.Agreement` which of them wait for other ranks.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

import torch
from torch import Tensor, nn

from cosmos_optim import checkpoint, hyperparameters, saved_groups, sharding
from cosmos_optim.engine import parameter_state
from cosmos_optim.engine.batching import Entry
from cosmos_optim.engine.gradients import check_gradients
from cosmos_optim.engine.layout import CORRECTION, Layout, check_correction, refuse_four_dimensions
from cosmos_optim.engine.precision import exact_products
from cosmos_optim.engine.rounding import read_weight
from cosmos_optim.engine.run import Diagnostics, run
from cosmos_optim.engine.skipped_steps import MANY, SkippedSteps
from cosmos_optim.group_checks import GroupChecks
from cosmos_optim.routing.param_groups import as_groups
from cosmos_optim.rules import RULES
from cosmos_optim.rules.cosmos import SOAP_LR
from cosmos_optim.rules.rule import two_sided_name
from cosmos_optim.sharding import other_engines

if TYPE_CHECKING:
    from cosmos_optim.cuda.graph import GraphedStep


class MatrixOptimizer(torch.optim.Optimizer):
    """One rule for the hidden matrices, AdamW for the other parameters.

    Args:
        params: a model, tensors, (name, tensor) pairs, or group dicts as torch.optim takes them.
        lr: learning rate of the groups with the optimizer's rule; a group's "lr" overrides it.
        adam_lr: learning rate of the AdamW groups; None means `adam_ratio` times lr.
        cuda_graphs: record the step on a GPU as a CUDA graph (`cuda_graph`), which saves most of the host's time.
        offload: "cpu" keeps large state of parameters on a GPU in pinned host memory.
        options: hyper-parameters for every group with a rule that has them.
    """

    rule: ClassVar[str]  # default rule of a group
    adam_ratio: ClassVar[float] = 1.0  # adam_lr / lr, if adam_lr is not given
    soap_lr: ClassVar[float] = SOAP_LR  # upper bound of adam_lr in gamma = lr / adam_lr

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Reject unknown arguments with a suggestion, which Python's own error lacks."""
        hyperparameters.check_arguments(cls, kwargs)
        return super().__new__(cls)

    def __init__(
        self, params: nn.Module | Iterable[Any], lr: float | Tensor, *, adam_lr: float | Tensor | None = None,
        cuda_graphs: bool = True, offload: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        adam_lr = hyperparameters.adam_rate(lr, adam_lr, self.adam_ratio)
        self._options = {"adam_lr": adam_lr, "cuda_graphs": cuda_graphs, "offload": offload, **options}
        hyperparameters.check_options({"lr": lr, **self._options})
        self._options["first_rates"] = float(lr), float(adam_lr)  # schedulers write into rates that are tensors
        self._create_attributes()
        # OneCycleLR and CyclicLR look for "betas" in the defaults; they may cycle beta1 if every group has it.
        cycled = {"betas": options["betas"]} if "betas" in RULES[self.rule].defaults and "betas" in options else {}
        groups = as_groups(params, self.rule)
        self._check_rules(groups)
        super().__init__(groups, {"lr": lr, **cycled})
        other_engines.refuse_pieces(self._layouts)
        self._is_built = True
        self._join_ranks(range(len(self.param_groups)), ("lr", *hyperparameters.SETTING_NAMES))

    def _create_attributes(self) -> None:
        """Create the attributes that a pickle lacks, for `__init__` and `__setstate__`."""
        self._layouts: dict[Tensor, Layout] = {}
        self._group_checks = GroupChecks(type(self).__name__)
        self._agreement = sharding.Agreement(type(self).__name__)
        self._started: set[Tensor] = set()  # parameters that have had a non-zero gradient
        self._skipped = SkippedSteps(other_engines.should_warn)
        self._empty_steps = 0  # steps in a row without any gradient
        self._diagnostics: list[Diagnostics] = []
        self._graphed: GraphedStep | None = None
        self._is_built = False  # while the constructor adds its groups

    # -- groups -------------------------------------------------------------------------------------------------------

    def _check_rules(self, groups: list[Any]) -> None:
        """Reject groups made for another optimizer: they would silently train with its rule."""
        own, name = self.rule, type(self).__name__
        asked = {group.get("rule", own) if isinstance(group, dict) else own for group in groups}
        of_matrices = asked - {"adam"}
        are_known = of_matrices <= set(RULES)  # a misspelled rule gets an error that suggests the right name
        if of_matrices and are_known and of_matrices.isdisjoint((own, two_sided_name(own))):
            raise ValueError(
                f"{name} was given groups of rule {' and '.join(sorted(of_matrices))} and no matrix for its own rule: "
                f"make them with param_groups(model, {own!r}), or give {name} the model"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Without a "rule", its parameters follow their marks, as those of the constructor do."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got a {type(param_group).__name__}")
        count, waiting = len(self.param_groups), list(self._agreement.waiting)
        try:
            for group in as_groups([param_group], self.rule, stacklevel=3) if self._is_built else [param_group]:
                self._add_group(group)
            self._group_checks.add(self.param_groups[count:])
        except Exception:
            for group in self.param_groups[count:]:
                self._forget(group["params"])
            del self.param_groups[count:]
            self._agreement.waiting = waiting
            raise

    def _add_group(self, param_group: dict[str, Any]) -> None:
        """Fill in the hyper-parameters of a group's rule, check them, and allocate the state.

        If the optimizer's rule has a two-sided form, a group's `two_sided` chooses it.
        """
        options = {**self._options, "lr": self.defaults["lr"]}
        param_group = other_engines.without_filled_in(param_group, options)
        self._check_naming(param_group)
        rule, group = hyperparameters.choose_rule(self.rule, param_group, options)
        super().add_param_group(hyperparameters.complete(group, rule, options, self.soap_lr))
        group, index = self.param_groups[-1], len(self.param_groups) - 1
        if not rule.elementwise and "layout" not in param_group:
            for name, p in _named(group, index):
                refuse_four_dimensions(name, p, rule)
        self._forget(self._group_checks.changed(group))
        self._add_layouts(index)
        if self._is_built:
            self._join_ranks([index], ("lr", *hyperparameters.SETTING_NAMES))

    def _check_naming(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a new group has names and those before it have none, or the other way round."""
        named = "param_names" in group or any(isinstance(item, tuple) for item in group["params"])
        if all(("param_names" in other) == named for other in self.param_groups):
            return
        remedy = "or none" if named else "or add the groups of param_groups(model, beside=optimizer)"
        raise ValueError(
            f"the parameters of a new group have {'names' if named else 'no names'}, unlike those before it: give all "
            f"as (name, parameter) pairs, {remedy}"
        )

    def _join_ranks(self, indices: Iterable[int], settings: Collection[str]) -> None:
        """Compare new groups with those of the other ranks, and make the process groups that a step needs."""
        self._agreement.add({i: self.param_groups[i] for i in indices}, settings, self._layouts)
        self._agreement.compare(self._layouts, sharding.BUILD_S)
        sharding.prepare(list(self._layouts.values()))

    # -- state --------------------------------------------------------------------------------------------------------

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """Allocate state that is missing. Megatron-LM calls this before it saves or loads a checkpoint."""
        self._match_layouts()

    def _add_layouts(self, index: int) -> None:
        """Create layouts and state for parameters of the group that have none yet."""
        group = self.param_groups[index]
        for name, p in _named(group, index):
            if p in self._layouts:
                continue
            offloads = self._options.get("offload") is not None  # older pickles lack it
            self._layouts[p] = sharding.layout_of(name, p, RULES[group["rule"]], group, offloads=offloads)
            if "step" not in self.state.get(p, {}) and not p.is_meta:
                self._allocate(p, group)

    def _match_layouts(self) -> None:
        """Create layouts for parameters that other code put into the groups (accelerate, for FSDP2); drop old ones."""
        for index, group in enumerate(self.param_groups):
            other_engines.refuse_replaced(index, group, RULES[group["rule"]], self._layouts)
        held = {p for group in self.param_groups for p in group["params"]}
        self._forget([p for p in self._layouts if p not in held])
        known = len(self._layouts)
        for index in range(len(self.param_groups)):
            self._add_layouts(index)
        self._group_checks.note_structure(self.param_groups)
        if self._is_built and len(self._layouts) > known:  # schedulers may have changed lr since then
            self._join_ranks(range(len(self.param_groups)), hyperparameters.SETTING_NAMES)

    def _forget(self, params: Iterable[Tensor]) -> None:
        """Drop the layouts and state of parameters."""
        for p in params:
            self._layouts.pop(p, None)
            self.state.pop(p, None)
            self._started.discard(p)

    def _allocate(self, p: Tensor, group: dict[str, Any]) -> None:
        """Allocate the state of a parameter, beside what other code keeps there."""
        self.state[p] = parameter_state.allocated(self._layouts[p], p, group, self.state.get(p, {}))

    def _current_state(self, p: Tensor, layout: Layout, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter. Allocate it if it is missing, and move it if the parameter was moved."""
        state = self.state.get(p)
        if not state or "step" not in state:  # materialized since then, or reset by the user
            self._allocate(p, group)
            self._started.discard(p)
        elif state["step"].device != p.device or layout.dtype != p.dtype:
            self._move_state(p, group)
        else:
            return state
        return self.state[p]

    def _move_state(self, p: Tensor, group: dict[str, Any]) -> None:
        """Move the state of a parameter after model.to(...) to the new device and dtype."""
        self._finish_copies()
        self.state[p] = parameter_state.moved(self._layouts[p], p, group, self.state[p])

    def _finish_copies(self) -> None:
        """Wait until state that is in host memory has come back from the GPU, before the host reads it."""
        if self._options.get("offload") is not None:
            for device in {state["step"].device for state in self.state.values() if "step" in state}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

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
        """Check the gradients, and step every parameter that has one."""
        self._group_checks.before_step(self.param_groups)
        entries = self._collect()
        self._empty_steps = 0 if entries else self._empty_steps + 1
        if not entries:
            if self._layouts and (not self._started or self._empty_steps == MANY):
                other_engines.warn_without_gradients(self._skipped.number)
            return
        device, layouts = entries[0].p.device, [e.layout for e in entries]
        max_over_ranks = sharding.max_over_ranks(layouts) if any(x.is_sharded for x in layouts) else None
        with exact_products(device):
            check = check_gradients(entries, self._started, max_over_ranks)
            self._skipped.count(check, device)
            if check.skip_on_host:
                return
            fresh = [e for e, is_fresh in zip(entries, check.fresh, strict=True) if is_fresh]
            self._started.update(e.p for e in fresh)
            found: Diagnostics | None = {} if self._diagnostics else None
            try:
                if any(e.p.is_cuda for e in entries):
                    from cosmos_optim.cuda import gpu_run  # not needed on a CPU

                    gpu_run.run(entries, check, found, self.cuda_graph)
                else:
                    run(entries, check, found)
            except BaseException:  # out of memory, or Ctrl-C while kernels compile
                self._undo_start(fresh)
                raise
            self._skipped.report(check)  # last, when the GPU has work
        for record in self._diagnostics:
            for name, values in (found or {}).items():
                record.setdefault(name, {}).update(values)

    def _collect(self) -> list[Entry]:
        """Return every parameter with a gradient, with its layout and state."""
        if self._agreement.waiting:
            self._agreement.compare(self._layouts, sharding.STEP_S)
        entries = []
        for index, group in enumerate(self.param_groups):
            rule = RULES[group["rule"]]
            if len(group.get("param_names", group["params"])) != len(group["params"]):  # now, not at a save
                other_engines.refuse_replaced(index, group, rule, self._layouts)
            if isinstance(group["lr"], Tensor) and group["lr"].dim():
                group["lr"] = group["lr"].view(())  # as `complete` does; it may have been written or loaded since
            for p in group["params"]:
                layout = self._layouts.get(p)
                if layout is None:
                    self._match_layouts()
                    self._agreement.compare(self._layouts, sharding.STEP_S)
                    layout = self._layouts[p]
                grad = self._gradient(p, layout, group)
                if grad is not None:
                    state = self._current_state(p, layout, group)  # before layout.gradient, which needs the new dtype
                    entries.append(Entry(p, layout.gradient(grad), state, layout, group, rule))
        return entries

    @staticmethod
    def _gradient(p: Tensor, layout: Layout, group: Mapping[str, Any]) -> Tensor | None:
        """Return a parameter's gradient, or None if it has none. Raise a ValueError if it cannot be used."""
        if p.is_meta:
            raise ValueError(
                f"parameter {layout.name!r} is on the meta device: it has no values, or the model was materialized "
                "into other tensors: build the optimizer after model.to_empty(...) or load_state_dict(assign=True)"
            )
        is_reshaped = p.shape != layout.shape
        if is_reshaped:
            other_engines.refuse_flat(layout.name, p, is_piece=True)
        grad = p.grad
        if grad is None and group.get("missing") == "zero" and p.requires_grad:
            grad = torch.zeros_like(p)  # needs no communication if p is sharded
        if grad is None or p.numel() == 0:
            return None
        if grad.is_sparse:
            raise ValueError(f"parameter {layout.name!r} has a sparse gradient: use sparse=False in its module")
        if is_reshaped:
            raise ValueError(
                f"parameter {layout.name!r} had shape {layout.shape} when it was added and has {tuple(p.shape)} now: "
                "build the optimizer after the code that reshapes the model"
            )
        return grad

    def _undo_start(self, entries: Sequence[Entry]) -> None:
        """Reset the state of entries if their first step failed, because only a first step takes their first bases."""
        self._finish_copies()
        for e in entries:
            self._started.discard(e.p)
            for name in ("step", *e.layout.rule_slots(e.group)):
                e.layout.local(e.state[name]).zero_()

    # -- information for the user -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def diagnostics(self) -> Iterator[Diagnostics]:
        """Record the steps taken inside. Yield a dict: matrix name -> diagnostic name -> value. Contexts may overlap.

        update_rms: root mean square of the applied direction. For matrices with a tracked subspace also
        energy: the share of the gradient's squared norm in the subspace; drift: 1 - |U_new' U|^2 / r, how far the
        subspace turned; ratio: |A| / |gamma B sqrt(m)|, SOAP half over Muon half.

        If parameters are sharded, every rank must enter this context, because the numbers are sums over ranks. On a
        GPU, plain torch computes them before the step, which makes that step slower.
        """
        record: Diagnostics = {}
        self._diagnostics.append(record)
        try:
            yield record
        finally:
            self._diagnostics = [other for other in self._diagnostics if other is not record]

    @property
    def skipped_steps(self) -> int:
        """Steps of this object that were skipped because a gradient was NaN or inf. Waits for the GPU."""
        return self._skipped.total()

    @property
    def cuda_graph(self) -> GraphedStep:
        """The step recorded as a CUDA graph: `bytes` of memory it keeps, and whether it is `enabled`."""
        if self._graphed is None:
            from cosmos_optim.cuda.graph import GraphedStep

            self._graphed = GraphedStep(enabled=self._options["cuda_graphs"])
        return self._graphed

    def state_bytes(self, device: str | torch.device | None = None) -> int:
        """Return the bytes of optimizer state on this process; shared storage counts once.

        device: count only what is there, such as "cuda" for the state that `offload="cpu"` leaves on the GPU.
        """
        found = ((layout, x) for p, layout in self._layouts.items() for x in self.state.get(p, {}).values())
        parts = [layout.local(x) for layout, x in found if isinstance(x, Tensor)]
        if device is not None:
            place = torch.device(device)  # without an index it means all of its type
            parts = [x for x in parts if x.device.type == place.type and place.index in (None, x.device.index)]
        held = (x.untyped_storage() for x in parts)
        return sum({(storage.data_ptr(), storage.device): storage.nbytes() for storage in held}.values())

    @torch.no_grad()
    def float32_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's state_dict in float32, to export it: weights with their corrections, all 24 bits.

        Parameters without a correction, and buffers, are converted if they are bfloat16 or float16, and copied as they
        are if not. A sharded parameter gives a DTensor with its placements.

        A correction belongs to the bfloat16 weight that the last step wrote. If other weights were loaded since, it
        moves them by at most half a unit in their last place; load the optimizer's state with them, or build another
        optimizer, which begins without corrections.

        >>> from cosmos_optim import Cosmos
        >>> layer = nn.Linear(8, 16, bias=False).bfloat16()
        >>> {name: x.dtype for name, x in Cosmos(layer, weight_correction=True).float32_weights(layer).items()}
        {'weight': torch.float32}
        """
        self._match_layouts()
        corrected = {p for group in self.param_groups if group.get("weight_correction") for p in group["params"]}
        held = model.state_dict(keep_vars=True)
        if corrected and corrected.isdisjoint(x for x in held.values() if isinstance(x, Tensor)):
            raise ValueError(
                "this model has none of the parameters with corrections, so their lower 8 bits would be lost: give the "
                "model that the optimizer trains, not a copy of it"
            )
        found: dict[str, Any] = {}
        for name, x in held.items():
            if not isinstance(x, Tensor):  # a module's extra state
                found[name] = x
                continue
            is_narrow = x.dtype in (torch.bfloat16, torch.float16)
            found[name] = x.detach().to(torch.float32 if is_narrow else x.dtype, copy=True)
            if x in corrected and CORRECTION in self.state.get(x, {}):  # a user may have cleared the state
                local = self._layouts[x].local
                check_correction(name, x, {"weight_correction": True})  # the model may have been converted
                local(found[name]).copy_(read_weight(local(x), torch.float32, local(self.state[x][CORRECTION])))
        return found

    # -- checkpoints and copies ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict, with settings in plain types that every reader of checkpoints takes."""
        self._group_checks.check_structure(self.param_groups)
        self._match_layouts()
        self._finish_copies()
        saved = super().state_dict()
        if "param_groups" not in saved:  # a hook has put them elsewhere
            return saved
        return saved | {"param_groups": saved_groups.in_plain_types(saved["param_groups"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint. If its rank, rule or shapes differ, raise an error that says what to build instead."""
        self._finish_copies()
        with torch.inference_mode(False), torch.no_grad():  # steps write to the copies
            checkpoint.load(self, state_dict)
        self._group_checks.adopt_rates(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        self._group_checks.check_structure(self.param_groups)
        self._finish_copies()
        for group in self.param_groups:
            for p in group["params"]:
                if p in self._layouts and self._layouts[p].dtype != p.dtype and "step" in self.state.get(p, {}):
                    self._move_state(p, group)  # a copy has new layouts, and could not see that the dtype has changed
        kept = {name: self.__dict__[name] for name in ("defaults", "param_groups", "_options")}
        return kept | {"_first_rates": self._group_checks.kind_rates, "state": dict(self.state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._create_attributes()
        super().__setstate__(state)
        kind_rates = self.__dict__.pop("_first_rates", {})  # older pickles lack it
        self.state = defaultdict(dict, self.state)
        for group in self.param_groups:
            hyperparameters.fill_in_defaults(group)
        self._group_checks.restore(kind_rates, self.param_groups)
        self._match_layouts()
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    self.state[p] = parameter_state.placed(self._layouts[p], p, group, self.state[p])
        sharding.prepare(list(self._layouts.values()))
        self._is_built = True
        self._started = checkpoint.started(self)


def _named(group: Mapping[str, Any], index: int) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters of group `index` with their names, or with their places if they have none."""
    names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)
