"""The vLLM backend: one engine per rank (or per group of ranks), inside the training job's own processes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from spark_megatron.architecture import Architecture
from spark_megatron.rollout import fp8
from spark_megatron.rollout.base import Request
from spark_megatron.rollout.vllm_rows import vllm_rows
from spark_megatron.runtime import alive, rng_preserved
from spark_megatron.slices import Row
from spark_megatron.types import Rollout


def _unique_distributed_args(_executor: Any) -> tuple[str, int, int]:
    """vLLM's ``(init method, rank, local rank)`` with a job-unique init method.

    vLLM names its shared-memory segments after the init method, which is "env://" for every torchrun job: two jobs on
    one host would share them. The process group exists already, so the string is only ever used for that name.
    """
    job = f"{os.environ['MASTER_PORT']}-{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}".replace("/", "-")
    return f"env://{job}", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])


@contextlib.contextmanager
def _memory_named(kv_cache_mb: int, max_model_len: int) -> Iterator[None]:
    """Put the settings' names before what vLLM says when it runs out of memory at its start."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if "memory" not in str(error).lower():
            raise
        raise RuntimeError(
            f"rollout.backend.kv_cache_mb={kv_cache_mb} with rollout.backend.max_model_len={max_model_len}: vLLM does "
            f"not start with this memory, change one of them: {error}"
        ) from error


def _quantised(model: str) -> dict[str, Any]:
    described = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return {"quantization_config": fp8.config(Architecture.of(described))}


def _receiver(worker: Any) -> Any:
    return worker.weight_transfer_engine


def _index(output: Any) -> int:
    return int(output.index)


class VLLMSampler:
    """vLLM through its external launcher: the ranks of the running job are its workers.

    Where a trainer has the weights, the engine starts with random ones of the right shape; the real ones come before
    the first request (``start_update``, ``load``..., ``finish_update``).

    Args:
        model: HF directory with config.json (and the tokenizer).
        tokenizer: decodes responses.
        dtype: "fp32" or "bf16".
        stop_tokens: ids that end a response (kept in its tokens, not in its text).
        tensor_parallel: ranks per engine; ranks of one engine are consecutive.
        max_model_len: prompt and response together, in tokens.
        max_sequences: sequences in one batch.
        max_batched_tokens: tokens in one batch (raised to ``max_model_len`` where that is longer).
        kv_cache_mb: memory for keys and values.
        prefix_cache: reuse the keys and values of common prompt beginnings.
        sleep_level: what vLLM gives back while the trainer works. 0: nothing; 1: its weights go to host memory and the
            keys and values are dropped; 2: both are dropped. Without a GPU it only stops and forgets its cache.
        weights: "same" as the trainer's, or "fp8_blocks": projections quantised at each hand-over (``rollout.fp8``).
        read_weights: read the directory's own weights, as version 0: there is no trainer.
    """

    has_model = True

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Any,
        dtype: str,
        stop_tokens: Sequence[int],
        tensor_parallel: int,
        max_model_len: int,
        max_sequences: int,
        max_batched_tokens: int,
        kv_cache_mb: int,
        prefix_cache: bool,
        sleep_level: Literal[0, 1, 2],
        weights: Literal["same", "fp8_blocks"],
        read_weights: bool = False,
    ) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        from spark_megatron.rollout import weight_transfer

        weight_transfer.register()
        ExecutorWithExternalLauncher._distributed_args = _unique_distributed_args
        with rng_preserved(), _memory_named(kv_cache_mb, max_model_len):
            self.llm = LLM(
                model=model,
                dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
                load_format="auto" if read_weights else "dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                seed=0,
                logprobs_mode="processed_logprobs",
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=tensor_parallel,
                max_model_len=max_model_len,
                max_num_seqs=max_sequences,
                kv_cache_memory_bytes=kv_cache_mb << 20,
                enable_prefix_caching=prefix_cache,
                # On a CPU, vLLM cannot rewind the generator of a seeded request whose prompt was only partly computed.
                enable_chunked_prefill=False,
                max_num_batched_tokens=max(max_batched_tokens, max_model_len),
                weight_transfer_config={"backend": weight_transfer.BACKEND},
                hf_overrides=_quantised(model) if weights == "fp8_blocks" else None,
                enable_sleep_mode=sleep_level > 0 and current_platform.is_cuda_alike(),
            )
            self.llm.init_weight_transfer_engine({"init_info": {}})
        # The worker shares this process: its receiving end can be spoken to without a remote call for each module.
        [self._receiver] = self.llm.collective_rpc(_receiver)
        self.tokenizer, self.stop_tokens, self.max_model_len = tokenizer, list(stop_tokens), max_model_len
        self._asleep: set[str] = set()
        self.sleep_level, self.tensor_parallel = sleep_level, tensor_parallel
        self.cache_block = self.llm.llm_engine.vllm_config.cache_config.block_size if prefix_cache else 0
        self.weight_version = 0 if read_weights else -1
        self.replica = dist.get_rank() // tensor_parallel
        self.replicas = dist.get_world_size() // tensor_parallel

    def generate(self, requests: Sequence[Request]) -> list[tuple[Rollout, ...]]:
        """The continuations of each request; RuntimeError without weights, and in its sleep."""
        from vllm import SamplingParams

        if self.weight_version < 0:
            raise RuntimeError("the sampler holds no weights yet: hand them over before the first request")
        if self._asleep:
            raise RuntimeError(f"the sampler has given back its {' and '.join(sorted(self._asleep))}: wake it first")
        params = [
            SamplingParams(
                n=r.n,
                temperature=r.temperature,
                max_tokens=r.max_new_tokens,
                seed=r.seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                stop_token_ids=self.stop_tokens,
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": list(r.prompt)} for r in requests]
        with rng_preserved():
            self.llm.enqueue(prompts, params, use_tqdm=False)
            outputs = sorted(self._finished(), key=lambda output: int(output.request_id))
        return [tuple(self._rollout(o, request) for o in sorted(request.outputs, key=_index)) for request in outputs]

    def _finished(self) -> Iterator[Any]:
        """The requests' outputs as they end. Unlike vLLM's own loop, this one says after each step that it lives."""
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            yield from (output for output in engine.step() if output.finished)
            alive()

    def _rollout(self, output: Any, request: Any) -> Rollout:
        tokens = tuple(output.token_ids)
        return Rollout(
            tokens=tokens,
            logprobs=tuple(output.logprobs.logprobs[start] for start in output.logprobs.start_indices),
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            finish="length" if output.finish_reason == "length" else "stop",
            weight_version=self.weight_version,
            cached_tokens=request.num_cached_tokens or 0,
        )

    def rows(self, model: Architecture) -> list[Row]:
        return vllm_rows(model)

    def start_update(self) -> None:
        self.llm.start_weight_update()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._receiver.receive(tensors)

    def finish_update(self, version: int) -> None:
        """End the update; cached keys and values of the old weights are dropped."""
        self.llm.finish_weight_update(str(version))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not drop its prefix cache after a weight update: requests are still running")
        self.weight_version = version

    def differing(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``readback``: what the kernels compute with is compared, in whatever form they keep it."""
        from spark_megatron.rollout import readback

        [found] = self.llm.apply_model(partial(readback.differing, shards=tensors))
        return found

    def sleep(self) -> None:
        """Give back the memory that ``sleep_level`` names."""
        if self.sleep_level:
            self.llm.sleep(self.sleep_level)
            self._asleep = {"weights", "kv_cache"}
        if self.sleep_level == 2:
            self.weight_version = -1

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        if what in self._asleep:
            self.llm.wake_up(tags=[what])
            self._asleep.remove(what)

    def close(self) -> None:
        """Leave vLLM's process groups; call it before the job's own group is destroyed (which vLLM's way would do)."""
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
