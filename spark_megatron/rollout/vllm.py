"""The vLLM backend: one engine per rank (or per group of ranks), inside the training job's own processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from spark_megatron.rollout.base import Request
from spark_megatron.runtime import rng_preserved
from spark_megatron.types import Rollout


def _unique_distributed_args(_executor: Any) -> tuple[str, int, int]:
    """vLLM's ``(init method, rank, local rank)`` with a job-unique init method.

    vLLM names its shared-memory segments after the init method, which is "env://" for every torchrun job: two jobs on
    one host would share them. The process group exists already, so the string is only ever used for that name.
    """
    job = f"{os.environ['MASTER_PORT']}-{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}".replace("/", "-")
    return f"env://{job}", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])


class VLLMSampler:
    """vLLM through its external launcher: the ranks of the running job are its workers.

    The engine starts with random weights of the right shape; the real ones come from the trainer before the first
    request (``start_update``, ``load``..., ``finish_update``).

    Args:
        model: HF directory with config.json (and the tokenizer); its weights are not read.
        tokenizer: decodes responses.
        dtype: "fp32" or "bf16".
        stop_tokens: ids that end a response (kept in its tokens, not in its text).
        tensor_parallel: ranks per engine; ranks of one engine are consecutive.
        max_model_len: prompt and response together, in tokens.
        max_sequences: sequences in one batch.
        max_batched_tokens: tokens in one batch (raised to ``max_model_len`` where that is longer).
        kv_cache_mb: memory for keys and values.
        prefix_cache: reuse the keys and values of common prompt beginnings.
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
    ) -> None:
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        from spark_megatron.rollout import weight_transfer

        weight_transfer.register()
        ExecutorWithExternalLauncher._distributed_args = _unique_distributed_args
        with rng_preserved():
            self.llm = LLM(
                model=model,
                dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
                load_format="dummy",
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
            )
            self.llm.init_weight_transfer_engine({"init_info": {}})
        self.tokenizer, self.stop_tokens = tokenizer, list(stop_tokens)
        self.weight_version = -1
        self.replica = dist.get_rank() // tensor_parallel
        self.replicas = dist.get_world_size() // tensor_parallel

    def generate(self, requests: Sequence[Request]) -> list[tuple[Rollout, ...]]:
        """The continuations of each request; RuntimeError while no weights were loaded."""
        from vllm import SamplingParams

        if self.weight_version < 0:
            raise RuntimeError("the sampler holds no weights yet: hand them over before the first request")
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
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [tuple(self._rollout(o) for o in sorted(out.outputs, key=lambda o: o.index)) for out in outputs]

    def _rollout(self, output: Any) -> Rollout:
        tokens = tuple(output.token_ids)
        return Rollout(
            tokens=tokens,
            logprobs=tuple(output.logprobs.logprobs[start] for start in output.logprobs.start_indices),
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            finish="length" if output.finish_reason == "length" else "stop",
            weight_version=self.weight_version,
        )

    def start_update(self) -> None:
        self.llm.start_weight_update()

    def load(self, bucket: list[tuple[str, Tensor]]) -> None:
        self.llm.update_weights({"update_info": {"bucket": bucket}})

    def finish_update(self, version: int) -> None:
        """End the update; cached keys and values of the old weights are dropped."""
        self.llm.finish_weight_update(str(version))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not drop its prefix cache after a weight update: requests are still running")
        self.weight_version = version

    def close(self) -> None:
        """Leave vLLM's process groups; call it before the job's own group is destroyed (which vLLM's way would do)."""
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
