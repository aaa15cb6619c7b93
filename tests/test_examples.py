# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom, and the examples do what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["first_steps", "federated"])
def test_notebooks_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "notebooks are kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()


def test_federated_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients know only their own digits; a server that averages them knows some of both."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("federated", None)
    import federated  # type: ignore[import-not-found]

    client = federated.new_model(0)
    federated.train(client, range(5), 6, seed=0)
    pixels, labels = federated.digits("test")
    with torch.no_grad():
        predicted = client(pixel_values=pixels).logits.argmax(-1)
    assert (predicted < 5).float().mean() > 0.98
    assert (predicted == labels)[labels < 5].float().mean() > 0.5
    found = list(federated.rounds_of("paper", rounds=1, epochs=1))
    assert len(found) == 1 and 0 <= found[0] <= 1


def test_reactions_are_split_into_atoms_bonds_and_arrows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from reaction_encoders import tokenizer  # type: ignore[import-not-found]

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Br", "[nH]", ">>", "B"]
    assert tokenizer(words)("CBr[nH]>>BC@")["input_ids"] == [2, 5, 6, 7, 8, 9, 5, 1, 3]
