"""The one kind of error that is the user's to mend."""


class UserError(Exception):
    """A mistake in the settings or the input: one line that says what is wrong and what is legal.

    The command line prints it once, from rank 0, and every rank exits with status 2.
    """
