# SPDX-License-Identifier: Apache-2.0
"""Inputs that need no dataset: the models make them.

    causal language models   write: each token is drawn from the model's own prediction
    masked language models   write by Gibbs sampling: all is hidden first, then tokens are drawn anew, some at a time;
                             without a tokenizer, guesses come first: it is not known which tokens they can predict
    encoder-decoders         answer: the decoder writes to a random source
    image classifiers        look at textures, and imagine: textures are changed until the models see a class
    all others               look at textures, or read lines of the standard library's documentation (random tokens
                             where there is no tokenizer)

What models write lies where they were trained, so it tells nearly as much of them as their data do. What they imagine
tells less, and textures the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import MoEModelOutput

from onebasin.engine import Means
from onebasin.models import Model
from onebasin.running import loaded_model
from onebasin.running.classes import quietly
from onebasin.running.probes import POSITIONS
from onebasin.running.trace import Batch
from onebasin.running.valid_inputs import Inputs, first_that_runs
from onebasin.running.verification import output_of
from onebasin.settings import Reading

from .batches import TOKENIZER_FILES
from .masked_text import language_config, longest, masked_text
from .text import stdlib_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WRITTEN_AT_ONCE = 256  # sequences
LENGTH, GUESSED_LENGTH = 64, 128  # tokens, where sequences are written by many passes over them, and of guessed ones
FEWEST_WORDS = 5  # of a line that is taken for written language
DECODED = 32  # tokens that a decoder writes
CACHES = ("past_key_values", "cache_params")  # outputs that a causal model takes back
STEPS, SURE, STRIDE = 4, 20, 0.1  # steps until models see classes in pictures, until they are sure; their length
JITTER = 0.5  # standard deviation of noise on such pictures, whose pixels lie in [-1, 1]: what it hides does not count
SEVERAL = 32  # examples in a batch
WORDS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}  # inputs of an encoder that reads text


def made(
    models: Sequence[Model],
    count: int,
    how: Reading | None = None,
    *,
    seed: int = 0,
    batch: int | None = None,
    means: Means | None = None,
    steps: int = STEPS,
) -> list[Batch]:
    """Return inputs that models of one kind make themselves, for measuring on.

    Args:
        models: whose inputs they are; they take turns in writing.
        count: of examples.
        how: the context (default: what the models take, at most 512, or 64 where writing takes many passes), and what
            is masked (default: by the tokenizer's mask, or see `hidden_token`).
        seed: of all that is drawn.
        batch: examples in a batch (default: 32, fewer where these made less than eight batches).
        means: the device of the arithmetic.
        steps: towards pictures that the models see a class in. Many pictures after few steps tell more than fewer that
            the models are sure of (measured: docs/results/plain-command.md).

    Returns:
        Batches of what the models take; those of masked language models have `labels`.

    Raises:
        ValueError: for models that do not take each other's inputs.
    """
    how, device, batch = how or Reading(), (means or Means()).device, batch or max(1, min(SEVERAL, count // 8))
    stock = [loaded_model(model, device=device).model for model in models]
    if writes(stock[0]):
        return self_generated(stock, count, how.context, seed, batch)
    generator = torch.Generator().manual_seed(seed)
    tokenizer = _tokenizer(models[0].origin.folder)
    if type(stock[0]).__name__.endswith("MaskedLM"):
        length = how.context or longest(stock, usual_length(tokenizer is None))
        return masked_text(stock, count, length, how, tokenizer, generator, batch)
    found = list[Batch]()
    answer = partial(output_of, stock[0])
    recipe, *_ = first_that_runs(stock[0], stock[-1], 1, how.context or LENGTH, seed, answer)
    for number, start in enumerate(range(0, count, batch)):
        some = min(batch, count - start)
        given = recipe(some, seed + number)
        if tokenizer is not None and _readable(given):
            given |= sentences(tokenizer, some, given["input_ids"].shape[1], generator)
        for name in ("pixel_values", "input_features"):
            if name in given:
                given[name] = pictures(given[name].shape, generator).to(given[name])
        if "decoder_input_ids" in given and hasattr(stock[0], "get_encoder"):
            with suppress(Exception):  # a decoder that does not write token by token keeps random ones
                given["decoder_input_ids"] = decoded(stock[number % len(stock)], given, generator)
            given.pop("decoder_attention_mask", None)
        if given.keys() == {"pixel_values"}:
            given = imagined(stock, given, generator, steps)
        found.append({name: value.cpu() for name, value in given.items()})
    return found


def guessed(model: Model) -> bool:
    """Whether the inputs that a model makes begin from guesses. Without a tokenizer it is not known which tokens a
    masked language model was trained to predict, so its inputs may lie far from its training data."""
    names = model.config.get("architectures") or [""]
    return names[0].endswith("MaskedLM") and _tokenizer(model.origin.folder) is None


def reads_sentences(model: Model, given: Batch) -> bool:
    """Whether `made` gives a model sentences and nothing else, in place of random inputs: encoders with a tokenizer."""
    return _readable(given) and given.keys() <= WORDS and _tokenizer(model.origin.folder) is not None


def _readable(given: Batch) -> bool:
    """Whether sentences can stand in place of random tokens."""
    return given.keys() >= {"input_ids", "attention_mask"} and given["input_ids"].dim() == 2


def usual_length(guessed: bool) -> int:
    """Return how many tokens the texts have that models make in many passes. Guessed ones are longer, so that they
    repeat themselves far apart and show more positions (measured: docs/results/plain-command.md)."""
    return GUESSED_LENGTH if guessed else LENGTH


# --- text -------------------------------------------------------------------------------------------------------


def writes(model: PreTrainedModel) -> bool:
    """Whether a model is a causal language model, which its outputs show."""
    try:
        _refuse_not_causal(model)
    except ValueError:
        return False
    return True


@torch.no_grad()
def self_generated(
    models: Sequence[PreTrainedModel], count: int = 256, length: int | None = None, seed: int = 0, batch: int = 32
) -> list[Batch]:
    """Return sequences that causal language models write themselves, in batches {"input_ids": (batch, length)}.

    The first token is drawn uniformly from the vocabulary, all others from the model's own prediction at temperature
    1. The models take turns, so each writes its share of every batch; which sequences come out depends on the numbers
    below alone.

    Args:
        models: The writers.
        count: How many sequences.
        length: In tokens (default: what the models take, at most 512).
        seed: Of the draws.
        batch: Sequences in a batch.

    Raises:
        ValueError: A model is no causal language model, or the models' vocabularies differ.
    """
    most = longest(models, 512)
    length = most if length is None else length
    if count < 1 or batch < 1 or not 2 <= length <= most:
        raise ValueError(f"self-generated data need count and batch of 1 or more, and a length from 2 to {most}")
    for model in models:
        _refuse_not_causal(model)
    vocabulary = language_config(models[0]).vocab_size
    if any(language_config(model).vocab_size != vocabulary for model in models):
        raise ValueError("the models have different vocabularies, so they cannot read what the other writes")
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(vocabulary, (count, 1), generator=generator)
    whole = torch.empty(count, length, dtype=torch.long)
    for turn, model in enumerate(models):
        rows = torch.arange(turn, count, len(models))
        for some in torch.split(rows, WRITTEN_AT_ONCE):
            whole[some] = _continued(model, first[some], length, generator)
    return [{"input_ids": ids} for ids in torch.split(whole, batch)]


def _continued(model: PreTrainedModel, ids: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Return sequences to which a model has added tokens, (examples, length). ids: (examples, 1)."""
    output: Any = None
    while ids.shape[1] < length:
        cache = {name: output[name] for name in CACHES if output is not None and output.get(name) is not None}
        read = ids[:, -1:] if cache else ids  # all anew, if the class keeps nothing
        try:
            output = model(input_ids=read.to(model.device), **cache, use_cache=True)
        except Exception:  # it keeps something in another form
            output = model(input_ids=ids.to(model.device), use_cache=False)
        chances = output.logits[:, -1].float().softmax(-1).cpu()
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    return ids


def _refuse_not_causal(model: PreTrainedModel) -> None:
    """Raises ValueError unless the model predicts each token from those before it, and from nothing else."""
    kind = f"{type(model).__name__} writes no text of its own; give unlabelled data for it (a file, or a builtin set)"
    if model.main_input_name != "input_ids" or not model.can_generate():
        raise ValueError(kind)
    size = language_config(model).vocab_size
    pair = torch.tensor([[0, 0], [0, size - 1]], device=model.device)
    try:
        logits = getattr(model(input_ids=pair, use_cache=False), "logits", None)
    except Exception:  # it takes more than tokens, or these in another shape
        raise ValueError(kind) from None
    if logits is None or logits.shape != (2, 2, size) or not torch.allclose(logits[0, 0], logits[1, 0], atol=1e-4):
        raise ValueError(kind)


def _tokenizer(folder: Path) -> Any:
    """A folder's tokenizer; None where there is none that works."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # slow to load

    try:
        with quietly():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer("a", return_special_tokens_mask=True)
    except Exception:  # a tokenizer fails in its own way; then the models make do without
        return None
    return tokenizer


def sentences(tokenizer: Any, count: int, length: int, generator: torch.Generator) -> Batch:
    """Return lines of the Python standard library that hold a few words, mostly of its documentation, as a tokenizer
    reads them: what every machine has of written language."""
    chosen = torch.randint(len(_lines()), (count,), generator=generator).tolist()
    given = tokenizer([_lines()[i] for i in chosen], truncation=True, max_length=length, padding="max_length",
                      return_tensors="pt")  # fmt: skip
    return dict(given)


@lru_cache(maxsize=1)
def _lines() -> list[str]:
    lines = (line.strip() for line in stdlib_text().splitlines())
    return [line for line in lines if sum(word.isalpha() for word in line.split()) >= FEWEST_WORDS]


@torch.no_grad()
def decoded(model: PreTrainedModel, given: Batch, generator: torch.Generator) -> Tensor:
    """Return what a decoder writes to a source, (examples, tokens): each token is drawn from its own prediction."""
    source = {name: value for name, value in given.items() if not name.startswith("decoder")}
    config: Any = model.config
    stated = (getattr(each, "decoder_start_token_id", None) for each in (config, model.generation_config))
    start = next((token for token in stated if token is not None), 0)
    ids = torch.full_like(given["decoder_input_ids"][:, :1], start)
    encoded: dict[str, Any] = {}
    last = "encoder_last_hidden_state"
    most = min(getattr(config.get_text_config(decoder=True), name, None) or DECODED for name in POSITIONS)
    for _ in range(min(DECODED, most) - 1):
        how = {"decoder_input_ids": ids, "use_cache": False, "return_dict": True}
        try:
            output = model(**source, **encoded, **how)
        except Exception:  # the class needs more of its encoder than the last state: it encodes the source again
            if not encoded:
                raise
            last, encoded = "", {}
            output = model(**source, **how)
        if last in output:
            encoded = {"encoder_outputs": MoEModelOutput(last_hidden_state=output[last])}
        chances = output.logits[:, -1].float().softmax(-1).cpu()
        drawn = torch.multinomial(chances.flatten(0, -2), 1, generator=generator)
        ids = torch.cat([ids, drawn.view_as(ids[:, :1]).to(ids)], 1)
    return ids


# --- images and sounds --------------------------------------------------------------------------------------------


def pictures(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random textures of every coarseness, contrast and brightness, (examples, ..., height, width) in [-1, 1].

    The amplitude of frequency f is f^-a, with a drawn for each picture between 0 (noise) and 2 (clouds): natural images
    have about 1 (Field, 1987).
    """
    height, width = shape[-2:]
    one = (shape[0], *[1] * (len(shape) - 1))
    fall, contrast, light = (scale * torch.rand(one, generator=generator) + least
                             for scale, least in ((2, 0), (1.5, 0), (2, -1)))  # fmt: skip
    noise = torch.fft.rfft2(torch.randn(tuple(shape), generator=generator))
    down, across = torch.fft.fftfreq(height), torch.fft.rfftfreq(width)
    frequency = (down[:, None].square() + across.square()).sqrt().clamp_min(1 / max(height, width))
    found = torch.fft.irfft2(noise * frequency**-fall, s=(height, width))
    axes = tuple(range(1, found.dim()))
    found = (found - found.mean(axes, keepdim=True)) / found.std(axes, keepdim=True).clamp_min(1e-6)
    clamped: Tensor = (contrast * found + light).clamp(-1, 1)
    return clamped


def imagined(models: Sequence[PreTrainedModel], given: Inputs, generator: torch.Generator, steps: int) -> Inputs:
    """Return pictures that all models see a class in, which is drawn for each: textures after some steps of Adam on the
    models' cross-entropies (as in DeepInversion, Yin et al., 2020, without its prior). What is no classifier keeps the
    textures."""
    pixels = given["pixel_values"].detach().clone().requires_grad_()
    logits = getattr(models[0](pixel_values=pixels[:1]), "logits", None)
    if logits is None or logits.dim() != 2 or logits.shape[-1] < 2:
        return given
    classes = torch.randint(logits.shape[-1], (len(pixels),), generator=generator).to(pixels.device)
    descent = torch.optim.Adam([pixels], lr=STRIDE)
    for _ in range(steps):
        descent.zero_grad()
        shown = pixels + JITTER * torch.randn(pixels.shape, generator=generator).to(pixels)
        losses = [cross_entropy(model(pixel_values=shown).logits, classes) for model in models]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        descent.step()
        with torch.no_grad():
            pixels.clamp_(-1, 1)
    return {"pixel_values": pixels.detach() + JITTER * torch.randn(pixels.shape, generator=generator).to(pixels)}
