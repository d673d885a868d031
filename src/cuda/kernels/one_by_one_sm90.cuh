/*
 * forward_sm90.cu where a step's products and exponentials go one after the other: two blocks a multiprocessor, whose four consumers fill each other's waits, or three
 * consumers, which in 16 bits take turns at the exponentials. Of 64 columns these start the next step's scores behind P V, in the registers that P has left (decision 0059).
 */
#ifndef FA_ONE_BY_ONE_SM90_CUH
#define FA_ONE_BY_ONE_SM90_CUH

/* Clean steps by maxima of before; not between turns, where the branch behind the exponentials costs 3%. */
constexpr bool IN_TURNS = ONE_BY_ONE && TAKES_TURNS, BY_SUMS = !IN_TURNS && !RISES, SCORES_AHEAD = IN_TURNS && FA_HEAD_DIM_V <= 64;

/*
 * A turn for exponentials. ptxas knows that nothing they need is in memory, and moves them over the barriers on both sides until no turn is left. So those in it take `unit`
 * from here, which hangs on a load behind the barrier, and the number of the barrier at which the turn is passed on hangs on their sum, which is no such NaN. (ptxas sees
 * through a test for numbers below 0, too.)
 */
FA_DEVICE float await_exponentials(int group, const work &w, float unit)
{
    await_turn(group);
    return shared_load_behind(&w.tiles) < 0 ? 0.0f : unit;
}
FA_DEVICE void pass_exponentials(int group, float sum) { pass_turn(group, __float_as_int(sum) == 0x7FC00001); }

/* P of a clean step by its rows' maxima of before (softmax_ahead). bfloat16 is packed before anybody asks whether a row has moved; float16 and FP8 have no room for what moves far. */
FA_DEVICE void whole_softmax_ahead(const fa_args &args, const work &w, consumer &c, float (&s)[S_COUNT], int n)
{
    constexpr bool PACKS_FIRST = FA_DTYPE == FA_BF16;
    float          alpha[2], sum[2], most[2], (&bound)[2] = FP8 ? most : sum, unit = unit_of(args, w);
    exponentials_ahead(s, c.rows, sum, bound, unit);
    if constexpr (PACKS_FIRST) {
        drop(args, w, s, c.group, n);
        pack_p(c.p, s);
    }
    if (move_rows_by_sums(sum, bound, c.rows, alpha, unit)) {
        if constexpr (PACKS_FIRST)
            scale_packed(c.p, alpha);
        else
            scale_scores(s, alpha);
        scale_output(c.o, alpha);
    }
    if constexpr (!PACKS_FIRST) {
        drop(args, w, s, c.group, n);
        pack_p(c.p, s);
    }
}

/* P of a step whose scores are there, with its turn. */
template <bool MASKED> FA_DEVICE void whole_softmax(const fa_args &args, const work &w, consumer &c, float (&s)[S_COUNT], int n, const seen_words &words)
{
    finish_scores(args, w, s, c.group, n, MASKED, c.tile, words);
    if constexpr (BY_SUMS && !MASKED)
        whole_softmax_ahead(args, w, c, s, n);
    else {
        float alpha[2], unit = unit_of(args, w);
        if (move_rows(s, c.rows, alpha, unit)) /* O is scaled here, for without a branch behind the exponentials sums and packing stand between them */
            scale_output(c.o, alpha);
        if constexpr (IN_TURNS) {
            float later = await_exponentials(c.group, w, unit);
            pass_exponentials(c.group, exponentials_in_turn<MASKED || FA_HAS_BIAS>(s, c.rows, unit, later));
        } else {
            shift_scores<MASKED || FA_HAS_BIAS>(s, c.rows, unit);
            hold(s);
            keep_behind(c.tile == ~0u);
            hold(s);
            exponentials(s, c.rows);
        }
        drop(args, w, s, c.group, n);
        pack_p(c.p, s);
    }
    hold(c.p);
}

/* O += P V; O is nothing at first, in 16 bits zero. */
FA_DEVICE void start_whole_output(const fa_args &args, const work &w, consumer &c, int n)
{
    if (FP8 && !c.fresh && n % KEPT_STEPS == 0)
        keep_output(c, unit_of(args, w));
    start_output(c.o, c.p, v_tile(c.tile), !FP8 || !c.fresh);
    c.fresh = false;
}

/* A step with nothing of its own under way beside it, but other consumers': scores, P, O. */
template <bool MASKED> FA_DEVICE void whole_step(const fa_args &args, const work &w, consumer &c, unsigned item, int n)
{
    float      s[S_COUNT];
    seen_words words = seen_of_step(args, w, c.group, n, MASKED);
    scores_alone(s, c, item, n + 1 == w.tiles);
    whole_softmax<MASKED>(args, w, c, s, n, words);
    wait_for_v(c.tile);
    start_whole_output(args, w, c, n);
    finish_output(c, c.tile);
    c.tile++;
}

/* The same where the scores have been started behind P V of the step before, if there was one: else they are there. NEXT: so are the next step's. */
template <bool MASKED, bool NEXT> FA_DEVICE void step_ahead(const fa_args &args, const work &w, consumer &c, float (&s)[S_COUNT], unsigned item, int n)
{
    seen_words words = seen_of_step(args, w, c.group, n, MASKED);
    wgmma_wait<0>(); /* without an if, or ptxas lets none of the products run on */
    hold(s);
    hold(c.o);
    hold(c.p);
    release(k_empty(c.tile));
    if (!c.fresh)
        release(v_empty(c.tile - 1));
    if (!NEXT)
        release(q_empty(item));
    whole_softmax<MASKED>(args, w, c, s, n, words);
    wait_for_v(c.tile);
    if (NEXT)
        wait_for_k(c.tile + 1);
    start_whole_output(args, w, c, n);
    if constexpr (NEXT)
        start_scores(s, q_tile(item) + c.group * Q_GROUP, k_tile(c.tile + 1));
    c.tile++;
}

/* Steps n and up of an item, of which some need no mask. */
FA_DEVICE void steps_ahead(const fa_args &args, const work &w, consumer &c, unsigned item, int n, fa_range clean)
{
    int   last = same_for_all(w.tiles) - 1;
    float s[S_COUNT];
    wait_for_k(c.tile);
    start_scores(s, q_tile(item) + c.group * Q_GROUP, k_tile(c.tile));
    wgmma_wait<0>(); /* here: else ptxas lets none of the products run on */
    hold(s);
    for (int end = fa_min_int(same_for_all(clean.begin), last); n < end; n++)
        step_ahead<true, true>(args, w, c, s, item, n);
    for (int end = fa_min_int(same_for_all(clean.end), last); n < end; n++)
        step_ahead<false, true>(args, w, c, s, item, n);
    for (; n < last; n++)
        step_ahead<true, true>(args, w, c, s, item, n);
    step_ahead<true, false>(args, w, c, s, item, n);
    finish_output(c, c.tile - 1);
}

/* As consume, where three or, with another block on the multiprocessor, four consumers hide each other's waits: a step needs few registers. */
FA_DEVICE void consume_one_by_one(const fa_args &args, int group)
{
    consumer c;
    begin_turns(c, group);
    for (unsigned item = 0;; item++) {
        const work &w = work_at(item);
        barrier_wait(q_full(item), filled<Q_STAGES>(item));
        int tiles = same_for_all(w.tiles), n = 0;
        if (tiles < 0)
            break;
        if (tiles == 0)
            release(q_empty(item));
        for (int end = same_for_all(tiles > 0 ? blind_steps(args, w, group) : 0); n < end; n++)
            blind_step(c);
        if (n == tiles && tiles > 0)
            release(q_empty(item));
        c.rows  = no_rows();
        c.fresh = true;
        c.has_kept = false;
#pragma unroll
        for (int i = 0; i < O_COUNT; i++)
            c.o[i] = 0.0f;
        fa_range clean = BY_SUMS ? steps_after_others(args, w, group) : clean_steps(args, w, group);
        if (BY_SUMS)
            clean.begin = fa_max_int(clean.begin, n + 1); /* the first one's rows have no maxima */
        if constexpr (SCORES_AHEAD) {
            if (n < tiles)
                steps_ahead(args, w, c, item, n, clean);
        } else {
            for (int end = fa_min_int(same_for_all(clean.begin), tiles); n < end; n++)
                whole_step<true>(args, w, c, item, n);
            int end = same_for_all(clean.end);
            if (BY_SUMS && n < end)
                lose_rows_without_maximum(c.rows);
            for (; n < end; n++)
                whole_step<false>(args, w, c, item, n);
            for (; n < tiles; n++)
                whole_step<true>(args, w, c, item, n);
        }
        if (FP8 && c.has_kept)
            add_kept(c, unit_of(args, w));
        far_rows far = store_result(args, w, c.o, c.rows, group);
        store_rare(args, w, far, group, item);
    }
}

#endif
