"""Learning-rate schedules as pure functions of the step, so that a resume has nothing to restore.

The paper: 10 % linear warm-up, then linear decay to 0. Modded-NanoGPT: warm-up, stable, decay.
"""

from __future__ import annotations

import math

from cosmos_lab.config import ScheduleOptions


def lr_factor(step: int, steps: int, options: ScheduleOptions) -> float:
    """Return the share of the peak rate used by optimizer step ``step`` (counted from 1) of ``steps``.

    With w warm-up steps the warm-up is step / w; afterwards the share falls from 1 towards ``final_lr`` at the end.

    >>> paper = ScheduleOptions()
    >>> [round(lr_factor(t, 100, paper), 2) for t in (1, 10, 55, 100)]
    [0.1, 1.0, 0.51, 0.01]
    """
    warm = round(options.warmup * steps)
    if step <= warm:
        return step / warm
    if options.schedule == "constant":
        return 1.0
    fall = round(options.decay * steps) if options.schedule == "wsd" else steps - warm
    # The last step keeps 1/fall of the range: a step at rate 0 would waste its batch.
    left = min(1.0, (steps - step + 1) / max(fall, 1))
    shape = 0.5 * (1 - math.cos(math.pi * left)) if options.schedule == "cosine" else left
    return options.final_lr + (1 - options.final_lr) * shape
