"""The transformer's layers, forward beside backward, each with its messages in plain sight.

Every layer has

    forward(x) -> y, saved                saved is what backward needs; the caller keeps it
    backward(dy, saved, later) -> dx      gradients of parameters are added to `Parameter.grad`

`later(function, *arrays)` receives the work that computes a weight gradient. A whole backward runs
it at once (`now`); a schedule that splits backward keeps it and runs it in a later action, and
what waits holds only the arrays that it needs.

Shapes: B micro-batch, S sequence, H hidden, N heads, D head dim, F feed-forward, V vocabulary;
a layer of t tensor ranks holds N/t, F/t or V/t of them. B x S is flattened to rows where a layer
does not look across positions.
"""

from collections.abc import Callable

Later = Callable[..., None]


def now(function: Callable[..., None], *arrays) -> None:
    """The `later` of a whole backward: do it at once."""
    function(*arrays)
