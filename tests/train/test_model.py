"""The decoder: sizes, the loss pair, seeds, samples, and the errors of `build`. test_export compares its logits."""

import math
from itertools import islice

import pytest
import torch
import torch.nn.functional as F

from diloco.errors import ConfigError
from diloco.runs.config import TrainConfig
from diloco.runs.presets import PRESETS, Shape
from diloco.train import settings
from diloco.train.model import Decoder, Pretrained, build, continuation, loss_of

SMALL = Shape(layers=2, width=32, heads=2, mlp=48, vocabulary=61)
PAPER = {"35m": 35.3, "100m": 88.3, "200m": 183.8, "300m": 335.9, "500m": 558.8, "1b": 1273.0, "4b": 4175.0}


def _small():
    model = Decoder(SMALL, 16)
    model.initialize(torch.Generator().manual_seed(0))
    return model


def _tokens(*size, seed=0, vocabulary=61):
    return torch.randint(0, vocabulary, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PAPER)
def test_the_presets_have_as_many_parameters_as_in_the_paper(name):
    with torch.device("meta"):
        model = Decoder(PRESETS[name], 1024)
    count = sum(p.numel() for p in model.parameters())
    assert count == PRESETS[name].parameters
    assert count / 1e6 == pytest.approx(PAPER[name], rel=2e-3)


def test_the_loss_and_its_gradient_are_those_of_cross_entropy_plus_z_loss():
    logits = 3 * torch.randn(4, 7, 61, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    targets = _tokens(4, 7)
    targets[1, 2:5] = -100
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    z = logits.logsumexp(-1)[targets != -100].square().mean()
    result, plain = loss_of(logits, targets), cross_entropy + 1e-4 * z
    torch.testing.assert_close(result.cross_entropy, cross_entropy.detach())
    torch.testing.assert_close(result.loss, plain)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (result.loss, plain)]
    torch.testing.assert_close(*gradients)
    assert (z > 1).item()  # otherwise the comparison would not notice it
    assert loss_of(torch.randn(1, 3, 5), torch.full((1, 3), -100)).loss == 0  # without targets


def test_the_initial_weights_are_as_documented_and_know_nothing():
    """The loss is log(vocabulary): the weights are small enough."""
    model = build("tiny", 257, 64, seed=0)
    weights = dict(model.named_parameters())
    residual = 0.02 / math.sqrt(2 * PRESETS["tiny"].layers)
    for name, std in {"q_proj": 0.02, "gate_proj": 0.02, "o_proj": residual, "down_proj": residual}.items():
        measured = [w.std().item() for n, w in weights.items() if f".{name}." in n]
        assert measured and all(s == pytest.approx(std, rel=0.05) for s in measured), name
    assert all((w == 1).all() for n, w in weights.items() if "norm" in n)
    pair = model(_tokens(4, 64, vocabulary=257), _tokens(4, 64, seed=1, vocabulary=257))
    assert float(pair.cross_entropy) == pytest.approx(math.log(257), abs=0.1)


def test_the_seed_decides_the_weights_and_the_global_random_numbers_do_not():
    torch.manual_seed(1)
    first = build("tiny", 257, 64, seed=5).state_dict()
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    again, other = build("tiny", 257, 64, seed=5).state_dict(), build("tiny", 257, 64, seed=6).state_dict()
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_autocast_and_bf16_weights_give_nearly_the_same():
    model, tokens = _small(), _tokens(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(tokens, tokens).loss
    assert cast.dtype == torch.float32
    exact = model(tokens, tokens).loss
    torch.testing.assert_close(cast, exact, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(model.bfloat16()(tokens, tokens).loss, exact, rtol=1e-2, atol=1e-2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_hugging_face_model_has_the_same_contract(llama):
    model, tokens = build(f"hf:{llama}", 61, 16, seed=0), _tokens(2, 16)
    assert isinstance(model, Pretrained) and model.training
    logits = model(tokens)
    torch.testing.assert_close(model(tokens, tokens), loss_of(logits, tokens))
    torch.testing.assert_close(logits, model.network(input_ids=tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "context", "text"),
    [(62, 16, "61 embeddings, but the tokenizer has 62"), (61, 33, "at most 32 tokens: lower --context 33")],
)
def test_a_hugging_face_model_that_does_not_fit_is_refused(llama, vocabulary, context, text):
    with pytest.raises(ConfigError, match=text):
        build(f"hf:{llama}", vocabulary, context, seed=0)
    config = TrainConfig(model=f"hf:{llama}", tokenizer=f"train:{vocabulary}", context=context)
    with pytest.raises(ConfigError, match=text):
        settings.outline(config, 2)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_cached_keys_and_values_give_the_tokens_of_the_whole_window(llama, temperature):
    cpu = torch.device("cpu")
    for model in (build("nano", 61, 24, seed=3).eval(), build(f"hf:{llama}", 61, 24, seed=0).eval()):
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.dim() > 1:
                parameter.data *= 20  # untrained layers hardly change what comes next
        generator, window, expected = torch.Generator().manual_seed(5), [1, 2, 3], []
        with torch.no_grad():
            for _ in range(40):
                logits = model(torch.tensor([window]))[0, -1]
                shares = (logits / temperature).softmax(0) if temperature else None
                token = logits.argmax() if shares is None else torch.multinomial(shares, 1, generator=generator)
                expected.append(int(token))
                window = [*window, int(token)][-24:]
        counted = []
        model.register_forward_pre_hook(lambda _, args, counted=counted: counted.append(args[0].shape[1]))
        tokens = list(islice(continuation(model, [1, 2, 3], 24, cpu, temperature, seed=5), 40))
        assert tokens == expected and len(set(tokens)) > 5
        assert counted == [3, *[1] * 21, *[24] * 18]


@pytest.mark.slow
def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="the folder or the hub name") as caught:
        build(f"hf:{tmp_path}", 61, 16, seed=0)
    assert "\n" not in str(caught.value)
