"""Which class each token of a text belongs to: one class each, the first that fits.

    special       ends the text, or has no text of its own
    new line      the first token after a line break
    copied        ends COPIED tokens that stand in the prompt in the same order
    code          in a fenced block, or on a line that reads as a statement
    digits        has a digit
    markup        has a mark of Markdown, HTML or TeX and no letter
    punctuation   has no letter: punctuation and spaces
    name          of a word that begins with a capital letter inside a sentence
    rare          one of the ids that make up the last RARE of the run's tokens, by their frequency
    word          everything else

So the classes are disjoint and cover every token. A token's word is looked up in the joined text,
since a token may be a part of a word.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

CLASSES = (
    *("special", "new line", "copied", "code", "digits", "markup", "punctuation", "name"),
    *("rare", "word"),
)
# Tokens in a row that are taken for a copy
COPIED = 3
# The part of a run's tokens whose ids are called rare
RARE = 0.1
_CODE_LINE = re.compile(
    r"\s*(?:(?:def|class|import|from|return|for|while|if|elif|else|try|except|with|function|const"
    r"|let|var|public|private|static|void|int|#include|fn|func|package|use)\b.*[(){};:=]\s*$"
    r"|\S.*[;{}]\s*$|[\w.\[\]]+\s*[-+*/]?=\s*\S+|[\w.]+\(.*\)\s*$)"
)
_MARKUP = re.compile(r"[#*_`~|<>\\$\[\]{}^]")
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_ENDS_SENTENCE = ".!?:\n"


def rare_tokens(texts: Iterable[Sequence[int]]) -> frozenset[int]:
    """The least frequent ids that make up RARE of the tokens of these texts."""
    counts = Counter(int(token) for text in texts for token in text)
    ranked = sorted(counts.items(), key=lambda item: (item[1], -item[0]))
    most = RARE * sum(counts.values())
    sums = accumulate(count for _, count in ranked)
    return frozenset(token for (token, _), total in zip(ranked, sums, strict=True) if total <= most)


def token_classes(
    tokens: Sequence[int], pieces: Mapping[int, str], prompt: Sequence[int], rare: frozenset[int]
) -> list[str]:
    """The class of each token.

    Args:
        pieces: the text of each id; "" of a special one.
        prompt: the ids before the text; none where they are not known, and then none is copied.
        rare: ids, of `rare_tokens`.
    """
    parts = [pieces.get(int(token), "") for token in tokens]
    text = "".join(parts)
    starts = [0, *accumulate(map(len, parts))][:-1]
    in_code = _code(text)
    names = _names(text)
    copies = {tuple(prompt[i : i + COPIED]) for i in range(len(prompt) - COPIED + 1)}
    context = [*prompt[-COPIED + 1 :], *tokens] if prompt else [*tokens]
    before = len(context) - len(tokens)
    return [
        _class_of(
            part,
            parts[i - 1] if i else "",
            copied=tuple(context[max(0, i + before - COPIED + 1) : i + before + 1]) in copies,
            code=_inside(in_code, starts[i] + _first_letter(part)),
            name=_inside(names, starts[i] + _first_letter(part)),
            rare=int(tokens[i]) in rare,
        )
        for i, part in enumerate(parts)
    ]


def _class_of(part: str, previous: str, *, copied: bool, code: bool, name: bool, rare: bool) -> str:
    if not part:
        return "special"
    if previous.endswith("\n"):
        return "new line"
    if copied:
        return "copied"
    if code:
        return "code"
    if any(letter.isdigit() for letter in part):
        return "digits"
    if not any(letter.isalpha() for letter in part):
        return "markup" if _MARKUP.search(part) else "punctuation"
    if name:
        return "name"
    return "rare" if rare else "word"


def _first_letter(part: str) -> int:
    """Where the first character that is no space stands, 0 where all are."""
    return len(part) - len(part.lstrip()) if part.strip() else 0


def _inside(spans: Sequence[tuple[int, int]], at: int) -> bool:
    """Whether a character is in one of the spans, which ascend and do not overlap."""
    place = bisect_right(spans, (at, len(spans) and spans[-1][1])) - 1
    return place >= 0 and spans[place][0] <= at < spans[place][1]


def _code(text: str) -> list[tuple[int, int]]:
    """The characters of fenced blocks, and of lines that read as statements."""
    spans: list[tuple[int, int]] = []
    fenced, at = False, 0
    for line in text.splitlines(keepends=True):
        fence = line.lstrip().startswith("```")
        if fenced or fence or _CODE_LINE.match(line):
            spans.append((at, at + len(line)))
        fenced ^= fence
        at += len(line)
    return spans


def _names(text: str) -> list[tuple[int, int]]:
    """The words that begin with a capital letter and no sentence."""
    spans: list[tuple[int, int]] = []
    for word in _WORD.finditer(text):
        before = text[: word.start()].rstrip(" \t\"'\u201c\u2018(*_#-")[-1:]
        if word[0][0].isupper() and before and before not in _ENDS_SENTENCE:
            spans.append(word.span())
    return spans
