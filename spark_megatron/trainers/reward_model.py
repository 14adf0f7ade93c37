"""A reward model in training: it scores rollouts, and learns from pairs and labelled texts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from spark_megatron.algos.preference_loss import comparison_loss
from spark_megatron.data.assistants import Assistant
from spark_megatron.data.comparisons import TermWeights, comparison_lengths, pack_comparisons, term_weights
from spark_megatron.data.packing import partition
from spark_megatron.data.pairs import Pair
from spark_megatron.data.triples import Triple, Triples
from spark_megatron.data.verify_text import encode_verify
from spark_megatron.engine import platform
from spark_megatron.engine.engine import Engine, Memory
from spark_megatron.runtime import gather
from spark_megatron.tracking.hacking import HackingMonitor
from spark_megatron.types import Comparison, Group, Metrics, Task

Probabilities = list[list[float | None]]
"""Per group and rollout the probability of being right; None for a text that the model is too short for."""


@dataclass
class RewardModel:
    """VerifyRM: a model that scores a completion beside the right answer (Cooper, arXiv 2508.05613).

    Comparisons are made in micro-batches of at most ``max_tokens``. ``released`` is what it gives back of the device
    between its turns; hold it ``awake`` around all others of its methods.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    assistant: Assistant
    triples: Triples
    max_tokens: int
    released: Sequence[Memory]
    monitor: HackingMonitor
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = self.engine.hf.max_position_embeddings

    @contextlib.contextmanager
    def awake(self) -> Iterator[Engine]:
        """Its turn: its weights and its optimizer are on the device."""
        self.engine.restore()
        try:
            yield self.engine
        finally:
            for part in self.released:
                self.engine.release(part)

    def probabilities(self, groups: Sequence[Group]) -> Probabilities:
        """sigmoid(score) of every rollout of the groups, which are the same on every rank. A collective."""
        texts = [self._encode(group.task, rollout.text) for group in groups for rollout in group.rollouts]
        fitting = [i for i, text in enumerate(texts) if len(text) <= self.longest]
        plan = partition([len(texts[i]) for i in fitting], self.max_tokens, self.engine.parallel.data)
        mine = plan[self.engine.parallel.data_rank]
        unweighed = TermWeights(0.0, 0.0)
        batches = [pack_comparisons([Comparison(texts[fitting[row]], ()) for row in rows], unweighed) for rows in mine]
        scores = self.engine.scores([batch.to(platform.device()) for batch in batches])
        own = {
            fitting[row]: float(p)
            for rows, values in zip(mine, scores, strict=True)
            for row, p in zip(rows, values.double().sigmoid(), strict=False)  # an empty micro-batch has a score too
        }
        found = {i: p for part in gather(own) for i, p in part.items()}
        order = iter(range(len(texts)))
        return [[found.get(next(order)) for _ in group.rollouts] for group in groups]

    def learn_pairs(self, pairs: Sequence[Pair], anchor: float) -> Metrics:
        """One update that tells the two responses of each pair apart; see ``term_weights`` for ``anchor``.

        A pair that is too long for the model is left out.
        """
        comparisons = [
            Comparison(self._encode(pair.task, pair.right), self._encode(pair.task, pair.wrong)) for pair in pairs
        ]
        return self._learn(comparisons, anchor)

    def learn_labels(self, triples: Sequence[Triple]) -> Metrics:
        """One update on the mean binary cross-entropy of labelled completions."""
        texts = [(encode_verify(self.tokenizer, t.question, t.reference, t.completion), t.label) for t in triples]
        return self._learn([Comparison(text, ()) if label else Comparison((), text) for text, label in texts], 1.0)

    def _learn(self, comparisons: Sequence[Comparison], anchor: float) -> Metrics:
        """The statistics of the update, as means; those of terms that are not there are left out. Nothing is updated
        where nothing fits."""
        fitting = [c for c in comparisons if max(len(c.right), len(c.wrong)) <= self.longest]
        told = {"too_long": float(len(comparisons) - len(fitting))}
        if not fitting:
            return told | {"loss": 0.0}  # without a gradient AdamW would still decay the weights
        weights = term_weights(fitting, anchor)
        plan = partition(comparison_lengths(fitting), self.max_tokens, self.engine.parallel.data)
        mine = plan[self.engine.parallel.data_rank]
        batches = [pack_comparisons([fitting[row] for row in rows], weights).to(platform.device()) for rows in mine]
        stats = self.engine.update(batches, comparison_loss, temperature=1.0)
        means = {
            f"{name}_{what}": stats[f"{name}_{key}"] / stats[f"{name}s"]
            for name in ("pair", "label")
            for what, key in (("loss", "loss"), ("accuracy", "right"))
            if stats[f"{name}s"]
        }
        kept = {name: stats[name] for name in ("loss", "grad_norm", "lr", "skipped")}
        return told | kept | means

    def _encode(self, task: Task, completion: str) -> tuple[int, ...]:
        return encode_verify(self.tokenizer, task.question, task.answer, completion)
