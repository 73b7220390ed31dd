"""What a trainer needs so that a feature of TRL runs offline: stubs of engines, and tiny random models."""

import inspect
import string
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _training import ROWS
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    ProcessorMixin,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from trl import GRPOTrainer, chat_template_utils
from trl.trainer import grpo_trainer

from grpo_ext.testbed import POLICY_PATH

CHATS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{number}+2="}]} for number in range(16)])
TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"first": 1, "second": 2}}\n</tool_call>'
IMAGE_TOKENS = {"<|image_pad|>": 25, "<|video_pad|>": 26}
IMAGE_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<|image_pad|>' }}{% endfor %}{% endfor %}"
)


def sample(trainer: GRPOTrainer, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Completions of the trainer's model, up to their end of sequence, and the log-probs they were sampled with."""
    longest = max(map(len, prompt_ids))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompt_ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompt_ids])
    with torch.no_grad():
        output = trainer.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=trainer.temperature,
            max_new_tokens=trainer.max_completion_length,
            return_dict_in_generate=True,
            output_logits=True,
        )
    completions = output.sequences[:, longest:]
    logits = torch.stack(output.logits, dim=1) / trainer.temperature
    logps = logits.log_softmax(dim=-1).gather(2, completions.unsqueeze(2)).squeeze(2)
    lengths = [row.index(1) + 1 if 1 in row else len(row) for row in completions.tolist()]
    return (
        [row[:length] for row, length in zip(completions.tolist(), lengths, strict=True)],
        [row[:length] for row, length in zip(logps.tolist(), lengths, strict=True)],
    )


class Engine:
    """In the place of TRL's vLLM engine: as there, prompts come in blocks of `num_generations` equal ones."""

    def __init__(self, model: Any, **settings: Any) -> None:
        self.model, self.num_syncs = model, 0
        self.temperature, self.max_completion_length = settings["temperature"], settings["max_completion_length"]
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )

    def sync_weights(self) -> None:
        self.num_syncs += 1

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, **kwargs: Any) -> tuple:
        assert prompts == [prompt for prompt in prompts[::num_generations] for _ in range(num_generations)]
        completions, logps = sample(self, prompts)
        return prompts, completions, [[[logp - 0.1] for logp in row] for row in logps], None


def engine(monkeypatch: Any) -> dict[str, Any]:
    """vLLM is not installed; TRL's own path up to the engine is what runs."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Engine)
    monkeypatch.setattr(grpo_trainer, "is_vllm_available", lambda *args: True, raising=False)
    return {}


def rollouts(monkeypatch: Any, has_logprobs: bool, has_mask: bool) -> dict[str, Any]:
    """A rollout function; with a mask, two tokens from outside follow what the model said."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def roll(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        completions, logps = sample(trainer, prompt_ids)
        output = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logps if has_logprobs else None}
        if has_mask:
            output["env_mask"] = [[1] * len(row) + [0, 0] for row in completions]
            output["completion_ids"] = [[*row, 5, 6] for row in completions]
            output["logprobs"] = [[*row, 0.0, 0.0] for row in logps] if has_logprobs else None
        return output

    return {"rollout_func": roll}


def even_answer(completions: list[list[dict]], **kwargs: Any) -> list[float]:
    """1 where the last message is an even number."""
    return [float(int(messages[-1]["content"]) % 2 == 0) for messages in completions]


def add(first: int, second: int) -> int:
    """
    Adds.

    Args:
        first: One number.
        second: The other.
    """
    return first + second


def tools(monkeypatch: Any) -> dict[str, Any]:
    """Half of the completions call a tool, then answer; only the sampling of tokens is a stub."""
    if not hasattr(grpo_trainer, "_SUPPORTS_RESPONSE_TEMPLATE"):
        pytest.importorskip("jmespath", reason="this version of TRL parses tool calls with jmespath")
    tokenizer = AutoTokenizer.from_pretrained(str(POLICY_PATH))
    tokenizer.add_tokens(list(string.printable))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template

    def speak(trainer: GRPOTrainer, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
        has_answers = ["<tool_response>" in tokenizer.decode(ids) for ids in prompt_ids]
        texts = [str(number) for number in torch.randint(10, (len(prompt_ids),)).tolist()]
        calls = [not has and bool(coin) for has, coin in zip(has_answers, torch.randint(2, (len(texts),)), strict=True)]
        texts = [(TOOL_CALL if call else text) + "<|im_end|>" for call, text in zip(calls, texts, strict=True)]
        return [tokenizer(text)["input_ids"] for text in texts], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", speak)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    chat = {"processing_class": tokenizer, "train_dataset": CHATS, "reward_funcs": [even_answer]}
    return {"model": LlamaForCausalLM(config), "tools": [add], **chat}


class Calculator:
    """An environment that owns its reward: 1 where it was asked to add."""

    def reset(self, **row: Any) -> None:
        self.num_calls = 0

    def add(self, first: int, second: int) -> int:
        """
        Adds.

        Args:
            first: One number.
            second: The other.
        """
        self.num_calls += 1
        return first + second

    def get_reward(self) -> float:
        return float(self.num_calls > 0)


def environment(monkeypatch: Any) -> dict[str, Any]:
    """The tools of an environment, and no reward function beside it."""
    if "get_reward" not in inspect.getsource(GRPOTrainer.__init__):
        pytest.skip("this version of TRL has no rewards of environments")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    return tools(monkeypatch) | {"tools": None, "reward_funcs": None, "environment_factory": Calculator}


class ImageProcessor(Qwen2VLProcessor):
    """Qwen2-VL's processor without its video half, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = IMAGE_TOKENS
        self.image_token_id, self.video_token_id = IMAGE_TOKENS.values()
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def images(monkeypatch: Any) -> dict[str, Any]:
    """A tiny random Qwen2-VL, whose image rows are not aligned with the rows of the batch."""
    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(str(POLICY_PATH))
    tokenizer.add_tokens(list(IMAGE_TOKENS), special_tokens=True)
    assert tokenizer.get_added_vocab().items() >= IMAGE_TOKENS.items()
    pixels = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 16, "longest_edge": 1024}, patch_size=4, temporal_patch_size=1
    )
    processor = ImageProcessor(pixels, tokenizer, chat_template=IMAGE_TEMPLATE)
    width = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 32}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    special = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = Qwen2VLConfig(
        text_config={"vocab_size": len(tokenizer), "num_hidden_layers": 1, "rope_parameters": rope} | width | special,
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 1,
            "patch_size": 4,
            "temporal_patch_size": 1,
            "mlp_ratio": 2,
        },
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = 1
    rows = [
        {"prompt": chat, "image": image.new("RGB", (8 + 8 * (place % 3), 8), (16 * place, 0, 200))}
        for place, chat in enumerate(CHATS["prompt"])
    ]
    return {"model": model, "processing_class": processor, "train_dataset": Dataset.from_list(rows)}


def lora(monkeypatch: Any) -> dict[str, Any]:
    """A new adapter, made by TRL."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}


def trained_adapter(monkeypatch: Any) -> dict[str, Any]:
    """An adapter that already differs from the base model; TRL keeps a copy of it as the reference."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(str(POLICY_PATH)), lora(monkeypatch)["peft_config"])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return {"model": model, "train_dataset": Dataset.from_list(ROWS)}
