// The facts of a step that live on the device: RowMeta and SpanMeta of worker-gpu/src/launch.
#pragma once

#include "prelude.h"

struct RowMeta {
  u32 position;  // in its sequence
  u32 table;     // where the sequence's block numbers start
  u32 span;
};

struct SpanMeta {
  u32 first_row;
  u32 tokens;
  u32 slot;
  u32 reset;  // 1: start from the empty state
};
