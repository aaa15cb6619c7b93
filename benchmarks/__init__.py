# SPDX-License-Identifier: Apache-2.0
"""How long matching takes beside a plain transcription of the rotation paper, and beside the machine's floor.

Run as `python -m benchmarks`. Weights are random or planted, at the shapes of published models; nothing is
downloaded.
"""
