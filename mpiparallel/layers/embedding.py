"""Token embedding cut by vocabulary over tp, and learned positions.

Rank r holds rows [r V/t, (r+1) V/t) of the table. Forward: each rank looks up the tokens that fall
in its rows, puts zero for the others, and an Allreduce adds up the pieces. Backward: each rank
takes the gradient of its own rows; no message. Where t does not divide V the table has zero rows
at its end, which no token names.
"""

from mpiparallel.backend import xp
from mpiparallel.comm.group import Group
from mpiparallel.layers import Later, now
from mpiparallel.parameter import Layout, Parameter


def token_table(vocabulary: int, hidden: int, tp: Group, std: float) -> Parameter:
    """The (V, H) table that the embedding and, tied to it, the output layer share."""
    layout = Layout(0, padding=True)
    shape = (vocabulary, hidden)
    return Parameter("token_embedding.weight", shape, layout, std, tp.rank, tp.size)


class VocabParallelEmbedding:
    """x[b, s] = tokens_table[token[b, s]] + positions_table[s].

    table : from `token_table`. sequence : the longest sequence. All ranks of tp call.
    """

    def __init__(self, table: Parameter, sequence: int, tp: Group, std: float):
        self.tp, self.table = tp, table
        hidden = table.shape[1]
        self.positions = Parameter(
            "position_embedding.weight", (sequence, hidden), Layout(), std, tp.rank, tp.size
        )
        self.parameters = [table, self.positions]

    def forward(self, tokens):
        """tokens (B, S) integers -> x (B, S, H), whole. Raises ValueError for an unknown token."""
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.table.shape[0]:
            raise ValueError(f"a token is outside the vocabulary, 0 to {self.table.shape[0] - 1}")
        local = tokens - self.tp.rank * len(self.table.data)
        elsewhere = (local < 0) | (local >= len(self.table.data))
        x = self.table.data[xp.where(elsewhere, 0, local)]
        x[elsewhere] = 0
        self.tp.allreduce(x, out=x)
        x += self.positions.data[: tokens.shape[1]]
        return x, (local, elsewhere)

    def backward(self, dx, saved, later: Later = now) -> None:
        """dx (B, S, H), whole -> None: tokens have no gradient."""
        local, elsewhere = saved
        later(self._add_gradients, dx, local, ~elsewhere)

    def _add_gradients(self, dx, local, here) -> None:
        self.table.add_grad_rows(local[here], dx[here])
        summed = xp.zeros_like(self.positions.grad)
        summed[: dx.shape[1]] = dx.sum(0)
        self.positions.add_grad(summed)
