/* flashattn compile: fill a folder with GPU kernels for machines without NVRTC. Needs no GPU. */
#include "cli.h"
#include "options.h"
#include "problem.h"
#include "shape.h"

typedef struct compile_flags {
    const char *out;
    cli_list    arch;
    bool        forward_only;
} compile_flags;

#define FIELD(name) offsetof(compile_flags, name)
static const cli_option compile_options[] = {
    {"out", "FOLDER", cli_parse_text, FIELD(out), "where the kernels go; made if missing"},
    {"arch", "LIST", cli_parse_counts, FIELD(arch), "compute capabilities: 80,86,89,90,100,120; default all of them"},
    {"forward-only", NULL, cli_parse_switch, FIELD(forward_only), "not the backward's kernels"},
    {0},
};
#undef FIELD

static const cli_help compile_help = {
    .command  = "compile",
    .usage    = "--out FOLDER [--arch LIST] [shape] [problem]",
    .about    = "Build the GPU kernels of a call ahead and put them into a folder. A program on a machine without\n"
                "NVRTC gives that folder as flash_attn_options.kernel_folder. Run again with other shapes and\n"
                "options to add more. What counts is the type, the head dims, the mask, the options and how many\n"
                "query heads share a key head; of lengths and batches all are served, unless they are given, as\n"
                "numbers or by a file: then such calls alone.",
    .examples = "  flashattn compile --out kernels --dtype bf16 --head-dim 128 --causal\n"
                "  flashattn compile --out kernels --arch 80,90 --dtype f16 --head-dim 64 --softcap 30 --forward-only",
};

/* The problems to build for: of one shape, or of all lengths. */
typedef struct compile_shapes {
    const cli_shape_flags *shape;
    bool                   all_lengths, all_batches;
} compile_shapes;

static bool names_lengths(const cli_shape_flags *shape, const cli_problem_flags *p)
{
    return shape->seqlen >= 0 || shape->seqlen_q >= 0 || shape->seqlen_k >= 0 || p->max_seqlen_q > 0 ||
           p->max_seqlen_k > 0 || p->bias || p->cu_seqlens_q || p->cu_seqlens_k || p->seqused_q || p->seqused_k ||
           p->leftpad_k || p->cache_batch_idx || p->page_table || p->slices || p->slice_offsets;
}

/* By numbers that each sequence has for itself. */
static bool names_batch(const flash_attn_problem *p)
{
    return p->alibi_slopes.shape[0] > 1 || p->descale.q.shape[0] > 1 || p->descale.k.shape[0] > 1 ||
           p->descale.v.shape[0] > 1;
}

/* Kernels are chosen by lengths too, by how much of a GPU the call fills, and by how the queries of all heads of a key
 * head fill tiles. Bounds of that are powers of two and three times such, so lengths on both sides of each meet all of
 * them (found by trying, 20,000 calls of each of 180 problems). What a length has no kernel for another may have. */
static flash_attn_status compile_lengths(flash_attn_context *context, flash_attn_problem problem,
                                         const compile_shapes *shapes, flash_attn_pass pass, int32_t arch,
                                         const char *folder)
{
    enum { LONGEST = 8192, SIDES = 4 };
    static const int64_t keys[] = {0 /* as queries */, 64, 128, 256, 400, 1024, 3000, LONGEST, 131072}, batches[] = {0 /* as given */, 4, 16, 64, 512};
    const size_t         num_batches = shapes->all_batches ? sizeof batches / sizeof *batches : 1;
    flash_attn_status    result = FLASH_ATTN_UNSUPPORTED;
    if (!shapes->all_lengths)
        return flash_attn_compile(context, &problem, pass, arch, folder);
    for (int64_t queries = 1; queries <= LONGEST; queries *= 2)
        for (int side = 0; side < SIDES; side++)
            for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
                for (size_t b = 0; b < num_batches; b++) {
                    cli_shape_flags shape = *shapes->shape;
                    shape.seqlen_q        = queries * (side / 2 ? 3 : 2) / 2 + side % 2;
                    shape.seqlen_k        = keys[k] ? keys[k] : shape.seqlen_q;
                    shape.batch           = batches[b] ? batches[b] : shape.batch;
                    cli_shape_apply(&shape, &problem);
                    flash_attn_status one = flash_attn_compile(context, &problem, pass, arch, folder);
                    if (one != FLASH_ATTN_OK && one != FLASH_ATTN_UNSUPPORTED)
                        return one;
                    result = one == FLASH_ATTN_OK ? one : result;
                }
    return result;
}

/* A pass that has no kernel for an architecture is said and does not stop the others. */
static int compile_all(flash_attn_context *context, const flash_attn_problem *problem, const compile_shapes *shapes,
                       const compile_flags *flags)
{
    int built = 0, status = CLI_OK;
    for (int i = 0; i < flags->arch.count; i++)
        for (int pass = FLASH_ATTN_FORWARD; pass <= (flags->forward_only ? FLASH_ATTN_FORWARD : FLASH_ATTN_BACKWARD);
             pass++) {
            int32_t           arch = (int32_t)flags->arch.value[i];
            const char       *name = pass == FLASH_ATTN_FORWARD ? "forward" : "backward";
            flash_attn_status result =
                compile_lengths(context, *problem, shapes, (flash_attn_pass)pass, arch, flags->out);
            if (result == FLASH_ATTN_OK) {
                printf("sm_%d %s\n", arch, name);
                built++;
            } else {
                status = cli_fail_library("compile", result);
                if (result != FLASH_ATTN_UNSUPPORTED)
                    return status;
            }
        }
    printf("%d of %d built in %s\n", built, flags->arch.count * (flags->forward_only ? 1 : 2), flags->out);
    return status;
}

int cli_compile(int argc, char **argv)
{
    compile_flags     own      = {0};
    cli_shape_flags   shape    = CLI_SHAPE_DEFAULTS;
    cli_problem_flags flags    = {0};
    cli_where_flags   where    = {0};
    const cli_group   groups[] = {{"options", compile_options, &own},
                                  {"shape", cli_shape_options, &shape},
                                  {"problem", cli_problem_options, &flags}};
    shape.batch = shape.seqlen = -1;
    int go_on                  = cli_parse(&compile_help, groups, 3, argc, argv);
    if (go_on != CLI_GO_ON)
        return go_on;
    compile_shapes shapes = {&shape, !names_lengths(&shape, &flags), shape.batch < 0};
    shape.batch           = shape.batch < 0 ? 1 : shape.batch;
    shape.seqlen          = shape.seqlen < 0 ? 1024 : shape.seqlen;
    if (!own.out)
        return cli_fail_usage(&compile_help, "--out is missing: the folder to fill");
    if (own.arch.count == 0)
        own.arch = (cli_list){6, {80, 86, 89, 90, 100, 120}};

    cli_problem         owner       = {0};
    flash_attn_context *context     = NULL;
    int                 exit_status = CLI_REFUSED;
    cli_shape_apply(&shape, &owner.problem);
    if (cli_problem_apply(&owner, &flags, shape.dtype) == CLI_GO_ON &&
        cli_shape_pages(&compile_help, &shape, &owner.problem) == CLI_GO_ON &&
        cli_make_context(&where, &context) == CLI_GO_ON) {
        shapes.all_batches = shapes.all_batches && !names_batch(&owner.problem);
        exit_status        = compile_all(context, &owner.problem, &shapes, &own);
    }
    flash_attn_destroy(context);
    cli_problem_free(&owner);
    return exit_status;
}
