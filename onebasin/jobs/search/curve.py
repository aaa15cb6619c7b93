# SPDX-License-Identifier: Apache-2.0
"""The curve over lambda between two aligned models."""

from __future__ import annotations

from functools import partial

import torch

from onebasin.data.calibration import recut
from onebasin.data.teaching import divergence, example_losses
from onebasin.jobs.aligning import Aligned
from onebasin.jobs.frame import Frame

from .setup import Setup

LAMBDAS = tuple(i / 10 for i in range(11))
EXAMPLES = 32  # at most so many, in one batch


def line(setup: Setup, aligned: Aligned, frame: Frame) -> list[float]:
    """Return, for each lambda, the divergence of (1 - lambda) A + lambda B from the mixture of the two models'
    predictions with the same weights, on a few held-out examples."""
    (first, second), forward = aligned.models, setup.forward(frame)
    rows = recut(setup.split[1], 1)
    batches, found = recut(rows[:: -(-len(rows) // EXAMPLES)], EXAMPLES), list[float]()
    for lam in LAMBDAS:
        tensors = {}
        for role in aligned.models[setup.template].signature.tensors:
            x = aligned.models[setup.template].read(role, setup.opt.dtype, setup.opt.device)
            if all(role in one.signature.tensors and one.signature.tensors[role].shape == tuple(x.shape)
                   for one in (first, second)):  # fmt: skip
                a, b = (one.read(role, setup.opt.dtype, setup.opt.device) for one in (first, second))
                x = torch.lerp(a, b, lam)
            tensors[role] = x
        model, parts = partial(forward, tensors), [1 - lam, lam]
        found.append(float(example_losses(divergence, model, setup.answers, parts, batches).mean()))
    return found
