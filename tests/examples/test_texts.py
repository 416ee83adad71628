"""Tokenizer stand-in, chat format and documents: none of these needs the model."""

from __future__ import annotations

import pytest

from examples.texts import QUESTIONS, ask, documents
from examples.tokenizer import SYSTEM_PROMPT, ByteTokenizer, chat_prompt

TEXTS = ["", "x = 10\n", "naïve café, 你好 🙂", "\x00\t\r\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_know_the_special_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, ord("a") + 3, 2]
    assert tokenizer.decode([1, ord("a") + 3, 2]) == "a"


def test_ids_past_the_bytes_are_shown_as_numbers() -> None:
    assert ByteTokenizer().decode([258, 259, 49_151]) == "\ufffd<259><49151>"


def test_a_chat_grows_only_at_its_end() -> None:
    first = [{"role": "user", "content": "Hello"}]
    answer = {"role": "assistant", "content": "Hi!"}
    later = [*first, answer, {"role": "user", "content": "Bye"}]
    assert chat_prompt(later).startswith(chat_prompt(first) + "Hi!<|im_end|>\n")


def test_a_chat_without_system_message_gets_the_usual_one() -> None:
    user = {"role": "user", "content": "Hello"}
    given = chat_prompt([{"role": "system", "content": "Be brief."}, user])
    assert given.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello")
    assert chat_prompt([user]) == given.replace("Be brief.", SYSTEM_PROMPT)


@pytest.mark.parametrize("tokens", [200, 1024])
def test_documents_have_the_length_asked_for(tokens: int) -> None:
    tokenizer = ByteTokenizer()
    found = documents(tokenizer, tokens)
    assert len(found) >= 30
    for document in found:
        assert document.tokens == len(tokenizer.encode(document.text))
        assert tokens - 150 <= document.tokens <= tokens
        assert document.text.endswith("\n")


def test_questions_about_one_document_share_its_tokens() -> None:
    tokenizer = ByteTokenizer()
    document = documents(tokenizer, 500)[0]
    prompts = [tokenizer.encode(ask(document, question)) for question in QUESTIONS]
    shared = next(
        place for place, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1
    )
    assert shared > document.tokens
