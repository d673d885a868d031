"""The package on CUDA tensors. The kernels' own grid is the C tests' (make test-gpu); here is what lies between PyTorch and
them: streams, devices, graphs, autograd, torch.compile, every way into C. One run takes a minute or two, most of it compiling.

    make test-python-gpu        or, where the package is installed,        python3 -m pytest python/tests/test_cuda.py

FLASHATTN_TEST_DEVICE=cpu runs what needs no GPU on the CPU, to try the tests themselves.
"""

import os
import threading

import attention_math as math_
import flashattn
import pytest
import test_clients
import test_float8
import test_interface
import test_kvcache
import test_masks
import test_parity
import test_passes
import test_ring
import test_sdpa
import test_torch
import test_variants
import torch
from flashattn import _native, interface, interface3, sdpa, torch_ops

DEVICE = os.environ.get("FLASHATTN_TEST_DEVICE", "cuda")
GPU = DEVICE == "cuda"
pytestmark = [pytest.mark.skipif(GPU and not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
              pytest.mark.filterwarnings("ignore:.*deterministic")]
needs_gpu = pytest.mark.skipif(not GPU, reason="streams, graphs and devices are a GPU's")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def poisoned():
    """Everything is made on the device, and what PyTorch hands out uninitialised is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.device(DEVICE):
        assert torch.empty(7).new_empty(5).isnan().all()
        yield
    torch.use_deterministic_algorithms(before)


def test_the_device_says_what_it_is():
    info = flashattn.device_info(_native.CUDA if GPU else _native.CPU)
    assert info["isa"].startswith("sm_") == GPU and info["num_cores"] > 0
    if GPU:
        assert info["name"] == torch.cuda.get_device_name()


# ---- answers, by the rule of the CPU's tests: float64, twice or three times plain attention's own error ----


@pytest.mark.parametrize("dtype, d, mask, pair", [
    (BF16, 64, "causal", (113, 203)), (BF16, 128, "none", (512, 256)), (BF16, 256, "causal", (257, 300)),
    (BF16, 59, "local", (127, 513)), (F16, 128, "causal", (1023, 1024)), (F16, 40, "none", (3, 799)),
    (F32, 64, "causal", (1024, 1023)), (F32, 128, "none", (1, 147)), (F32, 111, "local", (113, 203))])
def test_both_passes_against_float64(dtype, d, mask, pair):
    q, k, v = test_parity.inputs(2, *pair, 4, 2, d, dtype)
    options = dict(causal=mask == "causal", window_size=(pair[1] // 3, 31) if mask == "local" else (-1, -1))
    out = flashattn.flash_attn_func(q, k, v, **options)
    assert out.device == q.device and out.dtype == dtype
    test_parity.check(q, k, v, out, math_.visible(*pair, options["causal"], options["window_size"]))
    with torch.no_grad():
        again, lse, _ = flashattn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
        truth = math_.attention(q, k, v, math_.visible(*pair, options["causal"], options["window_size"]))[1]
    assert torch.equal(again, out) and torch.allclose(lse.double(), truth, atol=1e-5, rtol=1e-6)


def test_sixteen_queries_on_a_hundred_thousand_keys():
    test_parity.test_sixteen_queries_on_a_hundred_thousand_keys()


@pytest.mark.parametrize("softcap, alibi", [(15.0, None), (0.0, "batch")])
def test_softcap_and_alibi(softcap, alibi):
    test_parity.test_gqa_softcap_alibi((6, 2), softcap, alibi)


def test_bias_and_sinks_have_gradients():
    q, k, v = test_parity.inputs(2, 33, 65, 4, 4, 64, F32)
    bias, sinks = torch.randn(1, 4, 33, 65, requires_grad=True), torch.randn(4, requires_grad=True)
    out, lse, _ = torch_ops.attention(q, k, v, bias=bias, sinks=sinks)
    scores = torch.einsum("bihd,bjhd->bhij", q.double() * 64**-0.5, k.double()) + bias.double()
    wide = torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(2, 4, 33, 1)], -1)
    expected = torch.einsum("bhij,bjhd->bihd", wide.softmax(-1)[..., :-1], v.double())
    assert (out - expected).abs().max() < 1e-5 and torch.allclose(lse.double(), wide.logsumexp(-1), atol=1e-5)
    dout, leaves = torch.randn_like(out), (q, k, v, bias, sinks)
    for ours, truth in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout.double())):
        assert (ours - truth).abs().max() < 2e-5 * max(1, truth.abs().max())


@pytest.mark.parametrize("mask", ["causal"])
def test_dropout_is_the_formula_with_the_pairs_that_it_drops(mask):
    test_parity.test_dropout_is_the_formula_with_the_pairs_that_it_drops(mask, BF16)


def test_dropout_drops_the_cpus_pairs():
    leaves = [t.requires_grad_() for t in torch.randn(3, 2, 100, 2, 64, dtype=F32)]
    runs = {}
    for device in ("cpu", DEVICE):
        own = [t.detach().to(device).requires_grad_() for t in leaves]
        torch.manual_seed(7)
        out = flashattn.flash_attn_func(*own, dropout_p=0.3, causal=True)
        runs[device] = [out, *torch.autograd.grad(out.square().sum(), own)]
    for ours, expected in zip(runs[DEVICE], runs["cpu"]):
        # gradients of a row with one pair cancel to roundings of their terms; a pair dropped on one side only is seen at 0.1
        assert torch.allclose(ours.cpu(), expected, atol=1e-4, rtol=2e-5)
    test_parity.test_dropout_drops_p_and_both_passes_agree()


@pytest.mark.parametrize("lengths", [[(128, 128), (1, 77), (200, 13)], [(0, 5), (17, 0), (33, 40)], [(0, 0), (0, 0)]], ids=str)
def test_varlen_is_each_sequence_alone(lengths):
    test_parity.test_varlen_is_each_sequence_alone(lengths, True)


def test_seqused_shortens_each_sequence():
    cu = torch.tensor([0, 10, 24], dtype=torch.int32)
    used = torch.tensor([7, 0], dtype=torch.int32)
    q, k, v = torch.randn(3, 24, 4, 64, dtype=BF16)
    out, lse, _ = torch_ops.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_k=used, max_seqlen_q=14, max_seqlen_k=14)
    alone = flashattn.flash_attn_func(*(t[None, a:b] for t, a, b in ((q, 0, 10), (k, 0, 7), (v, 0, 7))))
    assert torch.allclose(out[:10].float(), alone[0].float(), atol=1e-2)
    assert (out[10:] == 0).all() and torch.isneginf(lse[:, 10:]).all()


# ---- what autograd, packing and strides make of it ----


def test_packed_forms_are_the_plain_one():
    test_parity.test_packed_forms_are_the_plain_one()


@pytest.mark.parametrize("kind", ["qkv", "varlen kv"])
def test_gradients_of_packed_tensors_are_those_of_their_parts(kind):
    test_torch.test_gradients_of_packed_tensors_are_those_of_their_parts(kind)


def test_gradients_of_views_that_are_not_contiguous():
    test_parity.test_gradients_of_views_that_are_not_contiguous()


@pytest.mark.parametrize("name, layout", [("plain", "heads_first"), ("dropout", "packed"), ("alibi", "contiguous")])
def test_an_eager_call_is_the_operator(name, layout):
    test_torch.test_an_eager_call_is_the_operator(name, layout)


def test_deterministic_gradients_repeat():
    q, k, v = test_parity.inputs(2, 300, 500, 6, 2, 64, BF16)
    dout = torch.randn_like(q)
    run = lambda: torch.autograd.grad(flashattn.flash_attn_func(q, k, v, causal=True, deterministic=True), (q, k, v), dout)
    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), first))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_pairs_again(reentrant):
    test_torch.test_checkpointing_drops_the_same_pairs_again(reentrant)


def test_double_backward_says_that_it_cannot():
    test_torch.test_double_backward_says_that_it_cannot()


@pytest.mark.parametrize("case", test_torch.CASES)
def test_opcheck(case):
    test_torch.test_opcheck_forward(case)
    test_torch.test_opcheck_backward(case)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_gpu)])
def test_compile_without_graph_breaks(backend):
    test_torch.test_compile_without_graph_breaks(backend)


def test_a_compiler_knows_that_dropout_is_random():
    test_torch.test_a_compiler_knows_that_dropout_is_random()


@pytest.mark.parametrize("lengths, is_causal", [((13, 30), True), ((30, 13), True), ((13, 30), False)])
def test_sdpa_is_pytorchs(lengths, is_causal):
    test_sdpa.test_causal_is_aligned_top_left(lengths, is_causal)


@pytest.mark.parametrize("kind", ["bool", "float_grad"])
def test_sdpa_with_a_mask(kind):
    test_sdpa.test_masks_of_every_shape((2, 1, 11, 17), kind)


def test_rows_of_a_boolean_mask_begin_where_tensor_maps_ask_for_it():
    sees = torch.rand(2, 1, 30, 333) > 0.3
    bias = sdpa.bias_of(sees, torch.zeros(1, dtype=BF16))
    assert bias.shape == sees.shape and torch.equal(bias == 0, sees) and bias[~sees].isneginf().all()
    assert (bias.stride(-2) % 8 == 0) == GPU


def test_sdpa_heeds_autocast():
    test_sdpa.test_autocast_is_heeded(DEVICE)


# ---- decoding ----


@pytest.mark.parametrize("new, paged, rotary, mask", [(0, None, None, "none"), (1, 256, "interleaved", "causal"),
                                                      (5, 7, "halves", "local"), (5, None, "interleaved", "none")])
def test_append_then_attend(new, paged, rotary, mask):
    test_kvcache.test_append_then_attend(new, paged, rotary, mask)


def test_batch_index_and_left_padding():
    test_kvcache.test_batch_index_and_left_padding()


def test_splits_and_their_merge():
    q, k, v = torch.randn(2, 1, 4, 64), *torch.randn(2, 2, 700, 2, 64)
    whole, lse, _ = flashattn.flash_attn_func(q, k, v, return_attn_probs=True)
    split = test_interface.interface3.flash_attn_func(q, k, v, num_splits=5)
    assert torch.allclose(split, whole, atol=1e-5)
    parts = [flashattn.flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True)[:2] for a, b in ((0, 13), (13, 700))]
    merged, merged_lse = flashattn.merge(parts)
    assert torch.allclose(merged, whole, atol=1e-5) and torch.allclose(merged_lse, lse, atol=1e-5)


# ---- the passes alone, and what FlashAttention-3 adds ----


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(9, 2), softcap=3.0, scale=0.2, alibi=True),
                                     dict(causal=True, dropout_p=0.25)], ids=str)
def test_both_passes_are_those_of_the_public_functions(varlen, options):
    test_passes.test_both_passes_are_those_of_the_public_functions(varlen, BF16, options)


def test_a_cache_in_the_varlen_forward():
    test_passes.test_a_cache_in_the_varlen_forward()


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
def test_the_third_spelling(varlen):
    test_passes.test_the_third_spelling(varlen)


def test_the_third_spelling_appends_to_a_cache():
    test_passes.test_the_third_spelling_appends_to_a_cache()


def test_a_client_that_torch_compile_sees_through():
    test_passes.test_a_client_that_torch_compile_sees_through()


@pytest.mark.parametrize("module", [interface, interface3], ids=["2", "3"])
def test_ring_attention_is_the_whole_call(module):
    test_passes.test_ring_attention_is_the_whole_call(module, BF16, 5)


def test_ring_attention_over_nccl(tmp_path):
    test_ring.test_two_gpus_and_nccl(tmp_path)


@pytest.mark.parametrize("pair", [(40, 40), (1, 33), (64, 128)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(5, 2))], ids=str)
def test_chunks_see_their_own_keys(pair, options):
    test_variants.test_chunks_see_their_own_keys(pair, 7, options)


def test_chunks_have_gradients():
    test_variants.test_chunks_have_gradients()


@pytest.mark.parametrize("name", ["own documents", "shared question", "sinks", "blocks", "own, one nothing"])
def test_block_masks(name):
    test_masks.test_attention_is_of_the_pairs_that_are_shown(name, {})


@pytest.mark.parametrize("options", [{}, dict(window_size=(100, 0))], ids=str)
def test_long_documents_of_several_sequences(options):
    test_masks.check(test_masks.masks.documents([[300, 347], [647]]), 647, options, 64, BF16)


@pytest.mark.parametrize("used", [False, True])
def test_chunks_of_sequences_of_several_lengths(used):
    test_variants.test_chunks_of_sequences_of_several_lengths(used)


@pytest.mark.parametrize("paged", [False, True])
def test_chunks_of_a_cache(paged):
    test_variants.test_chunks_of_a_cache(paged)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_qv_adds_its_scores(dtype):
    test_variants.test_qv_adds_its_scores(dtype, (64, 128), "torch")


def test_qv_has_gradients():
    test_variants.test_qv_has_gradients()


@pytest.mark.parametrize("kind", ["plain", "entries", "paged"])
@pytest.mark.parametrize("rotary, packed", [(False, "both"), (True, "k"), (True, "q")])
def test_new_keys_of_each_sequence(kind, rotary, packed):
    test_variants.test_new_keys_of_each_sequence("torch", kind, rotary, packed)


def test_new_keys_that_do_not_fit_are_refused_before_any_is_written():
    test_variants.test_new_keys_that_do_not_fit_are_refused_before_any_is_written()


def test_float8_inputs_with_descales():
    test_interface.test_float8_inputs_with_descales()


def test_rotation_makes_outliers_harmless():
    test_float8.test_rotation_makes_outliers_harmless()


# ---- clients ----


def test_a_nanogpt_learns_along_the_same_curve():
    test_clients.test_a_nanogpt_learns_along_the_same_curve(BF16)


@test_clients.needs_transformers
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_llama_writes_the_same_tokens(cache):
    test_clients.test_a_llama_writes_the_same_tokens(cache)


@test_clients.needs_transformers
def test_an_encoder_without_its_padding_gives_the_same():
    test_clients.test_an_encoder_without_its_padding_gives_the_same("right")


# ---- devices, streams, graphs, threads ----


@needs_gpu
def test_arrays_on_different_devices_are_refused():
    q = torch.randn(2, 9, 4, 16)
    cpu = q.cpu()
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    for run, name in ((lambda: flashattn.flash_attn_func(q, cpu, cpu), "k is on the CPU"),
                      (lambda: flashattn.flash_attn_func(cpu, q, q), "k is on CUDA device 0"),
                      (lambda: flashattn.flash_attn_func(q, q, q, alibi_slopes=torch.ones(4, device="cpu")), "alibi_slopes is on the"),
                      (lambda: torch_ops.attention(q, q, q, bias=torch.zeros(1, 1, 9, 9, device="cpu")), "bias is on the CPU"),
                      (lambda: torch_ops.attention(q, q, q, sinks=torch.zeros(4, device="cpu")), "sinks is on the CPU"),
                      (lambda: flashattn.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, q, q)), cu, cu.cpu(), 9, 9),
                       "cu_seqlens_k is on the CPU"),
                      (lambda: flashattn.flash_attn_with_kvcache(q, q, q, cache_seqlens=torch.ones(2, dtype=torch.int32, device="cpu")),
                       "cache_seqlens is on the CPU"),
                      (lambda: flashattn.flash_attn_with_kvcache(q[:, :1], q, q, q[:, :1].cpu(), q[:, :1], cache_seqlens=4), "k_new is on")):
        with pytest.raises(flashattn.InvalidError, match=name):
            run()
    torch.cuda.synchronize()  # and nothing was launched that could fail


@needs_gpu
def test_the_current_stream_is_used():
    """On a stream that is kept busy first, a call must wait for its inputs, which are written there last, in both passes."""
    shape = (2, 256, 4, 64)
    source = [torch.randn(shape, dtype=BF16) for _ in range(4)]
    leaves = [t.clone().requires_grad_() for t in source[:3]]
    out = flashattn.flash_attn_func(*leaves, causal=True)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, source[3])]
    inputs = [torch.zeros(shape, dtype=BF16) for _ in range(4)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for stream, cycles in [(stream, 1) for stream in streams] + [(stream, 200_000_000) for stream in streams]:  # first: to warm up
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)  # the second time a tenth of a second
            own = [t.clone() for t in inputs]
            for t, s in zip(own, source):
                t.copy_(s)
            leaves = [t.detach().requires_grad_() for t in own[:3]]
            out = flashattn.flash_attn_func(*leaves, causal=True)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, own[3])])
            assert cycles == 1 or not stream.query()  # no call has waited for the GPU
        if cycles == 1:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    for found in results:
        for a, b in zip(found, expected):
            math_.assert_same(a, b)


def replayed(run, inputs):
    """What run gives, captured in a CUDA graph and replayed after the inputs have new contents."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    with torch.no_grad():
        for t in inputs:
            t.copy_(torch.randn_like(t))
    for t in results:
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return [t.detach().clone() for t in results]


@needs_gpu
def test_a_graph_of_both_passes():
    leaves = [torch.randn(2, 130, 4, 64, dtype=BF16, requires_grad=True) for _ in range(3)]
    dout = torch.randn(2, 130, 4, 64, dtype=BF16)

    def run():
        out = flashattn.flash_attn_func(*leaves, causal=True)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    for a, b in zip(replayed(run, [*leaves, dout]), run()):
        math_.assert_same(a, b.detach())


@needs_gpu
def test_a_graph_of_decoding_follows_the_lengths():
    q, cache_k, cache_v = torch.randn(2, 1, 4, 64, dtype=BF16), *torch.randn(2, 2, 300, 2, 64, dtype=BF16)
    new = torch.randn(2, 1, 2, 64, dtype=BF16)
    held = torch.tensor([17, 250], dtype=torch.int32)
    run = lambda: [flashattn.flash_attn_with_kvcache(q, cache_k, cache_v, new, new, cache_seqlens=held, causal=True)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, = run()
    for lengths in ((3, 299), (250, 0)):
        held.copy_(torch.tensor(lengths, dtype=torch.int32))
        new.normal_()
        out.fill_(float("nan"))
        graph.replay()
        keys, values = cache_k.clone(), cache_v.clone()
        assert torch.equal(out, run()[0])
        for b, length in enumerate(lengths):
            assert torch.equal(keys[b, length], new[b, 0]) and torch.equal(values[b, length], new[b, 0])
            alone = flashattn.flash_attn_func(q[b : b + 1], keys[b : b + 1, : length + 1], values[b : b + 1, : length + 1])
            assert torch.allclose(out[b].float(), alone[0].float(), atol=2e-2)


@needs_gpu
def test_a_compiled_model_becomes_a_graph():
    torch._dynamo.reset()
    run = lambda q, k, v: flashattn.flash_attn_func(q * 2, k, v, causal=True) + 1
    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    for n in range(4):
        inputs = [torch.randn(2, 64, 4, 64, dtype=BF16) for _ in range(3)]
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            assert torch.allclose(compiled(*inputs).float(), run(*inputs).float(), atol=2e-2)
    counters = torch._dynamo.utils.counters["inductor"]
    assert counters["cudagraph_skips"] == 0, dict(counters)


@needs_gpu
def test_threads_on_streams_of_their_own():
    wrong = []
    expected = {n: flashattn.flash_attn_func(*test_torch.qkv(1, 100 + n, 4, 64, dtype=BF16, seed=n), causal=True) for n in range(4)}
    torch.cuda.synchronize()

    def work(n):
        with torch.device(DEVICE), torch.cuda.stream(torch.cuda.Stream()):
            leaves = test_torch.qkv(1, 100 + n, 4, 64, dtype=BF16, seed=n)
            first = None
            for _ in range(50):
                out = flashattn.flash_attn_func(*leaves, causal=True)
                grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
                first = first or grads
                try:
                    assert torch.equal(out, expected[n])
                    for a, b in zip(grads, first):
                        math_.assert_same(a, b)
                except AssertionError as error:
                    wrong.append((n, str(error)))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(n,)) for n in expected]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_is_used_not_the_current_one():
    results = []
    for device in ("cuda:0", "cuda:1"):
        leaves = [t.detach().to(device).requires_grad_() for t in test_torch.qkv(2, 100, 4, 64, dtype=BF16)]
        out = flashattn.flash_attn_func(*leaves, causal=True)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert torch.cuda.current_device() == 0 and all(t.device == torch.device(device) for t in (out, *grads))
        results.append([t.cpu() for t in (out, *grads)])
    for a, b in zip(*results):
        assert torch.allclose(a.float(), b.float(), atol=2e-2)
    q = torch.randn(1, 4, 1, 16)
    with pytest.raises(flashattn.InvalidError, match="k is on CUDA device 1"):
        flashattn.flash_attn_func(q, q.to("cuda:1"), q.to("cuda:1"))


@needs_gpu
def test_scratch_memory_is_pytorchs_even_where_the_device_has_none_left():
    leaves = [torch.randn(4, 1024, 16, 64, dtype=BF16, requires_grad=True) for _ in range(3)]
    dout = torch.randn(4, 1024, 16, 64, dtype=BF16)
    out = flashattn.flash_attn_func(*leaves, causal=True)
    before = torch.cuda.memory_allocated()
    expected = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    grads_bytes = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert torch.cuda.max_memory_allocated() - before > 2 * grads_bytes + 4 * leaves[0].numel()  # dQ's sums are float32
    del again
    assert torch.cuda.memory_allocated() == before + grads_bytes
    hog = torch.empty(torch.cuda.mem_get_info()[0] - (64 << 20), dtype=torch.uint8, device="cuda")
    del hog  # PyTorch keeps it
    try:
        for a, b in zip(torch.autograd.grad(out, leaves, dout), expected):
            math_.assert_same(a, b)
    finally:
        torch.cuda.empty_cache()
