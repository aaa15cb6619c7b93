# SPDX-License-Identifier: Apache-2.0
"""Reading: what is right comes back bit for bit, what is wrong gets one clear sentence."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damage import edit_config, edit_weights, to_pickle
from safetensors.torch import load_file, save_file
from zoo import CASES, save

import onebasin
from onebasin.models import Folder, ModelError, write_model
from onebasin.models.fetching import link
from onebasin.running import compare

QUERY = "bert.encoder.layer.1.attention.self.query.weight"
WORDS = "embeddings.word_embeddings.weight"


def refused(folder: Path, what: Callable[[Folder], object] = lambda c: c.signature) -> str:
    """The sentence with which a folder is refused: one line that names what is wrong."""
    with pytest.raises(ModelError) as caught:
        what(Folder(folder))
    message = str(caught.value)
    assert "\n" not in message
    return message


def shard(folder: Path) -> Path:
    """Split the weights into two files and an index; the index's path."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["single", "sharded", "pickle"])
def test_reads_every_form_and_dtype(make, form: str, dtype: torch.dtype) -> None:
    folder = make(dtype=dtype)
    expected = load_file(folder / "model.safetensors")
    {"single": lambda f: f, "sharded": shard, "pickle": to_pickle}[form](folder)
    checkpoint = Folder(folder)
    assert checkpoint.files.keys() == expected.keys()
    assert checkpoint.stored_dtype == dtype
    for role, entry in checkpoint.signature.tensors.items():
        assert torch.equal(checkpoint.read(role, torch.float64), expected[entry.name].double())
        assert torch.equal(checkpoint.read_name(entry.name), expected[entry.name])
        assert checkpoint.dtypes[entry.name] == dtype


def test_reads_the_older_pickle_format(bert: Path) -> None:
    expected = load_file(bert / "model.safetensors")
    torch.save(expected, to_pickle(bert), _use_new_zipfile_serialization=False)
    assert torch.equal(Folder(bert).read_name(QUERY), expected[QUERY])


def test_prefers_the_file_that_transformers_loads(bert: Path) -> None:
    (bert / "model.safetensors.index.json").write_text("not read")
    assert Folder(bert).files[QUERY].name == "model.safetensors"


# --- folders ---------------------------------------------------------------------------------------


def test_missing_folder(tmp_path: Path) -> None:
    for name in (tmp_path / "none", "none", "./none/model", ""):
        with pytest.raises(ModelError, match="there is no folder"):
            Folder(name)


def test_a_mistyped_path_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onebasin.models.fetching.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="there is no folder 'models/typo'"):
        Folder("models/typo")


def test_hub_id(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns[-1]))
        return str(bert)

    monkeypatch.setattr("onebasin.models.fetching.snapshot_download", download)
    assert Folder("owner/name@v2").folder == bert
    to_pickle(bert)
    assert Folder("owner/name").folder == bert
    assert asked == [
        ("owner/name", "v2", "model*.safetensors"),
        ("owner/name", None, "model*.safetensors"),
        ("owner/name", None, "pytorch_model*.bin"),
    ]


def test_hub_without_such_a_model() -> None:
    with pytest.raises(ModelError, match="the hub cannot be reached") as caught:  # it is offline here
        Folder("no-such-owner/no-such-model")
    assert "\n" not in str(caught.value)


def test_a_file_is_no_folder(bert: Path) -> None:
    with pytest.raises(ModelError, match="is a file"):
        Folder(bert / "config.json")


def linked(folder: Path, file: str, to: Path) -> None:
    """Move a file of the folder (made where there is none) into `to`, and leave a link to it."""
    place = folder / file
    place.parent.mkdir(exist_ok=True)
    place.touch()
    to.mkdir(parents=True, exist_ok=True)
    place.rename(to / place.name)
    place.symlink_to(to / place.name)


FILES = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "README.md", "LICENSE",
         "additional_chat_templates/tool.jinja"]  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_a_link_out_of_the_folder_is_not_followed(bert: Path, tmp_path: Path, file: str) -> None:
    linked(bert, file, tmp_path / "secrets")
    message = refused(bert, lambda c: c)
    assert f"'{bert / file}' is a link that leads out of its folder" in message and "secrets" in message


def test_a_folder_of_templates_that_is_a_link_is_not_followed(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "tool.jinja").touch()
    (bert / "additional_chat_templates").symlink_to(tmp_path / "secrets")
    assert "tool.jinja' is a link" in refused(bert, lambda c: c)


@pytest.mark.parametrize("where", ["inside", "blobs", "cache"])
def test_links_inside_the_folder_and_into_the_hub_s_cache_are_followed(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A cache that was put elsewhere is known by its snapshots, and a folder may borrow from the cache in use."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "moved" / "models--o--n" / "snapshots" / "1"
    folder.parent.mkdir(parents=True)
    bert.rename(folder)
    places = {"inside": folder / "real", "blobs": folder.parents[1] / "blobs",
              "cache": tmp_path / "hub" / "models--o--m" / "blobs"}  # fmt: skip
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        linked(folder, file, places[where])
    assert Folder(folder).read_name(QUERY).numel()


def test_blobs_that_are_a_link_are_not_followed(bert: Path, tmp_path: Path) -> None:
    """Only the folder of that name counts, or a hostile folder could call anything its blobs."""
    folder = tmp_path / "cache" / "snapshots" / "1"
    folder.parent.mkdir(parents=True)
    bert.rename(folder)
    linked(folder, "tokenizer.json", tmp_path / "secrets")
    (tmp_path / "cache" / "blobs").symlink_to(tmp_path / "secrets")
    assert "leads out of its folder" in refused(folder, lambda c: c)


def test_links_that_run_in_a_circle_are_no_files(bert: Path) -> None:
    (bert / "one.json").symlink_to("two.json")
    (bert / "two.json").symlink_to("one.json")
    assert Folder(bert).signature


def test_no_weights(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    assert "holds no model.safetensors" in refused(bert)


# --- config.json -----------------------------------------------------------------------------------


def test_no_config(bert: Path) -> None:
    (bert / "config.json").unlink()
    assert "holds no config.json" in refused(bert)


@pytest.mark.parametrize("text", ["{", "", "\x00", '{"a": 1} x', "[" * 100_000], ids=repr)
def test_config_that_is_no_json(bert: Path, text: str) -> None:
    (bert / "config.json").write_text(text)
    assert "config.json' is not valid JSON" in refused(bert)


def test_config_that_is_no_text(bert: Path) -> None:
    (bert / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "is not valid JSON" in refused(bert)


@pytest.mark.parametrize("text", ["[]", "1", "{}", '{"model_type": 3}', '{"model_type": null}'])
def test_config_without_a_model_type(bert: Path, text: str) -> None:
    """The sizes that a config states tell the heads apart, which tensors do not: without any, nothing fits."""
    (bert / "config.json").write_text(text)
    assert "names no model_type" in refused(bert)


def without_type(folder: Path, *more: str) -> Path:
    """As the first versions of the library wrote it."""
    config = json.loads((folder / "config.json").read_text())
    for key in ("model_type", "architectures", "transformers_version", "dtype", *more):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "kind, model_type",
    [("BertForSequenceClassification", "bert"), ("GPT2LMHeadModel", "gpt2"), ("RobertaForMaskedLM", "roberta"),
     ("DistilBertModel", "distilbert"), ("BloomForCausalLM", "bloom"), ("ViTForImageClassification", "vit")],
)  # fmt: skip
def test_an_old_config_without_a_model_type(tmp_path: Path, kind: str, model_type: str) -> None:
    """The tensors' names tell the type, and the outputs are those that they were."""
    new = Folder(save(CASES[kind](), tmp_path / "new"))
    old = Folder(without_type(save(CASES[kind](), tmp_path / "old")))
    assert old.raw_config["model_type"] == model_type
    assert old.signature == new.signature and any("names no model_type" in note for note in old.notes)
    write_model(tmp_path / "out", ((name, old.read_name(name)) for name in old.files), old)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == model_type
    found = compare(new.folder, tmp_path / "out")
    assert found.same and not found.unused  # by a class with the head that it has


def test_tensors_that_fit_several_types_are_not_guessed(make) -> None:
    """Those of a BERT without a head and without its prefix are ERNIE's, too."""
    folder = without_type(make("BertModel"))
    message = refused(folder)
    assert "fit bert, ernie (family bert)" in message and "--family bert" in message
    assert Folder(folder, "bert").raw_config["model_type"] == "bert"
    edit_config(folder, architectures=["ErnieModel"])
    assert Folder(folder).raw_config["model_type"] == "ernie"


@pytest.mark.parametrize("family", [None, "bert"])
def test_a_tensor_that_no_type_has_is_named(make, family: str | None) -> None:
    """The tensors' prefix tells whose table is the nearest."""
    folder = without_type(make())
    edit_weights(folder, lambda tensors: tensors.update({"mlm.bias": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"not those of bert: the table does not know 'mlm\.bias'; add"):
        assert Folder(folder, family).signature


def test_a_type_that_is_told_by_its_tensors_serves_every_command(make, tmp_path: Path) -> None:
    a, b = make(name="a"), without_type(make(name="b"))
    for level in ("paper", "full"):
        found = onebasin.match(b, a, tmp_path / level, symmetry=level)
        assert found["max_output_difference"] < 1e-4 and any("names no model_type" in note for note in found["notes"])
    onebasin.merge([a, b], tmp_path / "merged")
    assert onebasin.verify(tmp_path / "paper", b).same


def test_config_with_values_of_wrong_types(bert: Path) -> None:
    edit_config(bert, num_attention_heads="three")
    assert "config.json" in refused(bert)


@pytest.mark.parametrize(
    "key, value",
    [("architectures", True), ("architectures", "BertModel"), ("architectures", [1]), ("architectures", {}),
     ("id2label", ["a"]), ("id2label", 3), ("label2id", "a")],
)  # fmt: skip
def test_config_with_a_value_of_another_kind(bert: Path, key: str, value: object) -> None:
    edit_config(bert, **{key: value})
    message = refused(bert)
    assert str(bert / "config.json") in message and f"{key} is " in message


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_labels", "encoder_layers", "n_layer"])
@pytest.mark.parametrize("inside", [False, True])
def test_counts_that_would_take_all_memory_are_refused_at_once(bert: Path, key: str, inside: bool) -> None:
    """A class of transformers makes a list of so many layers, a dictionary of so many labels."""
    edit_config(bert, **({"text_config": {key: 10**9}} if inside else {key: 10**9}))
    for what in (lambda c: c.signature, lambda c: c.config):
        message = refused(bert, what)
        assert f"{key} is 1000000000" in message and "too few" in message


def test_unknown_model_type(bert: Path) -> None:
    edit_config(bert, model_type="berta")
    assert "'berta' has no table yet (nearest: bert" in refused(bert)


def test_quantised_model(bert: Path) -> None:
    edit_config(bert, quantization_config={"quant_method": "bitsandbytes"})
    assert "is quantised" in refused(bert)


def test_renamed_weight_files(bert: Path) -> None:
    edit_config(bert, transformers_weights="other.safetensors")
    assert "renames its weight files" in refused(bert)


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", 5), ("num_hidden_layers", 3)])
def test_config_that_does_not_fit_the_weights(bert: Path, key: str, value: int) -> None:
    edit_config(bert, **{key: value})
    refused(bert)


# --- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_safetensors(bert: Path, keep: int) -> None:
    file = bert / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors' is damaged or cut short" in refused(bert)


@pytest.mark.parametrize("start", [b"\xff" * 8, b"\x00" * 8, b"\x10" + b"\x00" * 7], ids=repr)
def test_corrupt_safetensors_header(bert: Path, start: bytes) -> None:
    file = bert / "model.safetensors"
    file.write_bytes(start + file.read_bytes()[8:])
    assert "is damaged or cut short" in refused(bert)


@pytest.mark.parametrize("keep", [0, 10, 1000, -100])
def test_truncated_pickle(bert: Path, keep: int) -> None:
    file = to_pickle(bert)
    file.write_bytes(file.read_bytes()[:keep])
    assert "pytorch_model.bin' is damaged" in refused(bert)


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (Path.write_text, (self.marker, "the pickle ran this"))  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["torch", "torch, older format", "plain"])
def test_a_pickle_that_would_run_code_does_not_run_it(bert: Path, tmp_path: Path, how: str) -> None:
    marker = tmp_path / "marker"
    file = to_pickle(bert)
    content = {**torch.load(file), "x": Hostile(marker)}
    if how == "plain":
        file.write_bytes(pickle.dumps(Hostile(marker)))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(ModelError, match="could run code") as caught:
        Folder(bert).signature  # noqa: B018
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    torch.load(file, weights_only=False) if how != "plain" else pickle.loads(file.read_bytes())
    assert marker.exists()  # the trap is a real one


@pytest.mark.parametrize("content", [[1, 2], {"x": 1}, {1: torch.ones(2)}, {"x": torch.ones(2, 2).to_sparse()}])
def test_a_pickle_of_something_else(bert: Path, content: object) -> None:
    torch.save(content, to_pickle(bert))
    assert "is not a dictionary of tensors" in refused(bert)


def test_a_pickle_of_tensors_without_numbers(bert: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    torch.save({**tensors, QUERY: tensors[QUERY].to("meta")}, to_pickle(bert))
    message = refused(bert)
    assert QUERY in message and "meta" in message


@pytest.mark.parametrize("older", [False, True])
def test_a_pickle_of_a_tensor_that_is_larger_than_its_file(bert: Path, older: bool) -> None:
    """A single number, said to be 10^12 of them: reading it would take all memory."""
    tensors = load_file(bert / "model.safetensors")
    endless = torch.zeros(1).expand(10**6, 10**6)
    torch.save({**tensors, QUERY: endless}, to_pickle(bert), _use_new_zipfile_serialization=not older)
    message = refused(bert)
    assert QUERY in message and "than what the file stores" in message


def test_a_pickle_of_views_is_read(bert: Path) -> None:
    """A tensor that is part of a larger storage, or lies transposed in it, is whole all the same."""
    tensors = load_file(bert / "model.safetensors")
    query = tensors[QUERY]
    for view in (torch.stack([query, query])[1], query.T.contiguous().T):
        torch.save({**tensors, QUERY: view}, bert / "pytorch_model.bin")
        (bert / "model.safetensors").unlink(missing_ok=True)
        assert torch.equal(Folder(bert).read_name(QUERY), query)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_a_buffer_of_an_unusual_dtype_is_read(bert: Path, dtype: torch.dtype) -> None:
    """The table ignores it, and the classes that run models are given it."""
    values = torch.tensor([1.0, 2.0]).to(dtype)
    edit_weights(bert, lambda tensors: tensors.update({"bert.embeddings.position_ids": values}))
    folder = Folder(bert)
    assert folder.signature and torch.equal(folder.read_name("bert.embeddings.position_ids").float(), values.float())


def test_unknown_tensors_are_named(bert: Path) -> None:
    edit_weights(bert, lambda t: t.update({"bert.adapter.weight": torch.ones(2)}))
    assert "does not know 'bert.adapter.weight'" in refused(bert)


def test_missing_tensors_are_named(bert: Path) -> None:
    edit_weights(bert, lambda t: t.pop(QUERY))
    assert f"lack '{QUERY}'" in refused(bert)


def test_tensors_of_a_wrong_shape_are_named(bert: Path) -> None:
    edit_weights(bert, lambda t: t.update({QUERY: torch.ones(12, 13)}))
    assert QUERY in refused(bert)
    edit_weights(bert, lambda t: t.update({QUERY: torch.ones(12)}))
    assert QUERY in refused(bert)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tensors_that_are_not_finite_are_named(bert: Path, value: float) -> None:
    edit_weights(bert, lambda t: t[QUERY].view(-1)[5].fill_(value))
    message = refused(bert, lambda c: [c.read(role) for role in c.signature.tensors])
    assert f"'{QUERY}' contains NaN or infinite" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_tensors_that_are_not_floating_point_are_named(bert: Path, dtype: torch.dtype) -> None:
    edit_weights(bert, lambda t: t.update({QUERY: t[QUERY].to(dtype)}))
    message = refused(bert, lambda c: [c.read(role) for role in c.signature.tensors])
    assert f"'{QUERY}' does not contain plain floating-point" in message


# --- shards ----------------------------------------------------------------------------------------


def test_missing_shard(bert: Path) -> None:
    shard(bert)
    (bert / "part-1.safetensors").unlink()
    assert "names 'part-1.safetensors'" in refused(bert)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_broken_index(bert: Path, text: str) -> None:
    shard(bert).write_text(text)
    assert "model.safetensors.index.json'" in refused(bert)


@pytest.mark.parametrize("where", ["../secret.safetensors", "sub/../../secret.safetensors", "{absolute}", ".", ".."])
def test_an_index_does_not_lead_out_of_the_folder(bert: Path, tmp_path: Path, where: str) -> None:
    outside = tmp_path / "secret.safetensors"
    save_file({QUERY: torch.ones(12, 12)}, outside)
    index = shard(bert)
    content = json.loads(index.read_text())
    content["weight_map"][QUERY] = where.replace("{absolute}", str(outside))
    index.write_text(json.dumps(content))
    assert "is not a weight file of this folder" in refused(bert)


def test_an_index_of_safetensors_does_not_lead_to_a_pickle(bert: Path) -> None:
    index = shard(bert)
    torch.save({QUERY: torch.ones(12, 12)}, bert / "evil.bin")
    content = json.loads(index.read_text())
    content["weight_map"][QUERY] = "evil.bin"
    index.write_text(json.dumps(content))
    assert "names 'evil.bin'" in refused(bert)


def test_an_index_that_promises_too_much(bert: Path) -> None:
    index = shard(bert)
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "part-0.safetensors"
    index.write_text(json.dumps(content))
    assert "lacks 'ghost'" in refused(bert)


def test_a_tensor_in_two_shards(bert: Path) -> None:
    shard(bert)
    tensors = load_file(bert / "part-0.safetensors") | load_file(bert / "part-1.safetensors")
    save_file(tensors, bert / "part-0.safetensors")
    assert "and again in" in refused(bert)


def test_tensors_that_an_index_forgets_are_read(bert: Path) -> None:
    """The stock loader reads all that a shard holds; what is written must not lack what the index forgot."""
    index = shard(bert)
    content = json.loads(index.read_text())
    del content["weight_map"][QUERY]
    index.write_text(json.dumps(content))
    assert QUERY in Folder(bert).files


def test_a_damaged_shard_is_named(bert: Path) -> None:
    shard(bert)
    file = bert / "part-1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "part-1.safetensors' is damaged" in refused(bert)


def test_where_links_cannot_be_made_a_file_is_copied(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    link(tmp_path / "copy", bert / "config.json")
    assert (tmp_path / "copy").read_bytes() == (bert / "config.json").read_bytes()


def test_numbers_that_json_has_no_word_for_are_read(bert: Path) -> None:
    tagged = {"__float__": "Infinity"}
    edit_config(bert, time_step_limit=[0.0, tagged], least={"__float__": "-Infinity"}, other={"__float__": "seven"})
    config = Folder(bert).config
    assert (config["time_step_limit"], config["least"]) == ([0.0, float("inf")], float("-inf"))
    assert config["other"] == {"__float__": "seven"}
