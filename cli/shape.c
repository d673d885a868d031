#include "shape.h"

#define FIELD(name) offsetof(cli_shape_flags, name)
const cli_option cli_shape_options[] = {
    {"batch", "N", cli_parse_count, FIELD(batch), "default 1"},
    {"seqlen", "N", cli_parse_count, FIELD(seqlen), "queries and keys; default 1024"},
    {"seqlen-q", "N", cli_parse_count, FIELD(seqlen_q), "queries; with --cu-seqlens-q: of all sequences"},
    {"seqlen-k", "N", cli_parse_count, FIELD(seqlen_k), "keys; with --cu-seqlens-k: of all sequences"},
    {"heads", "N", cli_parse_count, FIELD(heads), "query heads; default 8"},
    {"heads-k", "N", cli_parse_count, FIELD(heads_k), "key heads; default: as --heads"},
    {"head-dim", "N", cli_parse_count, FIELD(head_dim), "default 64"},
    {"head-dim-v", "N", cli_parse_count, FIELD(head_dim_v), "default: as --head-dim"},
    {"latent", NULL, cli_parse_switch, FIELD(latent), "v is k's first columns (multi-head latent attention, MLA)"},
    {"dtype", "TYPE", cli_parse_dtype, FIELD(dtype), "f32, f16, bf16 or f8e4m3; default f32"},
    {"page-size", "N", cli_parse_count, FIELD(page_size), "keys of a page; with --page-table"},
    {0},
};
#undef FIELD

flash_attn_tensor cli_with_strides(flash_attn_tensor t)
{
    t.stride[3] = 1;
    for (int i = 2; i >= 0; i--)
        t.stride[i] = t.stride[i + 1] * t.shape[i + 1];
    return t;
}

/* V in K's memory, which nobody reads. */
static void view_of_k(flash_attn_tensor *k, flash_attn_tensor *v)
{
    static _Alignas(256) char memory[1];
    int64_t columns = v->shape[3];
    *k          = cli_with_strides(*k);
    k->data     = memory;
    *v          = *k;
    v->shape[3] = columns;
}

void cli_shape_apply(const cli_shape_flags *flags, flash_attn_problem *p)
{
    int64_t          seqlen_q = flags->seqlen_q >= 0 ? flags->seqlen_q : flags->seqlen;
    int64_t          seqlen_k = flags->seqlen_k >= 0 ? flags->seqlen_k : flags->seqlen;
    int64_t          heads_k  = flags->heads_k >= 0 ? flags->heads_k : flags->heads;
    int64_t          dim_v    = flags->head_dim_v >= 0 ? flags->head_dim_v : flags->head_dim;
    flash_attn_dtype dtype    = flags->dtype.dtype;
    p->q   = (flash_attn_tensor){.dtype = dtype, .shape = {flags->batch, seqlen_q, flags->heads, flags->head_dim}};
    p->k   = (flash_attn_tensor){.dtype = dtype, .shape = {flags->batch, seqlen_k, heads_k, flags->head_dim}};
    p->v   = (flash_attn_tensor){.dtype = dtype, .shape = {flags->batch, seqlen_k, heads_k, dim_v}};
    if (flags->latent)
        view_of_k(&p->k, &p->v);
    p->o   = (flash_attn_tensor){.dtype = dtype == FLASH_ATTN_F8E4M3 ? FLASH_ATTN_BF16 : dtype};
    p->lse = (flash_attn_tensor){.dtype = FLASH_ATTN_F32};
}

int cli_shape_pages(const cli_help *help, const cli_shape_flags *flags, flash_attn_problem *p)
{
    int64_t batch = p->cu_seqlens_q ? p->batch : flags->batch;
    if ((p->pages.table != NULL) != (flags->page_size > 0))
        return cli_fail_usage(help, "--page-table and --page-size go together");
    if (flags->latent && p->v.shape[3] > p->k.shape[3])
        return cli_fail_usage(help, "--latent: --head-dim-v is at most --head-dim, for v is k's first columns");
    int64_t num_pages = 0;
    if (p->pages.table) {
        for (int64_t n = 0; n < batch * p->pages.pages_per_seq; n++)
            num_pages = p->pages.table[n] >= num_pages ? (int64_t)p->pages.table[n] + 1 : num_pages;
        p->k.shape[0] = p->v.shape[0] = num_pages;
        p->k.shape[1] = p->v.shape[1] = flags->page_size;
        if (flags->latent)
            view_of_k(&p->k, &p->v);
    }
    return CLI_GO_ON;
}
