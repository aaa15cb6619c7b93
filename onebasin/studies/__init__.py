# SPDX-License-Identifier: Apache-2.0
"""Studies: whole experiments as functions of their settings, from reading or training models to pictures.

They use the public API as any user would, and return every number that they show. There are no algorithms here, only
sequences of steps.
"""
