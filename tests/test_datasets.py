"""The loaders on small files that the tests write, as the formats are described, byte by byte."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from PIL import Image

from jaxbraid import datasets

RNG = np.random.default_rng(0)

# ----------------------------------------------------------------------------------- IDX


def idx(array, code):
    shape = b"".join(struct.pack(">I", n) for n in array.shape)
    return bytes([0, 0, code, array.ndim]) + shape + array.tobytes()


@pytest.mark.parametrize(("code", "dtype"), [(8, ">u1"), (9, ">i1"), (11, ">i2"), (12, ">i4"),
                                             (13, ">f4"), (14, ">f8")])  # fmt: skip
@pytest.mark.parametrize("compress", [False, True])
def test_idx(tmp_path, code, dtype, compress):
    array = RNG.integers(0, 100, (3, 4, 5)).astype(dtype)
    data = idx(array, code)
    (tmp_path / "a").write_bytes(gzip.compress(data) if compress else data)
    got = datasets.read_idx(tmp_path / "a")
    np.testing.assert_array_equal(got, array)
    assert got.dtype.isnative and got.dtype == array.dtype.newbyteorder("=")


@pytest.mark.parametrize(("train", "test"), [("-{}-ubyte", "-{}-ubyte.gz"), (".{}-ubyte",) * 2])
def test_mnist(tmp_path, train, test):
    sets = {}
    for prefix, form, n in (("train", train, 6), ("t10k", test, 3)):
        images = RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        labels = np.arange(n, dtype=np.uint8)
        for name, a in (("images", images), ("labels", labels)):
            data = idx(a, 8)
            path = tmp_path / f"{prefix}-{name}{form.format(f'idx{a.ndim}')}"
            path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        sets[prefix] = images, labels
    for split, prefix in (("train", "train"), ("test", "t10k")):
        for got, expected in zip(datasets.load_mnist(tmp_path, split), sets[prefix], strict=True):
            np.testing.assert_array_equal(got, expected)


def test_bad_idx(tmp_path):
    path, data = tmp_path / "a", idx(np.arange(6, dtype=np.uint8).reshape(2, 3), 8)
    with pytest.raises(FileNotFoundError, match="a: there is no such file"):
        datasets.read_idx(path)
    for content, message in (
        (b"", "is no IDX file"),
        (b"\x89PNG", r"is no IDX file: begins with b'\\x89PNG'"),
        (data[:6], "ends within its header of 12 bytes"),
        (data[:-1], r"5 bytes of data: must have 6 for the shape \(2, 3\)"),
        (data + b"x", "7 bytes of data: must have 6"),
        (gzip.compress(data)[:-9], "not complete"),
        (idx(np.zeros((0,), np.uint8), 8)[:4] + b"\xff\xff\xff\xff", "must have 4294967295"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            datasets.read_idx(path)


def test_bad_mnist(tmp_path):
    with pytest.raises(FileNotFoundError, match="has none of train-images-idx3-ubyte, "):
        datasets.load_mnist(tmp_path)
    with pytest.raises(ValueError, match="split='dev'"):
        datasets.load_mnist(tmp_path, "dev")
    images, labels = (tmp_path / f"train-{n}-ubyte" for n in ("images-idx3", "labels-idx1"))
    images.write_bytes(idx(np.zeros((2, 28, 28), np.uint8), 8))
    labels.write_bytes(idx(np.zeros(3, np.uint8), 8))
    with pytest.raises(ValueError, match="labels-idx1-ubyte: has 3 entries: must have 2"):
        datasets.load_mnist(tmp_path)
    labels.write_bytes(images.read_bytes())
    with pytest.raises(ValueError, match="must hold bytes in 1 dimensions"):
        datasets.load_mnist(tmp_path)


# ------------------------------------------------------------------------------- UCI-HAR

SIGNALS = [f"{kind}_{a}" for kind in ("body_acc", "body_gyro", "total_acc") for a in "xyz"]


def write_har(folder, split, n=3, steps=4):
    signals = RNG.normal(size=(9, n, steps)).astype(np.float32)
    inertial = folder / split / "Inertial Signals"
    inertial.mkdir(parents=True)
    for name, values in zip(SIGNALS, signals, strict=True):
        rows = ["  " + " ".join(f"{v: .7e}" for v in row) for row in values]
        (inertial / f"{name}_{split}.txt").write_text("\n".join(rows) + "\n")
    (folder / split / f"y_{split}.txt").write_text("5\n1\n6\n")
    (folder / split / f"subject_{split}.txt").write_text("1\n1\n30\n")
    return signals


def test_uci_har(tmp_path):
    for split in ("train", "test"):
        signals = write_har(tmp_path, split)
        got = datasets.load_uci_har(tmp_path, split)
        np.testing.assert_allclose(got.signals, signals.transpose(1, 2, 0), rtol=1e-6)
        assert got.signals.dtype == np.float32
        assert got.labels.tolist() == [4, 0, 5] and got.subjects.tolist() == [1, 1, 30]


def test_bad_uci_har(tmp_path):
    with pytest.raises(FileNotFoundError, match="train: there is no such folder"):
        datasets.load_uci_har(tmp_path)
    write_har(tmp_path, "train")
    part = tmp_path / "train"
    faults = [
        ("Inertial Signals/body_gyro_y_train.txt", "1 2 3 4\n1 2 3\n", "row 2 has 3 numbers"),
        ("Inertial Signals/body_gyro_y_train.txt", "1 2 3 4\n", "has 1 entries: must have 3"),
        ("Inertial Signals/body_gyro_y_train.txt", "1 2 3 x\n", "could not convert"),
        ("Inertial Signals/body_gyro_y_train.txt", "", "is empty"),
        ("y_train.txt", "1\n7\n2\n", r"labels that are not 1\.\.6"),
        ("subject_train.txt", "1\n2\n", "has 2 entries: must have 3, as many as y_train.txt"),
    ]
    for name, text, message in faults:
        good = (part / name).read_text()
        (part / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            datasets.load_uci_har(tmp_path)
        (part / name).write_text(good)
    (part / "Inertial Signals/total_acc_z_train.txt").unlink()
    with pytest.raises(FileNotFoundError, match="total_acc_z_train"):
        datasets.load_uci_har(tmp_path)


# ------------------------------------------------------------------------- Tiny ImageNet


def write_images(folder):
    """Two classes, listed in another order than the alphabet's; flat colours survive JPEG."""
    (folder / "wnids.txt").write_text("n02\nn01\n")
    colours = {"n01": (250, 10, 10), "n02": (10, 10, 250)}
    for name, colour in colours.items():
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (64, 64), colour).save(images / f"{name}_{i}.JPEG")
    images = folder / "val" / "images"
    images.mkdir(parents=True)
    Image.new("RGB", (64, 64), colours["n01"]).save(images / "val_0.JPEG")
    Image.new("L", (64, 64), 128).save(images / "val_1.JPEG")
    lines = ["val_0.JPEG\tn01\t0\t0\t62\t62", "val_1.JPEG\tn02\t0\t0\t62\t62"]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return colours


def test_tiny_imagenet(tmp_path):
    colours = write_images(tmp_path)
    train = datasets.load_tiny_imagenet(tmp_path, per_class=2)
    assert train.classes == ("n02", "n01") and train.labels.tolist() == [0, 0, 1, 1]
    assert train.images.shape == (4, 64, 64, 3) and train.images.dtype == np.uint8
    for image, label in zip(train.images, train.labels, strict=True):
        colour = np.array(colours[train.classes[label]])
        assert np.abs(image.astype(int) - colour).max() <= 6  # JPEG's rounding

    val = datasets.load_tiny_imagenet(tmp_path, "val")
    assert val.labels.tolist() == [0, 1]
    assert np.abs(val.images[0].astype(int) - 128).max() <= 6  # grey, in three channels
    first = datasets.load_tiny_imagenet(tmp_path, "val", classes=1)
    assert first.classes == ("n02",) and len(first.images) == 1


def test_bad_tiny_imagenet(tmp_path):
    with pytest.raises(FileNotFoundError, match="train: there is no such folder"):
        datasets.load_tiny_imagenet(tmp_path)
    write_images(tmp_path)
    with pytest.raises(ValueError, match=r"classes=3: .* has 2 only"):
        datasets.load_tiny_imagenet(tmp_path, classes=3)
    with pytest.raises(ValueError, match="split='test'"):
        datasets.load_tiny_imagenet(tmp_path, "test")
    with pytest.raises(ValueError, match="per_class=0"):
        datasets.load_tiny_imagenet(tmp_path, per_class=0)

    path = tmp_path / "train/n01/images/n01_1.JPEG"
    good = path.read_bytes()
    for content in (b"", b"text", good[: len(good) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"n01_1\.JPEG: is no complete image"):
            datasets.load_tiny_imagenet(tmp_path)
    Image.new("RGB", (32, 64)).save(path)
    with pytest.raises(ValueError, match=r"n01_1\.JPEG: has the shape \(64, 32, 3\)"):
        datasets.load_tiny_imagenet(tmp_path)

    table = tmp_path / "val/val_annotations.txt"
    table.write_text("val_0.JPEG\tn01\nval_1.JPEG\n")
    with pytest.raises(ValueError, match="line 2 has no image and class"):
        datasets.load_tiny_imagenet(tmp_path, "val")
    table.write_text("val_0.JPEG\tn01\nval_9.JPEG\tn02\n")
    with pytest.raises(FileNotFoundError, match=r"val_9\.JPEG: .* line 2"):
        datasets.load_tiny_imagenet(tmp_path, "val")
    table.write_text("val_0.JPEG\tn01\n")
    with pytest.raises(FileNotFoundError, match="no val files of the class n02"):
        datasets.load_tiny_imagenet(tmp_path, "val")


# ------------------------------------------------------------------------------ ModelNet

CORNERS = np.array([(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)], float)
SQUARES = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]


def off(vertices, faces, header="OFF\n{} {} 0\n"):
    rows = [" ".join(map(str, v)) for v in vertices]
    rows += [" ".join(map(str, (len(f), *f))) for f in faces]
    return header.format(len(vertices), len(faces)) + "\n".join(rows) + "\n"


@pytest.mark.parametrize("header", ["OFF\n{} {} 0\n", "OFF{} {} 0\n", "OFF {} {} 12\n",
                                    "# a cube\nOFF\n\n# counts\n{} {} 0 # edges\n"])  # fmt: skip
def test_off(tmp_path, header):
    path = tmp_path / "cube.off"
    path.write_text(off(CORNERS, SQUARES, header))
    mesh = datasets.read_off(path)
    np.testing.assert_array_equal(mesh.vertices, CORNERS)
    assert mesh.triangles.shape == (12, 3)
    a, b, c = mesh.vertices[mesh.triangles].transpose(1, 0, 2)
    normals = np.cross(b - a, c - a)
    assert np.linalg.norm(normals, axis=1).sum() / 2 == 6  # the area of the cube
    assert abs(np.einsum("ij,ij->i", a, normals).sum() / 6) == 1  # and its volume


def test_off_with_colours(tmp_path):
    path = tmp_path / "a.off"
    path.write_text("OFF\n3 1 0\n0 0 0 255 0 0\n1 0 0 0 255 0\n0 1 0 0 0 255\n3 0 1 2 0.5 0.5 1\n")
    mesh = datasets.read_off(path)
    assert mesh.vertices.shape == (3, 3) and mesh.triangles.tolist() == [[0, 1, 2]]


def test_bad_off(tmp_path):
    path = tmp_path / "a.off"
    for text, message in (
        ("", "is no OFF file"),
        ("PLY\n", "is no OFF file: begins with 'PLY"),
        ("OFF\n", "edges should be numbers, but is missing"),
        ("OFF\n3 x 0\n", "should be numbers, but is '3 x 0'"),
        ("OFF\n3\n", "vertices, faces and edges are '3'"),
        (off(CORNERS, SQUARES)[:-12], "has 13 lines after the counts: 8 vertices and 6 faces"),
        ("OFF\n1 0 0\n1 2\n", "a vertex of fewer than three"),
        ("OFF\n1 0 0\n1 2 nan\n", "not finite"),
        ("OFF\n1 0 0\n1 2 a\n", "vertex 0 should be numbers"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 3\n", r"face 0 is '3 0 1 3': must be indices < 3"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1\n", "face 0 is '3 0 1'"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            datasets.read_off(path)


def cube_mesh(tmp_path, scale=(1, 1, 1)):
    path = tmp_path / "mesh.off"
    path.write_text(off(CORNERS * scale, SQUARES))
    return datasets.read_off(path)


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_voxels_of_a_cube(tmp_path, size):
    """It fills the grid; its surface is the outermost cells."""
    shell = datasets.voxelize(cube_mesh(tmp_path), size, solid=False)
    inner = np.zeros((size,) * 3, bool)
    inner[1:-1, 1:-1, 1:-1] = True
    np.testing.assert_array_equal(shell, ~inner)
    assert datasets.voxelize(cube_mesh(tmp_path), size).all()


def test_voxels_keep_proportions(tmp_path):
    grid = datasets.voxelize(cube_mesh(tmp_path, (8, 4, 2)), 16)
    extent = [np.ptp(np.nonzero(grid)[axis]) + 1 for axis in range(3)]
    assert extent[0] == 16 and 8 <= extent[1] <= 9 and 4 <= extent[2] <= 5
    assert grid.sum() == np.prod(extent)


def test_voxels_of_a_sphere():
    """Filled, whatever the rotation; its volume is that of a ball to half a layer of cells."""
    angle, height = np.meshgrid(np.linspace(0, 2 * np.pi, 33), np.linspace(0, np.pi, 17))
    ball = np.stack([np.cos(angle) * np.sin(height), np.sin(angle) * np.sin(height),
                     np.cos(height)], -1).reshape(-1, 3)  # fmt: skip
    corner = (33 * np.arange(16)[:, None] + np.arange(32)).ravel()
    squares = np.stack([corner, corner + 1, corner + 34, corner + 33], -1)
    triangles = np.concatenate([squares[:, [0, 1, 2]], squares[:, [0, 2, 3]]])
    for seed in range(5):
        turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]
        mesh = datasets.Mesh(ball @ turn, triangles)
        grid = datasets.voxelize(mesh, 20)
        shell = datasets.voxelize(mesh, 20, solid=False)
        volume = 4 / 3 * np.pi * np.array([10, 11]) ** 3
        assert volume[0] * 0.95 < grid.sum() < volume[1]
        assert shell[10, 10, 10] == False and grid[10, 10, 10]  # noqa: E712
        assert not np.any(shell & ~grid)


def test_modelnet(tmp_path):
    for name, scale in (("box", (1, 1, 1)), ("board", (8, 8, 1))):
        for split, count in (("train", 3), ("test", 1)):
            (tmp_path / name / split).mkdir(parents=True)
            for i in range(count):
                path = tmp_path / name / split / f"{name}_{i:04}.off"
                path.write_text(off(CORNERS * scale, SQUARES, "OFF{} {} 0\n"))
    shapes = datasets.load_modelnet(tmp_path, size=8, per_class=2)
    assert shapes.classes == ("board", "box") and shapes.labels.tolist() == [0, 0, 1, 1]
    assert shapes.voxels.shape == (4, 8, 8, 8) and shapes.voxels[2].all()
    assert shapes.voxels[0].sum() <= 2 * 64
    assert len(datasets.load_modelnet(tmp_path, "test", size=4).voxels) == 2


def test_bad_modelnet(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no folder <class>/train"):
        datasets.load_modelnet(tmp_path)
    (tmp_path / "box/train").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has no train files of the class box"):
        datasets.load_modelnet(tmp_path)
    with pytest.raises(ValueError, match="size=0"):
        datasets.voxelize(cube_mesh(tmp_path), 0)
    with pytest.raises(ValueError, match="no triangles"):
        datasets.voxelize(datasets.Mesh(CORNERS, np.zeros((0, 3), int)), 4)
    with pytest.raises(ValueError, match="no extent"):
        datasets.voxelize(datasets.Mesh(np.ones((3, 3)), np.array([[0, 1, 2]])), 4)
