// The header alone, as C++17 and (by header.c) as C11, under the strictest warnings; every function is exported by the
// shared library.
#include "flashattn.h"

int main()
{
    flash_attn_problem problem    = {};
    problem.mask                  = FLASH_ATTN_CAUSAL;
    using any_function            = void (*)();
    const any_function exported[] = {reinterpret_cast<any_function>(flash_attn_status_string),
                                     reinterpret_cast<any_function>(flash_attn_last_error),
                                     reinterpret_cast<any_function>(flash_attn_version),
                                     reinterpret_cast<any_function>(flash_attn_create),
                                     reinterpret_cast<any_function>(flash_attn_destroy),
                                     reinterpret_cast<any_function>(flash_attn_get_device_info),
                                     reinterpret_cast<any_function>(flash_attn_forward),
                                     reinterpret_cast<any_function>(flash_attn_backward),
                                     reinterpret_cast<any_function>(flash_attn_workspace_size),
                                     reinterpret_cast<any_function>(flash_attn_prepare),
                                     reinterpret_cast<any_function>(flash_attn_compile),
                                     reinterpret_cast<any_function>(flash_attn_explain),
                                     reinterpret_cast<any_function>(flash_attn_append_kv),
                                     reinterpret_cast<any_function>(flash_attn_merge),
                                     reinterpret_cast<any_function>(flash_attn_ring_get_share),
                                     reinterpret_cast<any_function>(flash_attn_ring_forward),
                                     reinterpret_cast<any_function>(flash_attn_ring_backward),
                                     reinterpret_cast<any_function>(flash_attn_ring_workspace_size)};
    for (any_function function : exported)
        if (function == nullptr)
            return 1;
    return flash_attn_forward(nullptr, &problem, nullptr) == FLASH_ATTN_INVALID ? 0 : 1;
}
