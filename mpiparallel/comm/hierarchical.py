"""Hierarchical all-reduce: the network carries each element of a node once, not once per rank.

Memory inside a node is fast and the link between two nodes is slow, so the sum is made inside
first. Two nodes of two ranks, whose arrays a to d have two chunks:

                         node 0                 node 1
                    rank 0     rank 1      rank 2     rank 3
    reduce-scatter  a0+b0      a1+b1       c0+d0      c1+d1      inside each node
    all-reduce      sum 0      sum 1       sum 0      sum 1      0 <-> 2, 1 <-> 3: between nodes
    all-gather      sum 0,1    sum 0,1     sum 0,1    sum 0,1    inside each node

A node of m ranks, one of k, sends 2(k-1)/k of the array over its link in m pieces. Of a flat ring
it sends 2(p-1)/p even where ranks are numbered node by node, and m times that where they are dealt
out to the nodes in turn; and the flat ring takes 2(p-1) steps over the network, this one 2(k-1)
or, for small arrays, log2 k. (Jia et al. 2018, arXiv 1807.11205, section 3.3.)
"""

from mpiparallel.comm import recursive_doubling, ring
from mpiparallel.comm.group import Group
from mpiparallel.comm.ring import Steps


def allreduce_steps(inside: Group, across: Group, flat, tag: int = 0) -> Steps:
    """Sum `flat` over all ranks of `inside` x `across`, in place. All of them run it.

    inside : the ranks of this node. across : the ranks that have this rank's number inside on
        every node. flat : contiguous 1-D array, the same length and dtype on every rank, at least
        float32 wide where it is floating. tag : of the messages.
    Sends 2(m-1)/m of the array inside and, beyond UP_TO bytes, 2(k-1)/k of 1/m of it across.
    """
    bounds = ring.chunk_bounds(flat.size, inside.size)
    mine = flat[bounds[inside.rank] : bounds[inside.rank + 1]]
    yield from ring.reduce_scatter_steps(inside, flat, "allreduce", tag)
    short = mine.nbytes <= recursive_doubling.UP_TO
    between = recursive_doubling.allreduce_steps if short else ring.allreduce_steps
    yield from between(across, mine, tag)
    yield from ring.allgather_steps(inside, flat, "allreduce", tag)
