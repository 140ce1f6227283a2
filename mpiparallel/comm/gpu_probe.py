"""`python -m mpiparallel.comm.gpu_probe`: does MPI send arrays that are in device memory?

This process, an MPI job of its own, sends device arrays to itself, small and large, so that both
ways that an MPI has of sending a message are tried. It prints `proved` if every byte arrived. An
MPI that takes the pointer for one to host memory crashes here, and nothing else does.
"""

SIZES = (16, 1 << 20)  # elements: below and above any MPI's limit for eager messages


def main() -> None:
    """Send, receive, compare."""
    import cupy
    from mpi4py import MPI

    right = True
    for size in SIZES:
        sent, received = cupy.arange(size, dtype="float64"), cupy.zeros(size)
        cupy.cuda.get_current_stream().synchronize()
        arriving = MPI.COMM_SELF.Irecv(received, 0)
        leaving = MPI.COMM_SELF.Isend(sent, 0)
        MPI.Request.Waitall([arriving, leaving])
        right &= bool((received == sent).all())
    if right:
        print("proved")


if __name__ == "__main__":
    main()
