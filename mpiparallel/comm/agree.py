"""Agreeing on errors: what one rank finds wrong ends all ranks, in good order.

A rank that stops alone leaves the others waiting for it. So work that may find a mistake on some
rank only, such as reading files, is done inside `agree`.
"""

from collections.abc import Callable
from typing import TypeVar

from mpiparallel.comm.group import Group
from mpiparallel.errors import OneLineError, RunError, UserError

T = TypeVar("T")
_KINDS: dict[str, type[OneLineError]] = {"UserError": UserError, "RunError": RunError}


def agree(group: Group, work: Callable[[], T]) -> T:
    """work() of this rank. Where it raises UserError or RunError on any rank, all ranks raise the
    error of the lowest such rank, `agreed`. Every rank of the group calls; errors alone are sent.
    """
    problem, result = None, None
    try:
        result = work()
    except (UserError, RunError) as error:
        problem = [type(error).__name__, str(error)]
    for kind, text in filter(None, group.allgather_json(problem)):
        agreed = _KINDS[kind](text)
        agreed.agreed = True
        raise agreed
    return result  # type: ignore[return-value]
