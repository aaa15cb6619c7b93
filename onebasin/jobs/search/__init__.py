# SPDX-License-Identifier: Apache-2.0
"""The search for the best way to merge: candidates are tried in order of cost until time is up, and judged on held-out
data.

    closed forms     the best units of models matched by weights (`select`); then the average of models matched by
                     activations (also with even norms, which lets the streams of post-norm models rotate), by weights,
                     and not matched; each also merged progressively, and the best of them once more with `spread`.
                     If the inputs are guesses and norms can be even, only the average with these. On imagined images
                     without time to learn, only matched by weights or not, without `spread`
    learning         matching learned at level `invertible` from the best start, on images that the models imagine:
                     distillation on these makes a model worse on real images, while exact copies of the models stay
                     as good as they are
    distilling       on other inputs: the best candidate so far, taught by the models

Without `--budget`, models that were trained apart get three minutes of learning, or one of distillation if the inputs
are like their training data. If the verdict on the best closed form would not be that it works, it is what is left of
five minutes. Models of one base are averaged without matching; with data, progressive merging is a candidate, too.

A quarter of the data is held out: nothing is fitted to it. The chosen candidate is the one whose predictions there have
the least KL divergence from the mixture of the models' predictions. No family has rules of its own.
"""

from .chosen import Chosen, Earlier
from .setup import LEVEL, QUALITIES, Setup, judged_on, too_large
from .trials import choose

__all__ = ["LEVEL", "QUALITIES", "Chosen", "Earlier", "Setup", "choose", "judged_on", "too_large"]
