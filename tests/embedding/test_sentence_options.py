"""A checkpoint's embedding options are read, or refused by name."""

import dataclasses
import fnmatch
import json

import pytest

from jaxinfer import CheckpointError
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.sentence_options import SentenceOptions, sentence_options
from jaxinfer.loading.tokenizers import sentencepiece_files
from tests.support.families_encoders import CASES
from tests.support.family_bench import make_tensors, recorded, write_gguf, write_huggingface
from tests.support.tiny_encoder import FILES

MODULES = FILES["modules.json"]
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.fixture
def options_of(tmp_path):
    """Return a function that reads the options of `FILES` with changes; None removes a file."""

    def read(changes=None) -> SentenceOptions:
        folder = write_huggingface(CASES["bert"], {}, tmp_path / "model")
        for name, content in {**FILES, **(changes or {})}.items():
            if content is not None:
                (folder / name).parent.mkdir(exist_ok=True)
                text = content if isinstance(content, str) else json.dumps(content)
                (folder / name).write_text(text)
        return sentence_options(open_checkpoint(folder))

    return read


def pooling(**config):
    return {"1_Pooling/config.json": config}


def at(path):
    """Return the steps, with the pooling step's files in `path`."""
    return [MODULES[0], {**MODULES[1], "path": path}]


def test_sentence_transformers_files_are_read(options_of):
    options = options_of()
    assert options == SentenceOptions(
        ("mean",), True, 48, False, {"query": "query: ", "document": ""}, None
    )


def test_options_without_files_are_the_unnormalized_mean(options_of):
    assert options_of({"modules.json": None}) == SentenceOptions(("mean",), normalize=False)


def test_normalization_is_read_from_the_steps(options_of):
    assert options_of({"modules.json": MODULES[:2]}).normalize is False


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_max_tokens": True}, ("max",)),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt_len_tokens",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("weightedmean",)),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "cls"]}, ("cls", "mean")),
        ({}, ("mean",)),
    ],
)
def test_pooling_is_read_from_the_older_and_newer_keys(options_of, config, modes):
    assert options_of(pooling(**config)).pooling == modes


def test_newer_step_names_are_read(options_of):
    steps = ["base.modules.transformer.Transformer", "sentence_transformer.modules.Pooling"]
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.{step}"}
        for i, (step, path) in enumerate(zip(steps, ("", "1_Pooling"), strict=True))
    ]
    assert options_of({"modules.json": modules}).pooling == ("mean",)


def test_sentence_config_named_after_another_model_is_read(options_of):
    changes = {
        "sentence_bert_config.json": None,
        "sentence_xlm-roberta_config.json": {"max_seq_length": 30, "do_lower_case": True},
    }
    options = options_of(changes)
    assert options.max_len == 30 and options.lower_case is True


def test_default_prompt_is_read(options_of):
    config = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    assert options_of({"config_sentence_transformers.json": config}).default_prompt_name == "query"


@pytest.mark.parametrize(
    ("changes", "error_text"),
    [
        ({"modules.json": [*MODULES[:2], DENSE]}, "the step Dense .'2_Dense'. is not supported"),
        ({"modules.json": MODULES[::-1]}, "in this order"),
        ({"modules.json": [MODULES[0]]}, "in this order"),
        ({"modules.json": [{**MODULES[0], "path": "0_T"}, MODULES[1]]}, "is in '0_T'"),
        ({"modules.json": {"a": 1}}, "not a list of steps"),
        ({"modules.json": "{"}, r"modules\.json: cannot be read"),
        ({"modules.json": "[" * 100_000}, r"modules\.json: cannot be read"),
        ({"modules.json": at(None)}, "path None is not a folder inside"),
        ({"modules.json": at(3)}, "path 3 is not a folder inside"),
        ({"modules.json": at("../other")}, r"path '\.\./other' is not a folder inside"),
        ({"modules.json": at("1_Pooling/../..")}, "is not a folder inside"),
        ({"modules.json": at("/etc")}, "path '/etc' is not a folder inside"),
        (pooling(include_prompt=False), "include_prompt"),
        (pooling(pooling_mode="attention"), "attention"),
        (pooling(pooling_mode=3), "3"),
        (pooling(pooling_mode_new_one=True), "pooling_mode_new_one"),
        ({"1_Pooling/config.json": "["}, "1_Pooling"),
        ({"sentence_bert_config.json": {"max_seq_length": 0}}, "max_seq_length is 0"),
        ({"sentence_bert_config.json": {"do_lower_case": "no"}}, "do_lower_case is 'no'"),
        ({"config_sentence_transformers.json": {"prompts": {"a": 1}}}, "not an object of strings"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "q"}}, "'q' is not among"),
    ],
)
def test_unsupported_sentence_options_are_refused_by_name(options_of, changes, error_text):
    with pytest.raises(CheckpointError, match=error_text):
        options_of(changes)


def test_all_problems_are_listed_in_one_error(options_of):
    changes = {"modules.json": [*MODULES[:2], DENSE], "sentence_bert_config.json": "x"}
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*Dense.*sentence_bert_config"):
        options_of(changes | pooling())


@pytest.mark.parametrize(("number", "mode"), [(0, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_gguf_pooling_type_is_read(tmp_path, number, mode):
    options = sentence_options(gguf(tmp_path, number))
    assert options.pooling[0].startswith(mode) and options.normalize is True


def test_reranker_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="a reranker"):
        sentence_options(gguf(tmp_path, 4))


def gguf(folder, pooling_type: int):
    form = CASES["bert"].gguf
    assert form is not None
    changed = dataclasses.replace(form, metadata={**form.metadata, "pooling_type": pooling_type})
    case = dataclasses.replace(CASES["bert"], gguf=changed)
    tensors = make_tensors(recorded("encoders")["bert"]["shapes"], case.seed)
    return open_checkpoint(write_gguf(case, tensors, folder / "model.gguf"))


def test_hub_download_includes_pooling_and_vocabulary_files(tmp_path, monkeypatch):
    folder = write_huggingface(CASES["bert"], {}, tmp_path)
    requested = []

    def snapshot_download(hub_id, **patterns):
        requested.append(patterns["allow_patterns"])
        if len(requested) == 1:
            (folder / "modules.json").write_text(json.dumps(MODULES))
        else:
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert sentence_options(open_checkpoint("org/name")).pooling == ("cls",)
    assert requested[1] == ["*_Pooling/config.json"]
    vocabularies = (*sentencepiece_files.NAMES, "vocab.json", "merges.txt", "vocab.txt")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *vocabularies):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in requested[0]), name
    for name in ("pytorch_model.bin", "model.onnx", "LICENSE.txt"):
        assert not any(fnmatch.fnmatch(name, pattern) for pattern in requested[0]), name
