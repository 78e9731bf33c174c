"""Anthropic's Messages API: `/v1/messages`."""

from . import messages

ROUTERS = (messages.router,)
