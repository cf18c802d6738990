"""Conversations rendered by chat templates, against transformers where it does the same."""

from __future__ import annotations

import time
from typing import Any

import pytest

from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.chat import ChatTemplate, ChatTemplateError
from runnerd_service.frontend.chat_rendering import ChatRenderer
from runnerd_service.frontend.tokenizer import ByteTokenizer
from runnerd_service.frontend.types import ChatPrompt
from runnerd_service.frontend.validation import Violations

PLAIN = (
    "{% for message in messages %}<{{ message.role }}>{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMING = PLAIN.replace("message['content']", "message['content'] | trim")
TOOLS = (
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}\n"
    "{%- for m in messages %}\n  {% if m.tool_calls is defined %}{{ m.tool_calls[0].function.name }}{% endif %}\n"
    "{% generation %}{{ m.content }}{% endgeneration %}{% if loop.last %}{% break %}{% endif %}\n{% endfor %}"
)
CHAT = ({"role": "system", "content": 'be <kind> & "brief"'}, {"role": "user", "content": " hi  "})
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def by_transformers(template: str, messages: Any, **options: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = utils.render_jinja_template([list(messages)], chat_template=template, **SPECIAL, **options)
    return str(rendered[0])


@pytest.mark.parametrize("template", [PLAIN, TRIMMING])
@pytest.mark.parametrize("opens_turn", [False, True])
def test_conversation_is_rendered_as_transformers_does(template: str, opens_turn: bool) -> None:
    expected = by_transformers(template, CHAT, add_generation_prompt=opens_turn)

    assert ChatTemplate(template, SPECIAL).render(ChatPrompt(CHAT, add_generation_prompt=opens_turn)) == expected


@pytest.mark.parametrize("template", [PLAIN, TRIMMING])
@pytest.mark.parametrize("ending", ["I think", "I think ", " I\n"])
def test_last_message_stays_open_as_in_transformers(template: str, ending: str) -> None:
    messages = (*CHAT, {"role": "assistant", "content": ending})
    expected = by_transformers(template, messages, continue_final_message=True)

    assert ChatTemplate(template, SPECIAL).render(ChatPrompt(messages, continue_final_message=True)) == expected


def test_tools_and_calls_reach_the_template_as_in_transformers() -> None:
    tools = ({"type": "function", "function": {"name": "weather", "description": "<in> & 'out'"}},)
    messages = (*CHAT, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather"}}]})

    ours = ChatTemplate(TOOLS, SPECIAL).render(ChatPrompt(messages, tools=tools))

    assert ours == by_transformers(TOOLS, messages, tools=list(tools), add_generation_prompt=True)
    assert "<in> & 'out'" in ours


def test_variables_of_the_request_reach_the_template() -> None:
    template = ChatTemplate("{{ tone }} {{ strftime_now('%Y') }} {{ bos_token }}", SPECIAL)

    assert template.render(ChatPrompt(CHAT, template_kwargs={"tone": "calm"})) == f"calm {time.strftime('%Y')} <s>"


def test_assistants_turn_is_opened_by_default() -> None:
    template = ChatTemplate(PLAIN, SPECIAL)

    assert template.render(ChatPrompt(CHAT)).endswith("<assistant>")
    assert not template.render(ChatPrompt(CHAT, add_generation_prompt=False)).endswith("<assistant>")


def test_parts_of_text_are_joined_as_they_are() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}

    assert "<user>one two</s>" in ChatTemplate(PLAIN, SPECIAL).render(ChatPrompt((message,)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "failed on the conversation"),
        ("{{ messages[5].content.x }}", "refused"),
        ("{{ 1 // 0 }}", "failed on the conversation"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed on the conversation"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ cycler() }}", "at least one item"),
        ("{{ 'x'.encode('nocodec') }}", "unknown encoding: nocodec"),
        ("{{ 'x' | truncate(-5) }}", "expected length >= 3"),
    ],
)
def test_template_that_fails_is_an_error_of_the_conversation(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as failure:
        ChatTemplate(source, SPECIAL).render(ChatPrompt(CHAT))
    assert failure.value.field == "chat"


def test_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="leaves out") as failure:
        ChatTemplate("nothing", SPECIAL).render(ChatPrompt(CHAT, continue_final_message=True))
    assert failure.value.field == "chat.continue_final_message"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "Expected an expression"),
        ("{% break %}", "'break' outside loop"),
        ("{{ 10**5000 }}", "4300 digits"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
    ],
)
def test_broken_template_is_told_at_once(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"not a chat template: .*{message}"):
        ChatTemplate(source, SPECIAL)


def render(renderer: ChatRenderer, chat: ChatPrompt) -> tuple[str | None, list[str]]:
    violations = Violations()
    return renderer.render(chat, violations), [one.field for one in violations.found]


def refusal(source: str) -> str:
    """Give what is said of a request's template that cannot be rendered."""
    violations = Violations()
    assert ChatRenderer({}, SPECIAL).render(ChatPrompt(CHAT, chat_template=source), violations) is None
    (found,) = violations.found
    return f"{found.field}: {found.description}"


def test_template_of_the_request_is_used_instead_of_the_models() -> None:
    renderer = ChatRenderer({"default": PLAIN}, SPECIAL)
    chat = ChatPrompt(CHAT, chat_template="{{ eos_token }}{{ messages | length }}", template_kwargs={"x": 1})

    assert render(renderer, chat) == ("</s>2", [])


def test_template_of_the_request_that_fails_is_a_violation() -> None:
    renderer = ChatRenderer({"default": PLAIN}, SPECIAL)

    assert render(renderer, ChatPrompt(CHAT, chat_template="{{ raise_exception('no') }}")) == (None, ["chat"])
    assert render(renderer, ChatPrompt(CHAT, chat_template="{% for %}")) == (None, ["chat.chat_template"])


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ 'x' * 4000000000 }}", "needed more than 1024 MiB"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took more than 2 seconds"),
        ("{% for a in range(70) %}{{ 'x' * 1000000 }}{% endfor %}", "gave more than 64 MiB of text"),
    ],
)
def test_template_of_the_request_cannot_use_up_the_server(source: str, what: str) -> None:
    assert refusal(source) == f"chat.chat_template: rendering {what}; use a simpler template"


def test_template_of_the_request_that_fails_is_told_why() -> None:
    assert refusal("{{ cycler() }}").startswith("chat: the chat template failed on the conversation: at least one item")
    assert refusal("{% break %}").startswith("chat.chat_template: not a chat template: 'break' outside loop")


def test_model_without_a_template_refuses_conversations_and_says_what_helps() -> None:
    violations = Violations()

    assert ChatRenderer({}, {}).render(ChatPrompt(CHAT), violations) is None
    assert violations.found[0].field == "chat"
    assert "no chat template" in violations.found[0].description


def test_models_broken_template_refuses_conversations_only() -> None:
    renderer = ChatRenderer({"default": "{% for %}"}, {})

    assert not renderer.has_template
    assert render(renderer, ChatPrompt(CHAT)) == (None, ["chat"])


def test_operators_template_replaces_the_models(tmp_path: Any) -> None:
    (tmp_path / "chat.jinja").write_text("operator's")
    renderer = ChatRenderer({"default": PLAIN, "tool_use": TOOLS}, SPECIAL, str(tmp_path / "chat.jinja"))

    assert render(renderer, ChatPrompt(CHAT, tools=({},))) == ("operator's", [])


def test_operators_template_that_cannot_be_used_stops_the_start(tmp_path: Any) -> None:
    (tmp_path / "broken.jinja").write_text("{% for %}")

    for name in ("broken.jinja", "missing.jinja"):
        with pytest.raises(ConfigurationError, match=rf"--chat-template .*{name}"):
            ChatRenderer({}, {}, str(tmp_path / name))


def test_template_for_tools_is_used_with_tools() -> None:
    renderer = ChatRenderer({"default": "plain", "tool_use": "with tools"}, SPECIAL)

    assert render(renderer, ChatPrompt(CHAT, tools=({"name": "f"},))) == ("with tools", [])
    assert render(renderer, ChatPrompt(CHAT)) == ("plain", [])


def test_byte_tokenizers_template_writes_roles_and_texts() -> None:
    renderer = ChatRenderer(ByteTokenizer.chat_templates, ByteTokenizer.special_tokens)

    assert render(renderer, ChatPrompt(CHAT)) == (
        'system: be <kind> & "brief"\nuser:  hi  \nassistant: ',
        [],
    )
