"""FlashAttention-3 as a peer of gpu.py: the operators flash_attn_3::fwd and bwd of a library that somebody has built.

PyPI has one inside xformers 0.0.34 (no FP8, no softcap), built with CUDA 12, whose run-time library it needs beside PyTorch's own:

    pip install --no-deps --target build/fa3 xformers==0.0.34 nvidia-cuda-runtime-cu12
    LD_LIBRARY_PATH=build/fa3/nvidia/cuda_runtime/lib python3 bench/gpu.py --fa3 build/fa3/xformers/flash_attn_3/_C.so
"""

import torch


def load(path):
    torch.ops.load_library(path)


def _forward(q, k, v, **named):
    return torch.ops.flash_attn_3.fwd(q, k, v, **named)[:2]


def peer(cell):
    """(forward, backward) of a Cell of gpu.py, packed or not: each runs once and returns its results."""
    ends = {"max_seqlen_q": cell.seqlen, "max_seqlen_k": cell.seqlen, "cu_seqlens_q": cell.cu, "cu_seqlens_k": cell.cu} if cell.packed else {}
    named = {"is_causal": cell.causal and cell.window[0] < 0, "window_size_left": cell.window[0], "window_size_right": cell.window[1], **ends}
    out, lse = _forward(cell.q, cell.k, cell.v, **named)
    grads = [torch.empty_like(t) for t in (cell.q, cell.k, cell.v)]

    def forward():
        return [_forward(cell.q, cell.k, cell.v, **named)[0]]

    def backward():
        torch.ops.flash_attn_3.bwd(cell.dout, cell.q, cell.k, cell.v, out, lse, *grads, deterministic=cell.deterministic, **named)
        return grads

    return forward, backward


def few_queries(q, k, v):
    """O of queries that see all keys; FlashAttention-3 chooses its parts of the keys by itself."""
    return _forward(q, k, v)[0]


def causal(q, k, v, **lengths):
    """O of the last queries, each of which sees the keys up to its own place; likewise. lengths: of packed sequences."""
    return _forward(q, k, v, is_causal=True, **lengths)[0]


def latent(q, kv, columns, scale):
    """O of multi-head latent attention, causal: kv [batch, keys, 1, d], whose first `columns` are V too and the others rotary."""
    return _forward(q[..., columns:], kv[..., columns:], kv[..., :columns], q_v=q[..., :columns], softmax_scale=scale, is_causal=True)[0]
