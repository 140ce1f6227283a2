"""Tied parameters: one that lives on several pipeline ranks gets the sum of their gradients.

GPT-2 uses one table for the first stage's embedding and the last stage's output. Each holder sends
its gradient to the other holders, point to point, and all add up in the order of their ranks, so
that all copies get the same bits and stay equal for ever. Stages in between take no part.
"""

from collections.abc import Iterable
from typing import Any

from mpiparallel.backend import xp
from mpiparallel.comm.group import Group
from mpiparallel.parameter import Parameter


def sum_tied_gradients(gradients: Iterable[tuple[Parameter, Any]], pp: Group) -> None:
    """Add up gradients over the `holders` of their parameters, in place. All holders call.

    gradients : (parameter, its gradient or this rank's shard of it), in one order on all holders.
    """
    for parameter, gradient in gradients:
        others = [rank for rank in parameter.holders if rank != pp.rank]
        if not others:
            continue
        received = {rank: pp.irecv(xp.empty_like(gradient), rank) for rank in others}
        sent = [pp.isend(gradient.copy(), rank) for rank in others]
        found = {rank: pending.wait() for rank, pending in received.items()}
        found[pp.rank] = gradient.copy()
        gradient[...] = sum(found[rank] for rank in sorted(found))
        for pending in sent:
            pending.wait()
