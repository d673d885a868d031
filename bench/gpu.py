#!/usr/bin/env python3
"""Time flashattn and its peers on one GPU over the FlashAttention papers' grid, in one run, and check every answer.

    make && python3 bench/gpu.py [--json FILE] [--head-dims 64,192:128,256] [--seqlens 512,...,16384] [--passes forward] [--quick]
                                 [--heads 32:8] [--tokens 16384] [--math] [--flex] [--varlen] [--deterministic] [--portable] [--fp8] [--float32] [--errors]
                                 [--window 1024] [--softcap 30] [--alibi] [--bias heads [--dbias]] [--pages 64] [--dropout 0.1] [--fa3 LIBRARY]
    make && python3 bench/gpu.py --decode [--head-dims 128,64] [--queries 1,4,16] [--batches 1,8,64] [--seqlens 1024,...,131072] [--fa3 LIBRARY]

bfloat16, hidden dimension 2048, 16384 tokens, no mask and causal, forward and backward; 192:128 is a head_dim of V of its own. Peers: PyTorch's SDPA
backends (math: standard attention; efficient; flash, which is FlashAttention-2; cuDNN) and with --flex FlexAttention, which torch.compile makes
through Triton, anew for each shape and pass. --heads takes the place of 2048 / head_dim; 32:8 are grouped heads, 32 of Q on 8 of K and V, for which
the peers have enable_gqa, but for `efficient`, which is left out. --tokens are those of all sequences of a cell, of which there is at least one. With
--varlen sequences are packed (cu_seqlens), the longest as long as said and the others of random lengths, and the peers are the calls that take such:
PyTorch's varlen_attn (flash) and cuDNN's. With --deterministic the backward's sums have a fixed order, ours and the peers' that can. --portable adds
our kernels for any GPU, --fp8 our forward with FP8 inputs; then all have the same inputs, numbers that FP8 holds. With --float32 all is float32, PyTorch's products too (TF32 is
off, as it is by default), and the peer is `efficient`, for the others have none. --errors shows the largest relative L2 error
of each pass's results, of one head, in place of its speed. --fa3 adds FlashAttention-3 from
its library (fa3.py says where to get one). With --window a query sees so many keys, itself the last of them (no mask: itself in their middle); operations
are those of pairs that are seen, and the peers are the two that have windows, flash and fa3.
--softcap and --alibi are options of ours and FlexAttention's alone, Q then 4 times as large; --pages, of
the forward alone, puts our K and V into shuffled pages of so many keys, while the peers have theirs in one piece, and so has `whole`, ours again.
--bias adds a tensor in bfloat16 to the scores: one of each head for all sequences (heads), of each head and sequence (own), or a row for each sequence
(keys); the peers are those that take such, and where the mask is causal they get it in the bias. With --dbias the backward has the bias's gradient too, and
64 rows of its first head are checked.
--dropout drops pairs, ours those that Philox names, written here once more; which ones the peers drop is not known, so they are timed and not
checked. TFLOP/s count 4 s^2 d h b, half when causal, 2.5 times for the backward (of 192:128 2 s^2 h b and 6 s^2 h b for each of 192 columns, 2 and 4
for each of V's). Each other answer is compared with float64 on one head first, dK and dV on key head 0, where they are sums over its query heads; a
wrong one is shown as WRONG and makes the exit status 1. Every time is the median of several groups of launches between two events; ours and the peers
take turns, in random order. FILE is written anew after each line.

--decode (gpu_decode.py): few queries of 32 heads on the keys of 8, no mask. GB/s count K and V once (and Q and O), beside what reading as many bytes
(a sum) and copying half of them reach. With --bias keys up to a quarter of a sequence's keys are hidden by a row for each, as padding is. Keys lie in
one piece or in pages of 16, 64 and 256 (or of --pages alone), shuffled; `by batch` is ours with num_splits -1. Calls are replayed by a CUDA graph, each on keys of its own, so that no key is still in L2 from the call before and no host is timed.
"""

import argparse
import inspect
import itertools
import random
import sys

import card  # first: it finds the library
import fa3
import gpu_decode
import head_dims
import torch
from flashattn import _call
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS, HIDDEN, FP8 = 16384, 2048, torch.float8_e4m3fn
PASSES = {"forward": [False], "backward": [True], "both": [False, True]}  # of --passes: whether backward
BIASES = {"heads": (False, True, True), "own": (True, True, True), "keys": (True, False, False)}  # has sequences, heads, queries


def packed_lengths(longest, tokens):
    """The longest in the middle, others between 1 and it, so many tokens in all; the same each time."""
    draw, lengths = random.Random(longest), [longest]
    while sum(lengths) < tokens:
        lengths.append(min(draw.randint(1, longest), tokens - sum(lengths)))
    return [*lengths[1 : len(lengths) // 2 + 1], longest, *lengths[len(lengths) // 2 + 1 :]]


def seen_pairs(seqlen, left, right):
    """Of queries and keys of a sequence, where each query sees so many keys before itself and behind."""
    return sum(min(n, left) + min(seqlen - 1 - n, right) + 1 for n in range(seqlen))


SEED, WORD = 1234567890123, 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10 of Salmon et al. (SC 2011), four numbers of 32 bits in int64."""
    a, b, c, d = counter
    for n in range(10):
        at, by = 0xD2511F53 * a, 0xCD9E8D57 * c
        keys = [k + n * step & WORD for k, step in zip(key, (0x9E3779B9, 0xBB67AE85))]
        a, b, c, d = (by >> 32 & WORD) ^ b ^ keys[0], by & WORD, (at >> 32 & WORD) ^ d ^ keys[1], at & WORD
    return a, b, c, d


def kept_pairs(seqlen, p):
    """What dropout multiplies P of head 0 of batch 0 with: 0 or 1 / (1 - p), p in units of 2^-16. A call's numbers of 16 bits go to rows i, i + 8 and columns
    j, j + 1, j + 8, j + 9 of a block of 16 x 16."""
    threshold, blocks = round(p * 65536), seqlen // 16
    block, lane = torch.arange(blocks, device=card.DEVICE), torch.arange(32, device=card.DEVICE)
    zero = torch.zeros(blocks, blocks, 32, dtype=torch.int64, device=card.DEVICE)
    words = torch.stack(philox((block[None, :, None] + zero, block[:, None, None] * 32 + lane + zero, zero, zero), (SEED & WORD, SEED >> 32)))
    numbers = torch.stack((words & 0xFFFF, words >> 16)).view(2, 2, 2, blocks, blocks, 8, 4)  # i // 8, j // 8, j % 2, blocks, i % 8, j % 8 // 2
    return (numbers >= threshold).permute(3, 0, 5, 4, 1, 6, 2).reshape(seqlen, seqlen) / (1 - threshold / 65536)


class Cell:
    """One problem: inputs [batch, seqlen, heads, d], V d_v, or packed [tokens, heads, d], and what is expected of head 0 (dK and dV: key head 0)
    of batch 0, or of the longest sequence."""

    slices = sees = hidden = None  # block_masks.py: of a sequence

    def __init__(self, d, seqlen, causal, options, d_v=None, keys=None):
        d_v, self.keys = d_v or d, keys  # None: as many as queries
        packed, fp8 = options.varlen, options.fp8
        self.d, self.d_v, self.seqlen, self.causal, self.packed, self.deterministic = d, d_v, seqlen, causal, packed, options.deterministic
        self.window = (-1, 0 if causal else -1)  # keys before a query and behind it, -1: all
        if options.window:
            self.window = (options.window - 1, 0) if causal else (options.window // 2, options.window // 2)
        self.softcap, self.page, self.slopes, self.dropout = options.softcap, options.pages, None, options.dropout
        self.heads, self.heads_k = options.heads or (HIDDEN // d, HIDDEN // d)
        self.grouped = self.heads != self.heads_k
        self.lengths = packed_lengths(seqlen, options.tokens) if packed else [seqlen] * max(options.tokens // seqlen, 1)
        self.tokens = sum(self.lengths)
        dtype = torch.float32 if options.float32 else torch.bfloat16
        self.float32, self.bound = options.float32, 2e-5 if options.float32 else 1e-2  # of errors
        heads, lengths = (self.heads, self.heads_k, self.heads_k, self.heads), (seqlen, keys or seqlen, keys or seqlen, seqlen)
        if packed:
            self.cu = torch.tensor([sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)], device=card.DEVICE, dtype=torch.int32)
            self.first = sum(self.lengths[: self.lengths.index(seqlen)])
        self.q, self.k, self.v, self.dout = (torch.randn(*((self.tokens,) if packed else (len(self.lengths), s)), h, n, device=card.DEVICE, dtype=dtype)
                                             for s, h, n in zip(lengths, heads, (d, d, d_v, d_v)))
        if fp8:
            self.q, self.k, self.v = (t.to(FP8).to(torch.bfloat16) for t in (self.q, self.k, self.v))
        if options.alibi:
            self.slopes = 2.0 ** -(torch.arange(1, self.heads + 1, device=card.DEVICE) * 8 / self.heads)
        if options.alibi or self.softcap:
            self.q *= 4  # so that they matter
        self.bias = self.masked_bias = None
        if options.bias:
            shape = (len(self.lengths), self.heads, seqlen)
            self.bias = torch.randn(*(n if has else 1 for n, has in zip(shape, BIASES[options.bias])), seqlen, device=card.DEVICE, dtype=dtype)
            self.masked_bias = self.bias
            if causal:
                self.masked_bias = self.bias.masked_fill(torch.ones(seqlen, seqlen, device=card.DEVICE, dtype=torch.bool).triu_(1), float("-inf"))
        self.dbias = options.dbias
        self.truth = self.head_truth(0)
        for head in range(1, self.heads // self.heads_k):
            for total, grad in zip(self.truth[2:], self.head_truth(head)[2:]):
                total += grad

    def head_truth(self, head):
        """O and dQ of a query head of key head 0, and what it adds to dK and dV."""
        q, k, v = (self.one(t, n).double().requires_grad_() for t, n in ((self.q, head), (self.k, 0), (self.v, 0)))
        scores = q @ k.T * self.d**-0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias[0, head % self.bias.shape[1]]
        if self.slopes is not None:
            position = torch.arange(self.seqlen, device=card.DEVICE)
            scores = scores - self.slopes[head].double() * (position[:, None] - position).abs()
        left, right = self.window
        if right >= 0:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(right + 1), float("-inf"))
        if left >= 0:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).tril_(-left - 1), float("-inf"))
        if self.hidden is not None:
            scores.masked_fill_(self.hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        out = (weights * kept_pairs(self.seqlen, self.dropout) if self.dropout else weights) @ v
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), self.one(self.dout, head).double())]

    def dbias_rows(self):
        """(rows, what they hold of the gradient of the bias's first head): summed over the sequences that it is the same for."""
        rows, total = torch.linspace(0, self.seqlen - 1, 64, device=card.DEVICE).long(), 0
        for b in range(len(self.lengths) if self.bias.shape[0] == 1 else 1):
            for head in range(self.heads if self.bias.shape[1] == 1 else 1):
                k, v = (t[b, :, head * self.heads_k // self.heads].double() for t in (self.k, self.v))
                scores = self.q[b, rows, head].double() @ k.T * self.d**-0.5 + self.bias[b % self.bias.shape[0], head % self.bias.shape[1]][rows]
                if self.causal:
                    scores.masked_fill_(torch.arange(self.seqlen, device=card.DEVICE) > rows[:, None], float("-inf"))
                weights, dweights = torch.softmax(scores, -1), self.dout[b, rows, head].double() @ v.T
                total = total + weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        return rows, total

    def one(self, tensor, head=0):
        return tensor[self.first : self.first + self.seqlen, head] if self.packed else tensor[0, :, head]

    def flops(self, backward):
        pairs = sum(seen_pairs(n, *self.window) if self.window[0] >= 0 else n**2 / 2 if self.causal else n * (self.keys or n) for n in self.lengths)
        return 2 * pairs * (self.d + self.d_v) * self.heads * (head_dims.backward_share((self.d, self.d_v)) if backward else 1)

    def wrong(self, results, first, bound=None):
        """The largest relative L2 error, or None if all is well (bound None: by the cell's). results are as the inputs."""
        bound = self.bound if bound is None else bound
        worst = 0.0
        for got, expected in zip(results, self.truth[first:]):
            error = (self.one(got).double() - expected).norm() / expected.norm()
            worst = max(worst, error.item()) if error == error else float("nan")
        if self.dbias and first and worst <= bound:
            rows, expected = self.dbias_rows()
            worst = ((results[3][0, 0, rows].double() - expected).norm() / expected.norm()).item()
        return None if worst <= bound else worst


def ours(cell, context=None):
    """(forward, backward): each runs once and returns its results. context: where the best kernels are not wanted."""
    q, k, v = cell.q, cell.k, cell.v
    lengths = {"cu_seqlens_q": cell.cu, "cu_seqlens_k": cell.cu, "max_seqlen_q": cell.seqlen, "max_seqlen_k": cell.seqlen} if cell.packed else {}
    table = None
    if cell.page:
        count = k.shape[1] // cell.page
        table = torch.randperm(k.shape[0] * count, device=card.DEVICE)
        paged = [torch.empty_like(t).view(-1, cell.page, *t.shape[2:]) for t in (k, v)]
        for to, t in zip(paged, (k, v)):
            to[table] = t.view_as(to)
        (k, v), table = paged, table.to(torch.int32).view(-1, count)
    call = _call.Call(q, k, v, causal=cell.causal, window=cell.window, deterministic=cell.deterministic, softcap=cell.softcap, alibi_slopes=cell.slopes, bias=cell.bias, block_table=table, slices=cell.slices,
                      dropout_p=cell.dropout, seed=SEED, **lengths)
    call.context = context
    out = torch.full_like(cell.dout, float("nan"))
    grads = [torch.full_like(t, float("nan")) for t in (cell.q, cell.k, cell.v, *([cell.bias] if cell.dbias else []))]
    _, lse = call.forward(out)

    def forward():
        call.run_forward()
        return [out]

    def backward():
        call.backward(cell.dout, out, lse, *grads)
        return grads

    return forward, backward


def whole(cell):
    """Ours, where the cell has pages, with keys in one piece."""
    page, cell.page = cell.page, 0
    runs = ours(cell)
    cell.page = page
    return runs


def fp8(cell, context=None):
    """Ours with FP8 inputs; there is no backward."""
    call = _call.Call(*(t.to(FP8) for t in (cell.q, cell.k, cell.v)), causal=cell.causal)
    call.context = context
    out = torch.full_like(cell.dout, float("nan"))
    call.forward(out)

    def forward():
        call.run_forward()
        return [out]

    return forward, None


def peer(cell, backend):
    leaves = [t.detach().requires_grad_() for t in (cell.q, cell.k, cell.v, *([cell.masked_bias] if cell.dbias else []))]
    q, k, v = (t.transpose(1, 2) for t in leaves[:3])
    bias = None if cell.bias is None else (leaves[3] if cell.dbias else cell.masked_bias).expand(len(cell.lengths), cell.heads, cell.seqlen, cell.seqlen)

    def attention():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=cell.dropout, is_causal=cell.causal and bias is None, enable_gqa=cell.grouped)

    out, dout = attention(), cell.dout.transpose(1, 2)

    def forward():
        with torch.no_grad():
            return [attention().transpose(1, 2)]

    def backward():
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return forward, backward


def windowed_flash(cell):
    """PyTorch's FlashAttention-2 by its own operators: what is above them has no windows."""
    ops, window = torch.ops.aten, {"window_size_left": cell.window[0], "window_size_right": cell.window[1]}
    ends = (None, None, cell.seqlen, cell.seqlen, 0.0, False)
    inputs = (cell.q, cell.k, cell.v)
    out, lse, state, unused, _ = ops._flash_attention_forward(*inputs, *ends, False, **window)

    def forward():
        return [ops._flash_attention_forward(*inputs, *ends, False, **window)[0]]

    return forward, lambda: ops._flash_attention_backward(cell.dout, *inputs, out, lse, *ends, state, unused, **window)


def portable(cell):
    """Ours, by the kernels for any GPU. A context has one kernel's name: each pass has its own."""
    return tuple(ours(cell, card.kernel_context(name))[n] for n, name in enumerate(("forward_sm80", "backward_sm80")))


def packed_peer(cell, name):
    ops = torch.ops.aten
    leaves = [t.detach().requires_grad_() for t in (cell.q, cell.k, cell.v)]
    ends = (cell.cu, cell.cu, cell.seqlen, cell.seqlen)
    if name == "flash":
        from torch.nn.attention.varlen import varlen_attn

        gqa = {"enable_gqa": cell.grouped} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # older ones take grouped heads unsaid

        def attention():
            with sdpa_kernel(card.PEERS[name]):  # or newer ones take cuDNN
                return varlen_attn(*leaves, *ends, window_size=cell.window, **gqa)

        out = attention()

        def forward():
            with torch.no_grad():
                return [attention()]

        return forward, lambda: torch.autograd.grad(out, leaves, cell.dout, retain_graph=True)
    found = ops._cudnn_attention_forward(cell.q, cell.k, cell.v, None, *ends, True, 0.0, cell.causal)

    def forward():
        return [ops._cudnn_attention_forward(cell.q, cell.k, cell.v, None, *ends, True, 0.0, cell.causal)[0]]

    def backward():
        return ops._cudnn_attention_backward(cell.dout, cell.q, cell.k, cell.v, found[0], found[1], found[6], found[7], None, *ends, 0.0, cell.causal)

    return forward, backward


def flex(cell):
    """FlexAttention, with a block mask where there is a mask. Compiled for exactly this shape."""
    from torch._functorch import config
    from torch.nn.attention import flex_attention as module

    torch.compiler.reset()  # one shape's code at a time, or the compiler gives up after a few
    config.donated_buffer = False  # a compiled backward may else run once only
    compiled = torch.compile(module.flex_attention, dynamic=False)
    mask, sees = None, cell.sees or (lambda b, h, i, j: i >= j)
    if cell.causal or cell.sees:
        mask = module.create_block_mask(sees, None, None, cell.seqlen, cell.seqlen, device=card.DEVICE)
    leaves = [t.detach().requires_grad_() for t in (cell.q, cell.k, cell.v, *([cell.bias] if cell.dbias else []))]
    q, k, v = (t.transpose(1, 2) for t in leaves[:3])
    dout = cell.dout.transpose(1, 2)
    kept, slopes, softcap, bias = [], cell.slopes, cell.softcap, leaves[3] if cell.dbias else cell.bias

    def modified(score, b, h, i, j):
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, i if bias.shape[2] > 1 else 0, j]
        return score if slopes is None else score - slopes[h] * (i - j).abs()

    terms = {"block_mask": mask, "score_mod": modified if softcap or slopes is not None or bias is not None else None, "enable_gqa": cell.grouped}

    def forward():
        with torch.no_grad():
            return [compiled(q.detach(), k.detach(), v.detach(), **terms).transpose(1, 2)]

    def backward():
        if not kept:
            kept.append(compiled(q, k, v, **terms))
        return torch.autograd.grad(kept[0], leaves, dout, retain_graph=True)

    return forward, backward


def torch_peer(cell, name):
    if cell.packed:
        return packed_peer(cell, name)
    return windowed_flash(cell) if cell.window[0] >= 0 else peer(cell, card.PEERS[name])


def runs_of(cell, names):
    """{name: (forward, backward), or None where it has no kernel}"""
    runs = {}
    for name in names:
        try:
            own = {"ours": ours, "flex": flex, "portable": portable, "fp8": fp8, "whole": whole, "fa3": fa3.peer}.get(name)
            runs[name] = own(cell) if own else torch_peer(cell, name)
        except Exception as problem:  # no kernel, no memory, or a compiler that gave up
            runs[name] = None
            if name in ("ours", "flex", "fa3"):
                print(f"  {name}: {card.first_line(problem)}")
    return runs


def bench_pass(cell, backward, runs, groups):
    """{name: TFLOP/s, "WRONG ..." or None where it has no kernel}"""
    right, row = {}, {}
    for name, pair in runs.items():
        row[name] = None
        if pair is None or pair[backward] is None:
            continue
        try:
            results = pair[backward]()
            checked = not cell.dropout or name in ("ours", "portable")
            error = cell.wrong(results, 1 if backward else 0, 5e-2 if name == "fp8" else None) if checked else None
        except Exception as problem:
            if name in ("ours", "flex", "fa3"):
                print(f"  {name}: {card.first_line(problem)}")
            continue
        if error is None:
            right[name] = pair[backward]
        else:
            row[name] = f"WRONG {error:.1e}"
    for name, ms in card.time_by_turns(right, groups).items():
        row[name] = cell.flops(backward) / ms / 1e9
    return row


def errors_of(cell, backward, runs):
    """{name: the largest relative L2 error of O, or of dQ, dK and dV; None where it has no kernel}"""
    return {name: cell.wrong(pair[backward](), 1 if backward else 0, -1.0) if pair and pair[backward] else None for name, pair in runs.items()}


def heads_of(text):
    """(query heads, key heads) of "32" or "32:8", written as head dims are, None of None; ValueError if it is neither."""
    if text is None:
        return None
    heads, heads_k = head_dims.widths(text)
    if min(heads, heads_k) < 1 or heads % heads_k:
        raise ValueError(text)
    return heads, heads_k


def grouped(options):
    return options.heads is not None and options.heads[0] != options.heads[1]


def parser_of_words():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", help="64,128,256; with --decode 128,64")
    parser.add_argument("--seqlens", help="512,1024,2048,4096,8192,16384; with --decode, keys, 1024,4096,16384,131072")
    parser.add_argument("--passes", choices=["forward", "backward", "both"], default="both")
    parser.add_argument("--groups", type=int, default=7, help="timed groups of launches")
    parser.add_argument("--math", action="store_true", help="standard attention too, up to 2048 keys")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too; needs Triton, and seconds a shape to compile")
    parser.add_argument("--fa3", metavar="LIBRARY", help="FlashAttention-3 too, by the operators of this library: see fa3.py")
    parser.add_argument("--heads", help="query heads, or query heads:key heads; 2048 / head_dim")
    parser.add_argument("--tokens", type=int, help="of all sequences of a cell, of which there is at least one; 16384")
    parser.add_argument("--varlen", action="store_true", help="packed sequences of random lengths up to the one given")
    parser.add_argument("--deterministic", action="store_true", help="sums of the backward in a fixed order")
    parser.add_argument("--portable", action="store_true", help="our kernels for any GPU too")
    parser.add_argument("--fp8", action="store_true", help="our forward with FP8 inputs too")
    parser.add_argument("--float32", action="store_true", help="float32 in place of bfloat16")
    parser.add_argument("--errors", action="store_true", help="errors in place of speeds")
    parser.add_argument("--window", type=int, default=0, help="keys that a query sees; all")
    parser.add_argument("--softcap", type=float, default=0.0, help="scores become X tanh(score / X)")
    parser.add_argument("--alibi", action="store_true", help="ALiBi, slopes of 2^-8/h to 2^-8")
    parser.add_argument("--bias", choices=BIASES, help="a bias of each head, of each head and sequence, or a row for each sequence")
    parser.add_argument("--dbias", action="store_true", help="--bias: its gradient too, in the backward alone")
    parser.add_argument("--pages", type=int, default=0, help="our keys in pages of so many; the forward alone")
    parser.add_argument("--dropout", type=float, default=0.0, help="pairs are dropped with this probability")
    parser.add_argument("--decode", action="store_true", help="few queries on many keys, in GB/s")
    parser.add_argument("--queries", default="1,4,16", help="--decode: queries of a sequence")
    parser.add_argument("--batches", default="1,8,64", help="--decode: sequences")
    parser.add_argument("--quick", action="store_true", help="three lengths, three groups")
    parser.add_argument("--json", metavar="FILE")
    return parser


def refuse(parser, options):
    """Ends the program where options do not go together."""
    own_options = options.softcap or options.alibi or options.bias or options.pages or options.dropout
    if own_options and (options.varlen or options.fp8 or (options.decode and (options.softcap or options.alibi or options.dropout or options.bias not in (None, "keys")))):
        parser.error("--softcap, --alibi, --bias, --pages and --dropout are for plain calls: leave out --varlen, --fp8 and, but for --pages and --bias keys, --decode")
    if options.decode and options.bias and options.fa3:
        parser.error("--fa3 has no --bias")
    if options.dbias and (options.bias not in ("heads", "own") or options.decode or options.pages or options.dropout or options.softcap or options.alibi):
        parser.error("--dbias is for --bias heads and own, without --decode, --pages, --dropout, --softcap and --alibi")
    if not 0 <= options.dropout < 1 or (options.dropout and (options.flex or options.fa3)):
        parser.error("--dropout is at least 0 and less than 1; --flex and --fa3 have none")
    if options.dropout and grouped(options):
        parser.error("--dropout is checked on one query head alone: leave out the key heads of --heads")
    if options.softcap < 0 or options.pages < 0 or (options.pages and any(seqlen % options.pages for seqlen in options.seqlens)):
        parser.error("--softcap and --pages are at least 0, and every length is whole pages")
    if options.tokens is not None and options.tokens < 1:
        parser.error(f"--tokens {options.tokens}: at least 1")
    if options.float32 and (options.fp8 or options.varlen or options.decode or options.window or options.fa3 or (grouped(options) and not options.portable)):
        parser.error("--float32 is for plain calls: leave out --fp8, --varlen, --decode, --window, --fa3 and, but for --portable, the key heads of --heads, for which it has no peer")
    if options.errors and (options.decode or options.dropout):
        parser.error("--errors is not for --decode and --dropout")
    if options.window < 0 or (options.window and (own_options or options.math or options.flex or options.fp8 or options.decode)):
        parser.error("--window is at least 0, and not for --math, --softcap, --alibi, --bias, --pages, --dropout, --flex, --fp8 and --decode")
    if options.decode and (options.heads or options.tokens):
        parser.error("--decode has 32 heads on 8 and --batches of sequences: leave out --heads and --tokens")
    if options.decode and any(d != d_v for d, d_v in options.head_dims):
        parser.error("--decode has one head_dim for Q, K and V")


def parse(words=None):
    """The options that these words say, or the command line: lists as lists, heads as two numbers or None, the others as Cell takes them."""
    parser = parser_of_words()
    options = parser.parse_args(words)
    try:
        options.head_dims = [head_dims.widths(d) for d in (options.head_dims or ("128,64" if options.decode else "64,128,256")).split(",")]
    except ValueError:
        parser.error(f"--head-dims {options.head_dims}: expected numbers, or pairs such as 192:128, between commas")
    try:
        options.heads = heads_of(options.heads)
    except ValueError:
        parser.error(f"--heads {options.heads}: expected query heads, or query heads:key heads such as 32:8, the first a multiple of the second")
    lengths = options.seqlens or ("1024,4096,16384,131072" if options.decode else "512,1024,2048,4096,8192,16384")
    options.seqlens = [512, 2048, 8192] if options.quick else [int(s) for s in lengths.split(",")]
    refuse(parser, options)
    options.tokens = options.tokens or TOKENS
    if options.quick:
        options.groups = 3
    if options.pages:
        options.passes = "forward"
    if options.dbias:
        options.passes = "backward"
    return options


def names_of(options):
    chosen = {"ours": True, "fp8": options.fp8, "whole": options.pages, "portable": options.portable, "math": options.math,
              "efficient": not (options.varlen or options.fp8 or options.window or grouped(options)), "flex": options.flex, "flash": not options.float32,
              "cudnn": not (options.window or options.float32), "fa3": options.fa3}
    own_terms = options.softcap or options.alibi
    taking = ("ours", "whole", "portable", "flex", *(("efficient", "cudnn", "math") if options.bias and not own_terms else ()))
    return [name for name, wanted in chosen.items() if wanted and (not (own_terms or options.bias) or name in taking)]


def over_best(row):
    """What ours has over the best of the peers, if both are right."""
    best = max((x for n, x in row.items() if isinstance(x, float) and n not in ("ours", "portable", "fp8", "whole")), default=None)
    return row["ours"] / best if best and isinstance(row.get("ours"), float) else None


def show(cell, backward, names, row, form="9.1f"):
    """Prints the line, numbers in this form, and returns what ours has over flash, if both are right; in float32 over the best of the others."""
    over = [over_best({n: row.get(n) for n in ("ours", "flash")}), over_best(row)] if form == "9.1f" else [None, None]
    shown = [format(x, form) if isinstance(x, float) else f"{x or '-':>9}" for x in (row.get(n) for n in names)]
    print(f"{'backward' if backward else 'forward':8} {head_dims.title((cell.d, cell.d_v)):>7} {str(cell.causal):6} {cell.seqlen:5} | " + " ".join(shown) +
          " | " + "  ".join(f"{x:5.2f}" if x else "    -" for x in over), flush=True)
    return over[1 if cell.float32 else 0]


def grid(options, write):
    """(the rows of all cells, what ours has over flash in each, or in float32 over the best peer); write(rows) is called after each line."""
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would be timed
    names, rows, ratios = names_of(options), [], []
    header = f"{'pass':8} {'d':>7} {'causal':6} {'s':>5} | " + " ".join(f"{n:>9}" for n in names) + " | /flash  /best"
    print(header, "-" * len(header), sep="\n")
    for (d, d_v), causal, seqlen in itertools.product(options.head_dims, (False, True), options.seqlens):
        cell = Cell(d, seqlen, causal, options, d_v)
        runs = runs_of(cell, [n for n in names if n != "math" or seqlen <= 2048])
        for backward in PASSES[options.passes]:
            rows.append({"pass": "backward" if backward else "forward", "head_dim": d, "head_dim_v": d_v, "causal": causal, "seqlen": seqlen,
                         "heads": cell.heads, "heads_k": cell.heads_k, "tokens": cell.tokens,
                         "varlen": options.varlen, "window": options.window, "deterministic": options.deterministic, "float32": options.float32, "softcap": options.softcap, "alibi": options.alibi, "bias": options.bias, "dbias": options.dbias,
                         "pages": options.pages, "dropout": options.dropout})
            if options.errors:
                rows[-1]["errors"] = row = errors_of(cell, backward, runs)
                show(cell, backward, names, row, "9.1e")
            else:
                rows[-1]["tflops"] = row = bench_pass(cell, backward, runs, options.groups)
                ratios.append(show(cell, backward, names, row))
            write(rows)
        del cell, runs
    return rows, [ratio for ratio in ratios if ratio]


def begin(options):
    """The card's state, or None where there is no card; peers are there, and so is the seed."""
    if not card.present():
        print("skipped: no CUDA device")
        return None
    if options.fa3:
        fa3.load(options.fa3)
    torch.manual_seed(0)
    before = card.state()
    print(f"before: {before}; PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    return before


def main():
    options = parse()
    before = begin(options)
    if before is None:
        return 0

    def write(rows):
        card.write_report(options.json, "flashattn-gpu-bench-1", before, rows)

    if options.decode:
        rows, ratios = gpu_decode.decode(options), []
        write(rows)
    else:
        rows, ratios = grid(options, write)
    return card.end(rows, ratios, "the best peer" if options.float32 else "flash", "gigabytes_per_second" if options.decode else "tflops")


if __name__ == "__main__":
    sys.exit(main())
