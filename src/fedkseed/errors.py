"""The one error a user meets: what was got, what was expected, what to do.

Every border (configuration, files, messages, arguments of the public functions) raises it; the
command line prints its text on one line and exits with code 2.
"""


class FedKSeedError(ValueError):
    """A refusal with a text for a person; nothing was changed when it is raised."""
