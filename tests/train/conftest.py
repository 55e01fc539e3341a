"""What the tests of training share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import REPOSITORY
from trainers import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that trainers are forked from; made once, since it costs seconds."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def titan_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a text made of this repository's pages: torchtitan's wheel brings neither."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("assets")
    pages = [page.read_text() for page in sorted((REPOSITORY / "site").glob("*.md"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    marks = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pages, trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": marks[0], "eos_token": marks[1]}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "text").mkdir()
    texts = [text for page in pages for text in page.split("\n\n")]
    (folder / "text" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture
def titan_environment(titan_assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `titan_on_cpu` is, for processes that import it, and what it needs. This one imports it first of all."""
    import titan_on_cpu  # noqa: F401

    monkeypatch.setenv("TITAN_ASSETS", str(titan_assets / "tokenizer"))
    monkeypatch.setenv("TITAN_TEXT", str(titan_assets / "text"))
    monkeypatch.setenv("HF_HOME", str(titan_assets / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
