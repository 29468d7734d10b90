"""Becoming one process of a job of several."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from jaxbraid._options import check_integer

# What a launcher of several processes leaves in the environment of each.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
SIGNS = (
    *MPI_SIZES,
    "JAX_COORDINATOR_ADDRESS",
    "SLURM_STEP_NODELIST",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "KUBERNETES_SERVICE_HOST",
)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = 20,
    **options: Any,
) -> None:
    """Make this process one of a job of several, as `jax.distributed.initialize` does.

    Call it before anything else that uses JAX. Under SLURM, Open MPI and on TPU pods JAX finds all
    arguments itself (Open MPI 5 and other MPIs: if mpi4py is installed); elsewhere give the first
    three. Where there is only one process, and after the first call, nothing happens.

    If one process dies, all end: those that wait for a message from it by an error of the network,
    the others when it has not been heard of for a while. A process that ends with an exception
    leaves at once, without the exit functions of Python: JAX's would wait for the other processes,
    which wait for this one.

    **Arguments**

    - `coordinator_address`: `"host:port"` of process 0, the same for all processes.
    - `num_processes`, `process_id`: how many processes there are, and which of them this is.
    - `heartbeat_timeout_seconds`: a process that has not been heard of for so long is lost, and the
        others end with an error. JAX's own default is 100.
    - `options`: further arguments of `jax.distributed.initialize`.

    **Raises**

    `ValueError` if only some of the arguments are known. `RuntimeError` if JAX has been used
    before, or if MPI started several processes that JAX cannot connect: they would train one copy
    each.
    """
    check_integer("heartbeat_timeout_seconds", heartbeat_timeout_seconds, 1)
    given = (coordinator_address, num_processes, process_id)
    if jax.distributed.is_initialized():
        return
    if num_processes == 1 and process_id in (0, None):
        return
    options["heartbeat_timeout_seconds"] = heartbeat_timeout_seconds
    alone = all(a is None for a in given) and not any(name in os.environ for name in SIGNS)
    try:
        jax.distributed.initialize(*given, **options)
    except RuntimeError:
        # JAX has been used before: no harm where there is nobody to talk to
        if not alone:
            raise
    except ValueError as e:
        if any(a is not None for a in given) or "JAX_COORDINATOR_ADDRESS" in os.environ:
            raise
        if "coordinator_address" not in str(e):
            raise
        # JAX found no cluster
        ranks = max(int(os.environ.get(name, 1)) for name in MPI_SIZES)
        if ranks > 1:
            _initialize_by_mpi4py(ranks, options)
    if jax.distributed.is_initialized():
        sys.excepthook = functools.partial(_leave, sys.excepthook)


def _leave(report: Callable[..., Any], *error: Any) -> None:
    try:
        report(*error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _initialize_by_mpi4py(ranks: int, options: dict[str, Any]) -> None:
    with contextlib.suppress(ImportError):
        import mpi4py  # noqa: F401  # pyright: ignore[reportMissingImports]

        jax.distributed.initialize(cluster_detection_method="mpi4py", **options)
        return
    raise RuntimeError(
        f"MPI started {ranks} processes, but JAX does not recognise this MPI: install mpi4py, or "
        "give coordinator_address, num_processes and process_id."
    )
