/* From options and files to a flash_attn_problem: what `run` and `explain` share. */
#ifndef CLI_PROBLEM_H
#define CLI_PROBLEM_H

#include "npy.h"
#include "options.h"

/* Every option of a problem that is not q, k, v themselves. Names of files are .npy. */
typedef struct cli_problem_flags {
    bool               causal, deterministic;
    cli_window         window;
    cli_number         softcap, scale;
    flash_attn_dropout dropout;
    const char        *bias, *alibi, *sinks;
    const char        *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k, *leftpad_k, *cache_batch_idx;
    const char        *page_table, *slices, *slice_offsets;
    const char        *descale_q, *descale_k, *descale_v;
    int64_t            max_seqlen_q, max_seqlen_k, num_splits;
} cli_problem_flags;

extern const cli_option cli_problem_options[]; /* a table for cli_problem_flags */

/* Where a call runs. */
typedef struct cli_where_flags {
    cli_device     device;
    flash_attn_isa isa;
    int64_t        threads;
    bool           no_amx_split;
} cli_where_flags;

extern const cli_option cli_where_options[]; /* a table for cli_where_flags */

/* A problem and the memory it points to. */
typedef struct cli_problem {
    flash_attn_problem problem;
    void              *memory[48];
    size_t             memory_bytes[48];
    int                num_memory;
} cli_problem;

/* malloc'ed memory that the problem owns from now on; NULL after a message: none left. */
void *cli_problem_own(cli_problem *owner, void *memory, size_t bytes);
void  cli_problem_free(cli_problem *owner);

/* Read a tensor file of four dimensions. raw says what 16-bit or 8-bit words without a type of their own are. `field`
 * names the tensor in messages, `dims` its dimensions. A file of fewer dimensions is padded by `pad`:
 * cli_pad_none refuses it, cli_pad_heads makes [h] and [b, h] into [1 or b, h, 1, 1]. Returns CLI_GO_ON or CLI_REFUSED.
 */
typedef enum cli_pad { CLI_PAD_NONE, CLI_PAD_HEADS } cli_pad;
int cli_problem_read(cli_problem *owner, const char *field, const char *dims, const char *path, cli_dtype raw,
                     cli_pad pad, flash_attn_tensor *tensor);

/* With q, k, v set (data may be NULL), fill in everything that the flags ask for, reading their files. */
int cli_problem_apply(cli_problem *owner, const cli_problem_flags *flags, cli_dtype raw);

/* A context as the flags ask for. Returns CLI_GO_ON or CLI_REFUSED. */
int cli_make_context(const cli_where_flags *flags, flash_attn_context **context);

/* Bytes of a contiguous tensor; -1: more than fit in 63 bits, or a negative dimension. */
int64_t cli_tensor_bytes(const flash_attn_tensor *tensor);
size_t  cli_dtype_bytes(flash_attn_dtype dtype);

#endif
