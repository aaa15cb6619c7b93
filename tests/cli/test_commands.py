# SPDX-License-Identifier: Apache-2.0
"""What every command prints and writes when all goes well."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
import typer
from pairs import folder, model, scrambled, weights
from safetensors.torch import save_file
from typer.testing import CliRunner
from zoo import CASES, one_of_each_family, save

import onebasin
from onebasin.cli import LATE, app, common, described
from onebasin.models import Folder
from onebasin.symmetry import Alignment

MATCHED = {"output", "anchor", "distance_before", "distance_after", "max_output_difference", "seconds"}


# --- match ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", one_of_each_family())
def test_match_keeps_the_function_and_distance_says_what_match_said(case: str, ask: Any, tmp_path: Path) -> None:
    """The source is the anchor under a random symmetry, and noise: the distance falls to what the noise leaves."""
    anchor, out = save(CASES[case](), tmp_path / "anchor"), tmp_path / "out"
    source = scrambled(anchor, tmp_path / "source")
    noisy = weights(source)
    generator = torch.Generator().manual_seed(1)
    for tensor in noisy.values():
        tensor += 0.01 * torch.randn(tensor.shape, generator=generator)
    save_file(noisy, source / "model.safetensors", {"format": "pt"})

    found = ask("match", source, anchor, "-o", out, "--no-verify")
    assert found["output"] == str(out) and found["anchor"] == str(anchor)
    assert found["distance_after"] < found["distance_before"]
    verdict = ask("verify", source, out)
    assert verdict.keys() == {"same", "max_difference", "relative_difference"} and verdict["same"]
    measured = ask("distance", out, anchor)
    assert measured["distance"] == pytest.approx(found["distance_after"], rel=1e-5)
    assert ask("distance", source, anchor)["distance"] == pytest.approx(found["distance_before"], rel=1e-5)
    transformers.AutoModel.from_pretrained(out)  # an ordinary folder


def test_a_scrambled_copy_is_recovered(ask: Any, a: Path, tmp_path: Path) -> None:
    source = scrambled(a, tmp_path / "source")
    found = ask("match", source, a, "-o", tmp_path / "out")
    assert found.keys() >= MATCHED and found["distance_before"] > 1
    assert ask("distance", tmp_path / "out", a)["relative"] < 1e-5


def test_other_parts_and_layers_keep_their_bits(ask: Any, a: Path, b: Path, tmp_path: Path) -> None:
    source = scrambled(b, tmp_path / "source")
    ask("match", source, a, "-o", tmp_path / "out", "--parts", "ffn", "--layers", "1")
    before, after = weights(source), weights(tmp_path / "out")
    moved = {name for name in before if not before[name].equal(after[name])}
    neurons = ("intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight")
    assert moved == {f"bert.encoder.layer.1.{name}" for name in neurons}


def test_rescaling_may_only_help(ask: Any, a: Path, b: Path, tmp_path: Path) -> None:
    after = [
        ask("match", b, a, "-o", tmp_path / how, "--rescale", how, "--precision", "float64", "--dtype", "float64")
        for how in ("none", "after", "joint")
    ]
    none, then, joint = (found["distance_after"] for found in after)
    assert joint <= then * (1 + 1e-9) and then <= none * (1 + 1e-9)
    assert joint < none


def test_the_saved_alignment_rewrites_the_source(ask: Any, a: Path, b: Path, tmp_path: Path) -> None:
    found = ask("match", b, a, "-o", tmp_path / "out", "--alignment", tmp_path / "maps.safetensors")
    assert found["alignment"] == str(tmp_path / "maps.safetensors")
    alignment, source, out = Alignment.load(found["alignment"]), Folder(b), Folder(tmp_path / "out")
    for role in source.signature.tensors:
        mine = alignment.apply(source.signature, role, source.read(role))
        assert torch.equal(mine, out.read(role))


def test_levels_that_rewrite_the_anchor_say_where_it_is(ask: Any, tmp_path: Path) -> None:
    first, second = (folder(tmp_path / f"{seed}", "ViTForImageClassification", seed) for seed in (0, 1))
    found = ask("match", second, first, "-o", tmp_path / "out", "--symmetry", "full")
    assert found["anchor_output"] == str(tmp_path / "out-anchor")
    assert ask("verify", first, found["anchor_output"])["same"] and ask("verify", second, tmp_path / "out")["same"]
    measured = ask("distance", tmp_path / "out", found["anchor_output"])["distance"]
    assert measured == pytest.approx(found["distance_after"], rel=1e-5)
    named = ask("match", second, first, "-o", tmp_path / "out-2", "--symmetry", "full",
                "--anchor-output", tmp_path / "normal")  # fmt: skip
    assert named["anchor_output"] == str(tmp_path / "normal") and (tmp_path / "normal" / "config.json").is_file()
    assert not (tmp_path / "out-2-anchor").exists()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_sixteen_bits_in_shards(ask: Any, tmp_path: Path, stored: torch.dtype) -> None:
    source, anchor = tmp_path / "source", tmp_path / "anchor"
    for place, seed in ((source, 1), (anchor, 0)):
        model(seed=seed).to(stored).save_pretrained(place, max_shard_size="4KB")
        assert len(list(place.glob("model-*.safetensors"))) > 1
    found = ask("match", source, anchor, "-o", tmp_path / "out")
    assert found["distance_after"] < found["distance_before"]
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {stored}
    assert ask("verify", source, tmp_path / "out")["same"]
    ask("match", source, anchor, "-o", tmp_path / "wide", "--dtype", "float32")
    assert {tensor.dtype for tensor in weights(tmp_path / "wide").values()} == {torch.float32}
    assert transformers.AutoConfig.from_pretrained(tmp_path / "wide").dtype == torch.float32


def test_overwrite(ask: Any, run: Any, a: Path, b: Path, tmp_path: Path) -> None:
    ask("merge", a, b, "-o", tmp_path / "out", "--match", "none")
    before = weights(tmp_path / "out")
    assert run("match", b, a, "-o", tmp_path / "out", "--overwrite").exit_code == 0
    after = weights(tmp_path / "out")
    assert any(not before[name].equal(after[name]) for name in before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_lies_beside_the_weights(ask: Any, a: Path, b: Path, tmp_path: Path) -> None:
    ask("match", b, a, "-o", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\n") and f'- "{b.name}"\n- "{a.name}"' in card
    facts = json.loads((tmp_path / "out" / "onebasin.json").read_text())
    assert facts["options"]["symmetry"] == "paper"
    assert set(ask("distance", a, b)["layers"]) == {"0", "1"}


def test_what_is_written_says_nothing_of_where_the_models_lie(
    ask: Any, a: Path, b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever publishes the folder publishes names."""
    home = tmp_path / "my home"
    for place in (a, b):
        shutil.copytree(place, home / place.name)
    edit = home / "b" / "config.json"
    edit.write_text(json.dumps({**json.loads(edit.read_text()), "_name_or_path": str(home / "b")}))
    out = tmp_path / "results" / "out"
    file = tmp_path / "recipe.yml"
    file.write_text(f"merge_method: linear\nmodels: [{{model: '{home / 'a'}'}}, {{model: '{home / 'b'}'}}]\n"
                    "parameters: {weight: 1}\nalign: {symmetry: paper}\n")  # fmt: skip
    maps = out / "maps.safetensors"
    for words in (
        ("match", home / "b", home / "a", "-o", out, "--alignment", home / "maps.safetensors"),
        ("merge", home / "a", home / "b", "-o", out),
        ("merge", "--config", file, "-o", out),
    ):
        monkeypatch.setattr(sys, "argv", ["onebasin", *map(str, words)])
        ask(*words, "--overwrite")
        if (home / "maps.safetensors").exists():
            (home / "maps.safetensors").rename(maps)
        for written in out.iterdir():
            found = written.read_bytes()
            assert not any(word in found for word in (b"home", b"results", str(tmp_path).encode())), written


def test_cards_state_what_happened(ask: Any, run: Any, a: Path, b: Path, tmp_path: Path) -> None:
    def card(*words: object) -> str:
        printed = run(*words, "-o", tmp_path / "out", "--overwrite").stdout
        return str((tmp_path / "out" / "README.md").read_text() + printed)

    file = tmp_path / "recipe.yml"
    file.write_text(f"merge_method: linear\nmodels: [{{model: {a}}}, {{model: {b}}}]\nparameters: {{weight: 1}}\n")
    for plain in (card("merge", a, b, "--match", "none"), card("merge", "--config", file)):
        assert "They were not matched first." in plain and "2 models, not matched" in plain
        assert "lie close" not in plain and "->" not in plain and "before" not in plain
    for matched in (card("merge", a, b, "--match", "paper"), card("merge", a, b, "--method", "average")):
        assert "lie close" in matched and "matched at level" in matched and "| before | after |" in matched
    searched = run("merge", a, b, "--budget", "2s", "-o", tmp_path / "out", "--overwrite").stdout
    assert "out: unmatched, " in searched and " 2 models" in searched and "distance" not in searched
    assert "on random inputs, its outputs differ by at most" in card("match", b, a)
    assert "outputs were not compared" in card("match", b, a, "--no-verify")


# --- merge ----------------------------------------------------------------------------------------------------


def test_merge_of_three(ask: Any, a: Path, b: Path, c: Path, tmp_path: Path) -> None:
    found = ask("merge", a, b, c, "-o", tmp_path / "out", "--anchor", "1", "--match", "paper")
    assert found.keys() >= MATCHED and found["anchor"] == 1
    for key in ("distance_before", "distance_after", "max_output_difference"):
        assert len(found[key]) == 2
    assert all(new < old for old, new in zip(found["distance_before"], found["distance_after"], strict=True))


def test_weights_and_no_matching(ask: Any, a: Path, b: Path, tmp_path: Path) -> None:
    found = ask("merge", a, b, "-o", tmp_path / "out", "--match", "none", "--weights", "0.25,0.75")
    assert found["distance_before"] == found["distance_after"]
    one, two, merged = weights(a), weights(b), weights(tmp_path / "out")
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, 0.25 * one[name] + 0.75 * two[name])


def test_the_merge_of_a_model_with_its_scrambled_copies_is_the_model(ask: Any, a: Path, tmp_path: Path) -> None:
    copies = [scrambled(a, tmp_path / f"{seed}", seed=seed) for seed in (1, 2)]
    found = ask("merge", a, *copies, "-o", tmp_path / "out", "--anchor", "0", judged=True)
    assert max(found["distance_after"]) < 1e-4 and "one function, written differently" in " ".join(found["notes"])
    assert ask("verify", a, tmp_path / "out")["same"] and found["verdict"]["works"]
    ask("merge", a, *copies, "-o", tmp_path / "plain", "--match", "none")
    assert ask("verify", a, tmp_path / "plain", code=1)["same"] is False


@pytest.mark.parametrize("level", ["paper", "permutation", "orthogonal", "full", "invertible"])
def test_a_model_matched_to_itself_stays_as_it_is(ask: Any, a: Path, tmp_path: Path, level: str) -> None:
    """To the last bit: maps near the identity would only round."""
    assert ask("match", a, a, "-o", tmp_path / "out", "--symmetry", level)["distance_after"] == 0
    anchor = tmp_path / "out-anchor" if (tmp_path / "out-anchor").exists() else a
    ask("merge", a, a, "-o", tmp_path / "merged", "--match", level)
    for out in ("out", "merged"):
        found, expected = weights(tmp_path / out), weights(anchor)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_auto_takes_the_model_nearest_to_the_mean(ask: Any, a: Path, b: Path, tmp_path: Path) -> None:
    """Two equal models and one other: the mean is nearest to the two."""
    assert ask("merge", b, a, a, "-o", tmp_path / "out", "--match", "none")["anchor"] == 1
    assert ask("merge", a, b, b, "-o", tmp_path / "out-2", "--match", "none")["anchor"] == 1


def test_heads_of_different_classes_are_copied_and_the_log_says_so(ask: Any, run: Any, a: Path, tmp_path: Path) -> None:
    five = folder(tmp_path / "five", seed=1, num_labels=5)
    for options, labels, name in (
        (("--anchor", 0), 3, a), (("--anchor", 1), 5, five), (("--anchor", 0, "--heads-from", 1), 5, five)
    ):  # fmt: skip
        out = tmp_path / "out"
        result = run("merge", a, five, "-o", out, "--overwrite", *options)
        assert result.exit_code == 0
        said = " ".join(result.stderr.split())
        assert "classifier.weight" in said and f"({name})" in said and "copied from model" in said
        assert "classifier.weight" in (out / "README.md").read_text()
        merged = weights(out)
        assert merged["classifier.weight"].shape[0] == labels
        assert torch.equal(merged["classifier.bias"], weights(name)["classifier.bias"])
        assert transformers.AutoConfig.from_pretrained(out).num_labels == labels
        assert not torch.equal(merged["bert.pooler.dense.bias"], weights(name)["bert.pooler.dense.bias"])


def test_a_base_checkpoint_and_one_with_a_head(ask: Any, a: Path, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", "BertModel", seed=1)
    found = ask("match", base, a, "-o", tmp_path / "to-head")
    assert found["distance_after"] < found["distance_before"]
    assert ask("verify", base, tmp_path / "to-head")["same"]
    ask("match", a, base, "-o", tmp_path / "to-base")
    assert ask("verify", a, tmp_path / "to-base")["same"]
    ask("merge", a, base, "-o", tmp_path / "merged", "--anchor", "0")
    merged, own = weights(tmp_path / "merged"), weights(a)
    assert merged.keys() == own.keys()
    assert torch.equal(merged["classifier.weight"], own["classifier.weight"])


@pytest.mark.parametrize("method", ["norm-preserving", "spectrum-preserving", "circuit"])
def test_no_method_changes_what_equal_models_compute(ask: Any, a: Path, tmp_path: Path, method: str) -> None:
    ask("merge", a, a, "-o", tmp_path / "out", "--method", method)
    assert ask("verify", tmp_path / "out", a)["same"]


# --- the others -------------------------------------------------------------------------------------------------


def test_verify_says_no_with_exit_code_1(run: Any, ask: Any, a: Path, b: Path) -> None:
    assert ask("verify", a, b, code=1)["same"] is False
    result = run("verify", a, b)
    assert result.exit_code == 1 and "different functions" in result.stdout
    assert ask("verify", a, a, "--precision", "float64")["max_difference"] == 0


def test_distance(run: Any, ask: Any, a: Path, b: Path) -> None:
    found = ask("distance", a, b)
    assert found.keys() == {"distance", "relative", "parts", "layers"}
    one, two = weights(a), weights(b)
    by_hand = sum(float((one[name] - two[name]).double().square().sum()) for name in one) ** 0.5
    assert found["distance"] == pytest.approx(by_hand, rel=1e-6)
    assert sum(part**2 for part in found["parts"].values()) ** 0.5 == pytest.approx(by_hand, rel=1e-6)
    assert float(run("distance", a, b, "--quiet").stdout) == pytest.approx(by_hand, rel=1e-6)
    assert "relative" in run("distance", a, b).stdout


def test_inspect(run: Any, ask: Any, a: Path) -> None:
    found = ask("inspect", a, "--symmetry", "paper")
    assert found["family"] == "bert" and found["tensors"] == len(weights(a))
    spaces = {space["space"]: space for space in found["spaces"]}
    heads = spaces["encoder.layer.0.qk"]
    assert (heads["size"], heads["copies"], heads["group"]) == (4, 3, "orthogonal with scale")
    assert heads["dimension"] == 3 * (4 * 3 // 2 + 1)
    assert spaces["encoder.layer.1.ffn"]["group"] == "permutation" and spaces["stream"]["group"] == "fixed"
    assert "encoder.layer.0.attention.self.query.weight" in heads["tensors"]
    shown = run("inspect", a).stdout
    assert shown.count("encoder.layer.0-1.qk") == 1 and "encoder.layer.1" not in shown  # layers that are alike: a line
    listed = {line.split()[0] for line in run("inspect", a, "--tensors").stdout.splitlines() if line}
    assert set(weights(a)) <= listed


def test_families(run: Any, ask: Any) -> None:
    found = ask("families")
    assert "xlm-roberta" in found["roberta"]["types"]
    assert found["bert"]["spaces"]["qk"] == "linear"
    assert "roberta" in run("families").stdout


def test_canonical(ask: Any, tmp_path: Path) -> None:
    source = folder(tmp_path / "vit", "ViTForImageClassification")
    found = ask("canonical", source, "-o", tmp_path / "out")
    assert found.keys() == {"output", "max_output_difference", "notes", "seconds", "peak_memory"}
    assert ask("verify", source, tmp_path / "out")["same"]
    ask("canonical", tmp_path / "out", "-o", tmp_path / "again")
    assert ask("distance", tmp_path / "out", tmp_path / "again")["relative"] < 1e-6


def test_quiet_prints_nothing(run: Any, a: Path, b: Path, tmp_path: Path) -> None:
    five = folder(tmp_path / "five", num_labels=5)  # gives merge a note to keep to itself
    for words in (
        ("match", b, a, "-o", tmp_path / "1"), ("merge", a, five, "-o", tmp_path / "2"),
        ("canonical", a, "-o", tmp_path / "3"), ("verify", a, a),
    ):  # fmt: skip
        result = run(*words, "--quiet")
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_without_json_people_read_stdout(run: Any, a: Path, b: Path, tmp_path: Path) -> None:
    result = run("match", b, a, "-o", tmp_path / "1")
    assert str(tmp_path / "1") in result.stdout and "->" in result.stdout
    result = run("merge", a, b, "-o", tmp_path / "2", "--anchor", 0)
    assert str(b) in result.stdout and str(tmp_path / "2") in result.stdout


# --- the program as a whole --------------------------------------------------------------------------------------


def test_in_a_process_of_its_own(a: Path, b: Path, tmp_path: Path) -> None:
    """Nothing that libraries print reaches stdout, and stderr has no warnings of theirs."""
    program = "import sys; from onebasin.cli import app; app(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, "match", b, a, "-o", tmp_path / "out", "--json"],
        capture_output=True, text=True, check=True, env=_environment(),
    )  # fmt: skip
    assert json.loads(done.stdout).keys() >= MATCHED
    assert "arning" not in done.stderr and "Loading" not in done.stderr
    bare = "import onebasin.cli, onebasin, sys; print({'torch', 'transformers'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", bare], text=True, env=_environment()) == "set()\n"


def test_jobs_are_there_before_what_runs_models() -> None:
    """The classes of models, and solvers of scipy, are imported by what needs them."""
    program = "import onebasin.jobs.match, onebasin.jobs.merge, sys; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", program], text=True, env=_environment()).split()
    assert "transformers" in modules and not {"transformers.modeling_utils", "scipy"} & set(modules)


def _environment() -> dict[str, str]:
    import os

    ours = {"TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"}  # set by this process, not by the user
    root = str(Path(__file__).parents[2])
    return {**{key: value for key, value in os.environ.items() if key not in ours}, "PYTHONPATH": root}


def test_help_and_version(run: Any) -> None:
    from onebasin.data import TASKS
    from onebasin.fusion import AVERAGES
    from onebasin.symmetry import LEVELS

    assert run("--version").stdout == f"{onebasin.__version__}\n"
    commands = "inspect check match merge verify distance canonical barrier families demo"
    for command in commands.split():
        assert command in run("--help").stdout
        assert "--json" in run(command, "--help").stdout
    assert ", ".join(LEVELS) == common.LEVELS
    assert ", ".join(AVERAGES) == common.AVERAGES
    assert ", ".join(TASKS) == common.TASKS
    assert set(onebasin.__all__) <= set(dir(onebasin)) and all(hasattr(onebasin, name) for name in onebasin.__all__)
    assert not hasattr(onebasin, "no_such_name")


@pytest.mark.parametrize("name", ["workers", "family", "device", "precision", "rescale"])
def test_an_option_says_what_its_setting_says(name: str) -> None:
    said = next(one.metadata["help"] for one in fields(onebasin.Options) if one.name == name)
    assert get_args(getattr(common, name.title()))[1].help == said


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from onebasin.cli import app\n"
        "for words in sys.argv[1:]:\n"
        "    app([*words.split(), '--help'], standalone_mode=False)\n"
        "    print('of', words, *sys.modules)"
    )
    names = [name for name, command in typer.main.get_command(app).commands.items() if not hasattr(command, "commands")]
    assert {*LATE, "verify"} < set(names)
    asked = ["", *names, "study levels"]
    printed = subprocess.check_output([sys.executable, "-c", program, *asked], text=True, env=_environment())
    imported = [line.split() for line in printed.splitlines() if line.startswith("of ") and " onebasin.cli " in line]
    assert len(imported) == len(asked)
    for words, modules in zip(asked, imported, strict=True):
        assert not {"torch", "transformers", "numpy"} & set(modules), words


@pytest.mark.parametrize("name", LATE)
def test_help_that_was_written_down_is_what_the_command_says(name: str, run: Any) -> None:
    assert LATE[name] == described(name)
    assert run(name, "A", "-o", "B", "--help").stdout == run(name, "--help").stdout != ""


@pytest.mark.parametrize("word", ["--match", "--symmetry", "--level"])
def test_a_level_has_one_name_and_two_others(
    ask: Any, refused: Any, a: Path, b: Path, tmp_path: Path, word: str
) -> None:
    assert ask("match", a, b, "-o", tmp_path / "matched", word, "permutation")["symmetry"] == "permutation"
    assert ask("merge", a, b, "-o", tmp_path / "merged", word, "permutation")["match"] == "permutation"
    assert ask("check", a, b, word, "full")["symmetry"] == "full"
    assert onebasin.merge([a, b], **{word[2:]: "permutation"}, verdict=False)["match"] == "permutation"
    assert onebasin.match(a, b, **{word[2:]: "permutation"})["symmetry"] == "permutation"
    with pytest.raises(ValueError, match="two names for one argument"):
        onebasin.merge([a, b], match="paper", **{"level" if word == "--symmetry" else "symmetry": "full"})


def test_help_has_sections_and_choices(run: Any) -> None:
    short, long = run("merge", "-h"), run("merge", "--help")
    assert short.exit_code == 0 and short.stdout == long.stdout
    for words in ("\nMatching:\n", "\nData:\n", "\nSettings of methods:\n", "weights|activations|learned", "--budget"):
        assert words in short.stdout
    assert short.stdout.index("--budget") < short.stdout.index("\nData:\n")


def test_methods_of_mergekit_need_no_file(ask: Any, refused: Any, a: Path, b: Path, tmp_path: Path) -> None:
    pytest.importorskip("mergekit")
    file = tmp_path / "ties.yml"
    file.write_text(f"merge_method: ties\nbase_model: {a}\nparameters: {{density: 0.5}}\n"
                    f"models:\n- {{model: {a}, parameters: {{weight: 1}}}}\n"
                    f"- {{model: {b}, parameters: {{weight: 1}}}}\n")  # fmt: skip
    ask("merge", "--config", file, "-o", tmp_path / "by-file")
    found = ask("merge", a, b, "-o", tmp_path / "by-words", "--method", "ties", "--base", a, "--set", "density=0.5",
                judged=True)  # fmt: skip
    assert found["method"] == "ties" and found["verdict"]["predictions"] > 0
    first, second = weights(tmp_path / "by-file"), weights(tmp_path / "by-words")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert "ties needs a base model: --base MODEL" in refused("merge", a, b, "-o", tmp_path / "no", "--method", "ties")
    assert "needs the parameter 't': --set t=NUMBER" in refused("merge", a, b, "-o", tmp_path / "no", "--method",
                                                               "nearswap", "--base", a)  # fmt: skip
    assert ask("merge", a, b, "-o", tmp_path / "nuslerp", "--method", "nuslerp")["method"] == "nuslerp"
    file.write_text(f"merge_method: nuslerp\nmodels: [{{model: {a}}}, {{model: {b}}}]\n")
    assert "needs the parameter 'weight'" in refused("merge", "--config", file, "-o", tmp_path / "no")
    assert f"is given as --config {file}" in refused("merge", file, "-o", tmp_path / "no")
    with pytest.raises(ValueError, match="one of mergekit's with onebasin"):
        onebasin.merge([a, b], method="ties")
    assert "did you mean 'ties'?" in refused("merge", a, b, "-o", tmp_path / "no", "--method", "tiess")
    assert "NAME=VALUE" in refused("merge", a, b, "-o", tmp_path / "no", "--method", "ties", "--set", "density")
    assert "mergekit" in refused("merge", a, b, "-o", tmp_path / "no", "--base", a)
    assert "--budget cannot be combined with" in refused("merge", a, b, "-o", tmp_path / "no", "--method", "ties",
                                                  "--budget", "5m")  # fmt: skip


@pytest.mark.parametrize(
    "option, wrong, meant",
    [("--match", "ful", "full"), ("--quality", "bets", "best"), ("--dtype", "flaot32", "float32"),
     ("--rescale", "jiont", "joint"), ("--parts", "fnn", "ffn"), ("--verify", "tensor", "tensors"),
     ("--precision", "float46", "float64"), ("--task", "image-clasification", "image-classification")],
)  # fmt: skip
def test_a_wrong_word_is_answered_with_the_nearest(
    refused: Any, a: Path, b: Path, data: Path, tmp_path: Path, option: str, wrong: str, meant: str
) -> None:
    words: tuple[object, ...] = ("merge", a, b, "-o", tmp_path / "out", option, wrong)
    if option == "--task":
        words = ("evaluate", a, "--data", data, option, wrong)
    said = refused(*words)
    assert f"'{wrong}'" in said and "choose from " in said and said.endswith(f"did you mean '{meant}'?")
    if option == "--match":
        for command in (("inspect", a), ("check", a, b), ("match", a, b, "-o", tmp_path / "out")):
            assert refused(*command, option, wrong).endswith(f"did you mean '{meant}'?")


@pytest.mark.parametrize(
    "typed, completed",
    [("merge --match f", ["full"]), ("merge --quality b", ["balanced", "best"]), ("match --rescale a", ["after"]),
     ("match --parts ffn,s", ["ffn,stream"]), ("canonical --verify t", ["tensors"]), ("refine --dtype b", ["bfloat16"]),
     ("inspect --level i", ["invertible"]), ("evaluate --task c", ["causal-lm"]), ("barrier --match n", ["none"])],
)  # fmt: skip
def test_the_shell_completes_words(typed: str, completed: list[str]) -> None:
    environment = {"COMP_WORDS": f"onebasin {typed}", "COMP_CWORD": "3", "_ONEBASIN_COMPLETE": "complete_bash"}
    assert CliRunner().invoke(app, [], env=environment, prog_name="onebasin").stdout.split() == completed


def test_help_of_merge_begins_with_what_most_people_need(run: Any) -> None:
    """Ten options, then the others in their sections; none is lost."""
    text = run("merge", "--help").stdout
    first, rest = text.split("\nOptions:\n")[1].split("\nMore options:\n")
    named = re.findall(r"^  (?:-\w, )?(--[\w-]+)", first, re.MULTILINE)
    assert named == ["--output", "--data", "--budget", "--method", "--match", "--weights", "--base", "--require",
                     "--report", "--overwrite"]  # fmt: skip
    assert all(option in rest for option in ("--config", "--soft", "--samples", "--device", "--json"))
