"""The CPU patches: they fit the installed megatron-core, refuse an unknown one, and leave torch alone."""

import importlib
import sys
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

from spark_megatron.engine import adam, kernels, platform
from spark_megatron.engine.platform import NEWEST, OLDEST, Patch
from tests.engine.conftest import Answers

HERE = version("megatron-core")
RELEASE = next(versions for versions in (OLDEST, NEWEST) if HERE in SpecifierSet(versions))
ALL = (*platform.PATCHES, *adam.PATCHES, *kernels.PATCHES)


@pytest.mark.parametrize("patch", [patch for patch in ALL if RELEASE in patch.versions], ids=lambda patch: patch.target)
def test_every_target_exists(patch: Patch) -> None:
    module, _, path = patch.target.partition(":")
    owner: Any = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(owner, name)
        owner = getattr(owner, name)
    assert patch.reason
    assert set(patch.versions) <= {OLDEST, NEWEST}


@pytest.mark.parametrize(("installed", "expected"), [("0.16.1", "old both"), ("0.19.2", "both new")])
def test_a_patch_is_applied_to_the_versions_that_it_is_for(
    installed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = SimpleNamespace(old="", both="", new="")
    monkeypatch.setitem(sys.modules, "some_module", owner)
    monkeypatch.setattr(platform, "version", lambda package: installed)
    releases = {"old": (OLDEST,), "both": (OLDEST, NEWEST), "new": (NEWEST,)}
    platform.apply(Patch(f"some_module:{name}", "applied", "test", versions) for name, versions in releases.items())
    assert [name for name, value in vars(owner).items() if value == "applied"] == expected.split()


@pytest.mark.parametrize("other", ["0.15.3", "0.17.1", "0.20.0", "1.0.0"])
def test_an_unknown_version_is_refused(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "version", lambda package: other)
    monkeypatch.setattr(platform, "_installed", False)
    with pytest.raises(RuntimeError, match=f"megatron-core {other} is .* patch >=0.16,<0.17 and >=0.19,<0.20 only"):
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
