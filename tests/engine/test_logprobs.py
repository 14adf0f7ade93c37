"""Log-probs and entropies in pieces from a split head, against torch's log_softmax on the whole vocabulary."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import distributed

TEMPERATURES = [1.0, 0.7]
PIECES = [1, 4 * 4 * 80, 1 << 30]
"""Bytes of logits at a time: one token, a few, all."""


def case(vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(19, 24, generator=generator)
    head = torch.randn(vocab, 24, generator=generator)
    hidden[0] *= 12  # logits beyond 100: exp overflows in fp32 unless the maximum is taken out
    labels = torch.randint(vocab, (19,), generator=generator)
    labels[:4] = torch.tensor([0, vocab // 2, -(-vocab // 2), vocab - 1])  # both ends of both halves
    return {
        "hidden": hidden.to(dtype),
        "head": head.to(dtype),
        "labels": labels,
        "grad": torch.randn(19, generator=generator),
        "entropy_grad": torch.randn(19, generator=generator),
    }


CASES = {
    "odd": case(301, torch.float32),
    # Of five tokens the last of four ranks holds none, only padding.
    "few": case(5, torch.float32),
    "bf16": case(301, torch.bfloat16),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder: Path = tmp_path_factory.mktemp("logprobs") / "job"
    function = "tests.engine.ranks_logprobs:on_slices"
    return distributed.run(4, function, folder, cases=CASES, temperatures=TEMPERATURES, pieces=PIECES)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_log_softmax(
    name: str, degree: int, temperature: float, ranks: list[dict[Any, Any]]
) -> None:
    """Logits near 100 have a last bit of 8e-6 in fp32. In bf16 the product rounds to 8 bits before anything else, as
    it does in transformers and in the sampler; the oracle does the same."""
    given = CASES[name]
    hidden, head = (given[key].clone().requires_grad_() for key in ("hidden", "head"))
    logprobs = ((hidden.float() @ head.float().T).to(hidden.dtype).float() / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, given["labels"][:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    torch.autograd.backward([chosen, entropy], [given["grad"], given["entropy_grad"]])
    near = {"rtol": 1e-5, "atol": 3e-5} if name != "bf16" else {"rtol": 2**-7, "atol": 2**-5}
    for piece in PIECES:
        answers = [rank[name, degree, temperature, piece] for rank in ranks[:degree]]
        for found in answers:
            torch.testing.assert_close(found["logprobs"], chosen.detach(), rtol=1e-6, atol=3e-5)
            torch.testing.assert_close(found["entropy"], entropy.detach(), rtol=1e-6, atol=3e-5)
            torch.testing.assert_close(found["hidden_grad"], hidden.grad, **near)
            assert found["logprobs"].dtype == torch.float32
            assert found["untouched"]
        weight_grad = torch.cat([found["weight_grad"] for found in answers])
        torch.testing.assert_close(weight_grad[: len(head)], head.grad, **near)
        assert not weight_grad[len(head) :].any(), "padding takes no part"


@pytest.mark.parametrize("name", CASES)
def test_the_size_of_the_pieces_changes_no_value(name: str, ranks: list[dict[Any, Any]]) -> None:
    """A row of a product may be summed in another order when there are more rows: one last bit of a logit."""
    for rank in ranks:
        one, few, whole = (rank[name, 2, 0.7, piece] for piece in PIECES)
        for found in (one, few):
            torch.testing.assert_close(found["logprobs"], whole["logprobs"], rtol=1e-6, atol=1e-5)
