"""The two generation endpoints: every field is honoured, streamed or whole."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer import Engine
from jaxinfer.loading.checkpoint import GenerationDefaults
from tests.support.http_harness import GREEDY, http_harness, joined, run
from tests.support.tiny_server import tiny_engine

PROMPT = "the end of the"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


def texts_of(body) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def test_prompt_may_be_text_or_token_ids_one_or_several(engine):
    async def main():
        async with http_harness(engine) as harness:
            ids = (await harness.post("/tokenize", prompt=PROMPT)).json()["tokens"]
            (whole,) = texts_of(await harness.complete(PROMPT))
            assert texts_of(await harness.complete(ids)) == [whole]
            (other,) = texts_of(await harness.complete("another"))
            assert texts_of(await harness.complete([PROMPT, "another"])) == [whole, other]
            assert texts_of(await harness.complete([ids, ids])) == [whole, whole]

    run(main())


def test_choices_are_numbered_prompt_by_prompt(engine):
    async def main():
        async with http_harness(engine) as harness:
            fields: Any = {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 6}
            alone = [
                texts_of(await harness.complete(prompt, **fields)) for prompt in ("a", "b", "c")
            ]
            both = await harness.complete(["a", "b", "c"], **fields)
            assert [choice["index"] for choice in both["choices"]] == list(range(6))
            assert texts_of(both) == [text for texts in alone for text in texts]
            assert both["usage"]["prompt_tokens"] == 3
            assert both["usage"]["completion_tokens"] == 36
            events = await harness.stream(prompt=["a", "b", "c"], **fields)
            assert joined(events) == dict(enumerate(texts_of(both)))

    run(main())


def test_max_tokens_defaults_to_16_and_for_chat_to_the_context(engine):
    async def main():
        async with http_harness(engine) as harness:
            assert (await harness.complete(PROMPT))["usage"]["completion_tokens"] == 16
            fields = {"messages": [{"role": "user", "content": "x"}], **GREEDY}
            chat = (await harness.post("/v1/chat/completions", **fields)).json()
            assert chat["usage"]["total_tokens"] == harness.service.model.max_len
            for name in ("max_tokens", "max_completion_tokens"):
                chat = (await harness.post("/v1/chat/completions", **fields, **{name: 5})).json()
                assert chat["usage"]["completion_tokens"] == 5

    run(main())


def test_checkpoint_defaults_apply_to_fields_not_set(engine):
    async def main():
        greedy = GenerationDefaults(do_sample=False)
        async with http_harness(engine, generation=greedy) as harness:
            (whole,) = texts_of(await harness.complete(PROMPT))
            silent = await harness.post(prompt=PROMPT, ignore_eos=True)
            assert texts_of(silent.json()) == [whole]
            told = await harness.post(prompt=PROMPT, ignore_eos=True, temperature=5, seed=1)
            assert texts_of(told.json()) != [whole]

    run(main())


def test_echo_puts_the_prompt_before_the_text(engine):
    async def main():
        async with http_harness(engine) as harness:
            (text,) = texts_of(await harness.complete(PROMPT))
            for prompt in (
                PROMPT,
                (await harness.post("/tokenize", prompt=PROMPT)).json()["tokens"],
            ):
                assert texts_of(await harness.complete(prompt, echo=True)) == [PROMPT + text]
            events = await harness.stream(prompt=PROMPT, echo=True)
            assert joined(events) == {0: PROMPT + text}

    run(main())


def test_echo_with_logprobs_scores_the_prompt(engine):
    async def main():
        async with http_harness(engine) as harness:
            ids = (await harness.post("/tokenize", prompt=PROMPT)).json()["tokens"]
            fields = {"echo": True, "logprobs": 2, "max_tokens": 0}
            (choice,) = (await harness.complete(PROMPT, **fields))["choices"]
            logprobs = choice["logprobs"]
            assert choice["text"] == PROMPT == "".join(logprobs["tokens"])
            assert len(logprobs["tokens"]) == len(ids)
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
            for start, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
                assert PROMPT[start:].startswith(token)
            # The same tokens, when the model is led to them one by one.
            for position in range(1, len(ids)):
                led = {"allowed_token_ids": [ids[position]], "max_tokens": 1, "logprobs": 0}
                (step,) = (await harness.complete(ids[:position], **led))["choices"]
                assert step["logprobs"]["tokens"] == [logprobs["tokens"][position]]

    run(main())


def test_logprobs_are_the_same_streamed_and_whole(engine):
    async def main():
        async with http_harness(engine) as harness:
            fields = {"logprobs": 3, "echo": True, "prompt_logprobs": 1, "max_tokens": 12}
            (whole,) = (await harness.complete(PROMPT, **fields))["choices"]
            choices = [e["choices"][0] for e in await harness.stream(prompt=PROMPT, **fields)]
            for name, values in whole["logprobs"].items():
                assert [value for c in choices for value in c["logprobs"][name]] == values
            assert all(len(top) in (3, 4) for top in whole["logprobs"]["top_logprobs"][1:])
            assert choices[0]["prompt_logprobs"] == whole["prompt_logprobs"]
            assert [len(p["top_logprobs"]) for p in whole["prompt_logprobs"][1:]] == [1] * (
                len(whole["prompt_logprobs"]) - 1
            )
            assert not any("prompt_logprobs" in choice for choice in choices[1:])

    run(main())


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_joins_to_the_whole_for_any_bytes(engine, seed):
    async def main():
        async with http_harness(engine) as harness:
            ids = (await harness.post("/tokenize", prompt="é𝄞")).json()["tokens"]
            assert len(ids) == 6  # a byte each: most of what comes of them is no text, but some is
            fields = {"temperature": 1, "seed": seed, "max_tokens": 100, "n": 2}
            fields["logit_bias"] = {str(token): 8.0 for token in ids}
            whole = texts_of(await harness.complete(PROMPT, **fields))
            assert "\ufffd" in "".join(whole)
            assert any(ord(char) > 127 and char != "\ufffd" for char in "".join(whole))
            assert joined(await harness.stream(prompt=PROMPT, **fields)) == dict(enumerate(whole))

    run(main())


@pytest.mark.parametrize("is_kept", [False, True])
def test_stop_strings_cut_streamed_and_whole_text_alike(engine, is_kept):
    async def main():
        async with http_harness(engine) as harness:
            (text,) = texts_of(await harness.complete(PROMPT, max_tokens=60))
            for start, length in ((5, 1), (11, 3), (20, 9)):
                stop = text[start : start + length]
                fields = {"stop": ["never said", stop], "max_tokens": 60}
                fields["include_stop_str_in_output"] = is_kept
                (choice,) = (await harness.complete(PROMPT, **fields))["choices"]
                end = text.index(stop) + (len(stop) if is_kept else 0)
                assert (choice["text"], choice["finish_reason"]) == (text[:end], "stop")
                events = await harness.stream(prompt=PROMPT, **fields)
                assert joined(events) == {0: text[:end]}
                assert events[-1]["choices"][0]["finish_reason"] == "stop"

    run(main())


def test_engine_fields_are_honoured(engine):
    async def main():
        async with http_harness(engine) as harness:

            async def one(**fields):
                return (await harness.complete(PROMPT, **fields))["choices"][0]

            text = (await one())["text"]
            hot = {"temperature": 5, "seed": 1}
            assert (await one(**hot, top_k=1))["text"] == text
            assert (await one(**hot, min_p=1.0))["text"] == text
            assert (await one(**hot, top_p=1e-6))["text"] == text
            assert (await one(**hot))["text"] != text
            (letter,) = (await harness.post("/tokenize", prompt="Q")).json()["tokens"]
            assert (await one(allowed_token_ids=[letter]))["text"] == "Q" * 16
            assert (await one(logit_bias={str(letter): 100}))["text"] == "Q" * 16
            q = {"logit_bias": {str(letter): 50}}
            assert (await one(**q, bad_words=["Q"]))["text"] != "Q" * 16
            assert (await one(**q, frequency_penalty=2, max_tokens=40))["text"] != "Q" * 40
            stopped = await one(**q, stop_token_ids=[letter])
            assert stopped["finish_reason"] == "stop"
            late = await harness.complete(PROMPT, **q, stop_token_ids=[letter], min_tokens=4)
            assert late["usage"]["completion_tokens"] > 4

    run(main())


def test_cache_salt_separates_the_prefix_cache(engine):
    async def main():
        async with http_harness(engine) as harness:

            async def cached(salt: str) -> int:
                body = await harness.complete(
                    "a long prompt, of several pages " * 3, cache_salt=salt
                )
                return body["usage"]["prompt_tokens_details"]["cached_tokens"]

            assert await cached("one") == 0
            assert await cached("one") > 0
            assert await cached("two") == 0

    run(main())


def test_chat_content_may_have_parts_and_developer_is_system(engine):
    async def main():
        async with http_harness(engine) as harness:

            async def tokens(*messages):
                reply = await harness.post("/tokenize", messages=list(messages))
                return reply.raise_for_status().json()["tokens"]

            plain = await tokens({"role": "system", "content": "one two"})
            parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
            assert await tokens({"role": "system", "content": parts}) == plain
            assert await tokens({"role": "developer", "content": "one two"}) == plain

    run(main())


def test_tokenize_and_detokenize_round_trip(engine):
    async def main():
        async with http_harness(engine) as harness:
            text = "naïve 𝄞 the\n"
            body = (await harness.post("/tokenize", prompt=text)).json()
            assert body["count"] == len(body["tokens"]) > 5
            reply = await harness.post("/detokenize", tokens=body["tokens"])
            assert reply.json() == {"prompt": text}

    run(main())


def test_request_id_is_used_everywhere(engine):
    async def main():
        async with http_harness(engine) as harness:
            body = await harness.complete(PROMPT, request_id="mine")
            assert body["id"] == "cmpl-mine"
            headers = {"X-Request-Id": "from-a-proxy"}
            fields = {**GREEDY, "prompt": PROMPT}
            reply = await harness.client.post("/v1/completions", json=fields, headers=headers)
            assert reply.headers["x-request-id"] == "from-a-proxy"
            assert reply.json()["id"].startswith("cmpl-from-a-proxy.")

    run(main())


def test_page_has_a_policy_that_allows_only_its_own_scripts(engine):
    async def main():
        async with http_harness(engine) as harness:
            page = await harness.client.get("/")
            policy = page.headers["content-security-policy"]
            assert page.status_code == 200 and "script-src 'sha256-" in policy
            assert "unsafe" not in policy and "default-src 'none'" in policy
        async with http_harness(engine, page=False) as harness:
            assert (await harness.client.get("/")).status_code == 404

    run(main())


def test_stats_are_the_engines_counters_and_a_rate(engine):
    async def main():
        async with http_harness(engine) as harness:
            before = (await harness.client.get("/v1/stats")).json()
            assert set(before) == {*engine.stats._fields, "tokens_per_second"}
            await harness.complete(PROMPT, max_tokens=20)
            after = (await harness.client.get("/v1/stats")).json()
            assert after["num_generated"] == before["num_generated"] + 20
            assert after["tokens_per_second"] > 0

    run(main())
