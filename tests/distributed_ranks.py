"""Started several times by test_distributed.py, as the processes of one job on this machine.

    python distributed_ranks.py CASE I N HOST:PORT

Prints `ok` from every process that gets through.
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import signal
import sys

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2 if sys.argv[1] == "network" else 1)

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbraid
from jaxbraid import distributed
from jaxbraid.flax.nnx import ParallelStack
from nets import field, relative_error, tree_net


def parameters(layers: int) -> None:
    """Each process makes its own layers only; the gradient is that of one device."""
    params, args, x = tree_net(layers)
    mesh, made = distributed.make_mesh(4), []

    def make(n):
        made.append(n)
        return jax.tree.map(lambda a: a[n], params)

    own = distributed.own_layers(layers, mesh)
    split = distributed.global_layers(make, layers, mesh)
    assert tuple(made) == (own or (layers - 1,)), made
    blocks = split["w"].addressable_shards
    first = min(b.index[0].start for b in blocks)
    assert own == tuple(range(first, min(layers, first + sum(len(b.data) for b in blocks))))
    slots = -(-layers // 4) * 4
    assert split["w"].shape[0] == slots and sum(len(b.data) for b in blocks) == slots // 2
    whole = distributed.gather(split)
    assert all(np.array_equal(whole[k][:layers], params[k]) for k in params)

    def loss(params, x, mesh):
        net = jaxbraid.parallel_ode_net(field, params, args=args, layers=layers, mesh=mesh)
        y = net(x)
        return jnp.sum(y["a"] ** 2) + jnp.sum(jnp.cos(y["s"]))

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    got = distributed.gather(grad(split, distributed.replicate(x, mesh), mesh))
    want = grad(params, x, None)
    assert relative_error(jax.tree.map(lambda a: a[:layers], got[0]), want[0]) < 1e-12
    assert relative_error(got[1], want[1]) < 1e-12
    assert all(not np.any(a[layers:]) for a in got[0].values())


def batches() -> None:
    """Whole batches and own parts give the same arrays; different values are found out."""
    x = np.arange(24.0).reshape(8, 3)
    for mesh in (distributed.make_mesh(2, 2), distributed.make_mesh(1, 4)):
        whole = distributed.shard_batch(x, mesh)
        # the batch is the outer axis: each process has half of it
        part = np.split(x, 2)[jax.process_index()]
        parts = distributed.shard_batch(part, mesh, own_part=True)
        assert whole.shape == parts.shape == x.shape
        assert np.array_equal(distributed.gather(whole), x)
        assert np.array_equal(distributed.gather(parts), x)
        assert all(np.array_equal(b.data, x[b.index]) for b in whole.addressable_shards)
    # what lies on this process alone is not joined with that of the others
    mine = jnp.full(2, jax.process_index())
    assert np.array_equal(distributed.gather(mine), mine)
    for give in (
        lambda: distributed.replicate(np.full(2, jax.process_index()), mesh),
        lambda: distributed.global_layers(lambda n: np.zeros(1 + n // 4), 8, mesh_of_layers()),
    ):
        try:
            give()
        except Exception as e:
            assert jax.process_count() > 1, e
        else:
            raise AssertionError("different values on the processes were not found out")
    try:
        distributed.save("unused", {"a": mine})
    except ValueError as e:
        assert "a is an array of this process only" in str(e)
    else:
        raise AssertionError("a local array was saved")


def mesh_of_layers():
    return distributed.make_mesh(4)


def stack() -> None:
    """A Flax stack whose variables are made under jit, each layer's on its device, and trained."""
    mesh = distributed.make_mesh(4)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs, param_dtype=jnp.float64)

        def __call__(self, x):
            return jnp.tanh(self.linear(x))

    def make(mesh):
        rngs = nnx.Rngs(0)
        return nnx.split(ParallelStack(Block, 8, rngs=rngs, mesh=mesh, smooth_init=False))

    def make_state(mesh):
        return make(mesh)[1]

    graph, shapes = nnx.split(nnx.eval_shape(lambda: nnx.merge(*make(mesh))))
    split = jax.tree.map(lambda _: NamedSharding(mesh, P("layer")), shapes)
    state = jax.jit(make_state, static_argnums=0, out_shardings=split)(mesh)
    alone, local = make(None)
    optimizer = optax.adam(1e-2)
    x = jax.random.normal(jax.random.key(1), (4, 3))

    def steps(graph, state, x):
        def loss(state):
            return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

        kept = optimizer.init(state)
        for _ in range(2):
            updates, kept = optimizer.update(jax.grad(loss)(state), kept, state)
            state = optax.apply_updates(state, updates)
        return state

    trained = jax.jit(steps, static_argnums=0, out_shardings=split)
    got = trained(graph, state, distributed.replicate(x, mesh))
    want = jax.jit(steps, static_argnums=0)(alone, local, x)
    for a in jax.tree.leaves(got):
        assert {b.data.shape[0] for b in a.addressable_shards} == {2}
    assert relative_error(distributed.gather(jax.tree.leaves(got)), jax.tree.leaves(want)) < 1e-12


def lost(how: str) -> None:
    """The last process is lost while the others wait for its messages."""
    mesh = distributed.make_mesh(jax.device_count())
    total = jax.jit(jnp.sum)
    x = distributed.shard_batch(np.ones(jax.device_count()), mesh, "layer")
    for i in range(10**9):
        if i == 3 and jax.process_index() == jax.process_count() - 1:
            print("lost", flush=True)
            if how == "raise":
                raise RuntimeError("this process fails on purpose")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        float(total(x))


def main(case: str, i: str, n: str, coordinator: str) -> None:
    distributed.initialize(coordinator, int(n), int(i))
    distributed.initialize()  # does nothing
    assert jax.process_count() == int(n)
    if case == "network":
        parameters(7)  # slots left over
        parameters(2)  # the second process has no layers
        batches()
        stack()
    else:
        lost(case)
    print(f"ok {case} in process {i}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
