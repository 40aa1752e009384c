"""The embedder: vectors that are the text's own, whoever shares the batch, and refusals by name."""

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


def test_a_batch_of_texts_is_each_of_them_alone(embedder):
    texts = texts_of_lengths(LENGTHS)
    together = embedder.embed(texts)
    assert together.shape == (len(texts), DIM) and together.dtype == np.float32
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    assert np.abs(together - alone).max() < 1e-5
    assert np.abs(together[0] - together[1]).max() > 0.01  # they do differ
    assert not embedder.has_requests


def test_vectors_are_the_mean_of_the_models_hidden_states(embedder):
    model, weights = running.load(checkpoint())
    [text] = texts_of_lengths([11])
    hidden_of = jax.jit(lambda weights, *batch: model.merge(weights)(*batch))
    ids, length = jnp.asarray([text], jnp.int32), jnp.asarray([11], jnp.int32)
    hidden = np.asarray(hidden_of(weights, ids, length))
    assert np.abs(embedder.embed([text])[0] - hidden[0].mean(axis=0)).max() < 1e-5


def test_without_overlap_the_vectors_are_the_same(embedder):
    texts = texts_of_lengths(LENGTHS)
    other = tiny_embedder({"overlap": False})
    assert np.abs(other.embed(texts) - embedder.embed(texts)).max() < 1e-6


def test_nothing_compiles_after_warm_up():
    embedder = tiny_embedder({"warm_up": True})
    assert embedder.stats.num_compiled == len(embedder.buckets) == embedder.num_programs
    embedder.embed(texts_of_lengths(LENGTHS))
    stats = embedder.stats
    assert stats.num_compiled == len(embedder.buckets) and stats.num_late_compiles == 0
    assert stats.num_computed == sum(LENGTHS) and stats.num_running == stats.num_waiting == 0


def test_a_text_that_is_aborted_costs_the_others_nothing(embedder):
    texts = texts_of_lengths(LENGTHS[:6])
    wanted = embedder.embed(texts)
    requests = [embedder.add(text)[0] for text in texts]
    assert embedder.abort(requests[2].id) and not embedder.abort(requests[2].id)
    updates = embedder.step()
    assert embedder.abort(requests[1].id)  # in flight by now, or waiting
    while embedder.has_requests:
        updates += embedder.step()
    found = {update.request.id: update.embedding for update in updates}
    kept = [i for i in range(6) if i not in (1, 2)]
    assert sorted(found) == sorted(requests[i].id for i in kept)
    for i in kept:
        assert np.abs(found[requests[i].id] - wanted[i]).max() < 1e-5


def test_a_step_that_fails_is_done_again(embedder, monkeypatch):
    texts = texts_of_lengths(LENGTHS)
    wanted = embedder.embed(texts)
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
    assert np.abs(vectors - wanted).max() < 1e-5


def test_a_list_of_texts_is_embedded_whole_or_not_at_all(embedder):
    with pytest.raises(InvalidRequestError, match=r"text 1: .* 49 tokens; .* takes 48"):
        embedder.embed([[2, 3], [2] * 49, [2, 3]])
    assert not embedder.has_requests


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "empty"),
        ([160], r"token 160 at position 0 is outside the vocabulary \[0, 160\)"),
        ([2, -1], "token -1 at position 1"),
        ([True], "token True"),
        ([1.5], r"token 1\.5"),
    ],
)
def test_bad_token_ids_are_refused_by_name(embedder, ids, said):
    with pytest.raises(InvalidRequestError, match=said):
        embedder.embed([ids])


def test_a_long_text_is_refused_or_loses_its_last_words(embedder):
    ids = encode_text(embedder, TEXT)
    assert len(ids) > MAX_LEN  # the tokenizer's file says 20, and nobody heeds it
    with pytest.raises(InvalidRequestError, match="set truncate"):
        embedder.embed([ids])
    cut = encode_text(embedder, TEXT, truncate=True)
    assert cut == [*ids[: MAX_LEN - 1], ids[-1]]
    assert encode_text(embedder, ids, truncate=True) == ids[:MAX_LEN]
    assert encode_text(embedder, "the cat", truncate=True) == encode_text(embedder, "the cat")


def test_a_texts_own_special_tokens_do_not_mislead_the_cut(embedder):
    text = "[SEP] [CLS] " * 40
    cut = encode_text(embedder, text, truncate=True)
    assert len(cut) == MAX_LEN and cut[:3] == [2, 3, 2] and cut[-1] == 3


@pytest.mark.parametrize(
    ("ids", "bare", "max_len", "wanted"),
    [
        ([2, 5, 6, 7, 3], [5, 6, 7], 4, [2, 5, 6, 3]),
        ([2, 5, 6, 7, 3], [5, 6, 7], 2, [2, 3]),
        ([2, 5, 6, 7, 3], [5, 6, 7], 1, [3]),
        ([2, 9, 7, 3], [5, 7], 3, [2, 9, 3]),  # the first word became another token
        ([2, 9, 7], [5, 7], 2, [2, 9]),
    ],
)
def test_a_cut_text_keeps_the_special_token_at_its_end(ids, bare, max_len, wanted):
    empty = [2, 3] if ids[-1] == 3 else [2]
    assert truncate_token_ids(ids, bare, empty, max_len) == wanted


def test_prompts_by_name(embedder):
    plain = encode_text(embedder, "the cat")
    assert encode_text(embedder, "the cat", prompt_name="query") == encode_text(
        embedder, "query: the cat"
    )
    assert encode_text(embedder, "the cat", prompt_name="document") == plain
    with pytest.raises(InvalidRequestError, match=r"'passage'.* has 'query', 'document'"):
        encode_text(embedder, "the cat", prompt_name="passage")
    with pytest.raises(InvalidRequestError, match="token ids"):
        encode_text(embedder, plain, prompt_name="query")


def test_a_default_prompt_and_lower_case(tmp_path):
    changes = {
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: "},
            "default_prompt_name": "query",
        },
        "sentence_bert_config.json": {"do_lower_case": True},
    }
    embedder = tiny_embedder(source=write_encoder(tmp_path / "model", changes))
    assert embedder.max_model_len == 128  # the model's
    assert encode_text(embedder, "A") == encode_text(embedder, "query: a", prompt_name="")
    assert encode_text(embedder, [2, 3]) == [2, 3]


def test_vectors_are_cut_then_normalized(llm):
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


def test_a_vector_of_zeros_stays_one(embedder):
    assert not finalize_vectors(embedder, np.zeros((1, DIM), np.float32), normalize=True).any()


def test_one_text_or_a_list_of_ids_is_one_row(llm):
    assert llm.embed("the cat").shape == llm.embed([2, 5, 3]).shape == (1, DIM)
    assert llm.embed(["the cat", [2, 5, 3]]).shape == (2, DIM)
    assert llm.embed([]).shape == (0, DIM)
    with pytest.raises(InvalidRequestError, match="text 1: the text holds a lone surrogate"):
        llm.embed(["a", "\ud800"])


def test_an_encoder_does_not_generate_and_says_so(llm):
    for call in (llm.generate, llm.chat, lambda text: next(llm.stream(text))):
        with pytest.raises(ValueError, match=r"encoder|chat template"):
            call("the cat")
    with pytest.raises(InvalidRequestError, match="an encoder, which embeds"):
        llm.generate(["the cat"])
    with pytest.raises(CheckpointError, match="does not generate"):
        need_engine(llm.embedder)


def test_a_model_that_generates_does_not_embed_and_says_so():
    from tests.support.tiny_server import checkpoint as decoder

    config = tiny_embedder().config
    with pytest.raises(InvalidRequestError, match="load an encoder"):
        LLM(decoder(), config, show_progress=False).embed("the cat")


def test_max_len_may_be_raised_to_the_models_positions_and_no_further():
    assert tiny_embedder({"max_model_len": 128}).max_model_len == 128
    assert tiny_embedder({"max_model_len": 20}).max_model_len == 20
    with pytest.raises(ConfigError, match="max_model_len is 129; this encoder has 128 positions"):
        tiny_embedder({"max_model_len": 129})


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "int8"}])
def test_reduced_types_stay_near(embedder, options):
    texts = texts_of_lengths([9])
    wanted = finalize_vectors(embedder, embedder.embed(texts))
    found = finalize_vectors(embedder, tiny_embedder(options).embed(texts))
    assert ((wanted * found).sum(axis=1) > 0.999).all()
    assert np.abs(wanted - found).max() > 1e-6


def test_weights_that_are_not_packed_cannot_stay_packed():
    with pytest.raises(ConfigError, match="weights is 'packed'"):
        tiny_embedder({"weights": "packed"})
