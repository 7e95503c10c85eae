"""What other code does to the parameters and groups of an optimizer: FSDP, DeepSpeed, ZeroRedundancyOptimizer.

Flat vectors made of matrices are refused. Also here: which process of a job prints a warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Container, Mapping
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from cosmos_optim.engine.layout import Layout
from cosmos_optim.rules.rule import Rule

# What to do instead of cutting matrices into flat vectors.
REMEDY = (
    "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2) or tensor parallelism, or keep its parameters "
    "whole: DDP, FSDP1 with ShardingStrategy.NO_SHARD and use_orig_params=True, or DeepSpeed ZeRO stage 0"
)
ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"


def return_to_shards(model: nn.Module) -> None:
    """Let FSDP2 put shards back into the model where it left whole parameters, which it would not train.

    After a forward pass without a backward pass, such as an evaluation, the root module still has them.
    """
    # Importing it takes seconds; if nothing has imported it, no module is sharded.
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def refuse_flat(name: str, p: Tensor, *, is_piece: bool) -> None:
    """Raise ValueError for a flat vector made of matrices, or a piece of one.

    is_piece: the shape shows that the parameter is not whole. FSDP1 also marks parameters that it keeps whole.
    """
    marks = [("_is_flat_param", "FSDP1"), ("ds_id", "DeepSpeed ZeRO"), *[("_fsdp_flattened", "FSDP1")] * is_piece]
    for mark, engine in marks:
        if hasattr(p, mark):
            raise ValueError(
                f"parameter {name!r} of shape {tuple(p.shape)} is a flat partition made by {engine} (placement: 1-D), "
                f"so its rows and columns are lost. {REMEDY}"
            )


def refuse_pieces(layouts: Mapping[Tensor, Layout]) -> None:
    """Raise ValueError if FSDP1 has cut the parameters into 1-D pieces: no matrix is left among those that it marks."""
    marked = [(layout.name, p) for p, layout in layouts.items() if hasattr(p, "_fsdp_flattened")]
    if all(p.dim() < 2 for _, p in marked):
        for name, p in marked:
            refuse_flat(name, p, is_piece=True)


def refuse_replaced(index: int, group: dict[str, Any], rule: Rule, known: Container[Tensor]) -> None:
    """Raise ValueError if other code has replaced the parameters of a group by flat vectors, as DeepSpeed ZeRO does.

    It may also have removed some of those that are `known`, and not their names.
    """
    params, names = group["params"], group.get("param_names")
    if names is not None and len(names) > len(params) and all(p in known for p in params):
        raise ValueError(
            f"group {index} has {len(params)} parameters and {len(names)} names, because other code has removed "
            "parameters and not their names: remove these from the group's param_names too. A parameter that should "
            "not be trained may also stay, with requires_grad=False and no gradient"
        )
    flat = not rule.elementwise and any(p.dim() < 2 for p in params)
    if flat or (names is not None and len(names) != len(params)):
        named = f"{len(names)} named parameters ({names[0]!r}, ...)" if names else "matrices"
        raise ValueError(
            f"group {index} with rule {rule.name!r} was built with {named}, but other code has replaced them: it holds "
            f"{len(params)} now, of shapes {[tuple(p.shape) for p in params][:4]}. DeepSpeed ZeRO (stages 1 to 3) and "
            f"FSDP1 merge matrices into flat vectors, so rows and columns are lost. {REMEDY}. To add parameters to an "
            "optimizer, use add_param_group"
        )


def without_filled_in(group: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without the values that torch's ZeroRedundancyOptimizer has filled in.

    It gives its arguments to the optimizer and also to each group that does not have them. So `lr` would be the rate of
    AdamW groups too, and each group would have an `adam_lr`. Such a group looks like one that a user wrote, so only the
    call stack tells who adds it.

    options: the optimizer's arguments.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != ZERO_REDUNDANCY:
        frame = frame.f_back
    if frame is None:
        return group
    filled_in = options["lr"] is group.get("lr") and options["lr"] != options["adam_lr"]
    if frame.f_code.co_name == "add_param_group" and group.get("rule") == "adam" and filled_in:
        raise ValueError(  # it would set this rate again at each step
            f"ZeroRedundancyOptimizer gives the new group with rule 'adam' lr={options['lr']}, the rate of the "
            f"matrices: give the group its own lr, for example {options['adam_lr']}"
        )
    return {key: value for key, value in group.items() if key not in options or options[key] is not value}


def should_warn(text: str, knows_cause: bool = True) -> bool:
    """Return whether this process of a job should print a text: rank 0, and the first other one that knows the cause.

    Many launchers show rank 0 alone. No process waits for another: the store that connected them answers.
    """
    if not (dist.is_available() and dist.is_initialized()):  # not a job of several processes
        return True
    if dist.get_rank() > 0 and not knows_cause:
        return False
    place = "other ranks" if dist.get_rank() else "rank 0"
    try:
        return bool(dist.distributed_c10d._get_default_store().add(f"cosmos_optim/{text}/{place}", 1) == 1)
    except (RuntimeError, AttributeError):  # its process has ended, or the backend has none
        return True


def warn_without_gradients(number: int) -> None:
    """Warn that this optimizer gets no gradients: other code may have frozen or replaced its parameters."""
    if should_warn(f"no gradients of optimizer {number}"):
        warnings.warn(
            "no parameter of the optimizer has a gradient, so nothing is trained. If other code has frozen or replaced "
            "the model's parameters since (peft, load_state_dict(assign=True), a deepcopy of the model, FSDP1 with "
            "use_orig_params=False), build the optimizer after that. If it rests on purpose, do not call its step",
            stacklevel=2,
        )
