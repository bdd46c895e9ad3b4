"""What is exported loads in transformers, without network and without us, and gives the same logits and ids."""

import json

import pytest
import torch

from diloco.runs.presets import Shape
from diloco.train.data.tokenizer import BPE, Bytes, load_tokenizer
from diloco.train.model import Decoder, build, export

pytestmark = pytest.mark.slow  # importing transformers takes seconds
TEXT = "def f(x):\n\treturn 'naïve 你好 🙂' <|endoftext|>  \x00\x7f\r\n"


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def _decoder(tied, theta=10_000.0):
    model = Decoder(Shape(layers=2, width=32, heads=2, mlp=48, vocabulary=257, tied=tied), 64, theta)
    model.initialize(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms that are not all ones, so that a swapped one would show
                parameter.normal_(1.0, 0.1, generator=torch.Generator().manual_seed(sum(name.encode())))
            else:
                parameter.mul_(5)
    return model


@pytest.mark.parametrize(("tied", "theta"), [(True, 10_000.0), (False, 500.0)])
def test_transformers_gives_the_same_logits(tmp_path, tied, theta, transformers):
    model = _decoder(tied, theta)
    export(model, Bytes(), tmp_path)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, nothing left over
    tokens = torch.randint(0, 257, (3, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, other = model(tokens), theirs(input_ids=tokens).logits
    assert ours.abs().max() > 1
    assert (ours - other).abs().max() < 1e-4
    assert theirs.config.eos_token_id == 256 and theirs.config.max_position_embeddings == 64


def test_bf16_and_tied_weights_are_written_once_and_as_such(tmp_path, transformers):
    from safetensors import safe_open

    model = _decoder(tied=True).bfloat16()
    export(model, Bytes(), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name, _ in model.named_parameters()}
        assert file.metadata() == {"format": "pt"}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_the_exported_tokenizer_gives_our_ids_on_any_text(tmp_path, transformers, name):
    words = [TEXT.encode() * 20, b"the cat sat on the mat " * 50]
    ours = Bytes() if name == "bytes" else BPE.train(words, 300)
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    everything = "".join(chr(c) for c in range(0x3000) if not 0xD800 <= c < 0xE000)
    for text in (TEXT, everything, "the mat 日本", "", " ", " a  b ", "\n\n", "<|endoftext|>"):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ids == ours.encode(text.encode()).tolist()
        assert theirs.decode(ids) == text == ours.decode(ids)
    assert theirs.eos_token_id == ours.end == load_tokenizer(str(tmp_path)).end
    assert len(theirs) == ours.vocabulary


def test_a_hugging_face_model_is_exported_by_its_own_library(tmp_path, transformers):
    first, second = tmp_path / "first", tmp_path / "second"
    export(_decoder(tied=True), Bytes(), first)
    model = build(f"hf:{first}", 257, 32, seed=0)
    export(model, Bytes(), second)
    again = build(f"hf:{second}", 257, 32, seed=0)
    tokens = torch.arange(32)[None]
    assert torch.equal(model(tokens), again(tokens))
    assert transformers.AutoTokenizer.from_pretrained(second)("ab").input_ids == [97, 98]
