"""Ring attention (context parallelism): one sequence over the ranks of a torch.distributed group, with autograd, on CPU tensors
(Gloo) and CUDA tensors (NCCL). docs/dist.md says what travels and which layout does what.

    mine = ring_share(seqlen)                                  # the positions of this rank's rows: for rotary embeddings
    x = ring_scatter(tokens)                                   # tokens[:, mine]
    out = ring_flash_attn_func(q, k, v, causal=True, seqlen=seqlen)

Every rank of the group calls it, and its backward, with its own rows and the same options, in the same order, as for every
collective.
"""

import contextlib
import ctypes
from operator import index

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from . import _native
from ._arrays import is_torch, wants_gradient
from ._call import Call
from ._native import check, lib
from ._scratch import finish
from .torch_ops import _DOUBLE_BACKWARD

_LAYOUTS = {"contiguous": 0, "zigzag": 1, "striped": 2}


# ---- who has what ----


def _place(group):
    """(rank, ranks) of this process in the group. Without torch.distributed it is alone."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise _native.InvalidError("this process is not in the group: only its ranks may call")
    return rank, dist.get_world_size(group)


def _layout(name):
    if name not in _LAYOUTS:
        raise _native.InvalidError(f"layout is {name!r}: expected {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name]


def _lengths(seqlen, count):
    """seqlen, a number or `count` of them, as `count` numbers."""
    try:
        lengths = [index(n) for n in (seqlen if isinstance(seqlen, (tuple, list)) else [seqlen] * count)]
    except TypeError:
        lengths = []
    if len(lengths) != count or max(map(abs, lengths)) >= 2**63:
        pair = ", or two, of q and of k" if count == 2 else ""
        raise _native.InvalidError(f"seqlen is {seqlen!r}: expected a number of positions{pair}")
    return lengths


def _positions(seqlen, layout, ranks, rank, device=None):
    share, (seqlen,) = _native.RingShare(), _lengths(seqlen, 1)
    check(lib.flash_attn_ring_get_share(_layout(layout), ranks, rank, seqlen, ctypes.byref(share)))
    return torch.cat([torch.arange(begin, begin + count * share.step, share.step, dtype=torch.int64, device=device)
                      for begin, count in zip(share.begin, share.count)])


def ring_share(seqlen, layout="zigzag", group=None, *, device=None):
    """The positions that this rank has of a sequence of `seqlen`, in the order of its rows: int64 [rows]. seqlen need not be
    divisible; a share may be empty."""
    rank, ranks = _place(group)
    return _positions(seqlen, layout, ranks, rank, device)


def ring_scatter(tensor, layout="zigzag", group=None, *, dim=1):
    """This rank's rows of a tensor that every rank has whole. Nothing is sent. Differentiable: the gradient of the other ranks'
    rows is 0."""
    return tensor.index_select(dim, ring_share(tensor.shape[dim], layout, group, device=tensor.device))


def ring_gather(tensor, layout="zigzag", group=None, *, dim=1, seqlen=None):
    """The whole of which each rank has its rows: ring_scatter's inverse, on every rank. seqlen: as for ring_flash_attn_func.
    Without gradient."""
    rank, ranks = _place(group)
    seqlen = tensor.shape[dim] * ranks if seqlen is None else seqlen
    shares = [_positions(seqlen, layout, ranks, n, tensor.device) for n in range(ranks)]
    rows, most = tensor.shape[dim], max(len(share) for share in shares)
    if rows != len(shares[rank]):
        raise _native.InvalidError(f"tensor.shape[{dim}] is {rows}, expected {len(shares[rank])}, what rank {rank} of {ranks} "
                                   f"has of {seqlen} positions")
    with torch.no_grad():
        own = tensor.movedim(dim, 0)
        whole = own.new_empty((seqlen, *own.shape[1:]))
        padded = own.new_zeros((most, *own.shape[1:]))  # every rank sends as much
        padded[:rows] = own
        sent = padded.flatten().view(torch.uint8)  # no engine knows every dtype
        parts = [sent] if ranks == 1 else [torch.empty_like(sent) for _ in range(ranks)]
        if ranks > 1:
            dist.all_gather(parts, sent, group=group)
        for share, part in zip(shares, parts):
            whole[share] = part.view(own.dtype).view(padded.shape)[: len(share)]
        return whole.movedim(0, dim)


# ---- the transport ----


class _Transport:
    """torch.distributed as the library's engine. What travels lies in `workspace`, but for the ranks' notes, which are host
    memory of the library's and are copied: so whatever is still under way when a call fails moves memory that is PyTorch's."""

    def __init__(self, group, host_group):
        self.group, self.host_group = group, host_group
        self.rank, self.ranks = _place(group)
        self.workspace = self.error = None
        self.under_way, self.notes = [], []
        if self.ranks > 1:
            members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
            if host_group is not None and (dist.get_rank(host_group) < 0 or dist.get_process_group_ranks(host_group) != members):
                raise _native.InvalidError("host_group has other ranks than group, expected the same")
            self.next, self.previous = members[(self.rank + 1) % self.ranks], members[self.rank - 1]

    def check_group(self, device):
        """Gloo would take the address for the host's."""
        if self.ranks > 1 and device.type == "cuda" and "cuda:gloo" in dist.get_backend_config(self.group):
            raise _native.InvalidError("q is on a GPU but the group is Gloo's, which sends host memory only: expected nccl")

    def struct(self):
        # A plain address, for a callback bound to self would keep self, and its workspace, until the garbage collector came.
        return _native.Transport(begin=_BEGIN, wait=_WAIT, exchange_host=None if self.host_group is None else _EXCHANGE,
                                 user=id(self))

    def _bytes(self, address, count):
        """(the tensor of this memory, whether it is the library's own)"""
        if self.workspace is not None:
            at = address - self.workspace.data_ptr()
            if 0 <= at and at + count <= self.workspace.numel():
                return self.workspace[at : at + count], True
        return torch.empty(count, dtype=torch.uint8, device="cpu"), False

    def _start(self, group, send, send_bytes, recv, recv_bytes):
        ops = []  # nothing to send here is nothing to receive there
        if send_bytes:
            tensor, there = self._bytes(send, send_bytes)
            if not there:
                ctypes.memmove(tensor.data_ptr(), send, send_bytes)
            ops.append(dist.P2POp(dist.isend, tensor, self.next, group))
        if recv_bytes:
            tensor, there = self._bytes(recv, recv_bytes)
            if not there:
                self.notes.append((recv, tensor))
            ops.append(dist.P2POp(dist.irecv, tensor, self.previous, group))
        if ops:
            self.under_way += dist.batch_isend_irecv(ops)

    def begin(self, send, send_bytes, recv, recv_bytes, stream):
        self._start(self.group, send, send_bytes, recv, recv_bytes)

    def wait(self, stream):
        """The host waits for Gloo; PyTorch's current stream, which is the call's, waits for NCCL."""
        for work in self.under_way:
            work.wait()
        for address, tensor in self.notes:
            ctypes.memmove(address, tensor.data_ptr(), tensor.numel())
        self.under_way, self.notes = [], []

    def exchange(self, send, recv, count):
        self._start(self.host_group, send, count, recv, count)
        self.wait(None)

    def give_up(self):
        """A GPU's stream goes on when what was begun is done; on the host each transfer holds its memory until it ends."""
        if self.workspace is not None and self.workspace.is_cuda:
            for work in self.under_way:
                with contextlib.suppress(Exception):
                    work.wait()
        self.under_way, self.notes = [], []


def _callback(method, *types):
    """A C function that returns 0, or 1 when the method has raised: the call then fails, and _Ring raises it again."""

    def run(user, *arguments):
        transport = ctypes.cast(user, ctypes.py_object).value
        try:
            method(transport, *arguments)
        except BaseException as error:
            transport.error = error
            transport.give_up()
            return 1
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *types)(run)


_callbacks = (
    _callback(_Transport.begin, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    _callback(_Transport.wait, ctypes.c_void_p),
    _callback(_Transport.exchange, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t))
_BEGIN, _WAIT, _EXCHANGE = (ctypes.cast(callback, ctypes.c_void_p).value for callback in _callbacks)


# ---- a pass ----


class _Ring:
    """What both passes of one attention have in common."""

    def __init__(self, group, host_group, layout, seqlen, options):
        self.group, self.host_group, self.layout, self.seqlen, self.options = group, host_group, layout, seqlen, options

    def _struct(self, transport, q, k):
        seqlen = [t.shape[1] * transport.ranks for t in (q, k)] if self.seqlen is None else self.seqlen
        seqlen_q, seqlen_k = _lengths(seqlen, 2)
        return _native.Ring(rank=transport.rank, ranks=transport.ranks, layout=_layout(self.layout), seqlen_q=seqlen_q,
                            seqlen_k=seqlen_k, transport=transport.struct())

    def _run(self, which, q, k, v, sinks, fill):
        """One pass. fill(call): make what it writes and return the addresses of the problem and, backward, of the gradients."""
        transport = _Transport(self.group, self.host_group)
        try:
            for name, t in (("q", q), ("k", k), ("v", v)):
                if not is_torch(t):
                    raise _native.InvalidError(f"{name} is {type(t).__name__}: expected a PyTorch tensor")
            transport.check_group(q.device)
            call = Call(q, k, v, sinks=sinks, **self.options)
            addresses = fill(call)
            ring = self._struct(transport, q, k)
            run = call.exec or _native.Exec()
            if transport.ranks > 1:
                self._take_workspace(transport, call, ring, which, run)
        except Exception:
            self._tell(transport, q)
            raise
        function = lib.flash_attn_ring_forward if which == _native.FORWARD else lib.flash_attn_ring_backward
        with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():  # NCCL's, too
            self._finish(transport, function(_native.context, *addresses, ctypes.byref(ring), ctypes.addressof(run)))

    @staticmethod
    def _take_workspace(transport, call, ring, which, run):
        size = ctypes.c_size_t()
        status = lib.flash_attn_ring_workspace_size(_native.context, call.address, ctypes.byref(ring), which, ctypes.byref(size))
        if status == 0:  # else the pass fails the same way, and tells the others
            transport.workspace = call.q.new_empty(size.value, dtype=torch.uint8)
            run.workspace, run.workspace_bytes = transport.workspace.data_ptr(), size.value

    @staticmethod
    def _tell(transport, q):
        """The others wait for this rank's word: a pass over nothing fails everywhere. Without host_group a GPU's ranks tell
        each other nothing."""
        if transport.ranks > 1 and (transport.host_group is not None or is_torch(q) and q.is_cpu):
            ring = _native.Ring(rank=transport.rank, ranks=transport.ranks, transport=transport.struct())
            problem = _native.Problem()
            lib.flash_attn_ring_forward(_native.context, ctypes.addressof(problem), ctypes.byref(ring), None)
            if not isinstance(transport.error, (Exception, type(None))):  # an interrupt, say
                raise transport.error

    @staticmethod
    def _finish(transport, status):
        error, transport.error = transport.error, None
        try:
            finish(status)
        except _native.FlashAttnError as failure:
            if error is None:
                raise
            raise error from failure

    def forward(self, q, k, v, sinks, want_lse):
        results = []

        def fill(call):
            batch, rows, heads, _ = call.found_q.shape
            results[:] = q.new_empty((batch, rows, heads, call.head_dim_v)), None
            if want_lse:
                results[1] = q.new_empty((batch, heads, rows), dtype=torch.float32)
            call._set_results(*results)
            return (call.address,)

        self._run(_native.FORWARD, q, k, v, sinks, fill)
        return results

    def backward(self, dout, q, k, v, sinks, out, lse, wanted):
        grads = [torch.empty_like(t) if want else None for t, want in zip((q, k, v), wanted)]
        grads.append(torch.empty_like(sinks, dtype=torch.float32) if wanted[3] else None)
        dq, dk, dv, dsinks = grads

        def fill(call):
            problem, at = call.backward_addresses(dout, out, lse, dq, dk, dv, None, dsinks)
            struct = _native.Grads.from_address(at)
            for name, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
                if grad is not None and grad.numel() == 0:  # PyTorch gives it no address, and to C it would not be wanted
                    getattr(struct, name).data = problem
            return problem, at

        self._run(_native.BACKWARD, q, k, v, sinks, fill)
        return dq, dk, dv, None if dsinks is None else dsinks.to(sinks.dtype)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring, wanted, dout, q, k, v, sinks, out, lse):
        return ring.backward(dout, q, k, v, sinks, out, lse, wanted)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(_DOUBLE_BACKWARD)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, ring, want_lse):
        out, lse = ring.forward(q, k, v, sinks, want_lse)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.set_materialize_grads(False)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if dout is None:  # the other ranks' gradients pass through here all the same
            dout = torch.zeros_like(out)
        return (*_Backward.apply(ctx.ring, ctx.needs_input_grad[:4], dout, q, k, v, sinks, out, lse), None, None)


def _attend(q, k, v, sinks, ring, return_attn_probs):
    want_lse = return_attn_probs or wants_gradient(q, k, v, sinks)
    out, lse = _Function.apply(q, k, v, sinks, _Ring(*ring), want_lse)
    return (out, lse, None) if return_attn_probs else out


_attend_outside = _disable_dynamo(_attend)  # imports the compiler, for which nobody else should wait


def ring_flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                         alibi_slopes=None, deterministic=False, return_attn_probs=False, *, layout="zigzag", seqlen=None,
                         sinks=None, group=None, host_group=None):
    """flash_attn_func over a sequence that the ranks of `group` share: q [batch, rows, heads_q, d], k [batch, rows, heads_k, d]
    and v [batch, rows, heads_k, dv] are this rank's rows, at the positions ring_share(seqlen, layout, group); so is out
    [batch, rows, heads_q, dv]. Masks are the whole sequence's, aligned bottom right. With return_attn_probs also softmax_lse
    float32 [batch, heads_q, rows] and None.

    layout: "contiguous" (rank after rank), "zigzag" or "striped", which give all ranks the same work under a causal mask; the
    one by which the rows were dealt. seqlen: of the whole; two numbers (of q, of k) where they differ. None: all ranks have as
    many rows as this one. sinks [heads_q]: logits of no key; the gradient is the part of this rank's queries, to be added up
    over the ranks as any parameter's. Without torch.distributed there is one rank. dropout_p and alibi_slopes are refused.

    When one rank is given nonsense, or something else than the others: on the CPU every rank raises, nothing has been
    written, and the group can be used again. On CUDA only with host_group, a Gloo group of the same ranks
    (dist.new_group(backend="gloo")) by which their hosts agree before and after each pass, some tens of microseconds a rank;
    without it the rank raises alone, and the others' streams wait until NCCL's time limit, as for every collective. A rank whose
    transfer fails raises what torch.distributed raised; the group is then of no more use."""
    options = dict(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
                   dropout_p=dropout_p, deterministic=deterministic)
    attend = _attend_outside if torch.compiler.is_compiling() else _attend  # a graph breaks here
    return attend(q, k, v, sinks, (group, host_group, layout, seqlen, options), return_attn_probs)


__all__ = ["ring_flash_attn_func", "ring_share", "ring_scatter", "ring_gather"]
