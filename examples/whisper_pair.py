# SPDX-License-Identifier: Apache-2.0
"""Merge Whisper tiny.en and Whisper tiny, which were trained independently, and count the words they get wrong.

    apt-get install espeak-ng
    pip install onnx
    python examples/whisper_pair.py -o whisper

espeak-ng reads the sentences in `speech`: those of `evaluation.txt` are counted, those of `calibration.txt` (or any
text) are calibration data. Where the weights come from is in `whisper_folders.py`; how two vocabularies meet stands
here. All else is `onebasin`'s.

tiny is the anchor. tiny.en takes on its vocabulary: tokens that both have keep their rows, and take part in matching
and merging; the rows of all others are the anchor's in the merged model, too. The tokens that name the language and
the task, which stand before each of tiny's texts, tiny.en has but never saw: it takes them for <|notimestamps|>, which
stands before its own. What was counted is kept in `results.json`, and not counted again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transcripts import transcribe, word_error_rate
from transformers import AutoTokenizer
from whisper_folders import whisper_folders

import onebasin
from onebasin.data import load_model, speech
from onebasin.data.files import read_rows, read_text
from onebasin.models.preflight import tokens

SENTENCES = Path(__file__).with_name("speech")
PROMPT = dict.fromkeys(("<|en|>", "<|transcribe|>"), "<|notimestamps|>")
TABLE = "model.decoder.embed_tokens.weight"


# --- vocabularies --------------------------------------------------------------------------------------------


def in_vocabulary(source: Path, anchor: Path, output: Path) -> list[int]:
    """The source with the anchor's vocabulary, written to `output`; returns the ids of tokens that it does not have.

    These get the mean of all rows, which says nothing; `fill` gives them something to say.
    """
    shutil.copytree(anchor, output, dirs_exist_ok=True)
    own = {token: id_ for id_, token in (tokens(source) or {}).items()}
    wanted = tokens(anchor) or {}
    weights = load_file(source / "model.safetensors")
    table = weights[TABLE]
    missing = [id_ for id_, token in wanted.items() if token not in own]
    rows = table.mean(0).repeat(max(wanted) + 1, 1)
    shared = [id_ for id_ in wanted if wanted[id_] in own]
    rows[shared] = table[[own[PROMPT.get(wanted[id_], wanted[id_])] for id_ in shared]]
    weights[TABLE] = rows
    save_file(weights, output / "model.safetensors", {"format": "pt"})
    return missing


def fill(folder: Path, anchor: Path, missing: list[int]) -> None:
    """Give the model in `folder` the anchor's rows of tokens that it does not have."""
    weights, others = (load_file(place / "model.safetensors") for place in (folder, anchor))
    for name in (TABLE, "proj_out.weight"):
        if name in weights:
            weights[name][missing] = others[name][missing]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


# --- speech --------------------------------------------------------------------------------------------------


def read_aloud(passages: list[str], folder: Path) -> Path:
    """The passages as espeak-ng reads them: WAV files, and a file of rows for the task `speech-recognition`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, passage in enumerate(passages):
        name = f"{number:04}.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-w", str(folder / name), passage], check=True)
        rows.append(json.dumps({"audio": name, "text": f" {passage}"}))  # Whisper's texts begin with a space
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    return folder / "rows.jsonl"


def passages(text: str, words: int) -> list[str]:
    """Whole lines, joined until they have so many words."""
    found = [""]
    for line in filter(None, map(str.strip, text.split("\n"))):
        if len(found[-1].split()) >= words:
            found.append("")
        found[-1] = f"{found[-1]} {line}".strip()
    return found


def errors_of(folder: Path, rows: Path) -> float:
    """What the model makes of the recordings."""
    model, tokenizer = load_model(folder, "speech-recognition"), AutoTokenizer.from_pretrained(folder)
    *prompt, end = tokenizer("")["input_ids"]
    said = read_rows(rows, ("audio", "text"))
    heard = speech.features(folder, [rows.parent / row["audio"] for row in said])
    written = [tokenizer.decode(ids) for ids in transcribe(model, heard, prompt, end)]
    return word_error_rate([row["text"] for row in said], written)


# --- the pair ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("whisper"))
    parser.add_argument("--text", type=Path, default=SENTENCES / "calibration.txt", help="what is read for calibration")
    parser.add_argument("--samples", type=int, default=16, help="calibration recordings, at most")
    parser.add_argument("--levels", nargs="+", default=["none", "permutation", "paper", "full"])
    given = parser.parse_args()
    work: Path = given.output
    work.mkdir(parents=True, exist_ok=True)

    english, tiny = whisper_folders(work)
    source = work / "tiny.en-in-tiny"
    missing = in_vocabulary(english, tiny, source)
    print(f"{len(missing)} tokens of tiny are not in tiny.en")
    sentences = read_text(SENTENCES / "evaluation.txt").strip().split("\n")
    evaluation = read_aloud(sentences, work / "evaluation")
    calibration = read_aloud(passages(read_text(given.text), 40)[: given.samples], work / "calibration")

    record = work / "results.json"
    counted: dict[str, list[Any]] = json.loads(record.read_text("utf-8")) if record.is_file() else {}

    def show(name: str, folder: Path, more: str = "") -> None:
        if name not in counted:
            counted[name] = [errors_of(folder, evaluation), more]
            record.write_text(json.dumps(counted, indent=1), "utf-8")
        rate, more = counted[name]
        print(f"{name:<44} word error rate {rate:6.3f}  {more}", flush=True)

    for folder in (english, tiny, source):
        show(folder.name, folder)
    data: dict[str, Any] = {"data": str(calibration), "task": "speech-recognition", "samples": given.samples}
    for level in given.levels:
        for how in ("weights", "activations")[: 1 if level in ("none", "paper") else 2]:
            place, anchor, more = work / f"{level}-{how}", tiny, ""
            names = {method: f"{method}, matched: {level}, by {how}" for method in ("average", "progressive")}
            wanted = not counted.keys() >= set(names.values())
            if wanted and level == "none":
                shutil.copytree(source, place, dirs_exist_ok=True)
            elif wanted:
                options = data if how == "activations" else {}
                found = onebasin.match(source, tiny, place, match=level, match_with=how, overwrite=True, **options)
                anchor = Path(found.get("anchor_output", tiny))
                more = f"distance {found['distance_before']:.1f} -> {found['distance_after']:.1f}"
            for method, name in names.items():
                merged = work / f"{level}-{how}-{method}"
                if name not in counted:
                    fill(place, anchor, missing)
                    options = data if method == "progressive" else {}
                    onebasin.merge(
                        [anchor, place], merged, match="none", anchor=0, method=method, overwrite=True, **options
                    )
                show(name, merged, more)


if __name__ == "__main__":
    main()
