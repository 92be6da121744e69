"""Options that take one of a few words: how they are read, and what is said of another word.

Must load nothing but typer: `wavegate rank` imports it, and ranks start in numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import typer

Word = TypeVar("Word", bound=str)


def one_of(words: Iterable[Word]) -> Callable[[str], Word]:
    """A parser for `typer.Option(parser=…)` that knows these words."""
    known = {str(word): word for word in words}

    def parse(text: str) -> Word:
        if text not in known:
            raise typer.BadParameter(none_of(text, known))
        return known[text]

    return parse


def shown(words: Iterable[str]) -> str:
    """The words as help shows them beside an option, for `typer.Option(metavar=…)`."""
    return "|".join(words)


def none_of(text: str, words: Collection[str]) -> str:
    """What to say of a word that is none of `words`, the name of its option going before."""
    message = f"{text!r} is none of {', '.join(words)}"
    near = difflib.get_close_matches(text, words, n=1)
    return f"{message}; did you mean {near[0]}?" if near else message
