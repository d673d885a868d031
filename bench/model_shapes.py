"""The attention of well-known models by their published configurations: query heads on key heads, head_dim (and V's own), queries and keys of a sequence at the
resolution or length that is named, and the mask. Cross attention, to a text or an image, has few keys."""

# name: (heads, head_dim, queries, keys, causal, window)
MODELS = {
    "vit-b16 224": ("12", "64", 197, 197, False, 0),
    "vit-b16 384": ("12", "64", 577, 577, False, 0),
    "clip-l14 224": ("16", "64", 257, 257, False, 0),
    "clip-l14 text": ("12", "64", 77, 77, True, 0),
    "siglip-so400m 384": ("16", "72", 729, 729, False, 0),
    "dinov2-g14 518": ("24", "64", 1370, 1370, False, 0),
    "detr decoder": ("8", "32", 100, 850, False, 0),
    "blip2 q-former": ("12", "64", 32, 257, False, 0),
    "bert-base 128": ("12", "64", 128, 128, False, 0),
    "bert-base 512": ("12", "64", 512, 512, False, 0),
    "esm2-3b 1024": ("40", "64", 1024, 1024, False, 0),
    "whisper-large encoder": ("20", "64", 1500, 1500, False, 0),
    "whisper-large cross": ("20", "64", 448, 1500, False, 0),
    "sd1.5 512 level 1": ("8", "40", 4096, 4096, False, 0),
    "sd1.5 512 level 1 cross": ("8", "40", 4096, 77, False, 0),
    "sd1.5 512 level 2": ("8", "80", 1024, 1024, False, 0),
    "sd1.5 512 level 3": ("8", "160", 256, 256, False, 0),
    "sdxl 1024 level 2": ("10", "64", 4096, 4096, False, 0),
    "sdxl 1024 level 2 cross": ("10", "64", 4096, 77, False, 0),
    "sdxl 1024 level 3": ("20", "64", 1024, 1024, False, 0),
    "sdxl 1024 level 3 cross": ("20", "64", 1024, 77, False, 0),
    "pixart 1024 cross": ("16", "72", 4096, 300, False, 0),
    "flux 1024": ("24", "128", 4608, 4608, False, 0),
    "wan2.1-14b 480p": ("40", "128", 32760, 32760, False, 0),
    "wan2.1-14b 480p cross": ("40", "128", 32760, 512, False, 0),
    "gpt2-xl 1024": ("25", "64", 1024, 1024, True, 0),
    "phi3-mini 4096": ("32", "96", 4096, 4096, True, 0),
    "mistral-7b 8192": ("32:8", "128", 8192, 8192, True, 4096),
    "llama3-8b 2048": ("32:8", "128", 2048, 2048, True, 0),
    "llama3-8b 8192": ("32:8", "128", 8192, 8192, True, 0),
    "llama3-70b 8192": ("64:8", "128", 8192, 8192, True, 0),
    "qwen3-0.6b 4096": ("16:8", "128", 4096, 4096, True, 0),
    "gemma3-4b 8192 local": ("8:4", "256", 8192, 8192, True, 1024),
    "gemma3-4b 8192 global": ("8:4", "256", 8192, 8192, True, 0),
    "gpt-oss-20b 4096 local": ("64:8", "64", 4096, 4096, True, 128),
    "deepseek-v3 4096": ("128", "192:128", 4096, 4096, True, 0),
}


def chosen(parser, beginnings, models):
    """Those of the models whose names begin so; "": all."""
    found = {name: shape for name, shape in models.items() if name.startswith(tuple(beginnings.split(",")))}
    if not found:
        parser.error(f"--models {beginnings}: expected beginnings of {', '.join(models)}")
    return found
