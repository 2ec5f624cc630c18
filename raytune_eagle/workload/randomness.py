"""Is it text that somebody wrote, or random? Two measures that know no language: words, and characters in a row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable

_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Thai … Hangul
_WORDS = re.compile(rf"[{_NO_SPACES}]|[^\W\d_{_NO_SPACES}]+")
_ENOUGH_WORDS = 150
_LEAST_REPEATS = 0.0007
_LOOKED_AT = 100_000  # characters
_ENOUGH_BYTES = 2000
_GRAM = 6
_BY_CHANCE = 5.0
_BY_LUCK = 0.01
"""Pairs for each byte that there may be where hardly one is to be expected; 2,500 characters of names have 0.05."""


def looks_random(texts: Iterable[str]) -> bool:
    """Whether texts, taken together, are random rather than something that somebody wrote: tokens, or characters.

    In every language, and in code, few words make up much of a text, so that two words of it are the same one with a
    chance of 0.2 % (a strongly inflected language) to several percent; tokens drawn from a vocabulary have next to no
    favourites, and less than 0.07 %. Words are runs of letters, single characters in scripts without spaces. Below
    150 words nothing is said (False). Real text with its words shuffled passes: it looks the same to this measure.
    """
    distinct = list(dict.fromkeys(texts))
    words = [word for text in distinct for word in _WORDS.findall(text.casefold())]
    few = _pairs(words) < _LEAST_REPEATS * len(words) * (len(words) - 1) / 2
    return (len(words) >= _ENOUGH_WORDS and few) or _is_noise("\n".join(distinct)[:_LOOKED_AT].encode())


def _is_noise(data: bytes) -> bool:
    """Whether characters stand behind one another by chance: hex, base64, digits, token ids, whatever the alphabet.

    Six bytes in a row then come again as often as their single bytes do to the sixth power, token ids up to 4 times
    as often. Of 6,218 pieces of 2,500 characters (code, logs, tables, messages of 127 locales) one is taken for noise:
    a list of places in Hebrew, where every other byte is the same. Below 2,000 bytes nothing is said. DNA looks random.
    """
    grams = len(data) - _GRAM + 1
    if len(data) < _ENOUGH_BYTES:
        return False
    alike = 2 * _pairs(data) / len(data) ** 2
    by_chance = alike**_GRAM * grams * (grams - 1) / 2
    return _pairs(data[place : place + _GRAM] for place in range(grams)) < _BY_CHANCE * by_chance + _BY_LUCK * grams


def _pairs(things: Iterable[Hashable]) -> float:
    """How many pairs of them are two of the same."""
    return sum(count * (count - 1) for count in Counter(things).values()) / 2
