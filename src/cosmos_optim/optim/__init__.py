"""The optimizer classes: thin shells that bind a rule to the one engine."""

from cosmos_optim.optim.cosmos import Cosmos, CosmosPaper
from cosmos_optim.optimizer import MatrixOptimizer
from cosmos_optim.optimizers import SOAP, Adam, AdamMini, GaLore, Muon, NorMuon

OPTIMIZERS: dict[str, type[MatrixOptimizer]] = {
    "cosmos": Cosmos,
    "cosmos-paper": CosmosPaper,
    "muon": Muon,
    "normuon": NorMuon,
    "soap": SOAP,
    "galore": GaLore,
    "adam-mini": AdamMini,
    "adam": Adam,
}

__all__ = [
    "OPTIMIZERS",
    "SOAP",
    "Adam",
    "AdamMini",
    "Cosmos",
    "CosmosPaper",
    "GaLore",
    "MatrixOptimizer",
    "Muon",
    "NorMuon",
]
