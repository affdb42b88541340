r"""Patterns of clients, read character by character and written again in the one dialect that is enforced.

ECMA-262, Python and Rust agree on most of a pattern, but not on all: `.` and line ends, what `\d`, `\w` and `\s` hold,
`[a&&b]`, `a++`. What is written here matches only what ECMA-262 and Python both match; what they cannot agree on, and
what is no regular language (look-around, back-references), is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from samovar.errors import ValidationError

MAX_GROUPS = 100
"""Groups inside one another."""
MAX_REPEAT = 100_000

_SPACE = r"\t-\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
_ANY_SPACE = _SPACE + r"\x{1C}-\x{1F}\x{85}\x{FEFF}"
_ANY_WORD = r"\p{L}\p{N}\p{M}\p{Pc}\p{Alphabetic}"
_SURELY = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": _SPACE,
    "D": r"[^\p{Nd}]",
    "W": f"[^{_ANY_WORD}]",
    "S": f"[^{_ANY_SPACE}]",
}
"""What every dialect takes the class for, as members of a character class."""
_POSSIBLY = {
    "d": r"\p{Nd}",
    "w": _ANY_WORD,
    "s": _ANY_SPACE,
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": f"[^{_SPACE}]",
}
"""What some dialect takes the class for: what a negated class must leave out."""

_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_EVERYTHING = ({"s", "S"}, {"d", "D"}, {"w", "W"})
_NOT_LINE_END = r"[^\n\r\x{2028}\x{2029}]"


@dataclass(frozen=True, slots=True)
class _Class:
    """A class escape inside brackets: one of d, w, s, D, W, S, or a Unicode property as written."""

    letter: str = ""
    property_text: str = ""


class PatternReader:
    """Reads one pattern. `where` names the field in errors. `is_whole`: the pattern has to match the whole text."""

    def __init__(self, pattern: str, where: str, *, is_whole: bool) -> None:
        self._pattern = pattern
        self._where = where
        self._is_whole = is_whole
        self._at = 0
        self._depth = 0
        self._dot = _NOT_LINE_END

    def translated(self) -> str:
        """The pattern in the syntax of Rust's regex crate. Raises `ValidationError` for what cannot be enforced."""
        if "\0" in self._pattern:
            self._refuse("holds a NUL character")
        prefix = self._leading_flags()
        written = prefix + "".join(self._alternatives())
        if self._at < len(self._pattern):
            self._refuse("has a ) without its (")
        return written

    def _refuse(self, problem: str) -> None:
        shown = self._pattern if len(self._pattern) <= 100 else self._pattern[:100] + "..."
        message = f"{self._where}: the pattern {shown!r} {problem} (at character {self._at})"
        raise ValidationError(message, parameter=self._where, value=shown)

    def _peek(self) -> str:
        return self._pattern[self._at] if self._at < len(self._pattern) else ""

    def _take(self, text: str) -> bool:
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _leading_flags(self) -> str:
        """`(?i)`, `(?s)` or both, which only whole patterns may have: JSON Schema has no flags."""
        for flags in ("(?is)", "(?si)", "(?i)", "(?s)"):
            if self._is_whole and self._take(flags):
                if "s" in flags:
                    self._dot = "(?s:.)"
                return "(?i)" if "i" in flags else ""
        return ""

    def _alternatives(self) -> Iterator[str]:
        while True:
            yield from self._sequence()
            if not self._take("|"):
                return
            yield "|"

    def _sequence(self) -> Iterator[str]:
        """One alternative, up to `|`, `)` or the end."""
        is_first = True
        while (char := self._peek()) not in ("", "|", ")"):
            if char in "^$":
                yield self._anchor(char, is_first)
            else:
                yield self._atom() + self._quantifier()
            is_first = False

    def _anchor(self, char: str, is_first: bool) -> str:
        self._at += 1
        if not self._is_whole:
            return char
        is_last = self._peek() in ("", "|", ")")
        if self._depth or not (is_first if char == "^" else is_last):
            self._refuse(f"has a {char} inside; the whole answer has to match in any case, so leave it out")
        return ""

    def _atom(self) -> str:
        char = self._peek()
        if char in "*+?":
            self._refuse(f"has a {char} with nothing to repeat")
        self._at += 1
        if char == ".":
            return self._dot
        if char == "[":
            return self._bracket()
        if char == "(":
            return self._group()
        if char != "\\":
            return _literal(char)
        found = self._escape(in_class=False)
        if isinstance(found, str):
            return _literal(found)
        return f"[{_SURELY[found.letter]}]" if found.letter else found.property_text

    def _group(self) -> str:
        if self._take("?"):
            named = self._take("P<") or (self._peek() == "<" and self._pattern[self._at + 1 : self._at + 2] not in "=!")
            if named:
                end = self._pattern.find(">", self._at)
                if end < 0:
                    self._refuse("has a group name without its >")
                self._at = end + 1
            elif not self._take(":"):
                kind = "look-around" if self._peek() in "=!<" else "an inline flag or another extension"
                self._refuse(f"has {kind}, which cannot be enforced")
        self._depth += 1
        if self._depth > MAX_GROUPS:
            self._refuse(f"has more than {MAX_GROUPS} groups inside one another")
        inner = "".join(self._alternatives())
        if not self._take(")"):
            self._refuse("has a ( without its )")
        self._depth -= 1
        return f"(?:{inner})"

    def _quantifier(self) -> str:
        char = self._peek()
        if char in ("*", "+", "?") and char:
            self._at += 1
            written = char
        elif char == "{" and (counted := self._counted()):
            written = counted
        else:
            return ""
        self._take("?")  # lazy or not, the texts are the same
        if self._peek() in ("*", "+", "?") and self._peek():
            self._refuse("has one quantifier after another; put the first into a group")
        return written

    def _counted(self) -> str:
        end = self._pattern.find("}", self._at)
        inside = self._pattern[self._at + 1 : end] if end > 0 else ""
        least, comma, most = inside.partition(",")
        if not least.isdecimal() and not (comma and (not least or most.isdecimal())):
            return ""
        if not (least.isascii() and least.isdecimal()) or not (most == "" or (most.isascii() and most.isdecimal())):
            self._refuse(f"has the count {{{inside}}}, which dialects read in different ways")
        if len(least) > 7 or len(most) > 7 or max(int(least), int(most or 0)) > MAX_REPEAT:
            self._refuse(f"repeats more than {MAX_REPEAT} times")
        if most and int(most) < int(least):
            self._refuse(f"has the count {{{inside}}}, whose end is before its beginning")
        self._at = end + 1
        return f"{{{int(least)}{comma}{most and int(most)}}}"

    def _bracket(self) -> str:
        is_negated = self._take("^")
        if self._peek() == "]":
            self._refuse("has an empty class, or a ] at the start of one: write \\]")
        members: list[str] = []
        letters: set[str] = set()
        while not self._take("]"):
            if not self._peek():
                self._refuse("has a [ without its ]")
            low = self._member()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if not isinstance(low, str) or not isinstance(high, str) or ord(low) > ord(high):
                    self._refuse("has a range in a class that does not go from one character up to another")
                members.append(f"{_in_class(str(low))}-{_in_class(str(high))}")
            elif isinstance(low, str):
                members.append(_in_class(low))
            elif low.property_text:
                members.append(low.property_text)
            else:
                letters.add(low.letter)
        if not is_negated and any(pair <= letters for pair in _EVERYTHING):
            return "(?s:.)"
        table = _POSSIBLY if is_negated else _SURELY
        members += [table[letter] for letter in sorted(letters)]
        return f"[{'^' if is_negated else ''}{''.join(members)}]"

    def _member(self) -> str | _Class:
        char = self._peek()
        self._at += 1
        return self._escape(in_class=True) if char == "\\" else char

    def _escape(self, *, in_class: bool) -> str | _Class:
        """What follows a backslash: one character, or a class."""
        char = self._peek()
        self._at += 1
        if not char:
            self._refuse("ends in a backslash")
        if char in "dDwWsS":
            return _Class(letter=char)
        if char in "pP":
            return self._property(char)
        if char in "xuc":
            return self._numbered(char)
        if char == "b" and in_class:
            return "\b"
        if char in "bB":
            self._refuse(f"has \\{char}, a look-around, which cannot be enforced")
        if char == "k" or char in "123456789":
            self._refuse("has a back-reference, which cannot be enforced")
        if char in _CONTROL and not (char == "0" and self._peek().isdecimal()):
            return _CONTROL[char]
        if char.isalnum():
            self._refuse(f"has \\{char}, which dialects read in different ways or not at all")
        return char

    def _property(self, letter: str) -> _Class:
        if not self._take("{"):
            self._refuse(f"has \\{letter} without a property in braces")
        end = self._pattern.find("}", self._at)
        name = self._pattern[self._at : end] if end > 0 else ""
        if not name or not all(c.isascii() and (c.isalnum() or c in "_=") for c in name):
            self._refuse(f"has \\{letter} with no property name in its braces")
        self._at = end + 1
        return _Class(property_text=f"\\{letter}{{{name}}}")

    def _numbered(self, kind: str) -> str:
        if kind == "c":
            char = self._peek()
            if not (char.isascii() and char.isalpha()):
                self._refuse("has \\c without a letter")
            self._at += 1
            return chr(ord(char) % 32)
        if kind == "u" and self._take("{"):
            end = self._pattern.find("}", self._at)
            code = self._hex(max(0, min(end - self._at, 8)))
            self._at += 1
        else:
            code = self._hex(2 if kind == "x" else 4)
        if 0xD800 <= code < 0xDC00 and self._take("\\u"):
            low = self._hex(4)
            code = 0x10000 + (code - 0xD800) * 0x400 + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else code
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._refuse("has an escape that stands for no character")
        return chr(code)

    def _hex(self, digits: int) -> int:
        text = self._pattern[self._at : self._at + digits]
        if not text or len(text) < digits or not all(c in "0123456789abcdefABCDEF" for c in text):
            self._refuse("has a numbered escape without its hexadecimal digits")
        self._at += digits
        return int(text, 16)


def translate(pattern: str, where: str, *, is_whole: bool, max_bytes: int) -> str:
    """A client's pattern in the dialect that is enforced. Raises `ValidationError` naming `where`."""
    if len(pattern.encode("utf-8", "surrogatepass")) > max_bytes:
        message = f"{where}: the pattern has {len(pattern)} characters; at most {max_bytes} bytes are compiled"
        raise ValidationError(message, parameter=where)
    return PatternReader(pattern, where, is_whole=is_whole).translated()


def _literal(char: str) -> str:
    if char.isascii() and char.isalnum():
        return char
    return f"\\x{{{ord(char):X}}}"


_in_class = _literal
