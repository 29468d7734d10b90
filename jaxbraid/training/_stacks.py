"""The layer-parallel stacks in an NNX model: to find them, and to put others in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import linen, nnx

from jaxbraid.flax.nnx import ParallelStack


def stacks_of(model: nnx.Module) -> dict[str, ParallelStack]:
    """All `ParallelStack`s in a model, or the one that it is, by their paths."""
    _check_model(model)
    found = {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, ParallelStack)
    }
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no ParallelStack.")
    return found


def replaced(model: nnx.Module, kind: type, make: Callable[[Any], nnx.Module]) -> Any:
    """A copy of `model` with `make(m)` in the place of each module `m` of the class `kind`.

    What is shared stays shared, and what lies within such a module stays as it is.
    """
    _check_model(model)
    model = nnx.clone(model)
    nodes = list(nnx.iter_graph(model))
    found = [path for path, node in nodes if isinstance(node, kind)]
    for path, node in nodes:
        if isinstance(node, tuple) and any(isinstance(m, kind) for m in node):
            where = ".".join(map(str, path))
            raise TypeError(f"model: the {kind.__name__} at {where} is in a tuple: use a nnx.List.")

    def new(path: tuple[Any, ...], node: Any) -> Any:
        inner = any(path[: len(p)] == p for p in found if p != path)
        return make(node) if isinstance(node, kind) and not inner else node

    return nnx.recursive_map(new, model, graph=True)


def _check_model(model: Any) -> None:
    if isinstance(model, nnx.Module):
        return
    hint = ""
    if isinstance(model, linen.Module):
        hint = (
            " Linen's ParallelStack is exact with serial=True and the same variables; those of "
            "block n alone are the entries n of what is stacked under 'blocks'."
        )
    raise TypeError(f"model is a {type(model).__name__}: must be a Flax NNX module.{hint}")
