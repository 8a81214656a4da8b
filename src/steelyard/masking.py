"""Secrets: text that must not be shown, written or sent anywhere but to the endpoint it belongs to."""

from __future__ import annotations


class Secret:
    """A text that is shown nowhere: not by repr, not by str, not in a traceback's locals."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself, for the wire alone."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"
