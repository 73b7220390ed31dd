"""Which models give the same log-probs without the padding of a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpo_ext.batching import Trim
from grpo_ext.compact import TRIMMED_ADAPTERS, TRIMMED_LEFT, find_trim

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
TWO_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
OWN_SIZES = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "deepseek_v3": EXPERTS
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    "falcon": {"new_decoder_architecture": False},
    "falcon_h1": HEADS | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "gemma3_text": HEADS | TWO_KINDS,
    "glm4_moe": HEADS | EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_oss": HEADS | EXPERTS | TWO_KINDS | {"num_local_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": HEADS | {"num_local_experts": 2, "floor_scale": 8, "no_rope_layers": [1, 0]},
    "mistral": {"sliding_window": 8},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "qwen3_5_text": HEADS | LINEAR,
    "qwen3_moe": HEADS | EXPERTS | {"num_experts": 4},
    "qwen3_next": HEADS | EXPERTS | LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32},
}
WIDTH, KEEP = 30, 20


def make(model_type: str, **settings: Any) -> PreTrainedModel:
    """A tiny random model whose large weights make positions matter."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    config = AutoConfig.for_model(model_type, **SIZES | OWN_SIZES.get(model_type, HEADS) | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() > 1 else 1
    return model


def shift(model: PreTrainedModel, left: int, right: int) -> float:
    """How far log-probs move when a batch of two rows gets as many columns of padding."""
    ids = torch.randint(3, 32, (2, WIDTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[1, -5:] = 0

    def logps(left: int, right: int) -> Tensor:
        padded, seen = (torch.nn.functional.pad(tensor, (left, right)) for tensor in (ids, mask))
        with torch.no_grad():
            logits = model(input_ids=padded, attention_mask=seen).logits[:, left : left + WIDTH]
        all_logps = logits[:, -KEEP - 1 : -1].double().log_softmax(dim=-1)
        return all_logps.gather(2, ids[:, -KEEP:, None]).squeeze(2) * mask[:, -KEEP:]

    return (logps(left, right) - logps(0, 0)).abs().max().item()


@pytest.mark.parametrize("model_type", sorted(TRIMMED_LEFT))
def test_padding_does_not_move_the_log_probs(model_type):
    model = make(model_type)
    assert find_trim(model) == Trim(left=True, right=True)
    assert shift(model, 7, 0) <= 1e-5
    assert shift(model, 30, 0) <= 1e-5
    assert shift(model, 0, 25) <= 1e-5


@pytest.mark.parametrize("model_type", ["gpt2", "llama4_text", "recurrent_gemma", "rwkv"])
def test_padding_on_the_left_moves_those_of_others(model_type):
    """So it stays where the type is not on the list; the right side goes."""
    model = make(model_type)
    assert find_trim(model) == Trim(left=False, right=True)
    assert shift(model, 7, 0) > 0.01
    assert shift(model, 0, 25) <= 1e-5


ADAPTERS = {
    "LORA": ("LoraConfig", {}),
    "ADALORA": ("AdaLoraConfig", {"total_step": 1}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "LOHA": ("LoHaConfig", {}),
    "LOKR": ("LoKrConfig", {}),
    "OFT": ("OFTConfig", {"oft_block_size": 8, "r": 0}),
    "VERA": ("VeraConfig", {}),
}


def adapt(peft, name, settings):
    """An adapter of random weights."""
    torch.manual_seed(0)
    model = peft.get_peft_model(make("llama"), getattr(peft, name)(task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


@pytest.mark.parametrize("kind", sorted(TRIMMED_ADAPTERS))
def test_padding_does_not_move_the_log_probs_beside_adapters_of_weights(kind):
    peft = pytest.importorskip("peft")
    name, settings = ADAPTERS[kind]
    model = adapt(peft, name, {"target_modules": ["q_proj", "v_proj"]} | settings)
    assert find_trim(model) == Trim(left=True, right=True)
    assert shift(model, 7, 0) <= 2e-5
    assert shift(model, 0, 25) <= 2e-5


def test_padding_beside_other_adapters_stays():
    peft = pytest.importorskip("peft")
    model = adapt(peft, "AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 2})
    assert find_trim(model) == Trim(left=False, right=True)
    assert shift(model, 7, 0) > 1e-2
    model = adapt(peft, "PromptTuningConfig", {"num_virtual_tokens": 4})
    assert find_trim(model) == Trim(left=False, right=True)


def test_padding_beside_noise_of_its_width_stays():
    assert find_trim(make("llama"), noise=5.0) == Trim(left=False, right=False)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(("model_type", "rope"), [("llama", DYNAMIC), ("phi3", LONG)], ids=["dynamic", "longrope"])
def test_rotary_embeddings_that_read_the_width_keep_all_padding(model_type, rope):
    """Beyond 40 tokens these rotate by other angles, and not only the tokens beyond."""
    lengths = {"max_position_embeddings": 40, "original_max_position_embeddings": 40}
    model = make(model_type, rope_parameters=rope | lengths | {"rope_theta": 1e4}, **lengths)
    assert find_trim(model) == Trim(left=False, right=False)
    assert shift(model, 0, 25) > 1e-3
