"""Text as it becomes readable, token by token."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Turns a growing list of tokens into text, and never takes text back.

    A token may hold half of a character, or decide about the space before it, so only the change
    between two decodings of the last tokens is given out, and only once its bytes are whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Decode with `tokenizer`; None gives no text."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # first token of the last piece, decoded again for its context
        self._read = 0  # first token that has not been given out
        self.text = ""

    def add(self, token: int, last: bool = False) -> str:
        """Take a token and return the text that became readable, "" if none did.

        Args:
            token: The token.
            last: Nothing follows: give out what is left, incomplete bytes as U+FFFD.
        """
        if self._tokenizer is None:
            return ""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(_INCOMPLETE) and not last:
            return ""
        piece = text[len(known) :]
        if piece:
            self._context, self._read = self._read, len(self._tokens)
            self.text += piece
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
