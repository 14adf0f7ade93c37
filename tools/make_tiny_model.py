"""Make a tiny, randomly initialised Qwen3 model and its tokenizer as a HF directory. Nothing is downloaded.

    python tools/make_tiny_model.py models/tiny_blank

The tokenizer is a byte-level BPE, so any text goes in and comes back unchanged; it is trained on the words of the
built-in tasks and on the numbers from -99 to 99, which thereby become single tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from spark_megatron.recycle.templates import load_bank

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% else %}" + ASSISTANT + "{{ message['content'] }}" + END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
WORDS = r" ?\\boxed\{| ?-?\d{1,2}| ?[A-Za-z]+:?| ?[^\sA-Za-z\d]|\s+"


def corpus() -> list[str]:
    """Every word that should become one token, often enough to be merged."""
    bank = load_bank("concise")
    parts = (bank.judge_one, bank.judge_pair, bank.reflect)
    words = [t.text for part in parts for t in part.templates]
    words += [text for part in parts for t in part.templates for text in t.layouts.values()]
    numbers = [f"{space}{n}" for n in range(-99, 100) for space in ("", " ")]
    signs = [" + 1 - 1 = 1", "Solve: 1 \\boxed{}", "\\boxed{Yes} \\boxed{No} \\boxed{A} \\boxed{B} (A) (B)"]
    return (words + numbers + signs) * 4


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, extra_special_tokens=[USER, ASSISTANT]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> Qwen3ForCausalLM:
    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory to write; must not exist or be empty")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty: choose another directory")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.out}: Qwen3 with {parameters / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    main()
