/*
 * Keys, the compiler and the disk cache. No GPU is needed; what needs NVRTC is skipped, with the reason, where there is
 * none. Every test works in a folder of its own under the build folder, never in the user's cache.
 */
#include "harness.h"

#include "cuda/cuda.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char home[4096]; /* private to a test; XDG_CACHE_HOME points here */

static int remove_one(const char *path, const struct stat *status, int type, struct FTW *ftw)
{
    (void)status;
    (void)type;
    (void)ftw;
    return remove(path);
}

static int set_up(void **state)
{
    (void)state;
    char here[3000];
    if (!getcwd(here, sizeof here))
        return -1;
    snprintf(home, sizeof home, "%s/test_jit.XXXXXX", here);
    if (!mkdtemp(home))
        return -1;
    setenv("XDG_CACHE_HOME", home, 1);
    unsetenv("FLASH_ATTN_KERNEL_DIR");
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return nftw(home, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static fa_key upload_key(void) { return fa_plan_small_key(FA_KERNEL_UPLOAD, 80); }

/* A jit with a compiler, or skips the test. */
static fa_jit with_nvrtc(void)
{
    fa_jit   jit;
    fa_nvrtc nvrtc;
    if (fa_nvrtc_load(&nvrtc, NULL, 0) != FLASH_ATTN_OK) {
        print_message("skipped: %s\n", flash_attn_last_error());
        skip();
    }
    assert_int_equal(fa_jit_init(&jit, NULL, 0), FLASH_ATTN_OK);
    return jit;
}

/* Builds the upload kernel; true if it was compiled, false if it came from disk. */
static bool build(fa_jit *jit)
{
    fa_key    key = upload_key();
    fa_binary binary;
    if (fa_jit_build(jit, &key, &binary) != FLASH_ATTN_OK)
        fail_msg("%s", flash_attn_last_error());
    assert_memory_equal(binary.cubin, "\177ELF", 4);
    assert_in_range(binary.resources.registers, 1, 255);
    free(binary.cubin);
    return binary.compiled;
}

static bool build_in_new_process_state(void)
{
    fa_jit jit      = with_nvrtc();
    bool   compiled = build(&jit);
    fa_jit_free(&jit);
    return compiled;
}

/* Path of the one entry in the cache whose name ends so, or fails. */
static void find_entry(char path[4400], const char *ending)
{
    char folder[4200];
    snprintf(folder, sizeof folder, "%s/flashattn", home);
    DIR *entries = opendir(folder);
    assert_non_null(entries);
    int found = 0;
    for (struct dirent *e; (e = readdir(entries));)
        if (strlen(e->d_name) > strlen(ending) &&
            strcmp(e->d_name + strlen(e->d_name) - strlen(ending), ending) == 0) {
            snprintf(path, 4400, "%s/%s", folder, e->d_name);
            found++;
        }
    closedir(entries);
    assert_int_equal(found, 1);
}

/* ---- keys ---- */

static void every_field_of_a_key_changes_its_hash_line_and_constants(void **state)
{
    (void)state;
    fa_key plain = upload_key();
    char   line[2][FA_KEY_LINE_BYTES], text[2][4096];
    fa_key_line(&plain, line[0], sizeof line[0]);
    assert_true(fa_key_constants(&plain, text[0], sizeof text[0]) < (int)sizeof text[0]);
#define X(member, constant)                                                                    \
    {                                                                                          \
        fa_key other = plain;                                                                  \
        other.member += 3;                                                                     \
        fa_key_line(&other, line[1], sizeof line[1]);                                          \
        fa_key_constants(&other, text[1], sizeof text[1]);                                     \
        assert_string_not_equal(line[0], line[1]);                                             \
        assert_string_not_equal(text[0], text[1]);                                             \
        assert_non_null(strstr(text[0], "#define " #constant " "));                            \
        assert_true(fa_key_hash(&plain) != fa_key_hash(&other));                               \
    }
    FA_KEY_FIELDS(X)
#undef X
}

static void the_longest_key_line_fits(void **state)
{
    (void)state;
    char   line[FA_KEY_LINE_BYTES];
    fa_key key;
    memset(&key, 0x80, sizeof key); /* the longest ints */
    key.kernel = FA_KERNEL_BACKWARD_CONVERT;
    fa_key_line(&key, line, sizeof line);
    assert_non_null(strstr(line, "deterministic=-"));
    assert_true(strlen(line) < sizeof line - 1);
}

/* ---- texts ---- */

static void built_in_texts_unpack_to_plain_text(void **state)
{
    (void)state;
    int kernels = 0;
    for (int i = 0; i < fa_num_texts; i++) {
        char *text = fa_text_unpack(&fa_texts[i]);
        assert_non_null(text);
        assert_true(text[0] != '\0');
        for (const char *at = text; *at; at++)
            if (*at != '\n' && (*at < ' ' || *at > '~'))
                fail_msg("%s has a byte %d", fa_texts[i].name, *at);
        bool header = strstr(fa_texts[i].name, ".cu") == NULL || strstr(fa_texts[i].name, ".cuh") != NULL;
        if (!header && !strstr(text, "extern \"C\" __global__ void"))
            fail_msg("%s has no kernel", fa_texts[i].name);
        kernels += !header;
        free(text);
    }
    assert_in_range(kernels, 1, fa_num_texts);
}

/* ---- compiling ---- */

static void a_kernel_is_compiled_and_its_report_is_read(void **state)
{
    (void)state;
    fa_jit    jit = with_nvrtc();
    fa_key    key = upload_key();
    fa_binary binary;
    if (fa_jit_compile(&jit, &key, &binary) != FLASH_ATTN_OK)
        fail_msg("%s", flash_attn_last_error());
    assert_true(binary.compiled);
    assert_in_range(binary.resources.registers, 1, 255);
    assert_int_equal(binary.resources.spill_bytes, 0);
    assert_int_equal(binary.resources.shared_bytes, 0);
    assert_string_equal(binary.resources.warning, "");
    free(binary.cubin);
    fa_jit_free(&jit);
}

static void write_kernel(const char *text)
{
    char path[4400];
    snprintf(path, sizeof path, "%s/upload.cu", home);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
    setenv("FLASH_ATTN_KERNEL_DIR", home, 1);
}

static void an_edited_kernel_is_used_and_is_another_entry_of_the_cache(void **state)
{
    (void)state;
    assert_true(build_in_new_process_state());
    assert_false(build_in_new_process_state());
    write_kernel("extern \"C\" __constant__ int fa_shared_bytes = 70000;\n"
                 "extern \"C\" __global__ void upload(int *to)\n"
                 "{\n"
                 "    int a[64];\n"
                 "    for (int i = 0; i < 64; i++) a[to[i] & 63] = i;\n"
                 "    to[0] = a[to[1] & 63];\n"
                 "}\n");
    fa_jit    jit = with_nvrtc();
    fa_key    key = upload_key();
    fa_binary binary;
    assert_int_equal(fa_jit_build(&jit, &key, &binary), FLASH_ATTN_OK);
    assert_true(binary.compiled);
    assert_int_equal(binary.resources.shared_bytes, 70000);
    assert_true(binary.resources.stack_bytes >= 256);
    free(binary.cubin);
    fa_jit_free(&jit);
    assert_false(build_in_new_process_state());
}

static void an_error_in_a_kernel_is_one_sentence_with_its_line(void **state)
{
    (void)state;
    write_kernel("extern \"C\" __global__ void upload(int *to)\n{\n    no_such_name = 1;\n}\n");
    fa_jit    jit = with_nvrtc();
    fa_key    key = upload_key();
    fa_binary binary;
    assert_int_equal(fa_jit_build(&jit, &key, &binary), FLASH_ATTN_COMPILE);
    assert_non_null(strstr(flash_attn_last_error(), "upload.cu(3): error"));
    assert_null(strchr(flash_attn_last_error(), '\n'));
    fa_jit_free(&jit);
}

static void an_unreadable_kernel_folder_is_said(void **state)
{
    (void)state;
    fa_jit jit;
    setenv("FLASH_ATTN_KERNEL_DIR", "/nonexistent/kernels", 1);
    assert_int_equal(fa_jit_init(&jit, NULL, 0), FLASH_ATTN_COMPILE);
    assert_non_null(strstr(flash_attn_last_error(), "/nonexistent/kernels"));
}

static void a_missing_compiler_is_said(void **state)
{
    (void)state;
    fa_jit             jit;
    fa_key             key     = upload_key();
    fa_binary          binary;
    flash_attn_options options = {.nvrtc_path = "/nonexistent/libnvrtc.so"};
    assert_int_equal(fa_jit_init(&jit, &options, 0), FLASH_ATTN_OK);
    assert_int_equal(fa_jit_build(&jit, &key, &binary), FLASH_ATTN_COMPILE);
    assert_non_null(strstr(flash_attn_last_error(), "/nonexistent/libnvrtc.so"));
    fa_jit_free(&jit);
}

static void an_architecture_that_the_compiler_does_not_know_is_said(void **state)
{
    (void)state;
    fa_jit    jit = with_nvrtc();
    fa_key    key = upload_key();
    fa_binary binary;
    key.arch = 990;
    assert_int_equal(fa_jit_compile(&jit, &key, &binary), FLASH_ATTN_COMPILE);
    assert_non_null(strstr(flash_attn_last_error(), "compute capability 99.0"));
    assert_non_null(strstr(flash_attn_last_error(), "12.8 or later"));
    fa_jit_free(&jit);
}

static void a_folder_filled_ahead_serves_a_machine_without_compiler(void **state)
{
    (void)state;
    char folder[4200];
    snprintf(folder, sizeof folder, "%s/ahead", home);
    fa_jit    jit = with_nvrtc();
    fa_key    key = upload_key();
    fa_binary binary;
    assert_int_equal(fa_jit_compile(&jit, &key, &binary), FLASH_ATTN_OK);
    assert_int_equal(fa_jit_export(&jit, &key, &binary, folder), FLASH_ATTN_OK);
    free(binary.cubin);
    fa_jit_free(&jit);

    flash_attn_options options = {.nvrtc_path = "/nonexistent/libnvrtc.so", .kernel_folder = folder};
    assert_int_equal(fa_jit_init(&jit, &options, 0), FLASH_ATTN_OK);
    assert_false(build(&jit));
    chmod(folder, 0777); /* now others could put code there */
    assert_int_equal(fa_jit_build(&jit, &key, &binary), FLASH_ATTN_COMPILE);
    fa_jit_free(&jit);
}

/* ---- the disk cache ---- */

static void the_cache_is_private(void **state)
{
    (void)state;
    struct stat status;
    char        path[4400];
    assert_true(build_in_new_process_state());
    snprintf(path, sizeof path, "%s/flashattn", home);
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0700);
    find_entry(path, ".cubin");
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
}

static void expect_memory_only(void)
{
    int folder = fa_cache_open(true);
    if (folder >= 0)
        close(folder);
    assert_int_equal(folder, -1);
}

static void a_cache_that_others_can_write_is_refused(void **state)
{
    (void)state;
    char path[4400];
    snprintf(path, sizeof path, "%s/flashattn", home);
    mkdir(path, 0700);
    chmod(path, 0770);
    expect_memory_only();
    chmod(path, 0702);
    expect_memory_only();
    chmod(path, 0700);
    int folder = fa_cache_open(true);
    assert_true(folder >= 0);
    close(folder);
    chmod(home, 0777); /* as /tmp: others could replace the folder */
    expect_memory_only();
    chmod(home, 0700);
}

static void a_link_in_place_of_the_cache_is_refused(void **state)
{
    (void)state;
    char path[4400], target[4400];
    snprintf(path, sizeof path, "%s/flashattn", home);
    snprintf(target, sizeof target, "%s/elsewhere", home);
    assert_int_equal(mkdir(target, 0700), 0);
    assert_int_equal(symlink(target, path), 0);
    expect_memory_only();
}

static void without_a_usable_home_kernels_live_in_memory_only(void **state)
{
    (void)state;
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    expect_memory_only();
    setenv("XDG_CACHE_HOME", "relative/path", 1);
    expect_memory_only();
    setenv("XDG_CACHE_HOME", "/proc/version", 1); /* no folder */
    expect_memory_only();
    assert_true(build_in_new_process_state());
    assert_true(build_in_new_process_state());
}

static void damage_entry(const char *path, off_t at, off_t new_size)
{
    int file = open(path, O_RDWR);
    assert_true(file >= 0);
    if (new_size >= 0) {
        assert_int_equal(ftruncate(file, new_size), 0);
    } else {
        unsigned char byte;
        assert_int_equal(pread(file, &byte, 1, at), 1);
        byte ^= 0x10;
        assert_int_equal(pwrite(file, &byte, 1, at), 1);
    }
    close(file);
}

static void damaged_entries_are_built_again(void **state)
{
    (void)state;
    struct stat status;
    char        path[4400];
    assert_true(build_in_new_process_state());
    find_entry(path, ".cubin");
    assert_int_equal(stat(path, &status), 0);
    off_t flips[] = {0, 8, 16, 20, 24, 40, 600, status.st_size / 2, status.st_size - 1};
    for (size_t i = 0; i < sizeof flips / sizeof *flips; i++) {
        damage_entry(path, flips[i], -1);
        assert_true(build_in_new_process_state());
        assert_false(build_in_new_process_state());
    }
    off_t sizes[] = {0, 1, 31, 32, 33, 500, status.st_size - 1, status.st_size + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        damage_entry(path, 0, sizes[i]);
        assert_true(build_in_new_process_state());
        assert_false(build_in_new_process_state());
    }
}

/* An entry of another key under this key's name, a link, a pipe, a folder. */
static void foreign_entries_are_not_used(void **state)
{
    (void)state;
    char path[4400], other[4400];
    assert_true(build_in_new_process_state());
    find_entry(path, ".cubin");
    snprintf(other, sizeof other, "%s/other", home);

    static unsigned char bytes[] = "\177ELF of another kernel";
    fa_binary            binary  = {.cubin = bytes, .bytes = sizeof bytes};
    int                  folder  = fa_cache_open(true);
    assert_true(fa_cache_write(folder, "another identity", &binary, 0600));
    assert_int_equal(unlink(path), 0);
    char written[4400];
    find_entry(written, ".cubin");
    assert_int_equal(rename(written, path), 0);
    close(folder);
    assert_true(build_in_new_process_state());

    assert_int_equal(rename(path, other), 0);
    assert_int_equal(symlink(other, path), 0);
    assert_true(build_in_new_process_state());
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_true(build_in_new_process_state());
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_true(build_in_new_process_state());
    assert_true(build_in_new_process_state()); /* nothing can be stored there, and that is no error */
    assert_int_equal(rmdir(path), 0);

    assert_true(build_in_new_process_state());
    chmod(path, 0666);
    assert_true(build_in_new_process_state());
}

static void what_a_killed_writer_left_is_no_harm(void **state)
{
    (void)state;
    char path[4400];
    assert_true(build_in_new_process_state());
    find_entry(path, ".cubin");
    strcat(path, ".0000001000000"); /* a temporary file of some process, cut short */
    int file = open(path, O_WRONLY | O_CREAT, 0600);
    assert_int_equal(write(file, "facubin1", 8), 8);
    close(file);
    assert_false(build_in_new_process_state());
}

static void eight_cold_processes_compile_once(void **state)
{
    (void)state;
    fa_jit jit = with_nvrtc();
    fa_jit_free(&jit);
    enum { PROCESSES = 8 };
    int   gate[2];
    pid_t child[PROCESSES];
    assert_int_equal(pipe(gate), 0);
    for (int i = 0; i < PROCESSES; i++) {
        child[i] = fork();
        assert_true(child[i] >= 0);
        if (child[i] == 0) {
            char go;
            close(gate[1]);
            if (read(gate[0], &go, 1) != 0) /* ends when the parent closes its side: all start together */
                _exit(100);
            fa_key    key = upload_key();
            fa_binary binary;
            if (fa_jit_init(&jit, NULL, 0) != FLASH_ATTN_OK || fa_jit_build(&jit, &key, &binary) != FLASH_ATTN_OK)
                _exit(101);
            _exit(binary.compiled ? 1 : 0);
        }
    }
    close(gate[0]);
    close(gate[1]);
    int compiled = 0;
    for (int i = 0; i < PROCESSES; i++) {
        int status;
        assert_int_equal(waitpid(child[i], &status, 0), child[i]);
        assert_true(WIFEXITED(status));
        assert_in_range(WEXITSTATUS(status), 0, 1);
        compiled += WEXITSTATUS(status);
    }
    assert_int_equal(compiled, 1);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(every_field_of_a_key_changes_its_hash_line_and_constants),
        TEST(the_longest_key_line_fits),
        TEST(built_in_texts_unpack_to_plain_text),
        TEST(a_kernel_is_compiled_and_its_report_is_read),
        TEST(an_edited_kernel_is_used_and_is_another_entry_of_the_cache),
        TEST(an_error_in_a_kernel_is_one_sentence_with_its_line),
        TEST(an_unreadable_kernel_folder_is_said),
        TEST(a_missing_compiler_is_said),
        TEST(an_architecture_that_the_compiler_does_not_know_is_said),
        TEST(a_folder_filled_ahead_serves_a_machine_without_compiler),
        TEST(the_cache_is_private),
        TEST(a_cache_that_others_can_write_is_refused),
        TEST(a_link_in_place_of_the_cache_is_refused),
        TEST(without_a_usable_home_kernels_live_in_memory_only),
        TEST(damaged_entries_are_built_again),
        TEST(foreign_entries_are_not_used),
        TEST(what_a_killed_writer_left_is_no_harm),
        TEST(eight_cold_processes_compile_once),
    };
    return cmocka_run_group_tests_name("jit", tests, NULL, NULL);
}
