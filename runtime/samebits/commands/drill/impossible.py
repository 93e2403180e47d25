"""What a drill cannot do on this machine, or could not do just then: told in the report, never counted as passed.

Only the exception lives here, apart from whoever raises it; nothing of it leaves the drill.
"""


class ImpossibleError(Exception):
    """The fault was not given; the text is the reason, for people."""
