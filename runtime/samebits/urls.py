"""What of a URL may be shown: never a user's password, nor a key that stands in its place.

Only patterns live here; which URLs are taken and where they lead does not. The one idea: a key holds any character,
``/`` and ``@`` too, so where a ``:`` comes before the first ``/`` all up to the last ``@`` counts as secret, unless
what comes before that ``/`` reads as a host and its port (RFC 3986, section 3.2).
"""

from __future__ import annotations

import re

_HOST_AND_PORT = r"(?:[^/:@]*@)?(?:\[[^\]/@]*\](?::\d{1,5})?|[^/:@]*:\d{1,5})(?:[/?#]|\Z)"
_PASSWORD = re.compile(rf"(?<=://)(?!{_HOST_AND_PORT})[^/]*:.*@", re.DOTALL)
_USER = re.compile(r"(?<=://)[^/@]*@")
_HIDDEN = "(hidden)@"


def has_password(url: str) -> bool:
    """Whether a user's password, or what may be one, stands in the URL."""
    return _PASSWORD.search(url) is not None


def without_credentials(text: str) -> str:
    """The text as it may be shown: where it is a URL, without a user's password. A user's name alone stays."""
    return _PASSWORD.sub(_HIDDEN, text)


def words_without_credentials(text: str) -> str:
    """A text of others as it may be shown, its white space made blanks: no URL in it names a user, who may be a key."""
    return " ".join(_USER.sub(_HIDDEN, without_credentials(word)) for word in text.split())
