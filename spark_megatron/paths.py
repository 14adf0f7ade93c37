"""Where the files lie that the package reads but does not import."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """The folder of the Hydra settings, absolute.

    An installed wheel carries it inside the package; in a checkout (imported in place or installed in editable mode)
    it lies beside the package. Raises FileNotFoundError when neither holds ``config.yaml``.
    """
    places = (_PACKAGE / "conf", _PACKAGE.parent / "conf")
    for place in places:
        if (place / "config.yaml").is_file():
            return place
    looked = " and ".join(str(place / "config.yaml") for place in places)
    raise FileNotFoundError(f"the settings are missing: {looked} do not exist; install the package again")
