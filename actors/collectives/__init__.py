"""Tensors between ranks: through shared memory, between hosts, or between GPUs of a host.

Each rank maps what the others have. Before the first step all ranks exchange a `RankDescriptor` and
check that they will meet for the same; from then on a launch of a collective is one call of C,
which waits for the other ranks and reads and writes their memory.

- `handshake`      what ranks compare beforehand, and which bytes of a `Collective` go where.
- `sum_order`      the tree by which a sum is added, whatever hosts its ranks are on.
- `segments`       memory that processes share, the board of a rank, the functions of meet.c.
- `hierarchical`   an end of the transport between hosts: memory inside each, messages between.
- `crossing`       one collective whose ranks are on several hosts: what each adds and sends.
- `pieces`         messages between hosts, some under way at once.
- `mpi`            the messages themselves, by mpi4py.
- `pmi`            how MPI starts without mpiexec: a rank answers it by the ranks' own gather.
- `shared_memory`  a rank's end of the transport: `Communicator` of `actors.machine.protocol`.
- `meet.c`         the meeting itself: arrivals, sums, copies, and who sleeps or gives up.
- `nccl`           the end of a rank with a GPU, whose launches are calls of NCCL on a stream.

It may import `actors.kernels.common`, `actors.kernels.library`, the calls of
`actors.kernels.cuda`, `actors.machine` and `compiler.contract`; it knows neither the loop nor
devices.

Begin reading at `handshake`, because the rest moves what it describes.
"""
