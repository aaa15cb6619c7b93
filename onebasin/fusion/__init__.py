# SPDX-License-Identifier: Apache-2.0
"""Merging models that are already aligned: one file per method. Aligned models in, tensors of one model out.

Nothing here aligns anything, and nothing here knows how an alignment was found.
"""

from .average import METHODS, merged_tensors, nearest_to_mean

MERGE_METHODS = (*METHODS, "ot", "fisher", "regmean", "progressive")  # the last three look at data

__all__ = ["MERGE_METHODS", "METHODS", "merged_tensors", "nearest_to_mean"]
