"""`jaxinfer generate` and `jaxinfer chat` refuse what they cannot run, before they compile.

`tests/engine/test_smollm2.py` has their answers.
"""

from __future__ import annotations

import json

import pytest

from jaxinfer.cli.json_strings import read_json_strings
from tests.support.command_line import Result, run_all
from tests.support.tiny_checkpoints import TinyLlama, config_json

WRONG = [
    (["--prompt=x", "--temperature=-1"], "temperature"),
    (["--prompt=x", "--set", "cache.page_sizes=4"], "cache.page_sizes"),
    (["--prompt=x", "--config=nothing"], "nothing"),
    (["--prompt=x", "--logit_bias=5"], "logit_bias"),
    (["--prompt=x", "--chat"], "--chat"),
    (["--prompts_file=/nonexistent"], "nonexistent"),
    (["--prompt=x", "--model=/nonexistent.gguf"], "nonexistent.gguf"),
    ([], "give one of --prompt, --prompts_file and --chat"),
]
DEMO = ["--model=demo", "--config=demo"]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[tuple[str, ...], Result]:
    lines = [["generate", *DEMO, *flags] for flags, _ in WRONG]
    lines += [["chat", *DEMO, "--n=2"], ["chat", *DEMO, "--format=jsonl"]]
    return run_all(lines, tmp_path_factory.mktemp("generate"))


@pytest.mark.parametrize(("flags", "named"), WRONG)
def test_generate_refuses_bad_flags_by_name(results, flags, named):
    code, stdout, stderr = results["generate", *DEMO, *flags]
    assert code == 2 and stdout == ""
    assert named in stderr and "Traceback" not in stderr


def test_chat_refuses_several_answers_and_json(results):
    for flag, reason in (("--n=2", "--n=2 asks for more"), ("--format=jsonl", "--format=jsonl")):
        code, stdout, stderr = results["chat", *DEMO, flag]
        assert code == 2 and stdout == "" and reason in stderr


def test_generate_needs_a_tokenizer_before_it_compiles(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(TinyLlama())))
    line = ["generate", f"--model={tmp_path}", "--load_format=random", "--prompt=Hi"]
    [(code, _, stderr)] = run_all([line], tmp_path).values()
    assert code == 2 and "compiling" not in stderr
    assert "has no tokenizer, and this command takes texts" in stderr


def test_json_strings_are_read_and_other_lines_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff"a"\n\n"ünïcödé"\r\n', "utf-8")
    assert read_json_strings(str(file)) == ["a", "ünïcödé"]
    file.write_text('"a"\n3\nb\n')
    wrong = r"prompts\.jsonl: line 2 holds a JSON int, not a string; line 3 is not JSON"
    with pytest.raises(ValueError, match=wrong):
        read_json_strings(str(file))
    file.write_bytes(b'"\xff"')
    with pytest.raises(ValueError, match=r"prompts\.jsonl: not UTF-8"):
        read_json_strings(str(file))
