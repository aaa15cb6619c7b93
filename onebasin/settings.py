# SPDX-License-Identifier: Apache-2.0
"""The numbers that users give, with their bounds: types for the fields of settings, and the check of such fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes, and so mergekit
