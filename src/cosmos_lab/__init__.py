"""The pre-training lab: models, data, recipes and commands that repeat the paper's comparison."""
