#!/usr/bin/env python3
"""Puts mistakes into the texts of Hopper's own kernels, of merge.cu and of the backward above 256 columns, one at a time, and sees that the emulated GPU finds each.

    mistakes.py TEST EMULATOR_FOLDER KERNEL_FOLDER [WORDS]

TEST: test_cuda_sm90, beside which test_cuda_latent, test_cuda_few, test_cuda_f32, test_cuda_merge, test_cuda_prompts and test_cuda_cases lie; WORDS: only mistakes whose names hold them. Exit status 1 if one is not found, or a text no longer
has the lines that a mistake changes.
"""
import os
import subprocess
import sys
import tempfile

FORWARD, ONE_BY_ONE, BACKWARD, PRODUCTS = "forward_sm90.cu", "one_by_one_sm90.cuh", "backward_sm90.cu", "backward_products_sm90.cuh"
WORK, INSPECT, SOFTMAX, RARE, RESULT = "work_sm90.cuh", "inspect_sm90.cuh", "softmax_sm90.cuh", "rare_sm90.cuh", "result_sm90.cuh"
WIDE, ROWS, BLOCK, CONVERT = "backward_wide_sm90.cuh", "backward_rows.cuh", "backward_block_sm90.cuh", "backward_convert_sm90.cu"
LATENT, LATENT_BLOCK, LATENT_PRODUCER = "latent_roles_sm90.cuh", "latent_block_sm90.cuh", "latent_producer_sm90.cuh"
SCORES, BIAS, FAR, ROWSUM, DBIAS = "scores_sm90.cuh", "bias_sm90.cuh", "far_rows.cuh", "backward_rowsum.cu", "backward_dbias_sm90.cuh"
MASK, OWNER, PART_ROWS = "mask.cuh", "row_owner.cuh", "part_rows.cuh"
LISTS, LISTED, MERGE = "list_tiles.cu", "listed.cuh", "merge.cu"
SHORT, SHORT_BLOCK, SHORT_FORWARD, NUMBERS, STAGED = "backward_short_sm90.cu", "short_block_sm90.cuh", "forward_short_sm90.cu", "numbers.cuh", "gradients_sm90.cuh"
FEW, FOLD, GROUPED, WALKED, FOLDED = "forward_few_sm90.cu", "fold.cu", "grouped_sm90.cuh", "parts_sm90.cuh", "fold_parts.cuh"
F32, F32_BACK, F32_NARROW, F32_WIDE, PLANES = "forward_f32_sm90.cu", "backward_f32_sm90.cu", "backward_f32_narrow_sm90.cuh", "backward_f32_wide_sm90.cuh", "planes_sm90.cu"
COLUMNS = "backward_columns_sm80.cuh"
PROGRAMS = dict.fromkeys((F32, F32_BACK, F32_NARROW, F32_WIDE, PLANES), "test_cuda_f32") | dict.fromkeys((LATENT, LATENT_BLOCK, LATENT_PRODUCER), "test_cuda_latent") | dict.fromkeys((FEW, FOLD, GROUPED), "test_cuda_few") | {MERGE: "test_cuda_merge", COLUMNS: "test_cuda_cases"} | dict.fromkeys((MASK, OWNER, PART_ROWS), "test_cuda_prompts")  # else TEST

# Which shapes of which test show it.
WHOLE = ("whole tiles", "every_shape*")
TAILS = ("tails", "every_shape*")
LONG = ("long, causal", "every_shape*")
VARLEN = ("varlen", "every_shape*")
ODD_VALUES = ("", "nonfinite*")
JUMPS = ("maxima that jump", "every_shape*")
MANY = ("many tiles a block", "every_shape*")
NOTHING = ("most queries see nothing", "every_shape*")
WHOLE_BACK = ("whole tiles", "every_backward*")
MANY_BACK = ("many tiles a block", "every_backward*")
SHARED_BACK = ("shared heads, causal", "every_backward*")
PARTS_BACK = ("shared queries", "every_backward*")
FEW_BACK = ("few have queries", "every_backward*")
WIDE_BACK = ("192 columns, varlen", "every_backward*")
THIRD_BACK = ("192 and 128 columns, varlen", "every_backward*")
BIASED = ("bias of all sequences, causal", "every_shape*")
BIASED_BACK = ("bias of all sequences, causal", "every_backward*")
GRADIENT = ("bias's gradient, of all sequences, causal", "every_backward*")
GRADIENTS = ("bias's gradient", "every_backward*", "3")  # where lot makes the right warp slow
GRADIENT_OF_EACH = ("bias's gradient, -inf, used lengths", "every_backward*")
SLICES = ("slices, documents", "every_shape*")
SLICES_BACK = ("slices, documents", "every_backward*")
SLICES_FULL = ("slices of all kinds, used lengths", "every_shape*")
LATENT_TWO = ("two queries", "every_shape*")
LATENT_PAGES = ("pages of 64, pairs", "every_shape*")
APART = ("two queries", "every*")  # --wide
APART_LONG = ("prefill, long", "every*")
LATENT_ONE_PIECE = ("pages of 48", "every_shape*") # two producers fetch nothing
SHORT_MANY = ("short, varlen, many", "every_short_backward*")
SHORT_LARGE = ("short, 256", "every_short_backward*")
SHORT_FORWARD_MANY = ("short, varlen, many", "every_short_forward*")
SHORT_FORWARD_LARGE = ("short, 256", "every_short_forward*")
SHORT_FORWARD_DENSE = ("short, 64, groups", "every_short_forward*")
SHORT_FORWARD_HALF = ("short, half a tile", "every_short_forward*")
FEW_KEYS = ("few keys", "every_short_forward*")
PARTS = ("parts", "every_shape*")
WIDE_CASES = ("wide", "bf16") # a group of test_cuda_cases
GROUPS = ("groups, causal, sinks", "every_shape*")
GROUPS_VARLEN = ("groups, varlen, sinks", "every_shape*")
TWO_KINDS = ("", "a_piece_among*")
WALKS = ("", "parts_that_a_block*")
NAN_QUERY = ("", "a_query_of_nan*")
FEW_KEYS_BACK = ("few keys", "every_short_backward*")
SHORT_NAN = ("", "nan_reaches_only_short*")
FEW_MANY = ("many tiles in one part", "every_shape*")
FEW_BITS = ("none", "a_sequence_alone*")
FEW_PARTS = ("more parts than", "every_shape*")

WAIT_FOR_O = "    wgmma_wait<0>();\n    hold(c.o);\n    hold(c.p);\n"
WAIT_FOR_S = "    wgmma_wait<1>();\n    hold(s);\n    hold_held(c.q);\n"
GIVE_K = "    /* Of all lanes, or ptxas finds the address lane by lane and gives K back behind most exponentials. */\n    release(same_for_all(k_empty(c.tile + 1)));\n"
GIVE_V = "    release(same_for_all(v_empty(tile)));\n"
FINISH_O = "    finish_output(c, c.tile);\n    if constexpr (BEGINS) {"
AFTER_S = "    if (n + 1 == seen)\n        release(q_empty(item));\n    finish_scores(args, w, s, c.group, n, MASKED, c.tile + 1, words);\n"
WAIT_FOR_DV = "    wgmma_wait<1>();\n    hold(c.dv);\n    hold(c.p);\n"
GIVE_DOUT = "    release(dout_empty(c.n));\n"
WAIT_FOR_DK = "    wgmma_wait<0>();\n    hold(c.dk);\n    hold(c.ds);\n"
GIVE_Q = "    release(q_empty(c.n));\n"

# Name, file, what stands there, what the mistake makes of it, shapes, the test and, where lot must be right, EMULATOR_SEED.
MISTAKES = [
    ("a tile that is cut is taken for whole", LISTS, "return whole ? seen : fa_min_int(seen, 1);", "return seen;", SLICES_FULL),
    ("a list whose last tile is forgotten", LISTS, "{whole + cut, cut + (whole > 0)}", "{whole + cut - (whole + cut > 1), cut + (whole > 0)}", SLICES),
    ("a column too many is seen", LISTS, "columns_below<COLUMNS>(end - first)", "columns_below<COLUMNS>(end - first + 1)", SLICES),
    ("masks that are each other's", LISTS, "{tile, masks + b}", "{tile, masks}", SLICES),
    ("a sink's gradient of a query that its slices show no key", "packed_sm90.cuh", "if (args.num_slices == 0)", "if (true)", ("slices of all kinds, sinks", "every_backward*")),
    ("slices of other queries", LISTS, "place < MOST_NEAR", "place < 1", SLICES),
    ("S^T masked by the next keys' words", LISTED, "words[8 * 4]", "words[0]", SLICES_BACK),
    ("a turn that is another's", LISTS, " = turns + __popc(some & ((1u << lane) - 1));", " = 0;", SLICES_BACK),
    ("nobody waits for K", FORWARD, "{ barrier_wait(k_full(n), filled<K_STAGES>(n)); }", "{}", WHOLE),
    ("nobody waits for V", FORWARD, "    barrier_wait(v_ready(n), filled<V_STAGES>(n));\n}", "}", WHOLE),
    ("nobody waits for a clean V", FORWARD, "barrier_wait(DIRECT_V ? v_full(n) : v_ready(n), filled<V_STAGES>(n));", ";", WHOLE),
    ("P of a row that has moved is left as it is", SOFTMAX, "    if (moved)\n        scale_scores(s, alpha);\n", "", JUMPS),
    ("nobody asks whether a row has moved", SOFTMAX, "far |= bound[h] > MOST;", ";", JUMPS),
    ("packed P of a row that has moved is left as it is", ONE_BY_ONE, "            scale_packed(c.p, alpha);\n", "            ;\n", JUMPS),
    ("a row without a maximum is not computed again", SOFTMAX, "        rows.lost |= rows.max[h] == -infinity() ? 1u << h : 0;\n", "        ;\n", ODD_VALUES),
    ("V given back before its product is done", FORWARD, WAIT_FOR_O + GIVE_V,
     GIVE_V + WAIT_FOR_O, WHOLE),
    ("K given back before S is there", FORWARD, WAIT_FOR_S + GIVE_K + AFTER_S, GIVE_K + WAIT_FOR_S + AFTER_S, WHOLE),
    ("P packed while it is multiplied", FORWARD, FINISH_O, "    pack_p(c.p, s);\n" + FINISH_O, WHOLE),
    ("Q in registers that is the last item's", FORWARD, "    if (NEXT && next.tiles > 1)\n        load_held<FA_TILE_Q>(c.q, own_queries(c, item + 1), 0);\n", "", MANY),
    ("softmax of S that is not there", FORWARD, WAIT_FOR_S + GIVE_K + AFTER_S, GIVE_K + AFTER_S, WHOLE),
    ("fewer bytes announced than come", FORWARD, "barrier_expect(k_full(k), K_BYTES);", "barrier_expect(k_full(k), K_BYTES / 2);", WHOLE),
    ("the planner overwrites Q", FORWARD, "    barrier_wait(q_empty(item), freed<Q_STAGES>(item));\n", "", MANY),
    ("the planner overwrites works", FORWARD, "    barrier_wait(asked(item), freed<WORKS>(item));", "   ", NOTHING),
    ("no fence behind inspected V", INSPECT, "        fence_async();\n        __syncwarp();", "        __syncwarp();", TAILS),
    ("what V spoilt is not computed again", FORWARD, "spoilt = w.spoilt;", "spoilt = false;", ODD_VALUES),
    ("a part's O without its LSE", "rare_sm90.cuh", "only_o = !FA_HAS_SPLIT && !(bits & 1)", "only_o = !(bits & 1)", ODD_VALUES),
    ("a row that sees a NaN counts as NaN", "far_rows.cuh", "        nan         = value != value;\n", "        nan         = nan && (col > 0 || value != value);\n", ODD_VALUES),
    ("a tile is dealt to nobody", WORK, "1) + gridDim.x;", "1) + gridDim.x + 1;", VARLEN),
    ("softmax of scores ahead that are not there", ONE_BY_ONE, "    wgmma_wait<0>(); /* without an if", "    /* without an if", LONG),
    ("V of a step ahead given back twice", ONE_BY_ONE, "    c.tile++;\n}\n\n/* Steps n", "    release(v_empty(c.tile));\n    c.tile++;\n}\n\n/* Steps n", LONG),
    ("a turn is passed on to nobody", FORWARD, "(group + 1) % CONSUMERS + zero", "group + zero", LONG),
    ("nobody waits for the other's dS", PRODUCTS, "        if (OWN_FIRST && !THIRD_SHARED && step == 4)\n            named_sync(DS_IS_THERE, 128 * CONSUMERS);\n", "",
     WHOLE_BACK),
    ("nobody waits for the other's dS of the step before", BACKWARD, "        named_sync(step_is_over(1 - c.group, c.n - 1), 128 * CONSUMERS);\n    wait_for_passed_ds(c.n);", "        ;\n    wait_for_passed_ds(c.n);", WHOLE_BACK),
    ("nobody waits for the other's dS of the last step", BACKWARD, "    named_sync(step_is_over(1 - c.group, c.n - 1), 128 * CONSUMERS);\n    start_dq", "    start_dq", WHOLE_BACK),
    ("dO given back before dV is there", BACKWARD, WAIT_FOR_DV + GIVE_DOUT, GIVE_DOUT + WAIT_FOR_DV, WHOLE_BACK),
    ("Q given back before dK is there", BACKWARD, WAIT_FOR_DK + GIVE_Q, GIVE_Q + WAIT_FOR_DK, WHOLE_BACK),
    ("dQ's memory given back unread", BACKWARD, "    if (asks)\n        bulk_added_was_read<PENDING>();\n    __syncwarp();\n", "    __syncwarp();\n", WHOLE_BACK),
    ("dQ told of before it is there", BACKWARD, "    bulk_added<PENDING>();\n    fence_async_global();\n    add_release", "    add_release", WHOLE_BACK),
    ("dQ told of without a release", BACKWARD, "    add_release(args.dq_turn", "    atomicAdd(args.dq_turn", WHOLE_BACK),
    ("nobody waits for who stores dQ", BACKWARD, "        while ((now & ALL_HAVE) != ALL_HAVE)\n            now = load_acquire(turn);\n", "", WHOLE_BACK),
    ("dQ put where the one before still is", PRODUCTS,
     "        if (j % PIECE == 0)\n            named_sync(DQ_IS_FREE + group * PIECES + slot, 128 + 32);\n", "", WHOLE_BACK),
    ("dQ stored before it is there", BACKWARD, "    start_gradient(c.dk, c.ds, q_tile(c.n));\n    wgmma_wait<1>();\n",
     "    start_gradient(c.dk, c.ds, q_tile(c.n));\n", WHOLE_BACK),
    ("turns out of order", BACKWARD, "    while (load_acquire(turn) < ADDERS * turns)\n        continue;\n", "", WHOLE_BACK),
    ("the producer overwrites K", BACKWARD, "            barrier_wait(k_empty(), freed<1>(item));\n            barrier_expect", "            barrier_expect", MANY_BACK),
    ("dS overwritten while it is read", BACKWARD, "    hold_held(c.v);\n    wait_for_free_ds(c.group);\n", "    hold_held(c.v);\n", THIRD_BACK),
    ("the producer overwrites works", BACKWARD, "        barrier_wait(added(item), freed<WORKS>(item));", "", FEW_BACK),
    ("no fence behind dS", PRODUCTS, "FA_DEVICE void wait_for_own_ds(int group)\n{\n    fence_async();\n", "FA_DEVICE void wait_for_own_ds(int group)\n{\n", WHOLE_BACK),
    ("dS overwritten while dQ of a step before is made", BACKWARD, "    if constexpr (!FIRST) {\n        wgmma_wait<1>();\n        hold(dq);\n    }\n    named_arrive(step_is_over(c.group, c.n), 128 * CONSUMERS);\n",
     "    named_arrive(step_is_over(c.group, c.n), 128 * CONSUMERS);\n    if constexpr (!FIRST) {\n        wgmma_wait<1>();\n        hold(dq);\n    }\n", ("softcap, a small one", "every_backward*")),
    ("no fence behind dS of which the next step makes dQ", BACKWARD, "    fence_async();\n    wgmma_wait<FIRST ? 0 : 1>();\n", "    wgmma_wait<FIRST ? 0 : 1>();\n", WHOLE_BACK),
    ("K given back before the last dQ is there", BACKWARD, "    wgmma_wait<0>();\n    hold(dq);\n    release(k_empty());\n", "    release(k_empty());\n    wgmma_wait<0>();\n    hold(dq);\n", MANY_BACK),
    ("no fence behind dQ", PRODUCTS, "            if (!ADDER_FENCES)\n                fence_async();\n            named_arrive(DQ_IS_THERE", "            named_arrive(DQ_IS_THERE", WHOLE_BACK),
    ("no fence before dQ is taken", BACKWARD, "            if (ADDER_FENCES)\n                fence_async();\n", "", WHOLE_BACK),
    ("no fence behind dK and dV", STAGED, "            shared_store(stage + hidden, make_uint4(0, 0, 0, 0));\n    }\n    fence_async();\n",
     "            shared_store(stage + hidden, make_uint4(0, 0, 0, 0));\n    }\n", WHOLE_BACK),
    ("S of a panel that is not there", LATENT, "            barrier_wait(full(at.slot, panel / HALF), at.phase);\n", "", LATENT_TWO),
    ("a slot given back before V is read", LATENT, "    wgmma_commit();\n    wgmma_wait<0>();\n    hold(o[0]);\n    hold(o[1]);\n", "    wgmma_commit();\n    hold(o[0]);\n    hold(o[1]);\n", LATENT_TWO),
    ("a slot given back before Q is out", LATENT, "        barrier_wait(full(at.slot, part), at.phase);\n    if (!has_boxes", "        ;\n    if (!has_boxes", ("prefill", "every_shape*")),
    ("no fence behind P", LATENT, "        fence_async(); /* of P of the tile before */\n", "", LATENT_TWO),
    ("no fence behind the last P", LATENT, "    release(q_empty());\n    fence_async();\n", "    release(q_empty());\n", LATENT_TWO),
    ("P read before it is there", LATENT, "            barrier_wait(told(at.slot), parity);\n            if (n > 0)", "            if (n > 0)", LATENT_TWO),
    ("P taken for another's", LATENT, "        before = at.slot;\n        go_on(at);\n        wgmma_wait<0>();", "        go_on(at);\n        before = at.slot;\n        wgmma_wait<0>();", LATENT_TWO),
    ("maxima that grow and O that does not follow", LATENT, "            if (n > 0)\n                follow(o, at.slot);\n", "", ("maxima that jump", "every_shape*")),
    ("Q overwritten before the last S", LATENT_PRODUCER, "            barrier_wait(q_empty(), items & 1 ^ 1);\n", "            ;\n", ("prefill", "every_shape*")),
    ("a block of a pair that ends before the other", LATENT, "        cluster_barrier(); /* the other block arrives", "        ; /* the other block arrives", LATENT_TWO),
    ("a pair's slot overwritten while the other block reads", LATENT_BLOCK, "PAIRS ? 8 : 4);", "4);", LATENT_TWO),
    ("values hear of Q too", LATENT, "    int      before = -1; /* the slot of the tile before */\n", "    int      before = at.slot;\n", ("pairs that stay", "every_shape*")),
    ("parts merged before they are there", LATENT, "            cluster_barrier();\n            const work &w", "            const work &w", ("sinks, parts", "every_shape*")),
    ("a producer of pages that overwrites a slot", LATENT_PRODUCER, "    if (part < 2)\n        barrier_wait(empty", "    if (part < 2 && producer() != 2)\n        barrier_wait(empty", LATENT_PAGES),
    ("a producer of pages that others do not wait for", LATENT_PRODUCER, "    barrier_expect(full(at.slot, part), bytes / PRODUCERS);\n",
     "    for (int n = 0; producer() == 0 && n < PRODUCERS; n++)\n        barrier_expect(full(at.slot, part), bytes / PRODUCERS);\n", LATENT_ONE_PIECE),
    ("a producer of pages that fetches nothing", LATENT_PRODUCER, "            if (row < FA_TILE_K)\n", "            if (row < FA_TILE_K && producer() != 1)\n", LATENT_PAGES),
    ("a producer of pages that announces all bytes", LATENT_PRODUCER, "bytes / PRODUCERS);\n}", "bytes);\n}", LATENT_PAGES),
    ("a page looked up too far on the right", LATENT_PRODUCER, "            go_left(args, from);\n", "", LATENT_PAGES),
    ("the second of a producer's pieces where the first was", LATENT_PRODUCER, "tile * FA_TILE_K + row));\n    } while", "tile * FA_TILE_K + piece_row(args)));\n    } while",
     ("pages of 8,", "every_shape*")),
    ("Q overwritten by a producer of pages", LATENT_PRODUCER, "            barrier_wait(q_empty(), items & 1 ^ 1);\n",
     "            if (producer() != 2)\n                barrier_wait(q_empty(), items & 1 ^ 1);\n", LATENT_PAGES),
    ("the planner overwrites items of a producer of pages", LATENT_PRODUCER, "        barrier_arrive(done(k));\n    }\n}\n\n#endif",
     "        for (int n = 0; producer() == 0 && n < PRODUCERS; n++)\n            barrier_arrive(done(k));\n    }\n}\n\n#endif", ("pages of 16, most", "every_shape*")),
    ("the planner of packed rows overwrites items", GROUPED, "        barrier_wait(done(k), freed(k));\n", "", FEW_MANY),
    ("a block of all parts that goes on to tiles that are nobody's", GROUPED, "(FA_FOLDS && FA_ONE_LAUNCH > 1 ? runs_of(args) : args.num_splits)", "args.num_splits", FEW_BITS),
    ("few queries' Q overwritten while it is read", FEW, "            barrier_wait(q_empty(), freed<1>(items++));\n", "            items++;\n", FEW_MANY),
    ("few queries' V given back before O is made", FEW, "    wgmma_wait<0>();\n    hold(c.o);\n    hold(c.p);\n    release(v_empty(c.tile));", "    release(v_empty(c.tile));\n    wgmma_wait<0>();\n    hold(c.o);\n    hold(c.p);",
     FEW_MANY),
    ("what was kept of the group before is folded again", FEW, "    c.kept[0] = !ends;\n", "    c.kept[0] = true;\n", FEW_BITS),
    ("groups that a block does not end", FEW, "tile * FA_TILE_K / w.part_keys % FA_FOLD_GROUP == 0);", "false);", FEW_BITS),
    ("groups that fold.cu does not end", FOLD, "GROUPS && s % GROUP == GROUP - 1", "GROUPS && s == AHEAD - 1", FEW_BITS),
    ("O that was kept, read from another thread's place", FEW, "place_of(args, GROUP), c.o, of_all", "place_of(args, GROUP) + CONSUMING, c.o, of_all", FEW_BITS),
    ("a part's far rows that are not computed again", FEW, "        take_far_rows(args, w, c, max, sum, far, tile);\n", "        ;\n", FEW_BITS),
    ("dS in P's place before the other's dV is made", WIDE, "    named_sync(P_IS_USED, 128 * CONSUMERS);\n", "    named_arrive(P_IS_USED, 128 * CONSUMERS);\n", WIDE_BACK),
    ("V overwritten while dK leaves from there", WIDE, "    if (asks) {\n        bulk_added_was_read();\n        barrier_arrive(v_empty());", "    if (asks) {\n        barrier_arrive(v_empty());",
     ("136 and 248 columns", "every_backward*")),
    ("dQ of a round that the second consumer has not", WIDE, "panels_of(GROUP, false) > 1", "true", WIDE_BACK),
    ("others told of dQ whose copies are under way", BACKWARD, "                tell<0>(args, open, ADDER);", "                tell<COPIES>(args, open, ADDER);", ("80 keys, window", "every_backward*")),
    ("dO of queries that see no key is not looked at", ROWS, "delta[n] = -0.0f;", "delta[n] = 0.0f;", ("136 and 112", "every_backward*")),
    ("delta without the NaN of a column for which O is 0", ROWS, "sum_of_lanes<LANES>(own[n].delta + own[n].nothing)", "sum_of_lanes<LANES>(own[n].delta)", ("", "nan_reaches*")),
    ("the third panel of dQ made of dS that is not there", PRODUCTS, "        if (step == 4)\n            named_sync(DS_IS_THERE, 128 * CONSUMERS);\n        wgmma_shared<0, 1>(third",
     "        if (step == 4)\n            named_arrive(DS_IS_THERE, 128 * CONSUMERS);\n        wgmma_shared<0, 1>(third", THIRD_BACK),
    ("a half of the third panel where the other's is", PRODUCTS, "ds + group * (FA_TILE_Q * 64), 0)", "ds, 0)", THIRD_BACK),
    ("the last panel of dK beside the first", PRODUCTS, "        int at = panel % SLOT_PANELS;\n", "        int at = panel < SLOT_PANELS ? panel : 1;\n", THIRD_BACK),
    ("shares of a tile of keys stored in one place", BLOCK, "w.stored_head = w.kv_head * shares + share;", "w.stored_head = w.kv_head * shares;", SHARED_BACK),
    ("each share with the first one's heads", BLOCK, "w.first_head += share / parts * w.num_heads;", "w.first_head += 0;", SHARED_BACK),
    ("parts of queries that leave some out", BLOCK, "begin + count * (part + 1) / (int)parts}", "begin + count * (part + 1) / (int)parts - (part == 0)}", PARTS_BACK),
    ("parts of queries that overlap", BLOCK, "{begin + count * part / (int)parts, begin", "{begin + (part > 0 ? count * part / (int)parts - 1 : 0), begin", PARTS_BACK),
    ("the last share is not added", CONVERT, "for (int share = 0; share < shares; share++) {", "for (int share = 0; share + 1 < shares; share++) {", SHARED_BACK),
    ("rows of keys whose shares nobody adds", CONVERT, "token < first + FA_SHARED_ROWS;", "token < first + FA_SHARED_ROWS / 2;", PARTS_BACK),
    ("one head's bias for all", BIAS, "args.bias.stride[1] ? head : 0", "0", BIASED),
    ("a bias overwritten before it is read", FORWARD, "        barrier_wait(bias_empty(n), freed<BIAS_STAGES>(n));\n", "", ("bias, float32, causal", "every_shape*")),
    ("nobody waits for the bias", SCORES, "    barrier_wait(bias_full(tile), filled<BIAS_STAGES>(tile));\n", "", BIASED),
    ("a bias that is passed by and not given back", FORWARD, "        release(bias_empty(n));\n", "", BIASED),
    ("far rows without their bias", FAR, "    if (FA_HAS_BIAS)\n        score +=", "    if (false)\n        score +=", ODD_VALUES),
    ("the backward's bias overwritten before it is read", BACKWARD, "        barrier_wait(bias_empty(), freed<1>(n));\n", "", BIASED_BACK),
    ("nobody waits for the backward's bias", PRODUCTS, "        barrier_wait(bias_full(), filled<1>(c.n));\n", "        ;\n", BIASED_BACK),
    ("nobody waits for the wide backward's bias", WIDE, "        barrier_wait(bias_full(), filled<1>(c.n));\n", "        ;\n", ("bias, 192 and 104", "every_backward*")),
    ("the bias behind a sequence's last query", PRODUCTS, "fminf(bias * FA_LOG2E, 3e38f)", "bias * FA_LOG2E", ("bias, -inf, causal", "every_backward*")),
    ("dS overwritten before dbias has it", DBIAS, "        barrier_wait(ds_passed(n), freed<DS_STAGES>(n));\n", "        ;\n", GRADIENTS),
    ("dS passed to dbias before it is there", DBIAS, "            barrier_wait(ds_there(n), filled<DS_STAGES>(n));\n", "", GRADIENT),
    ("dK on its way out where dbias has not been", BACKWARD, "    wait_for_passed_ds(c.n);\n    if (args.apart_dv >= 0)", "    if (args.apart_dv >= 0)", GRADIENTS),
    ("a work given away while dbias asks for it", DBIAS, "        __syncwarp();\n        release(added(item));\n", "", GRADIENT),
    ("dS given back before TMA has dbias of it", DBIAS, "    bulk_added_was_read();\n", "", GRADIENT_OF_EACH),
    ("dbias that nobody sees left as it was", ROWS, "i2 >= s.seqlen_q || j < seen.first || j > seen.last", "false", GRADIENT_OF_EACH),
    ("deterministic dbias of one term", ROWS, "b < terms[0]", "b < 1", GRADIENT),
    ("a bias that is -inf for all keys", NUMBERS, "lse == -infinity() ? infinity() : ", "", ("bias, -inf, groups", "every_backward*")),
    ("float32: K overwritten before it is read", F32, "            barrier_wait(k_empty(n), freed<K_STAGES>(n));\n", "", WHOLE),
    ("float32: V overwritten before it is read", F32, "            barrier_wait(v_empty(n), freed<V_STAGES>(n));\n", "", WHOLE),
    ("float32: Q overwritten before it is read", F32, "        barrier_wait(q_empty(), freed<1>(item));\n", "", MANY),
    ("float32: a work overwritten before its rows are out", F32, "        barrier_wait(work_empty(item), freed<WORKS>(item));\n", "", MANY),
    ("float32: nobody waits for V", F32, "    await_turn(c.group);\n    barrier_wait(v_full(c.tile), filled<V_STAGES>(c.tile));\n    float v_unit", "    await_turn(c.group);\n    float v_unit", WHOLE),
    ("float32: V given back while it is multiplied", F32, "        if (NEXT && last)\n            wgmma_wait<1>();\n", "        if (NEXT && last)\n            wgmma_wait<2>();\n", ("40 columns", "every_shape*")),
    ("float32: another's exponent of V", F32, "float v_unit = v_note(c.tile)[0];", "float v_unit = k_note(c.tile)[0];", ("", "rows_of_all*")),
    ("float32: rows whose numbers are lost", PLANES, "> APART); }", "> 1000); }", ("", "hidden_keys*")),
    ("float32: a lost tile of a backward that nobody hears of", PLANES, "        *args.lost = 1;\n", "        ;\n", ("", "gradients_of_all*")),
    ("float32: dS overwritten before it is read", F32_BACK, "    consumer_barrier(group); /* and all warps' products with dS of the step before are over */\n", "", WHOLE_BACK),
    ("float32: dS multiplied before it is there", F32_NARROW, "    store_ds(ds_tile(c.group), ds);\n    consumer_barrier(c.group);\n", "    store_ds(ds_tile(c.group), ds);\n", WHOLE_BACK),
    ("float32: Q given back before dK", F32_NARROW, "    add_dk(c, dk_unit);\n    release(q_empty(c.n));\n", "    release(q_empty(c.n));\n    add_dk(c, dk_unit);\n", WHOLE_BACK),
    ("float32: P that the other consumer has not written", F32_WIDE, "    named_sync(P_IS_THERE, 256); /*", "    named_arrive(P_IS_THERE, 256); /*", WIDE_BACK),
    ("float32: dS that the other consumer has not written", F32_WIDE, "    named_sync(DS_IS_THERE, 256);\n", "    named_arrive(DS_IS_THERE, 256);\n", WIDE_BACK),
    ("float32: shares of a key head stored over each other", F32_BACK, "    if constexpr (FA_HAS_KV_ACCUM) {", "    if constexpr (false) {", SHARED_BACK),
    ("float32: a NaN of LSE's -inf", PLANES, "(sees ? x : infinity())", "x", ("bias, -inf, groups", "every_backward*")),
    ("a block's first tile dealt to another too", BLOCK, " + (begins_by_itself(args) ? gridDim.x : 0)", "", ("tails", "every_backward*")),
    ("short: tiles overwritten before they are read", SHORT_BLOCK, "        step &s = step_at(n);\n        barrier_wait(empty(n), freed<STAGES>(n));\n", "        step &s = step_at(n);\n", SHORT_MANY),
    ("short: LSE overwritten before it is read", SHORT_BLOCK, "        barrier_wait(empty(n), freed<STAGES>(n));\n        for (int i = 0; i < EACH; i++)\n", "        for (int i = 0; i < EACH; i++)\n", SHORT_MANY),
    ("short: the other consumer's delta that is not there", SHORT, "named_sync(DELTA_IS_THERE, THREADS);", "named_arrive(DELTA_IS_THERE, THREADS);", SHORT_MANY),
    ("short: the other consumer's dS that is not there", SHORT, "named_sync(DS_IS_THERE, THREADS);", "named_arrive(DS_IS_THERE, THREADS);", SHORT_MANY),
    ("short: dS overwritten before the other has dQ of it", SHORT, "                    named_sync(DS_IS_FREE, THREADS);\n", "                    named_arrive(DS_IS_FREE, THREADS);\n", SHORT_MANY),
    ("short: dS of two passes in one place", SHORT_BLOCK, "DS_BUFFERS = LARGE ? 2 : 1", "DS_BUFFERS = 1", SHORT_LARGE),
    ("short: a stage given back while gradients leave from it", SHORT, "                        bulk_added_was_read();\n                        if (STAGES > 1)", "                        if (STAGES > 1)", SHORT_MANY),
    ("short: dK overwritten before it has left", SHORT, "                if (asks)\n                    bulk_added_was_read();\n                named_sync(OWN + group, 128);\n", "                named_sync(OWN + group, 128);\n", SHORT_LARGE),
    ("short: keys that nobody has", SHORT, "                clear_hidden_keys(ds, first_key, keys);\n", "", ("short, one key, far", "every_short_backward*")),
    ("short: keys that no query is there for", SHORT, "w.seq.seqlen_q > 0 ? w.seq.seqlen_k : 0;", "w.seq.seqlen_k;", ("short, used lengths, none", "every_short_backward*")),
    ("short: passes that see nothing of some keys", SHORT_BLOCK, "fa_min_int(first_query + PASS_Q, w.seq.seqlen_q)", "fa_min_int(first_query + 1, w.seq.seqlen_q)", ("short, 250 and 140", "every_short_backward*")),
    ("short: NaN that nobody looks for", SHORT, "                        look_for_nonfinite(n);\n", "                        ;\n", SHORT_NAN),
    ("short: dO's NaN lost", SHORT, "                    mark_keys(args, w, keys);\n", "", SHORT_NAN),
    ("short forward: Q overwritten while O leaves from there", SHORT_FORWARD, "        bulk_added_was_read();\n        barrier_arrive(", "        barrier_arrive(", SHORT_FORWARD_MANY),
    ("short forward: Q overwritten before it is read", SHORT_FORWARD, "        await_empty(n, Q_EMPTY);\n        await_empty(n, V_EMPTY)", "        await_empty(n, V_EMPTY)", SHORT_FORWARD_HALF),
    ("short forward: V overwritten before it is read", SHORT_FORWARD, "        await_empty(n, V_EMPTY); /* so", "        /* so", SHORT_FORWARD_HALF),
    ("short forward: Q of the last head is not given back", SHORT_FORWARD, "    if (before != ~0u && asks) /* a", "    if (before == ~0u && asks) /* a", SHORT_FORWARD_HALF),
    ("short forward: a phase of another consumer's head", SHORT_FORWARD, "PASSES >= CONSUMERS ? LEAST : (LEAST + TURN - 1) / TURN * TURN", "LEAST", SHORT_FORWARD_DENSE),
    ("short forward: K overwritten before it is read", SHORT_FORWARD, "        await_empty(n, K_EMPTY);\n", "", SHORT_FORWARD_HALF),
    ("short forward: V that is not there", SHORT_FORWARD, "    } else\n        await_full(n, V_FULL);\n", "    }\n", SHORT_FORWARD_MANY),
    ("short forward: works of two heads in one place", SHORT_FORWARD, "WORKS = Q_STAGES + PRODUCERS", "WORKS = 1", SHORT_FORWARD_HALF),
    ("short forward: O of the first keys as it was", SHORT_FORWARD, "        scale_output(r.o, alpha);\n", "", SHORT_FORWARD_LARGE),
    ("short forward: keys that nobody has", SHORT_FORWARD, "first_key + CHUNK > clean.end", "first_key + CHUNK > clean.end + 63", ("short, tails", "every_short_forward*")),
    ("short forward: keys before a window", SHORT_FORWARD, "if (first_key < clean.begin || ", "if (", ("short, window", "every_short_forward*")),
    ("short forward: chunks of keys before a window", SHORT_FORWARD, "(from + chunk) * (CHUNK * 128), !FRESH", "chunk * (CHUNK * 128), !FRESH", ("short, 230, window", "every_short_forward*")),
    ("short forward: NaN that nobody looks for", SHORT_FORWARD, "            w.spoilt = 1;\n", "            ;\n", ODD_VALUES),
    ("few keys: more registers than a block has", SHORT_FORWARD, "REGISTERS = CONSUMERS == 3 ? 160 : 112;\nstatic_assert(", "REGISTERS = CONSUMERS == 3 ? 160 : 120;\nstatic_assert(true || ", FEW_KEYS),
    ("few keys: each tile has the first's queries", SHORT_FORWARD, "s.seqlen_q - (MANY ? w.first_row : 0)", "s.seqlen_q", FEW_KEYS),
    ("few keys: each tile is stored as the first", SHORT_FORWARD, "(MANY ? same_for_all(w.first_row) : 0) + number", "number", FEW_KEYS),
    ("few keys: the last eight of a chunk that is none of 64", SHORT_FORWARD, "    for (int n = 0; n < CHUNK / 4; n++)\n        p[n / 4]", "    for (int n = 0; n < CHUNK / 4 - 2; n++)\n        p[n / 4]", FEW_KEYS),
    ("few keys: each tile's gradients are of the first's queries", SHORT_BLOCK, "int             left = MANY ? fa_max_int(q.seqlen_q - s.first_q, 0) : q.seqlen_q;", "int             left = q.seqlen_q;", FEW_KEYS_BACK),
    ("few keys: LSE of the first tile's queries", SHORT_BLOCK, "(s.seq.q_row + first_query_of(s))", "s.seq.q_row", FEW_KEYS_BACK),
    ("few keys: dQ of each tile stored as the first's", SHORT, "first_query_of(w) + first_query(pass, group));", "first_query(pass, group));", FEW_KEYS_BACK),
    ("few keys: shares that begin with a head", SHORT_BLOCK, "none ? s.seq.rows_q : begin % tiles * ROWS;", "none ? s.seq.rows_q : 0;", FEW_KEYS_BACK),
    ("few keys: shares of a key head stored over each other", SHORT, "args.group_blocks + w.share)", "args.group_blocks)", FEW_KEYS_BACK),
    ("parts: each up to the last key", WORK, "all.end   = fa_min_int(all.end, (w.part + 1) * keys);", "", PARTS),
    ("parts: stored over each other", RARE, "row_of_part(args, w.part, of.head,", "row_of_part(args, 0, of.head,", PARTS),
    ("parts: a sink in each", RARE, "if (SPLIT || !args.sinks.data)", "if (!args.sinks.data)", ("parts, causal, sinks", "every_shape*")),
    ("parts: rows computed again stored as O", RARE, "return {base_of_o(args), offset", "return {(char *)args.o.data, offset", ("parts, far logits", "every_shape*")),
    ("parts: dealt as one", WORK, "place_of_dealt(tiles, heads_of_parts(args),", "place_of_dealt(tiles, args.heads_q,", ("parts, varlen", "every_shape*")),
    ("walked parts: one goes on with the sums of the one before", FORWARD, "    if (BEGINS)\n        c.rows = no_rows();\n", "", WALKS),
    ("walked parts: O goes on", WALKED, "c.fresh = c.has_kept = true;", "c.has_kept = true;", WALKS),
    ("walked parts: what was kept is forgotten", WALKED, "    if (c.has_kept)\n", "    if (false)\n", WALKS),
    ("walked parts: each a tile longer", WALKED, "part_tiles_of(w) + 1; }", "part_tiles_of(w) + 2; }", WALKS),
    ("walked parts: V that spoilt one spoils the first", INSPECT, "1 << tile / w.part_tiles", "1", WALKS),
    ("walked parts: V looked at when its part may have ended", INSPECT, "    if constexpr (WHOLE) /* a part does not wait until all of the item has been looked at */\n        look();\n", "", WALKS),
    ("walked parts: far rows with all keys", WALKED, "{fa_max_int(w.keys.begin, part * keys), fa_min_int(w.keys.end, (part + 1) * keys)}", "w.keys", WALKS),
    ("walked parts: far rows keep their sums", WALKED, "        max[h] = stats.x;\n", "", WALKS),
    ("folded: a warp's next row", FOLD, "(PLACES - 1) * apart + FA_HEAD_DIM_V", "(PLACES - 1) * apart", WALKS),
    ("folded: a row's sums of its neighbour", FOLD, "of_results[row * PLACES + i].sum", "of_results[i].sum", WALKS),
    ("folded: a maximum that knows its own result already", FOLD, "return place >= STEP ? below : before;", "return with_own;", WALKS),
    ("folded: 33 results, of which the last forgets the others", FOLD, "place % SPAN, GROUPS ? -infinity() : max)", "place % SPAN, -infinity())", WALKS),
    ("folded: a part that saw nothing", FOLD, "nothing = __ballot_sync", "nothing = 0 & __ballot_sync", FEW_PARTS),
    ("folded: a group's maximum of those before", FOLD, "fmaxf(maximum_so_far<GROUP, PLACES>(of_group, place), max)", "maximum_so_far<GROUP, PLACES>(of_group, place)", FEW_PARTS),
    ("folded: a row of NaN that has seen nothing", FOLDED, "!(sum == 0.0f) ? 0.0f : max", "false ? 0.0f : max", NAN_QUERY),
    ("folded: a row computed again that is NaN", FOLDED, "lse == lse ? make_float2(lse * FA_LOG2E, 1.0f) : make_float2(0.0f, lse)", "make_float2(lse * FA_LOG2E, 1.0f)", WALKS),
    ("two kinds: long ones in both calls", MASK, "        if (!has_length(args, s.rows_q))\n            s.rows_q = 0;\n", "", TWO_KINDS),
    ("two kinds: rows of the others merged too", OWNER, "        if (row >= s.q_row + s.rows_q)\n            return false;\n", "", TWO_KINDS),
    ("two kinds: all sequences' rows in one place", PART_ROWS, "(fa_i64)b * args.few_queries + i", "(fa_i64)i", TWO_KINDS),
    ("short forward: inspectors a phase behind", SHORT_FORWARD, "        await_full(n, V_FULL);\n        if (w.tiles", "        await_full(n, K_FULL);\n        if (w.tiles", SHORT_FORWARD_HALF),
    ("groups: a mask by rows in place of queries", SCORES, "query_of(args, w.first_row + 64 * group", "(w.first_row + 64 * group", GROUPS),
    ("groups: all rows are the first head's", WORK, "w.head + row - (i << log2_of_group(args))", "w.head", GROUPS),
    ("groups: one sink for all heads", RESULT, "sink_log2_of(args, of.head)", "sink_log2_of(args, w.head)", GROUPS),
    ("groups: Q from as many queries on as there are rows", FORWARD, "w.seq.q_row + query_of(args, w.first_row), w.head", "w.seq.q_row + w.first_row, w.head", GROUPS),
    ("groups: the last query of a tile sees what the one before sees", WORK, "query_of(args, end - 1) + 1", "query_of(args, end - 1)", GROUPS),
    ("groups: heads of their own", WORK, "GROUPED ? args.heads_k : args.heads_q;", "args.heads_q;", GROUPS),
    ("groups: packed tiles numbered by queries", WORK, "place_of_queries(args, w.first_row, rows_of_query(args))", "place_of_queries(args, w.first_row)", GROUPS_VARLEN),
    ("groups: as many rows as queries", WORK, "(w.seq.rows_q * rows_of_query(args))", "w.seq.rows_q", GROUPS_VARLEN),
    ("groups: rows computed again by rows", RARE, "far_row<COLS>(args, w, of.head, of.i,", "far_row<COLS>(args, w, w.head, of.i,", ("groups, far logits", "every_shape*")),
    ("a block's warps that fold from the left", FOLD, "(last - warp) * FA_FOLD_GROUP", "(last - (FA_WARPS - 1 - warp)) * FA_FOLD_GROUP", FEW_BITS),
    ("results of a block's warps from the time before", FOLD, "            shared_stats[warp] = make_float2(own.max, own.sum);\n        __syncthreads();", "            shared_stats[warp] = make_float2(own.max, own.sum);", FEW_BITS),
    ("four parts added in another order", MERGE, "(term[0] + term[2]) + (term[1] + term[3])", "term[0] + term[1] + term[2] + term[3]", ("four parts", "pieces*")),
    ("O of a part that is empty", MERGE, "            if (w.own[begin + n] != -infinity())\n#pragma unroll\n", "#pragma unroll\n", ("a ring's merge", "pieces*")),
    ("a merge's LSE written while others read it", MERGE, "    __syncwarp();\n    if (writes", "    if (writes", ("a ring's merge", "pieces*")),
    ("P before the values have read what lay there", LATENT, "    for (int part = 0; part < 2; part++)\n        barrier_wait(empty(to, part), values.phase ^ 1);\n", "", APART),
    ("V before it is there", LATENT, "            if (APART)\n                barrier_wait(full(at.slot, group), at.phase);\n", "", APART),
    ("K given back before S is there", LATENT, "        wgmma_wait<0>();\n        hold(s);\n        if (APART)\n            before = leave_keys(before, values);\n", "        if (APART)\n            before = leave_keys(before, values);\n        wgmma_wait<0>();\n        hold(s);\n", APART),
    ("V of the tile that K is of", LATENT_PRODUCER, "values, before, tile + 1, args.head_dim_v);\n                    go_on", "values, piece, tile + 1, args.head_dim_v);\n                    go_on", APART),
    ("longest tiles twice", GROUPED, "(k % 2 ? count - 1 - place : place)", "(k % 2 ? count - place : place)", APART_LONG),
    ("the other warps' sums before they are there", COLUMNS, "SUMS_AT + SUMS_BYTES);\n    team_barrier();\n", "SUMS_AT + SUMS_BYTES);\n", WIDE_CASES),
    ("P and dS before they are there", COLUMNS, "    }\n    team_barrier();\n    add_shared", "    }\n    add_shared", WIDE_CASES),
    ("half of the columns twice", COLUMNS, "2 * BLOCKS * team_member()", "2 * BLOCKS * (team_member() & 2)", WIDE_CASES),
    ("one warp's sums twice", COLUMNS, "sums_of(sums, team_member(), (team_member() + other) % TEAM)", "sums_of(sums, team_member(), (team_member() + (other | 1)) % TEAM)", WIDE_CASES),
    ("a piece behind a row's end", MERGE, "        if (first + p * apart < args.head_dim_v)\n            store_piece", "        store_piece", ("520", "pieces*")),
]


def run(test, emulator, folder, shapes):
    """What the test says with the kernels of `folder` in place of the library's own; None if it passes."""
    environment = dict(os.environ, LD_LIBRARY_PATH=emulator, XDG_CACHE_HOME=os.path.join(folder, "cache"), EMULATOR_TMA="1",
                       EMULATOR_MULTIPROCESSORS="4", FLASH_ATTN_KERNEL_DIR=folder)
    wide = shapes in (APART, APART_LONG)
    shapes, tests, *seed = shapes
    environment.update({"EMULATOR_SEED": seed[0]} if seed else {})
    changed = next(file for file in os.listdir(folder) if file != "cache")
    program = "test_cuda_prompts" if (shapes, tests) in (WALKS, NAN_QUERY) else PROGRAMS.get(changed)
    program = os.path.join(os.path.dirname(test), program) if program else test
    words = [tests, "--group", shapes] if changed == COLUMNS else ["--shapes", shapes, tests]
    if wide:
        program, words = os.path.join(os.path.dirname(test), "test_cuda_latent"), ["--wide", *words]
    done = subprocess.run([program, *words], env=environment, capture_output=True, text=True, timeout=600)
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "FAILED " in line or "emulated GPU:" in line]
    return None if done.returncode == 0 else said[0] if said else f"status {done.returncode}"


def main(test, emulator, kernels, words=""):
    missed = 0
    for name, file, right, wrong, shapes in MISTAKES:
        if words not in name:
            continue
        with open(os.path.join(kernels, file)) as text:
            original = text.read()
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "cache"), 0o700)
            with open(os.path.join(folder, file), "w") as changed:
                changed.write(original.replace(right, wrong))
            found = run(test, emulator, folder, shapes) if right in original else None
        missed += found is None
        print(f"{'found ' if found else 'MISSED' if right in original else 'NO SUCH LINES'} {name}: {found or ''}", flush=True)
    print(f"{missed} mistakes not found")
    return 1 if missed else 0


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
