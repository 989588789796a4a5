"""The backends are mirrors: the same modules, functions and arguments."""

import importlib
import inspect

import pytest


@pytest.mark.parametrize("stem", ["statistics", "transform", "backward", "double_backward"])
def test_same_signatures(stem):
    cpu, cuda = (importlib.import_module(f"cunorm.{b}.{stem}") for b in ("cpu", "cuda"))
    assert cpu.__all__ == cuda.__all__
    for name in cpu.__all__:
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (cpu, cuda))
        assert list(ours.parameters) == list(theirs.parameters), name
        defaults = [p.default for p in ours.parameters.values()]
        assert defaults == [p.default for p in theirs.parameters.values()], name
        assert getattr(cpu, name).__doc__
        assert getattr(cuda, name).__doc__
