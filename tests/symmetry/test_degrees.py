# SPDX-License-Identifier: Apache-2.0
"""Neurons whose square is read (squared ReLU): their positive factors come out squared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from onebasin.symmetry.gauge.canonical import canonical
from onebasin.symmetry.inference.atoms import new
from onebasin.symmetry.inference.rules import RULES, SILENT
from onebasin.symmetry.inference.trace import KEY, Label, Trace
from onebasin.symmetry.tables.resolve import resolve
from onebasin.symmetry.tables.signature import MOVES
from onebasin.symmetry.tables.table import read_table

SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "pow": lambda x: torch.relu(x).pow(2),
    "square": lambda x: torch.square(torch.relu(x)),
    "product": lambda x: (y := torch.relu(x)) * y,
}


def powers(squared: Callable[[Tensor], Tensor], gated: bool = False) -> list[tuple[frozenset[str], int, int]]:
    """Of each factor: what may act, and how often it occurs in what writes the neurons, and in what reads them."""
    up, gate, down = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 4, bias=False)
    trace = Trace(rules=RULES, silent=SILENT)
    for name, layer in {"up": up, "gate": gate, "down": down}.items():
        setattr(layer.weight, KEY, Label([new(n) for n in layer.weight.shape], name=name))
    with torch.no_grad(), trace:
        made = squared(nn.functional.linear(torch.randn(3, 4), up.weight))
        down(made * nn.functional.linear(torch.randn(3, 4), gate.weight) if gated else made)
    written, read = (list(axis.leaves) for axis in (trace.axes(up.weight)[0], trace.axes(down.weight)[1]) if axis)
    counts = [[leaf.top.atom for leaf in leaves] for leaves in (written, read)]
    return [(leaf.moves, counts[0].count(leaf.top.atom), counts[1].count(leaf.top.atom))
            for leaf in written if leaf.size == 1]  # fmt: skip


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("how", SQUARES)
def test_a_positive_factor_of_a_square_comes_out_twice(how: str, gated: bool) -> None:
    assert powers(SQUARES[how], gated) == [(frozenset({"scale"}), 1, 2)]


def test_a_square_without_relu_takes_any_factor_and_gelu_none() -> None:
    assert powers(torch.square) == [(MOVES["factor"], 1, 2)]
    assert powers(lambda x: nn.functional.gelu(x).square()) == []


def test_a_gate_of_relu_takes_a_positive_factor_once() -> None:
    assert powers(torch.relu, gated=True) == [(frozenset({"scale"}), 1, 1)]


TABLE = """
family powers
layers n
size expert = experts
spaces
    stream  linear       stream
    expert  permutation  ffn     per layer
    ffn     permutation  ffn     per layer, expert
layer layer.{}
    up.weight    (expert ffn) stream'          ; degree DEGREE down.weight
    up.bias      (expert ffn)
    down.weight  stream (expert ffn')
"""
SHAPES = {"layer.0.up.weight": (10, 4), "layer.0.up.bias": (10,), "layer.0.down.weight": (4, 10)}


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_form_takes_the_factors_away(degree: int) -> None:
    signature = resolve(read_table(TABLE.replace("DEGREE", str(degree))), SHAPES, {"n": 1, "experts": 2})
    up, bias, down = SHAPES
    tensors = {role: torch.randn(shape, dtype=torch.float64) for role, shape in SHAPES.items()}
    tensors[up][3], tensors[down][:, 7] = 0, 0  # neurons that any factor leaves as they are, on one side
    factors = torch.randn(10, dtype=torch.float64).exp()
    grown = {up: factors[:, None] * tensors[up], bias: factors * tensors[bias], down: tensors[down] / factors**degree}
    x = torch.randn(20, 4, dtype=torch.float64)

    def outputs(given: dict[str, Tensor]) -> Tensor:
        return torch.relu(x @ given[up].mT + given[bias]) ** degree @ given[down].mT

    forms = [dict(canonical(signature, each).tensors) for each in (tensors, grown)]
    assert torch.allclose(outputs(forms[0]), outputs(tensors), rtol=0, atol=1e-12)
    alive = torch.tensor([i not in (3, 7) for i in range(10)])
    for role, dim in ((up, 0), (bias, 0), (down, 1)):
        one, other = (form[role].movedim(dim, 0)[alive] for form in forms)
        assert torch.allclose(one, other, rtol=1e-12)
    lengths = forms[0][up].norm(dim=1), degree**0.5 * forms[0][down].norm(dim=0)
    assert torch.allclose(lengths[0][alive], lengths[1][alive])


def test_what_writes_may_be_the_weight_of_a_norm() -> None:
    text = TABLE.replace("(expert ffn) stream' ", "(expert ffn)").replace("DEGREE", "1")
    signature = resolve(read_table(text), SHAPES | {"layer.0.up.weight": (10,)}, {"n": 1, "experts": 2})
    up, bias, down = SHAPES
    tensors = {up: torch.rand(10).double() + 1, bias: torch.randn(10).double(), down: torch.randn(4, 10).double()}
    factors = torch.randn(10, dtype=torch.float64).exp()
    grown = {up: factors * tensors[up], bias: factors * tensors[bias], down: tensors[down] / factors}
    one, other = (dict(canonical(signature, each).tensors) for each in (tensors, grown))
    x = torch.randn(20, 10, dtype=torch.float64)
    before, after = (torch.relu(x * given[up] + given[bias]) @ given[down].mT for given in (tensors, one))
    assert torch.allclose(after, before, rtol=0, atol=1e-12)
    assert all(torch.allclose(one[role], other[role], rtol=1e-12) for role in SHAPES)
