"""Notebooks run from a fresh kernel, what they find is right, and their outputs are fit to keep."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

import compiler

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[1] / "notebooks"
MACHINE = r"(?<![\w.])/(home|root|tmp|work|opt|usr|Users|var)/|site-packages"
PATHS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.ipynb"))]

# For each notebook a cell at its end, which holds what it has found against an independent truth.
CHECKS = {
    "01_first_steps": """
z = lam * 6 / 256
closed = u0 * ((1 + z / 2) / (1 - z / 2)) ** np.arange(257)
assert np.allclose(histories["FCF, nested iteration"].us, closed, rtol=0, atol=1e-13)
assert np.nanmin(sol.stats.residuals) <= 1e-9 and sol.stats.converged
assert np.all(np.diff(points[:12, -1]) < 0)  # far from where it is exact, too
""",
    "02_digits": """
logits = parallel.open(x_test)
for w, b in zip(*nnx.to_pure_dict(nnx.state(parallel.stack.blocks))["linear"].values()):
    w, b = (w, b) if w.ndim == 2 else (b, w)
    logits = logits + 2.0 / LAYERS * jnp.tanh(logits @ w + b)
found = jnp.mean(parallel.closing(logits).argmax(-1) == y_test)
assert abs(found - scores["layer-parallel"]) < 0.005 and found > 0.93
""",
    "03_inside_a_v_cycle": """
assert np.allclose(ask(8, levels=4, coarsening=2, cf_relax=1).us, truth, rtol=0, atol=1e-13)
assert np.allclose(ask(4, levels=2, coarsening=4, cf_relax=1).us, truth, rtol=0, atol=1e-13)
""",
    "04_inexact_gradients": """
def plain(params):
    y, _ = jax.lax.scan(lambda x, p: (x + 4.0 / LAYERS * layer(p, x), None), x, params)
    return jnp.mean((y - target) ** 2)

true = jax.grad(plain)(rough)
assert gradient_error(loss_and_gradient(rough, EXACT, EXACT)[1], true).relative < 1e-12
inexact = loss_and_gradient(rough, *[MGRIT(coarsening=4, cf_relax=0, max_iters=1)] * 2)[1]
assert np.isclose(gradient_error(inexact, true).relative, found["rough"][0].relative, rtol=1e-6)
for _, record in runs.values():
    assert record[-1, 1] < 0.8 * record[0, 1]
""",
    "05_sequences": """
assert accuracy(parallel, x_test, y_test) > 0.8 and accuracy(serial, x_test, y_test) > 0.8
carry, cell = jnp.zeros((3, 24)), parallel.rnn.cells[0]
for n in range(STEPS):  # h' = (1 - z) (n - h), implicit Euler
    carry = cell.step(carry, cell.project(x_test[:3, n]), 0.2)
assert jnp.max(jnp.abs(states[:, -1] - carry)) < 1e-5
""",
    "06_convolutions_3d": """
transfers = spatial_coarsening("average_pooling", 3, (False, True))
means = np.asarray(start).reshape(4, 4, 2, 4, 2, 4, 2, 4).mean((2, 4, 6))
assert np.allclose(transfers[1].restrict(start), means, atol=1e-6)
stepped = variants["same voxels"].net().serial()(start)[0]
for name in ("same voxels", "coarser on level 2"):  # both are exact after four iterations
    assert np.allclose(histories[name].u, stepped, atol=1e-3)
assert all(np.isfinite(v).all() and v[-1] < v[0] for v in losses.values())
""",
    "07_meshes_processes_mpi": """
state = x
for n in range(LAYERS):
    state = state + layer(make(n), state) / LAYERS
assert abs(np.mean(state**2) / alone[0] - 1) < 1e-3  # two iterations
""",
    "08_choosing": """
lam, mu = stability("BE", dt * rates), stability("BE", 4 * dt * rates)
shift, worst = np.eye(128, k=-1), np.argmax(bound(4, 0).modes)
matrix = (lam[worst] ** 4 - mu[worst]) * shift @ np.linalg.inv(np.eye(128) - mu[worst] * shift)
assert np.isclose(np.linalg.norm(matrix, 2), bound(4, 0).factor, rtol=1e-8)
assert best[0].seconds == min(p.seconds for p in best)
""",
}


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs(notebook):
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def test_there_are_eight():
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == sorted(CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_notebook_runs_and_finds_what_is_true(path):
    run = load("notebooks_run", FOLDER / "run.py")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[path.stem]))
    run.execute(notebook, {"JAXBRAID_NOTEBOOK_SHORT": "1", "XLA_FLAGS": compiler.FLAGS})
    warnings = [o.text for o in outputs(notebook) if o.get("name") == "stderr"]
    assert not warnings


@pytest.mark.parametrize("path", PATHS)
def test_outputs_are_there_small_and_of_no_machine(path):
    text = path.read_text()
    assert len(text) < 250_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    found = outputs(notebook)
    assert sum("image/png" in o.get("data", {}) for o in found) >= 2 or path.stem[:2] == "07"
    assert any("image/png" in o.get("data", {}) for o in found)
    assert not [o for o in found if o.output_type == "error" or o.get("name") == "stderr"]
    texts = [json.dumps({k: v for k, v in o.items() if k != "data"}) for o in found]
    texts += [value for o in found for k, value in o.get("data", {}).items() if k[:4] == "text"]
    for output in texts:
        assert not re.search(
            r"(?<![\w.])/(home|root|tmp|work|opt|usr|Users|var)/|site-packages", output
        )


@pytest.mark.parametrize("path", PATHS)
def test_metadata_is_that_of_any_kernel(path):
    notebook = nbformat.read(path, as_version=4)
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook.metadata == {"kernelspec": spec, "language_info": {"name": "python"}}
    assert not any(cell.metadata for cell in notebook.cells)


@pytest.mark.parametrize("path", PATHS)
def test_links_lead_somewhere(path):
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"]
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", "\n".join(cells))
    assert links
    for link in links:
        assert (FOLDER / link).exists(), link
