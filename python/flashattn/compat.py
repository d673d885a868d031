"""Opt-in: make `import flash_attn` and `import flash_attn_interface` find this package.

    import flashattn.compat
    flashattn.compat.install()

Refuses when the real package is already imported, so that one process never mixes the two by accident.
"""

import importlib
import importlib.machinery
import sys
import types

# What flash_attn reports of itself; clients compare it with the oldest that they accept.
FLASH_ATTN_VERSION = "2.8.4"


def _module(name, source, **extra):
    module = types.ModuleType(name, f"flashattn's functions under the name {name}.")
    module.__dict__.update({key: value for key, value in vars(source).items() if not key.startswith("_")}, **extra)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == "flash_attn")
    module.__flashattn__ = True
    return module


def install():
    """Register the modules flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding and flash_attn_interface."""
    for name in ("flash_attn", "flash_attn_interface"):
        if name in sys.modules and not hasattr(sys.modules[name], "__flashattn__"):
            raise ImportError(f"{name} is imported already and is not flashattn's: call flashattn.compat.install() first")
    interface = importlib.import_module("flashattn.interface")
    interface3 = importlib.import_module("flashattn.interface3")
    padding = importlib.import_module("flashattn.bert_padding")
    package = _module("flash_attn", interface, __version__=FLASH_ATTN_VERSION, __path__=[])
    for name, source in (("flash_attn_interface", interface), ("bert_padding", padding)):
        module = _module(f"flash_attn.{name}", source)
        setattr(package, name, module)
        sys.modules[f"flash_attn.{name}"] = module
    sys.modules["flash_attn"] = package
    sys.modules["flash_attn_interface"] = _module("flash_attn_interface", interface3)


def uninstall():
    """Undo install."""
    for name in [name for name, module in sys.modules.items() if hasattr(module, "__flashattn__")]:
        del sys.modules[name]
