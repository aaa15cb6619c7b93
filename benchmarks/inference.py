# SPDX-License-Identifier: Apache-2.0
"""How long the table of a large model takes to infer, and how much memory: `python -m benchmarks.inference TYPE`.

From a configuration with the published sizes; there are no weights. Prints a row of Markdown: parameters, seconds of
computing, peak memory of the whole process with all libraries, and what came out.
"""

from __future__ import annotations

import sys
import time
from typing import Any

# Model type -> sizes of the published model, where they are not the defaults of its class.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {  # Llama 3.3 70B
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "architectures": ["LlamaForCausalLM"],
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"]},
    "qwen3_5_moe_text": {"architectures": ["Qwen3_5MoeForCausalLM"]},
    "qwen3_5_moe": {"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
}  # fmt: skip


def row(kind: str) -> str:
    """Return what inferring the published configuration of a type takes."""
    import torch
    import transformers

    from onebasin.engine import peak_memory
    from onebasin.running import inference

    config = transformers.CONFIG_MAPPING[kind](**PUBLISHED[kind])
    start = time.process_time()
    found = inference.infer(config)
    seconds, memory = time.process_time() - start, peak_memory()
    with torch.device("meta"):
        whole = getattr(transformers, config.architectures[0])(config)
    size = sum(parameter.numel() for parameter in whole.parameters())
    return (f"| {kind} | {size / 1e9:.0f} billion | {seconds:.1f} s | {memory / 1e9:.1f} GB | {found.departure:.0e} "
            f"| {100 * found.free:.0f} % |")  # fmt: skip


if __name__ == "__main__":
    print(row(sys.argv[1]))
