"""The CPU patches: they fit the installed megatron-core, refuse an unknown one, and leave torch alone."""

import importlib
import sys
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_megatron.engine import platform
from spark_megatron.engine.platform import NEWEST, OLDEST, PATCHES, Patch
from tests.engine.conftest import Answers

HERE = version("megatron-core")


@pytest.mark.parametrize("patch", platform.patches_for(HERE), ids=lambda patch: patch.target)
def test_every_target_exists(patch: Patch) -> None:
    module, _, path = patch.target.partition(":")
    owner: Any = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(owner, name)
        owner = getattr(owner, name)
    assert patch.reason


def test_both_releases_have_patches_and_no_other_is_named() -> None:
    assert {versions for patch in PATCHES for versions in patch.versions} == {OLDEST, NEWEST}


def test_a_version_gets_the_patches_that_are_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Patch("old:target", None, "test", (OLDEST,)), Patch("new:target", None, "test", (NEWEST,))
    both = Patch("both:target", None, "test")
    monkeypatch.setattr(platform, "PATCHES", (old, both, new))
    assert platform.patches_for("0.16.1") == (old, both)
    assert platform.patches_for("0.19.2") == (both, new)


@pytest.mark.parametrize("other", ["0.15.3", "0.17.1", "0.20.0", "1.0.0"])
def test_an_unknown_version_is_refused(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "version", lambda package: other)
    monkeypatch.setattr(platform, "_installed", False)
    with pytest.raises(RuntimeError, match=f"megatron-core {other} is installed.* needs >=0.16,<0.17 or >=0.19,<0.20"):
        platform.install()


@pytest.mark.parametrize("target", ["utils:no_such", "no_such_module:torch", "utils:no_such.attribute"])
def test_a_vanished_target_is_refused(target: str) -> None:
    with pytest.raises(RuntimeError, match=f"megatron.core.{target} of a CPU patch does not exist in .*-core {HERE}"):
        Patch(f"megatron.core.{target}", None, "test").apply()


def test_nothing_is_installed_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(target="original")
    monkeypatch.setitem(sys.modules, "some_module", owner)
    monkeypatch.setattr(platform, "PATCHES", (Patch("some_module:target", "replaced", "test"),))
    monkeypatch.setattr(platform, "_installed", False)
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        platform.install()
    assert owner.target == "original"
    platform.install()
    assert owner.target == "replaced"
    owner.target = "changed since"
    platform.install()
    assert owner.target == "changed since"


def test_the_rest_of_the_process_sees_the_real_torch(single: Answers) -> None:
    """In a process where all patches are in and training has run."""
    seen = single[0]["once"]["platform"]
    refusals = {"AssertionError", "RuntimeError"}  # of a torch built without CUDA, and of one that finds no driver
    assert seen["zeros"] in refusals, "torch.zeros(device='cuda') must fail as it does without the patches"
    assert seen["current_device"] == "torch.cuda"
    assert seen["in_megatron"] == "cpu"
    assert seen["type"] == "torch.cuda.FloatTensor", "one of the two patched methods of torch.Tensor"
    patched = [target for target in seen["targets"] if not target.startswith("megatron.core.")]
    assert patched == ["torch:Tensor.type", "torch:Tensor.cuda"]
