"""Recursive doubling: the all-reduce of small arrays, in log2 p exchanges.

In round k a rank swaps its whole sum with the rank whose number differs in bit k, so that after
every round twice as many ranks know the same sum. p = 4:

    round 0    0 <-> 1      2 <-> 3        each knows a pair
    round 1    0 <-> 2      1 <-> 3        each knows all

Each rank sends the whole array log2 p times, where a ring sends 2(p-1)/p of it, but in log2 p
steps instead of 2(p-1): it wins where a message costs its start and not its bytes (Thakur,
Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH").

If p is not a power of two, the first 2(p - 2^k) ranks form pairs: the odd one of a pair gives its
array to the even one, which takes part for both and hands back the sum. In every round a + b is
computed on both sides, once as b + a, which is the same bits; so all ranks end with the same.
"""

from mpiparallel.backend import library_of
from mpiparallel.comm.group import Group
from mpiparallel.comm.ring import Steps

UP_TO = 64 * 1024  # bytes: as long as a message costs its start more than its length


def allreduce_steps(group: Group, flat, tag: int = 0) -> Steps:
    """Sum `flat` over the ranks, in place. All ranks of the group run it.

    flat : contiguous 1-D array, the same length and dtype on every rank, at least float32 wide
        where it is floating. Sends the array floor(log2 p) times, once more from an even rank that
        stands for a pair, and once in all from the odd one. tag : of the messages.
    """
    rank, players = group.rank, 1 << (group.size.bit_length() - 1)
    pairs = group.size - players

    def send(dest: int):
        return group.isend(flat, dest, tag, part_of="allreduce")

    def receive(out, source: int):
        return group.irecv(out, source, tag, part_of="allreduce")

    if rank < 2 * pairs and rank % 2:
        given = send(rank - 1)
        yield (given,)
        given.wait()
        summed = receive(flat, rank - 1)
        yield (summed,)
        summed.wait()
        return

    other = library_of(flat).empty_like(flat)
    if rank < 2 * pairs:
        taken = receive(other, rank + 1)
        yield (taken,)
        flat += taken.wait()
    player = rank // 2 if rank < 2 * pairs else rank - pairs
    for bit in range(players.bit_length() - 1):
        partner = player ^ (1 << bit)
        peer = 2 * partner if partner < pairs else partner + pairs
        received, sent = receive(other, peer), send(peer)
        yield received, sent
        received.wait()
        sent.wait()
        flat += other
    if rank < 2 * pairs:
        returned = send(rank + 1)
        yield (returned,)
        returned.wait()
