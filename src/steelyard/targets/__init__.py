"""What answers a case: a model endpoint, your own callable, a program, a simulated model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard._lazy import lazy_exports

if TYPE_CHECKING:
    from steelyard.targets.agent import Agent
    from steelyard.targets.answers import Answers
    from steelyard.targets.anthropic import AnthropicMessages
    from steelyard.targets.bedrock import Bedrock
    from steelyard.targets.command import Command
    from steelyard.targets.function import CallableTarget, as_target
    from steelyard.targets.gemini import Gemini
    from steelyard.targets.openai_chat import OpenAIChat
    from steelyard.targets.openai_completions import OpenAICompletions
    from steelyard.targets.openai_responses import OpenAIResponses
    from steelyard.targets.simulated import Simulated

_HOMES = {
    "Agent": "steelyard.targets.agent",
    "Answers": "steelyard.targets.answers",
    "AnthropicMessages": "steelyard.targets.anthropic",
    "Bedrock": "steelyard.targets.bedrock",
    "CallableTarget": "steelyard.targets.function",
    "Command": "steelyard.targets.command",
    "Gemini": "steelyard.targets.gemini",
    "OpenAIChat": "steelyard.targets.openai_chat",
    "OpenAICompletions": "steelyard.targets.openai_completions",
    "OpenAIResponses": "steelyard.targets.openai_responses",
    "Simulated": "steelyard.targets.simulated",
    "as_target": "steelyard.targets.function",
}

__all__ = [
    "Agent",
    "Answers",
    "AnthropicMessages",
    "Bedrock",
    "CallableTarget",
    "Command",
    "Gemini",
    "OpenAIChat",
    "OpenAICompletions",
    "OpenAIResponses",
    "Simulated",
    "as_target",
]

# A run imports only the target that it uses.
__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
