"""Fingerprints of weights: SHA-256 over names, shapes and a sample of every tensor, taken in bfloat16.

A folder's fingerprint is that of its files, so it does not depend on the type the model is then loaded in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

_SAMPLE = 1024
"""Elements of each tensor that are read."""


def of_folder(folder: Path) -> str:
    """Fingerprint of the safetensors of a model folder."""
    tensors: list[tuple[str, Tensor]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors.extend((name, _sample(file.get_tensor(name))) for name in file.keys())  # noqa: SIM118 - no mapping
    return _digest(tensors)


def of_module(module: nn.Module) -> str:
    """Fingerprint of a module in memory."""
    return _digest((name, _sample(tensor)) for name, tensor in module.state_dict().items())


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    sizes = torch.tensor(tensor.shape, dtype=torch.int64)
    values = flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE].to("cpu", torch.bfloat16).view(torch.int16)
    return torch.cat([sizes, values.long()])


def _digest(samples: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, sample in sorted(samples, key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
