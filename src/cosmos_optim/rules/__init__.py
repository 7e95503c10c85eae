"""The update rules by name. Each is one pure function over an `Algebra`."""

from cosmos_optim.rules import adam, adam_mini, cosmos, galore, muon, soap
from cosmos_optim.rules.rule import Rule, Slot

RULES: dict[str, Rule] = {rule.name: rule for rule in (
    cosmos.RULE, cosmos.TWO_SIDED, muon.MUON, muon.NORMUON, soap.RULE, soap.TWO_SIDED, galore.RULE, adam_mini.RULE,
    adam.RULE,
)}  # fmt: skip

__all__ = ["RULES", "Rule", "Slot"]
