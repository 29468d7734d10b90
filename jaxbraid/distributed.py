"""Several processes: start them, lay out a mesh, make parameters where they live, save them.

    jaxbraid.distributed.initialize()                       # on a cluster, before anything else
    mesh = make_mesh(layer=8, batch=2)
    params = global_layers(make_layer, 64, mesh)            # each process makes its own layers only
    net = jaxbraid.parallel_ode_net(f, params, layers=64, mesh=mesh, batch_axis="batch")
    y = net(shard_batch(x, mesh))
    save("checkpoints/1", params, layers=64)

Every process runs the same program and calls the same functions in the same order. All of it works
in one process, too.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxbraid import _check
from jaxbraid._hierarchy import Hierarchy, build_hierarchies
from jaxbraid._ode_net import FORWARD, default_adjoint
from jaxbraid._options import MGRIT, check_integer

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


def make_mesh(
    layer: int, batch: int = 1, space: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh on which neighbouring layers lie on neighbouring devices.

    Neighbouring layers exchange states several times in each solve, parts of the batch sum their
    gradients once, parts of a space exchange values in every step. So the axis of space gets the
    nearest devices, that of layers the next nearest, that of the batch the farthest: with 2 x 4
    devices on two hosts, `make_mesh(4, 2)` puts all layers of one half of the batch on each host,
    `make_mesh(8)` the first half of the layers on the first.

    **Arguments**

    - `layer`, `batch`, `space`: sizes of the axes.
    - `devices`: the devices to take, by default all. A single process may ask for fewer than it
        has and gets the first ones.

    **Returns**

    A `jax.sharding.Mesh` with the axes `("layer", "batch")`, and `"space"` if that is larger than
    1, all of type `Auto`.

    **Raises**

    `ValueError` or `TypeError` naming the argument, if the axes do not fit the devices.
    """
    sizes = {"layer": layer, "batch": batch, "space": space}
    sizes = {name: check_integer(name, size, 1) for name, size in sizes.items()}
    shape = "layer x batch x space = {layer} x {batch} x {space}".format(**sizes)
    wanted = math.prod(sizes.values())
    present = list(jax.devices() if devices is None else devices)
    if devices is None and jax.process_count() == 1 and wanted <= len(present):
        present = present[:wanted]
    if wanted != len(present):
        what = "jax.devices()" if devices is None else "devices"
        raise ValueError(
            f"{shape} needs {wanted} devices, but {what} has {len(present)}, on "
            f"{len({d.process_index for d in present})} processes: layer, batch and space must "
            "multiply to that number."
        )
    outer_first = (sizes["batch"], sizes["layer"], sizes["space"])
    grid = _device_grid(outer_first, present)
    grid = grid.transpose(1, 0, 2)
    names = ("layer", "batch", "space")
    if sizes["space"] == 1:
        grid, names = grid[..., 0], names[:2]
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _device_grid(shape: tuple[int, int, int], devices: list[Any]) -> np.ndarray:
    """The devices as `(batch, layer, space)`, the axes in order of growing traffic."""
    if devices[0].platform == "cpu":
        devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    slices = len({getattr(d, "slice_index", None) for d in devices})
    if slices > 1:
        # between slices (or hosts of GPUs) the network is slower: the outermost axes cross it
        outer, left = [], slices
        for size in shape:
            outer.append(math.gcd(size, left))
            left //= outer[-1]
        if left == 1:
            inner = [size // n for size, n in zip(shape, outer, strict=True)]
            with contextlib.suppress(ValueError):  # slices of different sizes: as they come
                return mesh_utils.create_hybrid_device_mesh(inner, outer, devices)
    return mesh_utils.create_device_mesh(shape, devices)


def own_layers(
    layers: int,
    mesh: Mesh,
    forward: MGRIT = FORWARD,
    adjoint: MGRIT | None = None,
    layer_axis: str = "layer",
) -> tuple[int, ...]:
    """The layers (time steps) that lie on this process's devices, in order.

    **Arguments**

    - `layers`: the number of layers of the whole network.
    - `mesh`, `layer_axis`: as in `parallel_ode_net`.
    - `forward`, `adjoint`: how the network will be solved; the size of a device's block of layers
        depends on it.

    **Raises**

    `ValueError` or `TypeError` naming the argument.
    """
    h = _hierarchy(layers, mesh, forward, adjoint, layer_axis)
    block = h.levels[0].block
    blocks = np.moveaxis(mesh.devices, mesh.axis_names.index(layer_axis), 0)
    mine = jax.process_index()
    return tuple(
        n
        for i, row in enumerate(blocks)
        if any(d.process_index == mine for d in row.flat)
        for n in range(i * block, min(h.steps, (i + 1) * block))
    )


def _hierarchy(
    layers: int, mesh: Mesh, forward: MGRIT, adjoint: MGRIT | None, layer_axis: str
) -> Hierarchy:
    layers = check_integer("layers", layers, 1)
    _check.mesh_axes(mesh, layer_axis, None)
    _check.config("forward", forward)
    adjoint = default_adjoint(forward, adjoint)
    _check.config("adjoint", adjoint)
    return build_hierarchies((forward, adjoint), layers, mesh.shape[layer_axis])[0]


def global_layers(
    make: Callable[[int], PyTree],
    layers: int,
    mesh: Mesh,
    *,
    forward: MGRIT = FORWARD,
    adjoint: MGRIT | None = None,
    layer_axis: str = "layer",
) -> PyTree:
    """Parameters of all layers as global arrays, each layer made by the process that holds it.

    No process ever holds the parameters of all layers, unless all lie on its devices.

    **Arguments**

    - `make`: `make(n)`, the parameters of layer n: a pytree of arrays, with the same structure,
        shapes and dtypes for all n. It is called once for each of `own_layers(...)`; to not depend
        on the number of processes, draw them from `jax.random.fold_in(key, n)`. (A process that has
        slots but no layers calls it for the last layer.)
    - `layers`, `mesh`, `forward`, `adjoint`, `layer_axis`: as in `own_layers`.

    **Returns**

    The pytree with a leading axis, split along `layer_axis`. Its length is `layers`, or more where
    devices have equal blocks only with some slots left over at the end: these repeat the last
    layer. Give it to `parallel_ode_net` together with `layers`. Slots left over take no part: they
    get zero gradients.

    **Raises**

    `ValueError` or `TypeError` naming the argument, if layers differ in structure, shape or dtype.
    """
    if not callable(make):
        raise TypeError(f"make={make!r}: must be a function make(n).")
    h = _hierarchy(layers, mesh, forward, adjoint, layer_axis)
    own = own_layers(layers, mesh, forward, adjoint, layer_axis) or (h.steps - 1,)
    made = {n: _one_layer(make, n) for n in own}
    kinds = {n: _kind(tree) for n, tree in made.items()}
    for n in own:
        if kinds[n] != kinds[own[0]]:
            raise ValueError(
                f"make({n}) returns {kinds[n]}, but make({own[0]}) returns {kinds[own[0]]}: all "
                "layers must be alike."
            )
    if jax.process_count() > 1:
        multihost_utils.assert_equal(
            np.frombuffer(kinds[own[0]].encode().ljust(4096)[:4096], np.uint8),
            f"make({own[0]}) returns {kinds[own[0]]}, which another process's layers are not like.",
        )
    sharding = NamedSharding(mesh, PartitionSpec(layer_axis))
    flat = {n: jax.tree.leaves(tree) for n, tree in made.items()}

    def leaf(i: int) -> jax.Array:
        first = flat[own[0]][i]

        def block(index: Any) -> np.ndarray:
            slots = range(*index[0].indices(h.slots))
            return np.stack([flat[min(n, h.steps - 1)][i] for n in slots])

        return jax.make_array_from_callback((h.slots, *first.shape), sharding, block)

    treedef = jax.tree.structure(made[own[0]])
    return treedef.unflatten([leaf(i) for i in range(treedef.num_leaves)])


def _one_layer(make: Callable[[int], PyTree], n: int) -> PyTree:
    def array(path: Any, leaf: Any) -> np.ndarray:
        where = f"make({n}){jax.tree_util.keystr(path)}"
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, int, complex, bool)):
            raise TypeError(f"{where} is a {type(leaf).__name__}: must be an array.")
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            raise TypeError(f"{where} is a PRNG key: give its jax.random.key_data.")
        return np.asarray(leaf, jnp.result_type(leaf))

    return jax.tree_util.tree_map_with_path(array, make(n))


def _kind(tree: PyTree) -> str:
    """Structure, shapes and dtypes, for a message."""
    leaves, treedef = jax.tree.flatten(tree)
    return f"{treedef} of {', '.join(f'{a.dtype}{list(a.shape)}' for a in leaves)}"


def replicate(x: PyTree, mesh: Mesh) -> PyTree:
    """`x` on all devices of the mesh; each process must give the same (JAX checks that).

    **Raises**

    `TypeError` if `mesh` is none.
    """
    _check_mesh(mesh)
    sharding = NamedSharding(mesh, PartitionSpec())

    def one(a: Any) -> jax.Array:
        if isinstance(a, jax.Array) and not a.is_fully_addressable:
            return jax.jit(lambda a: a, out_shardings=sharding)(a)
        return jax.device_put(a, sharding)

    return jax.tree.map(one, x)


def shard_batch(
    x: PyTree, mesh: Mesh, batch_axis: str = "batch", *, axis: int = 0, own_part: bool = False
) -> PyTree:
    """Samples as global arrays, split along the batch and the same for all layers.

    **Arguments**

    - `x`: arrays of samples. Each process gives the same whole arrays, of which its devices take
        their parts.
    - `mesh`, `batch_axis`: the mesh and the name of the axis that splits the batch.
    - `axis`: which axis of the arrays counts samples (1 for batches `[steps, batch, ...]`).
    - `own_part`: `x` has only the samples for this process's devices, in order, as for
        `jax.make_array_from_process_local_data`. Processes that hold different layers of the same
        samples must give the same; where all parts of the batch lie on a process's devices, that
        is the whole batch.

    **Raises**

    `ValueError` if the batch cannot be split evenly.
    """
    _check_mesh(mesh)
    if batch_axis not in mesh.axis_names:
        raise ValueError(
            f"batch_axis={batch_axis!r}: must be one of the mesh's axes {mesh.axis_names}."
        )
    axis = check_integer("axis", axis, 0)
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * axis, batch_axis))
    parts = mesh.shape[batch_axis]
    if own_part:
        where = np.moveaxis(mesh.devices, mesh.axis_names.index(batch_axis), 0)
        mine = jax.process_index()
        parts = sum(any(d.process_index == mine for d in part.flat) for part in where)

    def one(path: Any, a: Any) -> jax.Array:
        shape = np.shape(a)
        if len(shape) <= axis or shape[axis] % parts:
            raise ValueError(
                f"x{jax.tree_util.keystr(path)} has shape {shape}: its axis {axis}, the samples, "
                f"must be a multiple of {parts}, the parts of the batch"
                f"{' on this process' if own_part else ''}."
            )
        if own_part:
            return jax.make_array_from_process_local_data(sharding, np.asarray(a))
        a = np.asarray(a, jnp.result_type(a))
        return jax.make_array_from_callback(shape, sharding, lambda index: a[index])

    return jax.tree_util.tree_map_with_path(one, x)


def gather(x: PyTree) -> PyTree:
    """Whole arrays as NumPy arrays, on every process; all processes must call it.

    Nothing is cut: parameters made by `global_layers` keep the slots after their last layer. Arrays
    that lie on this process alone are returned as they are here.
    """

    def one(a: Any) -> np.ndarray:
        if isinstance(a, jax.Array) and not a.is_fully_addressable:
            return np.asarray(multihost_utils.process_allgather(a, tiled=True))
        return np.asarray(a)

    return jax.tree.map(one, x)


def save(path: str | os.PathLike[str], tree: PyTree, *, layers: int | None = None) -> None:
    """Write a checkpoint with Orbax, each process the parts on its devices; all must call it.

    It is there as a whole or not at all: it gets its name when all of it is written.

    **Arguments**

    - `path`: a folder that does not exist yet, in a file system (or store, `gs://...`) that all
        processes share.
    - `tree`: any pytree of arrays (parameters, optimizer state, ...). Where there are several
        processes, its JAX arrays must be global (see `replicate`).
    - `layers`: the number of layers, if the tree holds leaves with slots after the last one
        (`global_layers`). Then it can be restored onto a mesh with another number of slots.

    **Raises**

    `ImportError` without Orbax, `FileExistsError` if there is such a path, `ValueError` naming a
    leaf that is not global.
    """
    ocp, folder = _orbax(path)
    slotted = []
    for where, leaf in _named_leaves(tree):
        if _is_split(leaf) and layers is not None and leaf.shape[0] > layers:
            slotted.append(where)
        if jax.process_count() > 1 and isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            raise ValueError(
                f"tree: {where} is an array of this process only: put it on the mesh (replicate)."
            )
    if layers is not None:
        layers = check_integer("layers", layers, 1)
    if folder.exists():
        raise FileExistsError(f"path={str(folder)!r} exists: checkpoints are not overwritten.")
    if jax.process_count() > 1:  # no process writes before all have looked
        multihost_utils.sync_global_devices("jaxbraid.distributed.save")
    about = {"layers": layers, "slotted": slotted}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(tree=ocp.args.StandardSave(tree), about=ocp.args.JsonSave(about))
        checkpointer.save(folder, args=args)


def restore(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Read what `save` wrote, onto any mesh and any number of processes; all must call it.

    **Arguments**

    - `path`: the folder.
    - `like`: a pytree of arrays, or of `jax.ShapeDtypeStruct` with shardings, with the structure,
        shapes, dtypes and shardings that are wanted. Where a leaf has another number of slots than
        was saved, the slots after the last layer are left out or added (repeating the last layer).

    **Raises**

    `ImportError` without Orbax, `FileNotFoundError` if there is no checkpoint, `ValueError` naming
    the leaf if `like` does not describe what was saved.
    """
    ocp, folder = _orbax(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"path={str(folder)!r}: there is no checkpoint.")
    handler = ocp.CompositeCheckpointHandler(
        tree=ocp.StandardCheckpointHandler(), about=ocp.JsonCheckpointHandler()
    )
    with ocp.Checkpointer(handler) as checkpointer:
        args = ocp.args.Composite(about=ocp.args.JsonRestore())
        about = checkpointer.restore(folder, args=args).about
        metadata = checkpointer.metadata(folder).item_metadata.tree
        saved = {k: v for k, v in _named_leaves(metadata) if hasattr(v, "shape")}
        wanted = dict(_named_leaves(like))
        if saved.keys() != wanted.keys():
            odd = sorted(saved.keys() ^ wanted.keys())[0]
            side = "was saved, but like lacks it" if odd in saved else "was not saved"
            raise ValueError(f"like: {odd} {side}; it must have the structure of the saved tree.")
        for where, leaf in wanted.items():
            _check_restorable(where, saved[where], leaf, about)
        # not strict: Orbax cuts leaves to the wanted length or fills them up with zeros
        args = ocp.args.Composite(tree=ocp.args.StandardRestore(like, strict=False))
        tree = checkpointer.restore(folder, args=args).tree
    longer = {k for k, leaf in wanted.items() if np.shape(leaf)[:1] > tuple(saved[k].shape)[:1]}
    layers = about["layers"]

    def fill(where: Any, a: Any) -> Any:
        if _name(where) not in longer:
            return a
        repeat = jax.jit(lambda a: a.at[layers:].set(a[layers - 1]), out_shardings=a.sharding)
        return repeat(a)

    return jax.tree_util.tree_map_with_path(fill, tree)


def _check_restorable(where: str, saved: Any, leaf: Any, about: dict[str, Any]) -> None:
    """That a leaf of `like` has the saved shape, or the same layers in another number of slots."""
    shape, wanted = tuple(saved.shape), tuple(np.shape(leaf))
    dtype = jnp.result_type(leaf)
    if np.dtype(saved.dtype) != dtype:
        raise ValueError(f"like: {where} has dtype {dtype}, but {saved.dtype} was saved.")
    if shape == wanted:
        return
    layers = about["layers"]
    both_layers = (
        layers is not None
        and len(shape) == len(wanted) > 0
        and shape[1:] == wanted[1:]
        and (shape[0] == layers or where in about["slotted"])
        and (wanted[0] == layers or (wanted[0] > layers and _is_split(leaf)))
    )
    if not both_layers:
        hint = "" if layers is not None else ", and save was not told the number of layers"
        raise ValueError(f"like: {where} has shape {wanted}, but {shape} was saved{hint}.")


def _is_split(leaf: Any) -> bool:
    """Whether devices have different parts of the leading axis."""
    sharding, shape = getattr(leaf, "sharding", None), np.shape(leaf)
    return sharding is not None and len(shape) > 0 and sharding.shard_shape(shape)[0] < shape[0]


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    return [(_name(k), v) for k, v in jax.tree_util.tree_leaves_with_path(tree)]


def _name(path: Any) -> str:
    """The same for a tree and for what Orbax makes of it, where named tuples are dicts."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: must be a jax.sharding.Mesh.")


def _orbax(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Orbax, and the path as it takes it: absolute, unless it names a store such as `gs://`."""
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError as e:
        raise ImportError(
            "save and restore need Orbax: pip install orbax-checkpoint (or 'jaxbraid[examples]')."
        ) from e
    text = os.fspath(path)
    return ocp, epath.Path(text if "://" in text else os.path.abspath(text))
