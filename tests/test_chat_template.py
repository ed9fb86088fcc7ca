"""Chat templates: what models' own templates need, and what a hostile one may not do."""

import time

import pytest

from kvledger.errors import BadRequest, KvledgerError, UnsupportedModel
from kvledger.text import template_sandbox
from kvledger.text.chat import ChatTemplate, compile_template, require_template
from kvledger.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": " Hi "}]
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% set role = 'model' if message['role'] == "
    "'assistant' else message['role'] %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TOOLS = (
    "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{ '\n' + tool | tojson }}{%- endfor %}"
    "{{- '</tools>' }}\n"
    "{%- endif %}{%- for m in messages %}{%- if m.tool_calls %}{%- for c in m.tool_calls %}\n"
    "{{- c.function.name ~ c.function.arguments.city }}{%- endfor %}"
    "{%- else %}{{- m.content }}{%- endif %}{%- endfor %}"
)


def render(source, messages=USER, **more):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return compile_template(source, names=names).render(messages, **more)


def tokenizer(*marks):
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", *marks],
        "token_type": [1] + [3] * len(marks),
        "merges": [],
    }
    return Tokenizer.from_metadata({f"tokenizer.ggml.{k}": v for k, v in keys.items()})


def test_templates_in_the_wild():
    assert render(LLAMA3) == (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert render(LLAMA3, add_generation_prompt=False).endswith("Hi<|eot_id|>")
    assert render(GEMMA) == "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        render(GEMMA, USER * 2)
    assert caught.value.param == "messages"


def test_tools_and_calls():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(TOOLS, messages, tools=[{"name": "weather"}]) == '<tools>\n{"name": "weather"}</tools> Hi weatherOslo'
    own = compile_template("plain", tool_source="for tools")
    assert own.render(USER) == "plain"
    assert own.render(USER, tools=[{}]) == "for tools"


def test_arguments_as_text_where_a_template_joins_them():
    source = "{% for c in messages[0].tool_calls %}{{ c.function.name + '|' + c.function.arguments }}{% endfor %}"
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == 'f|{"a": 1}'
    with pytest.raises(BadRequest, match="refuses"):
        render(source, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}])


def test_no_calls_is_no_key():
    source = "{{ 'tool_calls' in messages[0] }}"
    assert render(source, [{"role": "assistant", "content": "x", "tool_calls": None}]) == "False"
    assert render(source, [{"role": "assistant", "content": "x", "tool_calls": []}]) == "False"


def test_lists_that_grow_by_one():
    """As Mistral's template gathers messages; not quadratic."""
    grow = "{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}"
    source = "{% set ns = namespace(l=[]) %}" + grow + "{{ ns.l | length }}"
    start = time.perf_counter()
    assert render(source, USER * 3000) == "3000"
    assert time.perf_counter() - start < 3


def test_features_that_templates_use():
    assert render(
        "{% for x in [1,2,3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{{ loop.last }}{% endfor %}"
    ) == ("1False3True")
    assert (
        render(
            "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        )
        == "1"
    )
    assert render("{{ {'b': [1, 'é']} | tojson }}{{ 'a,b'.split(',') | join('-') }}") == '{"b": [1, "é"]}a-b'
    assert (
        render("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('y') }}{{ '%s!' % 'z' }}{{ '{}'.format(1) }}") == "[y]z!1"
    )
    assert render("{% generation %}{{ eos_token }}{% endgeneration %}") == "</s>"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"  # trim_blocks, lstrip_blocks


def test_content_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "abc"
    assert render("[{{ messages[0].content }}]", [{"role": "assistant", "content": None}]) == "[]"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url' is not supported"),
        ([{"role": "user", "content": 5}], "not int"),
        ([{"content": "x"}], "needs a role"),
        (["x"], "needs a role"),
    ],
)
def test_malformed_messages(messages, match):
    with pytest.raises(BadRequest, match=match):
        render("{{ messages }}", messages)


def test_no_template():
    assert ChatTemplate.from_metadata({}, tokenizer()) is None
    with pytest.raises(BadRequest, match="/v1/completions"):
        require_template(None)
    chatml = ChatTemplate.from_metadata({}, tokenizer("<|im_start|>", "<|im_end|>"))
    assert "ChatML" in chatml.note
    assert chatml.render(USER) == "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | nofilter }}", "{{", "{% endfor %}"])
def test_broken_templates_say_where(source):
    with pytest.raises(UnsupportedModel, match="wrong in line 1"):
        compile_template(source)


UNROLLED = "".join(f"{{% set x{i + 1} %}}{{{{ x{i} }}}}{{{{ x{i} }}}}{{% endset %}}" for i in range(60))
NESTED = "".join(f"{{% set x{i + 1} = [x{i}, x{i}] %}}" for i in range(60))
HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(10**6) %}x{% endfor %}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [0] * 10**9 }}",
    "{{ 7 ** 999999999 }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ ['a' * 1000000] | map('replace', 'a', 'b' * 1000) | list }}",
    "{{ (range(99999) | list) | join('x' * 1000000) }}",
    "{{ ('x' * 1000000).join(range(9999) | map('string') | list) }}",
    "{{ ('\n' * 1000000) | indent(1000000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set x0 = 'abcdefgh' %}" + UNROLLED + "{{ x60 }}",
    "{% set x0 = [1, 2] %}" + NESTED + "{{ x60 == x59 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% include 'secret' %}",
    "{{ lipsum(n=100000) }}",
    "{{ strftime_now('%999999999d') }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_are_stopped(source, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 2.0)
    start = time.perf_counter()
    with pytest.raises(KvledgerError):
        render(source)
    assert time.perf_counter() - start < 5


def test_long_conversations_are_no_bomb():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 100} for i in range(2000)]
    assert len(render(LLAMA3, messages)) > 1_000_000
