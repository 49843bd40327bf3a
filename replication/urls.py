"""URLs of databases, HTTP APIs, catch-up sources and writers: whatever may be a secret in them is not shown."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

# Scheme, user, password, place.  Other texts may have a secret anywhere before an @, or where a port belongs.
_WELL_FORMED: Final = re.compile(
    r"([a-z][a-z0-9+.-]*://)(?:([^:@/?#]*)(?::[^@/?#]*)?@)?((?:[^:@/?#\[\]]|\[[^\]@]*\]|:[0-9]*(?=[,/?#]|$))*(?:/[^@?#]*)?)"
    r"([?#][^@]*)?"
)
_PATH: Final = re.compile(r"((?:sqlite|file)://)()(/[^?#]*)(.*)")
_TOKENS: Final = ("http://", "https://", "s3://", "s3a://")  # here a user may be a token
_USER_IS_PASSWORD: Final = ("redis://", "rediss://", "redis+unix://")  # in X@HOST, X is a password without its colon
# The end of the name of an option with a secret; libpq's sslkey has the name of a file.
_SECRET: Final = r"(?:password|secret|(?<!ssl)key|token|signature|\bsig)\w*"
_VALUE: Final = r"(?:\\.|[^\s:&\\])"  # one character; a backslash escapes the next one
_ASSIGNED: Final = re.compile(
    rf"(?is)((?:passw|passphrase|secret|token)\w*\s*=\s*)('(?:\\.|[^'\\])*'?|{_VALUE}(?:{_VALUE}|\\$)*)"
)
_QUOTED: Final = 8  # characters: a beginning of a secret that is at least so long is hidden, too
_ARGUMENTS: Final = slice(45, 47)  # of /proc/self/stat behind the name: where the arguments begin and end in memory


class Url:
    """A URL, an endpoint or a path; ``str`` and ``repr`` leave out its password and its options.

    ``reveal`` returns the whole text, for what connects.  A ``Url`` equals another one of the same text.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str | Url) -> None:
        self._text: str = text.reveal() if isinstance(text, Url) else text

    def reveal(self) -> str:
        """Return the whole text, with its secrets."""
        return self._text

    def hide_in(self, text: str) -> str:
        """Return ``text``, such as a driver's message, without the secrets of this URL."""
        secrets = [a or b for a, b in re.findall(rf":([^:@/][^@/]*)@|{_SECRET}=([^&]+)", self._text)]
        if not _WELL_FORMED.fullmatch(self._text):  # a password may be where a port belongs
            secrets += re.findall(r"://[^:@/]*:([^@/?#]+)", self._text)
        for each in sorted({*secrets, *map(unquote, secrets)}, key=len, reverse=True):
            text = hide_secret(text, each)
        # Values of other options are hidden where they are quoted: a short one is part of many words.  Files are shown.
        for each in map(unquote, re.findall(r"[?&](?!ssl(?:key|cert|rootcert|crl)=)[^=&]+=([^&]+)", self._text)):
            for value in (each, *settings_in(each)):
                text = text.replace(f'"{value}"', '"…"')
        return text

    def startswith(self, prefix: str | tuple[str, ...]) -> bool:
        """Return whether the text begins with a scheme."""
        return self._text.startswith(prefix)

    def __str__(self) -> str:
        return _hide(self._text)

    def __repr__(self) -> str:
        return repr(str(self))

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Url) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[type[Url], tuple[str]]:
        return Url, (self._text,)


def _hide(text: str) -> str:
    if found := _PATH.fullmatch(text) or _WELL_FORMED.fullmatch(text):
        scheme, user, place, options = found.groups()
        is_secret = scheme in _TOKENS or (scheme in _USER_IS_PASSWORD and text.startswith(f"{scheme}{user}@"))
        shown = f"{'…' if is_secret else user}@" if user else ""
        place = _ASSIGNED.sub(r"\1…", place)  # options behind & or ; instead of ? are a part of it
        return f"{scheme}{shown}{place}{'?…' if options else ''}"
    scheme, slashes, rest = text.partition("://")
    before, at, place = rest.rpartition("@") if slashes else text.rpartition("@")
    if slashes:
        return f"{scheme}://…@{place.partition('?')[0]}" if at and not re.search(r"[?#]", before) else f"{scheme}://…"
    if at and ":" in re.sub(r"^[a-z]+:/", "", before):
        return f"…@{place}"
    return _ASSIGNED.sub(r"\1…", text)


def settings_in(options: str) -> list[str]:
    """Return the values of the settings in libpq's ``options``, such as ``-c statement_timeout=5``."""
    return [re.sub(r"\\(.)", r"\1", each) for each in re.findall(r"=((?:\\.|[^\s\\])+)", options)]


def is_host(text: str) -> bool:
    """Return whether ``text`` can be encoded with IDNA; else the resolver raises a UnicodeError, as for ``a..b``."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def hide_secret(text: str, secret: str) -> str:
    """Return ``text``, in which a peer may quote what it has received, without ``secret`` and long beginnings of it."""
    shortest = min(len(secret), _QUOTED)
    for length in range(len(secret), max(shortest, 1) - 1, -1):
        if secret[:shortest] not in text:
            break
        text = text.replace(secret[:length], "…")
    return text


def hide_secrets(text: str) -> str:
    """Return ``text``, which may quote arguments of a command line, without the secrets of URLs in it.

    From the first URL to the last ``@`` all counts as one URL: a password may have spaces and quotes.
    """
    begin, end = text.rpartition("@")[0].find("://"), text.rfind("@")
    if begin >= 0:
        begin = max(text.rfind(each, 0, begin) for each in " \n\t'\"") + 1
        end += len(re.split(r"[\s'\"]", text[end:], maxsplit=1)[0])
        return _hide_words(text[:begin]) + _hide(text[begin:end]) + _hide_words(text[end:])
    return _hide_words(text)


def _hide_words(text: str) -> str:
    return re.sub(r"[^\s'\"]+", lambda word: _hide(word[0]), text)


def hide_arguments() -> None:
    """Overwrite the secrets among this process's arguments, which ``ps`` shows to every user; on Linux only."""
    try:
        start, end = (
            int(each)
            for each in Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[_ARGUMENTS]
        )
    except (OSError, ValueError):
        return
    if not 0 < start < end:
        return
    for found in re.finditer(rb"[^\0]+", ctypes.string_at(start, end - start)):
        text = os.fsdecode(found[0])
        if (shown := _hide(text)) != text:
            size = len(found[0])
            ctypes.memmove(start + found.start(), os.fsencode(shown)[:size].ljust(size), size)
