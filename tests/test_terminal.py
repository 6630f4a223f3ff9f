"""Text from outside cannot steer a terminal, and stays what it is otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvt.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\r\nb\tc\x00\x7f\x9b", r"a\r\nb\tc\x00\x7f\x9b"),
        ("\u202egpj.exe\u2028\ufeff", r"\u202egpj.exe\u2028\ufeff"),
        ("caf\udce9", r"caf\udce9"),
    ],
)
def test_what_would_steer_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    "text", ["n01440764", "crème brûlée", "می\u200cخواهم", "👩\u200d🔬", "a b"]
)
def test_words_of_any_language_stay(text: str) -> None:
    assert printable(text) == text


@given(st.text(st.characters()))
def test_any_text_is_one_line_that_can_be_written(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1
    assert not any(c < " " or "\x7f" <= c < "\xa0" for c in shown)
