"""Tied parameters: one that lives on several pipeline ranks gets the sum of their gradients.

GPT-2 uses one table for the first stage's embedding and the last stage's output. Each holder sends
its gradient to the other holders, point to point, and all add up in the order of their ranks, so
that all copies get the same bits and stay equal for ever. Stages in between take no part.
"""

from mpiparallel.backend import xp
from mpiparallel.comm.group import Group
from mpiparallel.parameter import Parameter


def sum_tied_gradients(parameters: list[Parameter], pp: Group) -> None:
    """Add up `grad` over the `holders` of every parameter, in place. All holders call."""
    for parameter in parameters:
        others = [rank for rank in parameter.holders if rank != pp.rank]
        if not others:
            continue
        received = {rank: pp.irecv(xp.empty_like(parameter.grad), rank) for rank in others}
        sent = [pp.isend(parameter.grad.copy(), rank) for rank in others]
        gradients = {rank: pending.wait() for rank, pending in received.items()}
        gradients[pp.rank] = parameter.grad.copy()
        parameter.grad[...] = sum(gradients[rank] for rank in sorted(gradients))
        for pending in sent:
            pending.wait()
