"""Remove credentials from URLs before they are shown.

A key may contain any character, also ``/`` and ``@``. So if there is a ``:`` before the first ``/``, everything up to
the last ``@`` counts as secret, unless the text before that ``/`` reads as a host and its port (RFC 3986, section 3.2).
"""

from __future__ import annotations

import re

_HOST_AND_PORT = r"(?:[^/:@]*@)?(?:\[[^\]/@]*\](?::\d{1,5})?|[^/:@]*:\d{1,5})(?:[/?#]|\Z)"
_PASSWORD = re.compile(rf"(?<=://)(?!{_HOST_AND_PORT})[^/]*:.*@", re.DOTALL)
_USER = re.compile(r"(?<=://)[^/@]*@")
_HIDDEN = "(hidden)@"


def has_password(url: str) -> bool:
    """Return whether the URL contains a user's password, or what may be one."""
    return _PASSWORD.search(url) is not None


def without_credentials(text: str) -> str:
    """Return the text without a password if it is a URL; a user's name alone stays."""
    return _PASSWORD.sub(_HIDDEN, text)


def words_without_credentials(text: str) -> str:
    """Return another program's text without users' names in URLs, which may be keys; blanks become spaces."""
    return " ".join(_USER.sub(_HIDDEN, without_credentials(word)) for word in text.split())
