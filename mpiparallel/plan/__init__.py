"""What a run will send and hold, from the sizes of the model and the mesh alone. No MPI."""
