# SPDX-License-Identifier: Apache-2.0
"""The rotation paper's matching as a careful reader writes it down: Algorithm 1, Eq. 7, Eq. 12, line by line.

Float32 throughout, a loop over heads, SciPy's assignment, a permutation as the matrix that the paper
multiplies by. Shapes follow torch's Linear: weight (out, in), bias (out,). Nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from onebasin.symmetry import Signature

Read = Callable[[str], tuple[Tensor, Tensor]]  # role -> (anchor, source)


def rotation(m: Tensor) -> Tensor:
    """R = U V^T of M = U S V^T (Theorem 4.1)."""
    u, _, vt = torch.linalg.svd(m)
    r: Tensor = u @ vt
    return r


def attention(source: dict[str, Tensor], anchor: dict[str, Tensor], heads: int, rescale: bool) -> dict[str, Tensor]:
    """Algorithm 1; keys q, k, v, o with bq, bk, bv. rescale: Eq. 12 for both products afterwards."""
    matched = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    size = source["q"].shape[0] // heads
    for h in range(heads):
        rows = slice(h * size, (h + 1) * size)
        s = {name: tensor[:, rows] if name == "o" else tensor[rows] for name, tensor in source.items()}
        a = {name: tensor[:, rows] if name == "o" else tensor[rows] for name, tensor in anchor.items()}
        r = rotation(
            s["q"] @ a["q"].T + s["k"] @ a["k"].T + torch.outer(s["bq"], a["bq"]) + torch.outer(s["bk"], a["bk"])
        )
        q, k, bq, bk = r.T @ s["q"], r.T @ s["k"], s["bq"] @ r, s["bk"] @ r
        r = rotation(s["v"] @ a["v"].T + s["o"].T @ a["o"] + torch.outer(s["bv"], a["bv"]))
        v, o, bv = r.T @ s["v"], s["o"] @ r, s["bv"] @ r
        if rescale:
            x = scale((q, bq), (a["q"], a["bq"]), (k, bk), (a["k"], a["bk"]))
            q, bq, k, bk = x * q, x * bq, k / x, bk / x
            x = scale((v, bv), (a["v"], a["bv"]), (o,), (a["o"],))
            v, bv, o = x * v, x * bv, o / x
        for name, tensor in {"q": q, "k": k, "v": v, "bq": bq, "bk": bk, "bv": bv}.items():
            matched[name][rows] = tensor
        matched["o"][:, rows] = o
    return matched


def scale(
    write: tuple[Tensor, ...],
    write_to: tuple[Tensor, ...],
    read: tuple[Tensor, ...],
    read_to: tuple[Tensor, ...],
) -> float:
    """The real root of Eq. 12 at which Eq. 11 is least.

    "The roots of Equation (12) can be derived using numerical methods": a general solver. Which of them is meant the
    paper leaves to Eq. 11; the published code evaluates that, as it stands, at every real root.
    """
    p = sum(float((x * x).sum()) for x in write)
    d = sum(float((x * x).sum()) for x in read)
    pa = sum(float((x * y).sum()) for x, y in zip(write, write_to, strict=True))
    da = sum(float((x * y).sum()) for x, y in zip(read, read_to, strict=True))

    def objective(a: float) -> float:
        """Eq. 11."""
        writes = sum(float((a * x - y).square().sum()) for x, y in zip(write, write_to, strict=True))
        reads = sum(float((x / a - y).square().sum()) for x, y in zip(read, read_to, strict=True))
        return writes + reads

    roots = np.roots([p, -pa, 0.0, da, -d])
    return min((float(x.real) for x in roots if abs(x.imag) < 1e-6 * abs(x)), key=objective)


def ffn(source: dict[str, Tensor], anchor: dict[str, Tensor]) -> dict[str, Tensor]:
    """Eq. 7, and Eq. 4 with P_2 = I; keys i, bi, o."""
    score = source["i"] @ anchor["i"].T + torch.outer(source["bi"], anchor["bi"]) + source["o"].T @ anchor["o"]
    row, column = linear_sum_assignment(score.numpy(), maximize=True)
    p = torch.zeros_like(score)
    p[row, column] = 1
    return {"i": p.T @ source["i"], "bi": source["bi"] @ p, "o": source["o"] @ p}


def match(signature: Signature, read: Read, parts: tuple[str, ...], rescale: bool) -> Iterator[dict[str, Tensor]]:
    """The matched tensors by role, layer by layer."""
    for layer in signature.layers:
        names = roles(signature, layer)
        if "attention" in parts:
            heads = next(s.size for s in signature.spaces.values() if s.layer == layer and s.name == "head")
            mine = {key: names[key] for key in ("q", "k", "v", "o", "bq", "bk", "bv")}
            source, anchor = _load(read, mine)
            yield _named(attention(source, anchor, heads, rescale), mine)
        if "ffn" in parts:
            mine = {"i": names["up"], "bi": names["bup"], "o": names["down"]}
            source, anchor = _load(read, mine)
            yield _named(ffn(source, anchor), mine)


def roles(signature: Signature, layer: int) -> dict[str, str]:
    """The role of each of the paper's matrices: what writes and reads a layer's qk, vo and ffn spaces."""
    letters = {("qk", False): "q", ("qk", True): "k", ("vo", False): "v", ("vo", True): "o",
               ("ffn", False): "up", ("ffn", True): "down"}  # fmt: skip
    found = {}
    for role, entry in signature.tensors.items():
        for leaf in signature.leaves(entry):
            space = signature.spaces[leaf.space]
            letter = letters.get((space.name, leaf.dual))
            if letter and space.layer == layer:
                found[letter if len(entry.shape) > 1 else f"b{letter}"] = role
    return found


def _load(read: Read, names: dict[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    pairs = {key: read(role) for key, role in names.items()}
    return {key: source for key, (_, source) in pairs.items()}, {key: anchor for key, (anchor, _) in pairs.items()}


def _named(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {names[key]: tensor for key, tensor in tensors.items()}
