"""The model of `jaxbraid.performance` against runs on one and two cores.

    python benchmarks/performance_model.py [--cores {1,2}] [--repeats N] [PROBLEM ...]

Every device is one CPU core: XLA's threads are switched off and the process is bound to as many
cores as it has devices. The model is given the times of steps and messages alone, measured by
`jaxbraid.performance.measure`; none of the runs that it predicts. All runs of a problem take turns,
and the shortest of `REPEATS` counts on both sides: what else the machine does only adds. Two cores
that wait for each other many times in a run need a machine with nothing else to do; how busy others
kept the cores is printed for each problem.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import time

PROBLEM_NAMES = ("mlp", "gru", "pendulum", "heat")
REPEATS = 40  # by default; more of them find a quiet moment on a busy machine


def problems():
    import jax
    import jax.numpy as jnp

    import jaxbraid

    key = jax.random.key(0)

    def mlp(**options):
        w = jax.random.normal(key, (128, 64, 64)) / 8
        net = jaxbraid.parallel_ode_net(lambda w, x: jnp.tanh(x @ w), w, **options)
        return net, jnp.ones((64, 64))

    def gru(**options):
        xs = jax.random.normal(key, (256, 32, 96))
        w = jax.random.normal(key, (32, 96)) / 6

        def f(p, h, args):
            r, z, n = jnp.split(p + h @ args, 3, axis=-1)
            return (1 - jax.nn.sigmoid(z)) * (jnp.tanh(n * jax.nn.sigmoid(r)) - h)

        return jaxbraid.parallel_ode_net(f, xs, args=w, **options), jnp.zeros((32, 32))

    def pendulum(**options):
        """A thousand pendulums with friction, each its length, by the classical Runge-Kutta."""
        length = jnp.linspace(0.5, 2.0, 1000)

        def step(_, u, dt, args):
            def f(u):
                return jnp.stack([u[1], -jnp.sin(u[0]) / args - 0.1 * u[1]])

            a = f(u)
            b = f(u + dt / 2 * a)
            c = f(u + dt / 2 * b)
            return u + dt / 6 * (a + 2 * b + 2 * c + f(u + dt * c))

        net = jaxbraid.parallel_ode_net(
            step, None, args=length, layers=256, form="step", t_final=8.0, **options
        )
        return net, jnp.ones((2, 1000))

    def heat(**options):
        """Backward Euler for u_t = u_xx on 512 points, a tridiagonal solve a step."""
        n = 512
        below = jnp.ones(n).at[0].set(0) * n**2
        above = below[::-1]

        def step(_, u, dt):
            diagonal = 1 + 2 * dt * jnp.full(n, float(n) ** 2)
            return jax.lax.linalg.tridiagonal_solve(-dt * below, diagonal, -dt * above, u[:, None])[
                :, 0
            ]

        net = jaxbraid.parallel_ode_net(step, None, layers=256, form="step", t_final=0.1, **options)
        return net, jnp.sin(jnp.pi * jnp.linspace(0, 1, n))

    return {"mlp": mlp, "gru": gru, "pendulum": pendulum, "heat": heat}


def configs():
    from jaxbraid import MGRIT

    return [
        MGRIT(levels=1),
        MGRIT(levels=2, coarsening=8, cf_relax=0, max_iters=2, final_relax="FC"),
        MGRIT(levels=2, coarsening=8, cf_relax=1, max_iters=2, final_relax="FC"),
        MGRIT(levels=3, coarsening=4, cf_relax=1, max_iters=2, final_relax="FC"),
    ]


def run_of(make, config, training: bool, mesh):
    import dataclasses

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    split = config.levels > 1
    net, x = make(forward=config, adjoint=config, mesh=mesh if split else None)
    data = (net.params, net.args)
    if mesh is not None and split:
        data = (
            jax.device_put(net.params, NamedSharding(mesh, PartitionSpec("layer"))),
            jax.device_put(net.args, NamedSharding(mesh, PartitionSpec())),
        )
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))

    def forward(data, x):
        return dataclasses.replace(net, params=data[0], args=data[1])(x)

    def loss(data, x):
        return jnp.sum(forward(data, x) ** 2)

    fn = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)) if training else forward)
    return lambda: jax.block_until_ready(fn(data, x))


def threads() -> dict[int, str]:
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    return {t: pathlib.Path(f"/proc/self/task/{t}/comm").read_text() for t in sorted(tasks)}


def hold_to(cores: set[int]) -> None:
    """All threads of this process on `cores`."""
    for thread in threads():
        os.sched_setaffinity(thread, cores)


def spread(cores: list[int]) -> None:
    """One core for each of XLA's workers: Linux may leave two that wait in turn on one core."""
    hold_to(set(cores))
    workers = [thread for thread, name in threads().items() if name.startswith("tf_XLAEigen")]
    for core, worker in zip(cores, workers, strict=False):
        os.sched_setaffinity(worker, {core})


def shortest(runs, repeats: int) -> list[float]:
    times = [float("inf")] * len(runs)
    for run in runs:
        run()
    spread(sorted(os.sched_getaffinity(0)))
    for _ in range(repeats):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            times[i] = min(times[i], time.perf_counter() - start)
    return times


def others_work() -> float:
    """Seconds that other processes have run on this process's cores (Linux)."""
    cores = {f"cpu{n}" for n in os.sched_getaffinity(0)}
    with open("/proc/stat") as f:
        rows = [line.split() for line in f if line.split()[0] in cores]
    busy = sum(sum(int(row[i]) for i in (1, 2, 3, 6, 7, 8)) for row in rows)
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def child(devices: int, repeats: int, names: list[str]) -> None:
    import jax

    from jaxbraid import performance

    mesh, link, few = None, {}, min(repeats, 40) // 2
    cores = sorted(os.sched_getaffinity(0))
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("layer",), axis_types=(jax.sharding.AxisType.Auto,))
        net, x = problems()["heat"]()
        pair = performance.measure(net, x, mesh=mesh, widths=(1,), repeats=few)
        link = {"latency": pair.latency, "bandwidth": pair.bandwidth}
        print(f"# latency {pair.latency * 1e6:.0f} us, bandwidth {pair.bandwidth / 1e9:.2g} GB/s")
    for name, make in problems().items():
        if names and name not in names:
            continue
        net, x = make()
        others, begin = others_work(), time.perf_counter()
        hold_to({cores[-1]})  # one device's steps, on one core
        machine = performance.measure(net, x, repeats=few, **link)
        hold_to(set(cores))
        cases = [(c, training) for training in (False, True) for c in configs()]
        times = shortest([run_of(make, c, t, mesh) for c, t in cases], repeats)
        share = (others_work() - others) / (time.perf_counter() - begin) / devices
        print(f"# {name}: on {devices} cores, of which other processes took {max(0, share):.0%}")
        serial = {t: s for (c, t), s in zip(cases, times, strict=True) if c.levels == 1}
        for (config, training), seconds in zip(cases, times, strict=True):
            along = devices if config.levels > 1 else 1
            guess = performance.predict(
                config, net.layers, along, machine, "training" if training else "forward"
            )
            error = guess.seconds / seconds - 1
            mark = "  *" if abs(error) > 0.2 else ""
            print(
                f"{name:10} {along:5}  {'training' if training else 'forward':9}"
                f"{performance.describe(config):20} {seconds * 1e3:8.2f} ms "
                f"{guess.seconds * 1e3:8.2f} ms {error:+7.0%} "
                f"{serial[training] / seconds:7.2f} {guess.speedup:7.2f}{mark}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=", ".join(PROBLEM_NAMES))
    parser.add_argument("--cores", type=int, choices=(1, 2), help="by default both")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args()
    for name in given.problems:
        if name not in PROBLEM_NAMES:
            parser.error(f"{name!r} is none of {', '.join(PROBLEM_NAMES)}.")
    print(
        f"{'problem':10} {'cores':>5}  {'pass':9}{'options':20} {'measured':>11} {'predicted':>11} "
        f"{'error':>7} {'S meas.':>7} {'S pred.':>7}   (*: off by more than 20 %)",
        flush=True,
    )
    cores = sorted(os.sched_getaffinity(0))
    for devices in (given.cores,) if given.cores else (1, 2):
        if devices > len(cores):
            print(f"# only {len(cores)} core: no runs on {devices}")
            continue
        flags = (
            f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
        )
        env = dict(
            os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", CHILD=f"{devices} {given.repeats}"
        )
        code = subprocess.run(
            [sys.executable, __file__, *given.problems],
            env=env,
            preexec_fn=lambda n=devices: os.sched_setaffinity(0, cores[-n:]),
        ).returncode
        if code:
            sys.exit(code)


if __name__ == "__main__":
    if "CHILD" in os.environ:
        child(*map(int, os.environ["CHILD"].split()), sys.argv[1:])
    else:
        main()
