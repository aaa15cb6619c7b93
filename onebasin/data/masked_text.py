# SPDX-License-Identifier: Apache-2.0
"""Text that masked language models write, by Gibbs sampling (Wang and Cho, 2019, BERT has a mouth, and it must speak).

All is hidden first, then tokens are drawn from the models' predictions, some at a time.

Without a tokenizer it is not known what the models were asked for: if they were trained to predict few kinds of tokens,
they fill in nothing else. So there are guesses, too. Those tokens that the models predict at all are drawn from their
predictions. In half of the places stand others, which are never hidden, drawn by a law of Zipf over their ranks. Such
texts repeat parts of themselves, as real ones do, so that models show what they copy. Of what the models write and of
guesses with several exponents, that is taken on which they agree the most, with each other and with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onebasin.engine import bfloat16_is_faster, in_bfloat16
from onebasin.running.input_shapes import longest_text
from onebasin.running.trace import Batch
from onebasin.settings import Reading

from .batches import IGNORED, masked, padded

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

AT_ONCE, TRIED_AT_ONCE = 32, 256  # sequences that are written, and tokens that are tried as the mask
REVEALED, RESAMPLED = 8, 4  # passes that write a hidden sequence, and that draw some of it anew
REDRAWN = 0.3  # share that is drawn anew in a pass where sequences begin with guesses
EXPONENTS = (1.5, 1.0, 2.0)  # of Zipf's law, among which the models choose; the first where that takes too long
ASKED = 0.1  # a token that the models predict with less than this share of an equal chance was never asked for
REPEATED = 16  # tokens in a part of a text that it repeats, in the mean
PROBES, SHORT = 64, 64  # sequences that they choose by, and their tokens; where fewer are made, passes are too slow
HIDDEN = 0.15  # share of tokens on which coherence is measured
FEASIBLE = 10**11  # tokens times parameters, up to which each token is tried as the mask


def masked_text(
    models: Sequence[PreTrainedModel],
    count: int,
    length: int,
    how: Reading,
    tokenizer: Any,
    generator: torch.Generator,
    batch: int,
) -> list[Batch]:
    """Return texts with hidden tokens.

    Args:
        models: who write; they take turns.
        count: of texts.
        length: of each, in tokens.
        how: what is masked; the mask token is that of the tokenizer by default, or see `hidden_token`.
        tokenizer: that of the models; None where there is none.
        generator: of the draws.
        batch: texts in a batch.

    Returns:
        Batches of `input_ids` and `labels`.
    """
    before, after, own = _framing(tokenizer)
    mask = how.mask_id if how.mask_id is not None else own
    mask = hidden_token(models, generator) if mask is None else mask
    free = torch.arange(len(before), length - len(after))
    device = models[0].device
    with in_bfloat16(device, bfloat16_is_faster(str(device))):  # precise enough to draw from
        if tokenizer is None:
            whole, asked = guessed_text(models, count, length, mask, generator)
        else:
            whole, asked = gibbs(models, framed(count, length, mask, before, after), free, mask, generator), None
    special = [1] * len(before) + [0] * len(free) + [1] * len(after)
    features = [{"input_ids": ids, "special_tokens_mask": special} for ids in whole.tolist()]
    met = how.maskable if set(how.maskable or ()) & set(whole.flatten().tolist()) else asked
    hidden = padded(masked(features, mask, how.mask_share, met, generator), batch)
    return [one for one in hidden if bool((one["labels"] != IGNORED).any())]


def guessed_text(
    models: Sequence[PreTrainedModel], count: int, length: int, mask: int, generator: torch.Generator
) -> tuple[Tensor, list[int]]:
    """Return texts, (count, length), and the tokens that the models were asked for.

    Where enough texts are made, they are of the most coherent kind: written by the models, or guesses.
    """
    order, short = ranks(models), min(length, SHORT)
    said = predicted(models, drawn(zipf(order, 1.0, mask), PROBES, short, generator), len(order), mask, generator)
    asked = said >= ASKED / len(said)
    given = said * asked / said[asked].sum()
    others = torch.where(asked, len(order), order).argsort().argsort()  # those that were asked for come last
    rests = [zipf(others, exponent, mask) * ~asked for exponent in EXPONENTS]

    def written(count: int, length: int) -> Tensor:
        return gibbs(models, framed(count, length, mask), torch.arange(length), mask, generator)

    def guessed(chances: Tensor, count: int, length: int) -> Tensor:
        ids = drawn(chances, count, length, generator)
        for turn in range(RESAMPLED):
            chosen = (torch.rand(ids.shape, generator=generator) < REDRAWN) & asked[ids]
            redraw(models, ids, chosen, turn, mask, generator)
        return ids

    texts: list[Callable[[int, int], Tensor]] = [written]
    texts += [partial(guessed, (given + rest / rest.sum()) / 2) for rest in rests if bool(rest.any())]
    if count < PROBES:
        text = texts[:2][-1]
    else:
        text = max(texts, key=lambda one: coherence(models, one(PROBES, short), asked, mask, generator))
    ids = text(count, length)
    return ids if text is written else repeating(ids, generator), asked.nonzero().flatten().tolist()


def drawn(chances: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return independent tokens, (count, length)."""
    return torch.multinomial(chances, count * length, True, generator=generator).view(count, length)


@torch.no_grad()
def predicted(
    models: Sequence[PreTrainedModel], ids: Tensor, size: int, mask: int, generator: torch.Generator
) -> Tensor:
    """Return the probability of each token, in the mean over models and over tokens that are hidden in texts, (size,).

    ids: texts, (count, length).
    """
    hidden = torch.rand(ids.shape, generator=generator) < HIDDEN
    said = torch.zeros(size)
    for _, logits in _in_turns(models, torch.where(hidden, mask, ids), hidden):
        said += logits[:, :size].softmax(-1).sum(0)
    said[mask] = 0.0
    return said / said.sum()


def repeating(ids: Tensor, generator: torch.Generator) -> Tensor:
    """Return texts whose last part, between a third and two thirds of them, repeats pieces of the part before it.

    ids: (count, length). Real texts repeat their rare words (Church and Gale, 1995, Poisson mixtures).
    """
    count, length = ids.shape
    starts = torch.randint(length // 3, 2 * length // 3 + 1, (count,), generator=generator)
    sizes = torch.empty(count, length).exponential_(1 / REPEATED, generator=generator).ceil().long()
    places = torch.rand(count, length, generator=generator)
    whole = ids.clone()
    for row, start, size, place in zip(whole, starts.tolist(), sizes.tolist(), places.tolist(), strict=True):
        at = max(start, 1)
        for most, where in zip(size, place, strict=True):
            some = min(most, at, length - at)
            first = int(where * (at - some + 1))
            row[at : at + some] = row[first : first + some].clone()
            at += some
    return whole


@torch.no_grad()
def coherence(
    models: Sequence[PreTrainedModel], ids: Tensor, asked: Tensor, mask: int, generator: torch.Generator
) -> float:
    """Return how well models and text agree on hidden tokens, corrected for chance.

    It is the kappa of Fleiss (1971), whose raters are the models and the text: (a - c) / (1 - c), with a the agreement
    of two raters in the mean, and c = sum_k p_k^2, where p_k is the share of votes for token k. Texts that are too
    monotonous have a large c, and on texts unlike any that the models know a is small.

    Args:
        models: they take the same inputs.
        ids: texts, (count, length): token ids.
        asked: which tokens may be hidden, (vocabulary,).
        mask: the token that hides.
        generator: of what is hidden.
    """
    hidden = (torch.rand(ids.shape, generator=generator) < HIDDEN) & asked[ids]
    if not hidden.any():
        return 0.0
    shown = torch.where(hidden, mask, ids)
    said = [torch.cat([_logits(model, rows).argmax(-1) for rows in torch.split(shown, AT_ONCE)]) for model in models]
    votes = torch.stack([ids, *said])[:, hidden]  # (raters, hidden tokens)
    pairs = list(combinations(votes, 2))
    agree = sum(float((one == other).double().mean()) for one, other in pairs) / len(pairs)
    chance = float((torch.bincount(votes.flatten()).double() / votes.numel()).square().sum())
    return (agree - chance) / (1 - chance) if chance < 1 else 0.0


@torch.no_grad()
def ranks(models: Sequence[PreTrainedModel]) -> Tensor:
    """Return the ranks of tokens by frequency, (vocabulary,), guessed from two signs.

    Vocabularies are mostly written in the order of frequency, and the vectors of frequent tokens lie nearest to the
    origin (Li et al., 2020, On the sentence embeddings from pre-trained language models, section 3).
    """
    tables = [_token_table(model) for model in models]
    size = min(map(len, tables))
    norms = sum(table[:size].float().norm(dim=1).argsort().argsort().cpu() for table in tables) / len(tables)
    order: Tensor = (norms + torch.arange(size)).argsort().argsort()
    return order


def _token_table(model: PreTrainedModel) -> Tensor:
    """The vectors of a model's tokens, (vocabulary, width)."""
    stated: Any = model.get_input_embeddings()
    if not isinstance(stated, nn.Module):  # those of Perceiver are its latents
        size = language_config(model).vocab_size
        stated = next(e for e in model.modules() if isinstance(e, nn.Embedding) and e.num_embeddings >= size)
    table: Tensor = stated.weight
    return table


def zipf(order: Tensor, exponent: float, mask: int) -> Tensor:
    """Return chances by Zipf's law, (vocabulary,): rank to the power of -exponent. The mask token never occurs."""
    chances = (1.0 + order) ** -exponent
    chances[mask] = 0.0
    return chances


@torch.no_grad()
def hidden_token(models: Sequence[PreTrainedModel], generator: torch.Generator) -> int:
    """Return the token that stands for hidden ones, where no tokenizer names it.

    It is the token that the models least predict in its own place, and on whose place they agree most: any other token
    was left in its place in training, at least sometimes, or was never met.

    Raises:
        ValueError: The models and their vocabulary are too large to try every token.
    """
    size = min(language_config(model).vocab_size for model in models)
    if size * models[0].num_parameters() > FEASIBLE:
        raise ValueError("the models' mask token is not known, and finding it takes long; name it by --mask-id")
    length = longest(models, 16)
    found = torch.zeros(size, dtype=torch.float64)
    for tokens in torch.split(torch.arange(size), TRIED_AT_ONCE):
        ids = tokens[:, None].expand(-1, length).clone()
        logs = [_logits(model, ids).log_softmax(-1) for model in models]
        said = torch.stack([log.exp().mean(1) for log in logs])  # (models, tokens, vocabulary)
        itself = said[:, torch.arange(len(tokens)), tokens].mean(0)
        common = said.prod(0).pow(1 / len(models)).sum(-1)  # the models' Bhattacharyya coefficient, for two
        found[tokens] = (common * (1 - itself)).double()
    return int(found.argmax())


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids.to(model.device)).logits.float().cpu()
    return logits


def framed(count: int, length: int, mask: int, before: Sequence[int] = (), after: Sequence[int] = ()) -> Tensor:
    """Return hidden sequences between tokens that stay, (count, length)."""
    ids = torch.full((count, length), mask)
    ids[:, : len(before)] = torch.tensor(before, dtype=torch.long)
    ids[:, length - len(after) :] = torch.tensor(after, dtype=torch.long)
    return ids


def gibbs(
    models: Sequence[PreTrainedModel], ids: Tensor, free: Tensor, mask: int, generator: torch.Generator
) -> Tensor:
    """Let masked language models write sequences, in place, and return these.

    All tokens are hidden at first and drawn from the models' predictions in random order, a share of them in every
    pass; then some are hidden and drawn again (Wang and Cho, 2019).

    Args:
        models: they take turns.
        ids: the sequences, (count, length): token ids.
        free: the places to write in.
        mask: the token that hides.
        generator: of the draws.
    """
    order = torch.full(ids.shape, -1)
    order[:, free] = torch.rand(len(ids), len(free), generator=generator).argsort(1) * REVEALED // len(free)
    for turn in range(REVEALED + RESAMPLED):
        again = torch.rand(ids.shape, generator=generator) < 1 / REVEALED
        redraw(models, ids, order == turn if turn < REVEALED else again & (order >= 0), turn, mask, generator)
    return ids


@torch.no_grad()
def redraw(
    models: Sequence[PreTrainedModel], ids: Tensor, chosen: Tensor, turn: int, mask: int, generator: torch.Generator
) -> None:
    """Hide the chosen tokens, (count, length), and draw them from the prediction of the model whose turn it is."""
    ids[chosen] = mask
    for rows, logits in _in_turns(models, ids, chosen, turn):
        logits[:, mask] = -torch.inf
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids[rows] = ids[rows].masked_scatter(chosen[rows], tokens)


def _in_turns(
    models: Sequence[PreTrainedModel], ids: Tensor, places: Tensor, turn: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of texts, and what the model whose turn it is says at some places of these, (places, vocabulary)."""
    for number, rows in enumerate(torch.split(torch.arange(len(ids)), AT_ONCE)):
        if places[rows].any():
            yield rows, _logits(models[(number + turn) % len(models)], ids[rows])[places[rows]]


def _framing(tokenizer: Any) -> tuple[list[int], list[int], int | None]:
    """The special tokens that stand before and after a text, and the mask token's id."""
    if tokenizer is None:
        return [], [], None
    ids, special = (
        tokenizer("a", return_special_tokens_mask=True)[key] for key in ("input_ids", "special_tokens_mask")
    )
    plain = [i for i, value in enumerate(special) if not value] or [len(ids)]
    return ids[: plain[0]], ids[plain[-1] + 1 :], tokenizer.mask_token_id


def language_config(model: PreTrainedModel) -> PretrainedConfig:
    """The configuration of the model, or of its language model if it also takes images or sounds."""
    found: PretrainedConfig = model.config.get_text_config(decoder=True)
    return found


def longest(models: Sequence[PreTrainedModel], most: int) -> int:
    """The longest sequence that all models take, at most `most`."""
    return min([most, *(longest_text(model, most, [language_config(model)]) for model in models)])
