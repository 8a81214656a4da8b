"""Secrets: text that must not be shown, logged, written or sent anywhere but to its endpoint."""

from __future__ import annotations


class Secret:
    """A text that repr, str and tracebacks do not show."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself, only to be sent."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"
