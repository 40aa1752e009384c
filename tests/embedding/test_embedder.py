"""The embedder: vectors that do not depend on the batch, and refusals of invalid input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, CheckpointError, ConfigError, InvalidRequestError
from jaxinfer.build import need_engine
from jaxinfer.embedding.sentences import encode_text, finalize_vectors, truncate_token_ids
from tests.support import running
from tests.support.tiny_encoder import (
    DIM,
    MAX_LEN,
    checkpoint,
    texts_of_lengths,
    tiny_embedder,
    write_encoder,
)

LENGTHS = (7, 48, 16, 3, 20, 17, 5, 33, 2, 12, 40)
TEXT = "the cat sat on the mat. " * 20


@pytest.fixture(scope="module")
def embedder():
    return tiny_embedder()


@pytest.fixture(scope="module")
def llm():
    return LLM(checkpoint(), show_progress=False)


def test_vectors_do_not_depend_on_the_batch(embedder):
    texts = texts_of_lengths(LENGTHS)
    together = embedder.embed(texts)
    assert together.shape == (len(texts), DIM) and together.dtype == np.float32
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    assert np.abs(together - alone).max() < 1e-5
    assert np.abs(together[0] - together[1]).max() > 0.01  # texts do differ
    assert not embedder.has_requests


def test_vectors_are_the_mean_of_the_hidden_states(embedder):
    model, weights = running.load(checkpoint())
    [text] = texts_of_lengths([11])
    hidden_of = jax.jit(lambda weights, *batch: model.merge(weights)(*batch))
    ids, length = jnp.asarray([text], jnp.int32), jnp.asarray([11], jnp.int32)
    hidden = np.asarray(hidden_of(weights, ids, length))
    assert np.abs(embedder.embed([text])[0] - hidden[0].mean(axis=0)).max() < 1e-5


def test_vectors_without_overlap_are_equal(embedder):
    texts = texts_of_lengths(LENGTHS)
    other = tiny_embedder({"overlap": False})
    assert np.abs(other.embed(texts) - embedder.embed(texts)).max() < 1e-6


def test_warm_up_compiles_every_program():
    embedder = tiny_embedder({"warm_up": True})
    assert embedder.stats.num_compiled == len(embedder.buckets) == embedder.num_programs
    embedder.embed(texts_of_lengths(LENGTHS))
    stats = embedder.stats
    assert stats.num_compiled == len(embedder.buckets) and stats.num_late_compiles == 0
    assert stats.num_computed == sum(LENGTHS) and stats.num_running == stats.num_waiting == 0


def test_abort_leaves_the_other_texts_unchanged(embedder):
    texts = texts_of_lengths(LENGTHS[:6])
    expected = embedder.embed(texts)
    requests = [embedder.add(text)[0] for text in texts]
    assert embedder.abort(requests[2].id) and not embedder.abort(requests[2].id)
    updates = embedder.step()
    assert embedder.abort(requests[1].id)  # in flight or waiting
    while embedder.has_requests:
        updates += embedder.step()
    found = {update.request.id: update.embedding for update in updates}
    kept = [i for i in range(6) if i not in (1, 2)]
    assert sorted(found) == sorted(requests[i].id for i in kept)
    for i in kept:
        assert np.abs(found[requests[i].id] - expected[i]).max() < 1e-5


def test_failed_step_is_repeated(embedder, monkeypatch):
    texts = texts_of_lengths(LENGTHS)
    expected = embedder.embed(texts)
    requests = [embedder.add(text)[0] for text in texts]
    embedder.step()
    with monkeypatch.context() as patch:
        patch.setattr(embedder, "_program", lambda bucket: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            embedder.step()
    updates = []
    while embedder.has_requests:
        updates += embedder.step()
    found = {update.request.id: update.embedding for update in updates}
    vectors = np.stack([found[request.id] for request in requests])
    assert np.abs(vectors - expected).max() < 1e-5


def test_one_invalid_text_embeds_none_of_the_list(embedder):
    with pytest.raises(InvalidRequestError, match=r"text 1: .* 49 tokens; .* takes 48"):
        embedder.embed([[2, 3], [2] * 49, [2, 3]])
    assert not embedder.has_requests


@pytest.mark.parametrize(
    ("ids", "error_text"),
    [
        ([], "empty"),
        ([160], r"token 160 at position 0 is outside the vocabulary \[0, 160\)"),
        ([2, -1], "token -1 at position 1"),
        ([True], "token True"),
        ([1.5], r"token 1\.5"),
    ],
)
def test_invalid_token_ids_are_refused_by_name(embedder, ids, error_text):
    with pytest.raises(InvalidRequestError, match=error_text):
        embedder.embed([ids])


def test_long_text_is_refused_or_truncated(embedder):
    ids = encode_text(embedder, TEXT)
    assert len(ids) > MAX_LEN  # the tokenizer's own max_length of 20 is ignored
    with pytest.raises(InvalidRequestError, match="set truncate"):
        embedder.embed([ids])
    cut = encode_text(embedder, TEXT, truncate=True)
    assert cut == [*ids[: MAX_LEN - 1], ids[-1]]
    assert encode_text(embedder, ids, truncate=True) == ids[:MAX_LEN]
    assert encode_text(embedder, "the cat", truncate=True) == encode_text(embedder, "the cat")


def test_truncation_handles_special_tokens_inside_the_text(embedder):
    text = "[SEP] [CLS] " * 40
    cut = encode_text(embedder, text, truncate=True)
    assert len(cut) == MAX_LEN and cut[:3] == [2, 3, 2] and cut[-1] == 3


@pytest.mark.parametrize(
    ("ids", "bare", "max_len", "expected"),
    [
        ([2, 5, 6, 7, 3], [5, 6, 7], 4, [2, 5, 6, 3]),
        ([2, 5, 6, 7, 3], [5, 6, 7], 2, [2, 3]),
        ([2, 5, 6, 7, 3], [5, 6, 7], 1, [3]),
        ([2, 9, 7, 3], [5, 7], 3, [2, 9, 3]),  # the first word is tokenized differently
        ([2, 9, 7], [5, 7], 2, [2, 9]),
    ],
)
def test_truncation_keeps_the_last_special_token(ids, bare, max_len, expected):
    empty = [2, 3] if ids[-1] == 3 else [2]
    assert truncate_token_ids(ids, bare, empty, max_len) == expected


def test_prompt_is_selected_by_name(embedder):
    plain = encode_text(embedder, "the cat")
    assert encode_text(embedder, "the cat", prompt_name="query") == encode_text(
        embedder, "query: the cat"
    )
    assert encode_text(embedder, "the cat", prompt_name="document") == plain
    with pytest.raises(InvalidRequestError, match=r"'passage'.* has 'query', 'document'"):
        encode_text(embedder, "the cat", prompt_name="passage")
    with pytest.raises(InvalidRequestError, match="token ids"):
        encode_text(embedder, plain, prompt_name="query")


def test_default_prompt_and_lower_case_apply_to_texts_only(tmp_path):
    changes = {
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: "},
            "default_prompt_name": "query",
        },
        "sentence_bert_config.json": {"do_lower_case": True},
    }
    embedder = tiny_embedder(source=write_encoder(tmp_path / "model", changes))
    assert embedder.max_model_len == 128  # the model's number of positions
    assert encode_text(embedder, "A") == encode_text(embedder, "query: a", prompt_name="")
    assert encode_text(embedder, [2, 3]) == [2, 3]


def test_vectors_are_truncated_then_normalized(llm):
    texts = ["the cat sat", "on the mat"]
    plain = llm.embed(texts, normalize=False)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.abs(lengths - 1).min() > 0.1
    assert np.abs(llm.embed(texts) - plain / lengths).max() < 1e-6  # as the checkpoint says
    cut = plain[:, :5]
    assert np.array_equal(llm.embed(texts, normalize=False, dimensions=5), cut)
    short = llm.embed(texts, dimensions=5)
    assert np.abs(short - cut / np.linalg.norm(cut, axis=1, keepdims=True)).max() < 1e-6
    for wrong in (0, DIM + 1):
        with pytest.raises(InvalidRequestError, match=f"dimensions is {wrong}"):
            llm.embed(texts, dimensions=wrong)


def test_zero_vector_stays_zero(embedder):
    assert not finalize_vectors(embedder, np.zeros((1, DIM), np.float32), normalize=True).any()


def test_embed_accepts_one_text_or_token_ids(llm):
    assert llm.embed("the cat").shape == llm.embed([2, 5, 3]).shape == (1, DIM)
    assert llm.embed(["the cat", [2, 5, 3]]).shape == (2, DIM)
    assert llm.embed([]).shape == (0, DIM)
    with pytest.raises(InvalidRequestError, match="text 1: the text holds a lone surrogate"):
        llm.embed(["a", "\ud800"])


def test_encoder_refuses_to_generate(llm):
    for call in (llm.generate, llm.chat, lambda text: next(llm.stream(text))):
        with pytest.raises(ValueError, match=r"encoder|chat template"):
            call("the cat")
    with pytest.raises(InvalidRequestError, match="an encoder, which embeds"):
        llm.generate(["the cat"])
    with pytest.raises(CheckpointError, match="does not generate"):
        need_engine(llm.embedder)


def test_generating_model_refuses_to_embed():
    from tests.support.tiny_server import checkpoint as decoder

    config = tiny_embedder().config
    with pytest.raises(InvalidRequestError, match="load an encoder"):
        LLM(decoder(), config, show_progress=False).embed("the cat")


def test_max_model_len_above_the_positions_is_refused():
    assert tiny_embedder({"max_model_len": 128}).max_model_len == 128
    assert tiny_embedder({"max_model_len": 20}).max_model_len == 20
    with pytest.raises(ConfigError, match="max_model_len is 129; this encoder has 128 positions"):
        tiny_embedder({"max_model_len": 129})


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "int8"}])
def test_bfloat16_and_int8_embeddings_are_close(embedder, options):
    texts = texts_of_lengths([9])
    expected = finalize_vectors(embedder, embedder.embed(texts))
    found = finalize_vectors(embedder, tiny_embedder(options).embed(texts))
    assert ((expected * found).sum(axis=1) > 0.999).all()
    assert np.abs(expected - found).max() > 1e-6


def test_packed_weights_option_is_refused_for_unquantized_weights():
    with pytest.raises(ConfigError, match="weights is 'packed'"):
        tiny_embedder({"weights": "packed"})
