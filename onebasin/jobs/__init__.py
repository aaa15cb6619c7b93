# SPDX-License-Identifier: Apache-2.0
"""The main jobs, from model folders to model folders: each is what the command of the same name runs.

Models are folders, hub ids or `PreTrainedModel` objects; objects are written to a temporary folder first, because a
folder's tensor names are the contract. A job reads options, calls the rooms below, verifies and writes; mathematics
may not live here.
"""
