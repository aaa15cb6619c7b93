# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom, and the examples do what they say."""

from __future__ import annotations

import sys
from dataclasses import replace
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


REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",
    "c1ccccc1Br.OB(O)c1ccncc1>>c1ccccc1-c1ccncc1",
    "C[C@H](N)C(=O)O.CO>>COC(=O)[C@@H](N)C",
]


@pytest.mark.parametrize("respell", [False, True])
def test_reactions_held_back_never_teach(respell: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 batches of two, three rounds: 19 teach in every round, and the same one is held out, as it is spelled."""
    pytest.importorskip("rdkit")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from agave_chem import rounds_of  # type: ignore[import-not-found]
    from rdkit.Chem import CanonSmiles

    reactions = ["C" * number + "O>>" + "C" * number + "=O" for number in range(1, 41)]
    rows = rounds_of(reactions, 3, respell, batch=2)
    meant = [">>".join(CanonSmiles(side) for side in row.split(">>")) for row in rows]
    held, taught = rows[3 * 38 :], meant[: 3 * 38]
    assert len(held) == 8 and set(held) <= set(reactions) and len(set(held)) == 2
    assert taught[:38] == taught[38:76] == taught[76:] and set(taught) == set(reactions) - set(held)
    assert (rows[:38] != rows[38:76]) == respell


def test_reactions_that_are_evaluated_calibrate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are spelled: molecules in another order, atoms in another order, with atom maps."""
    pytest.importorskip("rdkit")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from agave_chem import canonical, held_apart, respelled

    evaluated, other = REACTIONS[:2], REACTIONS[2]
    spellings = [respelled(reaction, seed) for reaction in REACTIONS for seed in range(5)]
    mapped = "[CH3:1][C:2](=[O:3])[OH:4].[OH:5][CH2:6][CH3:7]>>[CH3:1][C:2](=[O:3])[O:5][CH2:6][CH3:7]"
    kept = held_apart([mapped, *spellings], evaluated)
    assert len(kept) == 1 and canonical(kept[0]) == canonical(other)
    mirrored = other.replace("[C@H]", "[C@@H]")
    assert held_apart([other, mirrored, "CO>C>CO", "CO>>CO"], []) == [other, mirrored, "CO>C>CO", "CO>>CO"]
    assert held_apart(["C1CC>>O", "O>>C1CC", "C1CC>>O"], ["O>>C1CC"]) == ["C1CC>>O"], "what is no molecule stays"


def test_another_spelling_is_the_same_reaction(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rdkit")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from agave_chem import respelled
    from rdkit.Chem import CanonSmiles

    def molecules(reaction: str) -> list[list[str]]:
        return [sorted(CanonSmiles(molecule) for molecule in side.split(".")) for side in reaction.split(">>")]

    for reaction in REACTIONS:
        spellings = {respelled(reaction, seed) for seed in range(20)}
        assert len(spellings) > 10
        assert all(molecules(spelling) == molecules(reaction) for spelling in spellings)
    assert respelled("C1CC.O>>C1CC.O", 1).count("C1CC") == 2, "what is no molecule stays"


@pytest.mark.parametrize("bfloat16", [False, True])
def test_training_that_was_stopped_ends_with_the_same_weights(
    bfloat16: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import character_models  # type: ignore[import-not-found]

    class Stopped(Exception):
        pass

    def stop(*given: object, **named: object) -> None:
        raise Stopped

    ids = torch.randint(9, (500,), generator=torch.Generator().manual_seed(0))
    how = character_models.Training("gpt2", 16, 1, seed=0, steps=6, bfloat16=bfloat16)
    whole = character_models.train(ids, 9, how, tmp_path / "whole.pt", every=2)
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        save = torch.save
        patched.setattr(torch, "save", lambda *given: (save(*given), patched.setattr(torch, "randint", stop)))
        character_models.train(ids, 9, how, tmp_path / "stopped.pt", every=2)
    continued = character_models.train(ids, 9, how, tmp_path / "stopped.pt", every=2)
    for one, other in zip(whole.parameters(), continued.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(SystemExit, match="other settings"):
        character_models.train(ids, 9, replace(how, seed=1), tmp_path / "stopped.pt")


@pytest.mark.parametrize("steps", [3, 20])  # of which 5 % are none, or one
def test_training_takes_few_steps(steps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import character_models

    how = character_models.Training("gpt2", 16, 1, seed=0, steps=steps, bfloat16=False)
    model = character_models.train(torch.arange(9).repeat(50), 9, how, tmp_path / "kept.pt")
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_images_are_read_as_they_were_in_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What commands read from the table, through the processor, is what the model saw, but for shift and mirror."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import image_models  # type: ignore[import-not-found]
    import numpy as np

    from onebasin.data import load_task

    random = np.random.default_rng(0)
    pixels, labels = random.integers(256, size=(9, 8, 8, 3), dtype=np.uint8), np.arange(9, dtype=np.uint8)
    file = tmp_path / "images.npz"
    np.savez(file, x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    images = image_models.from_file(file)["train"]
    image_models.write_table(images, tmp_path / "train.parquet")
    monkeypatch.setattr(image_models, "WIDTH", 16)
    folder = tmp_path / "model-0"
    monkeypatch.setattr("sys.argv", ["image_models.py", str(file), "-o", str(tmp_path), "--seeds", "0", "--steps", "3"])
    image_models.main()
    (read,) = load_task("image-classification", tmp_path / "train.parquet", folder).batches
    assert torch.equal(read["labels"], images.labels)
    drawn, of = image_models.drawn(images, mirrored=True)
    for seen, label in zip(drawn, of, strict=True):
        whole = torch.nn.functional.pad(read["pixel_values"][label], [4] * 4, value=-1)
        places = [whole[:, i : i + 8, j : j + 8] for i in range(9) for j in range(9)]
        assert any(torch.allclose(seen, place) or torch.allclose(seen, place.flip(2)) for place in places)
