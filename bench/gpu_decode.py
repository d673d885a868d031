"""The table of gpu.py --decode: few queries on many keys, in GB/s."""

import itertools

import card  # first: it finds the library
import fa3
import torch
from flashattn import _call
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Decode:
    """Few queries on many keys. A pool of random numbers serves all cells; `sets` calls have keys of their own in it."""

    HEADS, HEADS_K, L2_BYTES, MOST_SETS, LEAST_POOL = 32, 8, 512 << 20, 128, 1 << 29
    PAGES = {"paged16": 16, "paged64": 64, "paged256": 256}

    def __init__(self, pool, d, queries, batch, keys, padded=False):
        self.d, self.queries, self.batch, self.keys, self.pool = d, queries, batch, keys, pool
        elements = 2 * batch * keys * self.HEADS_K * d
        self.kv_bytes = 2 * elements
        self.sets = max(1, min(self.MOST_SETS, -(-self.L2_BYTES // self.kv_bytes), pool.numel() // elements))
        self.kv = [pool[n * elements : (n + 1) * elements].view(2, batch, keys, self.HEADS_K, d) for n in range(self.sets)]
        self.q = torch.randn(batch, queries, self.HEADS, d, device=card.DEVICE, dtype=torch.bfloat16)
        self.bytes, self.bias = self.kv_bytes + 4 * self.q.numel(), None
        if padded:  # on the left, by up to a quarter of the keys
            hidden = torch.arange(keys, device=card.DEVICE) < torch.randint(0, keys // 4 + 1, (batch, 1, 1, 1), device=card.DEVICE)
            self.bias = torch.zeros(hidden.shape, device=card.DEVICE, dtype=torch.bfloat16).masked_fill_(hidden, float("-inf"))

    def wrong(self, out, table=None, page=0):
        """The relative L2 error of the last entry of the last set, or None if all is well."""
        k, v = self.kv[-1]
        if table is not None:
            k, v = (t.view(-1, page, self.HEADS_K, self.d)[table[-1].long()].reshape(1, self.keys, self.HEADS_K, self.d) for t in (k, v))
        group, error, norm = self.HEADS // self.HEADS_K, 0.0, 0.0
        for head in range(self.HEADS_K):
            q = self.q[-1, :, head * group : (head + 1) * group].double()
            scores = torch.einsum("qhd,kd->hqk", q, k[-1, :, head].double()) * self.d**-0.5
            scores = scores if self.bias is None else scores + self.bias[-1]
            truth = torch.einsum("hqk,kd->qhd", torch.softmax(scores, -1), v[-1, :, head].double())
            error += (out[-1, :, head * group : (head + 1) * group].double() - truth).square().sum()
            norm += truth.square().sum()
        error = (error / norm).sqrt().item()
        return None if error <= 1e-2 else error

    def ours(self, page=0, parts=0, context=None):
        """(calls, error): the calls of all sets; they run once. parts: num_splits."""
        table, out = None, torch.full_like(self.q, float("nan"))
        if page:
            pages = self.batch * self.keys // page
            table = torch.randperm(pages, device=card.DEVICE).to(torch.int32).view(self.batch, -1)
        calls = []
        for k, v in self.kv:
            if page:
                k, v = (t.reshape(-1, page, self.HEADS_K, self.d) for t in (k, v))
            call = _call.Call(self.q, k, v, bias=self.bias, block_table=table, num_splits=parts)
            call.context = context
            call._set_results(out, None)
            calls.append(call)
        run = card.forwards(calls, context)
        run()
        return run, self.wrong(out, table, page)

    def fa3(self):
        def run():
            return [fa3.few_queries(self.q, k, v) for k, v in self.kv][-1]

        return run, self.wrong(run())

    def peer(self, backend):
        q, kv = self.q.transpose(1, 2), [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in self.kv]
        bias = None if self.bias is None else self.bias.expand(-1, self.HEADS, self.queries, -1)

        def run():
            with sdpa_kernel(backend), torch.no_grad():
                return [scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True) for k, v in kv][-1]

        return run, self.wrong(run().transpose(1, 2))

    def read(self):
        views = [kv.view(-1).view(torch.float32) for kv in self.kv]
        return lambda: [view.sum() for view in views], None

    def copy(self):
        half, n = self.pool[self.pool.numel() // 2 :], self.kv[0].numel() // 2
        pairs = [(half[at : at + n], kv[0].reshape(-1)) for at, kv in zip(range(0, half.numel() - n + 1, n), self.kv)]
        if len(pairs) < len(self.kv) or pairs[0][0].data_ptr() < self.kv[-1].data_ptr() + self.kv_bytes:
            raise MemoryError("no room for a copy")
        return lambda: [to.copy_(k) for to, k in pairs], None

    def run_of(self, name):
        own = {"ours": self.ours, "by batch": lambda: self.ours(parts=-1), "read": self.read, "copy": self.copy, "fa3": self.fa3}
        return own[name]() if name in own else self.ours(self.PAGES[name]) if name in self.PAGES else self.peer(card.PEERS[name])

    def graph(self, name):
        """What replays the calls of all sets, or "WRONG ..."."""
        return card.graph_of(*self.run_of(name))


def decode_row(cell, names, groups):
    """{name: GB/s, "WRONG ..." or None where it has no kernel}"""
    row, times = card.time_graphs(cell.graph, names, groups, ("flash", "cudnn", "fa3", "copy"))
    for name, ms in times.items():
        row[name] = (cell.kv_bytes if name in ("read", "copy") else cell.bytes) * cell.sets / ms / 1e6
    return row


def decode(options):
    """The table. Returns its rows."""
    pages = [name for name, size in Decode.PAGES.items() if options.pages in (0, size)]
    names = ["read", "copy", "ours", "by batch", *pages, *(["flash"] if not options.bias else []), "cudnn", *(["fa3"] if options.fa3 else [])]
    heads, rows = [d for d, _ in options.head_dims], []
    largest = 4 * max(options.seqlens) * max(map(int, options.batches.split(","))) * Decode.HEADS_K * max(heads)
    pool = torch.empty(max(largest, Decode.LEAST_POOL), device=card.DEVICE, dtype=torch.bfloat16).normal_()
    peers = names[names.index("cudnn") - (not options.bias) :]
    header = f"{'d':>3} {'q':>2} {'b':>2} {'keys':>6} | " + " ".join(f"{n:>8}" for n in names) + " |     us  /read " + " ".join(f"{'/' + n:>6}" for n in peers)
    print(header, "-" * len(header), sep="\n")
    for d, queries, batch, keys in itertools.product(heads, *(map(int, x.split(",")) for x in (options.queries, options.batches)), options.seqlens):
        cell = Decode(pool, d, queries, batch, keys, bool(options.bias))
        row = decode_row(cell, names, options.groups)
        speeds = {n: x for n, x in row.items() if isinstance(x, float)}
        over = [speeds["ours"] / speeds[n] if "ours" in speeds and n in speeds else None for n in ("read", *peers)]
        shown = [f"{x:8.0f}" if isinstance(x, float) else f"{x or '-':>8}" for x in map(row.get, names)]
        print(f"{d:3} {queries:2} {batch:2} {keys:6} | " + " ".join(shown) + f" | {cell.bytes / speeds.get('ours', 1e99) / 1e3:6.1f}  " +
              "  ".join(f"{x:5.2f}" if x else "    -" for x in over), flush=True)
        rows.append({"pass": "decode", "head_dim": d, "queries": queries, "batch": batch, "seqlen": keys, "bias": options.bias, "gigabytes_per_second": row})
        del cell
    return rows
