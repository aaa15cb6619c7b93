# SPDX-License-Identifier: Apache-2.0
"""The groups that act on spaces, one short file each, with their one hard operation `nearest`.

It takes the cross-moments of a space and returns the best element, in closed form except for joint rescaling (one
variable) and `Invertible` (descent). Nothing here knows tensors, tables or models.
"""

from .base import Moments
from .fixed import Fixed
from .group import Group, as_moments
from .grouped import GroupedWreath
from .invertible import Invertible
from .orthogonal import Orthogonal, OrthogonalFixingOnes
from .permutation import Permutation, SignedPermutation
from .procrustes import nuclear, polar, sharpened
from .rotary import Rotary
from .scaling import ScaledPermutation, best_scale
from .signs import Factors, PairSigns, Signs
from .similarity import ScaledOrthogonal
from .wreath import Wreath

__all__ = [
    "Factors",
    "Fixed",
    "Group",
    "GroupedWreath",
    "Invertible",
    "Moments",
    "Orthogonal",
    "OrthogonalFixingOnes",
    "PairSigns",
    "Permutation",
    "Rotary",
    "ScaledOrthogonal",
    "ScaledPermutation",
    "SignedPermutation",
    "Signs",
    "Wreath",
    "as_moments",
    "best_scale",
    "nuclear",
    "polar",
    "sharpened",
]
