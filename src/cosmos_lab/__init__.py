"""The pre-training lab: models, data, recipes and commands that repeat the paper's comparison."""

__version__ = "0.1.0"  # as in pyproject.toml and in cosmos_optim; a test compares them
