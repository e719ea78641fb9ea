"""The built-in demo models: Llama configs for seeded random weights, so that nothing is downloaded.

Random weights answer nonsense, but compute exactly as trained ones: a wrong byte of KV changes the tokens.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["DEMO_MODEL", "QUICK_MODEL"]

DEMO_MODEL: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
"""10 million parameters, 6 KiB of float32 KV a token: a prompt of a thousand tokens takes half a second on
two slow cores.
"""

QUICK_MODEL: Final[dict[str, Any]] = DEMO_MODEL | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A million parameters that cost nothing to run, for a look at the demo itself."""
