"""Errors that are told in one line, because whoever reads them can do something about it."""


class OneLineError(Exception):
    """Told by rank 0 in one line, without a traceback; every rank exits with `status`.

    agreed : all ranks have raised it (`comm.agree`), so all can end in good order.
    """

    status = 1
    agreed = False


class UserError(OneLineError):
    """A mistake in the settings or the input: what is wrong, where, and what is legal."""

    status = 2


class RunError(OneLineError):
    """A run that cannot go on: a disk that is full, a loss that is not a number."""

    status = 1
