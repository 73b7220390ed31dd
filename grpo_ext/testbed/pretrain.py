"""Trains the shipped policy: `python -m grpo_ext.testbed.pretrain` (about half an hour on two cores)."""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_ext.data import INSTRUCTION
from grpo_ext.testbed import POLICY_PATH
from grpo_ext.testbed.arithmetic import demonstrate

LEVELS, SAMPLING = (1, 2, 3, 4, 5), (1, 3, 3, 3, 2)
"""How often each level is demonstrated."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per digit, sign or word; the instruction of the prompt template is a single token."""
    words = ["What", " is", "\\boxed{", "}", "+", "-", "*", "=", "?", "\n", " ", *"0123456789"]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_tokens([AddedToken(INSTRUCTION, normalized=False)])
    pattern = Regex(r"\\boxed\{| ?[A-Za-z]+|.|\n")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Four layers, 0.7 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def make_batch(
    tokenizer: PreTrainedTokenizerFast, batch_size: int, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) and labels (B, T); only the solution is learned, -100 elsewhere."""
    rows, labels = [], []
    for _ in range(batch_size):
        problem, solution = demonstrate(rng.choices(LEVELS, SAMPLING)[0], rng)
        prompt = tokenizer(f"{problem}\n{INSTRUCTION}\n")["input_ids"]
        answer = [*tokenizer(solution)["input_ids"], tokenizer.eos_token_id]
        rows.append(prompt + answer)
        labels.append([-100] * len(prompt) + answer)
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    targets = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
    return ids, targets


def main() -> None:
    """Imitates the demonstrations and saves model and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=POLICY_PATH)
    parser.add_argument("--num_steps", type=int, default=3000)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, total_steps=args.num_steps, pct_start=0.05
    )
    progress = tqdm(range(args.num_steps), desc="pretrain")
    for _ in progress:
        ids, targets = make_batch(tokenizer, args.batch_size, rng)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
