# SPDX-License-Identifier: Apache-2.0
"""What is published names no path of this machine, and foreign words in it stay words."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from onebasin.jobs.refine import _card
from onebasin.models import model_card, provenance
from onebasin.models.published import block, code, prose, public_name, without_paths, words

HOSTILE = [
    "a`b", "``", "` x", "x\n# heading", "x\n\n```\n<script>alert(1)</script>", "```", "<img src=x onerror=alert(1)>",
    "[text](javascript:alert(1))", "![](http://x/y.png)", "a|b", "**bold**", "_it_", "&lt;", "~~x~~", "a\\", "\\`",
    "\x1b[31mred", "\u2028x", "\udcff", "---", "- x", "$x$", "🙂",
]  # fmt: skip


def rendered(text: str) -> str:
    return str(MarkdownIt("gfm-like", {"linkify": False}).render(text))


def shown(text: str) -> str:
    """What a reader sees of a foreign word: no line breaks, nothing that cannot be printed."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


@pytest.mark.parametrize("name", HOSTILE)
def test_foreign_words_are_no_markup(name: str) -> None:
    for made, tag in ((code(name), "code"), (prose(name), "")):
        page = rendered(f"x {made} x\n")
        start, end = (f"<p>x <{tag}>", f"</{tag}> x</p>\n") if tag else ("<p>x ", " x</p>\n")
        assert page.startswith(start) and page.endswith(end), page
        inner = page[len(start) : -len(end)]
        assert "<" not in inner and " ".join(unescape(inner).split()) == shown(name)
    page = rendered("\n".join(["x", "", *block(name, "sh"), "", "x"]))
    assert page.count("<pre>") == 1 and page.count("<p>x</p>") == 2 and "<script>" not in page


@pytest.mark.parametrize("name", HOSTILE)
def test_cards_hold_any_name(name: str, tmp_path: Path) -> None:
    """The structure of the page is that of a page with plain names, wherever a name stands in it."""

    def pages(name: str) -> list[str]:
        model: Any = SimpleNamespace(name=name, folder=tmp_path)
        command, result = f"onebasin match {name}", {"output": name, "notes": [f"copied from {name}"]}
        losses = {"step": 1, "loss_before": 1.0, "loss_after": 0.5}
        refined = {**losses, "control": {"model": name, **losses}}
        return [
            model_card([model, model], command=command, result=result),
            model_card([model, model], command=command, result={**result, "method": "average"}),
            _card(name, model, [model], refined, command),
        ]

    def body(page: str) -> str:
        return page.split("\n---\n", 1)[1]

    def structure(page: str) -> list[str]:
        return [token.type for token in MarkdownIt("gfm-like", {"linkify": False}).parse(body(page))]

    for page, usual in zip(pages(name), pages("name"), strict=True):
        assert structure(page) == structure(usual)
        assert "<img" not in rendered(body(page)) and "<script" not in rendered(body(page))
        models = ModelCard(page).data.base_model
        assert [shown(model) for model in models] == [shown(public_name(name))] * 2
        page.encode("utf-8")


def test_paths_become_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "my models").mkdir()
    cache = tmp_path / "hub" / "models--owner--name" / "snapshots" / "abc"
    for place, name in {
        "/x/y/a": "a", "/x/y/a/": "a", "./a": "a", "../a": "a", "~/a": "a", "models/a": "a", "models/new": "new",
        ".": tmp_path.name, "/x/b/model.safetensors": "b", "/x/b/epoch-3.safetensors": "epoch-3.safetensors",
        str(cache): "owner/name@abc", "/x/a+/y/lora": "a+lora", "owner/name": "owner/name",
        "owner/name@v1": "owner/name@v1", "a": "a", "builtin:digits": "builtin:digits",
        "https://huggingface.co/owner/name": "https://huggingface.co/owner/name",
    }.items():  # fmt: skip
        assert public_name(place) == name
    assert words("--data=/x/a.csv,b/c.csv,/y/d e.csv#train") == "--data=a.csv,b/c.csv,d e.csv#train"
    known = [str(tmp_path / "my models" / "a"), "models/a", "b"]
    for text, found in {
        f"copied from model 0 ({known[0]}), since": "copied from model 0 (a), since",
        "models/a: x, and mymodels/a": "models/a: x, and mymodels/a".replace("models/a: x", "a: x"),
        f"see {known[0]}/config.json": "see a/config.json",
        "written to '/x/y/z.json'": "written to 'z.json'",
        "attention/ffn, 1/2 of them": "attention/ffn, 1/2 of them",
        known[0]: "a",
        "https://huggingface.co/x/y/z": "https://huggingface.co/x/y/z",
    }.items():
        assert without_paths(text, known) == found


def test_the_record_and_the_card_hold_no_path(tmp_path: Path) -> None:
    place = tmp_path / "a home" / "models" / "a"
    place.mkdir(parents=True)
    model: Any = SimpleNamespace(name=str(place), folder=place)
    result = {"output": str(place), "anchor": str(place), "settings": {"statistics": [str(place / "s")]},
              "notes": [f"copied from model 0 ({place}), since the models differ", f"'{place / 'x.txt'}' is skipped"],
              "quality": {"candidates": {str(place): 1}}}  # fmt: skip
    options = {"data": f"{place}/d.csv,{place}/e.csv", "checkpoint": place / "c", "family": str(place / "t.txt")}
    command = f"onebasin match '{place}' other/model"
    facts = provenance([model], command=command, options=options, result=result, sha256=[{}])
    card = model_card([model], command=command, result=result)
    for text in (json.dumps(facts), card):
        assert "home" not in text and str(tmp_path) not in text and "models/" not in text, text
    assert facts["options"] == {"data": "d.csv,e.csv", "checkpoint": "c", "family": "t.txt"}
    assert facts["inputs"][0]["model"] == "a" and "other/model" in facts["command"]
