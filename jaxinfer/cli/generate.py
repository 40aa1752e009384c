"""Generate text on this machine from a prompt, a file of prompts, or a conversation.

    jaxinfer generate --model=demo --config=demo --prompt="The sky is" --temperature=0
    jaxinfer generate --model=PATH --prompts_file=prompts.jsonl --format=jsonl
    jaxinfer generate --model=demo --config=demo --chat --temperature=0

Every field of `SamplingParams` has a flag. A flag that is not given takes the checkpoint's default,
then the field's own. `--config=PRESET` and `--set key.path=value` reach every engine option. The
plan, progress and figures go to stderr, so that with `--format=jsonl` stdout holds one JSON object
for each prompt and nothing else: prompt, prompt_token_ids, token_ids, text, finish_reason. A prompt
that is refused gets `error` in place of the last three, the others run, and the exit code is 1.
On several hosts run the same command on each, with `--distributed` or `--coordinator`; process 0
prints.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

from absl import flags

from jaxinfer import (
    LLM,
    CheckpointError,
    Completion,
    EngineLike,
    Output,
    SamplingParams,
    load_config,
)
from jaxinfer.build import describe_cache, describe_mesh, describe_weights, need_engine
from jaxinfer.cli import host_flags
from jaxinfer.cli.host_flags import follow_process_0, process_group
from jaxinfer.cli.json_strings import read_json_strings
from jaxinfer.parallel.hosts import HostsError, Peers

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(host_flags)  # --help shows them
_MODEL = flags.DEFINE_string(
    "model", "demo", '"demo", a .gguf file, a Hugging Face directory, or a hub id'
)
_PROMPT = flags.DEFINE_string("prompt", None, "the prompt, completed as it is")
_PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file", None, 'a file with one JSON string on each line, or "-"'
)
_CHAT = flags.DEFINE_bool("chat", False, "talk to the model: /reset starts over, /exit ends it")
_TEMPLATE = flags.DEFINE_bool(
    "apply_chat_template", False, "wrap each prompt as a user's message in the chat template"
)
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "jsonl"], "what is printed on stdout")
_CONFIG = flags.DEFINE_string("config", None, "a preset's name or a .toml file")
_SET = flags.DEFINE_multi_string("set", [], "engine option, key.path=value; may be repeated")
_LOAD_FORMAT = flags.DEFINE_enum(
    "load_format",
    None,
    ["auto", "random"],
    "random: draw random weights; only a configuration is needed",
)

_HELP = {
    "temperature": "0: greedy",
    "max_tokens": "the most tokens to generate",
    "n": "samples of each prompt",
    "seed": "the seed of the request's random numbers",
    "top_k": "sample from the k likeliest tokens",
    "top_p": "sample from the likeliest tokens that together have this probability",
    "logit_bias": 'a JSON object, {"token id": bias}',
    "allowed_token_ids": "comma-separated token ids",
    "stop_token_ids": "comma-separated token ids",
    "stop": "a stop string; may be repeated",
    "bad_words": "a text that may not appear; may be repeated",
}


def _define_sampling_flags() -> None:
    """Define a flag for each field of `SamplingParams`; its value is None unless given."""
    for field in dataclasses.fields(SamplingParams):
        name, kind = field.name, str(field.type)
        text = _HELP.get(name, f"see SamplingParams.{name}")
        if "bool" in kind:
            flags.DEFINE_bool(name, None, text)
        elif "float" in kind and "Mapping" not in kind:
            flags.DEFINE_float(name, None, text)
        elif "str" in kind:
            flags.DEFINE_multi_string(name, None, text)
        elif "Sequence" in kind:
            flags.DEFINE_list(name, None, text)
        elif "Mapping" in kind:
            flags.DEFINE_string(name, None, text)
        else:
            flags.DEFINE_integer(name, None, text)


_define_sampling_flags()
HELP = {
    "Model": ("model", "config", "set", "load_format"),
    "Input and output": ("prompt", "prompts_file", "chat", "apply_chat_template", "format"),
    "Sampling": ("temperature", "max_tokens", "top_p", "top_k", "seed", "stop", "n", "logprobs"),
    "Several devices": host_flags.HELP,
}


def sampling_changes() -> dict[str, Any]:
    """Return the fields of `SamplingParams` that are given as flags."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingParams):
        value = FLAGS[field.name].value
        if value is None:
            continue
        try:
            if field.name == "logit_bias":
                value = {int(k): v for k, v in json.loads(value).items()}
            elif field.name.endswith("_token_ids"):
                value = [int(v) for v in value]
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"--{field.name}={value}: {_HELP[field.name]} ({error})") from error
        changes[field.name] = value
    return changes


def read_prompts(path: str) -> list[str]:
    """Read one JSON string from each line; `ValueError` for other lines, and for none at all."""
    prompts = read_json_strings(path)
    if not prompts:
        raise ValueError(f"{path}: no prompts; put one JSON string on each line")
    return prompts


def check_and_print_plan(loaded: Any) -> None:
    """Refuse a model that cannot generate from texts, and print the plan, before compiling."""
    engine = need_engine(loaded)
    if engine.tokenizer is None:
        raise CheckpointError(
            f"{engine.name} has no tokenizer, and this command takes texts: put the files of one "
            "next to its config.json, or give token ids to LLM.generate in Python"
        )
    print_plan(engine)


def print_plan(engine: EngineLike) -> None:
    """Print what will run, before its programs are compiled."""
    model, config = engine.model, engine.config
    lines = {
        "model": f"{engine.name} ({model.family.name}), computed as {model.numerics.dtype.name}",
        "weights": describe_weights(engine),
        "mesh": describe_mesh(engine),
        "cache": describe_cache(engine),
        "context": f"{engine.max_model_len:,} tokens; up to {config.max_running} requests at once",
        "step": f"at most {config.scheduler.max_num_batched_tokens} tokens, compiled for "
        + ", ".join(map(str, config.buckets)),
    }
    for name, line in lines.items():
        if line:
            print(f"{name:>9}  {line}", file=sys.stderr)


def peak_memory_mib() -> float:
    """Return the most memory that this process has had, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def stream_one(llm: LLM, prompt: str | list[int], params: SamplingParams) -> str:
    """Print an answer as it arrives, then its figures on stderr, and return the answer."""
    num_before = llm.engine.stats.num_generated
    start, first = time.perf_counter(), None
    pieces = []
    for text in llm.stream(prompt, params):
        first = first or time.perf_counter()
        pieces.append(text)
        print(text, end="", flush=True)
    end = time.perf_counter()
    print(flush=True)
    num_tokens = llm.engine.stats.num_generated - num_before
    first = first or end
    rate = (num_tokens - 1) / (end - first) if num_tokens > 1 and end > first else 0.0
    print(
        f"\nfirst token after {(first - start) * 1e3:.0f} ms, then {rate:.1f} tokens/s "
        f"({num_tokens} tokens); peak memory {peak_memory_mib():,.0f} MiB",
        file=sys.stderr,
    )
    return "".join(pieces)


def chat(llm: LLM, params: SamplingParams) -> None:
    """Hold a conversation in the terminal; Ctrl-C stops an answer, the end of input ends it."""
    messages: list[Mapping[str, str]] = []
    print("Say something; /reset starts over, /exit ends it.", file=sys.stderr)
    while True:
        try:
            print("> ", end="", file=sys.stderr, flush=True)
            line = input()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            messages = []
            continue
        if not line.strip():
            continue
        question = [*messages, {"role": "user", "content": line}]
        try:
            answer = stream_one(llm, llm.tokenizer.encode_chat(question), params)
            messages = [*question, {"role": "assistant", "content": answer}]
        except KeyboardInterrupt:
            print("\n(stopped; the question is forgotten)", file=sys.stderr)
        except ValueError as error:
            print(f"{error}; /reset starts a new conversation", file=sys.stderr)


def _logprobs(entries: Any) -> Any:
    return [None if e is None else e._asdict() for e in entries]


def as_json(prompt: str, output: Output) -> dict[str, Any]:
    """Return the JSON object that `--format=jsonl` prints for a prompt."""

    def sample(completion: Completion) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "token_ids": completion.token_ids,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
        }
        if completion.logprobs is not None:
            fields["logprobs"] = _logprobs(completion.logprobs)
        return fields

    line = {"prompt": prompt, "prompt_token_ids": output.prompt_token_ids}
    line |= sample(output.outputs[0])
    if len(output.outputs) > 1:
        line["samples"] = [sample(completion) for completion in output.outputs]
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    return line


def run_prompts(llm: LLM, prompts: list[str], params: SamplingParams) -> int:
    """Answer all prompts together, and return the number of those that were refused."""
    results: list[dict[str, Any]] = []
    accepted: list[tuple[int, list[int]]] = []
    for prompt in prompts:
        results.append({"prompt": prompt})
        try:
            token_ids = results[-1]["prompt_token_ids"] = encode(llm, prompt)
            llm.engine.check(token_ids, params)
            accepted.append((len(results) - 1, token_ids))
        except ValueError as error:  # not encodable, or refused
            results[-1]["error"] = str(error)
    start = time.perf_counter()
    outputs = llm.generate([ids for _, ids in accepted], params) if accepted else []
    seconds = time.perf_counter() - start
    for (index, _), output in zip(accepted, outputs, strict=True):
        results[index] = as_json(prompts[index], output)
    for result in results:
        if FLAGS["format"].value == "jsonl":
            print(json.dumps(result))
        else:
            samples = result.get("samples", [result])
            print(f"--- {result['prompt']!r}")
            for sample in samples:
                print(sample.get("text", f"refused: {result.get('error')}"))
    num_tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    print(
        f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / max(seconds, 1e-9):.1f} tokens/s; "
        f"peak memory {peak_memory_mib():,.0f} MiB",
        file=sys.stderr,
    )
    return len(prompts) - len(accepted)


def encode(llm: LLM, prompt: str) -> list[int]:
    """Return the token ids of a prompt, by the chat template where `--apply_chat_template`."""
    if _TEMPLATE.value:
        return llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return llm.tokenizer.encode(prompt)


def run(peers: Peers) -> int:
    """Check the flags, load the model, and answer; the return value is an exit code."""
    chosen = [_PROMPT.value is not None, bool(_PROMPTS_FILE.value), _CHAT.value]
    if sum(chosen) != 1:
        raise ValueError("give one of --prompt, --prompts_file and --chat")
    if _CHAT.value and _FORMAT.value == "jsonl":
        raise ValueError("--chat is a conversation; it cannot print --format=jsonl")
    prompts = read_prompts(_PROMPTS_FILE.value) if _PROMPTS_FILE.value else [_PROMPT.value or ""]
    changes = sampling_changes()
    if _FORMAT.value == "text" and {"logprobs", "prompt_logprobs"} & changes.keys():
        raise ValueError("log-probabilities are printed with --format=jsonl only")
    if _CHAT.value and changes.get("n", 1) != 1:
        raise ValueError(f"--chat carries one answer; --n={changes['n']} asks for more")
    SamplingParams(**changes)  # its errors come before the model is loaded
    overrides = [*_SET.value]
    if _LOAD_FORMAT.value is not None:
        overrides.append(f"load_format={_LOAD_FORMAT.value}")
    config = load_config(_CONFIG.value, overrides)
    if not peers.is_leader:
        return follow_process_0(_MODEL.value, config, peers)
    llm = LLM(_MODEL.value, config, on_loaded=check_and_print_plan, peers=peers)
    params = llm.default_params(**changes)
    compile_s = sum(replica.runner.compile_seconds for replica in llm.engine.replicas)
    print(
        f"{'programs':>9}  {llm.engine.stats.num_compiled} compiled or read from the cache in "
        f"{compile_s:.1f} s\n",
        file=sys.stderr,
    )
    if _CHAT.value:
        chat(llm, params)
        return 0
    if _PROMPT.value is not None and _FORMAT.value == "text" and params.n == 1:
        stream_one(llm, encode(llm, _PROMPT.value), params)
        return 0
    return 1 if run_prompts(llm, prompts, params) else 0


def main(argv: list[str]) -> int:
    """Generate what the flags ask for, and return an exit code."""
    del argv
    try:
        with process_group() as peers:
            return run(peers)
    except BrokenPipeError:  # an OSError that is no fault of the options
        raise
    except (CheckpointError, HostsError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
