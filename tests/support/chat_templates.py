"""Chat templates like those of published models, and conversations to render with them."""

from __future__ import annotations

from typing import Any

from tests.support.difficult_texts import DIFFICULT_TEXTS

# Header lines, tools as JSON lines, calls and results; only the last answer keeps its reasoning.
CHATML = """
{%- set state = namespace(last_question=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and state.last_question < 0 %}
        {%- set state.last_question = loop.revindex0 %}
    {%- endif %}
{%- endfor %}
{%- macro turn(role, text) %}
    {{- '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}
{%- endmacro %}
{%- if tools %}
    {%- set lines = namespace(text='') %}
    {%- for tool in tools %}{% set lines.text = lines.text ~ '\\n' ~ tool | tojson %}{% endfor %}
    {{- turn('system', '<tools>' ~ lines.text ~ '\\n</tools>') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('system', 'user') %}{{- turn(message.role, message.content) }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<result>' ~ message.content ~ '</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > state.last_question %}
            {{- '<think>\\n' ~ message.reasoning_content.strip() ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- (message.content or '').lstrip('\\n') }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' ~ call.function.name ~ call.function.arguments | tojson ~ '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
# The template writes BOS itself, a system message with the date, trimmed text and indented JSON.
LLAMA3 = """
{{- bos_token }}
{%- macro head(role) %}{{ '<|im_start|>' ~ role ~ '<|im_end|>\\n\\n' }}{% endmacro %}
{%- set date = date_string if date_string is defined else strftime_now('%Y') %}
{{- head('system') ~ 'Today: ' ~ date ~ '\\n\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) ~ '\\n\\n' }}{% endfor %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- eos_token }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head('assistant') ~ {'name': call.name, 'parameters': call.arguments} | tojson }}
    {%- elif message.role == 'tool' %}{{- head('ipython') ~ message.content | tojson }}
    {%- else %}{{- head(message['role']) ~ message['content'] | trim }}
    {%- endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{% endif %}
"""
# Strictly alternating roles without headers; the system message precedes the first question.
MISTRAL = """
{%- set has_system = messages[0].role == 'system' %}
{%- set preface = messages[0].content ~ '\\n\\n' if has_system else '' %}
{{- bos_token }}
{%- for message in (messages[1:] if has_system else messages) %}
    {%- if message.role != ('user', 'assistant')[loop.index0 % 2] %}
        {{- raise_exception('turns must alternate, not ' ~ message.role) }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- ' [INST] ' ~ (preface if loop.first else '') ~ message.content ~ ' [/INST]' }}
    {%- else %}{{- ' ' ~ message.content ~ eos_token }}
    {%- endif %}
{%- endfor %}
"""
# Literal text between the blocks, no system message, and another name for the assistant.
GEMMA = """{{ bos_token }}
{% for message in messages %}
    {% if message.role == 'system' %}
        {{ raise_exception('no system turns') }}
    {% endif %}
    {% set role = {'assistant': 'model'}.get(message.role, message.role) %}
<|im_start|>{{ role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>model
{% endif %}
"""
# Each template, with the tokenizer that is used with it.
TEMPLATES = {
    "chatml": (CHATML, "byte_level_qwen2"),
    "llama3": (LLAMA3, "byte_level_llama3"),
    "mistral": (MISTRAL, "bpe_llama"),
    "gemma": (GEMMA, "bpe_gemma"),
    "sentencepiece": (MISTRAL, "model_bpe"),
}
_CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "K\u00f6ln \U0001f327", "days": [1, 2]}},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter f\u00fcr <Orte> & mehr",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    *([_user(text)] for text in DIFFICULT_TEXTS),
    [_user("Hi"), _assistant("  Hello. \n"), _user(" Bye ")],
    [{"role": "system", "content": " Be brief.\n"}, _user("Hi")],
    [_user("a"), _user("b")],
    [
        {"role": "system", "content": "Use tools."},
        _user("Rain?"),
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": '{"rain": true}', "name": "weather"},
        {"role": "tool", "content": "wind", "name": None},
        {**_assistant("\n\nYes."), "reasoning": "It rains.\n"},
    ],
    [_user("Rain?"), {"role": "assistant", "content": "", "tool_calls": [_CALL, _CALL]}],
    [{"role": "critic", "content": "?"}],
)


def cases() -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Return the conversations, each with the variables for its template."""
    plain = [(messages, {"add_generation_prompt": True}) for messages in CONVERSATIONS]
    others = [
        (messages, {"add_generation_prompt": prompt, "tools": TOOLS})
        for messages in CONVERSATIONS[-5:]
        for prompt in (True, False)
    ]
    return plain + others
