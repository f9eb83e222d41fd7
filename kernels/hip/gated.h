// The first half of a gated MLP for one token: silu(gate) * up in 8-bit form. The same bits
// as the products, silu_mul and quantize_rows one after the other.
#pragma once

#include "matmul.h"
#include "quantize.h"

static constexpr u32 GATED_ROWS = 2 * TILE_ROWS;  // of a block: a cell of the next matrix's inputs
static_assert(GATED_ROWS == CELL, "rows are whole cells");

// A block of MATVEC_THREADS threads computes GATED_ROWS rows.
template <class F>
DEVICE void gated(const void* x, const InputCell* input_scales, u32 columns, const u8* gate, const u8* up, u32 rows,
                  i8* codes, InputCell* scales) {
  constexpr u32 OUTPUTS = 2 * GATED_ROWS, TILES = OUTPUTS / TILE_ROWS;
  Product p{};
  p.x = x, p.scales = input_scales, p.columns = columns, p.tokens = 1;
  u32 cells = (columns + CELL - 1) / CELL, last_tile = (rows + TILE_ROWS - 1) / TILE_ROWS - 1;
  const u8* tile[TILES];  // two of gate, two of up
  UNROLL(TILES)
  for (u32 t = 0; t < TILES; t++) {
    tile[t] = (t < 2 ? gate : up) + smaller(block_index_x() * 2 + t % 2, last_tile) * tile_bytes<F>(cells);
  }
  u32 token[1] = {0};
  SHARED_ARRAY(float, part, SLICES * OUTPUTS);
  SHARED_ARRAY(float, product, OUTPUTS);
  sum_slices<F, 1, TILES>(p, tile, token, part);
  block_barrier();
  u32 thread = thread_index();
  if (thread < OUTPUTS) product[thread] = add_slices(part, OUTPUTS, thread);
  block_barrier();
  if (thread >= WAVE) return;
  if (thread < GATED_ROWS) product[thread] = silu(product[thread]) * product[GATED_ROWS + thread];
  wave_barrier();
  // Eight lanes write the cell; the others take part in what they exchange.
  u32 quad = thread % (CELL / 4);
  f32x4 values{{product[quad * 4], product[quad * 4 + 1], product[quad * 4 + 2], product[quad * 4 + 3]}};
  quantize_quad(values, codes, scales, block_index_x() * (CELL / 4) + quad, thread < CELL / 4);
}

#define GATED_KERNEL(name, Format)                                                                        \
  KERNEL(name, MATVEC_THREADS, const void* x, const InputCell* input_scales, u32 columns, const u8* gate, \
         const u8* up, u32 rows, i8* codes, InputCell* scales) {                                          \
    gated<Format>(x, input_scales, columns, gate, up, rows, codes, scales);                               \
  }
