"""jaxinfer: inference and serving of large language models in JAX, for TPU, GPU and CPU.

The letters of every shape in this code base:

    T  tokens in a step          D  model dimension        E  experts
    R  request rows in a step    N  query heads            V  vocabulary
    W  page-table width          K  key/value heads        L  layers
    P  pages in the pool         G  N / K                  S  slots; in sharding, pipeline stages
    B  tokens a page             H  head dimension
                                 F  feed-forward dimension
"""

from jaxinfer.config import CacheConfig, EngineConfig, SchedulerConfig, load_config
from jaxinfer.embedding.embedder import Embedder
from jaxinfer.engine.admission import InvalidRequestError
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import Update
from jaxinfer.engine.protocol import EngineLike
from jaxinfer.engine.request import FinishReason, TokenLogprobs
from jaxinfer.llm import LLM, Completion, Output
from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.options import ConfigError
from jaxinfer.parallel.replicas import Replicas
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.version import __version__

__all__ = [
    "LLM",
    "CacheConfig",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Embedder",
    "Engine",
    "EngineConfig",
    "EngineLike",
    "FinishReason",
    "InvalidRequestError",
    "Output",
    "Replicas",
    "SamplingParams",
    "SchedulerConfig",
    "TokenLogprobs",
    "Update",
    "__version__",
    "load_config",
]
