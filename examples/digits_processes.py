"""Train a network on handwritten digits in several processes, each with its own layers.

The network is an opening, a stack of layers x <- x + dt tanh(W_n x + b_n), and a closing layer. How
many processes there are changes nothing in its weights but rounding.

    python examples/digits_processes.py                      # one process
    python examples/digits_processes.py --processes 4        # four on this machine
    python examples/digits_processes.py --processes 4 --mesh 2x2
    mpirun -n 4 python examples/digits_processes.py --mpi    # four MPI ranks
    srun -n 4 python examples/digits_processes.py            # a SLURM job; docs/distributed.md
    python examples/digits_processes.py --processes 4 --resume

If a process dies, all end with an error; --resume goes on from the last epoch's checkpoint. The
checkpoints and weights.npz, the final weights of all layers, go to outputs/digits_processes
(elsewhere: --out), a folder that all processes must share; without --resume a run starts anew.
"""

import argparse
import dataclasses
import functools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _training import cross_entropy, mesh_shape, positive, shuffled_batches
from digits import SMOOTHING, load_data
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import jaxbraid
from jaxbraid import distributed

PLACES = ("out", "resume", "stop_after", "processes", "devices", "mesh", "mpi")  # no settings
PLACES += ("coordinator", "process")
TESTS = 360  # images to test with


# -- the network and its training, the same wherever the layers are --------------------------------


def field(layer, x):
    """dx/dt of one layer."""
    return jnp.tanh(x @ layer["w"] + layer["b"])


def make_layer(options, n):
    """Weights of layer n: alike in all layers (coarse levels leave out layers), but for a little.

    They depend on the seed and on n only, so every process can make its own.
    """
    key = jax.random.key(options.seed)
    shape = options.width, options.width
    w = jax.random.normal(key, shape) + 0.1 * jax.random.normal(jax.random.fold_in(key, n), shape)
    return {"w": w / options.width**0.5, "b": jnp.zeros(options.width)}


def make_ends(options):
    """Weights of the opening and the closing layer, which every process holds."""
    keys = jax.random.split(jax.random.key(options.seed + 1))
    return {
        "opening": jax.random.normal(keys[0], (64, options.width)) / 8,
        "closing": jax.random.normal(keys[1], (options.width, 10)) / options.width**0.5,
    }


def logits(place, weights, images):
    x = jnp.tanh(images.reshape(len(images), -1) @ weights["opening"])
    return place.net(weights["layers"])(x) @ weights["closing"]


def train_epoch(place, optimizer, weights, opt_state, images, labels):
    """One Optax step a batch: weights, optimizer's state and the mean loss."""

    def step(state, batch):
        weights, opt_state = state
        images, labels = batch

        def loss(weights):
            mean = cross_entropy(logits(place, weights, images), labels, SMOOTHING)
            return mean / place.parts

        loss, gradient = jax.value_and_grad(loss)(weights)
        layers = gradient.pop("layers")  # summed over the parts of the batch already
        gradient = {"layers": layers, **place.sum(gradient)}
        updates, opt_state = optimizer.update(gradient, opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), place.sum(loss)

    (weights, opt_state), losses = jax.lax.scan(step, (weights, opt_state), (images, labels))
    return weights, opt_state, losses.mean()


def count_right(place, weights, images, labels):
    return place.sum((logits(place, weights, images).argmax(-1) == labels).sum())


def train(place, options, console):
    data, test = ((images.astype(float), labels) for images, labels in load_data())
    steps = options.epochs * (len(data[0]) // options.batch)
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, steps // 10, steps)
    # Optax counts in int32, and JAX divides those in float32 even where all else is in float64
    optimizer = optax.adamw(  # entry by entry, so layers may be apart
        lambda count: schedule(count.astype(float)), weight_decay=1e-2
    )
    one_epoch = jax.jit(functools.partial(train_epoch, place, optimizer))
    right = jax.jit(functools.partial(count_right, place))

    weights = place.everywhere(make_ends(options))
    weights["layers"] = place.layers(functools.partial(make_layer, options))
    kept = optimizer.init(weights)
    kept = jax.tree.map(lambda a: a if a.ndim else place.everywhere(a), kept)
    state = {"weights": weights, "optimizer": kept, "log": np.zeros((options.epochs, 3))}

    folder = options.out.absolute() / "checkpoints"
    done = place.agree(prepare(folder, options, place.first))
    if done:
        state = place.restore(folder / f"epoch-{done:04}", state)
        console.print(f"resumed after epoch {done}")
    for epoch in range(done + 1, min(options.epochs, options.stop_after) + 1):
        began = time.perf_counter()
        batches = place.batch(shuffled_batches(data, options, epoch), axis=1)
        weights, kept, loss = one_epoch(state["weights"], state["optimizer"], *batches)
        loss = float(loss)  # waits: MPI ranks have one conversation at a time
        accuracy = int(right(weights, *place.batch(test))) / len(test[0])
        log = np.copy(state["log"])
        log[epoch - 1] = loss, accuracy, time.perf_counter() - began
        state = {"weights": weights, "optimizer": kept, "log": log}
        place.save(folder / f"epoch-{epoch:04}", state)
        if place.first:
            shutil.rmtree(folder / f"epoch-{epoch - 2:04}", ignore_errors=True)
        console.print(
            f"epoch {epoch} of {options.epochs}: loss {loss:.4f}, accuracy {accuracy:.1%}"
        )
    if options.stop_after < options.epochs:
        console.print(f"stopped after epoch {options.stop_after}; go on with --resume")
        return
    weights = place.gather(state["weights"])
    if place.first:
        layers = weights.pop("layers")
        np.savez(options.out / "weights.npz", **layers, **weights)
        console.print(make_table(place, state["log"]))


def prepare(folder, options, first):
    """The last epoch that has a checkpoint; starts the folder anew unless resuming."""
    settings = {k: v for k, v in vars(options).items() if k not in PLACES}
    file = folder / "settings.json"
    if options.resume and file.exists():
        saved = json.loads(file.read_text())
        if saved != settings:
            raise ValueError(f"--resume: the checkpoints have other settings: {saved}")
        names = [re.fullmatch(r"epoch-(\d{4})", path.name) for path in folder.iterdir()]
        return max((int(name[1]) for name in names if name), default=0)
    if first:  # the others go on to the first epoch, which cannot end without this process
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        file.write_text(json.dumps(settings))
    return 0


def make_table(place, log):
    loss, right, seconds = log.T
    table = Table("", place.name, title="Handwritten digits")
    table.add_row("test accuracy", f"{right[-1]:.2%}")
    table.add_row("training loss", f"{loss[-1]:.5f}")
    table.add_row("time of an epoch (median)", f"{np.median(seconds):.2f} s")
    table.add_row("time of training, with compilation", f"{seconds.sum():.1f} s")
    return table


# -- where the layers are --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """All layers are global arrays on a mesh, which may span processes."""

    options: argparse.Namespace
    mesh: Mesh
    parts = 1  # a sum over the batch is one over all of it

    @property
    def name(self):
        where = "{} x {} devices".format(*self.mesh.devices.shape)
        return where if jax.process_count() == 1 else f"{jax.process_count()} processes, {where}"

    @property
    def first(self):
        return jax.process_index() == 0

    def layers(self, make):
        return distributed.global_layers(
            make, self.options.layers, self.mesh, **solver(self.options)
        )

    def everywhere(self, x):
        return distributed.replicate(x, self.mesh)

    def batch(self, x, axis=0):
        return distributed.shard_batch(x, self.mesh, axis=axis)

    def net(self, layers):
        return jaxbraid.parallel_ode_net(
            field,
            layers,
            layers=self.options.layers,
            mesh=self.mesh,
            batch_axis="batch",
            **solver(self.options),
        )

    def sum(self, x):
        return x

    def agree(self, number):
        """The first process's number."""
        return int(multihost_utils.broadcast_one_to_all(np.int32(number)))

    def save(self, path, state):
        distributed.save(path, state, layers=self.options.layers)

    def restore(self, path, like):
        return distributed.restore(path, like)

    def gather(self, weights):
        weights = distributed.gather(weights)
        layers = {name: a[: self.options.layers] for name, a in weights["layers"].items()}
        return {**weights, "layers": layers}


@dataclasses.dataclass(frozen=True)
class OnRanks:
    """Each MPI rank has the arrays of its own layers."""

    options: argparse.Namespace
    world: Any
    ranks: Any  # jaxbraid.mpi.Ranks

    @property
    def parts(self):
        return self.ranks.parts

    @property
    def name(self):
        return f"{self.ranks.devices} x {self.ranks.parts} MPI ranks"

    @property
    def first(self):
        return self.world.rank == 0

    @property
    def own(self):
        return self.ranks.own_layers(self.options.layers, **solver(self.options))

    def layers(self, make):
        start, stop = self.own.start, self.own.stop
        made = [make(n) for n in range(start, stop)] or [make(start - 1)]
        return jax.tree.map(lambda *a: jnp.stack(a)[: stop - start], *made)

    def everywhere(self, x):
        return x

    def batch(self, x, axis=0):
        part = self.ranks.batch.rank
        return tuple(jnp.asarray(np.split(a, self.parts, axis)[part]) for a in x)

    def net(self, layers):
        return jaxbraid.mpi.parallel_ode_net(
            field, layers, layers=self.options.layers, ranks=self.ranks, **solver(self.options)
        )

    def sum(self, x):
        return self.ranks.batch_sum(x)

    def agree(self, number):
        """The first rank's number."""
        return self.world.bcast(number)

    def save(self, path, state):
        """Each rank one file with its own layers; the folder gets its name when all are there."""
        own, partial = self.own, path.with_suffix(".partial")
        if self.first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        self.world.Barrier()
        apart, shared = split_layers(state)
        if self.ranks.batch.rank == 0:
            np.savez(partial / f"layers-{own.start}-{own.stop}.npz", **apart)
        if self.first:
            np.savez(partial / "shared.npz", **shared)
        self.world.Barrier()
        if self.first:
            partial.rename(path)
        self.world.Barrier()

    def restore(self, path, like):
        """Reads the layers of this rank from whichever files have them."""
        own, found = self.own, []
        for file in path.glob("layers-*.npz"):
            start, stop = map(int, file.stem.split("-")[1:])
            if start < own.stop and own.start < stop:
                found.append((start, np.load(file)))
        found.sort(key=lambda f: f[0])
        shared = np.load(path / "shared.npz")

        def read(where, a):
            name = jax.tree_util.keystr(where)
            if name in shared:
                return jnp.asarray(shared[name]) if isinstance(a, jax.Array) else shared[name]
            if not found:
                return a  # this rank has no layers
            there = np.concatenate([part[name] for _, part in found])
            return jnp.asarray(there[own.start - found[0][0] :][: own.stop - own.start])

        return jax.tree_util.tree_map_with_path(read, like)

    def gather(self, weights):
        """On all ranks."""
        layers = self.ranks.layers.allgather(jax.device_get(weights["layers"]))
        layers = jax.tree.map(lambda *a: np.concatenate(a), *layers)
        return {**jax.device_get(weights), "layers": layers}


def split_layers(state):
    """Arrays by name: those with a leading axis of layers, and the others."""
    named = {
        jax.tree_util.keystr(k): np.asarray(v)
        for k, v in jax.tree_util.tree_leaves_with_path(state)
    }
    apart = {k: v for k, v in named.items() if "'layers'" in k}
    return apart, {k: v for k, v in named.items() if k not in apart}


def solver(options):
    mgrit = functools.partial(
        jaxbraid.MGRIT, levels=options.levels, coarsening=options.factor, final_relax="FC"
    )
    return {"forward": mgrit(max_iters=2), "adjoint": mgrit(max_iters=1)}


# -- processes -------------------------------------------------------------------------------------


def launch(options):
    """Run this file in several processes on this machine. If one fails, end the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *sys.argv, f"--coordinator={coordinator}"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    n, running = options.processes, {}
    try:
        for i in range(n):
            running[i] = subprocess.Popen([*command, f"--process={i}/{n}"])
        while running:
            time.sleep(0.1)
            for i, process in list(running.items()):
                code = process.poll()
                if code == 0:
                    del running[i]
                elif code is not None:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "failed"
                    sys.exit(f"process {i} of {n} {how}: ending the others; go on with --resume")
    finally:
        for process in running.values():
            process.kill()
        for process in running.values():
            process.wait()


def run_on_mesh(options):
    if options.process:
        i, n = options.process
        distributed.initialize(options.coordinator, n, i)
    else:
        distributed.initialize()  # as the cluster says, or alone
    layer, batch = options.mesh or (jax.device_count(), 1)
    mesh = distributed.make_mesh(layer, batch)
    train(OnMesh(options, mesh), options, Console(quiet=jax.process_index() > 0))


def run_on_ranks(options):
    from mpi4py import MPI

    import jaxbraid.mpi

    world = MPI.COMM_WORLD
    layer, batch = options.mesh or (world.size, 1)
    if layer * batch != world.size:
        raise ValueError(f"--mesh {layer}x{batch}: there are {world.size} MPI ranks.")
    ranks = jaxbraid.mpi.Ranks.of(world, batch)  # a rank that fails from here on ends all
    train(OnRanks(options, world, ranks), options, Console(quiet=world.rank > 0))


def parse_options(arguments=None):
    def process(text):
        i, n = map(int, text.split("/"))
        if not 0 <= i < n:
            raise ValueError
        return i, n

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = functools.partial(parser.add_argument, type=positive, metavar="N")
    add("--processes", help="start N processes on this machine, on its CPUs")
    add("--devices", default=1, help="CPU devices of each process (%(default)s)")
    add("--mesh", type=mesh_shape, metavar="LxB", help="layer x batch axes (all devices x 1)")
    add("--layers", default=32, help="layers of the stack (%(default)s)")
    add("--width", default=32, help="features of its state (%(default)s)")
    add("--levels", default=2, help="MGRIT levels; 1 is sequential (%(default)s)")
    add("--factor", default=4, help="coarsening factor (%(default)s)")
    add("--batch", default=128, help="images in a batch (%(default)s)")
    add("--epochs", default=20, help="(%(default)s)")
    add("--seed", default=0, type=int, help="of weights and of the order of images (%(default)s)")
    add("--out", default=Path("outputs/digits_processes"), type=Path, metavar="DIR")
    add("--stop-after", default=10**9, help="end after this epoch, as an interruption would")
    add("--coordinator", type=str, metavar="HOST:PORT", help="of process 0, for --process")
    add("--process", type=process, metavar="I/N", help="be process I of N (by hand)")
    parser.add_argument("--float32", action="store_true", help="single precision")
    parser.add_argument("--mpi", action="store_true", help="MPI ranks instead of jax.distributed")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args(arguments)
    parts = options.mesh[1] if options.mesh else 1
    if options.batch % parts or TESTS % parts:
        parser.error(f"--mesh: its batch axis must divide --batch {options.batch} and {TESTS}")
    if (options.coordinator is None) != (options.process is None):
        parser.error("--coordinator and --process go together")
    return options


def main():
    options = parse_options()
    if options.processes and not options.process:
        return launch(options)
    jax.config.update("jax_enable_x64", not options.float32)
    if options.processes or options.devices > 1:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    run_on_ranks(options) if options.mpi else run_on_mesh(options)


if __name__ == "__main__":
    main()
