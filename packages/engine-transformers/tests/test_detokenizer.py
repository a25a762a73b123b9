"""Text as it becomes readable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmux_transformers.detokenizer import Detokenizer


class ByteTokenizer:
    """A token is a byte; 0 is special."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in tokens if token).decode(errors="replace")


class WordTokenizer:
    """A token is a word; the space before the first one is left out."""

    words = ("", "one", "two", "three")

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(self.words[token] for token in tokens)


@given(st.text(st.characters(exclude_characters="\0\ufffd", exclude_categories=["Cs"])))
def test_pieces_are_whole_characters_and_make_the_text(text: str) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    tokens = list(text.encode())
    pieces = [
        detokenizer.add(token, last=place == len(tokens) - 1) for place, token in enumerate(tokens)
    ]
    assert "".join(pieces) == text == detokenizer.text
    assert "\ufffd" not in "".join(pieces)


def test_a_character_in_two_tokens_waits_for_the_second() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    first, second = "é".encode()
    assert detokenizer.add(first) == ""
    assert detokenizer.add(second) == "é"


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.add("é".encode()[0], last=True) == "\ufffd"


def test_spaces_between_words_are_kept() -> None:
    detokenizer = Detokenizer(WordTokenizer())
    assert [detokenizer.add(token) for token in (1, 2, 3, 1)] == ["one", " two", " three", " one"]


@pytest.mark.parametrize("last", [False, True])
def test_special_tokens_and_no_tokenizer_give_no_text(last: bool) -> None:
    assert Detokenizer(ByteTokenizer()).add(0, last) == ""
    assert Detokenizer(None).add(65, last) == ""
