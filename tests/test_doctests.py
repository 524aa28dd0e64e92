"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

import moefuse

MODULES = [
    module.name
    for module in pkgutil.walk_packages(moefuse.__path__, "moefuse.")
    if module.name.split(".")[1] in ("types", "quant", "ops", "nn", "hf", "testing")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", [name for name in moefuse.__all__ if name[0].islower()])
def test_every_op_has_an_example(name: str) -> None:
    assert doctest.DocTestFinder().find(getattr(moefuse, name), name)[0].examples
