"""The demo model, for real: golden tokens and logits of the reference, the command, the figures."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams, load_config
from tests.support import running
from tests.support.paths import ROOT

GOLDEN = json.loads((ROOT / "tests/references/smollm2_golden.json").read_text("utf-8"))
TIE = 1e-4  # logits this close may be told apart differently


@pytest.fixture(scope="module")
def llm():
    return LLM("demo", load_config("demo"), show_progress=False)


def test_greedy_tokens_equal_transformers(llm):
    """20 prompts x 64 tokens, all in one continuous batch."""
    params = SamplingParams(temperature=0, max_tokens=GOLDEN["num_tokens"], ignore_eos=True)
    outputs = llm.generate([p["prompt_token_ids"] for p in GOLDEN["prompts"]], params)
    differing = {}
    for prompt, output in zip(GOLDEN["prompts"], outputs, strict=True):
        got, wanted = output.outputs[0].token_ids, prompt["tokens"]
        at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b), None)
        if at is not None:
            differing[prompt["name"]] = (at, prompt["leads"][at])
    assert all(lead <= TIE for _, lead in differing.values()), differing


def test_logits_equal_transformers(llm):
    """The recorded logits after each prompt: the largest ones and a spread of the others."""
    engine = llm.engine
    for prompt in GOLDEN["prompts"][::4]:
        token_ids = prompt["prompt_token_ids"]
        logits = running.all_logits(engine.model, engine.runner.weights, token_ids)[-1]
        recorded = prompt["prompt_logits"]
        difference = np.abs(logits[recorded["ids"]] - np.asarray(recorded["values"], np.float32))
        assert difference.max() <= 2e-3


def test_the_demo_stays_within_its_compile_budget(llm):
    assert llm.engine.runner.num_compiled <= 8
    assert llm.engine.runner.num_late_compiles == 0


def test_chat_and_stream_answer(llm):
    params = SamplingParams(temperature=0, max_tokens=16)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = llm.chat(messages, params)
    assert "Paris" in answer.outputs[0].text
    streamed = "".join(llm.stream(llm.tokenizer.encode_chat(messages), params))
    assert streamed == answer.outputs[0].text
    stream = llm.stream("Once upon a time", params)
    next(stream)
    assert llm.engine.pool.num_owned > 0
    stream.close()  # leaving early frees the pages
    assert llm.engine.pool.num_owned == 0


def test_streams_may_take_turns(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["Once upon a time", "The sky is"]
    expected = [o.outputs[0].text for o in llm.generate(prompts, params)]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    pieces = ["", ""]
    for both in itertools.zip_longest(*streams, fillvalue=""):
        pieces = [a + b for a, b in zip(pieces, both, strict=True)]
    assert pieces == expected


def test_a_refused_prompt_names_its_place_and_leaves_nothing_running(llm):
    with pytest.raises(ValueError, match="prompt 1"):
        llm.generate(["fine", [10**9]], SamplingParams(max_tokens=4))
    assert llm.engine.num_requests == 0 and llm.engine.pool.num_owned == 0


def run_generate(*flags, stdin=None):
    command = [
        sys.executable,
        "-m",
        "jaxinfer",
        "generate",
        "--model=demo",
        "--config=demo",
        *flags,
    ]
    # The rest of the suite has compiled the demo's programs: this start is a warm one.
    return subprocess.run(
        command, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=300
    )


@pytest.mark.once
def test_generate_prints_one_json_object_for_each_prompt_and_nothing_else(llm, tmp_path):
    prompts = ["The sky is", 'Quotes "and" \n newlines, ünïcödé', ""]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(p) + "\n" for p in prompts), "utf-8")
    done = run_generate(
        f"--prompts_file={file}", "--format=jsonl", "--temperature=0", "--max_tokens=6"
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert done.returncode == 1 and "empty" in lines[2]["error"]  # and the others ran
    expected = llm.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=6))
    for line, output in zip(lines, expected, strict=False):
        assert list(line) == ["prompt", "prompt_token_ids", "token_ids", "text", "finish_reason"]
        assert line["prompt_token_ids"] == output.prompt_token_ids
        assert line["token_ids"] == output.outputs[0].token_ids
        assert line["text"] == output.outputs[0].text
        assert line["finish_reason"] == output.outputs[0].finish_reason


@pytest.mark.once
def test_generate_holds_a_conversation(llm):
    del llm  # its programs are in the compilation cache by now
    talk = "My name is Ada.\n/reset\nWhat is the capital of France?\n/exit\n"
    done = run_generate("--chat", "--temperature=0", "--max_tokens=24", stdin=talk)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
