"""Several processes train to the weights of one; what happens when one of them dies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import digits_runs
import jaxbraid
from jaxbraid import MGRIT, distributed
from nets import dense, dense_weights, relative_error

RANKS = Path(__file__).with_name("distributed_ranks.py")


# -- in one process --------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "batch"), [(4, 2), (8, 1), (2, 1), (1, 1), (1, 8)])
def test_neighbouring_layers_lie_on_neighbouring_devices(layer, batch):
    mesh = distributed.make_mesh(layer, batch)
    assert dict(mesh.shape) == {"layer": layer, "batch": batch}
    assert set(mesh.axis_types) == {AxisType.Auto}
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert np.array_equal(np.sort(ids.ravel()), np.arange(layer * batch))
    assert np.all(np.diff(ids, axis=0) == 1)


def test_space_has_the_nearest_devices():
    mesh = distributed.make_mesh(2, 2, 2)
    assert mesh.axis_names == ("layer", "batch", "space")
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert np.all(np.diff(ids, axis=2) == 1) and np.all(np.diff(ids, axis=0) == 2)


def fake_devices(slices: int, each: int):
    return [
        types.SimpleNamespace(
            id=slices * i + s, slice_index=s, process_index=s, platform="gpu", device_kind="none"
        )
        for i in range(each)
        for s in range(slices)  # neighbours by number lie on different hosts
    ]


@pytest.mark.parametrize(
    ("shape", "layers_of_first_slice"),
    [
        ((2, 4, 1), [0, 1, 2, 3]),
        ((1, 8, 1), [0, 1, 2, 3]),
        ((1, 4, 2), [0, 1]),
        ((4, 2, 1), [0, 1]),
    ],
)
def test_the_slow_network_between_hosts_is_crossed_by_the_outermost_axes(
    shape, layers_of_first_slice
):
    grid = distributed._mesh._device_grid(shape, fake_devices(2, 4))
    at = np.vectorize(lambda d: d.slice_index)(grid)
    assert grid.shape == shape and len({d.id for d in grid.flat}) == 8
    assert np.flatnonzero((at[0] == 0).all(axis=1)).tolist() == layers_of_first_slice


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ((9,), ValueError, "layer x batch x space = 9 x 1 x 1 needs 9 devices, but jax.devices()"),
        ((0,), ValueError, "layer=0"),
        ((2, 1.5), TypeError, "batch=1.5"),
        ((2, 1, True), TypeError, "space=True"),
    ],
)
def test_mesh_sizes_that_do_not_fit(sizes, error, says):
    with pytest.raises(error) as e:
        distributed.make_mesh(*sizes)
    assert says in str(e.value)


def test_given_devices_must_all_be_used():
    with pytest.raises(ValueError, match="devices has 8"):
        distributed.make_mesh(4, devices=jax.devices())
    mesh = distributed.make_mesh(2, devices=jax.devices()[6:])
    assert [d.id for d in mesh.devices.flat] == [6, 7]


CONFIG = MGRIT(levels=2, coarsening=2, max_iters=2)


@pytest.mark.parametrize(("layers", "devices", "slots"), [(7, 4, 8), (3, 8, 8), (7, 1, 7)])
def test_global_layers(layers, devices, slots):
    """They have the layers' values, and the network of them is that of plain parameters."""
    mesh, made = distributed.make_mesh(devices), []
    w = dense_weights(layers)

    def make(n):
        made.append(n)
        return w[n]

    split = distributed.global_layers(make, layers, mesh, forward=CONFIG)
    assert tuple(made) == distributed.own_layers(layers, mesh, CONFIG) == tuple(range(layers))
    assert (
        split.shape[0] == slots and split.sharding.shard_shape(split.shape)[0] == slots // devices
    )
    np.testing.assert_array_equal(split[:layers], w)
    np.testing.assert_array_equal(split[layers:], w[np.full(slots - layers, -1)])

    def loss(w, x, **options):
        net = jaxbraid.parallel_ode_net(dense, w, forward=CONFIG, **options)
        return jnp.sum(jnp.sin(net(x)))

    x = jnp.ones((2, 3))
    got = jax.grad(loss)(split, x, layers=layers, mesh=mesh)
    want = jax.grad(loss)(w, x)
    assert relative_error(got[:layers], want) < 1e-13
    assert not np.any(got[layers:])


def shapes_differ(n):
    return np.zeros(2 + (n == 1))


def dtypes_differ(n):
    return np.zeros(2, np.float32 if n == 1 else np.float64)


@pytest.mark.parametrize(
    ("make", "options", "error", "says"),
    [
        (shapes_differ, {}, ValueError, "make(1) returns"),
        (dtypes_differ, {}, ValueError, "make(1) returns"),
        (jax.random.key, {}, TypeError, "make(0) is a PRNG key"),
        (str, {}, TypeError, "make(0) is a str"),
        (np.zeros(3), {}, TypeError, "make="),
        (np.zeros, {"layers": 0}, ValueError, "layers=0"),
        (np.zeros, {"mesh": None}, TypeError, "mesh=None"),
        (np.zeros, {"layer_axis": "depth"}, ValueError, "layer_axis='depth'"),
        (np.zeros, {"forward": 2}, TypeError, "forward=2"),
        (np.zeros, {"adjoint": 2}, TypeError, "adjoint=2"),
    ],
)
def test_global_layers_refuses(make, options, error, says):
    options = {"layers": 4, "mesh": distributed.make_mesh(2)} | options
    with pytest.raises(error) as e:
        distributed.global_layers(make, **options)
    assert says in str(e.value)


def test_batches_and_gathering():
    mesh = distributed.make_mesh(4, 2)
    x = np.arange(24.0).reshape(2, 4, 3)
    split = distributed.shard_batch({"x": x, "y": x[:, :, 0]}, mesh, axis=1)
    assert split["y"].sharding.spec == P(None, "batch")
    for shard in split["x"].addressable_shards:
        assert shard.data.shape == (2, 2, 3)
        np.testing.assert_array_equal(shard.data, x[shard.index])
    np.testing.assert_array_equal(distributed.gather(split)["x"], x)
    everywhere = distributed.replicate(x, mesh)
    assert everywhere.sharding.is_fully_replicated and len(everywhere.sharding.device_set) == 8
    with pytest.raises(
        ValueError, match=r"x\['a'\] has shape \(3,\): its axis 0, .* multiple of 2"
    ):
        distributed.shard_batch({"a": np.zeros(3)}, mesh)
    with pytest.raises(ValueError, match="batch_axis='data'"):
        distributed.shard_batch(x, mesh, "data")
    with pytest.raises(TypeError, match="mesh=8"):
        distributed.replicate(x, 8)


def state_on(devices, layers=7):
    """Parameters of layers 0, 1, ... and the state of an optimizer."""
    mesh = distributed.make_mesh(devices)
    params = {
        "layers": distributed.global_layers(lambda n: np.full(2, n + 1.0), layers, mesh),
        "end": distributed.replicate(np.arange(3.0), mesh),
    }
    optimizer = optax.adam(0.1)
    kept = optimizer.init(params)
    _, kept = optimizer.update(params, kept, params)
    return {"params": params, "optimizer": kept}


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 1), (1, 4), (4, 8), (8, 2), (1, 1)])
def test_checkpoint_is_restored_onto_other_meshes(tmp_path, before, after):
    old, new = state_on(before), state_on(after)
    distributed.save(tmp_path / "a", old, layers=7)
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), new)
    for target in (jax.tree.map(jnp.zeros_like, new), like):
        got = distributed.restore(tmp_path / "a", target)
        assert jax.tree.structure(got) == jax.tree.structure(new)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(new), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim) and a.dtype == b.dtype


def test_checkpoints_are_not_mistaken(tmp_path):
    old = state_on(4)
    path = tmp_path / "a"
    distributed.save(path, old)  # does not say how many layers
    with pytest.raises(FileExistsError, match="are not overwritten"):
        distributed.save(path, old)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        distributed.restore(tmp_path / "b", old)
    with pytest.raises(ValueError, match=r"layers has shape \(7, 2\), but \(8, 2\) was saved, and"):
        distributed.restore(path, state_on(1))
    distributed.save(tmp_path / "c", old, layers=7)
    with pytest.raises(ValueError, match=r"layers has shape \(4, 2\), but \(8, 2\) was saved"):
        distributed.restore(tmp_path / "c", state_on(4, layers=4))
    split = NamedSharding(distributed.make_mesh(4), P("layer"))
    longer = old | {"params": old["params"] | {"end": jax.device_put(jnp.zeros(8), split)}}
    with pytest.raises(ValueError, match=r"params/end has shape \(8,\), but \(3,\) was saved"):
        distributed.restore(tmp_path / "c", longer)
    longer = old | {"params": old["params"] | {"end": jnp.zeros(9)}}
    with pytest.raises(ValueError, match=r"params/end has shape \(9,\), but \(3,\) was saved"):
        distributed.restore(tmp_path / "c", longer)
    other = old | {"params": old["params"] | {"end": jnp.zeros(3, jnp.float32)}}
    with pytest.raises(ValueError, match="params/end has dtype float32, but float64 was saved"):
        distributed.restore(path, other)
    with pytest.raises(ValueError, match="params/more was not saved"):
        distributed.restore(path, old | {"params": old["params"] | {"more": jnp.zeros(1)}})
    with pytest.raises(ValueError, match="params/end was saved, but like lacks it"):
        distributed.restore(path, old | {"params": {"layers": old["params"]["layers"]}})


def test_missing_orbax_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (distributed.save, distributed.restore):
        with pytest.raises(ImportError, match="pip install orbax-checkpoint"):
            call(tmp_path / "a", {})


def test_initialize_alone_does_nothing(monkeypatch):
    for name in distributed._start.SIGNS:
        monkeypatch.delenv(name, raising=False)
    jax.devices()
    distributed.initialize()
    distributed.initialize(num_processes=1)
    assert not jax.distributed.is_initialized()
    with pytest.raises(ValueError, match="heartbeat_timeout_seconds=0"):
        distributed.initialize(heartbeat_timeout_seconds=0)
    with pytest.raises(RuntimeError, match="must be called before"):
        distributed.initialize("127.0.0.1:1", 2, 0)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="must be called before"):
        distributed.initialize()


# -- in several processes --------------------------------------------------------------------------


def start_ranks(case: str, n: int) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        subprocess.Popen(
            [sys.executable, str(RANKS), case, str(i), str(n), coordinator],
            env=digits_runs.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(n)
    ]


def end(processes):
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_each_process_holds_its_own_layers_only():
    """Parameters, gradients, batches and a Flax stack over two processes; the script compares."""
    processes = start_ranks("network", 2)
    try:
        for process in processes:
            printed, errors = process.communicate(timeout=200)
            assert process.returncode == 0 and "ok network" in printed, errors[-5000:]
    finally:
        end(processes)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
def test_a_lost_process_ends_the_others(how):
    """Within a minute, with an error, and with nobody watching them."""
    *others, victim = processes = start_ranks(how, 2)
    try:
        assert victim.stdout is not None and "lost\n" in iter(victim.stdout.readline, "")
        began = time.monotonic()
        for process in others:
            process.communicate(timeout=60)
            assert process.returncode != 0
        if how != "stop":
            _, errors = victim.communicate(timeout=60 - (time.monotonic() - began))
            assert victim.returncode != 0
            assert how == "kill" or "this process fails on purpose" in errors
    finally:
        end(processes)


def same(got, want, tolerance=1e-10):
    assert got.keys() == want.keys()
    for name, a in want.items():
        error = np.max(np.abs(got[name] - a)) / np.max(np.abs(a))
        assert a.dtype == np.float64 and error <= tolerance, f"{name}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "mesh"), [(2, "2x1"), (4, "2x2")])
def test_processes_train_to_the_weights_of_one(tmp_path, processes, mesh):
    """Seven layers: two processes have a slot left over, one has none."""
    alone = digits_runs.run_here(tmp_path / "one", "--layers=7")
    assert alone["w"].shape[0] == 7
    out = tmp_path / "several"
    options = "--layers=7", f"--processes={processes}", f"--mesh={mesh}"
    same(digits_runs.run(out, *options), alone)

    # one process goes on where they were after the first epoch
    (out / "weights.npz").unlink()
    shutil.rmtree(out / "checkpoints/epoch-0002")
    same(digits_runs.run_here(out, "--layers=7", "--resume"), alone)
    with pytest.raises(ValueError, match="other settings"):
        digits_runs.run_here(out, "--layers=8", "--resume")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the processes in /proc")
def test_killed_training_resumes_to_exactly_the_same_weights(tmp_path):
    options = ("--layers=8", "--epochs=15", "--processes=2")
    out = tmp_path / "killed"
    launcher = digits_runs.start(out, *options)
    deadline = time.monotonic() + 120
    while not (out / "checkpoints/epoch-0002").is_dir():
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()
        time.sleep(0.02)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(children) == 2
    began = time.monotonic()
    os.kill(int(children[1]), signal.SIGKILL)
    _, errors = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert launcher.returncode not in (0, None)
    assert "of 2 was killed by SIGKILL" in errors or "of 2 failed" in errors
    assert all(not Path(f"/proc/{child}").exists() for child in children)
    assert not (out / "weights.npz").exists()

    resumed = digits_runs.run(out, *options, "--resume")
    whole = digits_runs.run(tmp_path / "whole", *options)
    same(resumed, whole, tolerance=0)
