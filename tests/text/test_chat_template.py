"""Chat templates render like those of Hugging Face, in a sandbox and within limits."""

from __future__ import annotations

import datetime

import pytest

from jaxinfer.text import chat_template
from jaxinfer.text.chat_template import ChatTemplate, ChatTemplateError, check_messages

USER = {"role": "user", "content": "Hi é <b>"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INDENTED = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{ bos_token }}[{{ system }}]
{% for message in messages %}
    {% if loop.index0 is divisibleby 2 %}
        {{ message.content }}|
    {% else %}
        {{ message['content'] | upper }}{{ eos_token }}
    {% endif %}
{% endfor %}
"""
TOOLS = """
{%- macro describe(tool) -%}{{ tool | tojson }}{%- endmacro -%}
{%- for tool in tools or [] %}{{ describe(tool) }}
{% endfor -%}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if ns.count > 2 %}{%- break %}{%- endif %}
    {%- generation %}{{ message.content }}{%- endgeneration %}
{%- endfor %}
{{- '%d seen' | format(ns.count) }}{{ range(3) | list }}"""
TOOL = {"name": "weather", "description": "Wetter für <Orte>", "parameters": {"b": 1, "a": [None]}}


@pytest.mark.parametrize("template", [CHATML, INDENTED, TOOLS])
@pytest.mark.parametrize("messages", [[USER], CONVERSATION])
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parity
def test_templates_render_like_transformers(template, messages, prompt):
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    utils = transformers.utils.chat_template_utils
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (theirs,), _ = utils.render_jinja_template(
        conversations=[messages],
        chat_template=template,
        tools=[TOOL],
        add_generation_prompt=prompt,
        **special,
    )
    ours = ChatTemplate(template).render(
        messages, add_generation_prompt=prompt, special_tokens=special, tools=[TOOL]
    )
    assert ours == theirs


def test_chatml_is_rendered_with_and_without_the_generation_prompt():
    message = "<|im_start|>user\nHi é <b><|im_end|>\n"
    template = ChatTemplate(CHATML)
    assert template.render([USER], add_generation_prompt=False) == message
    assert template.render([USER]) == message + "<|im_start|>assistant\n"


def test_block_lines_leave_no_blank_lines():
    rendered = ChatTemplate(INDENTED).render(
        CONVERSATION, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )
    assert rendered == "<s>[Be brief.]\n        Hi é <b>|\n        HELLO.</s>\n        Bye|\n"


def test_json_keeps_key_order_and_non_ascii_text():
    rendered = ChatTemplate("{{ tools | tojson }}").render([USER], tools=[TOOL])
    assert rendered == (
        '[{"name": "weather", "description": "Wetter für <Orte>", '
        '"parameters": {"b": 1, "a": [null]}}]'
    )


def test_loop_controls_macros_and_generation_blocks_work():
    assert ChatTemplate(TOOLS).render(CONVERSATION) == "Hi é <b>Hello.3 seen[0, 1, 2]"


def test_strftime_now_gives_the_current_date():
    before = datetime.date.today()
    rendered = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])
    assert before <= datetime.date.fromisoformat(rendered) <= datetime.date.today()


def test_variables_reach_the_template_and_missing_ones_are_empty():
    template = ChatTemplate("{{ enable_thinking }}|{{ missing }}|{{ tools is none }}")
    assert template.render([USER], enable_thinking=True) == "True||True"


def test_template_can_refuse_messages():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        template.render([USER])


def test_template_that_does_not_compile_is_refused_on_first_use():
    template = ChatTemplate("line one\n{% for %}")
    with pytest.raises(ChatTemplateError, match="does not compile: line 2"):
        template.render([USER])


@pytest.mark.parametrize(
    "expression",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range.__init__.__globals__ }}",
        "{{ range._left }}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
        "{{ messages[0].content + 1 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include 'file' %}",
    ],
)
def test_sandbox_violations_and_failures_raise_one_kind_of_error(expression):
    messages = [dict(USER)]
    # For some forbidden attributes jinja2 yields an undefined value, which renders as nothing.
    try:
        rendered = ChatTemplate(expression).render(messages)
    except ChatTemplateError:
        rendered = ""
    assert rendered == ""
    assert messages == [USER]


def test_ranges_of_one_rendering_share_a_budget():
    nested = "{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
    for template in (nested, "{{ range(10**9) }}", "{{ range(10**30) }}"):
        with pytest.raises(ChatTemplateError, match=r"1,000,000 numbers|too large"):
            ChatTemplate(template).render([USER])
    # Each rendering has the whole budget.
    template = ChatTemplate("{% for i in range(900000) %}{% endfor %}ok")
    assert [template.render([USER]) for _ in range(2)] == ["ok", "ok"]


def test_output_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 100)
    template = ChatTemplate("{% for i in range(n) %}0123456789{% endfor %}")
    assert len(template.render([USER], n=10)) == 100
    with pytest.raises(ChatTemplateError, match="more than 100 characters"):
        template.render([USER], n=11)


def test_template_source_beyond_the_limit_is_refused():
    with pytest.raises(ChatTemplateError, match="1,048,577 characters, more than the limit"):
        ChatTemplate(" " * 1_048_577).render([USER])


def test_text_parts_are_joined_and_other_keys_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    messages = [{"role": "user", "content": parts, "name": "Ann"}, calls]
    assert check_messages(messages) == [
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
    ]
    assert messages[0]["content"] is parts


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_available_by_every_name(key):
    (message,) = check_messages([{"role": "assistant", "content": "4", key: "2 + 2"}])
    assert message["reasoning_content"] == message["thinking"] == "2 + 2"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        ([], "messages is empty"),
        (["hi"], "message 0 is a str"),
        ([USER, {"content": "x"}], "message 1 has role None"),
        ([{"role": 1, "content": "x"}], "message 0 has role 1"),
        ([{"role": "user"}], "content of type NoneType"),
        ([{"role": "user", "content": 5}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part 0 is 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part 0 is 'text'"),
        ([{"role": "user", "content": ["x"]}], "part 0 is 'str'"),
    ],
)
def test_malformed_messages_are_refused_with_their_position(messages, message):
    with pytest.raises(ChatTemplateError, match=message):
        check_messages(messages)
