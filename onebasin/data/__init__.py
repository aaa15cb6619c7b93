# SPDX-License-Identifier: Apache-2.0
"""Data that models are measured on: text, rows and images become batches, and batches give a loss and an accuracy.

A dataset is named by a file or by `builtin:digits` and `builtin:stdlib`, which every machine has.
Nothing here knows matching or merging, and no function changes a model.
"""

from .digits import digits
from .models import TASKS, load_model
from .scores import Scores, evaluate
from .tasks import Task, load_task
from .text import character_vocabulary, read_vocabulary, stdlib_text

__all__ = [
    "TASKS",
    "Scores",
    "Task",
    "character_vocabulary",
    "digits",
    "evaluate",
    "load_model",
    "load_task",
    "read_vocabulary",
    "stdlib_text",
]
