"""The exception for a fault that cannot be injected on this machine or at this moment."""


class ImpossibleError(Exception):
    """The fault was not injected. The text is the reason, for people; it never counts as passed."""
