"""Runs one program under test. The launcher hands this source to a fresh interpreter; the package is out of its reach.

Descriptor 3 holds ``{"program": source, "expressions": null or a list}``. Without expressions the program is the main
module and talks through stdin and stdout. With them it is imported, the expressions are evaluated in its namespace one
after the other, and the value of each goes to descriptor 4 as a line of JSON: a list with it (see ``encode``), ``null``
where it raised.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any


def encode(value: Any) -> Any:
    """A value as JSON that keeps Python's types: scalars as they are, containers as [type, items].

    Anything else is ``["other"]``, which equals nothing.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return [{"frozenset": "set"}.get(kind.__name__, kind.__name__), [encode(item) for item in value]]
    if kind is dict:
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    return ["other"]


def main() -> None:
    """Runs the program, then the expressions."""
    with open(3, encoding="utf-8") as file:
        request = json.load(file)
    expressions = request["expressions"]
    module = types.ModuleType("__main__" if expressions is None else "program")
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    names = module.__dict__
    exec(compile(request["program"], "program.py", "exec"), names)
    for text in expressions or ():
        try:
            line = json.dumps([encode(eval(text, names))])
        except Exception as error:  # noqa: BLE001 - the program's own, of any kind: this test has no value
            print(repr(error), file=sys.stderr)
            line = "null"
        os.write(4, f"{line}\n".encode())


if __name__ == "__main__":
    main()
