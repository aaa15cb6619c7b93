# SPDX-License-Identifier: Apache-2.0
"""What two models share, and what is said where they share nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from damage import edit_config, edit_weights

from onebasin.models import Folder, ModelError, distances, read_pair, shared_roles

POSITIONS = "embeddings.position_embeddings.weight"


def pair(a: Path, b: Path) -> tuple[Folder, Folder]:
    return Folder(a), Folder(b)


def test_a_model_shares_everything_with_itself_once(make) -> None:
    folder = make("BertForPreTraining")
    checkpoint = Folder(folder)
    shared = shared_roles(checkpoint, Folder(folder))
    assert not shared.only_a and not shared.only_b and not shared.differing
    # The decoder is tied to the word embeddings: it is no parameter of its own.
    assert set(shared.roles) == set(checkpoint.signature.tensors) - {
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    }


def test_base_and_head_models_share_the_base(make) -> None:
    base, head = pair(make("BertModel"), make("BertForTokenClassification"))
    shared = shared_roles(base, head)
    assert "encoder.layer.0.attention.self.query.weight" in shared.roles
    assert set(shared.only_a) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert set(shared.only_b) == {"classifier.weight", "classifier.bias"}


def test_tied_and_untied_share_the_embedding(make) -> None:
    tied, untied = pair(make("GPT2LMHeadModel"), make("GPT2LMHeadModel", "untied", tie_word_embeddings=False))
    shared = shared_roles(tied, untied)
    assert "wte.weight" in shared.roles
    assert shared.only_a == () and shared.only_b == ("lm_head.weight",)


def test_class_counts_that_differ(make) -> None:
    shared = shared_roles(*pair(make(), make(name="five", num_labels=5)))
    assert set(shared.differing) == {"classifier.weight", "classifier.bias"}
    assert "pooler.dense.weight" in shared.roles


def test_label_names_that_differ(make) -> None:
    a, b = make(), make(name="b")
    assert not shared_roles(*pair(a, b)).differing
    edit_config(b, id2label={"0": "no", "1": "yes", "2": "maybe"})
    assert set(shared_roles(*pair(a, b)).differing) == {"classifier.weight", "classifier.bias"}


def test_a_head_goes_as_a_whole(make) -> None:
    """RoBERTa's classifier has a hidden layer, which belongs to the output layer it was trained with."""
    kind = "RobertaForSequenceClassification"
    shared = shared_roles(*pair(make(kind), make(kind, "five", num_labels=5)))
    assert set(shared.differing) == {
        f"classifier.{layer}.{of}" for layer in ("dense", "out_proj") for of in ("weight", "bias")
    }


def test_one_head_of_two_differs(make) -> None:
    """Token and sequence classification read different vectors, of one width here."""
    a = make("BertForTokenClassification")
    b = make("BertForSequenceClassification")
    assert set(shared_roles(*pair(a, b)).differing) >= {"classifier.weight"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 3}, "number of layers: 2 in .*, 3 in"),
        ({"num_attention_heads": 4}, "size of 'head' .*: 3 in .*, 4 in"),
        ({"hidden_size": 24}, "size of 'stream' .*: 12 in .*, 24 in"),
        ({"vocab_size": 29}, "size of 'vocab' .*: 23 in .*, 29 in"),
        ({"intermediate_size": 11}, "size of 'ffn' .*: 10 in .*, 11 in"),
        ({"hidden_act": "relu"}, "activation"),
    ],
)
def test_what_differs_is_named_with_both_sizes(make, change: dict[str, object], words: str) -> None:
    a, b = pair(make(), make(name="other", **change))
    for first, second in ((a, b), (b, a)):
        with pytest.raises(ModelError) as caught:
            shared_roles(first, second)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=words):
        shared_roles(a, b)


def test_layers_that_share_weights_are_counted_by_the_config(make) -> None:
    options = {"embedding_size": 8}
    a = make("AlbertForMaskedLM", **options)
    b = make("AlbertForMaskedLM", "deeper", **options, num_hidden_layers=5)
    with pytest.raises(ModelError, match=r"number of layers: 2 in .*, 5 in"):
        shared_roles(*pair(a, b))


def test_families_that_differ(make) -> None:
    with pytest.raises(ModelError, match=r"family bert, .* of gpt2"):
        shared_roles(*pair(make("BertModel"), make("GPT2Model")))


def test_leading_positions_are_shared(make) -> None:
    a, b = pair(make(), make(name="longer", max_position_embeddings=20))
    assert POSITIONS in shared_roles(a, b).roles
    for first, second in ((a, b), (b, a)):
        x, y = read_pair(first, second, POSITIONS)
        assert x.shape == y.shape == (zoo.POSITIONS, 12)
        assert torch.equal(x, first.read(POSITIONS)[:12]) and torch.equal(y, second.read(POSITIONS)[:12])


def test_pairs_come_in_the_dtype_asked_for(make) -> None:
    a, b = pair(make(dtype=torch.bfloat16), make(name="b", dtype=torch.float64))
    x, y = read_pair(a, b, POSITIONS, torch.float64)
    assert x.dtype == y.dtype == torch.float64


def test_distance_counts_shared_positions_alone(make) -> None:
    a = make()
    b = make(name="longer", max_position_embeddings=20)

    def graft(tensors: dict[str, torch.Tensor]) -> None:
        own = Folder(a)
        for name in tensors:
            tensors[name][tuple(slice(size) for size in own.shapes[name])] = own.read_name(name)

    edit_weights(b, graft)
    assert distances(*pair(a, b)).distance == 0
