/* Where rows of a tensor lie. */
#ifndef FA_ROWS_CUH
#define FA_ROWS_CUH

#include "numbers.cuh"

/* A plain strided source: row r starts at first + r * stride elements. */
struct rows_of {
    const fa_element *first;
    fa_i64            stride;

    static constexpr bool PLAIN = true;
    __device__ __forceinline__ const fa_element *row(int r) const { return first + r * stride; }
};

/* Keys through a page table: row r of a tile is key `key + r`. A page id or key out of bounds reads row 0 of page 0,
 * which the caller has declared invalid. */
struct rows_of_pages {
    const fa_element *data; /* page 0, row 0, this head */
    const int        *pages;
    fa_i64            page_stride, stride;
    int               key, page_size, num_pages, num_keys;
    int               page = key / page_size, place = key % page_size; /* of row 0 */
    float             share = 1.0f / page_size;

    static constexpr bool PLAIN = false;
    static constexpr int  MOST_ROWS = 128; /* so few pass one page's end at most, or are counted rightly in float */
    __device__ __forceinline__ const fa_element *row(int r) const
    {
        int j = key + r;
        if ((unsigned)j >= (unsigned)num_keys)
            return data;
        int further = page_size >= MOST_ROWS ? place + r >= page_size : (int)((place + r + 0.5f) * share);
        int found   = pages[page + further];
        return (unsigned)found < (unsigned)num_pages ? data + found * page_stride + (place + r - further * page_size) * stride : data;
    }
};

#endif
