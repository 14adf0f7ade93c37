"""The CPU patches: they fit the installed megatron-core, refuse any other, and leave torch alone."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_megatron.engine import platform
from spark_megatron.engine.platform import PATCHES, Patch
from tests.engine.conftest import Answers


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_every_target_exists(patch: Patch) -> None:
    module, _, path = patch.target.partition(":")
    owner: Any = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(owner, name)
        owner = getattr(owner, name)
    assert patch.reason


def test_a_patch_for_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "version", lambda package: "0.19.2")
    with pytest.raises(RuntimeError, match=r"megatron.core.utils:torch is for megatron-core >=0.16,<0.17, but 0.19.2"):
        Patch("megatron.core.utils:torch", None, "test").apply()


def test_a_vanished_target_is_refused() -> None:
    with pytest.raises(RuntimeError, match="megatron.core.utils:no_such_function of a CPU patch does not exist"):
        Patch("megatron.core.utils:no_such_function", None, "test").apply()


def test_nothing_is_installed_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(target="original")
    patch = Patch("module:target", "replaced", "test")
    monkeypatch.setattr(Patch, "_owner", lambda self: (owner, "target"))
    monkeypatch.setattr(platform, "PATCHES", (patch,))
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
    assert seen["zeros"] == "AssertionError", "torch.zeros(device='cuda') must fail as it does without the patches"
    assert seen["current_device"] == "torch.cuda"
    assert seen["in_megatron"] == "cpu"
    assert seen["type"] == "torch.cuda.FloatTensor", "one of the two patched methods of torch.Tensor"
    patched = [target for target in seen["targets"] if not target.startswith("megatron.core.")]
    assert patched == ["torch:Tensor.type", "torch:Tensor.cuda"]
