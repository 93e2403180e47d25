"""The exception for a fault that this machine or the moment does not allow; it is reported, never counted as passed."""


class ImpossibleError(Exception):
    """The fault was not injected; the text is the reason, for people."""
