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

_PRIVATE = "_flash_attn_", "_wrapped_flash_attn_"  # names that clients import all the same


def _module(name, source, **extra):
    module = types.ModuleType(name, f"flashattn's functions under the name {name}.")
    shown = {key: value for key, value in vars(source).items() if key.startswith(_PRIVATE) or not key.startswith("_")}
    module.__dict__.update(shown, **extra)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package="__path__" in extra)
    module.__flashattn__ = True
    return module


def install():
    """Register the modules flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding; flash_attn_interface, and
    flash_attn_3, which has that too."""
    for name in ("flash_attn", "flash_attn_interface", "flash_attn_3"):
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
    third = _module("flash_attn_interface", interface3)
    package3 = _module("flash_attn_3", types.SimpleNamespace(flash_attn_interface=third), __path__=[])
    sys.modules.update({"flash_attn_interface": third, "flash_attn_3": package3, "flash_attn_3.flash_attn_interface": third})


def uninstall():
    """Undo install."""
    for name in [name for name, module in sys.modules.items() if hasattr(module, "__flashattn__")]:
        del sys.modules[name]
