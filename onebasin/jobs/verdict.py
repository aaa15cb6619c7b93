# SPDX-License-Identifier: Apache-2.0
"""The verdict on a merge: does the merged model still predict what its sources predict? No labels are needed.

On inputs that nothing was fitted to, the first choice of the merged model is compared with that of each source, and
those of the sources with each other. A merge cannot be expected to agree with its sources more often than these agree
with each other, but it should keep what they agree on. Chance is the agreement of two independent models that predict
every class equally often as these do (kappa; Cohen, 1960), so

    kappa(a, b) = (agreement - chance) / (1 - chance),     works:  mean_ij kappa(merged, i | i = j) >= KEPT

over all pairs of sources, where the inputs are those for which both predict the same; or if the merge agrees with the
sources as often as these with each other.

Models without classes are compared by how they order examples: a regression by whether the next example has a higher
value, an encoder without a head by which other example is nearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebasin.data.teaching import predictions, where_counted
from onebasin.engine import Tell
from onebasin.models import Folder
from onebasin.models.errors import one_line
from onebasin.running.loading import held, streamed
from onebasin.running.probes import unpadded
from onebasin.running.trace import Batch
from onebasin.running.valid_inputs import first_that_runs
from onebasin.running.verification import output_of

from .options import Options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# On these a merge may work and break on real ones, but not the other way round:
GUESSED = "inputs that were guessed"
IMAGINED = "pictures that the models imagined"  # if the sources agree on more than `EASY` of them
EASY = 0.94  # measured: docs/results/plain-command.md
KEPT = 0.8  # a merge works if it keeps this share, beyond chance, of what its sources agree on
FEW = 10  # predictions that chance does not explain; fewer say nothing
LEAST = 0.1  # below this agreement of the sources beyond chance, their predictions say nothing
HELD = 2**29  # parameters of the largest model that is held in memory to be judged
ROWS, SHORT, LONG = 16, 2, 32  # random inputs: texts, and tokens of each
PRODUCTS = 12 * 10**9  # all their tokens times the parameters of a model, at most, unless texts are shortest
MOST = 1024  # predictions that are compared, evenly spread over the inputs

Run = Callable[[Batch], Mapping[str, Any]]
Load = Callable[[], Run]  # loads a model, which is released once it has answered


@dataclass(frozen=True)
class Verdict:
    """How the merged model compares with its sources.

    Attributes:
        works: Whether it still predicts what they predict; None where that could not be told.
        agreement: For each source, the share of equal predictions; None without a common output.
        sources_agree: The share of equal predictions of two sources, the mean over all pairs.
        divergence: For each source, KL(source || merged) in nats; None without classes.
        sources_diverge: The same of one source from another, the mean over all ordered pairs.
        judged_on: A description of the inputs.
        predictions: How many predictions were compared.
    """

    works: bool | None
    agreement: list[float | None]
    sources_agree: float | None
    divergence: list[float | None]
    sources_diverge: float | None
    judged_on: str
    predictions: int

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict, as values for JSON."""
        return asdict(self)

    def facts(self, require: float | None) -> dict[str, Any]:
        """Return the facts for a result.

        Args:
            require: The share of predictions on which the merged model must agree with every source, if any.

        Returns:
            The `verdict`, and as `required` whether the merged model meets the requirement.
        """
        if require is None:
            return {"verdict": self.to_dict()}
        return {
            "verdict": self.to_dict(),
            "required": all(one is not None and one >= require for one in self.agreement),
        }

    @property
    def sentence(self) -> str:
        """Return the verdict in one line."""
        if not self.predictions:
            return f"not judged: {self.judged_on}"
        if self.sources_agree is None or all(one is None for one in self.agreement):
            return "not judged: the models have no output in common"
        shares = [f"with {chr(65 + i)} on {_percent(one)}" for i, one in enumerate(self.agreement) if one is not None]
        told = (
            f"agrees {', '.join(shares)} of predictions (the sources: {_percent(self.sources_agree)}; {self.judged_on})"
        )
        if self.works is None and proves_nothing(self.judged_on, self.sources_agree):
            return f"not judged: {told}, which proves nothing about other inputs; give --data FILE"
        if self.works is None:
            return (
                f"not judged: on {self.judged_on} the sources agree hardly more than by chance "
                f"({_percent(self.sources_agree)}); give --data FILE"
            )
        return f"works: {told}" if self.works else f"BROKEN: {told}; give --data FILE, or more time by --budget 10m"


def proves_nothing(judged_on: str, sources_agree: float | None) -> bool:
    """Return whether a merge that is right on such inputs may be wrong on real ones."""
    return judged_on == GUESSED or (judged_on == IMAGINED and (sources_agree or 0.0) > EASY)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def judge(merged: Load, sources: Sequence[Load], batches: Sequence[Batch], judged_on: str) -> Verdict:
    """Compare what a merged model predicts with what its sources predict.

    merged, sources: each loads a model, which returns its output for a batch; one is held at a time. batches: inputs
    that nothing was fitted to. judged_on: a description of them.
    """
    asked = [_answers(load(), batches) for load in (merged, *sources)]
    mine, theirs = asked[0], asked[1:]
    own = [_compared(mine, one) for one in theirs]
    between = _between(theirs)
    known = [pair for pair in own if pair is not None]
    works = None
    agreed = _agreed(between)
    if agreed is not None and known and sum(pair.kappa for pair in between) / len(between) >= LEAST:
        as_good = sum(pair.agreement for pair in known) / len(known) >= agreed
        works = True if as_good else _keeps(mine, theirs)
    if works and proves_nothing(judged_on, agreed):
        works = None
    apart = [pair.divergence for pair in between if pair.divergence is not None]
    return Verdict(
        works,
        [None if pair is None else pair.agreement for pair in own],
        agreed,
        [None if pair is None else pair.divergence for pair in own],
        sum(apart) / len(apart) if apart else None,
        judged_on,
        max((pair.count for pair in known), default=0),
    )


def sources_agree(sources: Sequence[Run], batches: Sequence[Batch]) -> float | None:
    """Return the share of equal predictions, the mean over all pairs of models; None without a common output."""
    return _agreed(_between([_answers(model, batches) for model in sources]))


def verdict_on(
    folder: Path,
    sources: Sequence[Folder],
    inputs: Callable[[], Sequence[Batch]],
    judged_on: str,
    opt: Options,
    tell: Tell | None,
) -> Verdict:
    """Judge a merged model on disk beside its sources. A model that cannot be run is not judged.

    inputs: makes the inputs; if there are none, random inputs that all models take are used. judged_on: a description
    of them.
    """
    if tell:
        tell("judging the merged model")
    models = [Folder(folder, sources[0]._family), *sources]
    try:
        batches = inputs()
    except Exception:  # models that make no inputs for each other (other vocabularies, say) fail in many ways
        batches = []
    try:
        if batches:
            loads: list[Load] = [partial(_loaded, model, opt) for model in models]
            return judge(loads[0], loads[1:], batches, judged_on)
        once = [streamed(model, None, opt.dtype, opt.device)[0] for model in models]  # weights are read during one pass
        loads = [partial(_runner, model) for model in once]
        length = shortest(max(map(_numel, models)))

        def judged(given: Batch) -> Verdict:
            return judge(loads[0], loads[1:], [{name: value.cpu() for name, value in given.items()}], "random inputs")

        return first_that_runs(once[-2], once[-1], ROWS, length, opt.seed, judged)[2]
    except Exception as error:  # a merge is right whether its model can be run or not
        return Verdict(None, [None] * len(sources), None, [None] * len(sources), None, one_line(error), 0)


def _loaded(folder: Folder, opt: Options) -> Run:
    """Return a model: loaded if it is small, otherwise one whose weights are read as they are used."""
    prepare = held if _numel(folder) <= HELD else streamed
    return _runner(prepare(folder, None, opt.dtype, opt.device)[0])


def _numel(folder: Folder) -> int:
    """Return the numbers on disk, without the table: to infer that of a merged model can take longer than to run it."""
    return sum(map(math.prod, folder.shapes.values()))


def _runner(model: PreTrainedModel) -> Run:
    def answer(batch: Batch) -> Mapping[str, Any]:
        given = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
        return output_of(model, given)  # type: ignore[no-any-return]

    return answer


def shortest(size: int) -> int:
    """Return the length of random texts: the larger the models, the shorter. size: parameters of the largest."""
    return min(LONG, max(SHORT, PRODUCTS // (ROWS * size)))


@dataclass(frozen=True)
class _Pair:
    agreement: float
    kappa: float
    divergence: float | None  # KL(second || first)
    count: int


def _compared(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> _Pair | None:
    """Compare two models' answers over the outputs that both have. Returns None if they have none in common."""
    found = [_pair(name, a[name], b[name]) for name in _shared(a, b)]
    if not found:
        return None
    divergences = [one.divergence for one in found if one.divergence is not None]
    return _Pair(
        sum(one.agreement for one in found) / len(found),
        sum(one.kappa for one in found) / len(found),
        sum(divergences) / len(divergences) if divergences else None,
        max(one.count for one in found),
    )


def _keeps(merged: Mapping[str, Tensor], sources: Sequence[Mapping[str, Tensor]]) -> bool | None:
    """Return whether the merged model predicts what pairs of sources agree on: at least the share `KEPT` of it beyond
    chance, in the mean over pairs and outputs. Returns None if chance explains nearly all of it."""
    found = []
    for a, b in combinations(sources, 2):
        for name in _shared(merged, a, b):
            mine, first, second = (_choices(name, answers[name]) for answers in (merged, a, b))
            where = first == second
            same, chance = _agreement(mine[where], first[where])
            if int(where.sum()) * (1 - chance) >= FEW:
                found.append(_kappa(same, chance) if bool(merged[name].isfinite().all()) else 0.0)
    return sum(found) / len(found) >= KEPT if found else None


def _shared(first: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> list[str]:
    """Return the outputs that all models have, and that can be compared."""
    return [name for name, x in first.items() if all(_comparable(name, x, other.get(name)) for other in others)]


def _comparable(name: str, x: Tensor, y: Tensor | None) -> bool:
    return y is not None and len(x) == len(y) and len(x) > 1 and (x.shape == y.shape or "logits" not in name)


def _pair(name: str, x: Tensor, y: Tensor) -> _Pair:
    classes = _classes(name, x)
    first, second = (_choices(name, value) for value in (x, y))
    same, chance = _agreement(first, second)
    kappa = _kappa(same, chance)
    if not (x.isfinite().all() and y.isfinite().all()):
        return _Pair(same, min(kappa, 0.0), math.inf if classes else None, len(first))
    apart = None
    if classes:
        p, q = y.double().log_softmax(-1), x.double().log_softmax(-1)
        apart = float((p.exp() * (p - q)).sum(-1).mean())
    return _Pair(same, kappa, apart, len(first))


def _agreement(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return the share of equal choices, and that by chance; 1 for both if there are no choices."""
    if not len(first):
        return 1.0, 1.0
    shares = [torch.bincount(choice, minlength=int(max(first.max(), second.max())) + 1).double() / len(choice)
              for choice in (first, second)]  # fmt: skip
    return float((first == second).double().mean()), float(shares[0] @ shares[1])


def _kappa(agreement: float, chance: float) -> float:
    return (agreement - chance) / (1 - chance) if chance < 1 else agreement


def _classes(name: str, value: Tensor) -> bool:
    return "logits" in name and value.shape[-1] > 1


def _choices(name: str, value: Tensor) -> Tensor:
    """Return a model's choices, one number each: a class, whether the next example has more, or the nearest example."""
    if _classes(name, value):
        return value.argmax(-1)
    if "logits" in name:
        return (value[1:, 0] > value[:-1, 0]).long()
    near = torch.nn.functional.normalize(value.double() - value.double().mean(0), dim=-1)
    return (near @ near.mT).fill_diagonal_(-math.inf).argmax(-1)


def _between(answers: Sequence[dict[str, Tensor]]) -> list[_Pair]:
    found = (_compared(a, b) for a, b in combinations(answers, 2))
    return [pair for pair in found if pair is not None]


def _agreed(pairs: Sequence[_Pair]) -> float | None:
    return sum(pair.agreement for pair in pairs) / len(pairs) if pairs else None


@torch.no_grad()
def _answers(run: Run, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Output -> (predictions, classes), or (examples, features) of models without a head; at most `MOST` rows."""
    found: dict[str, list[Tensor]] = {}
    most = max(2, MOST // len(batches))
    for batch in batches:
        for name, value in _heads(predictions(run(batch)), batch):
            rows = value.reshape(-1, value.shape[-1]) if value.dim() > 1 else value[:, None]
            step = max(1, len(rows) / most)
            kept = (torch.arange(min(len(rows), most)) * step).long()
            found.setdefault(name, []).append(rows[kept.to(rows.device)].float().cpu())
    return {name: torch.cat(rows) for name, rows in found.items() if len({one.shape[-1] for one in rows}) == 1}


def _heads(outputs: Mapping[str, Tensor], batch: Batch) -> Iterable[tuple[str, Tensor]]:
    """The outputs that are predictions: logits where they count; without a head one vector of each example."""
    logits = {name: value for name, value in outputs.items() if "logits" in name}
    for name, value in logits.items():
        where = where_counted(value, batch)
        yield name, value if where is None else value[where.to(value.device)]
    if logits or not outputs:
        return
    # Poolers come second: no one trains them with most encoders, and sentence encoders take the mean.
    name, value = next(((name, outputs[name]) for name in ("last_hidden_state", "pooler_output") if name in outputs),
                       next(iter(outputs.items())))  # fmt: skip
    if value.dim() == 3:  # (examples, tokens, width)
        mask = batch.get("attention_mask")
        own = [unpadded(row[None], None if mask is None else mask[i : i + 1]) for i, row in enumerate(value)]
        value = torch.stack([rows.reshape(-1, value.shape[-1]).mean(0) for rows in own])
    yield name, value.flatten(1)
