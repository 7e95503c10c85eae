"""COSMOS and its peers: optimizers for training large language models.

from cosmos_optim import Cosmos, param_groups, plan

opt = Cosmos(param_groups(model), lr=5e-4, adam_lr=2e-3)
print(plan(model))
"""

from cosmos_optim.engine.skipped_steps import SkippedStepWarning
from cosmos_optim.learning_rates import Rates, rates, rates_from_adamw
from cosmos_optim.optimizers import OPTIMIZERS, SOAP, Adam, AdamMini, Cosmos, CosmosPaper, GaLore, Muon, NorMuon
from cosmos_optim.plan_table import Plan, plan
from cosmos_optim.routing.param_groups import mark, param_groups

__version__ = "0.1.0"  # as in pyproject.toml; a test compares them

__all__ = [
    "OPTIMIZERS",
    "SOAP",
    "Adam",
    "AdamMini",
    "Cosmos",
    "CosmosPaper",
    "GaLore",
    "Muon",
    "NorMuon",
    "Plan",
    "Rates",
    "SkippedStepWarning",
    "mark",
    "param_groups",
    "plan",
    "rates",
    "rates_from_adamw",
]
