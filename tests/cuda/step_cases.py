"""The options that the schedules support, as small steps for the interpreter and large ones for a GPU."""

import torch

from tests.cuda.step_problems import Case

BF16 = torch.bfloat16
POLAR = "polar-express"
PAPER = {"nesterov": False, "row_beta2": None}

# Tiles have 16 rows and columns under the interpreter: these have one or two, and a part of one more.
SMALL = {
    "defaults, square": Case("cosmos", 32, 32, {"rank": 8}, batch=2),
    "defaults, tall": Case("cosmos", 45, 24, {"rank": 8}, batch=2),
    "defaults, wide": Case("cosmos", 24, 45, {"rank": 8}, batch=2),
    "paper's options": Case("cosmos", 29, 24, {"rank": 8, **PAPER}),
    "nesterov without rows": Case("cosmos", 21, 35, {"rank": 8, "row_beta2": None}),
    "rows without nesterov": Case("cosmos", 29, 24, {"rank": 8, "nesterov": False}),
    "eps inside": Case("cosmos", 29, 24, {"rank": 8, "eps": 0.1, "eps_placement": "inside"}),
    "eps outside": Case("cosmos", 24, 29, {"rank": 8, "eps": 0.1}),
    "eps 0, tiny gradients": Case("cosmos", 29, 24, {"rank": 8, "eps": 0.0}, gradient="tiny"),
    "huge gradients": Case("cosmos", 29, 24, {"rank": 8, **PAPER}, gradient="huge"),
    "other betas and gamma": Case("cosmos", 24, 24, {"rank": 8, "betas": (0.0, 0.5), "gamma": 0.5}),
    "no Muon half": Case("cosmos", 29, 24, {"rank": 8, "gamma": 0.0}),
    "polar-express": Case("cosmos", 29, 24, {"rank": 8, "ns_coefficients": POLAR}),
    "polar-express, 4 iterations": Case("cosmos", 40, 24, {"rank": 8, "ns_coefficients": POLAR, "ns_steps": 4}),
    "4 iterations": Case("cosmos", 29, 24, {"rank": 8, "ns_steps": 4}),
    "no guard": Case("cosmos", 29, 24, {"rank": 8, "residual_guard": 0.0}),
    "condition 1e6": Case("cosmos", 37, 29, {"rank": 8}, gradient="condition 1e6"),
    "columns": Case("cosmos", 29, 24, {"rank": 8}, memory="columns"),
    "odd addresses": Case("cosmos", 24, 29, {"rank": 8}, memory="odd"),
    "odd rank": Case("cosmos", 24, 29, {"rank": 5}),
    "rank 32": Case("cosmos", 56, 40, {"rank": 32}),
    "rank 64": Case("cosmos", 72, 68, {"rank": 64}),
    "bfloat16 gradients": Case("cosmos", 29, 24, {"rank": 8}, grads=BF16),
    "bfloat16 momentum": Case("cosmos", 32, 24, {"rank": 8}, momentum=BF16),
    "equal rows, tall": Case("cosmos", 45, 24, {"rank": 8, "equal_rows": True}, batch=2),
    "equal rows, wide": Case("cosmos", 24, 45, {"rank": 8, "equal_rows": True}, batch=2),
    "Muon, tall": Case("muon", 29, 24),
    "Muon, wide, original": Case("muon", 21, 35, {"nesterov": False, "scaling": "original"}),
    "Muon, match_rms_adamw": Case("muon", 29, 24, {"scaling": "match_rms_adamw", "ns_coefficients": POLAR}),
    "Muon, normalized": Case("muon", 24, 29, {"normalize": True, "ns_steps": 4}),
    "Muon, condition 1e6": Case("muon", 29, 24, gradient="condition 1e6"),
    "Muon, bfloat16 momentum": Case("muon", 32, 24, momentum=BF16, grads=BF16),
    "Muon, equal rows": Case("muon", 29, 24, {"equal_rows": True}),
    "NorMuon, wide, equal rows": Case("normuon", 21, 35, {"equal_rows": True}),
    "NorMuon": Case("normuon", 29, 24),
    "NorMuon, wide, no nesterov": Case("normuon", 21, 35, {"nesterov": False, "beta2": 0.5, "eps": 0.1}),
}
SLOW = {"rank 256": Case("cosmos", 272, 264, {"rank": 256})}

# More than one tile in every direction, rows that are not multiples of 16 bytes, and symmetric products in both of
# their tile shapes (up to 1,024 columns, and more).
LARGE = {
    "1104 x 1040": Case("cosmos", 1104, 1040),
    "1104 x 1040, rank 256": Case("cosmos", 1104, 1040, {"rank": 256}),
    "2048 x 512": Case("cosmos", 2048, 512),
    "2048 x 512, paper's options": Case("cosmos", 2048, 512, {"rank": 64, **PAPER}),
    "512 x 1371": Case("cosmos", 512, 1371),
    "512 x 1371, rank 64": Case("cosmos", 512, 1371, {"rank": 64, "nesterov": False}),
    "1371 x 512, columns": Case("cosmos", 1371, 512, memory="columns"),
    "517 x 261, odd addresses": Case("cosmos", 517, 261, memory="odd"),
    "640 x 640, rank 8": Case("cosmos", 640, 640, {"rank": 8}),
    "640 x 640": Case("cosmos", 640, 640),
    "640 x 640, rank 64": Case("cosmos", 640, 640, {"rank": 64, "row_beta2": None}),
    "640 x 640, rank 256": Case("cosmos", 640, 640, {"rank": 256, **PAPER}),
    "640 x 640, 4 iterations": Case("cosmos", 640, 640, {"ns_steps": 4}),
    "640 x 640, polar-express": Case("cosmos", 640, 640, {"ns_coefficients": POLAR}),
    "640 x 640, eps inside": Case("cosmos", 640, 640, {"eps": 0.1, "eps_placement": "inside"}),
    "640 x 640, bfloat16 gradients and momentum": Case("cosmos", 640, 640, grads=BF16, momentum=BF16),
    "512 x 1371, bfloat16 momentum": Case("cosmos", 512, 1371, momentum=BF16),
    "640 x 640, condition 1e6": Case("cosmos", 640, 640, gradient="condition 1e6"),
    "2048 x 512, condition 1e6": Case("cosmos", 2048, 512, gradient="condition 1e6"),
    "1104 x 1040, equal rows": Case("cosmos", 1104, 1040, {"equal_rows": True}),
    "512 x 1371, equal rows": Case("cosmos", 512, 1371, {"equal_rows": True}),
    "Muon, 512 x 1371, equal rows": Case("muon", 512, 1371, {"equal_rows": True}),
    "Muon, 1104 x 1040": Case("muon", 1104, 1040),
    "Muon, 512 x 1371": Case("muon", 512, 1371, {"nesterov": False, "normalize": True}),
    "NorMuon, 2048 x 512": Case("normuon", 2048, 512),
    "NorMuon, 640 x 640": Case("normuon", 640, 640, {"nesterov": False}),
}
