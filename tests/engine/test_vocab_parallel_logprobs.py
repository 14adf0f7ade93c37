"""Log-probs from logits split over two ranks, against torch's log_softmax on the whole vocabulary."""

from typing import Any

import pytest
import torch

from tests import distributed

VOCAB, COLUMNS = 301, 304
TEMPERATURES = [1.0, 0.7]


def case(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    full = 4 * torch.randn(2, 9, COLUMNS, generator=generator)
    full[0, 0] += 100  # exp overflows in fp32 unless the maximum is taken out
    full[..., VOCAB:] = 1e4  # padding that would win every softmax
    labels = torch.randint(VOCAB, (2, 9), generator=generator)
    labels[0, :4] = torch.tensor([0, 151, 152, 300])  # both ends of both slices
    return {"full": full.to(dtype), "labels": labels, "grad": torch.randn(2, 9, generator=generator)}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[Any]]:
    given = case(request.param)
    folder = tmp_path_factory.mktemp("logprobs") / "job"
    function = "tests.engine.ranks_logprobs:on_slices"
    return given, distributed.run(2, function, folder, vocab_size=VOCAB, temperatures=TEMPERATURES, **given)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_values_and_gradient_are_those_of_log_softmax(
    temperature: float, answers: tuple[dict[str, Any], list[Any]]
) -> None:
    """Logits near 140 have a last bit of 1.5e-5 in fp32. bf16 logits are exact there: only their gradient rounds."""
    given, ranks = answers
    full = given["full"].float().clone().requires_grad_()
    logprobs = (full[..., :VOCAB] / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, given["labels"].unsqueeze(-1)).squeeze(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
    chosen.backward(given["grad"])
    fp32 = given["full"].dtype == torch.float32
    for rank in ranks:
        found = rank[temperature]
        torch.testing.assert_close(found["logprobs"], chosen.detach(), rtol=1e-6, atol=2e-5)
        torch.testing.assert_close(found["entropy"], entropy, rtol=1e-6, atol=2e-5)
        assert found["logprobs"].dtype == torch.float32
    found_grad = torch.cat([rank[temperature]["grad"] for rank in ranks], -1)
    assert found_grad.dtype == given["full"].dtype
    torch.testing.assert_close(found_grad.float(), full.grad, rtol=1e-5 if fp32 else 2**-8, atol=1e-5)
    assert not found_grad[..., VOCAB:].any(), "padding takes no part"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logits_are_left_as_they_were(temperature: float, answers: tuple[dict[str, Any], list[Any]]) -> None:
    """megatron-core's own vocabulary-parallel loss overwrites fp32 logits that the graph may still need."""
    for rank in answers[1]:
        assert rank[temperature]["untouched"]
        assert not rank[temperature]["entropy_has_grad"]
