"""From a name to an engine: open a checkpoint, load it onto devices, compile its programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
from absl import logging
from tqdm import tqdm

from jaxinfer.config import EngineConfig
from jaxinfer.embedding.embedder import Embedder
from jaxinfer.embedding.text_batches import check_encoder_config
from jaxinfer.engine.protocol import EngineLike
from jaxinfer.execution import compilation_cache
from jaxinfer.execution.numerics import keeps_packed, numerics_for
from jaxinfer.loading import Checkpoint, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.checkpoint import CheckpointError, GenerationDefaults
from jaxinfer.loading.fingerprint import fingerprint
from jaxinfer.loading.load_report import summarize_weights
from jaxinfer.loading.random import random_weights
from jaxinfer.loading.sentence_options import sentence_options
from jaxinfer.loading.targets import single_device_model
from jaxinfer.models.encoder import EncoderConfig
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.options import ConfigError
from jaxinfer.parallel.hosts.peers import ALONE, Peers
from jaxinfer.parallel.replicas import make_engine
from jaxinfer.parallel.sharded_model import ShardedModel, sharded_replicas
from jaxinfer.sharding.mesh import format_mesh
from jaxinfer.text.tokenizer import Tokenizer

NO_GENERATION = "this model is an encoder, which embeds texts and does not generate; use embed()"
NO_EMBEDDING = "this model generates and embeds nothing; load an encoder (BERT, RoBERTa, BGE, E5)"


def need_engine(loaded: EngineLike) -> EngineLike:
    """Return an engine that generates; raise `CheckpointError` for an encoder."""
    if not loaded.can_generate:
        raise CheckpointError(f"{loaded.name}: {NO_GENERATION}")
    return loaded


def describe_weights(loaded: EngineLike) -> str:
    """Describe the parameters: their number, their bytes, and how many are quantized."""
    return summarize_weights(loaded.model, loaded.weights)


def describe_mesh(loaded: EngineLike) -> str:
    """Describe the devices and the weights on each; empty for one device."""
    mesh = loaded.config.mesh
    if mesh.num_devices == 1:
        return ""
    num_bytes = loaded.replicas[0].runner.memory.weight_bytes
    return (
        f"{format_mesh(mesh.sizes)}: {mesh.num_devices} {jax.devices()[0].platform} devices, each "
        f"with {num_bytes / 1e6:,.1f} MB of weights"
    )


def describe_cache(loaded: EngineLike) -> str:
    """Describe the cache: pages, tokens and bytes, where, and what decided their number."""
    replicas = loaded.replicas
    memory = replicas[0].runner.memory
    where = " on each device" if loaded.config.mesh.num_devices > 1 else ""
    where += f", in each of {len(replicas)} replicas" if len(replicas) > 1 else ""
    return (
        f"{memory.num_pages:,} pages of {memory.page_size} tokens = {memory.num_tokens:,} tokens, "
        f"{memory.cache_bytes / 2**20:,.1f} MiB{where} ({memory.source})"
    )


def need_embedder(loaded: EngineLike) -> Embedder:
    """Return an embedder; raise `CheckpointError` for a model that is not an encoder."""
    if not isinstance(loaded, Embedder):
        raise CheckpointError(f"{loaded.name}: {NO_EMBEDDING}")
    return loaded


def load_model(
    source: str | Path,
    config: EngineConfig | None = None,
    *,
    show_progress: bool = True,
    on_loaded: Callable[[EngineLike], None] = lambda engine: None,
    peers: Peers = ALONE,
) -> tuple[EngineLike, GenerationDefaults]:
    """Open a checkpoint, load it and compile its programs. Returns an engine ready to serve (an
    embedder if the model is an encoder), and the checkpoint's generation defaults.

    `source`: "demo", a .gguf file, a Hugging Face directory, a converted one, or a hub id; with
    `load_format` "random" also a `config.json` alone. `on_loaded` gets it before its programs are
    compiled, to show its plan. Raises `CheckpointError` or `ConfigError`, which name what is wrong
    and the way out. With several processes (`jaxinfer.parallel.hosts`) all load the same model,
    each with its own `peers`, and return when all are ready.
    """
    config = config or EngineConfig()
    compilation_cache.enable()
    is_random = config.load_format == "random"
    checkpoint = open_checkpoint(source, needs_weights=not is_random)
    tokenizer = _tokenizer_if_any(checkpoint) if is_random else checkpoint.tokenizer()
    models = _on_meshes(functional_model(checkpoint, numerics_for(config)), config, peers)
    model = models[0]
    if peers.num_processes > 1:
        digest = "random" if is_random else fingerprint(checkpoint)
        peers.agree_on_pages({"the checkpoint's fingerprint": digest}, 0)
    bar: dict[str, Any] = {"disable": not show_progress, "leave": False, "dynamic_ncols": True}
    with tqdm(
        total=single_device_model(model).num_bytes,
        desc="loading",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        **bar,
    ) as loading:
        if is_random:
            how = {"quantize": config.quantize, "on_progress": loading.update}
            weights = random_weights(model, config.seed, **how)
        else:
            weights = load_weights(
                checkpoint,
                model,
                keep_packed=keeps_packed(config),
                quantize=config.quantize,
                on_progress=loading.update,
            )
    engine = _engine(checkpoint, models, weights, config, tokenizer)
    on_loaded(engine)
    if config.warm_up:
        with tqdm(total=engine.num_programs, desc="compiling", **bar) as compiling:

            def done(program: str) -> None:
                compiling.set_postfix_str(program, refresh=False)
                compiling.update()

            engine.warm_up(done)
    peers.wait_until_ready()
    return engine, checkpoint.generation


def _on_meshes(
    model: FunctionalModel, config: EngineConfig, peers: Peers
) -> list[FunctionalModel] | list[ShardedModel]:
    """Return the model on the mesh of each replica; an encoder, which runs on one device, as it is.

    Raises `ConfigError`, before a weight is read, for a model that does not divide over the mesh
    and for options that encoders do not have.
    """
    if not isinstance(model.config, EncoderConfig):
        return sharded_replicas(model, config, peers)
    check_encoder_config(config)
    if peers.num_processes > 1:
        raise ConfigError(
            f"there are {peers.num_processes} processes, and an encoder runs in one: start one "
            "process for each device, without the others"
        )
    return [model]


def _tokenizer_if_any(checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the tokenizer, or None: with random weights, text is not needed."""
    try:
        return checkpoint.tokenizer()
    except CheckpointError as error:
        logging.warning("prompts can be given as token ids alone: %s", error)
        return None


def _engine(
    checkpoint: Checkpoint,
    models: list[FunctionalModel] | list[ShardedModel],
    weights: Weights,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
) -> EngineLike:
    model = models[0]
    if isinstance(model, FunctionalModel):
        options = sentence_options(checkpoint)
        return Embedder(model, weights, config, options, tokenizer=tokenizer, name=checkpoint.name)
    eos_token_ids = checkpoint.generation.eos_token_ids or (
        tokenizer.eos_token_ids if tokenizer is not None else ()
    )
    return make_engine(
        cast("list[ShardedModel]", models),
        weights,
        config,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        name=checkpoint.name,
    )
