"""Models of transformers under recipes: they train, save, load and go on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.io.stored import TARGETS

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' and torch's own code

VOCAB = 96
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 64, "num_hidden_layers": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LLAMA = {**TEXT, **SIZES, "num_key_value_heads": 2}


def build(name: str, **wider: int) -> Any:
    """A tiny model with random weights; its dropout is off, so that runs compare."""
    torch.manual_seed(0)
    t = transformers
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**LLAMA | wider))
    if name == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**LLAMA | {"head_dim": 16} | wider))
    if name == "gpt2":
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = t.GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=2, n_head=4, **quiet
        )
        return t.GPT2LMHeadModel(config)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "vit":
        config = t.ViTConfig(
            **SIZES, num_hidden_layers=2, image_size=32, patch_size=8, num_labels=4, **quiet
        )
        return t.ViTForImageClassification(config)
    if name == "resnet":  # ResNet-18, narrow
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 2, 2]}
        config = t.ResNetConfig(**sizes, layer_type="basic", num_labels=4)
        return t.ResNetForImageClassification(config)
    return t.BertForMaskedLM(t.BertConfig(**TEXT, **SIZES, **quiet))


def batch(name: str, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step % 2)
    if name in ("vit", "resnet"):
        images = torch.randn(4, 3, 32, 32, generator=generator)
        return {"pixel_values": images, "labels": torch.arange(4)}
    tokens = torch.randint(0, VOCAB, (4, 32), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def optimizer_of(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), 3e-3)


def train(name: str, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(**batch(name, step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


MODELS = ("llama", "qwen3", "gpt2", "vit", "bert", "resnet")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_saves_loads_and_goes_on(name: str, tmp_path: Path) -> None:
    model = ext.quantize_(build(name), "mxfp4", seed=1)
    blocks = [m for m in ext.quantized_modules(model).values() if m.quant_clock is not None]
    assert len(blocks) >= 6
    optimizer = optimizer_of(model)
    losses = train(name, model, optimizer, range(20))
    assert losses[-1] < 0.8 * losses[0]
    model.save_pretrained(tmp_path)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")

    other = ext.quantize_(build(name), "mxfp4", seed=1)
    state, rest = torch.load(tmp_path / "state.pt")
    other.load_state_dict(state)
    again = optimizer_of(other)
    again.load_state_dict(rest)

    loaded = type(model).from_pretrained(tmp_path).train()  # plain, without clocks
    ext.quantize_(loaded, "mxfp4", seed=1, step=20)
    third = optimizer_of(loaded)
    third.load_state_dict(torch.load(tmp_path / "state.pt")[1])

    expected = train(name, model, optimizer, range(20, 24))
    assert train(name, other, again, range(20, 24)) == expected
    assert train(name, loaded, third, range(20, 24)) == expected


def test_roles_are_those_of_a_language_model() -> None:
    model = ext.quantize_(build("llama"), "mxfp4")
    layers = {p: m.quant_layer.context.layer for p, m in ext.quantized_modules(model).items()}
    narrow = [path for path, layer in layers.items() if layer.fprop.unquantized]
    last = "model.layers.1.mlp.down_proj"
    assert narrow == ["model.layers.0.self_attn.q_proj", last, "lm_head"]


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: value[index % 4] for key, value in batch("llama", index).items()}


def test_trainer_runs_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")

    def trainer(folder: Path, model: Any) -> Any:
        options = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=8, per_device_train_batch_size=4, save_steps=4,
            learning_rate=3e-3, report_to=[], use_cpu=True, seed=0, logging_steps=1,
            gradient_accumulation_steps=2, disable_tqdm=True,
        )  # fmt: skip
        return transformers.Trainer(model=model, args=options, train_dataset=Tokens())

    model = ext.quantize_(build("llama"), "mxfp4", seed=1)
    run = trainer(tmp_path, model)
    run.train()
    losses = [row["loss"] for row in run.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    other = ext.quantize_(build("llama"), "mxfp4", seed=1)
    trainer(tmp_path, other).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_accelerate_runs_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model = ext.quantize_(build("llama"), "mxfp4", seed=1)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(**batch("llama", step % 2 * 2)).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    layer = accelerator.unwrap_model(model).model.layers[0].mlp.up_proj
    assert int(layer.quant_clock) == 6


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gguf_files_are_those_of_extensors_own_model(name: str, tmp_path: Path) -> None:
    """Names, codes and scales in every GGUF layout, up to blocks of 256."""
    wide = build(name, hidden_size=256, intermediate_size=256, head_dim=64)
    model = ext.quantize_(wide, "mxfp4", seed=1)
    model.save_pretrained(tmp_path / "hub")
    own, files = et.models.from_pretrained(tmp_path / "hub"), []
    for layout in (each for each, row in TARGETS.items() if row.container == "gguf"):
        files = [tmp_path / f"{who}-{layout}.gguf" for who in ("torch", "own")]
        ext.export(model, files[0], layout)
        own.save_pretrained(files[1], layout=layout)
        found, expected = (et.load(file) for file in files)
        assert found.keys() == expected.keys(), layout
        for key, tensor in expected.items():
            assert repr(found[key].dtype) == repr(tensor.dtype), (layout, key)
            same = [t.to("float32").numpy() for t in (found[key], tensor)]
            np.testing.assert_array_equal(*same, f"{layout}: {key}")
