"""The output layer, tied to the token embedding, and the cross-entropy: the logits stay cut.

Each tp rank computes the logits of its part of the vocabulary, (B, S, V/t), and nobody ever sees
the others'. The loss of a position is log(sum_v exp(z_v)) - z_label, and it is put together from
three Allreduces of one number per position:

    the largest logit           max     subtracted, so that exp cannot overflow
    the sum of exponentials     sum
    the label's logit           sum     its owner contributes it, the others zero

Backward needs no message for the logits (softmax minus one at the label), and one Allreduce of
(B, S, H) for the input's gradient, as every column-parallel layer does.
"""

from mpiparallel.backend import xp
from mpiparallel.comm.group import Group
from mpiparallel.layers import Later, now
from mpiparallel.layers.linear import times
from mpiparallel.parameter import Parameter

IGNORE = -100  # the label of a position that has no loss and no gradient


class VocabParallelLogits:
    """logits_r = x @ table_r^T, column-parallel over the vocabulary; padding gets -inf."""

    def __init__(self, table: Parameter, tp: Group):
        self.tp, self.table = tp, table
        self.parameters = [table]

    def forward(self, x):
        """x (B, S, H), whole -> logits (B, S, V/t), cut."""
        logits = times(x, self.table.data.T)
        rows = len(self.table.data)
        real = max(0, min(rows, self.table.shape[0] - self.tp.rank * rows))
        logits[..., real:] = -xp.inf
        return logits, x

    def backward(self, dlogits, saved, later: Later = now):
        """dlogits (B, S, V/t), cut -> dx (B, S, H), whole."""
        x = saved
        dx = times(dlogits, self.table.data)
        self.tp.allreduce(dx, out=dx)
        later(self._add_gradient, dlogits, x)
        return dx

    def _add_gradient(self, dlogits, x) -> None:
        dlogits, x = dlogits.reshape(-1, dlogits.shape[-1]), x.reshape(-1, x.shape[-1])
        self.table.add_grad_matmul(dlogits.T, x)


class VocabParallelCrossEntropy:
    """-log softmax(logits)[label], over logits that are cut by vocabulary over tp."""

    def __init__(self, vocabulary: int, tp: Group):
        self.vocabulary, self.tp = vocabulary, tp

    def forward(self, logits, labels):
        """logits (B, S, V/t), labels (B, S) -> losses (B, S), zero where the label is IGNORE.

        The logits are used up: their memory becomes the probabilities that backward needs.
        Raises ValueError for a label that is neither IGNORE nor in the vocabulary.
        """
        valid = labels != IGNORE
        if bool(((labels < 0) & valid).any()) or bool((labels >= self.vocabulary).any()):
            raise ValueError(
                f"a label is neither {IGNORE} nor in the vocabulary, 0 to {self.vocabulary - 1}"
            )
        width = logits.shape[-1]
        local = labels - self.tp.rank * width
        here = (local >= 0) & (local < width) & valid
        rows = xp.nonzero(here)
        where = (*rows, local[rows])

        largest = self.tp.allreduce(logits.max(-1), "max")
        logits -= largest[..., None]
        target = xp.zeros(labels.shape, logits.dtype)
        target[rows] = logits[where]
        self.tp.allreduce(target, out=target)
        exponentials = xp.exp(logits, out=logits)
        total = self.tp.allreduce(exponentials.sum(-1))

        losses = xp.where(valid, xp.log(total) - target, 0)
        probabilities = exponentials
        probabilities /= total[..., None]
        return losses, (probabilities, where, valid)

    def backward(self, scale: float, saved):
        """d(scale * losses.sum()) / dlogits, (B, S, V/t); uses up the probabilities. No message."""
        dlogits, where, valid = saved
        dlogits[where] -= 1
        dlogits *= scale
        dlogits[~valid] = 0
        return dlogits
