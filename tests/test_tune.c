/* Stored choices of tiles: used when they are whole and of this machine, and no harm when they are not. With --measure:
 * flash_attn_tune itself, which takes its time. With --one-dtype: a problem and a tile
 * with one dtype, by turns, and one number of threads. */
#include "cpu/cpu.h"
#include "file.h"
#include "harness.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char home[64], path[128];
static bool one_dtype;

/* ---- files ---- */

static void write_file(const char *to, const char *bytes, size_t count)
{
    unlink(to);
    int file = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(file >= 0);
    assert_int_equal(write(file, bytes, count), count);
    close(file);
}

/* `body` behind what names this machine, and a hash that is right. */
static void write_body(const char *body)
{
    fa_isa isa;
    char   text[4096];
    int    version = flash_attn_version();
    fa_isa_detect(&isa);
    int                used = snprintf(text, sizeof text,
                                       "flashattn-tune 1\nlibrary %d.%d.%d\nprocessor %s\nfeatures %s\ncaches %lld %lld %lld\n%s",
                                       version / 10000, version / 100 % 100, version % 100, isa.name, isa.features,
                                       (long long)isa.l1_bytes, (long long)isa.l2_bytes, (long long)isa.l3_bytes, body);
    unsigned long long hash = fa_hash_bytes(FA_HASH_START, text, (size_t)used);
    used += snprintf(text + used, sizeof text - (size_t)used, "hash %016llx\n", hash);
    write_file(path, text, (size_t)used);
}

static size_t read_back(char *bytes, size_t most)
{
    int file = open(path, O_RDONLY);
    assert_true(file >= 0);
    ssize_t got = read(file, bytes, most);
    close(file);
    assert_true(got > 0);
    return (size_t)got;
}

static flash_attn_context *context_of(const char *file, flash_attn_isa isa)
{
    flash_attn_context *context;
    flash_attn_options  options = {.num_threads = HARNESS_THREADS, .max_isa = isa, .tune_file = file};
    expect_status(flash_attn_create(&context, &options), FLASH_ATTN_OK, "create");
    return context;
}

static flash_attn_tuning tuning_of(const char *file)
{
    flash_attn_context    *context = context_of(file, FLASH_ATTN_ISA_AUTO);
    flash_attn_device_info info;
    expect_status(flash_attn_get_device_info(context, (flash_attn_device){0}, &info), FLASH_ATTN_OK, "info");
    flash_attn_destroy(context);
    return info.tuning;
}

/* ---- what is used ---- */

/* Every table, pass and class has this tile. */
static fa_tuning all_tiles(int q, int k)
{
    fa_tuning      tuning = {.split_keys = 0};
    fa_tile_shape *tile   = &tuning.tile[0][0][0];
    for (int n = 0; n < FA_TABLES * 2 * FA_HEAD_CLASSES; n++)
        tile[n] = (fa_tile_shape){q, k};
    return tuning;
}

static void store(const fa_tuning *tuning)
{
    fa_isa isa;
    fa_isa_detect(&isa);
    expect_status(fa_tuning_store(&isa, path, tuning), FLASH_ATTN_OK, "store");
}

static flash_attn_explanation explained(flash_attn_context *context, flash_attn_pass pass, int64_t head_dim)
{
    flash_attn_explanation about;
    flash_attn_problem     p = {0};
    p.q = p.k = p.v = p.o = (flash_attn_tensor){.shape = {1, 1000, 2, head_dim}};
    expect_status(flash_attn_explain(context, &p, pass, &about), FLASH_ATTN_OK, "explain");
    return about;
}

static void a_stored_tile_is_used_and_said(void **state)
{
    (void)state;
    fa_tuning tuning        = all_tiles(80, 160);
    tuning.block_l2_percent = 20;
    tuning.split_keys       = 512;
    store(&tuning);
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_MEASURED);
    for (int n = 0; n < num_tiers(); n++) {
        flash_attn_context *tuned = context_of(path, tier_at(n)->isa), *usual = context_of("", tier_at(n)->isa);
        for (int pass = 0; pass < 2; pass++) {
            flash_attn_explanation about = explained(tuned, (flash_attn_pass)pass, 100);
            assert_int_equal(about.tile_q, 80);
            assert_int_equal(about.tile_k, 160);
            assert_non_null(strstr(about.reason, "measured on this machine"));
            about = explained(usual, (flash_attn_pass)pass, 100);
            assert_null(strstr(about.reason, "measured"));
            about = explained(tuned, (flash_attn_pass)pass, 300); /* beyond the classes: the default */
            assert_null(strstr(about.reason, "measured"));
        }
        flash_attn_destroy(tuned);
        flash_attn_destroy(usual);
    }
}

static const fa_tile_shape extremes[] = {{16, 32},   {48, 96},   {80, 512},  {512, 32},
                                         {512, 512}, {336, 224}, {48, 1024}, {1024, 32}};

/* One problem on every tier with every extreme, or with those of its turn. */
static void expect_right(const test_case *shape, flash_attn_dtype dtype, size_t turn)
{
    double  tolerance   = loose_tolerance(dtype);
    tier    reference   = {.context = NULL};
    fixture right       = fixture_make(shape, dtype, 7);
    right.p.device.type = FLASH_ATTN_REFERENCE;
    fixture_run(&right, &reference, 1);
    fixture f = fixture_make(shape, dtype, 7); /* one for all, for its inputs are never written */
    for (size_t e = 0; e < sizeof extremes / sizeof *extremes; e++) {
        if (one_dtype && (e + turn) % 3 != dtype)
            continue;
        fa_tuning tuning        = all_tiles(extremes[e].q, extremes[e].k);
        tuning.block_l2_percent = e % 2 ? 10 : 90;
        tuning.split_keys       = e % 2 ? 256 : 16384;
        store(&tuning);
        for (int n = 0; n < num_tiers(); n++) {
            tier tuned = {.context = context_of(path, tier_at(n)->isa)};
            fixture_run(&f, &tuned, 2);
            expect_close(&f.p.o, &right.p.o, tolerance, "o");
            if (f.backward) {
                expect_close(&f.g.dq, &right.g.dq, 4 * tolerance, "dq");
                expect_close(&f.g.dk, &right.g.dk, 4 * tolerance, "dk");
                expect_close(&f.g.dv, &right.g.dv, 4 * tolerance, "dv");
            }
            flash_attn_destroy(tuned.context);
        }
    }
    fixture_free(&f);
    fixture_free(&right);
}

/* With tails, masks, options, and where few queries meet long keys. */
static void any_tile_that_may_be_stored_is_right(void **state)
{
    (void)state;
    static const test_case shapes[] = {
        {.heads_q = 1, .seqlen_q = 150, .seqlen_k = 600, .head_dim = 64},
        {.heads_q = 1, .seqlen_q = 530, .seqlen_k = 530, .head_dim = 72, .mask = FLASH_ATTN_CAUSAL},
        {.heads_q = 4, .heads_k = 2, .seqlen_q = 70, .seqlen_k = 100, .head_dim = 40, .softcap = 5, .bias = BIAS},
        {.heads_q = 4, .heads_k = 1, .seqlen_q = 2, .seqlen_k = 1500, .head_dim = 64},
    };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int dtype = FLASH_ATTN_F32; dtype <= FLASH_ATTN_BF16; dtype++)
            expect_right(&shapes[s], (flash_attn_dtype)dtype, s);
}

static void stored_tiles_give_the_same_bits_at_any_number_of_threads(void **state)
{
    (void)state;
    static const int       threads[] = {2, 3, 8};
    const test_case        shape     = {
            .batch = 2, .heads_q = 4, .heads_k = 2, .seqlen_q = one_dtype ? 100 : 300, .seqlen_k = 900, .mask = FLASH_ATTN_CAUSAL};
    fa_tuning tuning        = all_tiles(64, 96);
    tuning.split_keys       = 256;
    tuning.block_l2_percent = 30;
    store(&tuning);
    for (int n = 0; n < num_tiers(); n++) {
        tier    tuned = {.context = context_of(path, tier_at(n)->isa)};
        fixture one   = fixture_make(&shape, FLASH_ATTN_BF16, 8);
        fixture_run(&one, &tuned, 1);
        for (int t = one_dtype ? 2 : 0; t < 3; t++) {
            fixture many = fixture_make(&shape, FLASH_ATTN_BF16, 8);
            fixture_run(&many, &tuned, threads[t]);
            expect_same_bits(&one.p.o, &many.p.o, "o");
            expect_same_bits(&one.g.dq, &many.g.dq, "dq");
            expect_same_bits(&one.g.dk, &many.g.dk, "dk");
            fixture_free(&many);
        }
        fixture_free(&one);
        flash_attn_destroy(tuned.context);
    }
}

/* ---- what is not ---- */

static void a_damaged_file_is_not_used(void **state)
{
    (void)state;
    char      good[4096], bad[4096];
    fa_tuning tuning = all_tiles(64, 96);
    store(&tuning);
    size_t bytes = read_back(good, sizeof good);
    for (size_t n = 0; n < bytes; n += 3) {
        memcpy(bad, good, bytes);
        bad[n] ^= 1;
        write_file(path, bad, bytes);
        assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_DAMAGED);
    }
    for (size_t n = 1; n < bytes; n += 11) {
        write_file(path, good, n);
        assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_DAMAGED);
    }
    write_file(path, good, bytes);
    assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_MEASURED);
}

static void a_file_of_another_machine_or_version_is_not_used(void **state)
{
    (void)state;
    fa_isa    isa;
    fa_tuning tuning = all_tiles(64, 96);
    fa_isa_detect(&isa);
    snprintf(isa.name, sizeof isa.name, "Another processor");
    expect_status(fa_tuning_store(&isa, path, &tuning), FLASH_ATTN_OK, "store");
    assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_FOREIGN);
    fa_isa_detect(&isa);
    isa.l2_bytes *= 2;
    isa.l2_bytes += 1;
    expect_status(fa_tuning_store(&isa, path, &tuning), FLASH_ATTN_OK, "store");
    assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_FOREIGN);

    char text[4096];
    store(&tuning);
    size_t bytes            = read_back(text, sizeof text) - 22; /* without the line of the hash */
    char  *version          = strstr(text, "library ");
    version[8]              = '9';
    unsigned long long hash = fa_hash_bytes(FA_HASH_START, text, bytes);
    snprintf(text + bytes, sizeof text - bytes, "hash %016llx\n", hash);
    write_file(path, text, bytes + 22);
    assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_FOREIGN);
}

static void numbers_out_of_bounds_are_not_used(void **state)
{
    (void)state;
    static const char *const good[] = {"", "tile avx512 forward 64 96 128\n", "split_keys 2048\n",
                                       "tile avx512_bf16 backward 256 96 64\n", "block_l2_percent 90\n",
                                       "tile scalar backward 256 16 512\nblock_l2_percent 10\nsplit_keys 256\n",
                                       "assume amx-fp16\n", "split_keys 512\nassume amx-fp16\n"};
    static const char *const bad[]  = {
         "tile avx512 forward 64 0 0\n",
         "tile avx512 forward 64 8 128\n",
         "tile avx512 forward 64 96 100\n",
         "tile avx512 forward 64 96 1056\n",
         "tile avx512 forward 64 1040 64\n",
         "tile avx512 forward 64 100000 64\n",
         "tile avx512 forward 64 -96 128\n",
         "tile avx512 forward 64 99999999999 64\n",
         "tile avx512 forward 64 96\n",
         "tile avx512 forward 65 96 128\n",
         "tile avx512 forward 512 96 128\n",
         "tile avx9 forward 64 96 128\n",
         "tile avx512 sideways 64 96 128\n",
         "tile avx512 forward 64 096 128\n",
         "tile avx512 forward 64 96 128 \n",
         "tile  avx512 forward 64 96 128\n",
         "tile avx512 forward 64 96 128",
         "block_l2_percent 9\n",
         "block_l2_percent 91\n",
         "block_l2_percent 1e1\n",
         "split_keys 255\n",
         "split_keys 16448\n",
         "split_keys 1000\n",
         "something 5\n",
         "assume amx-fp32\n",
         "assume amx-fp16 \n",
         "assume\n",
         "assume amx-fp16\nsplit_keys 512\n",
         "\n",
         "split_keys 512\nsplit_keys 512\n",
         "split_keys 512\nblock_l2_percent 50\n",
         "tile avx512 forward 64 96 128\ntile avx512 forward 64 96 128\n",
    };
    for (size_t n = 0; n < sizeof good / sizeof *good; n++) {
        write_body(good[n]);
        assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_MEASURED);
    }
    for (size_t n = 0; n < sizeof bad / sizeof *bad; n++) {
        write_body(bad[n]);
        if (tuning_of(path) != FLASH_ATTN_TUNING_DAMAGED)
            fail_msg("'%s' was used", bad[n]);
    }
    flash_attn_context *tuned = context_of(path, FLASH_ATTN_ISA_AUTO), *usual = context_of("", FLASH_ATTN_ISA_AUTO);
    assert_int_equal(explained(tuned, FLASH_ATTN_FORWARD, 64).tile_q, explained(usual, FLASH_ATTN_FORWARD, 64).tile_q);
    flash_attn_destroy(tuned);
    flash_attn_destroy(usual);
}

static void a_file_that_others_may_write_is_not_read(void **state)
{
    (void)state;
    char      link[192];
    fa_tuning tuning = all_tiles(64, 96);
    store(&tuning);
    chmod(path, 0620);
    assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_DEFAULT);
    chmod(path, 0602);
    assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_DEFAULT);
    chmod(path, 0600);
    chmod(home, 0777); /* as /tmp: others could replace the file */
    assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_DEFAULT);
    chmod(home, 0700);
    snprintf(link, sizeof link, "%s/link", home);
    assert_int_equal(symlink(path, link), 0);
    assert_int_equal(tuning_of(link), FLASH_ATTN_TUNING_DEFAULT);
    unlink(link);
    assert_int_equal(mkfifo(link, 0600), 0); /* must not make us wait */
    assert_int_equal(tuning_of(link), FLASH_ATTN_TUNING_DEFAULT);
    unlink(link);
    assert_int_equal(tuning_of(home), FLASH_ATTN_TUNING_DEFAULT); /* a folder */
    assert_int_equal(tuning_of(path), FLASH_ATTN_TUNING_MEASURED);
}

/* ---- an instruction that the processor does not report ---- */

static flash_attn_device_info info_of(const char *file, flash_attn_isa isa)
{
    flash_attn_device_info info;
    flash_attn_context    *context = context_of(file, isa);
    expect_status(flash_attn_get_device_info(context, (flash_attn_device){0}, &info), FLASH_ATTN_OK, "info");
    flash_attn_destroy(context);
    return info;
}

static void a_stored_amx_fp16_is_tried_and_then_used(void **state)
{
    (void)state;
    fa_tuning tuning = {.amx_fp16 = true};
    store(&tuning);
    flash_attn_device_info assumed = info_of("", FLASH_ATTN_ISA_AUTO); /* the environment says so */
    unsetenv("FLASH_ATTN_ASSUME");
    flash_attn_device_info usual = info_of("", FLASH_ATTN_ISA_AUTO), tuned = info_of(path, FLASH_ATTN_ISA_AUTO);
    assert_string_equal(tuned.features, assumed.features);
    assert_string_equal(tuned.isa, assumed.isa);
    assert_null(strstr(usual.features, "amx-fp16:"));
    assert_int_equal(tuned.tuning, FLASH_ATTN_TUNING_MEASURED);
    if (strstr(tuned.features, "amx-fp16:")) { /* hidden here, whether it runs or not */
        assert_string_equal(usual.isa, "amx");
        assert_string_equal(tuned.isa, strstr(tuned.features, "amx-fp16:assumed") ? "amx-fp16" : "amx");
        flash_attn_device_info capped = info_of(path, FLASH_ATTN_ISA_AMX);
        assert_string_equal(capped.isa, "amx"); /* the cap comes first */
        assert_null(strstr(capped.features, "amx-fp16:"));
    }
    setenv("FLASH_ATTN_ASSUME", "amx-fp16", 1);
}

/* ---- which file ---- */

static void the_environment_and_the_cache_say_which_file(void **state)
{
    (void)state;
    fa_isa    isa;
    fa_tuning tuning = all_tiles(64, 96);
    store(&tuning);
    assert_int_equal(tuning_of(NULL), FLASH_ATTN_TUNING_DEFAULT); /* nothing in the cache yet */
    setenv("FLASH_ATTN_TUNE_FILE", path, 1);
    assert_int_equal(tuning_of(NULL), FLASH_ATTN_TUNING_MEASURED);
    assert_int_equal(tuning_of(""), FLASH_ATTN_TUNING_DEFAULT); /* the option comes first */
    setenv("FLASH_ATTN_TUNE_FILE", "relative.txt", 1);
    flash_attn_context *context;
    expect_status(flash_attn_create(&context, NULL), FLASH_ATTN_INVALID, "a relative path");
    assert_non_null(strstr(flash_attn_last_error(), "FLASH_ATTN_TUNE_FILE"));
    unsetenv("FLASH_ATTN_TUNE_FILE");

    fa_isa_detect(&isa);
    expect_status(fa_tuning_store(&isa, NULL, &tuning), FLASH_ATTN_OK, "store in the cache");
    assert_int_equal(tuning_of(NULL), FLASH_ATTN_TUNING_MEASURED);
    setenv("FLASH_ATTN_TUNE_FILE", "off", 1);
    assert_int_equal(tuning_of(NULL), FLASH_ATTN_TUNING_DEFAULT);
    unsetenv("FLASH_ATTN_TUNE_FILE");
    char kept[192];
    snprintf(kept, sizeof kept, "%s/flashattn/cpu-tune.txt", home);
    unlink(kept);
}

static void count_choice(void *user, const flash_attn_tune_choice *choice);

static void what_cannot_be_done_is_refused(void **state)
{
    (void)state;
    expect_status(flash_attn_tune(NULL, "", 0.5, NULL, NULL), FLASH_ATTN_INVALID, "0.5 s");
    expect_status(flash_attn_tune(NULL, "", 1e9, NULL, NULL), FLASH_ATTN_INVALID, "30 years");
    expect_status(flash_attn_tune(NULL, "", (double)NAN, NULL, NULL), FLASH_ATTN_INVALID, "NaN");
    fa_isa    isa;
    fa_tuning tuning = all_tiles(64, 96);
    fa_isa_detect(&isa);
    expect_status(fa_tuning_store(&isa, "/nowhere/at/all.txt", &tuning), FLASH_ATTN_INVALID, "no folder");
    assert_non_null(strstr(flash_attn_last_error(), "/nowhere/at/all.txt"));
    char folder[80];
    snprintf(folder, sizeof folder, "%s/folder", home);
    assert_int_equal(mkdir(folder, 0700), 0);
    expect_status(fa_tuning_store(&isa, folder, &tuning), FLASH_ATTN_INVALID, "a folder");

    int measured = 0; /* a place that cannot be written is said before anything is measured */
    expect_status(flash_attn_tune(NULL, "/nowhere/at/all.txt", 1, count_choice, &measured), FLASH_ATTN_INVALID, "tune to no folder");
    expect_status(flash_attn_tune(NULL, folder, 1, count_choice, &measured), FLASH_ATTN_INVALID, "tune to a folder");
    assert_non_null(strstr(flash_attn_last_error(), "no plain file"));
    assert_int_equal(measured, 0);
    rmdir(folder);
}

/* ---- measuring ---- */

static void count_choice(void *user, const flash_attn_tune_choice *choice)
{
    assert_true(choice->found_ms > 0 && choice->found_ms <= choice->usual_ms && choice->num_tried > 1);
    if (strcmp(choice->usual, choice->found) == 0)
        assert_true(choice->found_ms == choice->usual_ms);
    ++*(int *)user;
}

static void measuring_stores_a_file_that_is_used_and_keeps_other_tiers(void **state)
{
    (void)state;
    fa_isa    isa;
    fa_tuning before  = {.split_keys = 0}, after;
    int       choices = 0;
    fa_isa_detect(&isa);
    before.tile[FA_TABLE_NEON][0][0] = (fa_tile_shape){32, 64}; /* never measured beside x86's, nor x86's beside it */
    before.tile[FA_TABLE_AVX2][0][0] = (fa_tile_shape){32, 64};
    store(&before);
    flash_attn_isa      most    = fa_isa_reaches(isa.best, FLASH_ATTN_ISA_AVX512) ? FLASH_ATTN_ISA_AVX512 : isa.best;
    flash_attn_context *context;
    flash_attn_options  options = {.num_threads = 2, .max_isa = most, .tune_file = ""}; /* a head is measured for each thread */
    expect_status(flash_attn_create(&context, &options), FLASH_ATTN_OK, "create");
    expect_status(flash_attn_tune(context, path, 1, count_choice, &choices), FLASH_ATTN_OK, "tune");
    flash_attn_destroy(context);
    assert_in_range(choices, 6, 8);
    assert_int_equal(fa_tuning_load(&isa, path, &after), FLASH_ATTN_TUNING_MEASURED);
    if (most != FLASH_ATTN_ISA_NEON)
        assert_int_equal(after.tile[FA_TABLE_NEON][0][0].q, 32);
    if (most != FLASH_ATTN_ISA_AVX2)
        assert_int_equal(after.tile[FA_TABLE_AVX2][0][0].q, 32);
}

static int make_home(void **state)
{
    (void)state;
    strcpy(home, "/tmp/flashattn-tune.XXXXXX");
    if (!mkdtemp(home))
        return 1;
    snprintf(path, sizeof path, "%s/tune.txt", home);
    unsetenv("FLASH_ATTN_TUNE_FILE");
    setenv("FLASH_ATTN_ASSUME", "amx-fp16", 1); /* as the harness does */
    return setenv("XDG_CACHE_HOME", home, 1);
}

static int remove_home(void **state)
{
    (void)state;
    char folder[192];
    snprintf(folder, sizeof folder, "%s/flashattn", home);
    unlink(path);
    rmdir(folder);
    return rmdir(home);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stored_tile_is_used_and_said),
        cmocka_unit_test(any_tile_that_may_be_stored_is_right),
        cmocka_unit_test(stored_tiles_give_the_same_bits_at_any_number_of_threads),
        cmocka_unit_test(a_damaged_file_is_not_used),
        cmocka_unit_test(a_file_of_another_machine_or_version_is_not_used),
        cmocka_unit_test(numbers_out_of_bounds_are_not_used),
        cmocka_unit_test(a_file_that_others_may_write_is_not_read),
        cmocka_unit_test(a_stored_amx_fp16_is_tried_and_then_used),
        cmocka_unit_test(the_environment_and_the_cache_say_which_file),
        cmocka_unit_test(what_cannot_be_done_is_refused),
    };
    const struct CMUnitTest measured[] = {cmocka_unit_test(measuring_stores_a_file_that_is_used_and_keeps_other_tiers)};
    one_dtype = argc > 1 && strcmp(argv[1], "--one-dtype") == 0;
    if (argc > 1 && strcmp(argv[1], "--measure") == 0)
        return cmocka_run_group_tests(measured, make_home, remove_home);
    return cmocka_run_group_tests(tests, make_home, remove_home);
}
