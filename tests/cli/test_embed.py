"""`jaxinfer embed` prints a JSON object for each text, or an error that names the text."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.embedding.sentences import encode_text, finalize_vectors
from tests.support.paths import ROOT
from tests.support.tiny_encoder import checkpoint, tiny_embedder
from tests.support.tiny_server import checkpoint as decoder


def run(
    *flags: str, texts: str = "", subcommand: str = "embed", model: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxinfer", subcommand, f"--model={model or checkpoint()}"]
    options = ["--set=warm_up=false", "--set=bucket_growth=3"]
    return subprocess.run(
        [*command, *flags, *options],
        input=texts,
        capture_output=True,
        cwd=ROOT,
        text=True,
        timeout=300,
    )


def test_embed_prints_the_texts_of_a_file_in_order():
    texts = ["the cat", "a dog " * 60, 'quo"te\n'[:-1]]
    done = run(
        "--texts_file=-",
        "--truncate",
        "--dimensions=8",
        "--prompt_name=query",
        texts="\n".join(map(json.dumps, texts)) + "\n",
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["text"] for row in rows] == texts and [row["index"] for row in rows] == [0, 1, 2]
    embedder = tiny_embedder()
    ids = [encode_text(embedder, t, prompt_name="query", truncate=True) for t in texts]
    expected = finalize_vectors(embedder, embedder.embed(ids), dimensions=8)
    assert [row["num_tokens"] for row in rows] == [len(each) for each in ids]
    assert np.abs(np.array([row["embedding"] for row in rows]) - expected).max() < 1e-5
    assert "tiny: 24,352 parameters, 0.1 MB, 4.00 bytes each" in done.stderr


def test_embed_refuses_all_texts_if_one_is_too_long():
    done = run("--text=a", "--text=" + "the cat " * 60)
    assert done.returncode == 2 and not done.stdout
    assert "error: text 1: the text has" in done.stderr


@pytest.mark.parametrize(
    ("subcommand", "flags", "reason"),
    [
        ("embed", ["--text=a"], "tiny: this model generates and embeds nothing"),
        ("generate", ["--prompt=a"], "tiny: this model is an encoder"),
    ],
)
def test_subcommand_refuses_another_kind_of_model_before_compiling(subcommand, flags, reason):
    model = decoder() if subcommand == "embed" else checkpoint()
    done = run(*flags, subcommand=subcommand, model=model)
    assert done.returncode == 2 and not done.stdout
    assert f"error: {reason}" in done.stderr and "compiling" not in done.stderr


def test_embed_names_wrong_lines_before_it_loads_the_model():
    done = run("--texts_file=-", texts='"a"\n3\nb\n')
    assert done.returncode == 2 and not done.stdout
    assert "line 2 holds a JSON int, not a string; line 3 is not JSON" in done.stderr
