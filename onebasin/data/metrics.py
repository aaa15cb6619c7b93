# SPDX-License-Identifier: Apache-2.0
"""Metrics beside loss and accuracy, by the libraries that are standard in the field: scikit-learn, seqeval, SciPy.

Each takes predictions and correct answers and returns name -> number. A metric is left out if its library is not
installed, or if the examples leave it undefined (such as the correlation of one example).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

NEEDS = {"macro_f1": "sklearn", "micro_f1": "sklearn", "matthews": "sklearn", "entity_f1": "seqeval"}


def of_classes(predicted: Sequence[int], right: Sequence[int]) -> dict[str, float]:
    """Return macro_f1 and micro_f1 over the classes that occur, and Matthews' coefficient."""
    if find_spec("sklearn") is None:
        return {}
    from sklearn.metrics import f1_score, matthews_corrcoef

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single class
        return {
            "macro_f1": float(f1_score(right, predicted, average="macro", zero_division=0)),
            "micro_f1": float(f1_score(right, predicted, average="micro", zero_division=0)),
            "matthews": float(matthews_corrcoef(right, predicted)),
        }


def of_entities(predicted: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return entity_f1, micro-averaged over entities as conlleval counts them, of a sequence of tags for every
    sentence."""
    tags = {tag for row in right for tag in row} | {tag for row in predicted for tag in row}
    if find_spec("seqeval") is None or not all(tag == "O" or tag[:2] in ("B-", "I-", "E-", "S-") for tag in tags):
        return {}
    from seqeval.metrics import f1_score

    both = [list(row) for row in right], [list(row) for row in predicted]
    return {"entity_f1": float(f1_score(*both, zero_division=0))}


def of_numbers(predicted: Sequence[float], right: Sequence[float]) -> dict[str, float]:
    """Return pearson and spearman."""
    if len(set(predicted)) < 2 or len(set(right)) < 2:
        return {}
    from scipy.stats import pearsonr, spearmanr  # slow to load, and nothing else needs it

    return {
        "pearson": float(pearsonr(predicted, right).statistic),
        "spearman": float(spearmanr(predicted, right).statistic),
    }


def perplexity(loss: float) -> float:
    """Return exp of the loss in nats; infinity where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf
