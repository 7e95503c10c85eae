"""Experiments and measurements.

Commands, `python -m benchmarks.NAME`, with the modules that were made for them:

    sweep           the runs of docs/protocol.md, as a queue; makes results/protocol-*.json
                        sweep_options, sweep_queue, sweep_worker, sweep_training, sweep_gpu, sweep_table
    evidence        from these runs to docs/results/evidence.md and its pictures
                        evidence_tables, evidence_pictures, evidence_costs
    rate_runs       which runs are needed for a rule of learning rates, and the commands for them
    rate_fit        the rule, and what it costs where it was not fitted (docs/rates.md)
    small_model     the same comparison on a CPU, for hints; makes results/small-model*.json
    demo_tuning     the rates of `cosmos-lab demo`; makes results/demo-tuning.json
    finetune        fine-tuning of a model that AdamW trained; makes results/finetune-*.json
                        finetune_training, finetune_table
    step            the time of an optimizer's step; makes benchmarks/results/
                        measure, optimizers, shapes, roofline
    plot            a picture of the kernels of a step
    newton_schulz   the time and the error of Newton-Schulz by shape
    memory          the tables of state in docs/memory.md, counted without a GPU
    sharded_cost    the projection in docs/distributed-internals.md, computed from shapes

What the comparison is, for `sweep`, `evidence`, `rate_runs` and `small_model`:

    comparison      optimizers, regimes and the settings of a run
    protocol        which run comes next
    variants        single changes to try
    trials          optimizers and rules that are no part of the package
    kept_runs       finished runs as files
    best_rows       what finished runs say: best settings, differences, shares of the tokens
    student         Student's t

`results/` has what training runs and profiles of the lab gave, `benchmarks/results/` the times of the step alone.
"""

import time

BEGAN = time.monotonic()  # The start of the command, before torch is imported.
