"""flashattn: exact attention, fast, on CPU and CUDA, with flash_attn's functions. NumPy, PyTorch or any DLPack array."""

from ._arrays import view
from ._call import Call, append_kv, merge
from ._native import (CompileError, FlashAttnError, InvalidError, LaunchError, NoDeviceError, NoMemoryError,
                      TransportError, UnsupportedError, device_info)
from ._native import version as __version__
from .interface import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
                        flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache)
from .masks import BlockMask, flash_attn_masked_func
