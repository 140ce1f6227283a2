"""`python -m mpiparallel.comm.gpu_probe`: does MPI send arrays that are in device memory?

This process starts another one and the two exchange a device array, small and large, so that both
ways that an MPI has of sending a message are tried. It prints `proved` if every byte arrived. An
MPI that takes the pointer for one to host memory crashes here, and nothing else does.
"""

import sys

SIZES = (16, 1 << 20)  # elements: below and above any MPI's limit for eager messages


def main() -> None:
    """The parent sends and gets back what its child has doubled."""
    import cupy
    from mpi4py import MPI

    parent = MPI.Comm.Get_parent()
    spawns = parent == MPI.COMM_NULL
    other = (
        MPI.COMM_SELF.Spawn(sys.executable, ["-m", "mpiparallel.comm.gpu_probe"], 1)
        if spawns
        else parent
    )
    right = True
    for size in SIZES:
        sent, received = cupy.arange(size, dtype="float64"), cupy.zeros(size)
        cupy.cuda.get_current_stream().synchronize()
        if spawns:
            other.Send(sent, 0)
            other.Recv(received, 0)
            right &= bool((received == 2 * sent).all())
        else:
            other.Recv(received, 0)
            received *= 2
            cupy.cuda.get_current_stream().synchronize()
            other.Send(received, 0)
    other.Disconnect()
    if spawns and right:
        print("proved")


if __name__ == "__main__":
    main()
