"""Between Hugging Face directories and megatron-core checkpoints, in one process.

    python tools/convert.py to-hf CHECKPOINT HF_DIR [--model START_MODEL] [--verify]
    python tools/convert.py to-megatron HF_DIR FOLDER [--dtype fp32|bf16] [--verify]

``to-hf`` takes any checkpoint of a run (``runs/.../checkpoints/step_00000012``), saved from any parallel layout, at any
time, and writes a directory that transformers and vLLM load. Config and tokenizer are those of the model that the run
began with, or of --model. ``to-megatron`` writes ``FOLDER/step_00000000``, weights only, in megatron-core's distributed
format. --verify reads back what was written and compares every tensor bit by bit; towards HF it also compares the
logits of transformers with the engine's.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from spark_megatron import runtime

runtime.prepare_environment()
warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")

import torch  # noqa: E402 (the environment has to be prepared first)
import torch.distributed as dist  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from spark_megatron.data.packing import pack  # noqa: E402
from spark_megatron.engine import checkpoint, platform  # noqa: E402
from spark_megatron.engine import model as models  # noqa: E402
from spark_megatron.engine.local import place  # noqa: E402
from spark_megatron.engine.modules import Decoder  # noqa: E402
from spark_megatron.engine.parallel import Layout, Parallel  # noqa: E402
from spark_megatron.engine.weights.placement import Placement  # noqa: E402
from spark_megatron.engine.weights.stream import export_hf, load_hf, save_hf  # noqa: E402
from spark_megatron.types import Sample  # noqa: E402

BUCKET_BYTES = 256 << 20
NEAR = {"fp32": 1e-3, "bf16": 0.5}
"""Largest accepted difference of a logit: another order of summation over all layers, at 24 and at 8 bits."""


class Stopped(Exception):
    """The conversion cannot go on; the message is for the user."""


class Model:
    """A model on one rank, with its weight table."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.directory, self.dtype, self.parallel = directory, dtype, Parallel(Layout())
        self.hf = models.read_config(directory)
        self.chunks: list[Decoder] = models.build(self.hf, self.parallel, models.DTYPES[dtype])
        self.placement = Placement(self.hf, self.chunks, self.parallel)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for bucket in export_hf(self.placement, BUCKET_BYTES) for name, tensor in bucket}

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        batch = pack([Sample(tuple(tokens[:1]), tuple(tokens[1:]), "any", "cross_entropy")], {"any": 1.0}, 0)
        [local] = place([batch.to(platform.device())], self.parallel)
        hidden = self.chunks[0](local.batch.tokens[None], None, None, packed_seq_params=local.packed)
        return platform.matmul(hidden[:, 0], self.chunks[0].head()[: self.hf.vocab_size].T).float()


def to_hf(source: Path, target: Path, start: Path | None, verify: bool) -> str:
    """Convert a checkpoint; a line that says what was done."""
    settings = checkpoint.read_state(source).get("config", {}).get("model", {})
    directory = start or (Path(settings["path"]) if settings else None)
    if directory is None:
        raise Stopped(f"{source} does not say which model it began with: name its directory with --model")
    model = Model(directory, settings.get("dtype", "fp32"))
    checkpoint.load_weights(model.chunks, model.parallel, source)
    save_hf(model.placement, directory, target, BUCKET_BYTES)
    if not verify:
        return f"{target}: {len(model.tensors())} tensors"
    count = same(model, target)
    tokens = [i * 7919 % model.hf.vocab_size for i in range(1, 65)]
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=models.DTYPES[model.dtype]).eval()
    with torch.no_grad():
        difference = float((theirs(torch.tensor([tokens])).logits[0].float() - model.logits(tokens).cpu()).abs().max())
    if not difference <= NEAR[model.dtype]:
        raise Stopped(f"{target}: a logit of transformers differs from the engine's by {difference:.2e}")
    return f"{target}: {count} tensors equal to the last bit, largest difference of a logit {difference:.1e}"


def to_megatron(source: Path, folder: Path, dtype: str, verify: bool) -> str:
    """Convert a HF directory; a line that says what was done."""
    model = Model(source, dtype)
    load_hf(model.placement, source)
    checkpoints = checkpoint.Checkpoints(folder, keep=1, asynchronous=False)
    checkpoints.save_weights(model.chunks, model.parallel, {"config": {"model": {"path": str(source), "dtype": dtype}}})
    target = checkpoints.latest()
    assert target is not None
    if not verify:
        return f"{target}: {len(model.tensors())} tensors"
    back = Model(source, dtype)
    checkpoint.load_weights(back.chunks, back.parallel, target)
    return f"{target}: {same(back, source)} tensors equal to the last bit"


def same(model: Model, directory: Path) -> int:
    """The number of tensors of ``model``, all of which are those of ``directory`` (in the model's dtype)."""
    tensors = model.tensors()
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name in tensors and not torch.equal(opened.get_tensor(name).to(tensors[name].dtype), tensors[name]):
                    raise Stopped(f"{file}: {name} is not what was converted")
    return len(tensors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    hf = commands.add_parser("to-hf", help="checkpoint -> HF directory")
    hf.add_argument("checkpoint", type=Path)
    hf.add_argument("target", type=Path)
    hf.add_argument("--model", type=Path, help="HF directory with config and tokenizer (default: that of the run)")
    megatron = commands.add_parser("to-megatron", help="HF directory -> checkpoint")
    megatron.add_argument("source", type=Path)
    megatron.add_argument("folder", type=Path)
    megatron.add_argument("--dtype", choices=models.DTYPES, default="fp32")
    for command in (hf, megatron):
        command.add_argument("--verify", action="store_true")
    args = parser.parse_args()
    dist.init_process_group(platform.distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        if args.command == "to-hf":
            print(to_hf(args.checkpoint, args.target, args.model, args.verify))
        else:
            print(to_megatron(args.source, args.folder, args.dtype, args.verify))
    except (Stopped, ValueError, checkpoint.CheckpointError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
