"""Directions on a CPU: Numba kernels that run on every core and write each weight once.

Values are those of `reference.py`, bit for bit: no fused multiply-add, no fast-math. The kernels
work on one unit (`Pool.unit` positions, 16 KiB of float32 at K ≤ 4096) at a time, so that sums over
any number of directions stay in registers and the first-level cache; weights are read once and
written once.

    backend.py     sums and projections over a whole model's tensors
    kernels.py     random bits, one unit of a sum or of a projection, and a thread's share of a job
    simd.py        vectors, tiles, and weights of each type
    gguf.py        quantised weights
    averages.py    sums of clients' weights, without PyTorch
    threads.py     threads that run the kernels
    kept_kernels.py    where they are kept on disk
"""
