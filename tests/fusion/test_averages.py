# SPDX-License-Identifier: Apache-2.0
"""What each average preserves, on aligned tiny models."""

from __future__ import annotations

import pytest
import torch
from pairs import opened

from onebasin.data.calibration import Calibration, Data
from onebasin.engine import Means
from onebasin.fusion import AVERAGES, method_of
from onebasin.fusion.method import Sources

KINDS = ["GPT2LMHeadModel", "ViTForImageClassification", "BertForMaskedLM"]


def merged(models, weights, method):
    signature = models[0].signature
    means = Means(precision="float64", workers=1)
    how = method_of(method)()
    named = how.merge(Sources(models, weights), Data(models, Calibration(), means), means, None).tensors
    roles = {entry.name: role for role, entry in signature.tensors.items()}
    return {roles[name]: tensor for name, tensor in named}


def read(model):
    return {role: model.read(role, torch.float64) for role in model.signature.tensors}


@pytest.mark.parametrize("method", AVERAGES)
@pytest.mark.parametrize("case", KINDS)
def test_a_model_merged_with_itself_is_itself(tmp_path, case, method):
    first, _ = opened(tmp_path, case, apart=1.0)
    original = read(first)
    found = merged([first, first], [0.3, 0.7], method)
    assert found.keys() == original.keys()
    if method == "circuit":  # the same circuits, in the nearest of their factorisations
        for name, other in circuits(first.signature, found).items():
            assert torch.allclose(other, circuits(first.signature, original)[name], atol=1e-9)
        return
    for role, tensor in original.items():
        assert torch.allclose(found[role], tensor, atol=1e-10)


@pytest.mark.parametrize("case", KINDS)
def test_norms_are_averaged(tmp_path, case):
    models = opened(tmp_path, case, apart=1.0)
    a, b = map(read, models)
    found = merged(models, [0.25, 0.75], "norm-preserving")
    for role, entry in models[0].signature.tensors.items():
        if len(entry.axes) > 1:
            assert found[role].norm() == pytest.approx(float(0.25 * a[role].norm() + 0.75 * b[role].norm()))
        else:
            assert torch.allclose(found[role], 0.25 * a[role] + 0.75 * b[role])


def test_singular_values_are_averaged_block_by_block(tmp_path):
    models = opened(tmp_path, "GPT2LMHeadModel", apart=1.0)
    a, b = map(read, models)
    found = merged(models, [0.5, 0.5], "spectrum-preserving")
    for role in found:
        if not role.startswith("h.") or found[role].dim() < 2:
            continue
        pieces = 3 if "c_attn" in role else 1
        for x, y, z in zip(*(t[role].chunk(pieces, dim=1) for t in (a, b, found)), strict=True):
            wanted = (torch.linalg.svdvals(x) + torch.linalg.svdvals(y)) / 2
            assert torch.allclose(torch.linalg.svdvals(z), wanted)


def circuits(signature, tensors):
    """D^T P of every head, by hand from separate query, key, value and output matrices, or from GPT-2's fused one."""
    found = {}
    for layer in range(2):
        if signature.family == "gpt2":
            fused = tensors[f"h.{layer}.attn.c_attn.weight"].T
            bias = tensors[f"h.{layer}.attn.c_attn.bias"]
            q, k, v = (torch.cat([w, c[:, None]], 1) for w, c in zip(fused.chunk(3), bias.chunk(3), strict=True))
            o = tensors[f"h.{layer}.attn.c_proj.weight"].T
        else:
            attention = f"encoder.layer.{layer}.attention."
            inner = attention + ("self." if signature.family == "bert" else "attention.")
            names = [inner + "query.", inner + "key.", inner + "value."]
            q, k, v = (torch.cat([tensors[n + "weight"], tensors[n + "bias"][:, None]], 1) for n in names)
            o = tensors[attention + "output.dense.weight"]
        heads = signature.sizes[next(key for key in signature.spaces if key.endswith(f"{layer}.head"))]
        for head in range(heads):
            rows = slice(head * len(q) // heads, (head + 1) * len(q) // heads)
            found[layer, head, "qk"] = k[rows].T @ q[rows]
            found[layer, head, "vo"] = o[:, rows] @ v[rows]
    return found


@pytest.mark.parametrize("case", KINDS)
def test_the_circuit_average_is_the_best_circuit_of_the_heads_rank(tmp_path, case):
    models = opened(tmp_path, case, apart=1.0)
    signature = models[0].signature
    a, b = (circuits(signature, read(model)) for model in models)
    found = circuits(signature, merged(models, [0.4, 0.6], "circuit"))
    rank = signature.sizes[next(key for key in signature.spaces if key.endswith(".qk"))]
    for name in a:
        u, s, vh = torch.linalg.svd(0.4 * a[name] + 0.6 * b[name])
        best = (u[:, :rank] * s[:rank]) @ vh[:rank]
        assert torch.allclose(found[name], best, atol=1e-9)
