"""The update rules by name. Each is one pure function over an Algebra."""

from cosmos_optim.rules import adam, cosmos
from cosmos_optim.rules.base import Rule, Slot

RULES: dict[str, Rule] = {rule.name: rule for rule in (cosmos.RULE, cosmos.TWO_SIDED, adam.RULE)}

__all__ = ["RULES", "Rule", "Slot"]
