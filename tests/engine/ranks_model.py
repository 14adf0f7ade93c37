"""What the single process of the model tests runs: every family's logits, and every rank of many layouts in turn.

A rank of a larger job is played by torch's "fake" process group, whose collectives do nothing: enough to build and to
load that rank's part of a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from spark_megatron.architecture import Architecture
from spark_megatron.data.packing import pack
from spark_megatron.engine import model as models
from spark_megatron.engine.local import place
from spark_megatron.engine.parallel import Layout, Parallel
from spark_megatron.engine.weights import stream
from spark_megatron.engine.weights.home import shard_shapes
from spark_megatron.engine.weights.placement import Placement
from spark_megatron.engine.weights.stream import assemble, load_hf, save_hf
from spark_megatron.engine.weights.table import elements
from spark_megatron.slices import Row
from spark_megatron.types import Sample

LAYOUTS: dict[str, tuple[int, Layout]] = {
    "tp2": (2, Layout(tensor=2, sequence=True)),
    "tp4": (4, Layout(tensor=4, sequence=True)),
    "pp4": (4, Layout(pipeline=4)),
    "pp2_vp2": (2, Layout(pipeline=2, virtual=2)),
    "tp2_pp2": (4, Layout(tensor=2, pipeline=2, sequence=True)),
    "ep4": (4, Layout(expert=4)),
    "ep2_tp2": (4, Layout(tensor=2, expert=2, sequence=True)),
    "ep2_pp2_vp2": (4, Layout(pipeline=2, virtual=2, expert=2)),
}
"""Name -> (ranks, layout)."""

QWEN2_5_32B = Qwen2Config(
    num_hidden_layers=64,
    hidden_size=5120,
    num_attention_heads=40,
    num_key_value_heads=8,
    intermediate_size=27648,
    vocab_size=152064,
    tie_word_embeddings=False,
)
QWEN3_30B_A3B = Qwen3MoeConfig(
    num_hidden_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    vocab_size=151936,
    tie_word_embeddings=False,
)
LARGE: dict[str, tuple[PreTrainedConfig, Layout]] = {
    "dense tp8 pp4": (QWEN2_5_32B, Layout(tensor=8, pipeline=4)),
    "experts tp4 pp2 ep4": (QWEN3_30B_A3B, Layout(tensor=4, pipeline=2, expert=4, sequence=True)),
    "experts tp8 pp2 vp2 ep2": (QWEN3_30B_A3B, Layout(tensor=8, pipeline=2, virtual=2, expert=2, sequence=True)),
}


def on_one_rank(
    paths: dict[str, Path], variants: dict[str, Path], broken: dict[str, Path], loaded_models: Sequence[str], out: Path
) -> dict[str, Any]:
    """Logits of ``paths`` and ``variants``, refusals of ``broken``, all ranks' parts of ``loaded_models``."""
    parallel = Parallel(Layout())
    answers: dict[str, Any] = {
        "logits": {name: logits(loaded(path, parallel)[1]) for name, path in (paths | variants).items()},
        "refusals": {name: refusal(path, parallel) for name, path in broken.items()},
        "saved": saved(paths["qwen3_moe_mixed"], parallel, out),
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    answers["layouts"] = {
        (name, model): on_every_rank(paths[model], ranks, layout)
        for name, (ranks, layout) in LAYOUTS.items()
        for model in loaded_models
        if layout.expert == 1 or "moe" in model
    }
    answers["large"] = {name: large_model(hf, layout) for name, (hf, layout) in LARGE.items()}
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    return answers


def loaded(path: Path, parallel: Parallel) -> tuple[Placement, list[Any]]:
    hf = models.read_config(path)
    chunks = models.build(hf, parallel, torch.float32)
    with torch.no_grad():
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.fill_(float("nan"))  # what loading leaves out shows
    placement = Placement(hf, chunks, parallel)
    load_hf(placement, path)
    return placement, chunks


def prompts() -> list[list[int]]:
    """Lengths beyond and below the original context of the models with scaled rotary embeddings (32)."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 301, (length,), generator=generator).tolist() for length in (200, 50, 7)]


@torch.no_grad()
def logits(chunks: list[Any]) -> list[Tensor]:
    """[tokens, vocabulary] of each prompt; all prompts are packed into one sequence of tokens."""
    [decoder] = chunks
    rows = [Sample(tuple(p[:-1]), (p[-1],), "x", loss="cross_entropy") for p in prompts()]
    [local] = place([pack(rows, {"x": 1.0}, 0)], Parallel(Layout()))
    hidden = decoder.eval()(local.batch.tokens[None], None, None, packed_seq_params=local.packed).squeeze(1)
    return list((hidden @ decoder.head().T).split([len(p) for p in prompts()]))


def refusal(path: Path, parallel: Parallel) -> str:
    try:
        loaded(path, parallel)
    except ValueError as error:
        return str(error)
    return "accepted"


def saved(path: Path, parallel: Parallel, out: Path) -> dict[str, Any]:
    """The directory of a model saved in several files, and of one saved in one file over it."""
    placement, _ = loaded(path, parallel)
    folders = {}
    for name, limits in {"several": (200_000,), "one": (200_000, 1 << 40)}.items():
        folders[name] = out / name
        for limit in limits:
            save_hf(placement, path, folders[name], 150_000, file_bytes=limit)
        for part in folders[name].glob("model-*") if len(limits) > 1 else ():
            part.unlink()
    return folders


@contextmanager
def rank(number: int, ranks: int, layout: Layout) -> Iterator[Parallel]:
    """This process as rank ``number`` of a job that does not exist."""
    dist.init_process_group("fake", rank=number, world_size=ranks, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            create_gloo_process_groups=False,
        )
        yield Parallel(layout)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class Reader:
    """safe_open that counts the elements it hands out."""

    elements = 0

    def __init__(self, *args: Any) -> None:
        self.file = stream_safe_open(*args)

    def __enter__(self) -> Reader:
        self.file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.__exit__(*args)

    def keys(self) -> list[str]:
        return list(self.file.keys())

    def get_slice(self, name: str) -> Any:
        part = self.file.get_slice(name)

        class Counting:
            get_shape = part.get_shape

            def __getitem__(self, index: Any) -> Tensor:
                tensor: Tensor = part[index]
                Reader.elements += tensor.numel()
                return tensor

        return Counting()


stream_safe_open = stream.safe_open


def on_every_rank(path: Path, ranks: int, layout: Layout) -> dict[str, Any]:
    """Load each rank's part of the model; the full tensors put together from all of them against the file."""
    shards: dict[str, dict[int, Tensor]] = {}
    rows: list[Row] = []
    answer: dict[str, Any] = {"finite": True, "shapes": True, "excess": 0, "wrong": []}
    for number in range(ranks):
        with rank(number, ranks, layout) as parallel, mock.patch.object(stream, "safe_open", Reader):
            Reader.elements = 0
            placement, chunks = loaded(path, parallel)
            rows = placement.rows
            found = [{name: tuple(p.shape) for name, p in chunk.named_parameters()} for chunk in chunks]
            expected = shard_shapes(placement.model, layout, parallel.pipeline_rank, parallel.expert_rank)
            answer["shapes"] = answer["shapes"] and found == expected
            answer["finite"] = answer["finite"] and all(bool(p.isfinite().all()) for p in placement.local.values())
            held = sum(p.numel() for p in placement.local.values())
            answer["excess"] += Reader.elements - (held - padding(placement))
            for name, parameter in placement.local.items():
                shards.setdefault(name, {})[parallel.tensor_rank] = parameter.detach()
    reference = load_file(path / "model.safetensors")
    for row in rows:
        held_by = shards.get(row.full_name, {})
        if held_by or row.exported:
            full = assemble(row, [held_by[i] for i in range(layout.tensor)])
            answer["wrong"] += [n for n, t in zip(row.hf, full, strict=True) if not torch.equal(t, reference[n])]
    return answer


def padding(placement: Placement) -> int:
    """Elements of this rank's rows beyond the vocabulary, which are held, but in no file."""
    vocab, layout = placement.model.vocab, placement.parallel.layout
    per_rank = placement.model.padded_vocab(layout.tensor) // layout.tensor
    beyond = max(0, (placement.parallel.tensor_rank + 1) * per_rank - vocab)
    held = sum(name.endswith(("word_embeddings.weight", "output_layer.weight")) for name in placement.local)
    return beyond * held * placement.model.hidden


def large_model(hf: PreTrainedConfig, layout: Layout) -> dict[str, Any]:
    """A model of some 30e9 parameters on 32 ranks, without memory: the parts of ranks at all corners of the layout."""
    ranks = 32
    fitting, whole = True, 0
    for number in (0, 1, ranks // 2 - 1, ranks // 2, ranks - 1):
        with rank(number, ranks, layout) as parallel:
            chunks = models.build(hf, parallel, torch.bfloat16, torch.device("meta"))
            placement = Placement(hf, chunks, parallel)
            found = [{name: tuple(p.shape) for name, p in chunk.named_parameters()} for chunk in chunks]
            fitting &= found == shard_shapes(placement.model, layout, parallel.pipeline_rank, parallel.expert_rank)
            whole = elements(placement.rows)
    return {"fitting": fitting, "elements": whole, "held": held_in_all(hf, layout)}


def held_in_all(hf: PreTrainedConfig, layout: Layout) -> int:
    """Elements of one copy of the model: what its ranks hold, with what several of them hold counted once."""
    model = Architecture.of(hf.to_dict())
    whole = 0
    for stage in range(layout.pipeline):
        for expert_rank in range(layout.expert):
            for chunk in shard_shapes(model, layout, stage, expert_rank):
                for name, shape in chunk.items():
                    cut = not name.endswith(("norm.weight", "router.weight"))
                    if "local_experts" in name or expert_rank == 0:
                        whole += math.prod(shape) * (layout.tensor if cut else 1)
    return whole


def write_config(path: Path, changes: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    """Change a directory's config.json."""
    file = path / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in without}
    file.write_text(json.dumps(config | changes))
