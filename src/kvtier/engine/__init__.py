"""A small real engine: paged KV, prefix cache, continuous batching, preemption; Llama-family models.

It needs torch. It is the reference host of the connector: `engine.py` shows the order of calls in a step.
"""

from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.engine import Engine, Model
from kvtier.engine.event_buffer import Publisher
from kvtier.engine.model import Decoder
from kvtier.engine.request import RequestOutput, TokenSources
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.weights import load_weights, random_weights, save_model

__all__ = [
    "Decoder",
    "Engine",
    "EngineConfig",
    "Model",
    "ModelConfig",
    "Publisher",
    "RequestOutput",
    "SamplingParams",
    "TokenSources",
    "load_weights",
    "random_weights",
    "save_model",
]
