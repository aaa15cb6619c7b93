# SPDX-License-Identifier: Apache-2.0
"""Studies that a YAML file describes: their numbers are those of the single steps, and their report stands alone."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import onebasin
from onebasin.data import evaluate, load_model, load_task
from onebasin.landscape import interpolate
from onebasin.studies.config import read_config
from onebasin.studies.demo import PROCESSOR, train
from onebasin.studies.figures import DISTANCES
from onebasin.studies.results import Results, read_all
from onebasin.studies.run import STUDIES, Study, run_study

pytestmark = pytest.mark.usefixtures("three_sweeps")

DIGITS = {"name": "digits", "test": "builtin:digits#test", "validation": "builtin:digits#train"}


@pytest.fixture(scope="module")
def vits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ViTs that saw the digits once: bad models, but any do for arithmetic."""
    folder = tmp_path_factory.mktemp("vits")
    for seed in range(3):
        train(seed, epochs=1).save_pretrained(folder / str(seed))
        (folder / str(seed) / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def study_file(folder: Path, vits: Path, models: int, **more: object) -> Path:
    asked = {
        "task": "image-classification",
        "models": [str(vits / str(i)) for i in range(models)],
        "corpora": [{**DIGITS, "calibration": "builtin:digits#train"}],
        "methods": ["average"],
        "limit": 60,
        "samples": 32,
        "points": 3,
    }
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump({**asked, **more}, sort_keys=False))
    return file


def run(name: str, tmp_path: Path, vits: Path, models: int = 2, **more: object) -> Results:
    return run_study(Study.read(name, study_file(tmp_path, vits, models, **more)), tmp_path / "out", overwrite=True)


def test_the_row_without_matching_is_the_plain_average(tmp_path: Path, vits: Path) -> None:
    found = run("fusion-table", tmp_path, vits, matchings={"no match": None})
    task = load_task("image-classification", "builtin:digits", vits / "0", split="test", limit=60)
    ends = [load_model(vits / str(i), "image-classification") for i in (0, 1)]
    own = [evaluate(end, task).accuracy for end in ends]
    ends[0].load_state_dict(interpolate(ends[0].state_dict(), ends[1].state_dict(), 0.5))
    rows = {row[0]: row[1] for row in found.tables[0].rows}
    assert rows["average"][0] == pytest.approx(evaluate(ends[0], task).accuracy)
    assert rows["the end models, each on its own"][0] == pytest.approx(sum(own) / 2)


def test_auto_layers_are_the_best_on_validation_data(tmp_path: Path, vits: Path) -> None:
    one = {"symmetry": "paper", "parts": ["ffn"]}
    chosen = {"auto": {**one, "layers": "auto"}, **{str(i): {**one, "layers": [i]} for i in range(3)}, "all": one}
    # Validation and test data are the same here, so the best layer shows in the table.
    corpora = [{**DIGITS, "validation": DIGITS["test"]}]
    found = run("fusion-table", tmp_path, vits, matchings=chosen, corpora=corpora, metric="loss")
    row = dict(zip(found.tables[0].columns, found.tables[0].rows[0], strict=True))
    assert row["auto"] == min(row[name] for name in ("0", "1", "2", "all"))


@pytest.mark.parametrize("models", [2, 3])
def test_out_of_domain_all_models_are_merged(tmp_path: Path, vits: Path, models: int) -> None:
    beyond = {"name": "other", "test": "builtin:digits#train"}
    matchings = {"no match": None, "match": {"symmetry": "paper"}}
    found = run("fusion-table", tmp_path, vits, models, matchings=matchings, out_of_domain=beyond, metric="loss")
    rows = {row[0]: dict(zip(found.tables[-1].columns, row, strict=True)) for row in found.tables[-1].rows}
    folders = [vits / str(i) for i in range(models)]
    task = load_task("image-classification", "builtin:digits", folders[0], split="train", limit=60)
    for name, level in (("no match", "none"), ("match", "paper")):
        merged = onebasin.merge(folders, match=level, anchor=0, verify=False, verdict=False)["model"]
        assert rows["average"][name][0] == pytest.approx(evaluate(merged, task).loss, rel=1e-4)
    ends = [evaluate(load_model(folder, "image-classification"), task).loss for folder in folders]
    assert rows["the end models, mean"]["match"][0] == pytest.approx(sum(ends) / models)
    test = load_task("image-classification", "builtin:digits", folders[0], split="test", limit=60)
    plain = onebasin.merge(folders[:2], match="none", anchor=0, verify=False, verdict=False)["model"]
    assert found.tables[1].rows[0][2][0] == pytest.approx(evaluate(plain, test).loss, rel=1e-4)  # in its domain


def test_a_method_with_settings_is_that_merge(tmp_path: Path, vits: Path) -> None:
    """Two settings of one method are two rows, and `average` under another name is the average."""
    methods = {"plain": {"method": "average"}, "0.9": {"method": "regmean"}, "0": {"method": "regmean", "shrink": 0}}
    found = run("fusion-table", tmp_path, vits, matchings={"no match": None}, methods=methods, metric="loss")
    rows = {row[0]: row[1][0] for row in found.tables[0].rows}
    assert rows["0.9"] != rows["0"]
    models, data = [str(vits / "0"), str(vits / "1")], {"data": "builtin:digits", "samples": 32}
    task = load_task("image-classification", "builtin:digits", vits / "0", split="test", limit=60)
    for name, how in (("plain", {}), ("0", {"method": "regmean", "shrink": 0, **data})):
        merged = onebasin.merge(models, match="none", anchor=0, verify=False, verdict=False, **how)["model"]
        assert rows[name] == pytest.approx(evaluate(merged, task).loss, rel=1e-5)


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path, vits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after the first matching, it measures only the second, and finds what one run would have found."""
    file = study_file(tmp_path, vits, 2, matchings={"no match": None, "match": {"symmetry": "paper"}})
    said: list[str] = []

    def stop(what: str) -> None:
        said.append(what)
        if len(said) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(Study.read("distance", file), tmp_path / "stopped", tell=stop)
    assert not (tmp_path / "stopped" / "distance.json").exists()
    again: list[str] = []
    found = run_study(Study.read("distance", file), tmp_path / "stopped", resume=True, tell=again.append)
    assert again == said[1:] and len(again) == 1
    assert found.tables == run_study(Study.read("distance", file), tmp_path / "whole").tables
    assert not list((tmp_path / "stopped").glob(".*"))


def test_a_study_that_ends_in_an_error_goes_on_where_it_was(tmp_path: Path, vits: Path) -> None:
    """The third model is damaged: the pair without it is kept, and not measured again once the model is whole."""
    models = shutil.copytree(vits, tmp_path / "models")
    file = study_file(tmp_path, models, 3, matchings={"no match": None})
    damaged = models / "2" / "model.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-4] + bytes.fromhex("0000c07f"))  # NaN, which only reading the numbers shows
    with pytest.raises(ValueError, match=r"NaN.* are kept: continue with --resume") as error:
        run_study(Study.read("distance", file), tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out" / "distance.json").exists()
    damaged.write_bytes(whole)
    said: list[str] = []
    found = run_study(Study.read("distance", file), tmp_path / "out", resume=True, tell=said.append)
    assert len(said) == 2 and all(str(models / "2") in line for line in said)
    assert found.tables == run_study(Study.read("distance", file), tmp_path / "fresh").tables
    assert not list((tmp_path / "out").glob(".*"))


def test_some_of_the_methods_and_another_metric(tmp_path: Path, vits: Path) -> None:
    file = study_file(tmp_path, vits, 2, methods=["average", "regmean"], matchings={"no match": None})
    found = run_study(Study.read("ablation", file, ["regmean"], metric="loss"), tmp_path / "out")
    assert [row[0] for row in found.tables[0].rows] == ["regmean", "the end models, each on its own"]
    assert found.config["metric"] == "loss"
    with pytest.raises(ValueError, match="no method 'ot'; choose from average, regmean"):
        run_study(Study.read("ablation", file, ["ot"]), tmp_path / "no")


def test_the_level_of_a_matching_has_three_names(tmp_path: Path, vits: Path) -> None:
    file = study_file(tmp_path, vits, 2, matchings={name: {name: "full"} for name in ("match", "symmetry", "level")})
    assert list(read_config(file).matchings.values()) == [{"symmetry": "full"}] * 3
    for name in ("match", "symmetry", "level"):
        line = onebasin.barrier(vits / "0", vits / "1", "builtin:digits", points=2, limit=16, **{name: "permutation"})
        assert line.alignment is not None


def test_results_are_replaced_only_where_asked_for(tmp_path: Path, vits: Path) -> None:
    file = study_file(tmp_path, vits, 2, matchings={"no match": None})
    run_study(Study.read("distance", file), tmp_path / "out")
    with pytest.raises(ValueError, match=r"distance\.json' exists; choose another place or pass --overwrite"):
        run_study(Study.read("distance", file), tmp_path / "out")
    run_study(Study.read("distance", file), tmp_path / "out", overwrite=True)


def test_no_matching_moves_models_apart(tmp_path: Path, vits: Path) -> None:
    some = {name: way for name, way in DISTANCES.items() if name not in ("full", "invertible")}  # slow, and alike
    found = run("distance", tmp_path, vits, matchings=some)
    shares = {row[0]: row[3][0] for row in found.tables[0].rows}
    assert shares.pop("no match") == 1
    assert all(share < 1 for share in shares.values())
    assert shares["paper, joint"] <= shares["paper, rescaled after"] <= shares["paper"]
    plain = found.tables[0].rows[0][2][0]
    assert plain == pytest.approx(onebasin.distance(vits / "0", vits / "1").distance)


def test_a_plane_shows_the_models_where_they_are(tmp_path: Path, vits: Path) -> None:
    two = {"no match": None, "match": {"symmetry": "paper"}}
    found = run("landscape", tmp_path, vits, models=3, matchings=two, limit=20)
    lines, planes = found.charts
    assert {len(losses) for losses in lines.series.values()} == {3}
    a_to_b = onebasin.distance(vits / "0", vits / "1").distance
    assert planes.series["three models, as they are"]["marks"]["B"][0] == pytest.approx(a_to_b, rel=1e-4)


def test_two_models_have_lines_where_no_plane_holds_both_and_the_anchor(tmp_path: Path, vits: Path) -> None:
    """`full` writes the anchor in canonical form, too, so the models as they are lie in no plane with it."""
    found = run("landscape", tmp_path, vits, matchings={"no match": None, "match": {"symmetry": "full"}}, limit=20)
    assert [chart.name for chart in found.charts] == ["line"]
    assert [row[0] for row in found.tables[0].rows] == ["no match", "match"]


def test_models_as_they_are_have_a_line_and_a_plane(tmp_path: Path, vits: Path) -> None:
    found = run("landscape", tmp_path, vits, models=3, matchings={"no match": None}, limit=20)
    assert list(found.charts[0].series) == ["no match"]
    assert list(found.charts[1].series) == ["three models, as they are"]


def test_layers_matched_together_are_all_layers(tmp_path: Path, vits: Path) -> None:
    found = run("layers", tmp_path, vits, metric="loss")
    single, tail, head = ([row[1][0] for row in table.rows] for table in found.tables)
    assert tail[0] == head[0] and tail[-1] == head[-1]  # none, and all three
    assert single[0] == head[1] and single[-1] == tail[1]


def test_the_share_of_matching_is_its_time_over_that_of_the_merge(tmp_path: Path, vits: Path) -> None:
    found = run("runtime", tmp_path, vits)
    seconds = {row[0]: row[1] for row in found.tables[0].rows}
    share = found.tables[1].rows[0][1]
    assert share == pytest.approx(seconds["matching: paper"][0] / seconds["merging: average"][0])


class _Page(HTMLParser):
    """Whether tags nest, and what the page fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.sections: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetched += [value or "" for key, value in attrs if key == "src" or (tag == "link" and key == "href")]
        if tag == "section":
            self.sections.append(given["id"] or "")
        if tag not in ("meta", "link", "br", "hr", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_studies_of_one_folder_share_a_page_that_fetches_nothing(tmp_path: Path, vits: Path) -> None:
    two = {"no match": None, "match": {"symmetry": "paper"}}
    for name in ("distance", "ablation"):
        run(name, tmp_path, vits, matchings=two)
    page = _Page((tmp_path / "out" / "report.html").read_text("utf-8"))
    assert page.open == [] and page.sections == ["ablation", "distance"]
    assert all(place.startswith("data:") for place in page.fetched)
    assert [found.study for found in read_all(tmp_path / "out")] == ["ablation", "distance"]
    assert (tmp_path / "out" / "distance-share.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"methdos": ["average"]}, "unknown key 'methdos'; did you mean 'methods'?"),
        ({"models": ["a"]}, "models:"),
        ({"corpora": [DIGITS, DIGITS, DIGITS]}, "2 models need one corpus, or one each"),
        ({"corpora": [{**DIGITS, "tets": "x"}]}, "did you mean 'test'?"),
        ({"matchings": {"m": {"symetry": "full"}}}, "unknown setting 'symetry' of the matching 'm'; did you mean"),
        ({"matchings": {"m": {"match": "full", "level": "full"}}}, "match and level are two names for one argument"),
        ({"methods": {"ot": {"grounds": "acts"}}}, "unknown setting 'grounds' of the method 'ot'; did you mean"),
        ({"methods": {"soft": {"ground": "acts"}}}, "unknown method 'soft'; choose from average"),
        ({"methods": ["regmeen"]}, "unknown method 'regmeen'"),
    ],
)
def test_a_file_with_a_mistake_is_refused_in_one_sentence(
    tmp_path: Path, vits: Path, change: dict[str, object], said: str
) -> None:
    file = study_file(tmp_path, vits, 2)
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **change}))
    with pytest.raises(ValueError) as error:
        run_study(Study.read("distance", file), tmp_path / "out")
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_commands_are_the_studies() -> None:
    from onebasin.cli.study import app

    assert set(STUDIES) <= {str(command.name) for command in app.registered_commands}


def test_the_examples_are_studies() -> None:
    for file in (Path(__file__).parents[2] / "examples" / "studies").glob("*.yaml"):
        assert read_config(file).seeds
