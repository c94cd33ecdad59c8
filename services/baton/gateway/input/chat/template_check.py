"""Checks that the chat template of a request may be used, and that it uses what the request has."""

from baton.core.errors import Reason
from baton.gateway.input.chat.chat_request import ChatRequest
from baton.gateway.input.chat.tool_fields import ToolMode
from baton.gateway.input.client_call import InvalidField
from baton.gateway.text.chat_templates import ChatTemplates


def check_template(chat: ChatRequest, templates: ChatTemplates | None, *, allow_own: bool) -> None:
    """Raise InvalidField if a request's own template is not allowed, or if the model's ignores its tools.

    `templates` None: chats have a fixed form, without any of this.
    """
    prompt = chat.prompt
    if prompt.template is not None and not (templates and prompt.template in templates):
        if not allow_own:
            raise InvalidField(
                "chat_template",
                "chat_template is not allowed, because a template is a program; leave it out, or start the gateway "
                "with --allow-request-chat-template",
                Reason.UNSUPPORTED_FIELD,
            )
        return
    template = None if templates is None else templates.chosen(has_tools=prompt.tools is not None)
    if template is None:
        return
    for name, has_field, is_used in (
        ("tools", chat.tools.mode is not ToolMode.NONE, template.uses_tools),
        ("documents", prompt.documents is not None, template.uses_documents),
    ):
        if has_field and not is_used:
            message = f"this model's chat template does not use {name}; put them into a message"
            raise InvalidField(name, message, Reason.UNSUPPORTED_FIELD)
