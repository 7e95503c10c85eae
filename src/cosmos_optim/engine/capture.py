"""Ask whether a CUDA graph is being captured: the host must not look at numbers of the device then."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream is being captured; False if the device is not a GPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
